// Gates of rows, each element by itself.  Axes: rows n in [0, num_rows), columns w in [0, width); strides in elements.
#include "activations.cuh"

namespace edgellm {

constexpr int kGateThreads = 128;

struct GateParams {
  void* x;
  const void* gate;
  i64 x_stride;
  i64 gate_stride;
  int num_rows;
  int width;
  int is_scalar;  // one gate a row
  int has_silu;
};

// x[n, w] = T(x[n, w] * act(gate[n, w])).  Grid: x columns, kStep a thread; y rows, with a stride.
template <typename T, int kStep>
__global__ void __launch_bounds__(kGateThreads) gate_rows(const __grid_constant__ GateParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int column = (blockIdx.x * kGateThreads + threadIdx.x) * kStep;
  if (column >= p.width) return;
#pragma unroll 1
  for (i64 row = blockIdx.y; row < p.num_rows; row += gridDim.y) {
    T* x = static_cast<T*>(p.x) + row * p.x_stride + column;
    const T* gates = static_cast<const T*>(p.gate) + row * p.gate_stride;
    float values[kStep], gate[kStep];
    load_floats(x, values);
    if (p.is_scalar) {
#pragma unroll
      for (int i = 0; i < kStep; ++i) gate[i] = to_float(gates[0]);
    } else {
      load_floats(gates + column, gate);
    }
#pragma unroll
    for (int i = 0; i < kStep; ++i) values[i] *= p.has_silu ? silu<T>(gate[i]) : sigmoid<T>(gate[i]);
    store_floats(x, values);
  }
}

struct DeltaGatesParams {
  const void* a;
  const void* b;
  const float* rate;
  const float* bias;
  float* decay;
  float* beta;
  i64 a_stride;
  i64 b_stride;
  i64 decay_stride;
  i64 beta_stride;
  int num_rows;
  int width;
};

// decay[n, h] = rate[h] * softplus(a[n, h] + bias[h]), beta[n, h] = sigmoid(b[n, h]), in float32.
// Grid: x all elements, a thread each.
template <typename T>
__global__ void __launch_bounds__(kGateThreads) delta_gates(const __grid_constant__ DeltaGatesParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 element = static_cast<i64>(blockIdx.x) * kGateThreads + threadIdx.x;
  const i64 row = element / p.width;
  const int head = static_cast<int>(element % p.width);
  if (row >= p.num_rows) return;
  const float a = to_float(static_cast<const T*>(p.a)[row * p.a_stride + head]) + p.bias[head];
  p.decay[row * p.decay_stride + head] = p.rate[head] * softplus(a);
  p.beta[row * p.beta_stride + head] = sigmoid<float>(to_float(static_cast<const T*>(p.b)[row * p.b_stride + head]));
}

}  // namespace edgellm
