// Blocks of paged_prefill: their shapes, and the softmax states of the rows that a lane has a share of.
#pragma once

#include "prefill_tiles.cuh"

namespace edgellm {

// Less than 128 KB of shared memory a block: tiles of head_dim 256 have half the rows there.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr bool kSmallShared = true;
#else
constexpr bool kSmallShared = false;
#endif

template <typename T, typename KV, int D, bool kSegments>
struct PrefillShape {
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static constexpr int kThreads = D == 256 && (kSegments || !kSmallShared) ? 256 : 128;
  static constexpr int kRowTiles = kSegments || D == 256 ? 1 : 2;  // of 16 rows, a warp
  // Two sets of sums do not fit into a warp's registers for 16 rows of 256: two warps share the rows then, each
  // computes all scores and half of the columns.
  static constexpr int kColumnWarps = kSegments && D == 256 ? 2 : 1;
  static constexpr int kRowWarps = kThreads / kWarp / kColumnWarps;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kTileRows = kRowWarps * kWarpRows;
  static constexpr int kColumns = D / kColumnWarps;
  static constexpr int kColumnTiles = kColumns / 8;
  static constexpr int kQueryBytes = kTileRows * D * 2;
  static constexpr int kRecordBytes = 1024;  // before the query's rows, which have to start at a multiple of this
  static constexpr int kBlocks = kThreads == 128 && D <= 128 ? 2 : 1;  // an SM, registers permitting
};

// State of the rows that a lane has a share of: [row tile][line, line + 8].
template <int kRowTiles, int kColumnTiles>
struct SoftmaxRows {
  float maximum[kRowTiles][2];
  float sum[kRowTiles][2];  // of this lane's columns only
  float out[kRowTiles][kColumnTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
#pragma unroll
      for (int h = 0; h < 2; ++h) maximum[t][h] = negative_infinity(), sum[t][h] = 0.0f;
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[t][n][i] = 0.0f;
    }
  }

  __device__ __forceinline__ void scale_out(const float (&factors)[kRowTiles][2]) {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int n = 0; n < kColumnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) out[t][n][i] *= factors[t][i / 2];
  }

  // Scores to weights, in place; the sums so far are brought to the new maximum.
  __device__ __forceinline__ void step(float (&scores)[kRowTiles][8][4], float to_log2) {
    float factors[kRowTiles][2];
    bool changed = false;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = scores[t][0][h * 2];
#pragma unroll
        for (int n = 0; n < 8; ++n) top = fmaxf(top, fmaxf(scores[t][n][h * 2], scores[t][n][h * 2 + 1]));
        top = fmaxf(maximum[t][h], __fmul_rn(warp_max<4>(top), to_log2));
        changed |= top != maximum[t][h];
        const float base = top == negative_infinity() ? 0.0f : top;
        factors[t][h] = exp2_fast(__fsub_rn(maximum[t][h], base));
        maximum[t][h] = top;
        float added = 0.0f;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int i = h * 2; i < h * 2 + 2; ++i) {
            scores[t][n][i] = exp2_fast(__fmaf_rn(scores[t][n][i], to_log2, -base));
            added += scores[t][n][i];
          }
        sum[t][h] = __fmaf_rn(sum[t][h], factors[t][h], added);
      }
    if (__any_sync(kFullMask, changed)) scale_out(factors);
  }
};

template <int kRowTiles>
__device__ __forceinline__ void cap_scores(float (&scores)[kRowTiles][8][4], float scale, float cap) {
  const float inner = __fdiv_rn(scale, cap);
#pragma unroll
  for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[t][n][i] = cap * tanh_fast(scores[t][n][i] * inner);
}

template <int kRowTiles>
__device__ __forceinline__ void scale_columns(float (&scores)[kRowTiles][8][4], const float* scales, float factor) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    float2 pair = *reinterpret_cast<const float2*>(scales + n * 8 + threadIdx.x % 4 * 2);
    pair.x *= factor, pair.y *= factor;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[t][n][i] *= i % 2 ? pair.y : pair.x;
  }
}

}  // namespace edgellm
