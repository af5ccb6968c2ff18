// Attention of ragged query rows over paged keys and values: prefill chunks behind a past, tree rows, any mixture.
//   out[t, h] = sum_k softmax_k(cap(scale * query[t, h] . key[k])) value[k]   over the keys k that row t sees
// Axes: rows t in [0, num_rows), query heads h, kv head = h / group, keys k by absolute position, D columns.
// FlashAttention-2 (Dao 2023) by mma.m16n8k16: a block has one kv head and a tile of packed rows (token, head in
// group), walks over key tiles of 64 that come through cp.async into a ring in shared memory (key tile, value tile, key tile,
// ...), and keeps softmax states and sums in registers.  A second kernel merges parts where splits > 1.
// Grid: (kv heads, row tiles, splits); the number of row tiles is an upper bound from host shapes, the blocks find
// theirs on the device; long rows (the later ones) first.  Scores are in log2 units from the softmax on.
//
// Why a row's bits do not depend on its neighbours (kSegments, the deterministic mode):
// - An mma's row of results depends on that row of the first operand and on the second operand only, and a row's place
//   among 16 does not change its arithmetic.  A row is never split over lanes in another way: the columns of a score
//   that a lane adds up are given by the key's position in its tile.
// - Key tiles start at multiples of 64, segments at multiples of kSegmentTokens of the absolute position, so a key
//   always has the same place in the same tile and segment, whatever the batch, the chunk or the page size.
// - A tile with no visible key changes nothing: its weights are exactly 0, the maximum stays, the old sums are
//   multiplied by exactly 1 (both maxima are rounded before they are subtracted).  So a row does not notice tiles that
//   only its neighbours see, and a warp may leave out tiles that none of its rows sees.
// - Segments start from an empty state and are merged in order by merge_states / merge_values, here or in the second
//   kernel; an empty segment merges without a trace.
#include "prefill_rows.cuh"

namespace edgellm {

template <typename T, typename KV, int D, bool kSegments>
struct PrefillBlock {
  using Shape = PrefillShape<T, KV, D, kSegments>;
  using Loader = PageLoader<KV, D, Shape::kThreads, kSegments>;
  using Rows = SoftmaxRows<Shape::kRowTiles, Shape::kColumnTiles>;
  static constexpr int kRowTiles = Shape::kRowTiles;

  const PagedPrefillParams& p;
  char* shared;
  u32 query;  // shared address
  Loader loader;

  // What is wanted now and then only, in shared memory because registers are short: the sequence's rows, the tile's
  // first packed row; then, for each warp, the keys that any of its rows sees ([0] to [1]) and those that all of them
  // see ([2] to [3]).
  __device__ __forceinline__ volatile int* record() const {
    return reinterpret_cast<volatile int*>(shared - Shape::kRecordBytes);
  }
  __device__ __forceinline__ volatile int* own_limits() const { return record() + 8 + threadIdx.x / kWarp * 4; }
  __device__ __forceinline__ SequenceRows rows() const {
    return {record()[0], record()[1], record()[2], record()[3]};
  }
  __device__ __forceinline__ int first_row() const { return record()[4] + warp_row(); }  // of this warp, packed

  __device__ __forceinline__ int kv_head() const { return blockIdx.x; }
  __device__ __forceinline__ int first_column() const {  // of this warp
    if constexpr (Shape::kColumnWarps == 1) return 0;
    return static_cast<int>(threadIdx.x) / kWarp / Shape::kRowWarps * Shape::kColumns;
  }
  __device__ __forceinline__ int warp_row() const {
    return static_cast<int>(threadIdx.x) / kWarp % Shape::kRowWarps * Shape::kWarpRows;
  }
  __device__ __forceinline__ int num_rows() const { return record()[2] * p.group; }
  __device__ __forceinline__ int token_of(int packed) const { return min(packed, num_rows() - 1) / p.group; }
  __device__ __forceinline__ int packed_row(int t, int h) const {
    return first_row() + t * 16 + h * 8 + static_cast<int>(threadIdx.x) % kWarp / 4;
  }
  __device__ __forceinline__ u32 stage(int slot) const {
    return query + Shape::kQueryBytes + slot * Loader::kStageBytes;
  }
  __device__ __forceinline__ const float* stage_scales(int slot) const {
    const char* tile = shared + Shape::kQueryBytes + slot * Loader::kStageBytes;
    return reinterpret_cast<const float*>(tile + Loader::kTileBytes);
  }

