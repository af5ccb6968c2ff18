#include "skinny_linear.h"

#include <string.h>

#include "isa.h"
#include "parallel.h"

#define EDGE_TILE_COLUMNS 4 /* weight rows taken together */

#define EDGE_BODY "skinny_linear_body.h"
#include "compile_isa.h"

void edge_skinny_linear(const edge_linear_args *args, int num_threads) {
    const int64_t tiles = (args->out_width + EDGE_TILE_COLUMNS - 1) / EDGE_TILE_COLUMNS;
    /* About 128 KiB of weight a task: small enough to balance, large enough to stream. */
    int64_t grain = 131072 / (args->in_width * EDGE_TILE_COLUMNS * 4) + 1;
    edge_parallel(EDGE_PICK(linear_tasks), args, tiles, grain, num_threads);
}

int edge_skinny_rows(void) {
    static const int rows[3] = {4, 8, EDGE_SKINNY_ROWS};
    return rows[edge_isa_level()];
}
