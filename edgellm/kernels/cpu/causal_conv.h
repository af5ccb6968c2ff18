/* Causal depthwise convolution over the tokens of each sequence.  float32 arithmetic. */
#ifndef EDGE_CAUSAL_CONV_H
#define EDGE_CAUSAL_CONV_H

#include "recurrent.h"

#define EDGE_CONV_WIDTH 8 /* widest kernel */

typedef struct {
    edge_sequences sequences; /* state (slots, channels, width - 1): the last inputs, oldest first */
    edge_token_rows x;        /* (T, channels) */
    edge_token_rows out;      /* (T, channels), may be x */
    const float *weight;      /* (channels, width) */
    const float *bias;        /* (channels) or NULL */
    int64_t channels;
    int32_t width;
    int32_t silu;
} edge_conv_args;

/* out[t] = silu?(bias + sum_j weight[:, j] * window[:, j]); the window of width inputs ends with x[t]. */
void edge_causal_conv(const edge_conv_args *args, int num_threads);

#endif
