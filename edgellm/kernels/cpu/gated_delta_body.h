/* Compiled once per instruction set (isa.h).
 *
 * The columns of a state do not meet: column c of S takes u[c] and gives out[c].  A column adds up over key_dim in
 * order whatever loop it is in, so the loops below agree to the last bit.
 */
#include "recurrent_simd.h"

#define EDGE_TILE (2 * EDGE_LANES) /* columns whose state is copied to the first-level cache for many tokens */

/* One token of one head, made ready. */
typedef struct {
    const float *q, *k; /* (key_dim), normalised, q scaled */
    float decay, beta;  /* decay as a factor */
    int64_t token;
} EDGE_FN(delta_token);

static float EDGE_FN(delta_factor)(const float *row, int32_t dim, int32_t l2norm) {
    if (!l2norm) return 1.0f;
    EDGE_V s = {0}, x;
    int32_t i = 0;
    for (; i + EDGE_LANES <= dim; i += EDGE_LANES) {
        EDGE_FN(load_f32)(&x, row + i);
        EDGE_FN(fma)(&s, &x, &x);
    }
    EDGE_FN(load_part)(&x, row + i, dim - i);
    EDGE_FN(fma)(&s, &x, &x);
    return 1.0f / sqrtf(EDGE_FN(sum)(&s) + EDGE_L2_EPS);
}

static void EDGE_FN(delta_ready)(const edge_delta_args *a, EDGE_FN(delta_token) *t, int32_t head, float *q, float *k) {
    const int32_t dim = a->key_dim;
    const int64_t offset = (int64_t)(head / (a->heads / a->key_heads)) * dim;
    EDGE_FN(read_row)(q, &a->q, t->token, offset, dim, dim);
    EDGE_FN(read_row)(k, &a->k, t->token, offset, dim, dim);
    const float of_q = EDGE_FN(delta_factor)(q, dim, a->l2norm) * a->scale;
    const float of_k = EDGE_FN(delta_factor)(k, dim, a->l2norm);
    for (int32_t i = 0; i < dim; i++) q[i] *= of_q;
    for (int32_t i = 0; i < dim; i++) k[i] *= of_k;
    t->q = q;
    t->k = k;
    t->decay = expf(edge_float_at(&a->decay, t->token, head));
    t->beta = edge_float_at(&a->beta, t->token, head);
}

/* u = beta * (v - decay * dot), dot of the state before its decay */
EDGE_INLINE void EDGE_FN(delta_update)(EDGE_V *u, const EDGE_V *v, const EDGE_V *dot, float decay, float beta) {
    EDGE_V factor;
    EDGE_FN(splat)(&factor, -decay);
    *u = *v;
    EDGE_FN(fma)(u, &factor, dot);
    *u *= beta;
}

/* S = decay * S + k u; out += S q */
EDGE_INLINE void EDGE_FN(delta_cell)(EDGE_V *s, EDGE_V *out, float decay, const EDGE_V *k, const EDGE_V *u,
                                     const EDGE_V *q) {
    *s *= decay;
    EDGE_FN(fma)(s, k, u);
    EDGE_FN(fma)(out, s, q);
}

/* ---- many tokens: a tile of columns in contiguous memory ---- */

/* One row of a tile: `count` of its columns, zeros behind them. */
EDGE_INLINE void EDGE_FN(tile_row)(EDGE_V *low, EDGE_V *high, const float *state, int64_t count) {
    if (count == EDGE_TILE) {
        EDGE_FN(load_f32)(low, state);
        EDGE_FN(load_f32)(high, state + EDGE_LANES);
    } else {
        EDGE_FN(load_part)(low, state, count);
        EDGE_FN(load_part)(high, state + EDGE_LANES, count - EDGE_LANES);
    }
}

