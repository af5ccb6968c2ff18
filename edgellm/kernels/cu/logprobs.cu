// Log-softmax of rows of logits: at one token of each row and at its num_top most likely tokens.
// Axes: grid x = chunks of kChunk token ids, grid y = rows l.  Row l reads logits row row_index[l] and the token
// token_ids[token_index[l]] (l without an index).  Natural logarithms, float64.
// Every block finds the largest logit of its chunk, the sum of exp(logit - that) and the chunk's first num_top tokens;
// the last block of a row merges them, chunks in order, so a row's bits depend on the row alone.
#include "logits.cuh"

namespace edgellm {

constexpr int kMaxTop = 64;

struct LogprobsParams {
  const void* logits;
  const int* row_index;    // or null
  const int* token_ids;
  const int* token_index;  // or null
  double* chosen;          // (L,); NaN where the token is -1 or less
  double* top_values;      // (L, num_top), descending; -inf beyond what has a chance
  int* top_ids;            // (L, num_top); of equal values the lower id first; -1 beyond the vocabulary
  void* workspace;         // row_bytes a row, zero before the first use
  i64 row_stride;
  i64 row_bytes;
  int vocab;
  int num_top;
};

struct LogprobsWorkspace {
  int* arrived;
  double* largest;  // (chunks,)
  double* sum;
  u64* keys;        // (chunks, kMaxTop), num_top of each used
  int* ids;
};

__device__ __forceinline__ LogprobsWorkspace logprobs_workspace(const LogprobsParams& p, int row) {
  const int chunks = gridDim.x;
  u8* base = static_cast<u8*>(p.workspace) + row * p.row_bytes;
  LogprobsWorkspace w;
  w.arrived = reinterpret_cast<int*>(base);
  w.largest = reinterpret_cast<double*>(base + 128);
  w.sum = w.largest + chunks;
  w.keys = reinterpret_cast<u64*>(w.sum + chunks);
  w.ids = reinterpret_cast<int*>(w.keys + chunks * kMaxTop);
  return w;
}

// Tokens in registers, kPerThread a thread; key 0 is none.
template <typename Key>
struct TokensInRegisters {
  Token<Key> tokens[kPerThread];

  template <typename Where>
  __device__ __forceinline__ int count(Where where) const {
    int found = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) found += where(tokens[i]) ? 1 : 0;
    return block_reduce(found, Sum());
  }
  // The last of the first `wanted` tokens, where there are so many: larger keys first, of equal ones lower ids.
  __device__ __forceinline__ Token<Key> nth(int wanted) const {
    Key low = 0, high = 0;
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) high = Largest()(high, tokens[i].key);
    high = block_reduce(high, Largest());
    while (low < high) {
      const Key middle = high - (high - low) / 2;
      const int found = count([&](const Token<Key>& token) { return token.key >= middle; });
      if (found == wanted) return {middle, kLastId};
      if (found > wanted) low = middle;
      else high = middle - 1;
    }
    const int rest = wanted - count([&](const Token<Key>& token) { return token.key > low; });
    int first = 0, last = kLastId;
    if (count([&](const Token<Key>& token) { return token.key == low; }) <= rest) return {low, last};
    while (first < last) {
      const int middle = first + (last - first) / 2;
      if (count([&](const Token<Key>& token) { return token.key == low && token.id <= middle; }) >= rest) last = middle;
      else first = middle + 1;
    }
    return {low, first};
  }
  // Writes the first `wanted` tokens, as far as there are so many, in any order; the rest of `wanted` places are none.
  template <typename Stored>
  __device__ __forceinline__ void write_first(int wanted, Stored* keys, int* ids) const {
    __shared__ int written;
    const Token<Key> edge = nth(wanted);
    if (threadIdx.x == 0) written = 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (tokens[i].key == 0 || edge.before(tokens[i])) continue;
      const int place = atomicAdd(&written, 1);
      keys[place] = tokens[i].key;
      ids[place] = tokens[i].id;
    }
    __syncthreads();
    for (int place = written + threadIdx.x; place < wanted; place += kLogitThreads) {
      keys[place] = 0;
      ids[place] = -1;
    }
    __syncthreads();
  }
};

