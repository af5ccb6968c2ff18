/* Compiled once per instruction set (isa.h). */
#include "simd.h"

/* Then once per element type of the pages. */
#define EDGE_KV uint16_t
#define EDGE_KV_NAME bf16
#define EDGE_KV_SCALAR(x) EDGE_FN(bf16_to_float)(x)
#include "paged_attention_kv.h"
#undef EDGE_KV
#undef EDGE_KV_NAME
#undef EDGE_KV_SCALAR

#define EDGE_KV float
#define EDGE_KV_NAME f32
#define EDGE_KV_SCALAR(x) (x)
#include "paged_attention_kv.h"
#undef EDGE_KV
#undef EDGE_KV_NAME
#undef EDGE_KV_SCALAR

static void EDGE_FN(load_row)(float *out, const void *rows, int64_t start, int count, int is_bf16) {
    if (is_bf16)
        for (int d = 0; d < count; d++) out[d] = EDGE_FN(bf16_to_float)(((const uint16_t *)rows)[start + d]);
    else
        memcpy(out, (const float *)rows + start, sizeof(float) * (size_t)count);
}

/* The row of a flat segment index; rows are few, so a scan is enough. */
EDGE_INLINE int32_t EDGE_FN(row_of)(const int32_t *segment_start, int64_t segment) {
    int32_t row = 0;
    while (segment_start[row + 1] <= segment) row++;
    return row;
}

/* Task = (segment, kv head): partial softmax of the segment into scratch [segment, head, (dim, max, sum)]. */
static void EDGE_FN(attend_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_attention_args *a = (const edge_attention_args *)opaque;
    const int32_t dim = a->kv.head_dim, kv_heads = a->kv.num_kv_heads, group = a->num_heads / kv_heads;
    float query[EDGE_MAX_GROUP * EDGE_MAX_DIM];
    for (int64_t task = begin; task < end; task++) {
        const int32_t code = a->order[task];
        const int64_t segment = code / kv_heads;
        const int32_t kv_head = code % kv_heads, row = EDGE_FN(row_of)(a->segment_start, segment);
        const int32_t start = a->starts[row], end = a->lengths[row];
        const int32_t base = (start / EDGE_SEGMENT + (int32_t)(segment - a->segment_start[row])) * EDGE_SEGMENT;
        const int32_t first = base > start ? base : start;
        const int32_t count = (end - base < EDGE_SEGMENT ? end : base + EDGE_SEGMENT) - first;
        const int32_t *table = a->page_rows + a->table_start[row];
        const edge_tree_row tree = edge_tree_of(a, row);
        for (int32_t g0 = 0; g0 < group; g0 += EDGE_MAX_GROUP) {
            const int32_t heads = group - g0 < EDGE_MAX_GROUP ? group - g0 : EDGE_MAX_GROUP;
            const int32_t head = kv_head * group + g0;
            EDGE_FN(load_row)(query, a->query, a->query_rows[row] * a->query_stride + (int64_t)head * dim, heads * dim,
                              a->rows_bf16);
            float *out = a->scratch + (segment * a->num_heads + head) * (dim + 2);
            if (first + count > tree.start && a->kv.is_bf16)
                EDGE_FN(tree_segment_bf16)(a, table, &tree, kv_head, first, count, query, heads, out);
            else if (first + count > tree.start)
                EDGE_FN(tree_segment_f32)(a, table, &tree, kv_head, first, count, query, heads, out);
            else if (a->kv.is_bf16)
                EDGE_FN(segment_bf16)(a, table, kv_head, first, count, query, heads, out);
            else
                EDGE_FN(segment_f32)(a, table, kv_head, first, count, query, heads, out);
        }
    }
}

/* Task = (row, head): merge the row's segments in order and store. */
static void EDGE_FN(merge_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_attention_args *a = (const edge_attention_args *)opaque;
    const int32_t dim = a->kv.head_dim;
    const int64_t stride = (int64_t)a->num_heads * (dim + 2);
    float merged[EDGE_MAX_DIM];
    for (int64_t task = begin; task < end; task++) {
        const int32_t row = (int32_t)(task / a->num_heads), head = (int32_t)(task % a->num_heads);
        const int32_t segments = a->segment_start[row + 1] - a->segment_start[row];
        const float *part = a->scratch + (int64_t)a->segment_start[row] * stride + (int64_t)head * (dim + 2);
        float top = part[dim], total = 0.0f;
        for (int32_t s = 1; s < segments; s++)
            if (part[s * stride + dim] > top) top = part[s * stride + dim];
        memset(merged, 0, sizeof(float) * (size_t)dim);
        for (int32_t s = 0; s < segments; s++, part += stride) {
            const float weight = expf(part[dim] - top);
            total += weight * part[dim + 1];
            for (int32_t d = 0; d < dim; d++) merged[d] += weight * part[d];
        }
        const float inverse = 1.0f / total;
        const int64_t start = a->query_rows[row] * a->out_stride + (int64_t)head * dim;
        for (int32_t d = 0; d < dim; d++) {
            if (a->rows_bf16)
                ((uint16_t *)a->out)[start + d] = EDGE_FN(float_to_bf16)(merged[d] * inverse);
            else
                ((float *)a->out)[start + d] = merged[d] * inverse;
        }
    }
}

/* Task = token. */
static void EDGE_FN(write_tasks)(const void *opaque, int64_t begin, int64_t end) {
    const edge_write_args *a = (const edge_write_args *)opaque;
    const int64_t dim = a->kv.head_dim, size = a->kv.page_size, heads = a->kv.num_kv_heads;
    for (int64_t token = begin; token < end; token++) {
        if (a->offsets[token] < 0) continue;
        const int64_t page = a->offsets[token] / size, place = a->offsets[token] % size;
        for (int64_t part = 0; part < 2 * heads; part++) {
            const void *rows = part < heads ? a->key : a->value;
            const int64_t source = token * a->row_stride + (part % heads) * dim;
            const int64_t target = ((page * 2 * heads + part) * size + place) * dim;
            if (a->kv.is_bf16 == a->rows_bf16) {
                const size_t item = a->kv.is_bf16 ? 2 : 4;
                memcpy((char *)a->pages + target * item, (const char *)rows + source * item, item * (size_t)dim);
            } else if (a->kv.is_bf16) {
                for (int64_t d = 0; d < dim; d++)
                    ((uint16_t *)a->pages)[target + d] = EDGE_FN(float_to_bf16)(((const float *)rows)[source + d]);
            } else {
                for (int64_t d = 0; d < dim; d++)
                    ((float *)a->pages)[target + d] = EDGE_FN(bf16_to_float)(((const uint16_t *)rows)[source + d]);
            }
        }
    }
}