  __device__ __forceinline__ void setup_loader(const SequenceRows& rows, const KeyRange& range, int first_key,
                                               int stop_key) {
    loader.table = p.page_table + static_cast<i64>(rows.slot) * p.pages_per_slot;
    loader.begin = range.begin;
    loader.end = min(rows.keys(), p.pages_per_slot << p.page_shift);
    loader.tile = first_key / kKeyTile;
    loader.stop_tile = ceil_div(stop_key, kKeyTile);
    loader.start();
  }

  // Step u (keys of the block's u / 2-th tile, or values where u is odd) lies in place u % ring.  Waits for the step
  // after the one in `slot`, then loads the step ring - 1 later into the place that `slot` was.
  template <bool kValues>
  __device__ __forceinline__ void next_stage(int& slot) {
    if (p.ring == 2) cp_async_wait<0>();
    else if (p.ring == 3) cp_async_wait<1>();
    else cp_async_wait<2>();
    __syncthreads();
    load_next(slot, kValues != (p.ring % 2 == 0));
    slot = slot + 1 == p.ring ? 0 : slot + 1;
  }
  __device__ __forceinline__ void load_next(int slot, bool values) {
    if (loader.tile < loader.stop_tile) {
      loader.load(stage(slot), values);
      if (values) loader.advance();
    }
    cp_async_commit();
  }

  // Lane i finds the keys of row i of the warp; who has a share of that row gets them by shuffle.
  __device__ __forceinline__ void mask_scores(float (&scores)[kRowTiles][8][4], int tile_key) const {
    const int lane = threadIdx.x % kWarp;
    const u64 bits = visible_keys(p, rows(), token_of(first_row() + lane % Shape::kWarpRows), tile_key);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 word = __shfl_sync(kFullMask, static_cast<u32>(bits >> 32 * half), t * 16 + h * 8 + lane / 4);
          word >>= lane % 4 * 2;
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i)
              if (!(word >> (n * 8 + i) & 1)) scores[t][half * 4 + n][h * 2 + i] = negative_infinity();
        }
  }

  // The keys in `slot`: scores, then weights as operands of the product with the values.
  __device__ __forceinline__ void weigh_tile(u32 (&weights)[kRowTiles][4][4], int slot, int tile_key, bool masked,
                                             Rows& state) const {
    float scores[kRowTiles][8][4];
    multiply_keys<T, KV, D, kRowTiles>(scores, query, warp_row(), stage(slot));
    if constexpr (Shape::kFp8) scale_columns(scores, stage_scales(slot), kFp8Rest<T>);
    if (p.soft_cap > 0.0f) cap_scores(scores, p.scale, p.soft_cap);
    if (masked) mask_scores(scores, tile_key);
    state.step(scores, p.soft_cap > 0.0f ? kLog2e : p.scale * kLog2e);
    if constexpr (Shape::kFp8) scale_columns(scores, stage_scales(slot) + kKeyTile, kFp8Rest<T>);
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        weights[t][n / 2][n % 2 * 2] = pack2<T>(scores[t][n][0], scores[t][n][1]);
        weights[t][n / 2][n % 2 * 2 + 1] = pack2<T>(scores[t][n][2], scores[t][n][3]);
      }
  }

  // The sums of a part to the second kernel.
  __device__ __forceinline__ void store_part(const Rows& state, int part) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int packed = packed_row(t, h);
        const float sum = warp_sum<4>(state.sum[t][h]);
        if (packed >= num_rows()) continue;
        const i64 head_rows = static_cast<i64>(p.num_rows) * p.num_heads;
        const i64 row = part * head_rows + static_cast<i64>(rows().query_start + packed / p.group) * p.num_heads +
                        kv_head() * p.group + packed % p.group;
        float* target = p.partial_out + row * D + first_column();
