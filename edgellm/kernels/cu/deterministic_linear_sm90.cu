// deterministic_linear by warpgroup products of 9.0, for 16-bit types: out (M, N) = x (M, K) weight (N, K)^T with the bits
// of the other linear kernels.  Two facts make that so, and tests hold them: a warpgroup product adds the 16 products of a
// step to its sum as mma.sync does, and neither looks at their order; so only which k share a step must agree (linear.cuh).
// A block owns a tile of 64 * kGroups x rows and 128 weight rows, a warpgroup 64 of the x rows.  A stage is 64 k: rows of
// 128 bytes in the hardware's 128-byte swizzle.  It is filled by 8-byte copies, because the k of a step are every other
// four.  While one warpgroup adds a finished run of K to its total, the others keep the tensor cores busy.
#include "linear.cuh"
#include "mma.cuh"
#include "wgmma.cuh"

namespace edgellm {

constexpr int kWgColumns = 128;
constexpr int kWgStageK = kPanelBytes / 2;
constexpr int kWgTilesTogether = 8;  // tiles of x rows that neighbouring blocks take for one weight tile

__device__ __forceinline__ void copy_8_or_zero(u32 target, const void* source, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(target), "l"(source), "r"(valid ? 8 : 0) : "memory");
}

// kRows rows of one operand, a stage at a time.  A thread takes the same 8 bytes (4 k) of every kStep-th row.
template <typename T, int kRows, int kThreads>
struct PanelCopy {
  static constexpr int kPieces = kPanelBytes / 8, kStep = kThreads / kPieces;
  const T* source;
  i64 step;
  int rows_left, k_left;
  u32 target;

  __device__ __forceinline__ PanelCopy(const void* base, i64 stride, int first, int num_rows, int in_width, u32 shared) {
    const int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
    source = static_cast<const T*>(base) + (first + row) * stride + piece * 4;
    step = kStep * stride;
    rows_left = num_rows - first - row;
    k_left = in_width - piece * 4;
    // Piece p of the 8 of a block belongs to the block's step p % 2, as its part p / 2.
    const int place = piece / 8 * 8 + piece % 2 * 4 + piece % 8 / 2;
    target = shared + row * kPanelBytes + ((place / 2) ^ (row % 8)) * 16 + place % 2 * 8;
  }

  // Rows and k past the end are not read (the address is not used then) and come as zeros.
  __device__ __forceinline__ void copy(u32 stage_offset) {
    static_assert(kStep % 8 == 0, "all rows of a thread have one swizzle");
    const T* from = source;
    const int valid_rows = k_left > 0 ? rows_left : 0;
#pragma unroll
    for (int i = 0; i * kStep < kRows; ++i, from += step)
      if ((i + 1) * kStep <= kRows || threadIdx.x / kPieces + i * kStep < kRows)
        copy_8_or_zero(target + stage_offset + i * kStep * kPanelBytes, from, i * kStep < valid_rows);
    source += kWgStageK;
    k_left -= kWgStageK;
  }
};

// Takes K whose runs are whole stages (an even number of blocks).
template <typename T, int kGroups, int kStages>
__global__ void __launch_bounds__(kGroups * 128, 1) deterministic_linear_sm90(const __grid_constant__ LinearParams p) {
  constexpr int kRows = 64 * kGroups, kThreads = 128 * kGroups;
  constexpr u32 kWeightOffset = kRows * kPanelBytes, kStageBytes = (kRows + kWgColumns) * kPanelBytes;
  extern __shared__ __align__(1024) char shared_bytes[];
  const u32 shared = ceil_div(static_cast<int>(shared_address(shared_bytes)), 1024) * 1024;
  const int tiles_m = ceil_div(p.num_rows, kRows), tiles_n = ceil_div(p.out_width, kWgColumns);
  const int band = blockIdx.x / (kWgTilesTogether * tiles_n), inside = blockIdx.x % (kWgTilesTogether * tiles_n);
  const int height = min(kWgTilesTogether, tiles_m - band * kWgTilesTogether);
  const int row = (band * kWgTilesTogether + inside % height) * kRows, column = inside / height * kWgColumns;
  const int group = threadIdx.x / 128;

  PanelCopy<T, kRows, kThreads> x_copy(p.x, p.x_stride, row, p.num_rows, p.in_width, shared);
  PanelCopy<T, kWgColumns, kThreads> weight_copy(p.weight, p.in_width, column, p.out_width, p.in_width,
                                                 shared + kWeightOffset);
  const int num_stages = ceil_div(p.in_width, kWgStageK), run_stages = slice_blocks(p.in_width) / 2;
  let_next_kernel_start();
  wait_for_previous_kernel();
#pragma unroll 1
  for (int stage = 0; stage < kStages - 2; ++stage) {
    if (stage < num_stages) {
      x_copy.copy(stage * kStageBytes);
      weight_copy.copy(stage * kStageBytes);
    }
    cp_async_commit();
  }

  float run[kWgColumns / 8][4], total[kWgColumns / 8][4] = {};
  u32 offset = 0, fill_offset = (kStages - 2) * kStageBytes;
  int stage = 0;
#pragma unroll 1
  while (stage < num_stages) {
    const int first = stage, end = min(num_stages, stage + run_stages);
#pragma unroll 1
    for (; stage < end; ++stage) {
      // This stage has arrived, for the tensor cores too; all warpgroups have read the one two before it to the end.
      cp_async_wait<kStages - 3>();
      fence_for_wgmma();
      __syncthreads();
      const u64 x = wgmma_operand(shared + offset + group * 64 * kPanelBytes, 16);
      const u64 weight = wgmma_operand(shared + offset + kWeightOffset, 16);
      wgmma_begin();
#pragma unroll
      for (int step = 0; step < kWgStageK / 16; ++step)
        wgmma_shared<T, kWgColumns>(run, x + step * 2, weight + step * 2, step > 0 || stage > first);
      wgmma_commit();
      if (stage + kStages - 2 < num_stages) {
        x_copy.copy(fill_offset);
        weight_copy.copy(fill_offset);
      }
      cp_async_commit();
      wgmma_wait<1>();
      offset = offset == (kStages - 1) * kStageBytes ? 0 : offset + kStageBytes;
      fill_offset = fill_offset == (kStages - 1) * kStageBytes ? 0 : fill_offset + kStageBytes;
    }
    wgmma_wait<0>();
    wgmma_settle(run);
#pragma unroll
    for (int j = 0; j < kWgColumns / 8; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[j][i] = __fadd_rn(total[j][i], run[j][i]);
  }

  const int lane = threadIdx.x % kWarp, lane_row = row + threadIdx.x / kWarp * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kWgColumns / 8; ++j) {
    store_pair<T>(p, lane_row, column + j * 8 + lane % 4 * 2, total[j][0], total[j][1]);
    store_pair<T>(p, lane_row + 8, column + j * 8 + lane % 4 * 2, total[j][2], total[j][3]);
  }
}

}  // namespace edgellm
