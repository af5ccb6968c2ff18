/* Compiled once per instruction set (isa.h).
 *
 * The rows of a state do not meet: row p of S takes x[p] and gives out[p].  Which rows are taken together depends on
 * head_dim alone, so a row is added up the same way in every step.
 */
#include "recurrent_simd.h"

/* One token of one head, made ready. */
typedef struct {
    const float *b, *c; /* (state_dim), zeros up to whole vectors */
    float decay, dt;    /* decay as a factor */
    int64_t token;
} EDGE_FN(mamba_token);

static void EDGE_FN(mamba_ready)(const edge_mamba_args *a, EDGE_FN(mamba_token) *t, int32_t head, float *b, float *c,
                                 int64_t padded) {
    const int64_t offset = (int64_t)(head / (a->heads / a->groups)) * a->state_dim;
    EDGE_FN(read_row)(b, &a->b, t->token, offset, a->state_dim, padded);
    EDGE_FN(read_row)(c, &a->c, t->token, offset, a->state_dim, padded);
    t->b = b;
    t->c = c;
    t->dt = edge_float_at(&a->dt, t->token, head);
    t->decay = expf(t->dt * a->a[head]);
}

/* S = decay S + dx b; sum += S c */
EDGE_INLINE void EDGE_FN(mamba_cell)(EDGE_V *s, EDGE_V *sum, float decay, const EDGE_V *dx, const EDGE_V *b,
                                     const EDGE_V *c) {
    *s *= decay;
    EDGE_FN(fma)(s, dx, b);
    EDGE_FN(fma)(sum, s, c);
}

/* One token over `rows` rows of state (a constant after inlining): out[r] = S[r] c. */
EDGE_INLINE void EDGE_FN(mamba_rows)(float *state, int64_t width, const EDGE_FN(mamba_token) *t, const float *dx,
                                     int rows, float *out) {
    EDGE_V sums[EDGE_MAMBA_TILE], scaled[EDGE_MAMBA_TILE], x, b, c;
    for (int r = 0; r < rows; r++) {
        sums[r] = (EDGE_V){0};
        EDGE_FN(splat)(&scaled[r], dx[r]);
    }
    int64_t n = 0;
    for (; n + EDGE_LANES <= width; n += EDGE_LANES) {
        EDGE_FN(load_f32)(&b, t->b + n);
        EDGE_FN(load_f32)(&c, t->c + n);
        for (int r = 0; r < rows; r++) {
            EDGE_FN(load_f32)(&x, state + r * width + n);
            EDGE_FN(mamba_cell)(&x, &sums[r], t->decay, &scaled[r], &b, &c);
            EDGE_FN(store_f32)(state + r * width + n, &x);
        }
    }
    if (n < width) {
        EDGE_FN(load_f32)(&b, t->b + n);
        EDGE_FN(load_f32)(&c, t->c + n);
        for (int r = 0; r < rows; r++) {
            EDGE_FN(load_part)(&x, state + r * width + n, width - n);
            EDGE_FN(mamba_cell)(&x, &sums[r], t->decay, &scaled[r], &b, &c);
            EDGE_FN(store_part)(state + r * width + n, &x, width - n);
        }
    }
    if (rows == 4)
        EDGE_FN(sum4)(sums, out);
    else
        for (int r = 0; r < rows; r++) out[r] = EDGE_FN(sum)(&sums[r]);
}

/* `num_tokens` tokens, made ready, over rows [row, row + rows) of one head of sequence i. */
EDGE_INLINE void EDGE_FN(mamba_tile)(const edge_mamba_args *a, int64_t i, int32_t head, int64_t row, int rows,
                                     const EDGE_FN(mamba_token) *tokens, int64_t num_tokens) {
    const edge_sequences *s = &a->sequences;
    const int64_t width = a->state_dim, offset = (int64_t)head * a->head_dim + row, place = offset * width;
    float *state = s->state + s->slots[i] * s->state_stride + place;
    float x[EDGE_MAMBA_TILE], dx[EDGE_MAMBA_TILE], out[EDGE_MAMBA_TILE];
    edge_prefetch(state + EDGE_MAMBA_AHEAD * width, (int64_t)sizeof(float) * rows * width);
    for (int64_t j = 0; j < num_tokens; j++) {
        const EDGE_FN(mamba_token) *t = tokens + j;
        EDGE_FN(read_row)(x, &a->x, t->token, offset, rows, rows);
        for (int r = 0; r < rows; r++) dx[r] = t->dt * x[r];
        EDGE_FN(mamba_rows)(state, width, t, dx, rows, out);
        for (int r = 0; r < rows; r++) out[r] += a->d[head] * x[r];
        EDGE_FN(write_row)(&a->out, t->token, offset, out, rows);
        float *kept = edge_checkpoint(s, i, t->token, place);
        if (kept != NULL) EDGE_FN(copy_past)(kept, state, rows * width);
    }
}

/* `num_tokens` tokens from `first` of one head of sequence i. */
static void EDGE_FN(mamba_block)(const edge_mamba_args *a, int64_t i, int32_t head, int64_t first, int64_t num_tokens,
                                 int64_t padded) {
    float b[EDGE_MAMBA_ROWS], c[EDGE_MAMBA_ROWS];
    EDGE_FN(mamba_token) tokens[EDGE_MAMBA_BLOCK];
    for (int64_t j = 0; j < num_tokens; j++) {
        tokens[j].token = first + j;
        EDGE_FN(mamba_ready)(a, tokens + j, head, b + j * padded, c + j * padded, padded);
    }
    int64_t row = 0;
    for (; row + EDGE_MAMBA_TILE <= a->head_dim; row += EDGE_MAMBA_TILE)
        EDGE_FN(mamba_tile)(a, i, head, row, EDGE_MAMBA_TILE, tokens, num_tokens);
    for (; row < a->head_dim; row++) EDGE_FN(mamba_tile)(a, i, head, row, 1, tokens, num_tokens);
}

/* Task = (sequence, head), all its tokens. */
static void EDGE_FN(mamba_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_mamba_args *a = (const edge_mamba_args *)opaque;
    const int64_t padded = (a->state_dim + EDGE_LANES - 1) / EDGE_LANES * EDGE_LANES;
    const int64_t fitting = EDGE_MAMBA_ROWS / padded;
    const int64_t block = fitting < EDGE_MAMBA_BLOCK ? fitting : EDGE_MAMBA_BLOCK;
    for (int64_t task = begin; task < end; task++) {
        const int64_t i = task / a->heads;
        const int64_t last = a->sequences.query_start[i + 1];
        for (int64_t first = a->sequences.query_start[i]; first < last; first += block)
            EDGE_FN(mamba_block)(a, i, (int32_t)(task % a->heads), first, last - first < block ? last - first : block,
                                 padded);
    }
    if (a->sequences.checkpoint != NULL) EDGE_FN(stores_end)();
}
