#include "mamba2.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "isa.h"
#include "parallel.h"

#define EDGE_MAMBA_BLOCK 32  /* tokens made ready at a time */
#define EDGE_MAMBA_ROWS 4096 /* floats of b, and of c, made ready at a time */
#define EDGE_MAMBA_TILE 4    /* state rows taken together */
#define EDGE_MAMBA_AHEAD 12  /* state rows from those in work to those asked for from memory */

#define EDGE_BODY "mamba2_body.h"
#include "compile_isa.h"

void edge_mamba2(const edge_mamba_args *args, int num_threads) {
    const int64_t tokens = args->sequences.query_start[args->sequences.num_sequences];
    const int64_t tasks = (int64_t)args->sequences.num_sequences * args->heads;
    const int64_t work = tokens * args->heads * args->head_dim * args->state_dim;
    edge_parallel(EDGE_PICK(mamba_tasks), args, tasks, edge_recurrent_grain(tasks, work), num_threads);
}
