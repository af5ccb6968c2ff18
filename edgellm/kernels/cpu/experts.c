#include "experts.h"

#include <stddef.h>
#include <string.h>

#include "elementwise.h"
#include "skinny_linear.h"

/* The rows that chose one expert, and where its intermediate results stand. */
typedef struct {
    int64_t expert;
    int64_t num_rows;
    int64_t rows[EDGE_SKINNY_ROWS];
    float shares[EDGE_SKINNY_ROWS];
    char *in;
    char *inner;
    char *activated;
    float *product;
} edge_expert_group;

/* The smallest chosen expert above `last`; -1 where there is none. */
static int64_t next_expert(const edge_experts_args *a, int64_t last) {
    int64_t next = -1;
    for (int64_t i = 0; i < a->num_rows * a->count; i++)
        if (a->chosen[i] > last && (next < 0 || a->chosen[i] < next)) next = a->chosen[i];
    return next;
}

static void gather(const edge_experts_args *a, edge_expert_group *group) {
    const int64_t row_bytes = a->hidden * (a->is_bf16 ? 2 : 4);
    group->num_rows = 0;
    for (int64_t row = 0; row < a->num_rows; row++)
        for (int64_t j = 0; j < a->count; j++) {
            if (a->chosen[row * a->count + j] != group->expert) continue;
            memcpy(group->in + group->num_rows * row_bytes, (const char *)a->rows + row * row_bytes, (size_t)row_bytes);
            group->shares[group->num_rows] = a->shares[row * a->count + j];
            group->rows[group->num_rows++] = row;
            break;
        }
}

static void run(const edge_experts_args *a, const edge_expert_group *group, int num_threads) {
    const int64_t matrix_bytes = a->inner * a->hidden * (a->is_bf16 ? 2 : 4);
    edge_linear_args up = {0}, down = {0};
    edge_silu_args silu = {0};
    up.x = group->in;
    up.weight = (const char *)a->gate_up + group->expert * 2 * matrix_bytes;
    up.out = group->inner;
    up.in_width = a->hidden;
    up.out_width = 2 * a->inner;
    silu.gate_up = group->inner;
    silu.out = group->activated;
    silu.width = a->inner;
    down.x = group->activated;
    down.weight = (const char *)a->down + group->expert * matrix_bytes;
    down.out = group->product;
    down.in_width = a->inner;
    down.out_width = a->hidden;
    down.out_f32 = 1;
    up.num_rows = silu.num_rows = down.num_rows = group->num_rows;
    up.is_bf16 = silu.is_bf16 = down.is_bf16 = a->is_bf16;
    edge_skinny_linear(&up, num_threads);
    edge_silu_mul(&silu, 1);
    edge_skinny_linear(&down, num_threads);
}

static void add(const edge_experts_args *a, const edge_expert_group *group) {
    for (int64_t i = 0; i < group->num_rows; i++) {
        float *total = a->total + group->rows[i] * a->hidden;
        const float *product = group->product + i * a->hidden;
        for (int64_t column = 0; column < a->hidden; column++) total[column] += group->shares[i] * product[column];
    }
}

void edge_experts(const edge_experts_args *args, int num_threads) {
    edge_expert_group group;
    group.in = (char *)args->scratch;
    group.inner = (char *)(args->scratch + args->num_rows * args->hidden);
    group.activated = (char *)(args->scratch + args->num_rows * (args->hidden + 2 * args->inner));
    group.product = args->scratch + args->num_rows * (args->hidden + 3 * args->inner);
    for (group.expert = next_expert(args, -1); group.expert >= 0; group.expert = next_expert(args, group.expert)) {
        gather(args, &group);
        run(args, &group, num_threads);
        add(args, &group);
    }
}
