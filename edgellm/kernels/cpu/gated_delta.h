/* The gated delta rule over the tokens of each sequence.  float32 arithmetic, one token after the other. */
#ifndef EDGE_GATED_DELTA_H
#define EDGE_GATED_DELTA_H

#include "recurrent.h"

#define EDGE_MAX_KEY_DIM 512

typedef struct {
    edge_sequences sequences; /* state (slots, heads, key_dim, value_dim) */
    edge_token_rows q;        /* (T, key_heads, key_dim) */
    edge_token_rows k;        /* (T, key_heads, key_dim) */
    edge_token_rows v;        /* (T, heads, value_dim) */
    edge_token_rows out;      /* (T, heads, value_dim) */
    edge_token_rows decay;    /* (T, heads) float32 logarithms */
    edge_token_rows beta;     /* (T, heads) float32 */
    int32_t key_heads;
    int32_t heads;
    int32_t key_dim;
    int32_t value_dim;
    int32_t l2norm; /* divide q and k by their length first */
    float scale;    /* of out */
} edge_delta_args;

/* S = exp(decay) S; u = beta (v - S^T k); S = S + k u^T; out = scale S^T q */
void edge_gated_delta(const edge_delta_args *args, int num_threads);

#endif
