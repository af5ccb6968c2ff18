// Attention of tiles of 128 packed rows over paged keys by warpgroup products, for 9.0: 16-bit keys and values.
// After FlashAttention-3 (Shah et al. 2024).  A block stays on its SM
// and works through items, each a kv head, a tile of 128 packed rows and a part of their keys.  One warpgroup finds the
// items and loads query rows, then key and value tiles (of 128, or 64 for head_dim 256) from pages through cp.async, as
// far ahead as there is room, also into the next item.  Two warpgroups have 64 rows each: each issues the scores of the
// next tile and the weighted values of this one together, and does the softmax of the next while the values are under
// way; named barriers let the two take turns, so that one computes weights while the other keeps the tensor cores busy.
// kSegments, the deterministic mode: keys in segments, each an own softmax, merged in order by the same arithmetic as
// in paged_prefill_merge; the sums of all segments so far are in shared memory.  Why a row's bits do not depend on its
// neighbours: as in paged_prefill.cu; a warpgroup's product, too, gives each row of the first operand its own sums.
// `Params`: those of the kernel; what depends on them are the overloads below.
#pragma once

#include "mma.cuh"
#include "prefill_work.cuh"
#include "wgmma.cuh"

namespace edgellm {

constexpr int kConsumers = 2;   // warpgroups
constexpr int kGroupThreads = 128;
constexpr int kGroupRows = 64;
constexpr int kSm90Rows = kConsumers * kGroupRows;
constexpr int kSm90Threads = (kConsumers + 1) * kGroupThreads;
constexpr int kPlacesDeep = 2;  // tiles of keys, and of values, in shared memory
template <int D>
constexpr int kLoaderRegisters = D == 256 ? 56 : 72;
template <int D>
constexpr int kConsumerRegisters = D == 256 ? 224 : 216;

// Shared memory: places for query rows, places for key and value tiles in turn, all as panels of 64 columns; barriers
// (two for each place, full and empty); what the items are, two records in turn; with segments the sums of those done,
// four floats of all consuming threads after the other.
template <int D, bool kSegments>
struct Sm90Layout {
  static constexpr int kKeys = D == 256 ? 64 : 128;  // of a tile
  static constexpr int kQueryPlaces = D == 256 || kSegments ? 1 : 2;
  static constexpr int kQueryBytes = kSm90Rows * D * 2;
  static constexpr int kTileBytes = kKeys * D * 2;
  static constexpr int kPlaces = 2 * kPlacesDeep;
  static constexpr int kTiles = kQueryPlaces * kQueryBytes;
  static constexpr int kBarriers = kTiles + kPlaces * kTileBytes;
  static constexpr int kRecords = kBarriers + (kPlaces + kQueryPlaces) * 16;
  static constexpr int kTotals = kBarriers + 256;
};

// The value of a warp's first lane, for what all lanes agree on: lets the compiler see that branches do not diverge.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(kFullMask, value, 0); }

// Address of a 16-byte chunk of a row in panels of `rows` rows.
__device__ __forceinline__ u32 panel_chunk(int rows, int row, int chunk) {
  return static_cast<u32>(chunk / 8 * rows * kPanelBytes + row * kPanelBytes + ((chunk % 8) ^ (row % 8)) * 16);
}

// Step u of a ring is in place u % places; the parity of its barriers changes with each round.
struct RingStep {
  int place;
  u32 parity;
  __device__ __forceinline__ void advance(int by, int places) {
    place += by;
    if (place >= places) place -= places, parity ^= 1;
  }
};

// Where a row's sums of a part go: D floats, and maximum and sum of weights.
struct PartPlace {
  float *out, *stats;
};

// What a block does next.
struct Item {
  SequenceRows rows;
  int head;       // kv head; -1: nothing more
  int tile_row;   // first packed row
  int first_tile, stop_tile;
  int part;
  int direct;     // 1: the part is all, its sums are the result
  int first_key;  // that any row sees
};

// ---- what depends on the kernel: overloads for its parameters ----

// The row of `query` that a token of an item has.
__device__ __forceinline__ i64 query_row(const PagedPrefillParams&, const SequenceRows& rows, int token) {
  return rows.query_start + token;
}

// Keys that tokens first to last all see.
__device__ __forceinline__ KeyRange common_keys(const PagedPrefillParams& p, const SequenceRows& rows, int first,
                                                int last) {
  const bool tree = p.tree_mask != nullptr;
  const int last_end = tree ? rows.keys() : rows.past + last + 1;
  return {p.window > 0 ? last_end - p.window : 0, tree ? rows.past : rows.past + first + 1};
}

template <int D>
__device__ __forceinline__ PartPlace part_target(const PagedPrefillParams& p, const Item& item, int part, int packed) {
  const i64 row = static_cast<i64>(part) * p.num_rows * p.num_heads +
                  static_cast<i64>(item.rows.query_start + packed / p.group) * p.num_heads + item.head * p.group +
                  packed % p.group;
  return {p.partial_out + row * D, p.partial_stats + row * 2};
}

template <typename Params, typename T, int D, bool kSegments>
struct Sm90Block {
  using Layout = Sm90Layout<D, kSegments>;
  const Params& p;
  char* shared;
  u32 base;

