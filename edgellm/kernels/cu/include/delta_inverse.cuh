// Inverse of a unit lower triangular matrix of 64 x 64 by four warps: the 16 x 16 blocks on the diagonal by
// substitution in float, a warp each; those below them by block substitution on tensor cores, a column of blocks a warp.
// There operands are a float16 and what it leaves, so that products are good to about 2^-21 of their largest terms.
#pragma once

#include "delta_chunks.cuh"
#include "delta_tiles.cuh"

namespace edgellm {

constexpr int kTilePitch = 24;  // rows of a 16 x 16 tile: 8 of them start in different banks
constexpr int kDiagonalPitch = 20;

struct SplitTile {
  alignas(16) f16 high[16 * kTilePitch];
  alignas(16) f16 low[16 * kTilePitch];
};

struct InverseShared {
  SplitTile below[kTokenTiles * (kTokenTiles - 1) / 2];  // of A, row by row: see below_at
  SplitTile inverse[kTokenTiles];                        // of the blocks on the diagonal
  alignas(16) float diagonal[kTokenTiles][16 * kDiagonalPitch];  // of A, by column
};

__device__ __forceinline__ constexpr int below_at(int row, int column) { return row * (row - 1) / 2 + column; }

// Element (row, column) of A.
__device__ __forceinline__ void put_system(InverseShared& shared, int row, int column, float value) {
  if (row / 16 == column / 16) {
    shared.diagonal[row / 16][column % 16 * kDiagonalPitch + row % 16] = value;
    return;
  }
  SplitTile& tile = shared.below[below_at(row / 16, column / 16)];
  const int at = row % 16 * kTilePitch + column % 16;
  const f16 high = __float2half_rn(value);
  tile.high[at] = high;
  tile.low[at] = __float2half_rn(value - __half2float(high));
}

// The inverse of the warp's block on the diagonal; lanes 16 apart have the same column.
__device__ __forceinline__ void invert_diagonal(InverseShared& shared, int warp, int lane) {
  const float* block = shared.diagonal[warp];
  const int column = lane % 16;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j < 15; ++j)
#pragma unroll
    for (int start = (j + 1) / 4 * 4; start < 16; start += 4) {
      float a[4];
      load_floats(block + j * kDiagonalPitch + start, a);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (start + i > j) x[start + i] = fmaf(-a[i], x[j], x[start + i]);
    }
  f16* tile = lane < 16 ? shared.inverse[warp].high : shared.inverse[warp].low;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const f16 high = __float2half_rn(x[i]);
    tile[i * kTilePitch + column] = lane < 16 ? high : __float2half_rn(x[i] - __half2float(high));
  }
}

// A 16 x 16 operand a in two parts.
struct SplitFragment {
  u32 high[4];
  u32 low[4];

  // Two neighbouring accumulators times the sign.
  __device__ __forceinline__ void take(const float (&sums)[2][4], float sign) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = sign * sums[i / 2][i % 2 * 2], second = sign * sums[i / 2][i % 2 * 2 + 1];
      high[i] = pack2<f16>(first, second);
      const float2 kept = unpack2<f16>(high[i]);
      low[i] = pack2<f16>(first - kept.x, second - kept.y);
    }
  }
  __device__ __forceinline__ float2 pair(int i) const {
    const float2 more = unpack2<f16>(low[i]), most = unpack2<f16>(high[i]);
    return make_float2(most.x + more.x, most.y + more.y);
  }
};

// sums += left times the transpose of the tile.
__device__ __forceinline__ void multiply_split(float (&sums)[2][4], const SplitFragment& left, const SplitTile& tile,
                                               int lane) {
  u32 high[4], low[4];
  load_b_columns<kTilePitch>(high, tile.high, 0, 0, lane);
  load_b_columns<kTilePitch>(low, tile.low, 0, 0, lane);
  multiply_pair(sums[0], sums[1], left.high, high);
  multiply_pair(sums[0], sums[1], left.high, low);
  multiply_pair(sums[0], sums[1], left.low, high);
}

// The transposes of the warp's column of blocks: X_ij^T = -(sum over j <= k < i of X_kj^T A_ik^T) X_ii^T.
__device__ __forceinline__ void invert_below(const InverseShared& shared, int warp, int lane,
                                             SplitFragment (&blocks)[kTokenTiles]) {
#pragma unroll
  for (int row = 0; row < kTokenTiles; ++row) {
    if (row < warp) continue;
    if (row == warp) {
      load_a_trans<kTilePitch>(blocks[row].high, shared.inverse[row].high, 0, 0, lane);
      load_a_trans<kTilePitch>(blocks[row].low, shared.inverse[row].low, 0, 0, lane);
      continue;
    }
    float sums[2][4];
    clear(sums);
#pragma unroll
    for (int k = 0; k < row; ++k)
      if (k >= warp) multiply_split(sums, blocks[k], shared.below[below_at(row, k)], lane);
    SplitFragment left;
    left.take(sums, -1.0f);
    clear(sums);
    multiply_split(sums, left, shared.inverse[row], lane);
    blocks[row].take(sums, 1.0f);
  }
}

}  // namespace edgellm
