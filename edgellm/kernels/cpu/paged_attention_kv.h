/* Compiled once per instruction set and element type of the pages: EDGE_KV, EDGE_KV_NAME, EDGE_KV_SCALAR. */
#define EDGE_KV_LOAD EDGE_PASTE(EDGE_PASTE(edge_load, EDGE_KV_NAME), EDGE_ISA)
#define EDGE_KV_FN(name) EDGE_PASTE(EDGE_PASTE(edge_##name, EDGE_KV_NAME), EDGE_ISA)

/* Row j of `base`: at rows[j], in elements, or where rows is NULL the j-th of rows side by side. */
EDGE_INLINE const EDGE_KV *EDGE_KV_FN(row_at)(const EDGE_KV *base, const int64_t *rows, int32_t j, int32_t dim) {
    return base + (rows ? rows[j] : (int64_t)j * dim);
}

/* scores[g][j] = scale * query[g] . key[j] for `count` keys of one page, 4 keys at a time. */
EDGE_INLINE void EDGE_KV_FN(page_scores)(const EDGE_KV *key, const int64_t *rows, int32_t count, const float *query,
                                         int32_t heads, int32_t dim, float scale, float *scores) {
    for (int32_t j = 0; j < count; j += 4) {
        const int32_t block = count - j < 4 ? count - j : 4;
        /* The last block repeats its last key: no lane reads past the page. */
        const EDGE_KV *k[4];
        for (int32_t b = 0; b < 4; b++) k[b] = EDGE_KV_FN(row_at)(key, rows, j + (b < block ? b : block - 1), dim);
        for (int32_t g = 0; g < heads; g++) {
            const float *q = query + g * dim;
            EDGE_V s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0}, x, y;
            int32_t d = 0;
            for (; d + EDGE_LANES <= dim; d += EDGE_LANES) {
                EDGE_FN(load_f32)(&x, q + d);
                EDGE_KV_LOAD(&y, k[0] + d);
                s0 += x * y;
                EDGE_KV_LOAD(&y, k[1] + d);
                s1 += x * y;
                EDGE_KV_LOAD(&y, k[2] + d);
                s2 += x * y;
                EDGE_KV_LOAD(&y, k[3] + d);
                s3 += x * y;
            }
            float dots[4] = {EDGE_FN(sum)(&s0), EDGE_FN(sum)(&s1), EDGE_FN(sum)(&s2), EDGE_FN(sum)(&s3)};
            for (; d < dim; d++)
                for (int32_t b = 0; b < 4; b++) dots[b] += q[d] * EDGE_KV_SCALAR(k[b][d]);
            for (int32_t b = 0; b < block; b++) scores[g * EDGE_SEGMENT + j + b] = scale * dots[b];
        }
    }
}

/* out[g] += sum_j weights[g][j] * value[j] for `count` values of one page, 4 values at a time. */
EDGE_INLINE void EDGE_KV_FN(page_values)(const EDGE_KV *value, const int64_t *rows, int32_t count,
                                         const float *weights, int32_t heads, int32_t dim, float *out,
                                         int32_t out_stride) {
    int32_t j = 0;
    for (; j + 4 <= count; j += 4) {
        const EDGE_KV *v[4] = {EDGE_KV_FN(row_at)(value, rows, j, dim)};
        for (int32_t b = 1; b < 4; b++) v[b] = rows ? value + rows[j + b] : v[0] + (int64_t)b * dim;
        int32_t d = 0;
        for (; d + EDGE_LANES <= dim; d += EDGE_LANES) {
            EDGE_V v0, v1, v2, v3, acc;
            EDGE_KV_LOAD(&v0, v[0] + d);
            EDGE_KV_LOAD(&v1, v[1] + d);
            EDGE_KV_LOAD(&v2, v[2] + d);
            EDGE_KV_LOAD(&v3, v[3] + d);
            for (int32_t g = 0; g < heads; g++) {
                const float *w = weights + g * EDGE_SEGMENT + j;
                EDGE_FN(load_f32)(&acc, out + g * out_stride + d);
                acc = acc + v0 * w[0] + v1 * w[1] + v2 * w[2] + v3 * w[3];
                EDGE_FN(store_f32)(out + g * out_stride + d, &acc);
            }
        }
        for (; d < dim; d++)
            for (int32_t g = 0; g < heads; g++)
                for (int32_t b = 0; b < 4; b++)
                    out[g * out_stride + d] += weights[g * EDGE_SEGMENT + j + b] * EDGE_KV_SCALAR(v[b][d]);
    }
    for (; j < count; j++) {
        const EDGE_KV *v = EDGE_KV_FN(row_at)(value, rows, j, dim);
        for (int32_t g = 0; g < heads; g++)
            for (int32_t d = 0; d < dim; d++)
                out[g * out_stride + d] += weights[g * EDGE_SEGMENT + j] * EDGE_KV_SCALAR(v[d]);
    }
}

