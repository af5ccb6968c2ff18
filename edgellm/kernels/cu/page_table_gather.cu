// Page rows of the active sequences: out[n, :] = table[slots[n], :]; all -1 where the slot is out of range (padding).
// Axes: sequences n (grid x), blocks in [0, width) (grid y, threads); strides in elements.
#include "types.cuh"

namespace edgellm {

struct PageTableGatherParams {
  const int* table;
  const int* slots;
  int* out;
  i64 table_stride;
  i64 out_stride;
  int width;
  int num_slots;
};

constexpr int kGatherThreads = 128;

template <int kStep>
__global__ void __launch_bounds__(kGatherThreads) page_table_gather(const __grid_constant__ PageTableGatherParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 slot = p.slots[blockIdx.x];
  const int column = (blockIdx.y * kGatherThreads + threadIdx.x) * kStep;
  if (column >= p.width) return;
  Vec<int, kStep> ids;
  if (slot >= 0 && slot < p.num_slots) {
    ids = load_vec<int, kStep>(p.table + slot * p.table_stride + column);
  } else {
#pragma unroll
    for (int k = 0; k < kStep; ++k) ids[k] = -1;
  }
  store_vec(p.out + blockIdx.x * p.out_stride + column, ids);
}

}  // namespace edgellm
