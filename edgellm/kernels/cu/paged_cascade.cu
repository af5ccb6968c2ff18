// Decode attention to a prefix that several rows share: its pages are read once for all of them.
// Axes: rows n in [0, num_rows) of one query token, q heads h, kv head = h / group, keys t, columns d.  Group g of rows is
// members[group_start[g]] to members[group_start[g + 1]]; all of them have keys [0, shared[n]) in the same pages.
// After Hydragen (Juravsky et al. 2024): softmax over the shared keys and over a row's own are two states, joined in the
// end.  Three launches: `paged_cascade` makes the states of the shared keys, paged_decode (with `starts`) those of each
// row's own, `paged_cascade_merge` joins them.  A state is kStride floats of a (row, head): sums of D columns, maximum
// (log2 units), sum of weights, two unused.
// Packed rows (member, head in group) of a group form tiles of kTileRows, as in paged_prefill, whose products these are.
// A tile's keys lie in parts; an *item* is a group's tile and a part, and every block finds from the groups which there
// are: so a recorded launch serves any groups, or none.  Items are laid out so that all run at the same time.
// Order: paged_decode, which is in front of `paged_cascade`, lets it start only once everything before has ended.  So all
// that is read here (no kernel in between writes it) is there, and nobody reads the parts of an earlier call any more;
// `paged_cascade` waits at its end, for the sake of the merging kernel behind it, which needs the states of both.
#include "cascade_items.cuh"

namespace edgellm {

// ---- states of the shared keys -------------------------------------------------------------------------------------

template <typename T, typename KV, int D>
struct CascadeBlock {
  using Shape = PrefillShape<T, KV, D, false>;
  using Loader = PageLoader<KV, D, Shape::kThreads, false, PagedCascadeParams>;
  using Rows = SoftmaxRows<Shape::kRowTiles, Shape::kColumnTiles>;
  static constexpr int kRowTiles = Shape::kRowTiles;
  static_assert(Shape::kColumnWarps == 1 && Shape::kTileRows == kCascadeRows<D>, "a warp has whole rows of a tile");

  const PagedCascadeParams& p;
  Record& record;
  char* shared;
  u32 query;  // shared address
  Loader loader;

  __device__ __forceinline__ int warp_row() const {
    return static_cast<int>(threadIdx.x) / kWarp * Shape::kWarpRows;
  }
  __device__ __forceinline__ u32 stage(int slot) const {
    return query + Shape::kQueryBytes + slot * Loader::kStageBytes;
  }
  __device__ __forceinline__ const float* stage_scales(int slot) const {
    return reinterpret_cast<const float*>(shared + Shape::kQueryBytes + slot * Loader::kStageBytes + Loader::kTileBytes);
  }

  __device__ __forceinline__ void find_item(int index) const {
    __syncthreads();  // nobody reads what the item before left in shared memory
    if (threadIdx.x < kWarp) {
      const SharedItem item = edgellm::find_item(p, record, index, Shape::kTileRows);
      if (threadIdx.x == 0) record.item = item;
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load_query() const {
    const SharedItem item = record.item;
    constexpr int kChunks = D * 2 / 16;
    for (int i = threadIdx.x; i < Shape::kTileRows * kChunks; i += Shape::kThreads) {
      const int row = i / kChunks, chunk = i % kChunks, packed = item.first_row + row;
      const bool valid = packed < item.rows;
      const int member = valid ? packed / p.group : 0, head = blockIdx.x * p.group + (valid ? packed % p.group : 0);
      const T* source = static_cast<const T*>(p.query) + p.members[item.first_member + member] * p.query_stride +
                        static_cast<i64>(head) * D + chunk * 8;
      load_query_chunk<T, D, Shape::kFp8>(source, valid, row, chunk, query, shared);
    }
  }

  __device__ __forceinline__ void setup_loader() {
    const SharedItem item = record.item;
    loader.table = p.page_table + static_cast<i64>(item.slot) * p.pages_per_slot;
    loader.begin = item.begin;
    loader.end = item.end;
    loader.tile = item.begin / kKeyTile;
    loader.stop_tile = ceil_div(item.end, kKeyTile);
    loader.start();
  }

  // As in paged_prefill: step u (keys of the item's u / 2-th tile, or values where u is odd) lies in place u % ring.
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

  // Keys from `end` on, counted from the tile's first.
  __device__ __forceinline__ static void mask_scores(float (&scores)[kRowTiles][8][4], int end) {
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (n * 8 + static_cast<int>(threadIdx.x) % 4 * 2 + i < end) continue;
#pragma unroll
        for (int t = 0; t < kRowTiles; ++t) scores[t][n][i] = scores[t][n][2 + i] = negative_infinity();
      }
  }

  // The keys in `slot`: scores, then weights as operands of the product with the values.
  __device__ __forceinline__ void weigh_tile(u32 (&weights)[kRowTiles][4][4], int slot, int keys_left,
                                             Rows& state) const {
    float scores[kRowTiles][8][4];
    multiply_keys<T, KV, D, kRowTiles>(scores, query, warp_row(), stage(slot));
    if constexpr (Shape::kFp8) scale_columns(scores, stage_scales(slot), kFp8Rest<T>);
    if (p.soft_cap > 0.0f) cap_scores(scores, p.scale, p.soft_cap);
    if (keys_left < kKeyTile) mask_scores(scores, keys_left);
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

  __device__ __forceinline__ void store_part(const Rows& state) const {
    const SharedItem item = record.item;
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp_row() + t * 16 + h * 8 + static_cast<int>(threadIdx.x) % kWarp / 4;
        const float sum = warp_sum<4>(state.sum[t][h]);
        if (item.first_row + row >= item.rows) continue;
        float* target = p.parts + part_place<D>(p, item.index, blockIdx.x, row);
#pragma unroll
        for (int block = 0; block < Shape::kColumnTiles / 2; ++block)
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const ColumnPair pair = column_pair<Shape::kFp8>(state.out[t], block, j, h);
            *reinterpret_cast<float2*>(target + block * 16 + pair.column) = make_float2(pair.x, pair.y);
          }
        if (threadIdx.x % 4 == 0) *reinterpret_cast<float2*>(target + D) = make_float2(state.maximum[t][h], sum);
      }
  }

