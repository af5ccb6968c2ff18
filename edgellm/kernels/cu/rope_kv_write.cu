// Per-head RMS norm, rotation of pairs (i, i + rotary_half), and the move of K and V into their pages.
// Axes: tokens t; heads of a row: num_heads of Q, then num_kv_heads of K, then num_kv_heads of V; dims d.  Strides in
// elements, page_bytes and head_bytes in bytes.
//   Q is changed in place.  K (normed, rotated) and V go to place positions[t] % page_size of page
//   page_table[slots[token_seq[t]], positions[t] / page_size]; the row itself keeps its K and V.
//   fp8 pages: what is rounded to T is divided by its scale amax / 448 and rounded to e4m3; see types.cuh, fp8_scale.
// Nothing is written for tokens with token_seq -1 or slot -1, and no K and V where the table has no page.
// kHeadDim > 0: head_dim / 2 / (16 / sizeof(T)) lanes a head, each with one 16-byte vector of either half.
// kHeadDim == 0: any even head_dim, a warp a head, element by element; dims from 2 * rotary_half on stand still.
// A head's arithmetic does not depend on the other heads and tokens of the launch.
#include "types.cuh"

namespace edgellm {

struct RopeKvWriteParams {
  void* qkv;
  const float* angles;  // (2, num_tokens, rotary_half), or null: no rotation
  void* pages;          // or null: only Q
  const int* page_table;
  const int* slots;
  const int* token_seq;  // or null: every token is real (only Q)
  const int* positions;
  const float* query_norm;  // (head_dim), or null
  const float* key_norm;
  const float* value_norm;
  i64 qkv_stride;
  i64 page_bytes;
  i64 head_bytes;
  int num_tokens;
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int rotary_half;  // pairs of a head that turn; head_dim / 2 where kHeadDim > 0
  int page_shift;  // log2 of the page size
  int num_pages;
  int num_slots;
  int pages_per_slot;
  float eps;
};

constexpr int kRopeThreads = 128;

enum class HeadKind { kQuery, kKey, kValue };

struct Head {
  HeadKind kind;
  int token;
  int kv_head;
  int column;  // of its first element in the row
};

__device__ __forceinline__ int heads_of_row(const RopeKvWriteParams& p) {
  return p.num_heads + (p.pages == nullptr ? 0 : 2 * p.num_kv_heads);
}

// A block works on one token (grid x) and on kRopeThreads / lanes-a-head of its heads (grid y).
__device__ __forceinline__ Head head_of(const RopeKvWriteParams& p, int head) {
  const int token = blockIdx.x, column = head * p.head_dim, kv_head = head - p.num_heads;
  if (kv_head < 0) return {HeadKind::kQuery, token, 0, column};
  if (kv_head < p.num_kv_heads) return {HeadKind::kKey, token, kv_head, column};
  return {HeadKind::kValue, token, kv_head - p.num_kv_heads, column};
}

// Slot of a token, or -1: padding.
__device__ __forceinline__ int slot_of(const RopeKvWriteParams& p, int token) {
  if (p.token_seq == nullptr) return 0;
  const int sequence = p.token_seq[token];
  return sequence < 0 ? -1 : (p.slots == nullptr ? 0 : p.slots[sequence]);
}

// Start of the head's block in its page, or null where the table has no page.
__device__ __forceinline__ u8* block_of(const RopeKvWriteParams& p, const Head& head, int slot, int position) {
  const int block = position >> p.page_shift;
  if (position < 0 || block >= p.pages_per_slot || slot < 0 || slot >= p.num_slots) return nullptr;
  const int page = p.page_table[static_cast<i64>(slot) * p.pages_per_slot + block];
  if (page < 0 || page >= p.num_pages) return nullptr;
  const int side = head.kind == HeadKind::kValue ? p.num_kv_heads : 0;
  return static_cast<u8*>(p.pages) + page * p.page_bytes + (side + head.kv_head) * p.head_bytes;
}

// Place of a position in its page.
__device__ __forceinline__ int place_of(const RopeKvWriteParams& p, int position) {
  return position & ((1 << p.page_shift) - 1);
}

__device__ __forceinline__ const float* norm_of(const RopeKvWriteParams& p, HeadKind kind) {
  return kind == HeadKind::kQuery ? p.query_norm : kind == HeadKind::kKey ? p.key_norm : p.value_norm;
}

// The largest magnitude of these values; NaN does not count.
template <int N>
__device__ __forceinline__ float largest(const float (&values)[N], float amax) {
#pragma unroll
  for (int i = 0; i < N; ++i) amax = fmaxf(amax, fabsf(values[i]));
  return amax;
}

template <int N>
__device__ __forceinline__ void store_fp8(u8* address, const float (&values)[N], float scale) {
  static_assert(N % 4 == 0, "whole words");
  Vec<u32, N / 4> words;
#pragma unroll
  for (int i = 0; i < N / 4; ++i)
    words[i] = float4_to_fp8x4(__fdiv_rn(values[4 * i], scale), __fdiv_rn(values[4 * i + 1], scale),
                               __fdiv_rn(values[4 * i + 2], scale), __fdiv_rn(values[4 * i + 3], scale));
  store_vec(reinterpret_cast<u32*>(address), words);
}

// ---- fixed head_dim: the halves of a head in registers -------------------------------------------------------------

template <typename T, int kHeadDim>
struct HeadLanes {
  static constexpr int kLanes = kHeadDim / 2 / kVec<T>;
  static_assert(kLanes >= 1 && kLanes <= kWarp && (kLanes & (kLanes - 1)) == 0, "a power of two of lanes");

