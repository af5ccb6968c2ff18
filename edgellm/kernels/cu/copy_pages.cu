// Copies of pages, all layers: page source[i] to page target[i], or only its first places[i] places.
// Axes: pairs i (grid x), layers (grid y), chunks of kCopyThreads * kCopyVectors 16-byte vectors of a page (grid z).
// Strides and offsets in bytes.  A page is head blocks of head_bytes: page_size places of place_bytes, then (fp8)
// page_size scales of 4 bytes.  Pairs with a page out of range (-1: padding) copy nothing.
// Pages are read and written side by side: no target may be another pair's source; the host sees to that.
#include "types.cuh"

namespace edgellm {

struct CopyPagesParams {
  void* storage;
  const int* source;
  const int* target;
  const int* places;  // or null: whole pages
  i64 layer_bytes;
  int page_bytes;
  int head_bytes;
  int place_bytes;
  int page_size;
  int num_pages;
};

constexpr int kCopyThreads = 256;
constexpr int kCopyVectors = 4;

// Whether the 4 bytes at this offset of a page belong to its first `places` places.
__device__ __forceinline__ bool is_within(const CopyPagesParams& p, int offset, int places) {
  const int in_head = offset % p.head_bytes, value_bytes = p.page_size * p.place_bytes;
  return in_head < value_bytes ? in_head < places * p.place_bytes : in_head - value_bytes < places * 4;
}

__device__ __forceinline__ void copy_within(const CopyPagesParams& p, const u8* from, u8* to, int offset, int places) {
#pragma unroll
  for (int word = offset; word < offset + 16; word += 4)
    if (is_within(p, word, places)) *reinterpret_cast<u32*>(to + word) = *reinterpret_cast<const u32*>(from + word);
}

__device__ __forceinline__ void copy_whole(const CopyPagesParams& p, const u8* from, u8* to, int first) {
  uint4 vectors[kCopyVectors];
#pragma unroll
  for (int k = 0; k < kCopyVectors; ++k)
    if (first + k * kCopyThreads * 16 < p.page_bytes)
      vectors[k] = *reinterpret_cast<const uint4*>(from + first + k * kCopyThreads * 16);
#pragma unroll
  for (int k = 0; k < kCopyVectors; ++k)
    if (first + k * kCopyThreads * 16 < p.page_bytes)
      *reinterpret_cast<uint4*>(to + first + k * kCopyThreads * 16) = vectors[k];
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) copy_pages(const __grid_constant__ CopyPagesParams p) {
  static_assert(kThreads == kCopyThreads, "the chunk of a block");
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int source = p.source[blockIdx.x], target = p.target[blockIdx.x];
  if (source < 0 || source >= p.num_pages || target < 0 || target >= p.num_pages) return;
  u8* layer = static_cast<u8*>(p.storage) + blockIdx.y * p.layer_bytes;
  const u8* from = layer + static_cast<i64>(source) * p.page_bytes;
  u8* to = layer + static_cast<i64>(target) * p.page_bytes;
  const int first = (blockIdx.z * kCopyVectors * kThreads + threadIdx.x) * 16;
  const int places = p.places == nullptr ? p.page_size : p.places[blockIdx.x];
  if (places >= p.page_size) return copy_whole(p, from, to, first);
#pragma unroll
  for (int k = 0; k < kCopyVectors; ++k)
    if (first + k * kThreads * 16 < p.page_bytes) copy_within(p, from, to, first + k * kThreads * 16, places);
}

}  // namespace edgellm
