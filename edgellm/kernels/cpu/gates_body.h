/* Compiled once per instruction set (isa.h). */
#include "simd.h"

#define EDGE_TYPE_FILE "gates_type.h"
#include "each_type.h"
#undef EDGE_TYPE_FILE

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
