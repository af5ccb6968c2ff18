// Any number of rows times a weight: out (M, N) = x (M, K) weight (N, K)^T.  The bits of an output row depend on that
// row of x and on the weight only: the order of the sum is in linear.cuh for 16-bit types (equal to skinny_linear's) and
// one ascending chain of fused multiply-adds for float32, whatever the tile.
// A block owns a tile of kTileM x rows and kTileN weight rows and walks along K; tiles are numbered so that blocks at
// work together share rows of both operands.
#include "linear_tiles.cuh"

namespace edgellm {

constexpr int kTilesTogether = 8;               // tiles of x rows that neighbouring blocks take for one weight tile

// First x row and first weight row of a block's tile.
struct TilePlace {
  int row, column;
};

template <int kTileM, int kTileN>
__device__ __forceinline__ TilePlace tile_place(const LinearParams& p) {
  const int tiles_m = ceil_div(p.num_rows, kTileM), tiles_n = ceil_div(p.out_width, kTileN);
  const int band = blockIdx.x / (kTilesTogether * tiles_n), inside = blockIdx.x % (kTilesTogether * tiles_n);
  const int height = min(kTilesTogether, tiles_m - band * kTilesTogether);
  return {(band * kTilesTogether + inside % height) * kTileM, inside / height * kTileN};
}

// Copies kRows rows of one operand, one stage of k at a time; each thread takes the same piece of every kStep-th row.
template <typename T, int kRows, int kThreads>
struct StageCopy {
  static constexpr int kStep = kThreads / kPiecesPerRow;
  const T* source;
  i64 step;  // elements between this thread's rows
  int rows_left, k_left;
  u32 target;

  __device__ __forceinline__ StageCopy(const void* base, i64 stride, int first, int num_rows, int in_width, u32 shared) {
    const int row = threadIdx.x / kPiecesPerRow, piece = threadIdx.x % kPiecesPerRow;
    source = static_cast<const T*>(base) + (first + row) * stride + piece * 8;
    step = kStep * stride;
    rows_left = num_rows - first - row;
    k_left = in_width - piece * 8;
    target = shared + staged(row, piece);
  }

  // Rows and k past the end are not read (the address is not used then) and come as zeros.
  __device__ __forceinline__ void copy(u32 stage_offset) {
    static_assert(kStep % 2 == 0 && kRows % kStep == 0, "rows of a thread are all odd or all even");
    const T* from = source;
    const int valid_rows = k_left > 0 ? rows_left : 0;
#pragma unroll
    for (int i = 0; i < kRows / kStep; ++i, from += step)
      cp_async_16_or_zero(target + stage_offset + i * kStep * kStageRowBytes, from, i * kStep < valid_rows);
    source += kStageK;
    k_left -= kStageK;
  }
};

template <typename T, int kTileM, int kTileN, int kWarpM, int kWarpN, int kStages, int kBlocksPerSm>
__global__ void __launch_bounds__(kTileM / kWarpM * (kTileN / kWarpN) * kWarp, kBlocksPerSm)
    deterministic_linear(const __grid_constant__ LinearParams p) {
  constexpr int kThreads = kTileM / kWarpM * (kTileN / kWarpN) * kWarp;
  constexpr int kWeightOffset = kTileM * kStageRowBytes;
  extern __shared__ __align__(128) char shared_bytes[];
  const u32 shared = shared_address(shared_bytes);
  const TilePlace tile = tile_place<kTileM, kTileN>(p);
  const int warp = threadIdx.x / kWarp;
  const int warp_m = warp % (kTileM / kWarpM) * kWarpM, warp_n = warp / (kTileM / kWarpM) * kWarpN;

  StageCopy<T, kTileM, kThreads> x_copy(p.x, p.x_stride, tile.row, p.num_rows, p.in_width, shared);
  StageCopy<T, kTileN, kThreads> weight_copy(p.weight, p.in_width, tile.column, p.out_width, p.in_width,
                                             shared + kWeightOffset);
  let_next_kernel_start();
  wait_for_previous_kernel();
  WarpSums<T, kWarpM, kWarpN> sums;
  multiply_stages<kTileM, kTileN, kStages>(sums, x_copy, weight_copy, shared, p.in_width, warp_m, warp_n);
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kWarpM / 16; ++i)
#pragma unroll
    for (int j = 0; j < kWarpN / 8; ++j) {
      const int row = tile.row + warp_m + i * 16 + lane / 4, column = tile.column + warp_n + j * 8 + lane % 4 * 2;
      store_pair<T>(p, row, column, sums.total[i][j][0], sums.total[i][j][1]);
      store_pair<T>(p, row + 8, column, sums.total[i][j][2], sums.total[i][j][3]);
    }
}

