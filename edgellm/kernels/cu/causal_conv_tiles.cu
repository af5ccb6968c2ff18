// Causal depthwise convolution as in causal_conv.cu, bit for bit, of rows that are not written in place: a block has
// some channels of one tile of a row, and reads the inputs before its tile from x.
// Axes: tokens t, channels c, taps j in [0, kWidth), the last one at t itself.
// Tiles, by place: tile i of row n has place query_start[n] / p.tile + n + i, so that none need to be counted.
// Grid: x kConvChannels channels, four a thread; y places.
// The first tile of a row alone reads and writes the state: what the state becomes is the row's last inputs, in x too.
#include "activations.cuh"
#include "causal_conv.cuh"

namespace edgellm {

constexpr int kConvThreads = 128;
constexpr int kConvStep = 4;   // channels a thread
constexpr int kConvBatch = 8;  // tokens on their way at once

struct ConvTile {
  StateRow row;
  int first;  // token
  int end;
};

// The tile at a place; every warp finds it for itself.  Row n begins at place n or behind, so the search goes down.
__device__ __forceinline__ ConvTile conv_tile(const CausalConvParams& p, int place) {
  const int lane = threadIdx.x % kWarp;
  for (int base = min(place, p.num_rows - 1) / kWarp * kWarp; base >= 0; base -= kWarp) {
    const int n = base + lane;
    StateRow row{0, 0, -1, -1};
    if (n < p.num_rows) row = state_row(p.query_start, p.slots, p.checkpoint_start, n, p.num_slots);
    const int begins = n < p.num_rows ? row.first / p.tile + n : place + 1;
    const int count = __popc(__ballot_sync(kFullMask, begins <= place));
    if (count == 0) continue;
    row.first = __shfl_sync(kFullMask, row.first, count - 1);
    row.end = __shfl_sync(kFullMask, row.end, count - 1);
    row.slot = __shfl_sync(kFullMask, row.slot, count - 1);
    row.checkpoint = __shfl_sync(kFullMask, row.checkpoint, count - 1);
    const int first = row.first + (place - __shfl_sync(kFullMask, begins, count - 1)) * p.tile;
    if (row.slot < 0 || first >= row.end) break;
    return {row, first, min(row.end, first + p.tile)};
  }
  return {{0, 0, -1, -1}, 0, 0};
}

// Of four channels, in as few registers as there are.
template <typename T>
__device__ __forceinline__ Vec<float, kConvStep> unpacked(const Vec<u32, static_cast<int>(sizeof(T))>& words) {
  Vec<float, kConvStep> values;
  if constexpr (sizeof(T) == sizeof(float)) {
#pragma unroll
    for (int c = 0; c < kConvStep; ++c) values[c] = __int_as_float(static_cast<int>(words[c]));
  } else {
#pragma unroll
    for (int c = 0; c < kConvStep; c += 2) {
      const float2 pair = unpack2<T>(words[c / 2]);
      values[c] = pair.x, values[c + 1] = pair.y;
    }
  }
  return values;
}

// The channels of one thread.
template <typename T, int kWidth>
struct ConvQuad {
  static constexpr int kPast = kWidth - 1;
  float weight[kWidth][kConvStep], bias[kConvStep];
  float window[kPast][kConvStep];  // inputs before the next token, oldest first