  __device__ __forceinline__ u32 query(int place) const { return base + place * Layout::kQueryBytes; }
  __device__ __forceinline__ u32 tile(int place) const { return base + Layout::kTiles + place * Layout::kTileBytes; }
  __device__ __forceinline__ u32 full(int place) const { return base + Layout::kBarriers + place * 16; }
  __device__ __forceinline__ u32 empty(int place) const { return full(place) + 8; }
  __device__ __forceinline__ u32 query_full(int place) const { return full(Layout::kPlaces + place); }
  __device__ __forceinline__ u32 query_empty(int place) const { return query_full(place) + 8; }
  // Two in turn, also where there is one place for query rows; `parity`: that of the place's barrier for who reads.
  __device__ __forceinline__ Item* record(int place, u32 parity) const {
    static_assert(Layout::kRecords + 2 * sizeof(Item) <= Layout::kTotals, "the records overlap the sums");
    return reinterpret_cast<Item*>(shared + Layout::kRecords) + (Layout::kQueryPlaces == 2 ? place : parity);
  }

  __device__ __forceinline__ void init_barriers() const {
    if (threadIdx.x == 0) {
      for (int i = 0; i < Layout::kPlaces + Layout::kQueryPlaces; ++i) {
        barrier_init(full(i), kGroupThreads);
        barrier_init(empty(i), kConsumers * kGroupThreads / kWarp);
      }
      fence_for_wgmma();
    }
    __syncthreads();
  }

  // ---- the loading warpgroup ----

  __device__ __forceinline__ void load_query(const Item& item, u32 target) const {
    constexpr int kChunks = D / 8, kRowsApart = kGroupThreads / kChunks;
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    int token = (item.tile_row + row) / p.group, head = (item.tile_row + row) % p.group;
    const T* source = static_cast<const T*>(p.query) + static_cast<i64>(item.head) * p.group * D + chunk * 8;
    target += panel_chunk(kSm90Rows, row, chunk);
#pragma unroll 2
    for (int i = 0; i < kSm90Rows / kRowsApart; ++i) {
      const bool valid = token < item.rows.tokens;
      const u32 place = target ^ (i * kRowsApart % 8 * 16);
      cp_async_16_or_zero(place + i * kRowsApart * kPanelBytes,
                          source + (valid ? query_row(p, item.rows, token) * p.query_stride + head * D : 0), valid);
      head += kRowsApart;
      while (head >= p.group) head -= p.group, ++token;
    }
  }

  // Items that share a tile's segments in turn.
  __device__ __forceinline__ int splits() const {
    if constexpr (kSegments) return p.splits;
    else return 1;
  }
  // The item's next tile: other items may have the segments in between.
  __device__ __forceinline__ int after(int tile) const {
    constexpr int kSegmentTiles = kSegmentTokens / Layout::kKeys;
    return tile + 1 + (kSegments && (tile + 1) % kSegmentTiles == 0 ? (splits() - 1) * kSegmentTiles : 0);
  }