  Vec<T, kVec<T>> raw_low, raw_high;  // as read: half the registers of their floats, until these are needed
  float low[kVec<T>], high[kVec<T>], cosine[kVec<T>], sine[kVec<T>], low_weight[kVec<T>], high_weight[kVec<T>];
  int first;  // dim of low[0]; high[0] is head_dim / 2 further

  __device__ __forceinline__ void load(const T* head) {
    raw_low = load_vec<T>(head + first);
    raw_high = load_vec<T>(head + kHeadDim / 2 + first);
  }
  __device__ __forceinline__ void load_angles(const float* cosines, const float* sines) {
    load_floats(cosines + first, cosine);
    load_floats(sines + first, sine);
  }
  __device__ __forceinline__ void load_weights(const float* weight) {
    load_floats(weight + first, low_weight);
    load_floats(weight + kHeadDim / 2 + first, high_weight);
  }
  __device__ __forceinline__ float inverse_rms(float eps) const {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) {
      const float a = to_float(raw_low[i]), b = to_float(raw_high[i]);
      squares += a * a + b * b;
    }
    return rsqrtf(warp_sum<kLanes>(squares) * (1.0f / kHeadDim) + eps);
  }
  __device__ __forceinline__ void widen() {
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) {
      low[i] = to_float(raw_low[i]);
      high[i] = to_float(raw_high[i]);
    }
  }
  __device__ __forceinline__ void scale(float inverse) {
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) {
      low[i] = low[i] * inverse * low_weight[i];
      high[i] = high[i] * inverse * high_weight[i];
    }
  }
  __device__ __forceinline__ void rotate() {
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) {
      const float a = low[i], b = high[i];
      low[i] = a * cosine[i] - b * sine[i];
      high[i] = b * cosine[i] + a * sine[i];
    }
  }
  __device__ __forceinline__ void store(T* head) const {
    store_floats(head + first, low);
    store_floats(head + kHeadDim / 2 + first, high);
  }
  // Values rounded to T first: pages hold what unfused code would have written.
  __device__ __forceinline__ void round_to_type() {
#pragma unroll
    for (int i = 0; i < kVec<T>; ++i) {
      low[i] = to_float(from_float<T>(low[i]));
      high[i] = to_float(from_float<T>(high[i]));
    }
  }
};

