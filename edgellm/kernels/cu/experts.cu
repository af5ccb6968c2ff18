// Routed experts (mixture of experts; Shazeer et al. 2017): total[t] += sum over j of shares[t, j] * expert chosen[t, j]
// of rows[t], an expert being down(activation(gate) * up).  Axes in experts.cuh.  Launches, in this order:
//   experts_route     one block: pairs sorted by expert, and the items that the others work on
//   gate and up, then down, of all items: experts_stream (few rows an expert), or experts_tiles.cu, or experts_float
//   experts_combine   a token's products, added up in ascending order of experts; where the tokens are no more than
//                     kStreamRows the stream does that itself
// A sum over k is in the order of linear.cuh (float32: ascending), and a token's total in ascending order of experts, so
// a token's bits depend on no other token and not on which kernels were chosen.
#include "experts.cuh"
#include "linear_slices.cuh"

namespace edgellm {

constexpr int kRouteThreads = kMaxExperts;  // a thread an expert
constexpr int kRouteWarps = kRouteThreads / kWarp;

// Sum over the threads before this one, of a value each, and over all.  `scratch`: kRouteWarps numbers.
__device__ __forceinline__ u64 route_scan(u64 value, u64* scratch, u64& all) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  u64 upto = value;
#pragma unroll
  for (int apart = 1; apart < kWarp; apart *= 2) {
    const u64 before = __shfl_up_sync(kFullMask, upto, apart);
    if (lane >= apart) upto += before;
  }
  if (lane == kWarp - 1) scratch[warp] = upto;
  __syncthreads();
  u64 before_warp = 0;
  all = 0;
#pragma unroll 8
  for (int other = 0; other < kRouteWarps; ++other) {
    if (other < warp) before_warp += scratch[other];
    all += scratch[other];
  }
  return before_warp + upto - value;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads) experts_route(const __grid_constant__ ExpertsParams p) {
  static_assert(kThreads == kRouteThreads, "a thread an expert");
  __shared__ int next[kMaxExperts];
  __shared__ u64 scratch[kRouteWarps];
  const int pairs = p.num_rows * p.count, expert = threadIdx.x;
  next[expert] = 0;
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int pair = threadIdx.x; pair < pairs; pair += kThreads) {
    const int chosen = expert_of(p, pair);
    if (chosen >= 0) atomicAdd(&next[chosen], 1);
  }
  __syncthreads();

  // Places in the low half, items in the high one.
  const int places = next[expert], items = ceil_div(places, p.item_rows);
  u64 all;
  const u64 before = route_scan(static_cast<u64>(items) << 32 | static_cast<u64>(places), scratch, all);
  const int first_place = static_cast<int>(before), first_item = static_cast<int>(before >> 32);
  for (int i = 0; i < items; ++i) {
    const int first = i * p.item_rows;
    p.items[1 + first_item + i] = make_int4(expert, first_place + first, min(p.item_rows, places - first), 0);
  }
  if (expert == 0) p.items[0] = make_int4(static_cast<int>(all >> 32), 0, 0, 0);
  next[expert] = first_place;
  __syncthreads();
  for (int pair = threadIdx.x; pair < pairs; pair += kThreads) {
    const int chosen = expert_of(p, pair), place = chosen < 0 ? -1 : atomicAdd(&next[chosen], 1);
    p.places[pair] = place;
    if (place >= 0) p.order[place] = pair;
  }
}

// ---- few rows an expert: weights stream past, each read once an item ------------------------------------------------
// A block walks through (item, tile) after (item, tile), a tile being 8 columns of the result.  Its warp s adds up slice s
// of K; the slices meet in shared memory.  A lane has kPlaces places in shared memory for its 16 bytes of weight (and of
// the up row, too) of one 32-k block; a place is filled again, with what comes kPlaces blocks later, when it is used up.
//   kGateUp     inner[place, tile] = activation(gate) * up
//   kDown       product[place, tile]
//   kDownTotal  total[t, tile], all items of one tile after the other; for up to kStreamRows tokens

enum ExpertsPart { kGateUp, kDown, kDownTotal };

