#include "paged_attention.h"

#include <math.h>
#include <string.h>

#include "isa.h"
#include "parallel.h"

#define EDGE_MAX_GROUP 8 /* query heads taken together; larger groups take several rounds */
#define EDGE_MAX_DIM 512

#define EDGE_BODY "paged_attention_body.h"
#include "compile_isa.h"

void edge_paged_attention(const edge_attention_args *args, int num_threads) {
    const int64_t segments = args->segment_start[args->num_rows];
    edge_parallel(EDGE_PICK(attend_tasks), args, segments * args->kv.num_kv_heads, 1, num_threads);
    /* The merge is a few microseconds of work: not worth waking a thread. */
    EDGE_PICK(merge_tasks)(args, 0, (int64_t)args->num_rows * args->num_heads);
}

void edge_write_kv(const edge_write_args *args, int num_threads) {
    edge_parallel(EDGE_PICK(write_tasks), args, args->num_tokens, 64, num_threads);
}

/* Task = one (K or V, kv head) of the output. */
static void edge_gather_tasks(const void *opaque, int64_t begin, int64_t end) {
    const edge_gather_args *a = (const edge_gather_args *)opaque;
    const int64_t size = a->kv.page_size, parts = 2 * (int64_t)a->kv.num_kv_heads;
    const size_t row_bytes = (size_t)a->kv.head_dim * (a->kv.is_bf16 ? 2 : 4);
    for (int64_t part = begin; part < end; part++)
        for (int64_t first = 0; first < a->length; first += size) {
            const int64_t left = a->length - first, count = left < size ? left : size;
            const char *source = (const char *)a->pages + ((a->page_ids[first / size] * parts + part) * size) * row_bytes;
            memcpy((char *)a->out + (part * a->length + first) * row_bytes, source, row_bytes * (size_t)count);
        }
}

void edge_gather_kv(const edge_gather_args *args, int num_threads) {
    edge_parallel(edge_gather_tasks, args, 2 * (int64_t)args->kv.num_kv_heads, 1, num_threads);
}
