// Changes of logits before a token is chosen, and the renaming of token ids of a reduced vocabulary.
// Axes: grid x = chunks of kEditChunk token ids, grid y = edited rows e; row e reads logits row row_index[e] (e without
// an index) and writes out row e in float64, so that sums and ties are those of float64 arithmetic.
// Lists of ids are CSR: those of row e are [start[e], start[e + 1]); ids of a list are distinct.
#include "types.cuh"

namespace edgellm {

constexpr int kEditChunk = 4096;
constexpr int kEditThreads = 512;

// Bits of flags[e]: what the raw logits contain, and whether a finite one is left.
enum EditFlag { kRawNan = 1, kRawInfinity = 2, kRawFinite = 4, kLeftByGrammar = 8, kLeftAtLast = 16 };

struct LogitEditParams {
  const void* logits;
  const int* row_index;         // or null
  double* out;
  int* flags;                   // (E,), zero before; bits are set
  const int* bias_start;        // (E + 1,) or null; so below
  const int* bias_ids;
  const double* bias_values;
  const u32* mask;              // (M, mask_stride) words; bit id % 32 of word id / 32 set: allowed
  const int* mask_index;        // (E,) row of mask, -1 for none; or null
  const int* seen_start;
  const int* seen_ids;
  const double* repetition;     // (E,)
  const int* output_start;
  const int* output_ids;
  const int* output_counts;
  const double* presence;       // (E,)
  const double* frequency;
  const int* excluded_start;
  const int* excluded_ids;
  i64 row_stride;
  i64 out_stride;
  i64 mask_stride;
  int vocab;
};

__device__ __forceinline__ double raw_value(double logit) { return logit; }
template <typename T>
__device__ __forceinline__ double raw_value(T logit) {
  return static_cast<double>(to_float(logit));
}

__device__ __forceinline__ bool is_left(double value) {
  return value > static_cast<double>(negative_infinity()) && value < -static_cast<double>(negative_infinity());
}

// The part of a row that a block works on, in shared memory.
struct EditChunk {
  double* values;
  int first, size;

  // f(value, j) for the entries of a row's list that are in this chunk, then all threads go on together.
  template <typename F>
  __device__ __forceinline__ void each_listed(const int* start, const int* ids, int row, F f) const {
    if (start == nullptr) return;
    for (int j = start[row] + static_cast<int>(threadIdx.x); j < start[row + 1]; j += kEditThreads) {
      const u32 place = static_cast<u32>(ids[j] - first);
      if (place < static_cast<u32>(size)) f(values[place], j);
    }
    __syncthreads();
  }
  // f(value, id) for every token.
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    for (int i = threadIdx.x; i < size; i += kEditThreads) f(values[i], first + i);
  }
};

template <typename T>
__device__ __forceinline__ int load_chunk(const LogitEditParams& p, int row, const EditChunk& chunk) {
  const i64 source = p.row_index == nullptr ? row : p.row_index[row];
  const T* logits = static_cast<const T*>(p.logits) + source * p.row_stride;
  int flags = 0;
  chunk.each([&](double& value, int id) {
    value = raw_value(logits[id]);
    if (value != value) flags |= kRawNan;
    else if (is_left(value)) flags |= kRawFinite;
    else if (value > 0.0) flags |= kRawInfinity;
  });
  __syncthreads();
  return flags;
}

// The grammar's mask; returns whether a token is left.
__device__ __forceinline__ int apply_mask(const LogitEditParams& p, int row, const EditChunk& chunk) {
  const int index = p.mask_index == nullptr ? -1 : p.mask_index[row];
  const u32* words = index < 0 ? nullptr : p.mask + index * p.mask_stride;
  int flags = 0;
  chunk.each([&](double& value, int id) {
    if (words != nullptr && !(words[id / 32] >> (id % 32) & 1u)) value = static_cast<double>(negative_infinity());
    if (is_left(value)) flags = kLeftByGrammar;
  });
  __syncthreads();
  return flags;
}

__device__ __forceinline__ void apply_penalties(const LogitEditParams& p, int row, const EditChunk& chunk) {
  if (p.seen_start != nullptr) {
    const double penalty = p.repetition[row];
    chunk.each_listed(p.seen_start, p.seen_ids, row,
                      [&](double& value, int) { value = value > 0.0 ? value / penalty : value * penalty; });
  }
  if (p.output_start != nullptr) {
    const double presence = p.presence[row], frequency = p.frequency[row];
    chunk.each_listed(p.output_start, p.output_ids, row, [&](double& value, int j) {
      // Rounded after each operation, as on the host.
      const double count = static_cast<double>(p.output_counts[j]);
      value = __dsub_rn(value, __dadd_rn(__dmul_rn(frequency, count), presence));
    });
  }
}

// Bias, grammar, repetition penalty, presence and frequency penalties, excluded tokens: in this order.
template <typename T>
__global__ void __launch_bounds__(kEditThreads) logit_edit(const __grid_constant__ LogitEditParams p) {
  __shared__ double values[kEditChunk];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = blockIdx.y, first = blockIdx.x * kEditChunk;
  const EditChunk chunk = {values, first, min(kEditChunk, p.vocab - first)};
  int flags = load_chunk<T>(p, row, chunk);
  chunk.each_listed(p.bias_start, p.bias_ids, row, [&](double& value, int j) { value += p.bias_values[j]; });
  flags |= apply_mask(p, row, chunk);
  apply_penalties(p, row, chunk);
  chunk.each_listed(p.excluded_start, p.excluded_ids, row,
                    [&](double& value, int) { value = static_cast<double>(negative_infinity()); });
  double* out = p.out + row * p.out_stride;
  chunk.each([&](double& value, int id) {
    if (is_left(value)) flags |= kLeftAtLast;
    out[id] = value;
  });
  flags = __reduce_or_sync(kFullMask, static_cast<u32>(flags));
  if (threadIdx.x % kWarp == 0 && flags != 0) atomicOr(&p.flags[row], flags);
}

struct RemapIdsParams {
  const int* ids;
  const int* table;
  int* out;
  int num_ids;
  int table_size;
};

// out[i] = table[ids[i]]; negative ids stay as they are, ids beyond the table become -1.
__global__ void remap_ids(const __grid_constant__ RemapIdsParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.num_ids) return;
  const int id = p.ids[i];
  p.out[i] = id < 0 ? id : id < p.table_size ? p.table[id] : -1;
}

}  // namespace edgellm
