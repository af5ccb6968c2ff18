// Embedding lookup: out[t, :] = table[ids[t], :], or media[media_index[t], :] where media_index[t] >= 0.
// Axes: tokens t in [0, num_tokens), columns d in [0, width); strides in elements.  id -1 is padding: a row of zeros.
// An id or media index out of range: a row of zeros, and *error (where given) becomes 1.  A block works on one token
// (grid x) and on kEmbedThreads * kStep of its columns (grid y).
#include "types.cuh"

namespace edgellm {

struct EmbeddingParams {
  const int* ids;
  const void* table;
  const void* media;        // or null
  const int* media_index;   // or null
  int* error;               // or null
  void* out;
  i64 table_stride;
  i64 media_stride;
  i64 out_stride;
  int width;
  int num_ids;
  int num_media;
};

constexpr int kEmbedThreads = 128;

// The row to copy, or null: zeros.
template <typename T>
__device__ __forceinline__ const T* source_row(const EmbeddingParams& p, int token) {
  const int id = p.ids[token], media = p.media_index == nullptr ? -1 : p.media_index[token];
  if (media >= 0 && media < p.num_media) return static_cast<const T*>(p.media) + media * p.media_stride;
  if (media < 0 && id >= 0 && id < p.num_ids) return static_cast<const T*>(p.table) + id * p.table_stride;
  if ((media >= 0 || id != -1) && p.error != nullptr && threadIdx.x == 0 && blockIdx.y == 0) *p.error = 1;
  return nullptr;
}

template <typename T, int kStep>
__global__ void __launch_bounds__(kEmbedThreads) embedding(const __grid_constant__ EmbeddingParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 token = blockIdx.x;
  const T* __restrict__ row = source_row<T>(p, blockIdx.x);
  const int column = (blockIdx.y * kEmbedThreads + threadIdx.x) * kStep;
  if (column >= p.width) return;
  Vec<T, kStep> values = {};
  if (row != nullptr) values = load_vec<T, kStep>(row + column);
  store_vec(static_cast<T*>(p.out) + token * p.out_stride + column, values);
}

}  // namespace edgellm
