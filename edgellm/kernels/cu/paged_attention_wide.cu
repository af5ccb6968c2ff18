// Attention of ragged query rows over paged keys and values for heads of 512 columns, on tensor cores.
//   out[t, h] = sum_k softmax_k(cap(scale * query[t, h] . key[k])) value[k]   over the keys k that row t sees
// Axes: rows t in [0, num_rows), query heads h, kv head = h / group, keys k by absolute position, kWide columns.
// FlashAttention-2 (Dao 2023) by mma.m16n8k16.  A head is too wide for one warp's registers and for many rows in
// shared memory: a block has 16 packed rows (token, head in group) of one kv head, and its 8 warps share them.  Of a
// tile of 32 keys, warp w computes the scores of keys 8 * (w % 4).. over one half of the columns, then the weights of
// rows 2w and 2w + 1, then the sums of columns 64 * w...  While one of the two buffers (keys, values) is worked on, the
// other loads.
// Tiles begin at multiples of 32 of the absolute position and are taken in order, and a tile that a row does not see
// changes nothing of it (weights 0, sums times 1): a row's bits depend on its own keys and query only.
// Scores are in log2 units from the softmax on.  fp8: elements widen exactly to T, a score is multiplied by its key's
// scale and a weight by its value's.  Grid: (kv heads, most row tiles).
#include "mma.cuh"
#include "prefill_work.cuh"

namespace edgellm {

constexpr int kWide = 512;  // head_dim
constexpr int kWideThreads = 256;
constexpr int kWideRows = 16;
constexpr int kWideKeys = 32;
constexpr int kWidePitch = kWide + 8;  // elements of a row in shared memory: 16 bytes apart in the banks
constexpr int kWeightPitch = kWideKeys + 8;
constexpr int kScorePitch = kWideKeys + 4;
constexpr int kWideWarps = kWideThreads / kWarp;
constexpr int kWarpColumns = kWide / kWideWarps;

template <typename T>
struct WideShared {
  T query[kWideRows][kWidePitch];
  T keys[kWideKeys][kWidePitch];
  T values[kWideKeys][kWidePitch];
  float scores[2][kWideRows][kScorePitch];  // by half of the columns
  T weights[kWideRows][kWeightPitch];
  float factors[kWideRows];
  float key_scales[2][kWideKeys];  // by parity of the tile, as the next one's arrive early
  float value_scales[2][kWideKeys];
};

static_assert(sizeof(WideShared<bf16>) == 89664, "shared_bytes of the wrapper");

template <typename T, typename KV>
struct WideBlock {
  static constexpr bool kFp8 = sizeof(KV) == 1;

  const PagedPrefillParams& p;
  WideShared<T>& shared;
  SequenceRows rows;
  KeyRange range;
  int kv_head, first;  // first packed row
  float maximum[2], sum[2];  // of rows 2 * warp and + 1, the same in every lane

  __device__ __forceinline__ bool has_row(int r) const { return first + r < rows.tokens * p.group; }
  __device__ __forceinline__ int token(int r) const { return (first + r) / p.group; }
  __device__ __forceinline__ int head(int r) const { return kv_head * p.group + (first + r) % p.group; }

  __device__ __forceinline__ void load_query() {
    constexpr int kPieces = kWide / 8;
    for (int piece = threadIdx.x; piece < kWideRows * kPieces; piece += kWideThreads) {
      const int r = piece / kPieces, column = piece % kPieces * 8;
      const bool there = has_row(r);
      const T* source = static_cast<const T*>(p.query);
      if (there) source += (rows.query_start + token(r)) * p.query_stride + static_cast<i64>(head(r)) * kWide + column;
      cp_async_16_or_zero(shared_address(&shared.query[r][column]), source, there);
    }
  }