  __device__ __forceinline__ void load_weights(const CausalConvParams& p, int channel) {
    float taps[kConvStep * kWidth];
    load_floats(p.weight + static_cast<i64>(channel) * kWidth, taps);
#pragma unroll
    for (int c = 0; c < kConvStep; ++c) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) weight[j][c] = taps[c * kWidth + j];
      bias[c] = p.bias == nullptr ? 0.0f : p.bias[channel + c];
    }
  }
  // A warp's states lie side by side, kPast vectors a thread: through `stage` they move whole lines at a time.
  __device__ __forceinline__ void load_state(const float* states, float4* stage, int vectors, int lane) {
#pragma unroll
    for (int i = 0; i < kPast; ++i) {
      const int vector = lane + i * kWarp;
      if (vector < vectors) stage[vector] = reinterpret_cast<const float4*>(states)[vector];
    }
    __syncwarp();
    float mine[kConvStep * kPast];
    load_floats(&stage[lane * kPast].x, mine);
#pragma unroll
    for (int i = 0; i < kConvStep * kPast; ++i) window[i % kPast][i / kPast] = mine[i];
    __syncwarp();
  }
  __device__ __forceinline__ void store_state(float* states, float4* stage, int vectors, int lane) const {
    float mine[kConvStep * kPast];
#pragma unroll
    for (int i = 0; i < kConvStep * kPast; ++i) mine[i] = window[i % kPast][i / kPast];
    store_floats(&stage[lane * kPast].x, mine);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPast; ++i) {
      const int vector = lane + i * kWarp;
      if (vector < vectors) reinterpret_cast<float4*>(states)[vector] = stage[vector];
    }
    __syncwarp();
  }
  // The kPast inputs in front of a token.
  __device__ __forceinline__ void load_past(const T* token, i64 stride) {
#pragma unroll
    for (int j = 0; j < kPast; ++j) load_floats(token - (kPast - j) * stride, window[j]);
  }
  __device__ __forceinline__ void take(const Vec<float, kConvStep>& input, int has_silu, float (&result)[kConvStep]) {
#pragma unroll
    for (int c = 0; c < kConvStep; ++c) {
      float sum = bias[c];
#pragma unroll
      for (int j = 0; j < kPast; ++j) sum = fmaf(weight[j][c], window[j][c], sum);
      sum = fmaf(weight[kPast][c], input[c], sum);
      result[c] = has_silu ? silu<T>(sum) : sum;
#pragma unroll
      for (int j = 0; j + 1 < kPast; ++j) window[j][c] = window[j + 1][c];
      window[kPast - 1][c] = input[c];
    }
  }
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(kConvThreads, sizeof(T) == 2 ? 5 : 4)
    causal_conv_tiles(const __grid_constant__ CausalConvParams p) {
  constexpr int kPast = kWidth - 1;
  using Input = Vec<u32, static_cast<int>(sizeof(T))>;  // of the thread's channels
  __shared__ float4 stages[kConvThreads / kWarp][kWarp * kPast];
  __shared__ Input waiting[kConvBatch][kConvThreads];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int warp_channel = (blockIdx.x * (kConvThreads / kWarp) + warp) * (kWarp * kConvStep);
  const int channel = warp_channel + lane * kConvStep;
  const int vectors = (p.channels - warp_channel) / kConvStep * kPast;  // of states: the warp's, or more
  const bool is_real = channel < p.channels;
  let_next_kernel_start();
  ConvQuad<T, kWidth> conv;
  if (is_real) conv.load_weights(p, channel);  // nobody writes the weights while a model runs
  wait_for_previous_kernel();
  const ConvTile tile = conv_tile(p, blockIdx.y);
  if (tile.row.slot < 0 || vectors <= 0) return;
  const bool is_first = tile.first == tile.row.first;
  const T* x = static_cast<const T*>(p.x) + channel;
  T* out = static_cast<T*>(p.out) + channel;
  float* states = p.state + tile.row.slot * p.state_stride + static_cast<i64>(warp_channel) * kPast;
  const T* next = x + tile.first * p.x_stride;
  Input batch[kConvBatch];
  const auto load_batch = [&](int start) {
#pragma unroll
    for (int i = 0; i < kConvBatch; ++i, next += p.x_stride)
      if (is_real && start + i < tile.end) batch[i] = *reinterpret_cast<const Input*>(next);
  };
  load_batch(tile.first);
  if (is_first) {
    conv.load_state(states, stages[warp], vectors, lane);
  } else if (is_real) {
    conv.load_past(x + tile.first * p.x_stride, p.x_stride);
  }
  const bool keeps = tile.row.checkpoint >= 0;
  i64 checkpoint = tile.row.checkpoint + tile.first - tile.row.first;
  T* target = out + tile.first * p.out_stride;
#pragma unroll 1
  for (int start = tile.first; start < tile.end; start += kConvBatch) {
    if (!keeps) {
#pragma unroll
      for (int i = 0; i < kConvBatch; ++i, target += p.out_stride) {
        if (start + i >= tile.end) break;
        float result[kConvStep];
        conv.take(unpacked<T>(batch[i]), p.has_silu, result);
        if (is_real) store_floats(target, result);
      }
    } else {
      // Few rows keep states; their tokens wait in shared memory, and so need no registers of the loop above.
#pragma unroll
      for (int i = 0; i < kConvBatch; ++i) waiting[i][threadIdx.x] = batch[i];
#pragma unroll 1
      for (int i = 0; i < min(kConvBatch, tile.end - start); ++i, ++checkpoint, target += p.out_stride) {
        float result[kConvStep];
        conv.take(unpacked<T>(waiting[i][threadIdx.x]), p.has_silu, result);
        if (is_real) store_floats(target, result);
        if (checkpoint < p.num_checkpoints)
          conv.store_state(p.checkpoint + checkpoint * p.checkpoint_stride + static_cast<i64>(warp_channel) * kPast,
                           stages[warp], vectors, lane);
      }
    }
    load_batch(start + kConvBatch);
  }
  if (!is_first) return;
  // A row of several tiles is longer than a window.
  if (tile.end < tile.row.end && is_real) conv.load_past(x + tile.row.end * p.x_stride, p.x_stride);
  conv.store_state(states, stages[warp], vectors, lane);
}

}  // namespace edgellm
