#include "gated_delta.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "isa.h"
#include "parallel.h"

#define EDGE_DELTA_BLOCK 32    /* tokens made ready at a time */
#define EDGE_DELTA_ROWS 4096   /* floats of q, and of k, made ready at a time */
#define EDGE_DELTA_COLUMNS 512 /* columns that a single token takes at a time */
#define EDGE_L2_EPS 1e-6f

#define EDGE_BODY "gated_delta_body.h"
#include "compile_isa.h"

void edge_gated_delta(const edge_delta_args *args, int num_threads) {
    const int64_t tokens = args->sequences.query_start[args->sequences.num_sequences];
    const int64_t tasks = (int64_t)args->sequences.num_sequences * args->heads;
    const int64_t work = tokens * args->heads * args->key_dim * args->value_dim;
    edge_parallel(EDGE_PICK(delta_tasks), args, tasks, edge_recurrent_grain(tasks, work), num_threads);
}
