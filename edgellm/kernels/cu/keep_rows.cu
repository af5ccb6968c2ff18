// The latest rows of each slot, in a ring: row of place p of a sequence goes to ring[slot][p % room].
// Axes: rows t of a step (grid x), columns in [0, width) (grid y, threads); strides in elements.  Of a sequence only the
// last `room` places are kept, so that no two rows of a step go to the same.  Rows of nobody (-1: padding) are skipped.
#include "types.cuh"

namespace edgellm {

struct KeepRowsParams {
  const void* rows;
  const int* places;
  const int* token_seq;
  const int* slots;
  const int* lengths;
  void* ring;
  i64 row_stride;
  int width;
  int room;
  int num_sequences;
  int num_slots;
};

constexpr int kKeepThreads = 128;

template <typename T, int kStep>
__global__ void __launch_bounds__(kKeepThreads) keep_rows(const __grid_constant__ KeepRowsParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int sequence = p.token_seq[blockIdx.x];
  const int column = (blockIdx.y * kKeepThreads + threadIdx.x) * kStep;
  if (sequence < 0 || sequence >= p.num_sequences || column >= p.width) return;
  const int slot = p.slots[sequence];
  const int place = p.places[blockIdx.x];
  if (slot < 0 || slot >= p.num_slots || place < 0 || place < p.lengths[sequence] - p.room) return;
  const T* source = static_cast<const T*>(p.rows) + blockIdx.x * p.row_stride + column;
  T* target = static_cast<T*>(p.ring) + (static_cast<i64>(slot) * p.room + place % p.room) * p.width + column;
  store_vec(target, load_vec<T, kStep>(source));
}

}  // namespace edgellm