/* Columns [0, count) of the state into the tile, and dots = S^T k of the first token. */
static void EDGE_FN(tile_load)(float *tile, const float *state, int64_t stride, int64_t count, const float *k,
                               int32_t dim, EDGE_V dots[2]) {
    EDGE_V low, high, kv, d0 = {0}, d1 = {0};
    for (int32_t i = 0; i < dim; i++, tile += EDGE_TILE, state += stride) {
        EDGE_FN(tile_row)(&low, &high, state, count);
        EDGE_FN(store_f32)(tile, &low);
        EDGE_FN(store_f32)(tile + EDGE_LANES, &high);
        EDGE_FN(splat)(&kv, k[i]);
        EDGE_FN(fma)(&d0, &low, &kv);
        EDGE_FN(fma)(&d1, &high, &kv);
    }
    dots[0] = d0;
    dots[1] = d1;
}

static void EDGE_FN(tile_store)(float *state, const float *tile, int64_t stride, int64_t count, int32_t dim) {
    EDGE_V x;
    for (int32_t i = 0; i < dim; i++, tile += EDGE_TILE, state += stride) {
        if (count < EDGE_TILE) {
            for (int64_t c = 0; c < count; c++) state[c] = tile[c];
            continue;
        }
        EDGE_FN(load_f32)(&x, tile);
        EDGE_FN(store_f32)(state, &x);
        EDGE_FN(load_f32)(&x, tile + EDGE_LANES);
        EDGE_FN(store_f32)(state + EDGE_LANES, &x);
    }
}

/* One token over the tile.  dots come in as S^T k of this token and leave as S^T next_k of the new state. */
static void EDGE_FN(tile_token)(float *tile, int32_t dim, const EDGE_FN(delta_token) *t, const float *next_k,
                                const float *v, EDGE_V dots[2], float *out) {
    EDGE_V u0, u1, x, kv, qv, nv, o0 = {0}, o1 = {0}, d0 = {0}, d1 = {0};
    const float decay = t->decay, *k = t->k, *q = t->q;
    EDGE_FN(load_f32)(&x, v);
    EDGE_FN(delta_update)(&u0, &x, &dots[0], decay, t->beta);
    EDGE_FN(load_f32)(&x, v + EDGE_LANES);
    EDGE_FN(delta_update)(&u1, &x, &dots[1], decay, t->beta);
    for (int32_t i = 0; i < dim; i++, tile += EDGE_TILE) {
        EDGE_FN(splat)(&kv, k[i]);
        EDGE_FN(splat)(&qv, q[i]);
        EDGE_FN(splat)(&nv, next_k[i]);
        EDGE_FN(load_f32)(&x, tile);
        EDGE_FN(delta_cell)(&x, &o0, decay, &kv, &u0, &qv);
        EDGE_FN(store_f32)(tile, &x);
        EDGE_FN(fma)(&d0, &x, &nv);
        EDGE_FN(load_f32)(&x, tile + EDGE_LANES);
        EDGE_FN(delta_cell)(&x, &o1, decay, &kv, &u1, &qv);
        EDGE_FN(store_f32)(tile + EDGE_LANES, &x);
        EDGE_FN(fma)(&d1, &x, &nv);
    }
    dots[0] = d0;
    dots[1] = d1;
    EDGE_FN(store_f32)(out, &o0);
    EDGE_FN(store_f32)(out + EDGE_LANES, &o1);
}

/* `num_tokens` tokens, made ready, over one tile of columns of sequence i. */
static void EDGE_FN(tile_tokens)(const edge_delta_args *a, int64_t i, int32_t head, int64_t column,
                                 const EDGE_FN(delta_token) *tokens, int64_t num_tokens) {
    const edge_sequences *s = &a->sequences;
    const int64_t width = a->value_dim, left = width - column, count = left < EDGE_TILE ? left : EDGE_TILE;
    const int64_t place = (int64_t)head * a->key_dim * width + column, offset = head * width + column;
    float tile[EDGE_MAX_KEY_DIM * EDGE_TILE], v[EDGE_TILE], out[EDGE_TILE];
    EDGE_V dots[2];
    float *state = s->state + s->slots[i] * s->state_stride + place;
    EDGE_FN(tile_load)(tile, state, width, count, tokens[0].k, a->key_dim, dots);
    for (int64_t j = 0; j < num_tokens; j++) {
        const EDGE_FN(delta_token) *t = tokens + j;
        const float *next_k = j + 1 < num_tokens ? t[1].k : t->k;
        EDGE_FN(read_row)(v, &a->v, t->token, offset, count, EDGE_TILE);
        EDGE_FN(tile_token)(tile, a->key_dim, t, next_k, v, dots, out);
        EDGE_FN(write_row)(&a->out, t->token, offset, out, count);
    }
    EDGE_FN(tile_store)(state, tile, width, count, a->key_dim);
}

