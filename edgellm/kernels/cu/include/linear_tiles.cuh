// A tile of out in the registers of warps, its operands in stages of k in shared memory; the order of the sum is in
// linear.cuh.
#pragma once

#include "linear.cuh"

namespace edgellm {

constexpr int kStageK = 64;                     // k of a pipeline stage: 128 bytes a row
constexpr int kStageRowBytes = kStageK * 2;
constexpr int kPiecesPerRow = kStageRowBytes / 16;

// 16-byte pieces of a row stand where odd and even rows meet different halves of the banks.
__device__ __forceinline__ u32 staged(int row, int piece) {
  return row * kStageRowBytes + (piece ^ ((row & 1) * 4)) * 16;
}

// One warp's part of the tile: the run of K under way, and the sum of the finished runs.  Operands of the next 16 x rows,
// and of the next block's weight, are on their way from shared memory while those before are multiplied.
template <typename T, int kWarpM, int kWarpN>
struct WarpSums {
  static constexpr int kMs = kWarpM / 16, kNs = kWarpN / 8;
  static_assert(kMs % 2 == 0 && kNs % kMs == 0, "the buffers of x alternate, the weight comes in equal parts");
  float run[kMs][kNs][4];
  float total[kMs][kNs][4];
  uint4 x[2][2];         // [buffer][rows of the low half, of the high half]
  uint4 weight[2][kNs];  // [buffer]

  __device__ __forceinline__ WarpSums() {
#pragma unroll
    for (int i = 0; i < kMs * kNs * 4; ++i) (&run[0][0][0])[i] = (&total[0][0][0])[i] = 0.0f;
  }

  __device__ __forceinline__ void add_run(int i, int j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) total[i][j][e] = __fadd_rn(total[i][j][e], run[i][j][e]);
  }

  // Addresses are of this lane's 16 bytes in the warp's first row.
  __device__ __forceinline__ void load_x(int buffer, u32 address, int i) {
    x[buffer][0] = load_shared_16(address + i * 16 * kStageRowBytes);
    x[buffer][1] = load_shared_16(address + (i * 16 + 8) * kStageRowBytes);
  }
  __device__ __forceinline__ void load_weight(int buffer, u32 address, int j) {
    weight[buffer][j] = load_shared_16(address + j * 8 * kStageRowBytes);
  }
  __device__ __forceinline__ void load_first(u32 x_address, u32 weight_address) {
    load_x(0, x_address, 0);
#pragma unroll
    for (int j = 0; j < kNs; ++j) load_weight(0, weight_address, j);
  }

  // The block whose weight is in `buffer`, while the next one's comes into the other.  kNewRun: the run before has ended;
  // its sums are added to the total as their places are needed.
  template <bool kNewRun>
  __device__ __forceinline__ void multiply(int buffer, u32 x_address, u32 next_x_address, u32 next_weight_address) {
#pragma unroll
    for (int i = 0; i < kMs; ++i) {
      if (i + 1 < kMs) load_x((i + 1) % 2, x_address, i + 1);
      else load_x(0, next_x_address, 0);
#pragma unroll
      for (int j = i * (kNs / kMs); j < (i + 1) * (kNs / kMs); ++j) load_weight(1 - buffer, next_weight_address, j);
#pragma unroll
      for (int second = 0; second < 2; ++second)
#pragma unroll
        for (int j = 0; j < kNs; ++j) {
          const bool restart = kNewRun && second == 0;
          if (restart) add_run(i, j);
          mma_half_block<T>(run[i][j], x[i % 2][0], x[i % 2][1], weight[buffer][j], second, restart);
        }
    }
  }

  __device__ __forceinline__ void multiply(bool new_run, int buffer, u32 x_address, u32 next_x_address,
                                           u32 next_weight_address) {
    if (new_run) multiply<true>(buffer, x_address, next_x_address, next_weight_address);
    else multiply<false>(buffer, x_address, next_x_address, next_weight_address);
  }
};

// All of K for one tile: the sums of the warp whose part begins at (warp_m, warp_n).  A stage is the x rows, then the
// weight rows; each copy puts its operand's next stage there.  Ends with the last run added to the total.
template <int kTileM, int kTileN, int kStages, typename T, int kWarpM, int kWarpN, typename XCopy, typename WeightCopy>
__device__ __forceinline__ void multiply_stages(WarpSums<T, kWarpM, kWarpN>& sums, XCopy& x_copy,
                                                WeightCopy& weight_copy, u32 shared, int in_width, int warp_m,
                                                int warp_n) {
  constexpr int kWeightOffset = kTileM * kStageRowBytes, kStageBytes = (kTileM + kTileN) * kStageRowBytes;
  static_assert(kStages >= 3, "one stage is read, one is ready, one is filled");
  const int lane = threadIdx.x % kWarp, num_stages = ceil_div(in_width, kStageK);
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < num_stages) {
      x_copy.copy(stage * kStageBytes);
      weight_copy.copy(stage * kStageBytes);
    }
    cp_async_commit();
  }

  const int run_blocks = slice_blocks(in_width), num_blocks = ceil_div(in_width, kBlockK);
  int run_left = run_blocks;  // blocks that the run under way may still take
  // This lane's operands of both blocks of a stage.
  const u32 x_address = shared + staged(warp_m + lane / 4, lane % 4);
  const u32 weight_address = shared + kWeightOffset + staged(warp_n + lane / 4, lane % 4);
  constexpr u32 kOtherHalf = 4 * 16;
  u32 offset = 0, fill_offset = (kStages - 1) * kStageBytes;
  cp_async_wait<kStages - 2>();
  __syncthreads();
  sums.load_first(x_address, weight_address);
#pragma unroll 1
  for (int stage = 0; stage < num_stages; ++stage) {
    const u32 second_x = (x_address ^ kOtherHalf) + offset, second_weight = (weight_address ^ kOtherHalf) + offset;
    sums.multiply(run_left == 0, 0, x_address + offset, second_x, second_weight);
    if (run_left-- == 0) run_left = run_blocks - 1;
    // The next stage has arrived, and the one before this is read to its end, by every warp.
    cp_async_wait<kStages - 3>();
    __syncthreads();
    if (stage + kStages - 1 < num_stages) {
      x_copy.copy(fill_offset);
      weight_copy.copy(fill_offset);
    }
    cp_async_commit();
    fill_offset = fill_offset == (kStages - 1) * kStageBytes ? 0 : fill_offset + kStageBytes;
    offset = offset == (kStages - 1) * kStageBytes ? 0 : offset + kStageBytes;
    if (stage * 2 + 1 >= num_blocks) break;
    sums.multiply(run_left == 0, 1, second_x, x_address + offset, weight_address + offset);
    if (run_left-- == 0) run_left = run_blocks - 1;
  }
#pragma unroll
  for (int i = 0; i < kWarpM / 16; ++i)
#pragma unroll
    for (int j = 0; j < kWarpN / 8; ++j) sums.add_run(i, j);
}

}  // namespace edgellm