constexpr int kStreamRows = 16;
constexpr int kStreamThreads = kSlices * kWarp;

template <ExpertsPart kPart>
struct StreamShape {
  static constexpr int kTiles = kPart == kGateUp ? 2 : 1;
  static constexpr int kPlaces = kPart == kGateUp ? 4 : 6;
  static constexpr int kPlaceBytes = kTiles * kStreamThreads * 16;
  static constexpr int kPartials = kStreamRows * 8 * kTiles;  // of a slice, floats
  static constexpr int kPartialsAt = kPlaces * kPlaceBytes;
  static constexpr int kTotalsAt = kPartialsAt + 2 * kSlices * kPartials * 4;
  static constexpr int kBytes = kTotalsAt + (kPart == kDownTotal ? kStreamRows * 8 * 4 : 0);
};

// Where a block is on its way.
template <ExpertsPart kPart>
struct StreamWalk {
  int item, tile, number;
  int num_items, num_tiles;

  __device__ __forceinline__ StreamWalk(int items, int tiles) {
    number = blockIdx.x;
    num_items = items;
    num_tiles = tiles;
    item = kPart == kDownTotal ? 0 : number / tiles;
    tile = kPart == kDownTotal ? number : number % tiles;
  }
  __device__ __forceinline__ bool goes_on() const {
    return kPart == kDownTotal ? tile < num_tiles && num_items > 0 : item < num_items;
  }
  __device__ __forceinline__ void next() {
    if constexpr (kPart == kDownTotal) {
      if (++item < num_items) return;
      item = 0;
      tile += gridDim.x;
    } else {
      number += gridDim.x;
      item = number / num_tiles;
      tile = number % num_tiles;
    }
  }
};

// A warp's slice of K.
struct StreamSlice {
  int run;          // blocks of every slice but the last ones
  int used_slices;  // that have any
  int num_blocks;   // of this one; may be negative
  int first_k;      // of the lane
  int lane_blocks;  // blocks in which the lane's k are inside

  __device__ __forceinline__ StreamSlice(int width) {
    const int slice = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, blocks = ceil_div(width, kBlockK);
    run = slice_blocks(width);
    used_slices = ceil_div(blocks, run);
    num_blocks = min(run, blocks - slice * run);
    first_k = slice * run * kBlockK + lane % 4 * 8;
    lane_blocks = min(num_blocks, (width - first_k + kBlockK - 8) / kBlockK);
  }
};

// The weight on its way into the lane's places.
template <typename T, ExpertsPart kPart>
struct StreamWeight {
  using Shape = StreamShape<kPart>;
  StreamWalk<kPart> walk;
  const T* source;  // the lane's row and k of the item and tile under way
  int step, place;
  u32 target;

  __device__ __forceinline__ StreamWeight(const ExpertsParams& p, const StreamSlice& slice, StreamWalk<kPart> start,
                                          u32 shared)
      : walk(start) {
    step = place = 0;
    target = shared + threadIdx.x * 16;
    source = nullptr;
    find(p, slice);
  }

  __device__ __forceinline__ void find(const ExpertsParams& p, const StreamSlice& slice) {
    if (!walk.goes_on()) return;
    const i64 expert = p.items[1 + walk.item].x;
    const int row = walk.tile * 8 + threadIdx.x % kWarp / 4;
    if constexpr (kPart == kGateUp)
      source = static_cast<const T*>(p.gate_up) + (expert * 2 * p.inner_size + row) * p.hidden + slice.first_k;
    else
      source = static_cast<const T*>(p.down) + (expert * p.hidden + row) * p.inner_size + slice.first_k;
  }

  // The next block of the walk, or nothing behind its end; a group of its own either way.
  __device__ __forceinline__ void load(const ExpertsParams& p, const StreamSlice& slice) {
    if (walk.goes_on()) {
      const bool valid = step < slice.lane_blocks;
      const T* from = valid ? source + step * kBlockK : static_cast<const T*>(p.gate_up);
#pragma unroll
      for (int tile = 0; tile < Shape::kTiles; ++tile) {
        const i64 up = tile == 1 && valid ? i64(p.inner_size) * p.hidden : 0;
        cp_async_16_or_zero(target + place * Shape::kPlaceBytes + tile * kStreamThreads * 16, from + up, valid);
      }
      place = place + 1 == Shape::kPlaces ? 0 : place + 1;
      if (++step == slice.run) {
        step = 0;
        walk.next();
        find(p, slice);
      }
    }
    cp_async_commit();
  }
};