/* Scores to exp(score - max), in place.  Returns max and sum through the pointers. */
EDGE_INLINE void EDGE_KV_FN(softmax_part)(float *scores, int32_t count, float *top_out, float *sum_out) {
    float top = scores[0];
    for (int32_t j = 1; j < count; j++) top = scores[j] > top ? scores[j] : top;
    /* Padding to whole vectors gets exp(-87), then is overwritten by zero so that it adds nothing. */
    const int32_t padded = (count + EDGE_LANES - 1) / EDGE_LANES * EDGE_LANES;
    for (int32_t j = count; j < padded; j++) scores[j] = top - 100.0f;
    EDGE_V total = {0}, x;
    for (int32_t j = 0; j < padded; j += EDGE_LANES) {
        EDGE_FN(load_f32)(&x, scores + j);
        x = x - top;
        EDGE_FN(exp)(&x);
        EDGE_FN(store_f32)(scores + j, &x);
        if (j + EDGE_LANES > count) {
            for (int32_t i = count; i < padded; i++) scores[i] = 0.0f;
            EDGE_FN(load_f32)(&x, scores + j);
        }
        total += x;
    }
    *top_out = top;
    *sum_out = EDGE_FN(sum)(&total);
}

/* Where the keys [first, first + count) of a page lie: side by side from element `*start` on; or, with keys of a tree
 * among them, at the `rows` that are returned. */
EDGE_INLINE const int64_t *EDGE_KV_FN(block_rows)(const edge_attention_args *a, const int32_t *table,
                                                  const edge_tree_row *tree, int32_t first, int32_t count,
                                                  int64_t *start, int64_t *rows) {
    const int32_t dim = a->kv.head_dim, size = a->kv.page_size;
    const int64_t page_elements = 2 * (int64_t)a->kv.num_kv_heads * size * dim;
    *start = 0;
    if (tree && first + count > tree->start) {
        edge_tree_places(tree, table, first, count, size, dim, page_elements, rows);
        return rows;
    }
    *start = edge_place(table, first, size, dim, page_elements);
    return NULL;
}

/* Keys [first, first + count) of one kv head against `heads` queries; with a tree, from its start on those of its bits.
 * out[g] = (unnormalised values[dim], max, sum), stride dim + 2. */
EDGE_INLINE void EDGE_KV_FN(segment_of)(const edge_attention_args *a, const int32_t *table, const edge_tree_row *tree,
                                        int32_t kv_head, int32_t first, int32_t count, const float *query,
                                        int32_t heads, float *out) {
    const int32_t dim = a->kv.head_dim, size = a->kv.page_size;
    const int64_t head_elements = (int64_t)size * dim;
    const EDGE_KV *keys = (const EDGE_KV *)a->pages + kv_head * head_elements;
    const EDGE_KV *values = keys + a->kv.num_kv_heads * head_elements;
    float scores[EDGE_MAX_GROUP * EDGE_SEGMENT];
    int64_t places[EDGE_SEGMENT], start;
    for (int32_t done = 0; done < count;) {
        const int32_t block = edge_block(first + done, count - done, size);
        const int64_t *rows = EDGE_KV_FN(block_rows)(a, table, tree, first + done, block, &start, places);
        EDGE_KV_FN(page_scores)(keys + start, rows, block, query, heads, dim, a->scale, scores + done);
        done += block;
    }
    for (int32_t g = 0; g < heads; g++) {
        float *part = out + g * (dim + 2);
        EDGE_KV_FN(softmax_part)(scores + g * EDGE_SEGMENT, count, part + dim, part + dim + 1);
        memset(part, 0, sizeof(float) * (size_t)dim);
    }
    for (int32_t done = 0; done < count;) {
        const int32_t block = edge_block(first + done, count - done, size);
        const int64_t *rows = EDGE_KV_FN(block_rows)(a, table, tree, first + done, block, &start, places);
        EDGE_KV_FN(page_values)(values + start, rows, block, scores + done, heads, dim, out, dim + 2);
        done += block;
    }
}

EDGE_ALONE void EDGE_KV_FN(segment)(const edge_attention_args *a, const int32_t *table, int32_t kv_head, int32_t first,
                                    int32_t count, const float *query, int32_t heads, float *out) {
    EDGE_KV_FN(segment_of)(a, table, NULL, kv_head, first, count, query, heads, out);
}

EDGE_ALONE void EDGE_KV_FN(tree_segment)(const edge_attention_args *a, const int32_t *table, const edge_tree_row *tree,
                                         int32_t kv_head, int32_t first, int32_t count, const float *query,
                                         int32_t heads, float *out) {
    EDGE_KV_FN(segment_of)(a, table, tree, kv_head, first, count, query, heads, out);
}

#undef EDGE_KV_LOAD
#undef EDGE_KV_FN
