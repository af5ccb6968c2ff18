// RMS norm of each head, then a silu gate: what a gated delta net does to its rows in front of the last projection.
// Axes: rows t, heads h of a row, dims d in [0, head_dim); strides in elements.
//   n = T(x / sqrt(mean_d(x^2) + eps) * weight[d]);  out = T(n * silu(gate))
// A warp a head; grid x over all heads of all rows.  kParts > 0: head_dim = 32 kParts, a lane's dims side by side.
// kParts == 0: any head_dim.  x and out may be the same rows.
#include "activations.cuh"

namespace edgellm {

struct GatedNormParams {
  const void* x;
  const void* gate;
  const float* weight;
  void* out;
  i64 x_stride;
  i64 gate_stride;
  i64 out_stride;
  int num_rows;
  int heads;
  int head_dim;
  float eps;
};

constexpr int kGatedNormWarps = 4;

template <typename T>
__device__ __forceinline__ T gated(float value, float inverse, float weight, float gate) {
  return from_float<T>(to_float(from_float<T>(value * inverse * weight)) * silu<T>(gate));
}

template <typename T, int kParts>
__device__ __forceinline__ void norm_lanes(const GatedNormParams& p, const T* x, const T* gate, T* out, int lane) {
  const int first = lane * kParts;
  float values[kParts], gates[kParts], weights[kParts], squares = 0.0f;
  load_floats(x + first, values);
  load_floats(gate + first, gates);
  load_floats(p.weight + first, weights);
#pragma unroll
  for (int i = 0; i < kParts; ++i) squares = fmaf(values[i], values[i], squares);
  const float inverse = rsqrtf(warp_sum(squares) * (1.0f / (kParts * kWarp)) + p.eps);
#pragma unroll
  for (int i = 0; i < kParts; ++i) values[i] = to_float(gated<T>(values[i], inverse, weights[i], gates[i]));
  store_floats(out + first, values);
}

template <typename T>
__device__ __forceinline__ void norm_any(const GatedNormParams& p, const T* x, const T* gate, T* out, int lane) {
  float squares = 0.0f;
  for (int d = lane; d < p.head_dim; d += kWarp) squares = fmaf(to_float(x[d]), to_float(x[d]), squares);
  const float inverse = rsqrtf(__fdiv_rn(warp_sum(squares), static_cast<float>(p.head_dim)) + p.eps);
  for (int d = lane; d < p.head_dim; d += kWarp)
    out[d] = gated<T>(to_float(x[d]), inverse, p.weight[d], to_float(gate[d]));
}

template <typename T, int kParts>
__global__ void __launch_bounds__(kGatedNormWarps* kWarp) gated_norm(const __grid_constant__ GatedNormParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 number = static_cast<i64>(blockIdx.x) * kGatedNormWarps + threadIdx.x / kWarp;
  const i64 row = number / p.heads, head = number % p.heads;
  if (row >= p.num_rows) return;
  const int lane = threadIdx.x % kWarp;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride + head * p.head_dim;
  const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride + head * p.head_dim;
  T* out = static_cast<T*>(p.out) + row * p.out_stride + head * p.head_dim;
  if constexpr (kParts > 0) {
    norm_lanes<T, kParts>(p, x, gate, out, lane);
  } else {
    norm_any<T>(p, x, gate, out, lane);
  }
}

}  // namespace edgellm
