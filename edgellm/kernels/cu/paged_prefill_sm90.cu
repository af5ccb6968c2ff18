// paged_prefill by warpgroup products, for 9.0: 16-bit keys and values.  Axes and what is computed: as paged_prefill.cu;
// how: prefill_sm90.cuh.
// Grid: blocks, at most one an SM.  Items with most keys come first; every second round of the blocks is dealt in
// reverse, so that all get about as much.
#include "prefill_sm90.cuh"

namespace edgellm {

// Items of the batch.
template <int kKeys, bool kSegments>
struct PrefillWork {
  const PagedPrefillParams& p;
  int tiles, round;

  __device__ __forceinline__ int num_items() const { return p.num_kv_heads * tiles * splits_for(p, tiles); }

  // The index-th item of the batch; false if there is none.
  __device__ __forceinline__ bool find(int index, Item& item) const {
    item.head = index % p.num_kv_heads;
    index /= p.num_kv_heads;
    item.part = index / tiles;
    int sequence, row_tile;
    if (!find_row_tile(p, tiles - 1 - index % tiles, kSm90Rows, sequence, row_tile)) return false;
    item.rows = sequence_rows(p, sequence);
    item.tile_row = row_tile * kSm90Rows;
    const int last_row = min(item.tile_row + kSm90Rows, item.rows.tokens * p.group) - 1;
    const KeyRange range = key_range(p, item.rows, item.tile_row / p.group, last_row / p.group);
    const KeyParts parts = key_parts(p, range, splits_for(p, tiles));
    const int first_key = parts.base + item.part * parts.step;
    item.direct = p.splits == 1 || parts.count == 1;
    item.first_key = range.begin;
    item.first_tile = max(first_key, range.begin) / kKeys;
    item.stop_tile = ceil_div(kSegments ? range.end : min(range.end, first_key + parts.step), kKeys);
    return item.part < parts.count;
  }

  __device__ __forceinline__ bool next(Item& item) {
    const int blocks = gridDim.x;
    while (round * blocks < num_items()) {
      asm volatile("" : "+r"(tiles));  // what follows from it is computed again: registers are short
      const int index = round * blocks + (round % 2 ? blocks - 1 - blockIdx.x : blockIdx.x);
      ++round;
      if (index < num_items() && find(index, item)) return true;
    }
    return false;
  }
};

template <typename T, int D, bool kSegments>
__global__ void __launch_bounds__(kSm90Threads, 1) paged_prefill_sm90(const __grid_constant__ PagedPrefillParams p) {
  static_assert(!kSegments || D <= 128, "the sums of segments do not fit shared memory");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char shared[];
  wait_for_previous_kernel();
  const Sm90Block<PagedPrefillParams, T, D, kSegments> block{p, shared, shared_address(shared)};
  block.init_barriers();
  const int warpgroup = uniform(threadIdx.x / kGroupThreads);
  if (warpgroup == 0) {
    leave_registers<kLoaderRegisters<D>>();
    PrefillWork<Sm90Layout<D, kSegments>::kKeys, kSegments> work{p, uniform(count_row_tiles(p, kSm90Rows)), 0};
    block.load_all(work);
  } else {
    take_registers<kConsumerRegisters<D>>();
    Sm90Consumer<PagedPrefillParams, T, D, kSegments> consumer{block, p, warpgroup - 1};
    consumer.run();
    let_next_kernel_start();
  }
#endif
}

}  // namespace edgellm
