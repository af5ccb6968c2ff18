#include "causal_conv.h"

#include <stddef.h>
#include <string.h>

#include "isa.h"
#include "parallel.h"

/* Channels of a task: their weights and windows stay in the first-level cache while the tokens pass. */
#define EDGE_CONV_TILE 256
/* Rows of different tokens lie too far apart for the processor to guess the next one. */
#define EDGE_CONV_AHEAD 4

#define EDGE_BODY "causal_conv_body.h"
#include "compile_isa.h"

void edge_causal_conv(const edge_conv_args *args, int num_threads) {
    const int64_t tiles = (args->channels + EDGE_CONV_TILE - 1) / EDGE_CONV_TILE;
    const int64_t tokens = args->sequences.query_start[args->sequences.num_sequences];
    /* The activation costs about as much as 16 multiply-adds. */
    const int64_t work = tokens * args->channels * (args->width + 16);
    edge_parallel(EDGE_PICK(conv_tasks), args, tiles, edge_recurrent_grain(tiles, work), num_threads);
}
