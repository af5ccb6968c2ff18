// Gated activation: out[t, f] = T(silu(gate_up[t, f]) * gate_up[t, width + f]), silu(x) = x / (1 + exp(-x)).
// Axes: rows t in [0, num_rows), columns f in [0, width); strides in elements.  The grid's x covers the columns in
// accesses of kStep elements a thread, its y the rows, with a stride.
#include "activations.cuh"
#include "types.cuh"

namespace edgellm {

struct SiluMulParams {
  const void* gate_up;
  void* out;
  i64 gate_up_stride;
  i64 out_stride;
  int num_rows;
  int width;
};

constexpr int kSiluThreads = 128;

template <typename T, int kStep>
__global__ void __launch_bounds__(kSiluThreads) silu_mul(const __grid_constant__ SiluMulParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int column = (blockIdx.x * kSiluThreads + threadIdx.x) * kStep;
  if (column >= p.width) return;
#pragma unroll 1  // one row a block, but for more rows than a grid holds
  for (i64 row = blockIdx.y; row < p.num_rows; row += gridDim.y) {
    const T* __restrict__ gate_row = static_cast<const T*>(p.gate_up) + row * p.gate_up_stride + column;
    float gate[kStep], up[kStep];
    load_floats(gate_row, gate);
    load_floats(gate_row + p.width, up);
#pragma unroll
    for (int i = 0; i < kStep; ++i) gate[i] = silu<T>(gate[i]) * up[i];
    store_floats(static_cast<T*>(p.out) + row * p.out_stride + column, gate);
  }
}

}  // namespace edgellm