  // 16 keys are one contiguous piece of a page.  Lane i of each warp knows where piece i of 512 keys begins, in units
  // of 16 bytes from the first page on, and all lanes which of them have a page.
  struct Pieces {
    u32 begin, present;
  };

  __device__ __forceinline__ int load_page_ids(const int* table, int run, int end) const {
    const int key = run * (16 * kWarp) + static_cast<int>(threadIdx.x % kWarp) * 16;
    return key < end ? __ldg(table + (key >> p.page_shift)) : -1;
  }
  __device__ __forceinline__ Pieces find_pieces(int page) const {
    const u32 place = page_place(p, static_cast<int>(threadIdx.x % kWarp) * 16) * (D * 2);
    return {static_cast<u32>((page_offset(p, page) + place) >> 4), __ballot_sync(kFullMask, page >= 0)};
  }

  template <bool kWhole>
  __device__ __forceinline__ void copy_tile(u32 target, const char* head, const Pieces& pieces, u32 first_piece,
                                            u32 key_inside, u32 keys_inside) const {
    constexpr int kChunks = D / 8, kEach = 16 * kChunks / kGroupThreads, kRowsApart = kGroupThreads / kChunks;
    static_assert(kRowsApart % 4 == 0, "rows apart differ in one bit of the row number's last three");
#pragma unroll(kWhole && D <= 128 ? 4 : 1)
    for (int piece = 0; piece < Layout::kKeys / 16; ++piece) {
      const char* source = head + static_cast<u64>(__shfl_sync(kFullMask, pieces.begin, first_piece + piece)) * 16;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const u32 place = (target ^ (i * kRowsApart % 8 * 16)) + (piece * 16 + i * kRowsApart) * kPanelBytes;
        const char* own = source + i * kGroupThreads * 16;
        if constexpr (kWhole) {
          cp_async_16(place, own);
        } else {
          const bool present = pieces.present >> (first_piece + piece) & 1;
          cp_async_16_or_zero(place, own, present && key_inside + piece * 16 + i * kRowsApart < keys_inside);
        }
      }
    }
  }

  __device__ __forceinline__ void load_tile(u32 target, int tile, const Pieces& pieces, const char* head, int begin,
                                            int end) const {
    constexpr int kChunks = D / 8;
    constexpr u32 kAllPieces = (1u << (Layout::kKeys / 16)) - 1;
    const u32 first_piece = static_cast<u32>(tile) * (Layout::kKeys / 16) % kWarp;
    const int row = threadIdx.x / kChunks, tile_key = tile * Layout::kKeys;
    target += panel_chunk(Layout::kKeys, row, threadIdx.x % kChunks);
    head += threadIdx.x * 16;
    const bool present = (pieces.present >> first_piece & kAllPieces) == kAllPieces;
    if (present && tile_key >= begin && tile_key + Layout::kKeys <= end)
      copy_tile<true>(target, head, pieces, first_piece, 0, 0);
    else
      copy_tile<false>(target, head, pieces, first_piece, tile_key + row - begin, end - begin);
  }

  // Barriers become full one step late, when the copies of the next step have been issued, unless that has to wait.
  // `pending`: the barrier of the step before, or 0.
  __device__ __forceinline__ void publish(u32& pending) const {
    fence_for_wgmma();
    barrier_arrive(pending);
    pending = 0;
  }
  __device__ __forceinline__ void wait_for_room(u32 barrier, u32 parity, u32& pending) const {
    if (pending && !barrier_done(barrier, parity)) {
      cp_async_wait<0>();
      publish(pending);
    }
    barrier_wait(barrier, parity);
  }
  __device__ __forceinline__ void copies_issued(u32 barrier, u32& pending) const {
    cp_async_commit();
    if (pending) {
      cp_async_wait<1>();
      publish(pending);
    }
    pending = barrier;
  }