template <typename T, bool kFp8, int kHeadDim>
__device__ __forceinline__ void write_lanes(HeadLanes<T, kHeadDim>& lanes, u8* block, int place, int page_size) {
  if constexpr (kFp8) {
    lanes.round_to_type();
    // Every lane of the warp is here: shuffles name all of them.
    const float scale = fp8_scale(warp_max<HeadLanes<T, kHeadDim>::kLanes>(largest(lanes.high, largest(lanes.low, 0.0f))));
    if (block == nullptr) return;
    u8* row = block + place * kHeadDim;
    store_fp8(row + lanes.first, lanes.low, scale);
    store_fp8(row + kHeadDim / 2 + lanes.first, lanes.high, scale);
    if (lanes.first == 0) reinterpret_cast<float*>(block + page_size * kHeadDim)[place] = scale;
  } else {
    if (block != nullptr) lanes.store(reinterpret_cast<T*>(block) + place * kHeadDim);
  }
}

template <typename T, bool kFp8, int kHeadDim>
__device__ __forceinline__ void rope_in_lanes(const RopeKvWriteParams& p) {
  using Lanes = HeadLanes<T, kHeadDim>;
  const int index = (blockIdx.y * kRopeThreads + threadIdx.x) / Lanes::kLanes, num_heads = heads_of_row(p);
  const bool beyond = index >= num_heads;  // such lanes stay for the shuffles of their warp, on the last head's data
  const Head head = head_of(p, beyond ? num_heads - 1 : index);
  const float* weight = norm_of(p, head.kind);
  Lanes lanes;
  lanes.first = threadIdx.x % Lanes::kLanes * kVec<T>;
  if (weight != nullptr) lanes.load_weights(weight);
  wait_for_previous_kernel();  // nobody writes the weights while a model runs
  // Everything that is read is asked for first: the way to the page is a chain of reads, as long as those of the head.
  const int position = p.pages == nullptr ? 0 : p.positions[head.token];
  T* row = static_cast<T*>(p.qkv) + head.token * p.qkv_stride + head.column;
  lanes.load(row);
  const bool is_rotated = p.angles != nullptr && head.kind != HeadKind::kValue;
  if (is_rotated) {
    const float* cosines = p.angles + static_cast<i64>(head.token) * (kHeadDim / 2);
    lanes.load_angles(cosines, cosines + static_cast<i64>(p.num_tokens) * (kHeadDim / 2));
  }
  const int slot = beyond ? -1 : slot_of(p, head.token);
  u8* block = head.kind == HeadKind::kQuery ? nullptr : block_of(p, head, slot, position);
  float inverse = 1.0f;
  const bool has_norms = p.query_norm != nullptr || p.key_norm != nullptr || p.value_norm != nullptr;
  if (has_norms) inverse = lanes.inverse_rms(p.eps);  // all lanes or none
  lanes.widen();
  if (weight != nullptr) lanes.scale(inverse);
  if (is_rotated) lanes.rotate();
  if (head.kind == HeadKind::kQuery && slot >= 0) lanes.store(row);
  if (p.pages != nullptr) write_lanes<T, kFp8, kHeadDim>(lanes, block, place_of(p, position), 1 << p.page_shift);
}

// ---- any head_dim: a warp a head, values read again where they are needed ------------------------------------------

template <typename T>
struct HeadReader {
  const T* row;
  const float* weight;  // or null: no norm
  const float* cosines;  // or null: no rotation
  const float* sines;
  int half, rotary_half;
  float inverse;

  __device__ __forceinline__ float normed(int dim) const {
    const float value = to_float(row[dim]);
    return weight == nullptr ? value : value * inverse * weight[dim];
  }
  // Dims of pair i: those that turn together, and behind them the ones that stand still, in halves as well.
  __device__ __forceinline__ int low_dim(int i) const { return i < rotary_half ? i : i + rotary_half; }
  __device__ __forceinline__ int high_dim(int i) const { return i < rotary_half ? i + rotary_half : i + half; }
  __device__ __forceinline__ float2 pair(int i) const {
    const float a = normed(low_dim(i)), b = normed(high_dim(i));
    if (cosines == nullptr || i >= rotary_half) return make_float2(a, b);
    return make_float2(a * cosines[i] - b * sines[i], b * cosines[i] + a * sines[i]);
  }
};

