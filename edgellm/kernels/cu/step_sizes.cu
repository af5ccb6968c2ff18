// Step sizes of a Mamba-2 scan: out[t, h] = min(max(softplus(x[t, h] + bias[h]), least), greatest).
// Axes: rows t in [0, num_rows), heads h in [0, width); strides in elements.  A thread an element, the grid along x.
#include "activations.cuh"
#include "types.cuh"

namespace edgellm {

struct StepSizesParams {
  const void* x;
  const float* bias;
  float* out;
  i64 x_stride;
  i64 out_stride;
  int num_rows;
  int width;
  float least;
  float greatest;
};

constexpr int kStepSizesThreads = 128;

template <typename T>
__global__ void __launch_bounds__(kStepSizesThreads) step_sizes(const __grid_constant__ StepSizesParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 index = static_cast<i64>(blockIdx.x) * kStepSizesThreads + threadIdx.x;
  const i64 row = index / p.width;
  if (row >= p.num_rows) return;
  const int head = static_cast<int>(index - row * p.width);
  const float value = softplus(to_float(static_cast<const T*>(p.x)[row * p.x_stride + head]) + p.bias[head]);
  p.out[row * p.out_stride + head] = fminf(fmaxf(value, p.least), p.greatest);
}

}  // namespace edgellm