  __device__ __forceinline__ void load_item(const Item& item, RingStep& step, u32& pending) const {
    constexpr int kRunTiles = 16 * kWarp / Layout::kKeys;
    const char* keys = static_cast<const char*>(p.pages) + static_cast<i64>(item.head) * p.head_bytes;
    const int* table = p.page_table + static_cast<i64>(item.rows.slot) * p.pages_per_slot;
    const int end = min(item.rows.keys(), p.pages_per_slot << p.page_shift);
    Pieces pieces = find_pieces(load_page_ids(table, item.first_tile / kRunTiles, end));
    int next_ids = load_page_ids(table, after(item.first_tile | (kRunTiles - 1)) / kRunTiles, end);
    for (int tile = item.first_tile; tile < item.stop_tile; tile = after(tile)) {
#pragma unroll 1
      for (int values = 0; values < 2; ++values) {
        wait_for_room(empty(step.place), step.parity, pending);
        const char* head = keys + (values ? static_cast<i64>(p.num_kv_heads) * p.head_bytes : 0);
        load_tile(this->tile(step.place), tile, pieces, head, item.first_key, end);
        copies_issued(full(step.place), pending);
        step.advance(1, Layout::kPlaces);
      }
      if ((tile + 1) % kRunTiles == 0) {
        pieces = find_pieces(next_ids);
        next_ids = load_page_ids(table, after(after(tile) | (kRunTiles - 1)) / kRunTiles, end);
      }
    }
  }

  // `work.next(item)`: the block's next item, called by whole warps; false after the last.
  template <typename Work>
  __device__ __forceinline__ void load_all(Work& work) const {
    RingStep step{0, 1}, query_step{0, 1};
    u32 pending = 0;
    Item item;
    while (work.next(item)) {
      wait_for_room(query_empty(query_step.place), query_step.parity, pending);
      if (threadIdx.x == 0) *record(query_step.place, query_step.parity ^ 1) = item;
      load_query(item, query(query_step.place));
      copies_issued(query_full(query_step.place), pending);
      query_step.advance(1, Layout::kQueryPlaces);
      load_item(item, step, pending);
    }
    cp_async_wait<0>();
    if (pending) publish(pending);
    barrier_wait(query_empty(query_step.place), query_step.parity);
    if (threadIdx.x == 0) record(query_step.place, query_step.parity ^ 1)->head = -1;
    barrier_arrive(query_full(query_step.place));
  }
};

// 64 rows of a consuming warpgroup.  A lane has rows `line` and `line + 8` of its warp's 16.
template <typename Params, typename T, int D, bool kSegments>
struct Sm90Consumer {
  using Layout = Sm90Layout<D, kSegments>;
  static constexpr int kKeys = Layout::kKeys, kKeyTiles = kKeys / 8;
  const Sm90Block<Params, T, D, kSegments>& block;
  const Params& p;
  int group;  // which of the consumers
  RingStep keys, values, queries;
  const Item* item;  // in shared memory: registers are short
  int first_row;  // of the warpgroup, packed
  int common_begin, common_end;
  float maximum[2], sum[2], factors[2];
  float out[D / 8][4];
  int part;                           // of the segment at work
  float total_maximum[2], total_sum[2];  // of the segments before it

  __device__ __forceinline__ int packed_row(int h) const {
    return first_row + static_cast<int>(threadIdx.x) % kGroupThreads / kWarp * 16 + h * 8 +
           static_cast<int>(threadIdx.x) % kWarp / 4;
  }

  __device__ __forceinline__ int num_rows() const { return item->rows.tokens * p.group; }
  __device__ __forceinline__ int token_of(int packed) const { return min(packed, num_rows() - 1) / p.group; }

  __device__ __forceinline__ void release(u32 barrier) const {
    if (threadIdx.x % kWarp == 0) barrier_arrive(barrier);
  }

  // Turns: named barrier 1 + g is the turn of consumer g.  Consumer 0 begins, and takes what is left at the end.
  __device__ __forceinline__ void first_turn() const {
    if (group == 1) asm volatile("bar.arrive 1, 256;" ::: "memory");
  }
  __device__ __forceinline__ void wait_turn() const {
    asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory");
  }
  __device__ __forceinline__ void pass_turn() const {
    asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory");
  }
  __device__ __forceinline__ void last_turn() const {
    if (group == 0) wait_turn();
  }

