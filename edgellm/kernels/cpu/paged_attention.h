/* Attention of single query rows over paged K and V, and the moves between rows and pages.
 *
 * KV layout of one layer, in elements: [page, 2 (K, V), kv_head, place, dim], C-contiguous.
 */
#ifndef EDGE_PAGED_ATTENTION_H
#define EDGE_PAGED_ATTENTION_H

#include <stdint.h>

/* Keys are taken this many at a time, counted from position 0 whatever the batch, so a row's result does not depend on
 * its neighbours. */
#define EDGE_SEGMENT 256

typedef struct {
    int32_t num_kv_heads;
    int32_t page_size;
    int32_t head_dim;
    int32_t is_bf16; /* element type of the pages: 1 bfloat16, 0 float32 */
} edge_kv_shape;

typedef struct {
    edge_kv_shape kv;
    const void *pages;          /* the layer's pages */
    const void *query;          /* row r, head h at query_rows[r] * query_stride + h * head_dim */
    void *out;                  /* row r, head h at query_rows[r] * out_stride + h * head_dim */
    const int64_t *query_rows;  /* (num_rows) token row of each query */
    const int32_t *page_rows;   /* page table */
    const int64_t *table_start; /* (num_rows) index into page_rows of the row's first block */
    const int32_t *starts;      /* (num_rows) first key each row sees; those before it are not read */
    const int32_t *lengths;     /* (num_rows) one past the last key each row sees, above its start */
    const int32_t *tree_start;  /* (num_rows) key from which on the row's bits choose; NULL: no row is one of a tree */
    const uint32_t *tree_mask;  /* (num_rows, tree_words): the n-th bit that is set is key tree_start + n of the row */
    const int32_t *segment_start; /* (num_rows + 1) exclusive prefix sum of segments per row */
    const int32_t *order;       /* (segments * kv heads) task codes, segment * kv heads + kv head, in the order to run */
    float *scratch;             /* segments * num_heads * (head_dim + 2) floats */
    int64_t query_stride;       /* elements */
    int64_t out_stride;         /* elements */
    int32_t num_rows;
    int32_t num_heads;
    int32_t tree_words;
    int32_t rows_bf16; /* element type of query and out */
    float scale;
} edge_attention_args;

/* out = softmax(scale * q K^T) V over keys [start, length) for every row and head; reads pages in place.
 *
 * A key's number is its place in the sequence.  In a row of a tree, key tree_start + n lies at place tree_start + b,
 * where b is the n-th bit that is set: the row's ancestors are read as if they stood side by side, so its result is,
 * bit for bit, that of a row whose keys do. */
void edge_paged_attention(const edge_attention_args *args, int num_threads);

typedef struct {
    edge_kv_shape kv;
    void *pages;
    const void *key;   /* token t, head h at t * row_stride + h * head_dim */
    const void *value;
    const int64_t *offsets; /* (num_tokens) page_id * page_size + place; negative skips the token */
    int64_t row_stride;     /* elements */
    int64_t num_tokens;
    int32_t rows_bf16;
} edge_write_args;

/* Store K and V of tokens at their offsets. */
void edge_write_kv(const edge_write_args *args, int num_threads);

typedef struct {
    edge_kv_shape kv;
    const void *pages;
    void *out; /* [2, kv_head, length, dim], element type of the pages */
    const int32_t *page_ids;
    int64_t length;
} edge_gather_args;

/* Copy the first `length` tokens of a sequence out of its pages. */
void edge_gather_kv(const edge_gather_args *args, int num_threads);

#endif