  __device__ __forceinline__ void attend(int index) {
    find_item(index);
    load_query();
    setup_loader();
    Rows state;
    state.clear();
    for (int step = 0; step < p.ring - 1; ++step) load_next(step, step % 2 == 1);
    const bool active = record.item.first_row + warp_row() < record.item.rows;
    int slot = p.ring - 1;
    for (int key = record.item.begin; key < record.item.end; key += kKeyTile) {
      u32 weights[kRowTiles][4][4];
      next_stage<false>(slot);
      if (active) weigh_tile(weights, slot, record.item.end - key, state);
      next_stage<true>(slot);
      if (active) multiply_values<T, KV, D, kRowTiles, Shape::kColumnTiles>(state.out, weights, stage(slot), 0);
    }
    if (active) store_part(state);
    cp_async_wait<0>();
  }
};

// Grid: (kv heads, blocks).  Dynamic shared memory: the record, query rows, the ring.
template <typename T, typename KV, int D>
__global__ void __launch_bounds__(PrefillShape<T, KV, D, false>::kThreads, PrefillShape<T, KV, D, false>::kBlocks)
    paged_cascade(const __grid_constant__ PagedCascadeParams p) {
  extern __shared__ __align__(1024) char memory[];
  Record& record = *reinterpret_cast<Record*>(memory);
  char* const shared = memory + kRecordBytes;
  let_next_kernel_start();
  if (threadIdx.x < kWarp) fill_record<D>(p, record);
  __syncthreads();
  CascadeBlock<T, KV, D> block{p, record, shared, shared_address(shared), {p}};
  for (int index = blockIdx.y; index < record.items; index += gridDim.y) block.attend(index);
  wait_for_previous_kernel();
}

// ---- joining -------------------------------------------------------------------------------------------------------

// Softmax states of a (row, head), joined one after the other; a lane has kEach columns.
template <int D>
struct Joined {
  static constexpr int kEach = D / kWarp;
  float maximum, sum, total[kEach];

  __device__ __forceinline__ void add(const float* state) {
    float values[kEach];
    load_floats(state + threadIdx.x % kWarp * kEach, values);
    const float2 stats = *reinterpret_cast<const float2*>(state + D);
    const Merged merged = merge_states(maximum, sum, stats.x, stats.y);
    maximum = merged.maximum, sum = merged.sum;
#pragma unroll
    for (int i = 0; i < kEach; ++i) total[i] = merge_values(total[i], values[i], merged);
  }
};

// The parts of the shared keys in order, then the row's own keys, then the sink.  A warp a (member, head).
template <typename T, int D>
__global__ void __launch_bounds__(128) paged_cascade_merge(const __grid_constant__ PagedCascadeParams p) {
  const int place = blockIdx.x * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  const int member = place / p.num_heads, head = place % p.num_heads, kv_head = head / p.group;
  if (member >= p.group_start[kMaxGroups]) {
    wait_for_previous_kernel();
    return;
  }
  const Schedule schedule = make_schedule(p, kCascadeRows<D>);
  const Group& group = schedule.group;
  const bool holds = group.first <= member && member < group.first + group.members;
  const int owner = __ffs(static_cast<int>(__ballot_sync(kFullMask, holds))) - 1;
  wait_for_previous_kernel();
  if (owner < 0) return;
  const int tiles = __shfl_sync(kFullMask, group.tiles, owner), parts = __shfl_sync(kFullMask, group.parts, owner);
  const int items = __shfl_sync(kFullMask, group.items_end, owner) - tiles * parts;
  const int packed = (member - __shfl_sync(kFullMask, group.first, owner)) * p.group + head - kv_head * p.group;
  const int tile = packed / kCascadeRows<D>, row = p.members[member];
  if (tiles == 0 || p.slots[row] < 0) return;
  Joined<D> joined{negative_infinity(), 0.0f, {}};
#pragma unroll(D == 64 ? 8 : 4)
  for (int part = 0; part < parts; ++part)
    joined.add(p.parts + part_place<D>(p, items + part * tiles + tile, kv_head, packed - tile * kCascadeRows<D>));
  if (p.shared[row] < p.lengths[row]) joined.add(p.own + (static_cast<i64>(row) * p.num_heads + head) * kStride<D>);
  const float factor = final_factor(p, head, joined.maximum, joined.sum);
#pragma unroll
  for (int i = 0; i < joined.kEach; ++i) joined.total[i] = __fmul_rn(joined.total[i], factor);
  T* out = static_cast<T*>(p.out) + row * p.out_stride + static_cast<i64>(head) * D;
  store_floats(out + threadIdx.x % kWarp * joined.kEach, joined.total);
}

}  // namespace edgellm