// The lane's rows of an item: lane / 4 and + 8; null where there is none.
template <typename T, ExpertsPart kPart>
struct StreamRows {
  const T* from[2];

  __device__ __forceinline__ StreamRows(const ExpertsParams& p, const StreamSlice& slice, const int4& item) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = threadIdx.x % kWarp / 4 + half * 8;
      from[half] = nullptr;
      if (row >= item.z) continue;
      if constexpr (kPart == kGateUp)
        from[half] = static_cast<const T*>(p.rows) + (p.order[item.y + row] / p.count) * p.rows_stride + slice.first_k;
      else
        from[half] = static_cast<const T*>(p.inner) + i64(item.y + row) * p.inner_size + slice.first_k;
    }
  }
  __device__ __forceinline__ uint4 load(int half, int step, const StreamSlice& slice) const {
    if (from[half] == nullptr || step >= slice.lane_blocks) return make_uint4(0, 0, 0, 0);
    return *reinterpret_cast<const uint4*>(from[half] + step * kBlockK);
  }
};

// One item and tile: the warp's slice of its sums.
template <typename T, ExpertsPart kPart>
__device__ __forceinline__ void stream_multiply(const ExpertsParams& p, const StreamSlice& slice, const int4& item,
                                                StreamWeight<T, kPart>& weight, int& place,
                                                float (&sums)[StreamShape<kPart>::kTiles][4]) {
  using Shape = StreamShape<kPart>;
  const StreamRows<T, kPart> rows(p, slice, item);
#pragma unroll 1
  for (int step = 0; step < slice.run; ++step) {
    const uint4 low = rows.load(0, step, slice), high = rows.load(1, step, slice);
    cp_async_wait<Shape::kPlaces - 1>();
    if (step < slice.num_blocks) {
      uint4 tiles[Shape::kTiles];
#pragma unroll
      for (int tile = 0; tile < Shape::kTiles; ++tile)
        tiles[tile] = load_shared_16(weight.target + place * Shape::kPlaceBytes + tile * kStreamThreads * 16);
#pragma unroll
      for (int second = 0; second < 2; ++second)
#pragma unroll
        for (int tile = 0; tile < Shape::kTiles; ++tile)
          mma_half_block<T>(sums[tile], low, high, tiles[tile], second);
    }
    place = place + 1 == Shape::kPlaces ? 0 : place + 1;
    weight.load(p, slice);
  }
}

// One result of an item: row m, column of the tile.  `sum`: its first slice.
template <typename T, ExpertsPart kPart>
__device__ __forceinline__ void stream_finish(const ExpertsParams& p, const StreamSlice& slice, const int4& item,
                                              int tile, int m, int column, const float* sum, float* totals) {
  const float value = add_slices<StreamShape<kPart>::kPartials>(sum, slice.used_slices);
  const i64 row = item.y + m;
  if constexpr (kPart == kGateUp) {
    const float up = add_slices<StreamShape<kPart>::kPartials>(sum + 8, slice.used_slices);
    static_cast<T*>(p.inner)[row * p.inner_size + tile * 8 + column] =
        from_float<T>(activated_rounded<T>(value, up, p.is_gelu));
  } else if constexpr (kPart == kDown) {
    p.product[row * p.hidden + tile * 8 + column] = value;
  } else {
    const int pair = p.order[row];
    float& total = totals[pair / p.count * 8 + column];
    total = __fmaf_rn(p.shares[pair], value, total);
  }
}

// The totals of a tile, a thread each: from total or zero, and back.
__device__ __forceinline__ float* stream_total(const ExpertsParams& p, int tile) {
  const int token = threadIdx.x / 8;
  return token < p.num_rows ? p.total + token * p.total_stride + tile * 8 + threadIdx.x % 8 : nullptr;
}

