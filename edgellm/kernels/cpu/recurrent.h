/* What the kernels of recurrent layers share: the sequences of a step and where their states lie. */
#ifndef EDGE_RECURRENT_H
#define EDGE_RECURRENT_H

#include <stddef.h>
#include <stdint.h>

/* Sequence i has the tokens [query_start[i], query_start[i + 1]) and the state row slots[i].  Where checkpoint_start[i]
 * is not negative, the state after its j-th token also goes to checkpoint row checkpoint_start[i] + j. */
typedef struct {
    const int32_t *query_start; /* (num_sequences + 1) */
    const int32_t *slots;
    const int32_t *checkpoint_start;
    float *state;
    float *checkpoint;         /* or NULL */
    int64_t state_stride;      /* elements from one row to the next */
    int64_t checkpoint_stride;
    int32_t num_sequences;
} edge_sequences;

/* Rows of tokens: contiguous inside, `stride` elements from one to the next. */
typedef struct {
    void *at;
    int64_t stride;
    int32_t is_bf16;
} edge_token_rows;

/* An element of float32 rows. */
static inline float edge_float_at(const edge_token_rows *rows, int64_t token, int64_t place) {
    return ((const float *)rows->at)[token * rows->stride + place];
}

/* Ask for `bytes` from p on, which are needed soon; p may lie beyond what exists. */
static inline void edge_prefetch(const void *p, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)p + at);
}

static inline void edge_prefetch_row(const edge_token_rows *rows, int64_t token, int64_t offset, int64_t count) {
    const int64_t size = rows->is_bf16 ? 2 : 4;
    edge_prefetch((const char *)rows->at + (token * rows->stride + offset) * size, count * size);
}

/* Multiply-adds below which a second thread costs more than it brings. */
#define EDGE_RECURRENT_GRAIN 65536

/* Tasks taken at a time, if `count` tasks of equal size do `work` multiply-adds together. */
static inline int64_t edge_recurrent_grain(int64_t count, int64_t work) {
    return count > 0 && work > 0 ? EDGE_RECURRENT_GRAIN / (work / count + 1) + 1 : 1;
}

/* Where the state after token `token` of sequence `i` is kept, or NULL; `offset` elements into the row. */
static inline float *edge_checkpoint(const edge_sequences *s, int64_t i, int64_t token, int64_t offset) {
    if (s->checkpoint == NULL || s->checkpoint_start[i] < 0) return NULL;
    return s->checkpoint + (s->checkpoint_start[i] + token - s->query_start[i]) * s->checkpoint_stride + offset;
}

#endif
