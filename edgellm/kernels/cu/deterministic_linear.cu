// Any number of rows times a weight: out (M, N) = x (M, K) weight (N, K)^T.  The bits of an output row depend on that
// row of x and on the weight only: the order of the sum is in linear.cuh for 16-bit types (equal to skinny_linear's) and
// one ascending chain of fused multiply-adds for float32, whatever the tile.
// A block owns a tile of kTileM x rows and kTileN weight rows and walks along K; tiles are numbered so that blocks at
// work together share rows of both operands.
#include "linear.cuh"

namespace edgellm {

constexpr int kStageK = 64;                     // k of a pipeline stage: 128 bytes a row
constexpr int kStageRowBytes = kStageK * 2;
constexpr int kPiecesPerRow = kStageRowBytes / 16;
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

// 16-byte pieces of a row stand where odd and even rows meet different halves of the banks.
__device__ __forceinline__ u32 staged(int row, int piece) {
  return row * kStageRowBytes + (piece ^ ((row & 1) * 4)) * 16;
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

template <typename T, int kTileM, int kTileN, int kWarpM, int kWarpN, int kStages, int kBlocksPerSm>
__global__ void __launch_bounds__(kTileM / kWarpM * (kTileN / kWarpN) * kWarp, kBlocksPerSm)
    deterministic_linear(const __grid_constant__ LinearParams p) {
  constexpr int kThreads = kTileM / kWarpM * (kTileN / kWarpN) * kWarp;
  constexpr int kWeightOffset = kTileM * kStageRowBytes, kStageBytes = (kTileM + kTileN) * kStageRowBytes;
  extern __shared__ __align__(128) char shared_bytes[];
  static_assert(kStages >= 3, "one stage is read, one is ready, one is filled");
  const u32 shared = shared_address(shared_bytes);
  const TilePlace tile = tile_place<kTileM, kTileN>(p);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int warp_m = warp % (kTileM / kWarpM) * kWarpM, warp_n = warp / (kTileM / kWarpM) * kWarpN;

  StageCopy<T, kTileM, kThreads> x_copy(p.x, p.x_stride, tile.row, p.num_rows, p.in_width, shared);
  StageCopy<T, kTileN, kThreads> weight_copy(p.weight, p.in_width, tile.column, p.out_width, p.in_width,
                                             shared + kWeightOffset);
  const int num_stages = ceil_div(p.in_width, kStageK);
  let_next_kernel_start();
  wait_for_previous_kernel();
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) {
    if (stage < num_stages) {
      x_copy.copy(stage * kStageBytes);
      weight_copy.copy(stage * kStageBytes);
    }
    cp_async_commit();
  }

  WarpSums<T, kWarpM, kWarpN> sums;
  const int run_blocks = slice_blocks(p.in_width), num_blocks = ceil_div(p.in_width, kBlockK);
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
    for (int j = 0; j < kWarpN / 8; ++j) {
      sums.add_run(i, j);
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