/* ---- one token: the state is read and written in the order of its memory ---- */

/* dots += S^T k over `rows` rows (a constant after inlining) and `count` columns; `dots` has whole vectors. */
EDGE_INLINE void EDGE_FN(rows_dots)(const float *state, int64_t stride, int64_t count, const float *k, int rows,
                                    float *dots) {
    EDGE_V x, kv[4], d;
    for (int r = 0; r < rows; r++) EDGE_FN(splat)(&kv[r], k[r]);
    int64_t c = 0;
    for (; c + EDGE_LANES <= count; c += EDGE_LANES) {
        EDGE_FN(load_f32)(&d, dots + c);
        for (int r = 0; r < rows; r++) {
            EDGE_FN(load_f32)(&x, state + r * stride + c);
            EDGE_FN(fma)(&d, &x, &kv[r]);
        }
        EDGE_FN(store_f32)(dots + c, &d);
    }
    if (c == count) return;
    EDGE_FN(load_f32)(&d, dots + c);
    for (int r = 0; r < rows; r++) {
        EDGE_FN(load_part)(&x, state + r * stride + c, count - c);
        EDGE_FN(fma)(&d, &x, &kv[r]);
    }
    EDGE_FN(store_f32)(dots + c, &d);
}

/* Over `rows` rows from `first`: S = decay S + k u^T; out += S^T q.  The new S goes to `kept` too, unless NULL. */
EDGE_INLINE void EDGE_FN(rows_update)(float *state, float *kept, int64_t stride, int64_t count,
                                      const EDGE_FN(delta_token) *t, int32_t first, int rows, const float *u,
                                      float *out) {
    EDGE_V x, kv[4], qv[4], o, uv;
    for (int r = 0; r < rows; r++) EDGE_FN(splat)(&kv[r], t->k[first + r]);
    for (int r = 0; r < rows; r++) EDGE_FN(splat)(&qv[r], t->q[first + r]);
    int64_t c = 0;
    for (; c + EDGE_LANES <= count; c += EDGE_LANES) {
        EDGE_FN(load_f32)(&o, out + c);
        EDGE_FN(load_f32)(&uv, u + c);
        for (int r = 0; r < rows; r++) {
            const int64_t at = (first + r) * stride + c;
            EDGE_FN(load_f32)(&x, state + at);
            EDGE_FN(delta_cell)(&x, &o, t->decay, &kv[r], &uv, &qv[r]);
            EDGE_FN(store_f32)(state + at, &x);
            if (kept != NULL) EDGE_FN(store_past)(kept + at, &x);
        }
        EDGE_FN(store_f32)(out + c, &o);
    }
    if (c == count) return;
    EDGE_FN(load_f32)(&o, out + c);
    EDGE_FN(load_f32)(&uv, u + c);
    for (int r = 0; r < rows; r++) {
        const int64_t at = (first + r) * stride + c;
        EDGE_FN(load_part)(&x, state + at, count - c);
        EDGE_FN(delta_cell)(&x, &o, t->decay, &kv[r], &uv, &qv[r]);
        EDGE_FN(store_part)(state + at, &x, count - c);
        if (kept != NULL) EDGE_FN(store_part)(kept + at, &x, count - c);
    }
    EDGE_FN(store_f32)(out + c, &o);
}

/* u of one token, in place of v; whole vectors. */
static void EDGE_FN(single_update)(float *u, const float *dots, int64_t padded, const EDGE_FN(delta_token) *t) {
    for (int64_t c = 0; c < padded; c += EDGE_LANES) {
        EDGE_V v, dot, update;
        EDGE_FN(load_f32)(&v, u + c);
        EDGE_FN(load_f32)(&dot, dots + c);
        EDGE_FN(delta_update)(&update, &v, &dot, t->decay, t->beta);
        EDGE_FN(store_f32)(u + c, &update);
    }
}