  __device__ __forceinline__ void issue_scores(float (&scores)[kKeyTiles][4], int place) const {
    const u64 a = wgmma_operand(block.query(queries.place) + group * kGroupRows * kPanelBytes, 0);
    const u64 b = wgmma_operand(block.tile(place), 0);
#pragma unroll
    for (int step = 0; step < D / 16; ++step) {
      const u32 in_panel = step % 4 * 32;
      wgmma_shared<T, kKeys>(scores, a + ((step / 4 * kSm90Rows * kPanelBytes + in_panel) >> 4),
                                 b + ((step / 4 * kKeys * kPanelBytes + in_panel) >> 4), step > 0);
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void issue_values(const u32 (&weights)[kKeyTiles / 2][4], int place) {
    const u64 b = wgmma_operand(block.tile(place), kKeys * kPanelBytes);
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
      wgmma_registers<T, D>(out, weights[step], b + (step * 16 * kPanelBytes >> 4));
    wgmma_commit();
  }

  __device__ __forceinline__ void mask(float (&scores)[kKeyTiles][4], int tile_key) const {
    const int lane = threadIdx.x % kWarp;
    const int packed = first_row + static_cast<int>(threadIdx.x) % kGroupThreads / kWarp * 16 + lane % 16;
    const u64 bits = visible_keys(p, item->rows, token_of(packed), tile_key + lane / 16 * 64);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int quarter = 0; quarter < kKeys / 32; ++quarter) {
        const u32 own = static_cast<u32>(bits >> quarter % 2 * 32);
        const u32 word = __shfl_sync(kFullMask, own, quarter / 2 * 16 + h * 8 + lane / 4) >> (lane % 4 * 2);
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (!(word >> (n * 8 + i) & 1)) scores[quarter * 4 + n][h * 2 + i] = negative_infinity();
      }
  }

  __device__ __forceinline__ void cap(float (&scores)[kKeyTiles][4]) const {
    const float inner = __fdiv_rn(p.scale, p.soft_cap);
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[n][i] = p.soft_cap * tanh_fast(scores[n][i] * inner);
  }

  // Scores to weights in place; `factors` is what `out` has to be multiplied with before they are added.
  __device__ __forceinline__ void weigh(float (&scores)[kKeyTiles][4], int tile) {
    const int tile_key = tile * kKeys;
    if (p.soft_cap > 0.0f) cap(scores);
    if (tile_key < common_begin || tile_key + kKeys > common_end) mask(scores, tile_key);
    const float to_log2 = p.soft_cap > 0.0f ? kLog2e : p.scale * kLog2e;
    // Four maxima and sums a row at a time: a single chain would be as slow as its latencies.
    float tops[2][4], added[2][4] = {};
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 4; ++i) tops[h][i] = scores[i / 2][h * 2 + i % 2];
#pragma unroll
    for (int n = 2; n < kKeyTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) tops[i / 2][n % 2 * 2 + i % 2] = fmaxf(tops[i / 2][n % 2 * 2 + i % 2], scores[n][i]);
    float origins[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float own = fmaxf(fmaxf(tops[h][0], tops[h][1]), fmaxf(tops[h][2], tops[h][3]));
      const float top = fmaxf(maximum[h], __fmul_rn(warp_max<4>(own), to_log2));
      origins[h] = top == negative_infinity() ? 0.0f : top;
      factors[h] = exp2_fast(maximum[h] - origins[h]);
      maximum[h] = top;
    }
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = exp2_fast(__fmaf_rn(scores[n][i], to_log2, -origins[i / 2]));
        added[i / 2][n % 2 * 2 + i % 2] += scores[n][i];
      }
#pragma unroll
    for (int h = 0; h < 2; ++h)
      sum[h] = __fmaf_rn(sum[h], factors[h], (added[h][0] + added[h][1]) + (added[h][2] + added[h][3]));
  }

  // The keys that all rows of the warpgroup see are those from common_begin to common_end.
  __device__ __forceinline__ void find_common_keys() {
    const KeyRange common =
        common_keys(p, item->rows, token_of(first_row), token_of(first_row + kGroupRows - 1));
    common_begin = uniform(common.begin), common_end = uniform(common.end);
  }

  __device__ __forceinline__ void pack(u32 (&weights)[kKeyTiles / 2][4], const float (&scores)[kKeyTiles][4]) const {
#pragma unroll
    for (int n = 0; n < kKeyTiles; ++n) {
      weights[n / 2][n % 2 * 2] = pack2<T>(scores[n][0], scores[n][1]);
      weights[n / 2][n % 2 * 2 + 1] = pack2<T>(scores[n][2], scores[n][3]);
    }
  }

  __device__ __forceinline__ void scale_out() {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] *= factors[i / 2];
  }

  __device__ __forceinline__ void clear_state() {
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum[h] = negative_infinity(), sum[h] = 0.0f;
  }
  __device__ __forceinline__ void clear_out() {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] = 0.0f;
  }

  __device__ __forceinline__ bool is_direct() const { return item->direct != 0; }
  __device__ __forceinline__ float4* totals() const {
    return reinterpret_cast<float4*>(block.shared + Layout::kTotals) + (threadIdx.x - kGroupThreads);
  }

  // A segment has ended, with this maximum and sum (of the lane's columns): it joins the sums of those before it, or
  // goes to the second kernel.  The first joins an empty state, as it does there.
  __device__ __forceinline__ void end_segment(const float (&ended_maximum)[2], const float (&ended_sum)[2]) {
    float sums[2];
    Merged merged[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) sums[h] = warp_sum<4>(ended_sum[h]);
    if (!is_direct()) {
      store_part(part, ended_maximum, sums);
      part += block.splits();
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      merged[h] = merge_states(total_maximum[h], total_sum[h], ended_maximum[h], sums[h]);
      total_maximum[h] = merged[h].maximum, total_sum[h] = merged[h].sum;
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      float4& place = totals()[n * kConsumers * kGroupThreads];
      float4 total = part == 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : place;
      total.x = merge_values(total.x, out[n][0], merged[0]), total.y = merge_values(total.y, out[n][1], merged[0]);
      total.z = merge_values(total.z, out[n][2], merged[1]), total.w = merge_values(total.w, out[n][3], merged[1]);
      place = total;
    }
    part += 1;
  }

  __device__ __forceinline__ void take_totals() {
#pragma unroll
    for (int h = 0; h < 2; ++h) maximum[h] = total_maximum[h], sum[h] = total_sum[h];
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
      const float4 total = totals()[n * kConsumers * kGroupThreads];
      out[n][0] = total.x, out[n][1] = total.y, out[n][2] = total.z, out[n][3] = total.w;
    }
  }

  // The item's rows: out, maximum and sum.
  __device__ __forceinline__ void attend() {
    const int first_tile = uniform(item->first_tile), stop_tile = uniform(item->stop_tile);
    clear_state();
    clear_out();
    part = item->part;
#pragma unroll
    for (int h = 0; h < 2; ++h) total_maximum[h] = negative_infinity(), total_sum[h] = 0.0f;
    float scores[kKeyTiles][4];
    u32 weights[kKeyTiles / 2][4];
    barrier_wait(block.full(keys.place), keys.parity);
    wait_turn();
    wgmma_begin();
    issue_scores(scores, keys.place);
    pass_turn();
    wgmma_wait<0>();
    wgmma_settle(scores);
    release(block.empty(keys.place));
    keys.advance(2, Layout::kPlaces);
    weigh(scores, first_tile);
    pack(weights, scores);
    for (int tile = block.after(first_tile); tile < stop_tile; tile = block.after(tile)) {
      barrier_wait(block.full(keys.place), keys.parity);
      wait_turn();
      wgmma_begin();
      issue_scores(scores, keys.place);
      barrier_wait(block.full(values.place), values.parity);
      wgmma_begin();
      issue_values(weights, values.place);
      pass_turn();
      wgmma_wait<1>();
      wgmma_settle(scores);
      release(block.empty(keys.place));
      keys.advance(2, Layout::kPlaces);
      const bool segment_begins = kSegments && tile % (kSegmentTokens / kKeys) == 0;
      const float ended_maximum[2] = {maximum[0], maximum[1]}, ended_sum[2] = {sum[0], sum[1]};
      if (segment_begins) clear_state();
      weigh(scores, tile);
      if (__any_sync(kFullMask, sum[0] + sum[1] < 0.0f)) __trap();  // never; or the weights are computed after the wait
      wgmma_wait<0>();
      wgmma_settle(out);
      release(block.empty(values.place));
      values.advance(2, Layout::kPlaces);
      if (segment_begins) {
        end_segment(ended_maximum, ended_sum);
        clear_out();
      } else {
        scale_out();
      }
      pack(weights, scores);
    }
    barrier_wait(block.full(values.place), values.parity);
    wgmma_begin();
    issue_values(weights, values.place);
    wgmma_wait<0>();
    wgmma_settle(out);
    release(block.empty(values.place));
    values.advance(2, Layout::kPlaces);
    if constexpr (kSegments) {
      end_segment(maximum, sum);
      if (is_direct()) take_totals();
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) sum[h] = warp_sum<4>(sum[h]);
    }
  }

  __device__ __forceinline__ bool next_item() {
    barrier_wait(block.query_full(queries.place), queries.parity);
    item = block.record(queries.place, queries.parity);
    if (uniform(item->head) < 0) return false;
    first_row = item->tile_row + group * kGroupRows;
    find_common_keys();
    return true;
  }

  __device__ __forceinline__ void run() {
    keys = {0, 0}, values = {1, 0}, queries = {0, 0};
    first_turn();
    while (next_item()) {
      attend();
      if (is_direct()) store_out();
      else if (!kSegments) store_part(item->part, maximum, sum);
      __syncwarp();
      release(block.query_empty(queries.place));
      queries.advance(1, Layout::kQueryPlaces);
    }
    last_turn();
  }

  __device__ __forceinline__ i64 head_row(int packed) const {
    return static_cast<i64>(item->rows.query_start + packed / p.group) * p.num_heads + item->head * p.group +
           packed % p.group;
  }

  // The sums of a part to the kernel that joins them.
  __device__ __forceinline__ void store_part(int part, const float (&maximum)[2], const float (&sum)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int packed = packed_row(h);
      if (packed >= num_rows()) continue;
      const PartPlace place = part_target<D>(p, *item, part, packed);
      float* target = place.out + threadIdx.x % 4 * 2;
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<float2*>(target + n * 8) = make_float2(out[n][h * 2], out[n][h * 2 + 1]);
      if (threadIdx.x % 4 == 0) *reinterpret_cast<float2*>(place.stats) = make_float2(maximum[h], sum[h]);
    }
  }

  // Final rows, through the query's place in shared memory so that they leave in 16-byte pieces.
  __device__ __forceinline__ void store_out() const {
    asm volatile("bar.sync %0, 128;" ::"r"(3 + group) : "memory");  // all warps of the group have read the query
    char* rows_out = block.shared + queries.place * Layout::kQueryBytes;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int packed = packed_row(h), row = packed - item->tile_row;
      const int head = item->head * p.group + min(packed, num_rows() - 1) % p.group;
      const float factor = final_factor(p, head, maximum[h], sum[h]);
#pragma unroll
      for (int n = 0; n < D / 8; ++n)
        *reinterpret_cast<u32*>(rows_out + panel_chunk(kSm90Rows, row, n) + threadIdx.x % 4 * 4) =
            pack2<T>(__fmul_rn(out[n][h * 2], factor), __fmul_rn(out[n][h * 2 + 1], factor));
    }
    __syncwarp();
    const int warp_row = packed_row(0) - static_cast<int>(threadIdx.x) % kWarp / 4;
#pragma unroll 4
    for (int i = threadIdx.x % kWarp; i < 16 * (D / 8); i += kWarp) {
      const int packed = warp_row + i / (D / 8), chunk = i % (D / 8);
      if (packed >= num_rows()) break;
      *reinterpret_cast<uint4*>(static_cast<T*>(p.out) + head_row(packed) * D + chunk * 8) =
          *reinterpret_cast<const uint4*>(rows_out + panel_chunk(kSm90Rows, packed - item->tile_row, chunk));
    }
  }
};

}  // namespace edgellm
