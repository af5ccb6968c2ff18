#include "paged_attention.h"

#include <math.h>
#include <string.h>

#include "isa.h"
#include "parallel.h"

#define EDGE_MAX_GROUP 8 /* query heads taken together; larger groups take several rounds */
#define EDGE_MAX_DIM 512
/* Inlined side by side, the two forms of a segment take each other's registers: plain rows lose a tenth. */
#define EDGE_ALONE static __attribute__((noinline))

/* Where the keys of a row lie that do not stand at the places of their numbers. */
typedef struct {
    int32_t start; /* the first such key; INT32_MAX: none */
    const uint32_t *mask;
} edge_tree_row;

static edge_tree_row edge_tree_of(const edge_attention_args *a, int32_t row) {
    const edge_tree_row none = {INT32_MAX, NULL};
    if (!a->tree_start) return none;
    const edge_tree_row tree = {a->tree_start[row], a->tree_mask + (int64_t)row * a->tree_words};
    return tree;
}

/* How many of `left` keys from `first` on have places of one page. */
static inline int32_t edge_block(int32_t first, int32_t left, int32_t page_size) {
    const int32_t room = page_size - first % page_size;
    return left < room ? left : room;
}

/* Elements from the first page's start to a place of the sequence. */
static inline int64_t edge_place(const int32_t *table, int32_t place, int32_t page_size, int32_t dim,
                                 int64_t page_elements) {
    return table[place / page_size] * page_elements + (int64_t)(place % page_size) * dim;
}

/* rows[j] = elements to key first + j, for `count` keys. */
static void edge_tree_places(const edge_tree_row *tree, const int32_t *table, int32_t first, int32_t count,
                             int32_t page_size, int32_t dim, int64_t page_elements, int64_t *rows) {
    int32_t j = 0, bit = 0;
    for (; j < count && first + j < tree->start; j++)
        rows[j] = edge_place(table, first + j, page_size, dim, page_elements);
    int32_t behind = first + j - tree->start; /* bits that belong to keys before */
    for (; j < count; bit++) {
        if (!(tree->mask[bit / 32] >> (bit % 32) & 1)) continue;
        if (behind-- > 0) continue;
        rows[j++] = edge_place(table, tree->start + bit, page_size, dim, page_elements);
    }
}

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