template <typename T>
__device__ __forceinline__ void summarise_chunk(const LogprobsParams& p, const T* logits, const LogprobsWorkspace& w) {
  using Type = LogitType<T>;
  using Key = typename Type::Key;
  const int chunk = blockIdx.x;
  TokensInRegisters<Key> own;
  Key largest_key = 0;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) own.tokens[i] = {0, -1};
  for_each_of_chunk(logits, chunk, p.vocab, [&](int i, int id, typename Type::Value value) {
    own.tokens[i] = {order_key(value), id};
    largest_key = Largest()(largest_key, own.tokens[i].key);
  });
  largest_key = block_reduce(largest_key, Largest());
  const double largest = static_cast<double>(key_value(largest_key));
  double sum = 0.0;
  if (largest_key > Type::kMinusInfinity) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i)
      if (own.tokens[i].key != 0) sum += exp(static_cast<double>(key_value(own.tokens[i].key)) - largest);
  }
  sum = block_reduce(sum, Sum());
  if (threadIdx.x == 0) {
    w.largest[chunk] = largest;
    w.sum[chunk] = sum;
  }
  if (p.num_top > 0) own.write_first(p.num_top, w.keys + chunk * kMaxTop, w.ids + chunk * kMaxTop);
}

// The num_top first tokens of the row, in order.
template <typename T>
__device__ __forceinline__ void merge_top(const LogprobsParams& p, int row, const LogprobsWorkspace& w,
                                          double log_total) {
  using Key = typename LogitType<T>::Key;
  __shared__ Key keys[kMaxTop];
  __shared__ int ids[kMaxTop];
  const int num_top = p.num_top, entries = static_cast<int>(gridDim.x) * num_top, thread = threadIdx.x;
  TokensInRegisters<Key> own;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int entry = thread + i * kLogitThreads;
    own.tokens[i] = {0, -1};
    if (entry >= entries) continue;
    const int place = entry / num_top * kMaxTop + entry % num_top;
    own.tokens[i] = {static_cast<Key>(w.keys[place]), w.ids[place]};
  }
  own.write_first(num_top, keys, ids);
  if (thread >= num_top) return;
  const Token<Key> token = {keys[thread], ids[thread]};
  int rank = 0;
  for (int i = 0; i < num_top; ++i) {
    const Token<Key> other = {keys[i], ids[i]};
    if (other.before(token) || (token.key == 0 && other.key == 0 && i < thread)) ++rank;
  }
  const i64 place = static_cast<i64>(row) * num_top + rank;
  p.top_ids[place] = token.id;
  p.top_values[place] = token.key <= LogitType<T>::kMinusInfinity
                            ? static_cast<double>(negative_infinity())
                            : static_cast<double>(key_value(token.key)) - log_total;
}

template <typename T>
__device__ void merge_chunks(const LogprobsParams& p, int row, const T* logits, const LogprobsWorkspace& w) {
  const int thread = threadIdx.x, chunks = gridDim.x;
  double largest = static_cast<double>(negative_infinity());
  if (thread < chunks) largest = w.largest[thread];
  const double row_largest = block_reduce(largest, Largest());
  const double share = thread < chunks && w.sum[thread] > 0.0 ? w.sum[thread] * exp(largest - row_largest) : 0.0;
  const double log_total = row_largest + log(block_reduce(share, Sum()));
  if (thread == 0) {
    const int token = p.token_ids[p.token_index == nullptr ? row : p.token_index[row]];
    p.chosen[row] = token < 0 || token >= p.vocab ? static_cast<double>(__int_as_float(0x7fffffff))
                                                  : static_cast<double>(logit_value(logits[token])) - log_total;
  }
  if (p.num_top > 0) merge_top<T>(p, row, w, log_total);
}

template <typename T>
__global__ void __launch_bounds__(kLogitThreads, 1) logprobs(const __grid_constant__ LogprobsParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int row = blockIdx.y;
  const i64 source = p.row_index == nullptr ? row : p.row_index[row];
  const T* logits = static_cast<const T*>(p.logits) + source * p.row_stride;
  const LogprobsWorkspace w = logprobs_workspace(p, row);
  summarise_chunk(p, logits, w);
  if (is_last_block(w.arrived, gridDim.x)) merge_chunks(p, row, logits, w);
}

}  // namespace edgellm
