// Gated delta rule by chunks: what the tokens of a chunk read of the state before it and of the chunk's own updates.
// See delta_chunks.cuh.  Every operand lies in the workspace as a lane needs it: no shared memory, no barrier.
#include "delta_chunks.cuh"

namespace edgellm {

// A warp has kGroup columns of all tokens: sums[tile of 16 tokens][8 columns].
using ReadSums = float[kTokenTiles][2 * kHalves][4];

// sums of one tile of tokens += a b, with b's columns in two fragments of its transpose.
__device__ __forceinline__ void multiply_group(float (&sums)[2 * kHalves][4], const u32 (&a)[4],
                                               const u32 (&b)[kHalves][4]) {
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    const u32 low[2] = {b[half][0], b[half][2]}, high[2] = {b[half][1], b[half][3]};
    mma_16816<f16>(sums[2 * half], a, low);
    mma_16816<f16>(sums[2 * half + 1], a, high);
  }
}

template <int kKeyDim>
__device__ __forceinline__ void read_state(ReadSums& sums, const uint4* queries, const uint4* states) {
  constexpr int kKeyTiles = kKeyDim / 16;
  u32 a[2][kTokenTiles][4], b[2][kHalves][4];
  const auto load = [&](int tile, int slot) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
      load_fragment(b[slot][half], states + (half * kKeyTiles + tile) * kWarp);
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) load_fragment(a[slot][t], queries + (t * kKeyTiles + tile) * kWarp);
  };
  load(0, 0);
#pragma unroll
  for (int tile = 0; tile < kKeyTiles; ++tile) {
    if (tile + 1 < kKeyTiles) load(tile + 1, (tile + 1) % 2);
#pragma unroll
    for (int t = 0; t < kTokenTiles; ++t) multiply_group(sums[t], a[tile % 2][t], b[tile % 2]);
  }
}

__device__ __forceinline__ void read_updates(ReadSums& sums, const uint4* scores, const uint4* updates) {
#pragma unroll
  for (int step = 0; step < kTokenTiles; ++step) {
    u32 b[kHalves][4];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) load_fragment(b[half], updates + (half * kTokenTiles + step) * kWarp);
#pragma unroll
    for (int t = step; t < kTokenTiles; ++t) {
      u32 a[4];
      load_fragment(a, scores + (t * (t + 1) / 2 + step) * kWarp);
      multiply_group(sums[t], a, b);
    }
  }
}

// From the state's power of two to that of the updates, decayed to each token.
__device__ __forceinline__ void decay_sums(ReadSums& sums, const float* totals, const ChunkScales& scales, int lane) {
  const float factor = power_of_two(scales.update - scales.state);
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) {
    const float low = factor * __expf(totals[16 * t + lane / 4]);
    const float high = factor * __expf(totals[16 * t + lane / 4 + 8]);
#pragma unroll
    for (int n = 0; n < 2 * kHalves; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[t][n][i] *= i < 2 ? low : high;
  }
}

// Eight neighbouring columns of a token.
template <typename T>
__device__ __forceinline__ void store_columns(T* out, const float (&sums)[2 * kHalves][4], int half, float factor,
                                              bool is_wide) {
  u32 pairs[4];
#pragma unroll
  for (int n = 0; n < 2 * kHalves; ++n)
    pairs[n] = pack2<T>(factor * sums[n][2 * half], factor * sums[n][2 * half + 1]);
  if (is_wide) {
    *reinterpret_cast<uint4*>(out) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  } else {
    *reinterpret_cast<uint2*>(out) = make_uint2(pairs[0], pairs[1]);
    *reinterpret_cast<uint2*>(out + 4) = make_uint2(pairs[2], pairs[3]);
  }
}

template <typename T>
__device__ __forceinline__ void store_out(const GatedDeltaParams& p, const Chunk& chunk, int column, int lane,
                                          float factor, const ReadSums& sums) {
  const bool is_wide = p.out_stride % 8 == 0 && reinterpret_cast<u64>(p.out) % 16 == 0;
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = 16 * t + lane / 4 + 8 * half;
      if (token >= chunk.length) continue;
      T* out = static_cast<T*>(p.out) + (chunk.first + token) * p.out_stride + column + lane % 4 * 8;
      store_columns(out, sums[t], half, factor, is_wide);
    }
}

// Grid: x places from p.first_place on, y heads, z blocks of columns; a warp for kGroup columns.
template <typename T, int kKeyDim>
__global__ void __launch_bounds__(kChunkThreads, 3) delta_read(const __grid_constant__ GatedDeltaParams p) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, head = blockIdx.y;
  const int group = blockIdx.z * (blockDim.x / kWarp) + warp;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Chunk chunk = chunk_at(p, p.first_place + blockIdx.x);
  if (chunk.length == 0 || group * kGroup >= p.value_dim) return;
  const ChunkPlace at(p, blockIdx.x, head);
  const ChunkScales scales = at.scales()[group];
  ReadSums sums;
#pragma unroll
  for (int t = 0; t < kTokenTiles; ++t) clear(sums[t]);
  read_state<kKeyDim>(sums, at.queries() + lane, at.states() + group * (kHalves * kKeyDim / 16 * kWarp) + lane);
  decay_sums(sums, at.totals(), scales, lane);
  read_updates(sums, at.scores() + lane, at.values() + group * (kHalves * kTokenTiles * kWarp) + lane);
  store_out<T>(p, chunk, head * p.value_dim + group * kGroup, lane, p.scale * power_of_two(-scales.update), sums);
}

}  // namespace edgellm
