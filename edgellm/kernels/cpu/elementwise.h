/* Row-wise operations of a decoder layer.  Rows are float32 or bfloat16; arithmetic is float32, rounded once. */
#ifndef EDGE_ELEMENTWISE_H
#define EDGE_ELEMENTWISE_H

#include <stdint.h>

typedef struct {
    const void *in;      /* (num_rows, width) */
    void *out;           /* (num_rows, width), may be `in` */
    const float *weight; /* (width) */
    int64_t num_rows;
    int64_t width;
    int32_t is_bf16;
    float eps;
} edge_norm_args;

/* out = in / rms(in) * weight */
void edge_rms_norm(const edge_norm_args *args, int num_threads);

typedef struct {
    void *rows;          /* (num_tokens, row_stride); a row starts with the query heads, then the key heads */
    const float *angles; /* (2, num_tokens, rotary_dim / 2): cosine, sine */
    const float *query_norm; /* (head_dim) or NULL: RMS norm of each head before the rotation */
    const float *key_norm;   /* (head_dim) or NULL */
    int64_t num_tokens;
    int64_t row_stride; /* elements */
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t rotary_dim; /* even, at most head_dim: leading elements of a head that turn */
    int32_t is_bf16;
    float eps;
} edge_rope_args;

/* Rotate (i, i + rotary_dim / 2) of every query and key head, in place. */
void edge_rope(const edge_rope_args *args, int num_threads);

typedef struct {
    const void *gate_up; /* (num_rows, 2 * width): gate, up */
    void *out;           /* (num_rows, width) */
    int64_t num_rows;
    int64_t width;
    int32_t is_bf16;
} edge_silu_args;

/* out = gate / (1 + exp(-gate)) * up */
void edge_silu_mul(const edge_silu_args *args, int num_threads);

typedef struct {
    const void *gate; /* row r at r * gate_stride, width elements */
    const void *up;   /* row r at r * up_stride */
    void *out;        /* (num_rows, width), may be `gate` or `up` */
    int64_t gate_stride; /* elements */
    int64_t up_stride;   /* elements */
    int64_t num_rows;
    int64_t width;
    int32_t is_bf16;
} edge_gelu_args;

/* out = gelu(gate) * up, with the tanh form of gelu: gate / (1 + exp(-2 u)), u = sqrt(2 / pi) (gate + 0.044715 gate^3) */
void edge_gelu_mul(const edge_gelu_args *args, int num_threads);

#endif