// float32: tiles of kStepK k through shared memory, the next one on its way in registers; a thread owns kThreadM rows by
// kThreadN columns, each apart by the threads of that axis.
template <int kTileM, int kTileN, int kThreadM, int kThreadN, int kStepK>
struct FloatTile {
  static constexpr int kRowThreads = kTileM / kThreadM, kColumnThreads = kTileN / kThreadN;
  static constexpr int kThreads = kRowThreads * kColumnThreads;
  static constexpr int kPad = 1;
  float x[kStepK][kTileM + kPad];
  float weight[kStepK][kTileN + kPad];

  template <int kRows>
  static __device__ __forceinline__ void load(float (&held)[kRows * kStepK / kThreads], const void* base, i64 stride,
                                              int first, int num_rows, int k0, int in_width) {
    static_assert(kRows * kStepK % kThreads == 0, "every thread loads the same number");
#pragma unroll
    for (int i = 0; i < kRows * kStepK / kThreads; ++i) {
      const int place = threadIdx.x + i * kThreads, row = first + place / kStepK, k = k0 + place % kStepK;
      held[i] = row < num_rows && k < in_width ? static_cast<const float*>(base)[row * stride + k] : 0.0f;
    }
  }

  template <int kRows>
  static __device__ __forceinline__ void store(float (&target)[kStepK][kRows + kPad],
                                               const float (&held)[kRows * kStepK / kThreads]) {
#pragma unroll
    for (int i = 0; i < kRows * kStepK / kThreads; ++i) {
      const int place = threadIdx.x + i * kThreads;
      target[place % kStepK][place / kStepK] = held[i];
    }
  }

  __device__ __forceinline__ void multiply(float (&sums)[kThreadM][kThreadN], int thread_row, int thread_column) const {
#pragma unroll
    for (int k = 0; k < kStepK; ++k)
#pragma unroll
      for (int i = 0; i < kThreadM; ++i)
#pragma unroll
        for (int j = 0; j < kThreadN; ++j)
          sums[i][j] = __fmaf_rn(x[k][thread_row + i * kRowThreads], weight[k][thread_column + j * kColumnThreads],
                                 sums[i][j]);
  }
};

template <int kTileM, int kTileN, int kThreadM, int kThreadN, int kStepK>
__global__ void __launch_bounds__(kTileM / kThreadM * (kTileN / kThreadN))
    deterministic_linear_float(const __grid_constant__ LinearParams p) {
  using Tile = FloatTile<kTileM, kTileN, kThreadM, kThreadN, kStepK>;
  __shared__ Tile shared;
  const TilePlace tile = tile_place<kTileM, kTileN>(p);
  const int thread_row = threadIdx.x / Tile::kColumnThreads, thread_column = threadIdx.x % Tile::kColumnThreads;
  float x[kTileM * kStepK / Tile::kThreads], weight[kTileN * kStepK / Tile::kThreads];
  float sums[kThreadM][kThreadN] = {};
  Tile::template load<kTileN>(weight, p.weight, p.in_width, tile.column, p.out_width, 0, p.in_width);
  let_next_kernel_start();
  wait_for_previous_kernel();
  Tile::template load<kTileM>(x, p.x, p.x_stride, tile.row, p.num_rows, 0, p.in_width);
  for (int k = kStepK; k < p.in_width + kStepK; k += kStepK) {
    __syncthreads();
    Tile::template store<kTileM>(shared.x, x);
    Tile::template store<kTileN>(shared.weight, weight);
    __syncthreads();
    Tile::template load<kTileM>(x, p.x, p.x_stride, tile.row, p.num_rows, k, p.in_width);
    Tile::template load<kTileN>(weight, p.weight, p.in_width, tile.column, p.out_width, k, p.in_width);
    shared.multiply(sums, thread_row, thread_column);
  }
#pragma unroll
  for (int i = 0; i < kThreadM; ++i)
#pragma unroll
    for (int j = 0; j < kThreadN; ++j) {
      const int row = tile.row + thread_row + i * Tile::kRowThreads;
      const int column = tile.column + thread_column + j * Tile::kColumnThreads;
      if (row >= p.num_rows || column >= p.out_width) continue;
      const float bias = bias_of<float>(p, column), residual = residual_of<float>(p, row, column);
      store_element<float>(p, row, column, finish(sums[i][j], bias, residual));
    }
}

}  // namespace edgellm
