#include "elementwise.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "isa.h"
#include "parallel.h"

/* Twice sqrt(2 / pi), and 0.044715 times it: -2 u of the tanh form of gelu. */
#define EDGE_GELU_LINEAR 1.5957691216f
#define EDGE_GELU_CUBIC 0.0713548162726f

#define EDGE_BODY "elementwise_body.h"
#include "compile_isa.h"

/* Elements a task; below it a second thread costs more than it brings. */
#define EDGE_GRAIN 65536

static int64_t grain_rows(int64_t width) { return EDGE_GRAIN / width + 1; }

void edge_rms_norm(const edge_norm_args *args, int num_threads) {
    edge_parallel(EDGE_PICK(norm_tasks), args, args->num_rows, grain_rows(args->width), num_threads);
}

void edge_rope(const edge_rope_args *args, int num_threads) {
    edge_parallel(EDGE_PICK(rope_tasks), args, args->num_tokens, grain_rows(args->row_stride), num_threads);
}

void edge_gelu_mul(const edge_gelu_args *args, int num_threads) {
    edge_parallel(EDGE_PICK(gelu_tasks), args, args->num_rows, grain_rows(2 * args->width), num_threads);
}

void edge_silu_mul(const edge_silu_args *args, int num_threads) {
    edge_parallel(EDGE_PICK(silu_tasks), args, args->num_rows, grain_rows(2 * args->width), num_threads);
}