template <typename T, ExpertsPart kPart>
__global__ void __launch_bounds__(kStreamThreads, 2) experts_stream(const __grid_constant__ ExpertsParams p) {
  using Shape = StreamShape<kPart>;
  extern __shared__ __align__(16) char shared[];
  float* const partials = reinterpret_cast<float*>(shared + Shape::kPartialsAt);
  float* const totals = reinterpret_cast<float*>(shared + Shape::kTotalsAt);
  const StreamSlice slice(kPart == kGateUp ? p.hidden : p.inner_size);
  const int num_tiles = (kPart == kGateUp ? p.inner_size : p.hidden) / 8;
  // Routing ended before the kernel of gate and up did anything, and it lets this one start only then.
  if constexpr (kPart == kGateUp) wait_for_previous_kernel();
  StreamWalk<kPart> walk(p.items[0].x, num_tiles);
  StreamWeight<T, kPart> weight(p, slice, walk, shared_address(shared));
#pragma unroll
  for (int place = 0; place < Shape::kPlaces; ++place) weight.load(p, slice);
  if constexpr (kPart != kGateUp) wait_for_previous_kernel();
  let_next_kernel_start();

  const bool finishes = threadIdx.x < kStreamRows * 8;
  const int m = threadIdx.x / 8, column = threadIdx.x % 8;
  int place = 0, buffer = 0;
#pragma unroll 1
  for (; walk.goes_on(); walk.next(), buffer ^= 1) {
    const int4 item = p.items[1 + walk.item];
    if (kPart == kDownTotal && walk.item == 0 && finishes) {
      const float* total = p.accumulate ? stream_total(p, walk.tile) : nullptr;
      totals[threadIdx.x] = total == nullptr ? 0.0f : *total;
    }
    float sums[Shape::kTiles][4] = {};
    stream_multiply<T, kPart>(p, slice, item, weight, place, sums);
    float* const written = partials + buffer * kSlices * Shape::kPartials;
    write_partials<Shape::kTiles, 2>(written + threadIdx.x / kWarp * Shape::kPartials, sums, item.z);
    __syncthreads();
    if (finishes && m < item.z)
      stream_finish<T, kPart>(p, slice, item, walk.tile, m, column, written + m * 8 * Shape::kTiles + column, totals);
    if (kPart == kDownTotal && walk.item + 1 == walk.num_items) {
      __syncthreads();
      float* const total = finishes ? stream_total(p, walk.tile) : nullptr;
      if (total != nullptr) *total = totals[threadIdx.x];
    }
  }
  if (kPart == kDownTotal && walk.num_items == 0 && !p.accumulate && finishes)
    for (int tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
      float* const total = stream_total(p, tile);
      if (total != nullptr) *total = 0.0f;
    }
}

// ---- float32 -------------------------------------------------------------------------------------------------------
// A block takes kFloatRows rows of an item and kWarp columns; a thread kFloatEach of the rows in one column.

constexpr int kFloatThreads = 128;
constexpr int kFloatRows = 16;
constexpr int kFloatEach = kFloatRows * kWarp / kFloatThreads;
constexpr int kFloatStep = 32;  // k at a time

template <bool kIsGateUp>
struct FloatStage {
  float x[kFloatRows][kFloatStep];
  float weight[kIsGateUp ? 2 : 1][kWarp][kFloatStep + 1];
};

