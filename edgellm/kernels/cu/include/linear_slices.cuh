// Slices of a sum that warps hold, one each, and how they meet in shared memory; the order of the sum is in linear.cuh.
#pragma once

#include "linear.cuh"

namespace edgellm {

// One slice's sums of the group to shared memory: [x row][weight row] floats.
template <int kTiles, int kRowTiles>
__device__ __forceinline__ void write_partials(float* target, const float (&sums)[kTiles][4], int num_rows) {
  const int lane = threadIdx.x % kWarp, row = lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < kRowTiles; ++half) {
    if (half * 8 + row >= num_rows) break;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile)
      *reinterpret_cast<float2*>(target + (half * 8 + row) * 8 * kTiles + tile * 8 + column) =
          make_float2(sums[tile][half * 2], sums[tile][half * 2 + 1]);
  }
}

// The slices of one element, added in order.
template <int kSliceFloats>
__device__ __forceinline__ float add_slices(const float* partials, int used_slices) {
  float total = 0.0f;
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice)
    if (slice < used_slices) total = __fadd_rn(total, partials[slice * kSliceFloats]);
  return total;
}

template <typename T>
__device__ __forceinline__ float gated(float gate, float up) {
  gate = to_float(from_float<T>(gate));
  up = to_float(from_float<T>(up));
  return gate / (1.0f + expf(-gate)) * up;
}

}  // namespace edgellm
