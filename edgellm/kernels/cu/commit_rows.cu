// Commit of accepted tree rows: K and V of the token at place base_len[n] + index[n, i] of sequence n move to place
// base_len[n] + i, for i in [0, count[n]), in all layers at once.
// Axes: sequences n (grid x), layers (grid y), words of a head row over both sides and all heads (grid z, threads).
// Strides in bytes.  A word is kWord bytes of a head row, or (fp8) the row's scale; one thread moves that word of
// every accepted token, so nothing waits for another thread.  In place: index[n, i] >= i and increasing, so what a
// move writes was read before; kBatch tokens are read before any of them is written, which hides latency.
// slot -1 (padding), an index that does not increase, or a place without a page: nothing more of that sequence moves.
#include "types.cuh"

namespace edgellm {

struct CommitRowsParams {
  void* storage;
  const int* page_table;
  const int* slots;
  const int* base_len;
  const int* index;
  const int* count;
  i64 layer_bytes;
  i64 page_bytes;
  int head_bytes;
  int place_bytes;  // of the values of one token in one head
  int scale_bytes;  // 4 for fp8, else 0
  int num_heads;    // kv heads of both sides
  int page_size;
  int num_pages;
  int num_slots;
  int pages_per_slot;
  int max_count;  // columns of index
};

constexpr int kCommitThreads = 128;

// Address of a word of a head row at a position, without its layer and head; null where there is no page.
__device__ __forceinline__ u8* word_at(const CommitRowsParams& p, u8* base, int slot, int position, int offset,
                                       int pitch) {
  const int block = position / p.page_size;
  if (position < 0 || block >= p.pages_per_slot) return nullptr;
  const int page = p.page_table[static_cast<i64>(slot) * p.pages_per_slot + block];
  if (page < 0 || page >= p.num_pages) return nullptr;
  return base + page * p.page_bytes + offset + static_cast<i64>(position % p.page_size) * pitch;
}

// Moves one word of every accepted token; `pitch` bytes lie between the words of neighbouring places.
template <typename Word>
__device__ __forceinline__ void move_words(const CommitRowsParams& p, u8* base, int slot, int offset, int pitch) {
  constexpr int kBatch = 8;
  const int* index = p.index + static_cast<i64>(blockIdx.x) * p.max_count;
  const int length = p.base_len[blockIdx.x], count = min(p.count[blockIdx.x], p.max_count);
  int last = -1;
  for (int start = 0; start < count; start += kBatch) {
    Word words[kBatch];
    u8* targets[kBatch];
    bool is_good = true;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      targets[k] = nullptr;
      if (!is_good || start + k >= count) continue;
      const int from = index[start + k];
      is_good = from > last && from >= start + k;
      last = from;
      if (!is_good || from == start + k) continue;
      const u8* source = word_at(p, base, slot, length + from, offset, pitch);
      u8* target = word_at(p, base, slot, length + start + k, offset, pitch);
      is_good = source != nullptr && target != nullptr;
      if (!is_good) continue;
      words[k] = *reinterpret_cast<const Word*>(source);
      targets[k] = target;
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (targets[k] != nullptr) *reinterpret_cast<Word*>(targets[k]) = words[k];
    if (!is_good) return;
  }
}

template <typename Word>
__global__ void __launch_bounds__(kCommitThreads) commit_rows(const __grid_constant__ CommitRowsParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int slot = p.slots[blockIdx.x];
  const int words_per_row = p.place_bytes / static_cast<int>(sizeof(Word)), words = words_per_row + p.scale_bytes / 4;
  const int item = blockIdx.z * kCommitThreads + threadIdx.x;
  if (slot < 0 || slot >= p.num_slots || item >= words * p.num_heads) return;
  const int head = item / words, word = item % words;
  u8* base = static_cast<u8*>(p.storage) + blockIdx.y * p.layer_bytes;
  const int block = head * p.head_bytes;
  if (word < words_per_row) {
    move_words<Word>(p, base, slot, block + word * static_cast<int>(sizeof(Word)), p.place_bytes);
  } else {
    move_words<u32>(p, base, slot, block + p.page_size * p.place_bytes, 4);
  }
}

}  // namespace edgellm
