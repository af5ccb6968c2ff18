/* Compiled once per instruction set (isa.h). */
#include "simd.h"

/* Rows taken together: as many as accumulators fit the registers (32 with AVX-512, else 16). */
#define EDGE_ROW_BLOCK (EDGE_LANES == 16 ? 4 : 2)

#define EDGE_TYPE_FILE "skinny_linear_type.h"
#include "each_type.h"
#undef EDGE_TYPE_FILE

EDGE_INLINE void EDGE_FN(store_dot)(const edge_linear_args *a, int64_t row, int64_t column, float value) {
    const int64_t at = row * a->out_width + column;
    if (a->bias != NULL)
        value += a->is_bf16 ? EDGE_FN(bf16_to_float)(((const uint16_t *)a->bias)[column])
                            : ((const float *)a->bias)[column];
    if (a->is_bf16 && !a->out_f32) {
        uint16_t *out = (uint16_t *)a->out + at;
        *out = EDGE_FN(float_to_bf16)(a->accumulate ? EDGE_FN(bf16_to_float)(*out) + value : value);
    } else {
        float *out = (float *)a->out + at;
        *out = a->accumulate ? *out + value : value;
    }
}

/* Task = tile of EDGE_TILE_COLUMNS output columns, all rows. */
static void EDGE_FN(linear_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_linear_args *a = (const edge_linear_args *)opaque;
    float dots[EDGE_SKINNY_ROWS * EDGE_TILE_COLUMNS];
    for (int64_t tile = begin; tile < end; tile++) {
        const int64_t first = tile * EDGE_TILE_COLUMNS;
        const int64_t left = a->out_width - first, columns = left < EDGE_TILE_COLUMNS ? left : EDGE_TILE_COLUMNS;
        if (a->is_bf16)
            EDGE_FN(tile_dots_bf16)(a, first, columns, dots);
        else
            EDGE_FN(tile_dots_f32)(a, first, columns, dots);
        for (int64_t row = 0; row < a->num_rows; row++)
            for (int64_t c = 0; c < columns; c++)
                EDGE_FN(store_dot)(a, row, first + c, dots[row * EDGE_TILE_COLUMNS + c]);
    }
}
#undef EDGE_ROW_BLOCK
