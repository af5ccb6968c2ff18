/* Compiled once per instruction set (isa.h). */
#include "simd.h"

#define EDGE_TYPE_FILE "elementwise_type.h"
#include "each_type.h"
#undef EDGE_TYPE_FILE

static void EDGE_FN(norm_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_norm_args *a = (const edge_norm_args *)opaque;
    for (int64_t row = begin; row < end; row++) {
        const int64_t start = row * a->width;
        if (a->is_bf16)
            EDGE_FN(norm_row_bf16)((const uint16_t *)a->in + start, (uint16_t *)a->out + start, a->weight, a->width, a->eps);
        else
            EDGE_FN(norm_row_f32)((const float *)a->in + start, (float *)a->out + start, a->weight, a->width, a->eps);
    }
}

static void EDGE_FN(rope_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_rope_args *a = (const edge_rope_args *)opaque;
    const int64_t half = a->rotary_dim / 2;
    for (int64_t token = begin; token < end; token++) {
        const float *cosine = a->angles + token * half, *sine = cosine + a->num_tokens * half;
        for (int32_t head = 0; head < a->num_heads + a->num_kv_heads; head++) {
            const int64_t start = token * a->row_stride + (int64_t)head * a->head_dim;
            const float *norm = head < a->num_heads ? a->query_norm : a->key_norm;
            if (a->is_bf16)
                EDGE_FN(rope_head_bf16)((uint16_t *)a->rows + start, cosine, sine, norm, half, a->head_dim, a->eps);
            else
                EDGE_FN(rope_head_f32)((float *)a->rows + start, cosine, sine, norm, half, a->head_dim, a->eps);
        }
    }
}

static void EDGE_FN(silu_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_silu_args *a = (const edge_silu_args *)opaque;
    for (int64_t row = begin; row < end; row++) {
        const int64_t gate = 2 * row * a->width, out = row * a->width;
        if (a->is_bf16)
            EDGE_FN(silu_row_bf16)((const uint16_t *)a->gate_up + gate, (uint16_t *)a->out + out, a->width);
        else
            EDGE_FN(silu_row_f32)((const float *)a->gate_up + gate, (float *)a->out + out, a->width);
    }
}

static void EDGE_FN(gelu_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_gelu_args *a = (const edge_gelu_args *)opaque;
    for (int64_t row = begin; row < end; row++) {
        const int64_t gate = row * a->gate_stride, up = row * a->up_stride, out = row * a->width;
        if (a->is_bf16)
            EDGE_FN(gelu_row_bf16)((const uint16_t *)a->gate + gate, (const uint16_t *)a->up + up, (uint16_t *)a->out + out,
                                   a->width);
        else
            EDGE_FN(gelu_row_f32)((const float *)a->gate + gate, (const float *)a->up + up, (float *)a->out + out,
                                  a->width);
    }
}