  // K (side 0) or V (side 1) of a tile; rows that nobody sees become zeros.
  __device__ __forceinline__ void load_tile(int tile, int side) {
    constexpr int kElements = 16 / sizeof(KV), kPieces = kWide / kElements;
    T(*target)[kWidePitch] = side == 0 ? shared.keys : shared.values;
    const int* table = p.page_table + static_cast<i64>(rows.slot) * p.pages_per_slot;
    const char* base = static_cast<const char*>(p.pages) +
                       (static_cast<i64>(side) * p.num_kv_heads + kv_head) * static_cast<i64>(p.head_bytes);
    for (int piece = threadIdx.x; piece < kWideKeys * kPieces; piece += kWideThreads) {
      const int r = piece / kPieces, column = piece % kPieces * kElements, key = tile * kWideKeys + r;
      const bool inside = key >= range.begin && key < range.end;
      const int page = inside ? table[key >> p.page_shift] : -1;
      const char* block = base + page_offset(p, page);
      const u32 place = page_place(p, key);
      const KV* source = reinterpret_cast<const KV*>(block) + place * static_cast<u32>(kWide) + column;
      if constexpr (kFp8) {
        widen(source, page >= 0, &target[r][column]);
        if (column == 0) {
          const float* scales = reinterpret_cast<const float*>(block + (kWide << p.page_shift));
          (side == 0 ? shared.key_scales : shared.value_scales)[tile & 1][r] = page >= 0 ? scales[place] : 0.0f;
        }
      } else {
        cp_async_16_or_zero(shared_address(&target[r][column]), source, page >= 0);
      }
    }
  }

  __device__ __forceinline__ void widen(const KV* source, bool there, T* target) {
    float values[16] = {};
    if (there) load_floats(source, values);
    store_floats(target, values);
  }

  __device__ __forceinline__ void compute_scores() {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, key = warp % 4 * 8, half = warp / 4;
    float sums[4] = {};
    const int begin = half * (kWide / 2);
#pragma unroll 4
    for (int k = begin; k < begin + kWide / 2; k += 32) {
      u32 left[2][4], right[4];
      ldmatrix_x4(left[0], shared_address(&shared.query[lane % 16][k + lane / 16 * 8]));
      ldmatrix_x4(left[1], shared_address(&shared.query[lane % 16][k + 16 + lane / 16 * 8]));
      ldmatrix_x4(right, shared_address(&shared.keys[key + lane % 8][k + lane / 8 * 8]));
      const u32 low[2] = {right[0], right[1]}, high[2] = {right[2], right[3]};
      mma_16816<T>(sums, left[0], low);
      mma_16816<T>(sums, left[1], high);
    }
    const int row = lane / 4, column = key + lane % 4 * 2;
    *reinterpret_cast<float2*>(&shared.scores[half][row][column]) = make_float2(sums[0], sums[1]);
    *reinterpret_cast<float2*>(&shared.scores[half][row + 8][column]) = make_float2(sums[2], sums[3]);
  }