#pragma unroll
        for (int block = 0; block < Shape::kColumnTiles / 2; ++block)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            ColumnPair pair = column_pair<Shape::kFp8>(state.out[t], block, j, h);
            *reinterpret_cast<float2*>(target + block * 16 + pair.column) = make_float2(pair.x, pair.y);
          }
        if (threadIdx.x % 4 == 0 && first_column() == 0)
          *reinterpret_cast<float2*>(p.partial_stats + row * 2) = make_float2(state.maximum[t][h], sum);
      }
  }

  // Final rows, through the query's place in shared memory so that they leave in 16-byte pieces.  `sum` is complete.
  __device__ __forceinline__ void store_out(const Rows& state) {
    __syncthreads();
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int packed = packed_row(t, h), row = warp_row() + packed - first_row();
        const int head = kv_head() * p.group + min(packed, num_rows() - 1) % p.group;
        const float factor = final_factor(p, head, state.maximum[t][h], state.sum[t][h]);
#pragma unroll
        for (int block = 0; block < Shape::kColumnTiles / 2; ++block)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            ColumnPair pair = column_pair<Shape::kFp8>(state.out[t], block, j, h);
            const int column = first_column() + block * 16 + pair.column;
            char* target = shared + swizzled<D * 2>(row, column / 8) + column % 8 * 2;
            *reinterpret_cast<u32*>(target) = pack2<T>(__fmul_rn(pair.x, factor), __fmul_rn(pair.y, factor));
          }
      }
    __syncwarp();
    copy_out();
  }

  __device__ __forceinline__ void copy_out() const {
    constexpr int kChunks = Shape::kColumns / 8;
#pragma unroll 4
    for (int i = threadIdx.x % kWarp; i < Shape::kWarpRows * kChunks; i += kWarp) {
      const int row = i / kChunks, chunk = first_column() / 8 + i % kChunks, packed = first_row() + row;
      if (packed >= num_rows()) break;
      T* target = static_cast<T*>(p.out) + static_cast<i64>(rows().query_start + packed / p.group) * p.num_heads * D +
                  (kv_head() * p.group + packed % p.group) * D + chunk * 8;
      *reinterpret_cast<uint4*>(target) =
          *reinterpret_cast<const uint4*>(shared + swizzled<D * 2>(warp_row() + row, chunk));
    }
  }

  __device__ __forceinline__ void complete_sums(Rows& state) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) state.sum[t][h] = warp_sum<4>(state.sum[t][h]);
  }

  // total = total merged with a part whose sums are complete.
  __device__ __forceinline__ void merge_rows(Rows& total, const Rows& part) const {
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Merged merged =
            merge_states(total.maximum[t][h], total.sum[t][h], part.maximum[t][h], part.sum[t][h]);
        total.maximum[t][h] = merged.maximum, total.sum[t][h] = merged.sum;
#pragma unroll
        for (int n = 0; n < Shape::kColumnTiles; ++n)
#pragma unroll
          for (int i = h * 2; i < h * 2 + 2; ++i)
            total.out[t][n][i] = merge_values(total.out[t][n][i], part.out[t][n][i], merged);
      }
  }

  __device__ __forceinline__ void write_record(const SequenceRows& rows, int tile_row) const {
    if (threadIdx.x == 0) {
      volatile int* values = record();
      values[0] = rows.slot;
      values[1] = rows.query_start;
      values[2] = rows.tokens;
      values[3] = rows.past;
      values[4] = tile_row;
    }
    if (threadIdx.x % kWarp == 0) write_limits(rows, tile_row + warp_row());
    __syncthreads();
  }

  // The keys that rows of this warp see, the first of which is packed row `row`.
  __device__ __forceinline__ void write_limits(const SequenceRows& rows, int row) const {
    const int last_row = rows.tokens * p.group - 1;
    const int first = min(row, last_row) / p.group, last = min(row + Shape::kWarpRows - 1, last_row) / p.group;
    const bool tree = p.tree_mask != nullptr;
    const KeyRange seen = key_range(p, rows, first, last);
    volatile int* values = own_limits();
    values[0] = seen.begin;
    values[1] = seen.end;
    values[2] = p.window > 0 ? (tree ? rows.keys() : rows.past + last + 1) - p.window : 0;
    values[3] = tree ? rows.past : rows.past + first + 1;
  }

  // Walks over the key tiles from first_key to stop_key.  direct: the result is final; otherwise parts first_part,
  // first_part + splits, ... are stored.
  __device__ __forceinline__ void walk(int first_part, bool direct, int tile) {
    Rows state;
    state.clear();
    Rows total;
    if constexpr (kSegments) total.clear();
    for (int step = 0; step < p.ring - 1; ++step) load_next(step, step % 2 == 1);
    int slot = p.ring - 1;
    int part = first_part;
    while (tile < loader.stop_tile) {
      u32 weights[kRowTiles][4][4];
      const int tile_key = tile * kKeyTile;
      const bool active = first_row() < num_rows();
      const bool wanted = active && tile_key + kKeyTile > own_limits()[0] && tile_key < own_limits()[1];
      next_stage<false>(slot);
      if (wanted) {
        const bool masked = tile_key < own_limits()[2] || tile_key + kKeyTile > own_limits()[3];
        weigh_tile(weights, slot, tile_key, masked, state);
      }
      next_stage<true>(slot);
      if (wanted)
        multiply_values<T, KV, D, kRowTiles, Shape::kColumnTiles>(state.out, weights, stage(slot), first_column());
      if constexpr (kSegments) {
        const bool segment_ends = (tile + 1) * kKeyTile % kSegmentTokens == 0 || loader.after(tile) >= loader.stop_tile;
        if (segment_ends && active) {
          if (direct) {
            complete_sums(state);
            merge_rows(total, state);
          } else {
            store_part(state, part);
          }
          state.clear();
        }
        if (segment_ends) part += p.splits;
      }
      tile = loader.after(tile);
    }
    if (!direct) {
      if (!kSegments && first_row() < num_rows()) store_part(state, part);
      return;
    }
    if constexpr (kSegments) {
      store_out(total);
    } else {
      complete_sums(state);
      store_out(state);
    }
  }
};

