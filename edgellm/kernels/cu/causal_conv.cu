// Causal depthwise convolution with the last inputs of each sequence as its state.
// Axes: tokens t, channels c, taps j in [0, kWidth), the last one at t itself.
//   out[t, c] = T(act(bias[c] + sum_j weight[c, j] x[t - kWidth + 1 + j, c]))
// where the inputs before the row's first are the state's.
// Grid: x channels, kStep a thread, blockDim.x threads; y rows.  threadIdx.y is a group of kRun tokens in turn; a block
// owns its channels of a row, reads all tokens of a tile before it writes one, and so x and out may be the same rows.
// A value's arithmetic is the same wherever its token stands in a tile, so rows may be cut anywhere.
#include "activations.cuh"
#include "causal_conv.cuh"

namespace edgellm {

constexpr int kRun = 8;  // tokens in a row that a thread takes
constexpr int kConvLanes = 32;
constexpr int kConvGroups = 16;  // at most, a block

// The channels of one thread.
template <typename T, int kWidth, int kStep>
struct ConvChannels {
  static constexpr int kPast = kWidth - 1;
  float weight[kWidth][kStep], bias[kStep];
  float window[kPast + kRun][kStep];  // inputs before the thread's tokens, then theirs

  __device__ __forceinline__ void load_weights(const CausalConvParams& p, int channel) {
#pragma unroll
    for (int c = 0; c < kStep; ++c) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) weight[j][c] = p.weight[static_cast<i64>(channel + c) * kWidth + j];
      bias[c] = p.bias == nullptr ? 0.0f : p.bias[channel + c];
    }
  }
  __device__ __forceinline__ void load_state(const float* state) {
#pragma unroll
    for (int c = 0; c < kStep; ++c)
#pragma unroll
      for (int j = 0; j < kPast; ++j) window[j][c] = state[c * kPast + j];
  }
  // The kPast inputs that end with the thread's `count`-th token.  A full run is what is left when no other count fits:
  // ptxas 13.0 merges a comparison with kRun into the minimum that made the count, and gets it wrong.
  __device__ __forceinline__ void store_state(float* state, int count) const {
#pragma unroll
    for (int c = 0; c < kStep; ++c)
#pragma unroll
      for (int j = 0; j < kPast; ++j) {
        float value = window[kRun + j][c];
#pragma unroll
        for (int i = 0; i < kRun; ++i) value = i == count ? window[i + j][c] : value;
        state[c * kPast + j] = value;
      }
  }
  __device__ __forceinline__ void load_tokens(const T* x, i64 stride, int count) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
#pragma unroll
      for (int c = 0; c < kStep; ++c) window[kPast + i][c] = 0.0f;
      if (i < count) load_floats(x + i * stride, window[kPast + i]);
    }
  }
  // To and from shared memory: the last kPast inputs of a full run, and those before the thread's own.
  __device__ __forceinline__ void leave_past(float (*inputs)[kConvLanes * kStep], int place) const {
#pragma unroll
    for (int j = 0; j < kPast; ++j)
#pragma unroll
      for (int c = 0; c < kStep; ++c) inputs[j][place + c] = window[kRun + j][c];
  }
  __device__ __forceinline__ void take_past(const float (*inputs)[kConvLanes * kStep], int place) {
#pragma unroll
    for (int j = 0; j < kPast; ++j)
#pragma unroll
      for (int c = 0; c < kStep; ++c) window[j][c] = inputs[j][place + c];
  }
  __device__ __forceinline__ void value(int i, int has_silu, float (&result)[kStep]) const {
#pragma unroll
    for (int c = 0; c < kStep; ++c) {
      float sum = bias[c];
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum = fmaf(weight[j][c], window[i + j][c], sum);
      result[c] = has_silu ? silu<T>(sum) : sum;
    }
  }
};

template <typename T, int kWidth, int kStep>
__global__ void __launch_bounds__(kConvLanes* kConvGroups)
    causal_conv(const __grid_constant__ CausalConvParams p) {
  constexpr int kPast = kWidth - 1;
  // Last inputs of every group; two, since a group may be a tile ahead of the one that reads.
  __shared__ float last[2][kConvGroups][kPast][kConvLanes * kStep];
  const int lane = threadIdx.x, group = threadIdx.y, groups = blockDim.y, place = lane * kStep;
  const int channel = (blockIdx.x * kConvLanes + lane) * kStep;
  const bool is_real = channel < p.channels;
  let_next_kernel_start();
  ConvChannels<T, kWidth, kStep> conv;
  if (is_real) conv.load_weights(p, channel);  // nobody writes the weights while a model runs
  wait_for_previous_kernel();
  const StateRow row = state_row(p.query_start, p.slots, p.checkpoint_start, blockIdx.y, p.num_slots);
  if (row.is_idle()) return;
  float* state = p.state + row.slot * p.state_stride + static_cast<i64>(channel) * kPast;
  const int tile_tokens = groups * kRun;
#pragma unroll 1
  for (int start = row.first, turn = 0; start < row.end; start += tile_tokens, turn ^= 1) {
    const int first = start + group * kRun, count = max(0, min(kRun, row.end - first));
    if (is_real) {
      if (start == row.first && group == 0) conv.load_state(state);
      conv.load_tokens(static_cast<const T*>(p.x) + first * p.x_stride + channel, p.x_stride, count);
      conv.leave_past(last[turn][group], place);
    }
    __syncthreads();
    if (!is_real) continue;
    if (group > 0) conv.take_past(last[turn][group - 1], place);
#pragma unroll
    for (int i = 0; i < kRun; ++i) {
      if (i >= count) break;
      float result[kStep];
      conv.value(i, p.has_silu, result);
      store_floats(static_cast<T*>(p.out) + (first + i) * p.out_stride + channel, result);
      const int checkpoint = row.checkpoint + first + i - row.first;
      if (row.checkpoint >= 0 && checkpoint < p.num_checkpoints)
        conv.store_state(p.checkpoint + checkpoint * p.checkpoint_stride + static_cast<i64>(channel) * kPast, i + 1);
    }
    if (count > 0 && first + count == row.end) conv.store_state(state, count);
    if (group == 0) conv.take_past(last[turn][groups - 1], place);  // for the next tile
  }
}

}  // namespace edgellm
