/* Compiles EDGE_TYPE_FILE once for each element type of rows: EDGE_T, EDGE_T_NAME, EDGE_T_TO_FLOAT, EDGE_T_FROM_FLOAT. */
#define EDGE_T uint16_t
#define EDGE_T_NAME bf16
#define EDGE_T_TO_FLOAT(x) EDGE_FN(bf16_to_float)(x)
#define EDGE_T_FROM_FLOAT(x) EDGE_FN(float_to_bf16)(x)
#include EDGE_TYPE_FILE
#undef EDGE_T
#undef EDGE_T_NAME
#undef EDGE_T_TO_FLOAT
#undef EDGE_T_FROM_FLOAT

#define EDGE_T float
#define EDGE_T_NAME f32
#define EDGE_T_TO_FLOAT(x) (x)
#define EDGE_T_FROM_FLOAT(x) (x)
#include EDGE_TYPE_FILE
#undef EDGE_T
#undef EDGE_T_NAME
#undef EDGE_T_TO_FLOAT
#undef EDGE_T_FROM_FLOAT
