// Compaction in place: row mapping[i] = row i for every i with mapping[i] >= 0.  Kept rows stay in order, so
// mapping[i] <= i and a row is written only after it was read.
// Axes: rows i in [0, num_rows) of row_bytes, words of a row (grid x, threads).  One thread moves one word of every
// row, so nothing waits for another thread; kBatch rows are read before any of them is written.
// A target beyond i, or not beyond the last one, is skipped: it would overwrite what is still to be read.
#include "types.cuh"

namespace edgellm {

struct CompactRowsParams {
  void* rows;
  const int* mapping;
  i64 row_bytes;
  int num_rows;
};

constexpr int kCompactThreads = 128;

template <typename Word>
__global__ void __launch_bounds__(kCompactThreads) compact_rows(const __grid_constant__ CompactRowsParams p) {
  constexpr int kBatch = 8;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 offset = (static_cast<i64>(blockIdx.x) * kCompactThreads + threadIdx.x) * static_cast<i64>(sizeof(Word));
  if (offset >= p.row_bytes) return;
  u8* column = static_cast<u8*>(p.rows) + offset;
  int last = -1;
  for (int start = 0; start < p.num_rows; start += kBatch) {
    Word words[kBatch];
    int targets[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int row = start + k, target = row < p.num_rows ? p.mapping[row] : -1;
      targets[k] = -1;
      if (target <= last || target > row) continue;
      last = target;
      if (target == row) continue;
      words[k] = *reinterpret_cast<const Word*>(column + row * p.row_bytes);
      targets[k] = target;
    }
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (targets[k] >= 0) *reinterpret_cast<Word*>(column + targets[k] * p.row_bytes) = words[k];
  }
}

}  // namespace edgellm
