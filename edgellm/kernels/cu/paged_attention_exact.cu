// Attention of ragged query rows over paged keys and values, in float32 with a fixed order of sums: for float32 rows,
// and for heads of 16-bit rows that the tensor-core kernels do not take.
//   out[t, h] = sum_k softmax_k(cap(scale * query[t, h] . key[k])) value[k]   over the keys k that row t sees
// Axes: rows t in [0, num_rows), query heads h, kv head = h / group, keys k by absolute position, head_dim columns.
// A block has one (t, h).  Tiles of 32 keys at absolute positions; warp w takes tiles w, w + 8, ... and keeps an own
// softmax, a lane a key for the scores, then some columns for the values; the warps' states are merged in order.
// So a row's bits depend on its own keys and query only.  Results are rounded once.
// T: query and result.  KV: T, or fp8, whose scales (one a token and head) stand behind a head's values in its page.
// Grid: rows * query heads, heads first.
#include "prefill_work.cuh"

namespace edgellm {

constexpr int kExactWarps = 8;

template <int kColumns>
struct ExactState {
  static constexpr int kLane = kColumns / kWarp;
  float maximum, sum, out[kLane];  // natural log units; column = lane + 32 * i
};

// One lane's key: its rows of K and V, and their scales.
template <typename KV>
struct ExactKey {
  const KV *key, *value;
  float key_scale, value_scale;
  bool seen;
};

template <typename KV>
__device__ __forceinline__ ExactKey<KV> exact_key(const PagedPrefillParams& p, const char* head, int page, int key,
                                                  bool seen) {
  const char* block = head + page_offset(p, page);
  const char* value_block = block + static_cast<i64>(p.num_kv_heads) * p.head_bytes;
  const u32 place = page_place(p, key), row = place * static_cast<u32>(p.head_dim);
  ExactKey<KV> found = {reinterpret_cast<const KV*>(block) + row, reinterpret_cast<const KV*>(value_block) + row, 1.0f,
                        1.0f, seen};
  if constexpr (sizeof(KV) == 1) {
    const i64 scales = static_cast<i64>(p.head_dim) << p.page_shift;
    if (seen) {
      found.key_scale = reinterpret_cast<const float*>(block + scales)[place];
      found.value_scale = reinterpret_cast<const float*>(value_block + scales)[place];
    }
  }
  return found;
}

template <typename KV>
__device__ __forceinline__ float exact_dot(const float* query, const KV* key, int head_dim) {
  float sums[4] = {};
#pragma unroll 2
  for (int d = 0; d < head_dim; d += 8) {
    float a[8], b[8];
    load_floats(query + d, a);
    load_floats(key + d, b);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[i % 4] = __fmaf_rn(a[i], b[i], sums[i % 4]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// 32 keys, one a lane.
template <typename KV, int kColumns>
__device__ __forceinline__ void exact_tile(const PagedPrefillParams& p, const float* query, const ExactKey<KV>& own,
                                           ExactState<kColumns>& state) {
  const int lane = threadIdx.x % kWarp, head_dim = p.head_dim;
  float score = negative_infinity();
  if (own.seen) {
    score = exact_dot(query, own.key, head_dim) * p.scale;
    if constexpr (sizeof(KV) == 1) score *= own.key_scale;
    if (p.soft_cap > 0.0f) score = p.soft_cap * tanhf(score / p.soft_cap);
  }
  const float maximum = fmaxf(state.maximum, warp_max(score));
  if (maximum == negative_infinity()) return;
  float weight = expf(score - maximum);
  const float keep = expf(state.maximum - maximum);
  state.sum = __fmaf_rn(state.sum, keep, warp_sum(weight));
  state.maximum = maximum;
  if constexpr (sizeof(KV) == 1) weight *= own.value_scale;
#pragma unroll
  for (int i = 0; i < state.kLane; ++i) state.out[i] *= keep;
  const u32 used = __ballot_sync(kFullMask, own.seen);
  for (int k = 0; k < kWarp; ++k) {
    if (!(used >> k & 1)) continue;
    const float factor = __shfl_sync(kFullMask, weight, k);
    const KV* row = reinterpret_cast<const KV*>(__shfl_sync(kFullMask, reinterpret_cast<u64>(own.value), k));
#pragma unroll
    for (int i = 0; i < state.kLane; ++i) {
      const int column = lane + i * kWarp;
      if (column < head_dim) state.out[i] = __fmaf_rn(factor, to_float(row[column]), state.out[i]);
    }
  }
}

// The warps' states in order, the sink's term joined, to the row of the result.
template <typename T, int kColumns>
__device__ __forceinline__ void exact_merge(const PagedPrefillParams& p, int head, const float (*stats)[2],
                                            const float (*outs)[kColumns], T* out) {
  float maximum = p.sinks == nullptr ? negative_infinity() : p.sinks[head];
  float sum = p.sinks == nullptr ? 0.0f : 1.0f;
  const float start = maximum;
  for (int w = 0; w < kExactWarps; ++w) maximum = fmaxf(maximum, stats[w][0]);
  const float base = maximum == negative_infinity() ? 0.0f : maximum;
  sum *= expf(start - base);
  float factors[kExactWarps];
#pragma unroll
  for (int w = 0; w < kExactWarps; ++w) {
    factors[w] = expf(stats[w][0] - base);
    sum = __fmaf_rn(stats[w][1], factors[w], sum);
  }
  for (int d = threadIdx.x; d < p.head_dim; d += blockDim.x) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kExactWarps; ++w) total = __fmaf_rn(outs[w][d], factors[w], total);
    out[d] = from_float<T>(sum > 0.0f ? __fdiv_rn(total, sum) : 0.0f);
  }
}

// kColumns: head_dim at most.
template <typename T, typename KV, int kColumns>
__global__ void __launch_bounds__(kExactWarps* kWarp, kColumns > 256 ? 2 : 1)
    paged_attention_exact(const __grid_constant__ PagedPrefillParams p) {
  __shared__ __align__(16) float query[kColumns];
  __shared__ float stats[kExactWarps][2], outs[kExactWarps][kColumns];
  const int head_dim = p.head_dim, row = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
  wait_for_previous_kernel();
  const int sequence = find_sequence(p.query_start, p.num_sequences, row);
  if (sequence < 0 || p.slots[sequence] < 0) return;
  const SequenceRows rows = sequence_rows(p, sequence);
  const int token = row - rows.query_start, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const T* source = static_cast<const T*>(p.query) + row * p.query_stride + static_cast<i64>(head) * head_dim;
  for (int d = threadIdx.x; d < head_dim; d += blockDim.x) query[d] = to_float(source[d]);
  __syncthreads();

  const char* keys = static_cast<const char*>(p.pages) + static_cast<i64>(head / p.group) * p.head_bytes;
  const int* table = p.page_table + static_cast<i64>(rows.slot) * p.pages_per_slot;
  const KeyRange range = key_range(p, rows, token, token);
  ExactState<kColumns> state{negative_infinity(), 0.0f, {}};
  for (int tile = warp; tile * kWarp < range.end; tile += kExactWarps) {
    const int tile_key = tile * kWarp, key = tile_key + lane;
    if (tile_key + kWarp <= range.begin) continue;
    const bool inside = key < rows.keys() && key >= range.begin;
    const int page = inside ? table[key >> p.page_shift] : -1;
    const bool seen = page >= 0 && (visible_keys(p, rows, token, tile_key) >> lane & 1);
    exact_tile<KV>(p, query, exact_key<KV>(p, keys, page, key, seen), state);
  }
  if (lane == 0) stats[warp][0] = state.maximum, stats[warp][1] = state.sum;
#pragma unroll
  for (int i = 0; i < state.kLane; ++i) outs[warp][lane + i * kWarp] = state.out[i];
  __syncthreads();
  exact_merge<T, kColumns>(p, head, stats, outs,
                           static_cast<T*>(p.out) + (static_cast<i64>(row) * p.num_heads + head) * head_dim);
}

}  // namespace edgellm
