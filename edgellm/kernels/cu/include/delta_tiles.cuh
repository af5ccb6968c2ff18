// Tiles of float16 in shared memory, rows kPitch elements apart, as operands of mma.m16n8k16.
#pragma once

#include "mma.cuh"

namespace edgellm {

template <int kPitch>
__device__ __forceinline__ void load_a(u32 (&a)[4], const f16* tile, int row, int column, int lane) {
  ldmatrix_x4(a, shared_address(tile + (row + lane % 16) * kPitch + column + lane / 16 * 8));
}
// The transpose of what is stored: a's rows are the tile's columns.
template <int kPitch>
__device__ __forceinline__ void load_a_trans(u32 (&a)[4], const f16* tile, int row, int column, int lane) {
  const int part = lane / 8;
  ldmatrix_x4_trans(a, shared_address(tile + (column + lane % 8 + part / 2 * 8) * kPitch + row + part % 2 * 8));
}
// 16 columns of b, stored by column: two operands.
template <int kPitch>
__device__ __forceinline__ void load_b_columns(u32 (&b)[4], const f16* tile, int depth, int column, int lane) {
  const int part = lane / 8;
  ldmatrix_x4(b, shared_address(tile + (column + lane % 8 + part / 2 * 8) * kPitch + depth + part % 2 * 8));
}
// 16 columns of b, stored by row.
template <int kPitch>
__device__ __forceinline__ void load_b_rows(u32 (&b)[4], const f16* tile, int depth, int column, int lane) {
  ldmatrix_x4_trans(b, shared_address(tile + (depth + lane % 16) * kPitch + column + lane / 16 * 8));
}

}  // namespace edgellm
