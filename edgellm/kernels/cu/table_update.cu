// Changed rows of the page table: table[slots[i], :] = rows[i, :]; slots out of range (-1: padding) are skipped.
// Axes: entries i (grid x), blocks in [0, width) (grid y, threads); strides in elements.  Each slot at most once.
#include "types.cuh"

namespace edgellm {

struct TableUpdateParams {
  int* table;
  const int* slots;
  const int* rows;
  i64 table_stride;
  i64 rows_stride;
  int width;
  int num_slots;
};

constexpr int kUpdateThreads = 128;

template <int kStep>
__global__ void __launch_bounds__(kUpdateThreads) table_update(const __grid_constant__ TableUpdateParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 slot = p.slots[blockIdx.x];
  const int column = (blockIdx.y * kUpdateThreads + threadIdx.x) * kStep;
  if (slot < 0 || slot >= p.num_slots || column >= p.width) return;
  const Vec<int, kStep> ids = load_vec<int, kStep>(p.rows + blockIdx.x * p.rows_stride + column);
  store_vec(p.table + slot * p.table_stride + column, ids);
}

}  // namespace edgellm
