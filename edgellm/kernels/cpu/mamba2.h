/* The Mamba-2 selective scan over the tokens of each sequence.  float32 arithmetic, one token after the other. */
#ifndef EDGE_MAMBA2_H
#define EDGE_MAMBA2_H

#include "recurrent.h"

#define EDGE_MAX_STATE_DIM 1024

typedef struct {
    edge_sequences sequences; /* state (slots, heads, head_dim, state_dim) */
    edge_token_rows x;        /* (T, heads, head_dim) */
    edge_token_rows b;        /* (T, groups, state_dim) */
    edge_token_rows c;        /* (T, groups, state_dim) */
    edge_token_rows out;      /* (T, heads, head_dim), may be x */
    edge_token_rows dt;       /* (T, heads) float32 */
    const float *a;           /* (heads) */
    const float *d;           /* (heads) */
    int32_t groups;
    int32_t heads;
    int32_t head_dim;
    int32_t state_dim;
} edge_mamba_args;

/* S = exp(dt a) S + dt x b^T; out = S c + d x */
void edge_mamba2(const edge_mamba_args *args, int num_threads);

#endif
