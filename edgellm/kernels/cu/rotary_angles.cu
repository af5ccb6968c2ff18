// Rotary angles of tokens: out[0, t, i] = cos(positions[t] * inv_freq[i]) * scale, out[1, t, i] the sine.
// Axes: tokens t in [0, num_tokens), pairs i in [0, half).  The product is rounded to float32 before the accurate
// sine and cosine (full range reduction), as the host computes it.  One thread a value pair.
#include "types.cuh"

namespace edgellm {

struct RotaryAnglesParams {
  const int* positions;
  const float* inv_freq;
  float* out;
  int num_tokens;
  int half;
  float scale;
};

template <int kThreads>
__global__ void __launch_bounds__(kThreads) rotary_angles(const __grid_constant__ RotaryAnglesParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 total = static_cast<i64>(p.num_tokens) * p.half;
  const i64 index = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= total) return;
  const int token = static_cast<int>(index / p.half), pair = static_cast<int>(index % p.half);
  float sine, cosine;
  sincosf(__fmul_rn(static_cast<float>(p.positions[token]), p.inv_freq[pair]), &sine, &cosine);
  p.out[index] = cosine * p.scale;
  p.out[total + index] = sine * p.scale;
}

}  // namespace edgellm
