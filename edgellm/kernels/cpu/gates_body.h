/* Compiled once per instruction set (isa.h). */
#include "simd.h"

#define EDGE_T uint16_t
#define EDGE_T_NAME bf16
#define EDGE_T_TO_FLOAT(x) EDGE_FN(bf16_to_float)(x)
#define EDGE_T_FROM_FLOAT(x) EDGE_FN(float_to_bf16)(x)
#include "gates_type.h"
#undef EDGE_T
#undef EDGE_T_NAME
#undef EDGE_T_TO_FLOAT
#undef EDGE_T_FROM_FLOAT

#define EDGE_T float
#define EDGE_T_NAME f32
#define EDGE_T_TO_FLOAT(x) (x)
#define EDGE_T_FROM_FLOAT(x) (x)
#include "gates_type.h"
#undef EDGE_T
#undef EDGE_T_NAME
#undef EDGE_T_TO_FLOAT
#undef EDGE_T_FROM_FLOAT

static void EDGE_FN(gate_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_gate_args *a = (const edge_gate_args *)opaque;
    for (int64_t row = begin; row < end; row++) {
        if (a->x.is_bf16)
            EDGE_FN(gate_row_bf16)(a, row);
        else
            EDGE_FN(gate_row_f32)(a, row);
    }
}

static void EDGE_FN(delta_gate_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_delta_gates_args *a = (const edge_delta_gates_args *)opaque;
    for (int64_t row = begin; row < end; row++) {
        if (a->a.is_bf16)
            EDGE_FN(delta_gate_row_bf16)(a, row);
        else
            EDGE_FN(delta_gate_row_f32)(a, row);
    }
}