/* One token over columns [column, column + count) of sequence i. */
static void EDGE_FN(single_columns)(const edge_delta_args *a, int64_t i, int32_t head, int64_t column, int64_t count,
                                    const EDGE_FN(delta_token) *t) {
    const edge_sequences *s = &a->sequences;
    const int64_t width = a->value_dim, offset = head * width + column;
    const int64_t place = (int64_t)head * a->key_dim * width + column;
    const int64_t padded = (count + EDGE_LANES - 1) / EDGE_LANES * EDGE_LANES;
    const int32_t dim = a->key_dim, whole = dim / 4 * 4;
    float dots[EDGE_DELTA_COLUMNS] = {0}, out[EDGE_DELTA_COLUMNS] = {0}, u[EDGE_DELTA_COLUMNS];
    float *state = s->state + s->slots[i] * s->state_stride + place, *kept = edge_checkpoint(s, i, t->token, place);
    for (int32_t r = 0; r < whole; r += 4) EDGE_FN(rows_dots)(state + r * width, width, count, t->k + r, 4, dots);
    for (int32_t r = whole; r < dim; r++) EDGE_FN(rows_dots)(state + r * width, width, count, t->k + r, 1, dots);
    EDGE_FN(read_row)(u, &a->v, t->token, offset, count, padded);
    EDGE_FN(single_update)(u, dots, padded, t);
    for (int32_t r = 0; r < whole; r += 4) {
        /* The next head's state follows this one's. */
        edge_prefetch(state + (dim + r) * width, (int64_t)sizeof(float) * 4 * count);
        EDGE_FN(rows_update)(state, kept, width, count, t, r, 4, u, out);
    }
    for (int32_t r = whole; r < dim; r++) EDGE_FN(rows_update)(state, kept, width, count, t, r, 1, u, out);
    EDGE_FN(write_row)(&a->out, t->token, offset, out, count);
}

/* ---- tasks ---- */

/* `num_tokens` tokens from `first` of one head of sequence i. */
static void EDGE_FN(delta_block)(const edge_delta_args *a, int64_t i, int32_t head, int64_t first, int64_t num_tokens) {
    float q[EDGE_DELTA_ROWS], k[EDGE_DELTA_ROWS];
    EDGE_FN(delta_token) tokens[EDGE_DELTA_BLOCK];
    for (int64_t j = 0; j < num_tokens; j++) {
        tokens[j].token = first + j;
        EDGE_FN(delta_ready)(a, tokens + j, head, q + j * a->key_dim, k + j * a->key_dim);
    }
    /* Checkpoints are written row after row, which tiles cannot do. */
    if (num_tokens > 1 && a->sequences.checkpoint_start[i] < 0) {
        for (int64_t column = 0; column < a->value_dim; column += EDGE_TILE)
            EDGE_FN(tile_tokens)(a, i, head, column, tokens, num_tokens);
        return;
    }
    for (int64_t j = 0; j < num_tokens; j++)
        for (int64_t column = 0; column < a->value_dim; column += EDGE_DELTA_COLUMNS) {
            const int64_t left = a->value_dim - column, count = left < EDGE_DELTA_COLUMNS ? left : EDGE_DELTA_COLUMNS;
            EDGE_FN(single_columns)(a, i, head, column, count, tokens + j);
        }
}

/* Task = (sequence, head), all its tokens. */
static void EDGE_FN(delta_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_delta_args *a = (const edge_delta_args *)opaque;
    const int64_t fitting = EDGE_DELTA_ROWS / a->key_dim;
    const int64_t block = fitting < EDGE_DELTA_BLOCK ? fitting : EDGE_DELTA_BLOCK;
    for (int64_t task = begin; task < end; task++) {
        const int64_t i = task / a->heads;
        const int64_t last = a->sequences.query_start[i + 1];
        for (int64_t first = a->sequences.query_start[i]; first < last; first += block)
            EDGE_FN(delta_block)(a, i, (int32_t)(task % a->heads), first, last - first < block ? last - first : block);
    }
    if (a->sequences.checkpoint != NULL) EDGE_FN(stores_end)();
}
#undef EDGE_TILE
