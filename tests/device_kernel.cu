// A kernel of the tests: out[r, c] = in[r, c] * factor, by way of static and dynamic shared memory.  One block a row;
// axes r (rows) and c (columns), both contiguous.
#include "types.cuh"

namespace edgellm {

struct ScaleRowsParams {
  const void* in;
  void* out;
  long long columns;
  float factor;
  int waits;  // 1: wait for the kernel in front before reading
};

template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads) scale_rows(const __grid_constant__ ScaleRowsParams p) {
  extern __shared__ float staged[];
  __shared__ float factor;
  if (threadIdx.x == 0) factor = p.factor;
  __syncthreads();
  if (p.waits) wait_for_previous_kernel();
  const T* in = static_cast<const T*>(p.in) + blockIdx.x * p.columns;
  T* out = static_cast<T*>(p.out) + blockIdx.x * p.columns;
  for (long long c = threadIdx.x; c < p.columns; c += kThreads) {
    staged[threadIdx.x] = to_float(in[c]) * factor;
    out[c] = from_float<T>(staged[threadIdx.x]);
  }
  let_next_kernel_start();
}

}  // namespace edgellm
