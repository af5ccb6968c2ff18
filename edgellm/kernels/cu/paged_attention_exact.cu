// Attention of ragged query rows over paged float32 keys and values, in float32 with a fixed order of sums.
//   out[t, h] = sum_k softmax_k(cap(scale * query[t, h] . key[k])) value[k]   over the keys k that row t sees
// Axes: rows t in [0, num_rows), query heads h, kv head = h / group, keys k by absolute position, head_dim columns.
// A block has one (t, h).  Tiles of 32 keys at absolute positions; warp w takes tiles w, w + 8, ... and keeps an own
// softmax, a lane a key for the scores, then some columns for the values; the warps' states are merged in order.
// So a row's bits depend on its own keys and query only.
// Grid: rows * query heads, heads first.
#include "prefill_work.cuh"

namespace edgellm {

constexpr int kExactWarps = 8;
constexpr int kExactColumns = 256;  // largest head_dim
constexpr int kLaneColumns = kExactColumns / kWarp;

struct ExactState {
  float maximum, sum, out[kLaneColumns];  // natural log units; column = lane + 32 * i
};

__device__ __forceinline__ float exact_dot(const float* query, const float* key, int head_dim) {
  float sums[4] = {};
#pragma unroll 4
  for (int d = 0; d < head_dim; d += 4) {
    const float4 a = *reinterpret_cast<const float4*>(query + d), b = *reinterpret_cast<const float4*>(key + d);
    sums[0] = __fmaf_rn(a.x, b.x, sums[0]), sums[1] = __fmaf_rn(a.y, b.y, sums[1]);
    sums[2] = __fmaf_rn(a.z, b.z, sums[2]), sums[3] = __fmaf_rn(a.w, b.w, sums[3]);
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// 32 keys; `key`, `value`: this lane's rows; `seen`: the lane's key counts.
__device__ __forceinline__ void exact_tile(const PagedPrefillParams& p, int head_dim, const float* query,
                                           const float* key, const float* value, bool seen, ExactState& state) {
  const int lane = threadIdx.x % kWarp;
  float score = negative_infinity();
  if (seen) {
    score = exact_dot(query, key, head_dim) * p.scale;
    if (p.soft_cap > 0.0f) score = p.soft_cap * tanhf(score / p.soft_cap);
  }
  const float maximum = fmaxf(state.maximum, warp_max(score));
  if (maximum == negative_infinity()) return;
  const float weight = expf(score - maximum), keep = expf(state.maximum - maximum);
  state.sum = __fmaf_rn(state.sum, keep, warp_sum(weight));
  state.maximum = maximum;
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) state.out[i] *= keep;
  const u32 used = __ballot_sync(kFullMask, seen);
  for (int k = 0; k < kWarp; ++k) {
    if (!(used >> k & 1)) continue;
    const float factor = __shfl_sync(kFullMask, weight, k);
    const float* row = reinterpret_cast<const float*>(__shfl_sync(kFullMask, reinterpret_cast<u64>(value), k));
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i)
      if (lane + i * kWarp < head_dim) state.out[i] = __fmaf_rn(factor, row[lane + i * kWarp], state.out[i]);
  }
}

// The warps' states in order, the sink's term joined, to the row of the result.
__device__ __forceinline__ void exact_merge(const PagedPrefillParams& p, int head_dim, int head,
                                            const float (*stats)[2], const float (*outs)[kExactColumns], float* out) {
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
  for (int d = threadIdx.x; d < head_dim; d += blockDim.x) {
    float total = 0.0f;
#pragma unroll
    for (int w = 0; w < kExactWarps; ++w) total = __fmaf_rn(outs[w][d], factors[w], total);
    out[d] = sum > 0.0f ? __fdiv_rn(total, sum) : 0.0f;
  }
}

template <int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp)
    paged_attention_exact(const __grid_constant__ PagedPrefillParams p) {
  static_assert(kWarps == kExactWarps, "the order of sums is that of these warps");
  __shared__ __align__(16) float query[kExactColumns];
  __shared__ float stats[kWarps][2], outs[kWarps][kExactColumns];
  const int head_dim = p.head_dim, row = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads;
  wait_for_previous_kernel();
  const int sequence = find_sequence(p.query_start, p.num_sequences, row);
  if (sequence < 0 || p.slots[sequence] < 0) return;
  const SequenceRows rows = sequence_rows(p, sequence);
  const int token = row - rows.query_start, warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const float* source = static_cast<const float*>(p.query) + row * p.query_stride + static_cast<i64>(head) * head_dim;
  for (int d = threadIdx.x; d < head_dim; d += blockDim.x) query[d] = source[d];
  __syncthreads();

  const char* keys = static_cast<const char*>(p.pages) + static_cast<i64>(head / p.group) * p.head_bytes;
  const int* table = p.page_table + static_cast<i64>(rows.slot) * p.pages_per_slot;
  const KeyRange range = key_range(p, rows, token, token);
  ExactState state{negative_infinity(), 0.0f, {}};
  for (int tile = warp; tile * kWarp < range.end; tile += kWarps) {
    const int tile_key = tile * kWarp, key = tile_key + lane;
    if (tile_key + kWarp <= range.begin) continue;
    const bool inside = key < rows.keys() && key >= range.begin;
    const int page = inside ? table[key >> p.page_shift] : -1;
    const bool seen = page >= 0 && (visible_keys(p, rows, token, tile_key) >> lane & 1);
    const char* place = keys + page_offset(p, page) + page_place(p, key) * static_cast<u32>(head_dim * 4);
    const char* value = place + static_cast<i64>(p.num_kv_heads) * p.head_bytes;
    exact_tile(p, head_dim, query, reinterpret_cast<const float*>(place), reinterpret_cast<const float*>(value), seen,
               state);
  }
  if (lane == 0) stats[warp][0] = state.maximum, stats[warp][1] = state.sum;
#pragma unroll
  for (int i = 0; i < kLaneColumns; ++i) outs[warp][lane + i * kWarp] = state.out[i];
  __syncthreads();
  exact_merge(p, head_dim, head, stats, outs,
              static_cast<float*>(p.out) + (static_cast<i64>(row) * p.num_heads + head) * head_dim);
}

}  // namespace edgellm
