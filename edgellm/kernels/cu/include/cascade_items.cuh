// Which keys a block of paged_cascade works on; axes are in paged_cascade.cu.
#pragma once

#include "prefill_rows.cuh"

namespace edgellm {

struct PagedCascadeParams {
  const void* query;       // (num_rows, >= num_heads * D) T, rows query_stride elements apart
  const void* pages;       // as in paged_prefill
  const int* page_table;   // (slots, pages_per_slot)
  const int* slots;        // (num_rows,), -1: padding
  const int* lengths;      // (num_rows,) keys seen
  const int* shared;       // (num_rows,) keys of the prefix that the row's group shares; 0: in no group
  const int* members;      // (num_rows,) rows, group by group
  const int* group_start;  // (kMaxGroups + 1,) rising
  const float* sinks;      // (num_heads,) logits, or null
  void* out;               // (num_rows, num_heads * D) T, rows out_stride elements apart
  const float* own;        // (num_rows, num_heads, kStride): states of rows' own keys
  float* parts;            // (items, kv heads, kTileRows, kStride)
  i64 query_stride;
  i64 out_stride;
  int num_rows;
  int num_heads;
  int num_kv_heads;
  int group;               // q heads of a kv head
  int head_bytes;          // of one head's keys (or values) in a page
  int page_bytes;
  int page_shift;          // page_size = 1 << page_shift
  int pages_per_slot;
  int blocks;              // of a kv head, that run at the same time
  int ring;                // key or value tiles in shared memory, 2 to 4
  float scale;
  float soft_cap;          // 0: none
};

constexpr int kMaxGroups = 32;
constexpr int kMinSharedTokens = 256;  // of a part: below, joining costs more than more blocks save
static_assert(kMaxGroups == kWarp, "a lane has a group");
template <int D>
constexpr int kStride = D + 4;
template <int D>
constexpr int kCascadeRows = PrefillShape<bf16, bf16, D, false>::kTileRows;

// ---- items ---------------------------------------------------------------------------------------------------------

// A group's share of the items, held by the lane of the group's number.
struct Group {
  int first, members;  // in p.members
  int slot;            // whose pages are read
  int keys;
  int tiles, parts;    // items are tiles * parts, tiles first
  int items_end;       // of this group and those before it
};

struct Schedule {
  Group group;  // this lane's
  int step;     // keys of a part
  int items;    // of one kv head
};

__device__ __forceinline__ Group read_group(const PagedCascadeParams& p, int lane, int tile_rows) {
  Group group{};
  group.first = p.group_start[lane];
  group.members = p.group_start[lane + 1] - group.first;
  if (group.members <= 0) return group;
  const int leader = p.members[group.first];
  group.slot = p.slots[leader];
  group.keys = group.slot < 0 ? 0 : p.shared[leader];
  group.tiles = group.keys > 0 ? ceil_div(group.members * p.group, tile_rows) : 0;
  return group;
}

// The shortest parts with which all items run at the same time, about equally long.  Called by whole warps; the same in
// all of them.
__device__ __forceinline__ Schedule make_schedule(const PagedCascadeParams& p, int tile_rows) {
  const int lane = threadIdx.x % kWarp;
  Schedule schedule{read_group(p, lane, tile_rows)};
  Group& group = schedule.group;
  const int tile_keys = __reduce_add_sync(kFullMask, group.tiles * group.keys);
  int step = max(kMinSharedTokens, ceil_div(ceil_div(tile_keys, p.blocks), kPartUnit) * kPartUnit);
  for (;; step += ceil_div(step / 8, kPartUnit) * kPartUnit) {
    group.parts = ceil_div(group.keys, step);
    schedule.items = __reduce_add_sync(kFullMask, group.tiles * group.parts);
    if (schedule.items <= p.blocks || __reduce_max_sync(kFullMask, group.parts) <= 1) break;
  }
  schedule.step = step;
  group.items_end = group.tiles * group.parts;
#pragma unroll
  for (int apart = 1; apart < kWarp; apart *= 2) {
    const int before = __shfl_up_sync(kFullMask, group.items_end, apart);
    if (lane >= apart) group.items_end += before;
  }
  return schedule;
}

struct SharedItem {
  int index;
  int first_member, rows;  // packed rows of the group
  int first_row;           // of the tile
  int slot;
  int begin, end;          // keys
};

// In shared memory, because registers are short: the schedule, and the item at work.
struct Record {
  Group groups[kMaxGroups];
  int step, items;
  SharedItem item;
};
constexpr int kRecordBytes = 1024;
static_assert(sizeof(Record) <= kRecordBytes, "the launch leaves so many bytes");

// The index-th item, which there is.  Called by one whole warp.
__device__ __forceinline__ SharedItem find_item(const PagedCascadeParams& p, const Record& record, int index,
                                          int tile_rows) {
  const u32 behind = __ballot_sync(kFullMask, record.groups[threadIdx.x % kWarp].items_end > index);
  const Group& group = record.groups[__ffs(static_cast<int>(behind)) - 1];
  const int own = index - group.items_end + group.tiles * group.parts, part = own / group.tiles;
  SharedItem item;
  item.index = index;
  item.first_member = group.first;
  item.rows = group.members * p.group;
  item.first_row = (own - part * group.tiles) * tile_rows;
  item.slot = group.slot;
  item.begin = part * record.step;
  item.end = min(item.begin + record.step, group.keys);
  return item;
}

template <int D>
__device__ __forceinline__ i64 part_place(const PagedCascadeParams& p, int item, int kv_head, int row) {
  return ((static_cast<i64>(item) * p.num_kv_heads + kv_head) * kCascadeRows<D> + row) * kStride<D>;
}

// By a block's first warp.
template <int D>
__device__ __forceinline__ void fill_record(const PagedCascadeParams& p, Record& record) {
  const Schedule schedule = make_schedule(p, kCascadeRows<D>);
  record.groups[threadIdx.x] = schedule.group;
  if (threadIdx.x == 0) record.step = schedule.step, record.items = schedule.items;
}

}  // namespace edgellm