template <typename T, typename KV, int D, bool kSegments>
__global__ void __launch_bounds__(PrefillShape<T, KV, D, kSegments>::kThreads,
                                  PrefillShape<T, KV, D, kSegments>::kBlocks)
    paged_prefill(const __grid_constant__ PagedPrefillParams p) {
  using Block = PrefillBlock<T, KV, D, kSegments>;
  using Shape = typename Block::Shape;
  extern __shared__ __align__(1024) char record[];
  char* shared = record + Shape::kRecordBytes;
  wait_for_previous_kernel();
  int sequence, tile;
  if (!find_row_tile(p, gridDim.y - 1 - blockIdx.y, Shape::kTileRows, sequence, tile)) return;
  const SequenceRows rows = sequence_rows(p, sequence);
  const int tile_row = tile * Shape::kTileRows;
  const int last_row = min(tile_row + Shape::kTileRows, rows.tokens * p.group) - 1;
  const KeyRange range = key_range(p, rows, tile_row / p.group, last_row / p.group);
  const KeyParts parts = key_parts(p, range, splits_for(p, count_row_tiles(p, Shape::kTileRows)));
  const int part = blockIdx.z;
  if (part >= parts.count) return;
  const int first_key = max(parts.base + part * parts.step, range.begin);
  const int stop_key = kSegments ? range.end : min(range.end, parts.base + (part + 1) * parts.step);
  Block block{p, shared, shared_address(shared), {p}};
  block.write_record(rows, tile_row);
  block.setup_loader(rows, range, first_key, stop_key);
  load_query<T, D, Shape::kFp8, Shape::kThreads>(p, rows, block.kv_head(), tile_row, Shape::kTileRows, block.query,
                                                 shared);
  block.walk(part, p.splits == 1 || parts.count == 1, first_key / kKeyTile);
  let_next_kernel_start();
}

// Merges the parts of rows that were spread over blocks, in order.  A warp a (row, head).
template <typename T, int D>
__global__ void __launch_bounds__(128) paged_prefill_merge(const __grid_constant__ PagedPrefillParams p) {
  constexpr int kEach = D / kWarp;
  wait_for_previous_kernel();
  const i64 head_rows = static_cast<i64>(p.num_rows) * p.num_heads;
  const i64 row = static_cast<i64>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  if (row >= head_rows) return;
  const int token_row = static_cast<int>(row / p.num_heads), head = static_cast<int>(row % p.num_heads);
  const int sequence = find_sequence(p.query_start, p.num_sequences, token_row);
  if (sequence < 0 || p.slots[sequence] < 0) return;
  const SequenceRows rows = sequence_rows(p, sequence);
  const int packed = (token_row - rows.query_start) * p.group + head % p.group;
  const int tile_row = packed / p.tile_rows * p.tile_rows;
  const int last_row = min(tile_row + p.tile_rows, rows.tokens * p.group) - 1;
  const KeyRange range = key_range(p, rows, tile_row / p.group, last_row / p.group);
  const KeyParts parts = key_parts(p, range, splits_for(p, count_row_tiles(p, p.tile_rows)));
  if (parts.count == 1) return;
  const int column = threadIdx.x % kWarp * kEach;
  float maximum = negative_infinity(), sum = 0.0f, total[kEach] = {};
#pragma unroll 4
  for (int part = 0; part < parts.count; ++part) {
    const i64 place = part * head_rows + row;
    float values[kEach];
    load_floats(p.partial_out + place * D + column, values);
    const float2 stats = *reinterpret_cast<const float2*>(p.partial_stats + place * 2);
    const Merged merged = merge_states(maximum, sum, stats.x, stats.y);
    maximum = merged.maximum, sum = merged.sum;
#pragma unroll
    for (int i = 0; i < kEach; ++i) total[i] = merge_values(total[i], values[i], merged);
  }
  const float factor = final_factor(p, head, maximum, sum);
#pragma unroll
  for (int i = 0; i < kEach; ++i) total[i] = __fmul_rn(total[i], factor);
  store_floats(static_cast<T*>(p.out) + row * D + column, total);
}

}  // namespace edgellm