template <typename T>
__device__ __forceinline__ HeadReader<T> make_reader(const RopeKvWriteParams& p, const Head& head, const T* row) {
  HeadReader<T> reader = {row, nullptr, nullptr, nullptr, p.head_dim / 2, p.rotary_half, 1.0f};
  if (p.angles != nullptr && head.kind != HeadKind::kValue) {
    reader.cosines = p.angles + static_cast<i64>(head.token) * p.rotary_half;
    reader.sines = reader.cosines + static_cast<i64>(p.num_tokens) * p.rotary_half;
  }
  reader.weight = norm_of(p, head.kind);
  if (reader.weight == nullptr) return reader;
  float squares = 0.0f;
  for (int d = threadIdx.x % kWarp; d < p.head_dim; d += kWarp) squares += to_float(row[d]) * to_float(row[d]);
  reader.inverse = rsqrtf(warp_sum(squares) / static_cast<float>(p.head_dim) + p.eps);
  return reader;
}

template <typename T>
__device__ __forceinline__ void write_fp8_row(const RopeKvWriteParams& p, const HeadReader<T>& reader, u8* block,
                                              int place) {
  const int lane = threadIdx.x % kWarp;
  float amax = 0.0f;
  for (int i = lane; i < reader.half; i += kWarp) {
    const float2 pair = reader.pair(i);
    amax = fmaxf(amax, fmaxf(fabsf(to_float(from_float<T>(pair.x))), fabsf(to_float(from_float<T>(pair.y)))));
  }
  const float scale = fp8_scale(warp_max(amax));
  fp8* row = reinterpret_cast<fp8*>(block) + static_cast<i64>(place) * p.head_dim;
  for (int i = lane; i < reader.half; i += kWarp) {
    const float2 pair = reader.pair(i);
    row[reader.low_dim(i)] = from_float<fp8>(__fdiv_rn(to_float(from_float<T>(pair.x)), scale));
    row[reader.high_dim(i)] = from_float<fp8>(__fdiv_rn(to_float(from_float<T>(pair.y)), scale));
  }
  if (lane == 0) reinterpret_cast<float*>(block + (static_cast<i64>(p.head_dim) << p.page_shift))[place] = scale;
}

template <typename T, bool kFp8>
__device__ __forceinline__ void rope_by_element(const RopeKvWriteParams& p) {
  wait_for_previous_kernel();
  const int index = (blockIdx.y * kRopeThreads + threadIdx.x) / kWarp;
  if (index >= heads_of_row(p)) return;  // whole warps
  const Head head = head_of(p, index);
  const int slot = slot_of(p, head.token);
  if (slot < 0) return;
  T* row = static_cast<T*>(p.qkv) + head.token * p.qkv_stride + head.column;
  const HeadReader<T> reader = make_reader<T>(p, head, row);
  T* target = row;
  if (head.kind != HeadKind::kQuery) {
    const int position = p.positions[head.token], place = place_of(p, position);
    u8* block = block_of(p, head, slot, position);
    if (block == nullptr) return;
    if constexpr (kFp8) return write_fp8_row(p, reader, block, place);
    target = reinterpret_cast<T*>(block) + static_cast<i64>(place) * p.head_dim;
  }
  for (int i = threadIdx.x % kWarp; i < reader.half; i += kWarp) {
    const float2 pair = reader.pair(i);
    target[reader.low_dim(i)] = from_float<T>(pair.x);
    target[reader.high_dim(i)] = from_float<T>(pair.y);
  }
}

template <typename T, bool kFp8, int kHeadDim>
__global__ void __launch_bounds__(kRopeThreads, 8) rope_kv_write(const __grid_constant__ RopeKvWriteParams p) {
  let_next_kernel_start();
  if constexpr (kHeadDim > 0) {
    rope_in_lanes<T, kFp8, kHeadDim>(p);
  } else {
    rope_by_element<T, kFp8>(p);
  }
}

}  // namespace edgellm
