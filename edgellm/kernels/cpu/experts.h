/* Routed experts of few rows: each expert's gated MLP, one expert after the other. */
#ifndef EDGE_EXPERTS_H
#define EDGE_EXPERTS_H

#include <stdint.h>

typedef struct {
    const void *rows;      /* (num_rows, hidden), at most EDGE_SKINNY_ROWS */
    const void *gate_up;   /* (experts, 2 * inner, hidden), rows gate, up */
    const void *down;      /* (experts, hidden, inner) */
    const int64_t *chosen; /* (num_rows, count): experts of a row, each at most once */
    const float *shares;   /* (num_rows, count) */
    float *total;          /* (num_rows, hidden) */
    float *scratch;        /* num_rows * (2 * hidden + 3 * inner) */
    int64_t num_rows;
    int64_t count;
    int64_t hidden;
    int64_t inner;
    int32_t is_bf16; /* element type of rows, gate_up, down */
} edge_experts_args;

/* total[t] += shares[t, j] * expert chosen[t, j] of rows[t]; a row's sum in ascending order of experts */
void edge_experts(const edge_experts_args *args, int num_threads);

#endif
