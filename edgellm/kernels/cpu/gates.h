/* Gates of rows: a row times the activation of another, and the two scalars of a gated delta net.  float32 arithmetic.
 *
 * An element's result depends on its row and column alone, never on how many rows there are.
 */
#ifndef EDGE_GATES_H
#define EDGE_GATES_H

#include "recurrent.h"

typedef struct {
    edge_token_rows x;    /* (num_rows, width), in place */
    edge_token_rows gate; /* (num_rows, width); (num_rows, 1) gates whole rows.  Element type of x */
    int64_t num_rows;
    int64_t width;
    int32_t whole_rows;
    int32_t silu; /* else sigmoid */
} edge_gate_args;

/* x *= 1 / (1 + exp(-gate)), with silu times the gate as well */
void edge_gate(const edge_gate_args *args, int num_threads);

typedef struct {
    edge_token_rows a; /* (num_rows, heads) */
    edge_token_rows b; /* (num_rows, heads), element type of a */
    const float *rate; /* (heads), negative */
    const float *bias; /* (heads) */
    float *decay;      /* (num_rows, heads) */
    float *beta;       /* (num_rows, heads) */
    int64_t num_rows;
    int64_t heads;
} edge_delta_gates_args;

/* decay = rate * log(1 + exp(a + bias)), beta = 1 / (1 + exp(-b)) */
void edge_delta_gates(const edge_delta_gates_args *args, int num_threads);

#endif
