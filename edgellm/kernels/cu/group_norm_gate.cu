// Gated norm behind a Mamba-2 scan: y = x * silu(gate), out = T(y / sqrt(mean of y^2 over the group + eps) * weight).
// Axes: rows t in [0, num_rows), columns c in [0, width); groups of group_width neighbouring columns are normalised
// each by itself; strides in elements.  A block has one group of one row and reads it twice, in accesses of kStep
// elements.  Grid: x groups, y rows with a stride.  A row's bits do not depend on the others.
#include "activations.cuh"
#include "types.cuh"

namespace edgellm {

struct GroupNormGateParams {
  const void* x;
  const void* gate;
  const float* weight;
  void* out;
  i64 x_stride;
  i64 gate_stride;
  i64 out_stride;
  int num_rows;
  int group_width;
  float eps;
};

constexpr int kGroupNormThreads = 256;

template <typename T, int kStep>
__device__ __forceinline__ void load_gated(const T* x, const T* gate, float (&gated)[kStep]) {
  float opened[kStep];
  load_floats(x, gated);
  load_floats(gate, opened);
#pragma unroll
  for (int i = 0; i < kStep; ++i) gated[i] *= silu<T>(opened[i]);
}

template <typename T, int kStep>
__global__ void __launch_bounds__(kGroupNormThreads, 4)
    group_norm_gate(const __grid_constant__ GroupNormGateParams p) {
  __shared__ float scratch[kWarp];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int begin = blockIdx.x * p.group_width, end = begin + p.group_width;
  const int first = begin + threadIdx.x * kStep;
  constexpr int kStride = kGroupNormThreads * kStep;
#pragma unroll 1  // one row a block, but for more rows than a grid holds
  for (i64 row = blockIdx.y; row < p.num_rows; row += gridDim.y) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride;
    T* out = static_cast<T*>(p.out) + row * p.out_stride;
    float squares = 0.0f, gated[kStep], weight[kStep];
    for (int column = first; column < end; column += kStride) {
      load_gated<T, kStep>(x + column, gate + column, gated);
#pragma unroll
      for (int i = 0; i < kStep; ++i) squares += gated[i] * gated[i];
    }
    const float mean = block_sum<kGroupNormThreads>(squares, scratch) / static_cast<float>(p.group_width);
    const float inverse = rsqrtf(mean + p.eps);
    for (int column = first; column < end; column += kStride) {
      load_gated<T, kStep>(x + column, gate + column, gated);
      load_floats(p.weight + column, weight);
#pragma unroll
      for (int i = 0; i < kStep; ++i) gated[i] = gated[i] * inverse * weight[i];
      store_floats(out + column, gated);
    }
  }
}

}  // namespace edgellm