template <bool kIsGateUp>
__device__ __forceinline__ void float_load(const ExpertsParams& p, FloatStage<kIsGateUp>& stage, const int4& item,
                                           int first_column, int k0) {
  const int width = kIsGateUp ? p.hidden : p.inner_size, columns = kIsGateUp ? p.inner_size : p.hidden;
  const int k = k0 + threadIdx.x % kFloatStep;
  for (int row = threadIdx.x / kFloatStep; row < kFloatRows; row += kFloatThreads / kFloatStep) {
    const float* from = nullptr;
    if (row < item.z && k < width)
      from = kIsGateUp ? static_cast<const float*>(p.rows) + (p.order[item.y + row] / p.count) * p.rows_stride
                       : static_cast<const float*>(p.inner) + i64(item.y + row) * width;
    stage.x[row][threadIdx.x % kFloatStep] = from == nullptr ? 0.0f : from[k];
  }
  const float* weights = static_cast<const float*>(kIsGateUp ? p.gate_up : p.down);
#pragma unroll
  for (int part = 0; part < (kIsGateUp ? 2 : 1); ++part)
    for (int column = threadIdx.x / kFloatStep; column < kWarp; column += kFloatThreads / kFloatStep) {
      const bool valid = first_column + column < columns && k < width;
      const i64 row = i64(item.x) * (kIsGateUp ? 2 : 1) * columns + part * columns + first_column + column;
      stage.weight[part][column][threadIdx.x % kFloatStep] = valid ? weights[row * width + k] : 0.0f;
    }
}

template <bool kIsGateUp>
__global__ void __launch_bounds__(kFloatThreads) experts_float(const __grid_constant__ ExpertsParams p) {
  __shared__ FloatStage<kIsGateUp> stage;
  const int width = kIsGateUp ? p.hidden : p.inner_size, columns = kIsGateUp ? p.inner_size : p.hidden;
  const int tiles = ceil_div(columns, kWarp);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int index = blockIdx.x / tiles, first_column = blockIdx.x % tiles * kWarp;
  if (index >= p.items[0].x) return;
  const int4 item = p.items[1 + index];
  const int lane = threadIdx.x % kWarp, first_row = threadIdx.x / kWarp * kFloatEach;
  float sums[kFloatEach] = {}, ups[kFloatEach] = {};
  for (int k0 = 0; k0 < width; k0 += kFloatStep) {
    float_load<kIsGateUp>(p, stage, item, first_column, k0);
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < kFloatStep; ++k)
#pragma unroll
      for (int i = 0; i < kFloatEach; ++i) {
        const float x = stage.x[first_row + i][k];
        sums[i] = __fmaf_rn(x, stage.weight[0][lane][k], sums[i]);
        if constexpr (kIsGateUp) ups[i] = __fmaf_rn(x, stage.weight[1][lane][k], ups[i]);
      }
    __syncthreads();
  }
  const int column = first_column + lane;
#pragma unroll
  for (int i = 0; i < kFloatEach; ++i) {
    if (first_row + i >= item.z || column >= columns) continue;
    const i64 row = item.y + first_row + i;
    if constexpr (kIsGateUp)
      static_cast<float*>(p.inner)[row * columns + column] = activated(sums[i], ups[i], p.is_gelu);
    else
      p.product[row * columns + column] = sums[i];
  }
}

// ---- totals ---------------------------------------------------------------------------------------------------------
// A block takes one token (blockIdx.x) and kThreads columns.

template <int kThreads>
__global__ void __launch_bounds__(kThreads) experts_combine(const __grid_constant__ ExpertsParams p) {
  __shared__ int sorted_places[kMaxChoices];
  __shared__ float sorted_shares[kMaxChoices];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int first_pair = blockIdx.x * p.count, own = threadIdx.x;
  if (own < p.count) {
    const int expert = expert_of(p, first_pair + own);
    int rank = 0;
    for (int other = 0; other < p.count; ++other) {
      const int another = expert_of(p, first_pair + other);
      rank += another < expert || (another == expert && other < own);
    }
    sorted_places[rank] = p.places[first_pair + own];
    sorted_shares[rank] = p.shares[first_pair + own];
  }
  __syncthreads();
  const int column = blockIdx.y * kThreads + threadIdx.x;
  if (column >= p.hidden) return;
  float& target = p.total[blockIdx.x * p.total_stride + column];
  float total = p.accumulate ? target : 0.0f;
#pragma unroll 4
  for (int j = 0; j < p.count; ++j)
    if (sorted_places[j] >= 0)
      total = __fmaf_rn(sorted_shares[j], p.product[i64(sorted_places[j]) * p.hidden + column], total);
  target = total;
}

}  // namespace edgellm
