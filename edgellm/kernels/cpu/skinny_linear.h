/* Linear layers on few rows, where the time is that of reading the weight once.
 *
 * A general matrix product repacks the weight before it multiplies, which costs more than the product itself.
 */
#ifndef EDGE_SKINNY_LINEAR_H
#define EDGE_SKINNY_LINEAR_H

#include <stdint.h>

#define EDGE_SKINNY_ROWS 16 /* most rows a call may have */

/* Up to how many rows this is faster than a general product, measured per instruction set. */
int edge_skinny_rows(void);

typedef struct {
    const void *x;      /* (num_rows, in_width) */
    const void *weight; /* (out_width, in_width) */
    const void *bias;   /* (out_width) or NULL */
    void *out;          /* (num_rows, out_width) */
    int64_t num_rows;
    int64_t in_width;
    int64_t out_width;
    int32_t is_bf16;    /* element type of x, weight, bias */
    int32_t accumulate; /* out += instead of out = */
    int32_t out_f32;    /* out is float32 whatever is_bf16 says */
} edge_linear_args;

void edge_skinny_linear(const edge_linear_args *args, int num_threads);

#endif
