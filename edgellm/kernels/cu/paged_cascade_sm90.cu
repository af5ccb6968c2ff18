// paged_cascade by warpgroup products, for 9.0: 16-bit keys and values.  Axes, items and order: as paged_cascade.cu; how:
// prefill_sm90.cuh.  Items have two neighbouring blocks' places, so that parts are longer and joining them is cheaper.
// Grid: blocks, at most one an SM.
#include "cascade_items.cuh"
#include "prefill_sm90.cuh"

namespace edgellm {

__device__ __forceinline__ i64 query_row(const PagedCascadeParams& p, const SequenceRows& rows, int token) {
  return p.members[rows.query_start + token];
}

// An item's keys end before those of its group: `keys()` is where.
__device__ __forceinline__ KeyRange common_keys(const PagedCascadeParams&, const SequenceRows& rows, int, int) {
  return {0, rows.keys()};
}
__device__ __forceinline__ u64 visible_keys(const PagedCascadeParams&, const SequenceRows& rows, int, int tile_key) {
  return low_bits(rows.keys() - tile_key);
}

template <int D>
__device__ __forceinline__ PartPlace part_target(const PagedCascadeParams& p, const Item& item, int part, int packed) {
  float* const state = p.parts + part_place<D>(p, part, item.head, packed - item.tile_row);
  return {state, state + D};
}

// Items of all kv heads, those of a head `num_kv_heads` apart.
template <int kKeys>
struct CascadeWork {
  const PagedCascadeParams& p;
  const Record& record;
  int index;

  __device__ __forceinline__ bool next(Item& item) {
    if (index >= record.items * p.num_kv_heads) return false;
    const SharedItem found = find_item(p, record, index / p.num_kv_heads, kSm90Rows);
    const int members = found.rows / p.group;
    item.rows = {found.slot, found.first_member, members, found.end - members};
    item.head = index % p.num_kv_heads;
    item.tile_row = found.first_row;
    item.first_tile = found.begin / kKeys;
    item.stop_tile = ceil_div(found.end, kKeys);
    item.part = found.index;
    item.direct = 0;
    item.first_key = found.begin;
    index += gridDim.x;
    return true;
  }
};
static_assert(kPartUnit % 128 == 0, "parts begin with a tile");

// Dynamic shared memory: the layout with the record behind it.
template <typename T, int D>
__global__ void __launch_bounds__(kSm90Threads, 1) paged_cascade_sm90(const __grid_constant__ PagedCascadeParams p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(kCascadeRows<D> == kSm90Rows, "who joins the parts knows one tile");
  extern __shared__ __align__(1024) char shared[];
  using Layout = Sm90Layout<D, false>;
  Record& record = *reinterpret_cast<Record*>(shared + Layout::kTotals);
  let_next_kernel_start();
  if (threadIdx.x < kWarp) fill_record<D>(p, record);
  const Sm90Block<PagedCascadeParams, T, D, false> block{p, shared, shared_address(shared)};
  block.init_barriers();
  const int warpgroup = uniform(threadIdx.x / kGroupThreads);
  if (warpgroup == 0) {
    leave_registers<kLoaderRegisters<D>>();
    CascadeWork<Layout::kKeys> work{p, record, static_cast<int>(blockIdx.x)};
    block.load_all(work);
  } else {
    take_registers<kConsumerRegisters<D>>();
    Sm90Consumer<PagedCascadeParams, T, D, false> consumer{block, p, warpgroup - 1};
    consumer.run();
  }
  wait_for_previous_kernel();
#endif
}

}  // namespace edgellm
