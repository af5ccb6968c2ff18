// Gated activation: out[t, f] = T(gelu(gate[t, f]) * up[t, f]), with the tanh form of gelu.
// Axes: rows t in [0, num_rows), columns f in [0, width); strides in elements.  The grid's x covers the columns in
// accesses of kStep elements a thread, its y the rows, with a stride.
#include "types.cuh"

namespace edgellm {

struct GeluMulParams {
  const void* gate;
  const void* up;
  void* out;
  i64 gate_stride;
  i64 up_stride;
  i64 out_stride;
  int num_rows;
  int width;
};

constexpr int kGeluThreads = 128;

// x (1 + tanh(y)) / 2 = x / (1 + exp(-2 y)), which does not cancel; y = sqrt(2 / pi) (x + 0.044715 x^3).
template <typename T>
__device__ __forceinline__ float gelu(float x) {
  const float exponent = -1.5957691216057308f * (x + 0.044715f * x * x * x);
  if constexpr (sizeof(T) == sizeof(float)) {
    return x / (1.0f + expf(exponent));
  } else {
    return __fdividef(x, 1.0f + __expf(exponent));  // 0 for a denominator above 2^126, the limit there
  }
}

template <typename T, int kStep>
__global__ void __launch_bounds__(kGeluThreads) gelu_mul(const __grid_constant__ GeluMulParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int column = (blockIdx.x * kGeluThreads + threadIdx.x) * kStep;
  if (column >= p.width) return;
#pragma unroll 1  // one row a block, but for more rows than a grid holds
  for (i64 row = blockIdx.y; row < p.num_rows; row += gridDim.y) {
    float gate[kStep], up[kStep];
    load_floats(static_cast<const T*>(p.gate) + row * p.gate_stride + column, gate);
    load_floats(static_cast<const T*>(p.up) + row * p.up_stride + column, up);
#pragma unroll
    for (int i = 0; i < kStep; ++i) gate[i] = gelu<T>(gate[i]) * up[i];
    store_floats(static_cast<T*>(p.out) + row * p.out_stride + column, gate);
  }
}

}  // namespace edgellm
