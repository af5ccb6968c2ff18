// Gate and up, or down, of routed experts where an expert has many rows: a tile of an item's places and of the result's
// columns a block, by tensor cores.  Axes and work lists in experts.cuh; the order of the sum is in linear.cuh, so the
// bits are those of experts_stream.
// kIsGateUp: half of the weight rows in a tile are gate rows, half the up rows of the same columns, so that a thread holds
// both: of every kWarpN rows the first half is gate.
#include "experts.cuh"
#include "linear_tiles.cuh"

namespace edgellm {

// Copies the item's rows, one stage of k at a time; each thread takes the same piece of every kStep-th row.
template <typename T, int kRows, int kThreads, bool kIsGateUp>
struct ExpertRowsCopy {
  static constexpr int kStep = kThreads / kPiecesPerRow, kCount = kRows / kStep;
  static_assert(kStep % 2 == 0 && kRows % kStep == 0, "rows of a thread are all odd or all even");
  const T* source[kCount];
  int rows_left, k_left;
  u32 target;

  __device__ __forceinline__ ExpertRowsCopy(const ExpertsParams& p, const int4& item, u32 shared) {
    const int row = threadIdx.x / kPiecesPerRow, piece = threadIdx.x % kPiecesPerRow;
    rows_left = item.z - row;
    k_left = (kIsGateUp ? p.hidden : p.inner_size) - piece * 8;
    target = shared + staged(row, piece);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      source[i] = static_cast<const T*>(kIsGateUp ? p.rows : p.inner);
      if (i * kStep >= rows_left) continue;
      const int place = item.y + row + i * kStep;
      const i64 from = kIsGateUp ? (p.order[place] / p.count) * p.rows_stride : i64(place) * p.inner_size;
      source[i] += from + piece * 8;
    }
  }

  // Rows and k past the end come as zeros.
  __device__ __forceinline__ void copy(u32 stage_offset) {
    const int valid_rows = k_left > 0 ? rows_left : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      cp_async_16_or_zero(target + stage_offset + i * kStep * kStageRowBytes, source[i], i * kStep < valid_rows);
      source[i] += kStageK;
    }
    k_left -= kStageK;
  }
};

// Copies the weight rows of the tile's columns.
template <typename T, int kRows, int kThreads, bool kIsGateUp>
struct ExpertWeightCopy {
  static constexpr int kStep = kThreads / kPiecesPerRow, kCount = kRows / kStep;
  static_assert(kStep % 2 == 0 && kCount % 2 == 0, "rows of a thread are all odd or all even, as many gate as up");
  const T* source;
  i64 step, up;  // elements to the thread's next columns, and from a gate row to its up row
  int columns_left, k_left;
  u32 target;

  __device__ __forceinline__ ExpertWeightCopy(const ExpertsParams& p, int expert, int first_column, u32 shared) {
    const int row = threadIdx.x / kPiecesPerRow, piece = threadIdx.x % kPiecesPerRow;
    const int width = kIsGateUp ? p.hidden : p.inner_size, columns = kIsGateUp ? p.inner_size : p.hidden;
    source = static_cast<const T*>(kIsGateUp ? p.gate_up : p.down) +
             (i64(expert) * (kIsGateUp ? 2 : 1) * columns + first_column + row) * width + piece * 8;
    step = i64(kStep) * width;
    up = kIsGateUp ? i64(columns) * width : 0;
    columns_left = columns - first_column - row;
    k_left = width - piece * 8;
    target = shared + staged(row, piece);
  }

  __device__ __forceinline__ void copy(u32 stage_offset) {
    const int valid_columns = k_left > 0 ? columns_left : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int group = kIsGateUp ? i / 2 : i;
      const T* from = source + group * step + (kIsGateUp && i % 2 ? up : 0);
      cp_async_16_or_zero(target + stage_offset + i * kStep * kStageRowBytes, from, group * kStep < valid_columns);
    }
    source += kStageK;
    k_left -= kStageK;
  }
};

// The warp's results, whose first column is `first_column` and first row of the item `first_row`.
template <typename T, int kWarpM, int kWarpN, bool kIsGateUp>
__device__ __forceinline__ void store_results(const ExpertsParams& p, const WarpSums<T, kWarpM, kWarpN>& sums,
                                              const int4& item, int first_row, int first_column) {
  constexpr int kColumnTiles = kWarpN / 8 / (kIsGateUp ? 2 : 1);
  const int lane = threadIdx.x % kWarp, columns = kIsGateUp ? p.inner_size : p.hidden;
#pragma unroll
  for (int i = 0; i < kWarpM / 16; ++i)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first_row + i * 16 + half * 8 + lane / 4;
      if (row >= item.z) continue;
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j) {
        const int column = first_column + j * 8 + lane % 4 * 2;
        if (column >= columns) continue;
        const float(&own)[4] = sums.total[i][j];
        const i64 place = i64(item.y + row) * columns + column;
        if constexpr (kIsGateUp) {
          const float(&ups)[4] = sums.total[i][j + kColumnTiles];
          const float first = activated_rounded<T>(own[half * 2], ups[half * 2], p.is_gelu);
          const float second = activated_rounded<T>(own[half * 2 + 1], ups[half * 2 + 1], p.is_gelu);
          *reinterpret_cast<u32*>(static_cast<T*>(p.inner) + place) = pack2<T>(first, second);
        } else {
          *reinterpret_cast<float2*>(p.product + place) = make_float2(own[half * 2], own[half * 2 + 1]);
        }
      }
    }
}

template <typename T, int kTileM, int kTileN, int kWarpM, int kWarpN, int kStages, int kBlocksPerSm, bool kIsGateUp>
__global__ void __launch_bounds__(kTileM / kWarpM * (kTileN / kWarpN) * kWarp, kBlocksPerSm)
    experts_tiles(const __grid_constant__ ExpertsParams p) {
  constexpr int kThreads = kTileM / kWarpM * (kTileN / kWarpN) * kWarp;
  constexpr int kColumns = kIsGateUp ? kTileN / 2 : kTileN, kWarpColumns = kIsGateUp ? kWarpN / 2 : kWarpN;
  using RowsCopy = ExpertRowsCopy<T, kTileM, kThreads, kIsGateUp>;
  using WeightCopy = ExpertWeightCopy<T, kTileN, kThreads, kIsGateUp>;
  static_assert(!kIsGateUp || WeightCopy::kStep == kWarpN / 2, "a thread's weight rows are gate and up in turn");
  extern __shared__ __align__(128) char shared_bytes[];
  const u32 shared = shared_address(shared_bytes);
  const int tiles = ceil_div(kIsGateUp ? p.inner_size : p.hidden, kColumns);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int index = blockIdx.x / tiles, first_column = blockIdx.x % tiles * kColumns;
  if (index >= p.items[0].x) return;
  const int4 item = p.items[1 + index];
  const int warp = threadIdx.x / kWarp;
  const int warp_m = warp % (kTileM / kWarpM) * kWarpM, warp_n = warp / (kTileM / kWarpM) * kWarpN;
  RowsCopy rows(p, item, shared);
  WeightCopy weight(p, item.x, first_column, shared + kTileM * kStageRowBytes);
  WarpSums<T, kWarpM, kWarpN> sums;
  multiply_stages<kTileM, kTileN, kStages>(sums, rows, weight, shared, kIsGateUp ? p.hidden : p.inner_size, warp_m,
                                           warp_n);
  store_results<T, kWarpM, kWarpN, kIsGateUp>(p, sums, item, warp_m, first_column + warp_n / kWarpN * kWarpColumns);
}

}  // namespace edgellm