  // Scores of a tile to weights, a lane a key.
  __device__ __forceinline__ void compute_weights(int tile) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, key = tile * kWideKeys + lane;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 2 * warp + i;
      const bool inside = has_row(r) && key >= range.begin && key < range.end;
      const bool seen = inside && (visible_keys(p, rows, token(r), tile * kWideKeys) >> lane & 1);
      float score = (shared.scores[0][r][lane] + shared.scores[1][r][lane]) * p.scale;
      if constexpr (kFp8) score *= shared.key_scales[tile & 1][lane];
      if (p.soft_cap > 0.0f) score = p.soft_cap * tanhf(score / p.soft_cap);
      score = seen ? score * kLog2e : negative_infinity();
      const float top = fmaxf(maximum[i], warp_max(score)), base = top == negative_infinity() ? 0.0f : top;
      const float factor = exp2_fast(__fsub_rn(maximum[i], base));
      float weight = exp2_fast(__fsub_rn(score, base));
      sum[i] = __fmaf_rn(sum[i], factor, warp_sum(weight));
      maximum[i] = top;
      if constexpr (kFp8) weight *= shared.value_scales[tile & 1][lane];
      shared.weights[r][lane] = from_float<T>(weight);
      if (lane == 0) shared.factors[r] = factor;
    }
  }

  __device__ __forceinline__ void add_values(float (&out)[kWarpColumns / 8][4]) {
    const int lane = threadIdx.x % kWarp, first_column = threadIdx.x / kWarp * kWarpColumns;
    scale_out(out);
#pragma unroll
    for (int k = 0; k < kWideKeys; k += 16) {
      u32 left[4];
      ldmatrix_x4(left, shared_address(&shared.weights[lane % 16][k + lane / 16 * 8]));
#pragma unroll
      for (int n = 0; n < kWarpColumns / 8; n += 2) {
        u32 right[4];
        const int column = first_column + n * 8 + lane / 16 * 8;
        ldmatrix_x4_trans(right, shared_address(&shared.values[k + lane % 16][column]));
        const u32 low[2] = {right[0], right[1]}, high[2] = {right[2], right[3]};
        mma_16816<T>(out[n], left, low);
        mma_16816<T>(out[n + 1], left, high);
      }
    }
  }

  __device__ __forceinline__ void scale_out(float (&out)[kWarpColumns / 8][4]) {
    const int row = threadIdx.x % kWarp / 4;
    const float low = shared.factors[row], high = shared.factors[row + 8];
#pragma unroll
    for (int n = 0; n < kWarpColumns / 8; ++n) {
      out[n][0] *= low, out[n][1] *= low;
      out[n][2] *= high, out[n][3] *= high;
    }
  }

  __device__ __forceinline__ void store(float (&out)[kWarpColumns / 8][4]) {
    const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = 2 * warp + i;
      if (lane == 0) shared.factors[r] = has_row(r) ? final_factor(p, head(r), maximum[i], sum[i]) : 0.0f;
    }
    __syncthreads();
    scale_out(out);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane / 4 + 8 * i;
      if (!has_row(r)) continue;
      T* row = static_cast<T*>(p.out) + (static_cast<i64>(rows.query_start + token(r)) * p.num_heads + head(r)) * kWide;
#pragma unroll
      for (int n = 0; n < kWarpColumns / 8; ++n) {
        const int column = warp * kWarpColumns + n * 8 + lane % 4 * 2;
        *reinterpret_cast<u32*>(row + column) = pack2<T>(out[n][2 * i], out[n][2 * i + 1]);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const int last = min(first + kWideRows, rows.tokens * p.group) - 1;
    range = key_range(p, rows, first / p.group, last / p.group);
    maximum[0] = maximum[1] = negative_infinity();
    sum[0] = sum[1] = 0.0f;
    float out[kWarpColumns / 8][4] = {};
    int tile = range.begin / kWideKeys;
    const int end = ceil_div(range.end, kWideKeys);
    load_query();
    load_tile(tile, 0);
    cp_async_commit();
    load_tile(tile, 1);
    cp_async_commit();
    for (; tile < end; ++tile) {
      cp_async_wait<1>();
      __syncthreads();
      compute_scores();
      __syncthreads();
      if (tile + 1 < end) load_tile(tile + 1, 0);
      cp_async_commit();
      compute_weights(tile);
      cp_async_wait<1>();
      __syncthreads();
      add_values(out);
      __syncthreads();
      if (tile + 1 < end) load_tile(tile + 1, 1);
      cp_async_commit();
    }
    cp_async_wait<0>();
    store(out);
  }
};

template <typename T, typename KV>
__global__ void __launch_bounds__(kWideThreads) paged_attention_wide(const __grid_constant__ PagedPrefillParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  wait_for_previous_kernel();
  int sequence, tile;
  if (!find_row_tile(p, blockIdx.y, kWideRows, sequence, tile)) return;
  WideShared<T>& shared = *reinterpret_cast<WideShared<T>*>(memory);
  const int kv_head = blockIdx.x;
  WideBlock<T, KV> block{p, shared, sequence_rows(p, sequence), {}, kv_head, tile * kWideRows, {}, {}};
  block.run();
}

}  // namespace edgellm
