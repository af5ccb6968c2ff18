// RMS norm of rows, with an optional residual sum before it.
// Axes: rows t in [0, num_rows), columns d in [0, width); strides in elements.
//   with residual:  residual[t, d] = T(residual[t, d] + x[t, d]), and the norm is of what was stored
//   out[t, d] = T(r[t, d] / sqrt(mean_d(r^2) + eps) * weight[d])
// kThreads threads work on a row and a block on blockDim.y rows; the order of the sum depends on the width alone, so
// a row's bits do not depend on how many rows there are.  kVectors > 0: a thread keeps that many 16-byte vectors in
// registers.  kVectors == 0: any width and alignment, elements one by one, read twice.
#include "types.cuh"

namespace edgellm {

struct RmsNormParams {
  const void* x;
  const float* weight;
  void* residual;  // or null
  void* out;
  i64 x_stride;
  i64 residual_stride;
  i64 out_stride;
  int num_rows;
  int width;
  float eps;
  float inverse_width;
};

template <int kThreads>
__device__ __forceinline__ float row_sum(float value) {
  if constexpr (kThreads == kWarp) {
    return warp_sum(value);
  } else {
    __shared__ float scratch[kWarp];
    return block_sum<kThreads>(value, scratch);
  }
}

// The row to normalise, in registers: x, or the stored sum of residual and x.
template <typename T>
__device__ __forceinline__ void load_row_part(const T* x, T* residual, int column, float (&values)[kVec<T>]) {
  load_floats(x + column, values);
  if (residual == nullptr) return;
  float sum[kVec<T>];
  load_floats(residual + column, sum);
#pragma unroll
  for (int i = 0; i < kVec<T>; ++i) values[i] = to_float(from_float<T>(sum[i] + values[i]));
  store_floats(residual + column, values);
}

template <typename T, int kThreads, int kVectors>
__device__ __forceinline__ void norm_in_registers(const RmsNormParams& p, const T* x, T* residual, T* out) {
  constexpr int kStep = kThreads * kVec<T>;
  const int first = threadIdx.x * kVec<T>;
  float values[kVectors][kVec<T>], weights[kVectors][kVec<T>];
#pragma unroll
  for (int k = 0; k < kVectors; ++k)
    if (first + k * kStep < p.width) load_floats(p.weight + first + k * kStep, weights[k]);
  wait_for_previous_kernel();  // nobody writes the weights while a model runs
  if (x == nullptr) return;
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (first + k * kStep >= p.width) break;
    load_row_part(x, residual, first + k * kStep, values[k]);
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) squares += values[k][i] * values[k][i];
  }
  const float inverse = rsqrtf(row_sum<kThreads>(squares) * p.inverse_width + p.eps);
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (first + k * kStep >= p.width) break;
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) values[k][i] = values[k][i] * inverse * weights[k][i];
    store_floats(out + first + k * kStep, values[k]);
  }
}

template <typename T, int kThreads>
__device__ __forceinline__ void norm_by_element(const RmsNormParams& p, const T* x, T* residual, T* out) {
  wait_for_previous_kernel();
  if (x == nullptr) return;
  float squares = 0.0f;
  for (int column = threadIdx.x; column < p.width; column += kThreads) {
    float value = to_float(x[column]);
    if (residual != nullptr) {
      residual[column] = from_float<T>(to_float(residual[column]) + value);
      value = to_float(residual[column]);
    }
    squares += value * value;
  }
  const float inverse = rsqrtf(row_sum<kThreads>(squares) * p.inverse_width + p.eps);
  const T* row = residual == nullptr ? x : residual;
  for (int column = threadIdx.x; column < p.width; column += kThreads)
    out[column] = from_float<T>(to_float(row[column]) * inverse * p.weight[column]);
}

template <int kThreads>
constexpr int kBlockThreads = kThreads < 128 ? 128 : kThreads;

// x and out may be the same rows, hence no __restrict__.  A row beyond the last has x == nullptr: its threads still
// wait for the kernel before this one, so that the next kernel may rely on both.
template <typename T, int kThreads, int kVectors>
__global__ void __launch_bounds__(kBlockThreads<kThreads>, (kVectors == 1 ? 1536 : 1024) / kBlockThreads<kThreads>)
    rms_norm(const __grid_constant__ RmsNormParams p) {
  let_next_kernel_start();
  const i64 row = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y;
  const T* x = row < p.num_rows ? static_cast<const T*>(p.x) + row * p.x_stride : nullptr;
  T* residual = p.residual == nullptr ? nullptr : static_cast<T*>(p.residual) + row * p.residual_stride;
  T* out = static_cast<T*>(p.out) + row * p.out_stride;
  if constexpr (kVectors > 0) {
    norm_in_registers<T, kThreads, kVectors>(p, x, residual, out);
  } else {
    norm_by_element<T, kThreads>(p, x, residual, out);
  }
}

}  // namespace edgellm
