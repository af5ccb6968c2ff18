// Inputs of a decode step become those of the step behind it: rows[i] takes tokens[i] and stands one place further.
// Axes: rows i (grid x, threads).  Rows without a slot (-1: padding) stay as they are.
#include "types.cuh"

namespace edgellm {

struct AdvanceRowsParams {
  const int* tokens;
  const int* slots;
  int* token_ids;
  int* positions;
  int* past_len;
  int* lengths;
  int num_rows;
};

constexpr int kAdvanceThreads = 128;

__global__ void __launch_bounds__(kAdvanceThreads) advance_rows(const __grid_constant__ AdvanceRowsParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = blockIdx.x * kAdvanceThreads + threadIdx.x;
  if (row >= p.num_rows || p.slots[row] < 0) return;
  p.token_ids[row] = p.tokens[row];
  p.positions[row] += 1;
  p.past_len[row] += 1;
  p.lengths[row] += 1;
}

}  // namespace edgellm
