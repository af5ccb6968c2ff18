// What the kernels over rows of logits share: keys that order logits, exact sums of weights, reductions and scans.
// Axes: row r, token id in [0, vocab), chunk = kChunk neighbouring ids, one block a chunk.
// Weights are exp((logit - largest) / temperature), at most 1.  They are summed as integers in units of 2^-56: such a
// sum does not depend on its order, so neither do the results on the batch, the grid or the device.
#pragma once

#include "types.cuh"

namespace edgellm {

constexpr int kChunk = 8192;
constexpr int kLogitThreads = 512;
constexpr int kLogitWarps = kLogitThreads / kWarp;
constexpr int kPerThread = kChunk / kLogitThreads;
constexpr int kLastId = 0x7fffffff;

// ---- keys: unsigned integers in the order of the logits; -0 equals 0, NaN is above everything ---------------------

template <typename T>
struct LogitType {
  using Value = float;
  using Key = u32;
  static constexpr Key kNan = ~0u;
  static constexpr Key kInfinity = 0xff800000u;
  static constexpr Key kMinusInfinity = 0x007fffffu;
};
template <>
struct LogitType<double> {
  using Value = double;
  using Key = u64;
  static constexpr Key kNan = ~0ull;
  static constexpr Key kInfinity = 0xfff0000000000000ull;
  static constexpr Key kMinusInfinity = 0x000fffffffffffffull;
};

template <typename T>
__device__ __forceinline__ float logit_value(T logit) {
  return to_float(logit);
}
__device__ __forceinline__ double logit_value(double logit) { return logit; }

__device__ __forceinline__ u32 order_key(float value) {
  u32 bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return ~0u;
  if (bits == 0x80000000u) bits = 0;
  return (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ u64 order_key(double value) {
  constexpr u64 kSign = 0x8000000000000000ull;
  u64 bits = static_cast<u64>(__double_as_longlong(value));
  if ((bits & ~kSign) > 0x7ff0000000000000ull) return ~0ull;
  if (bits == kSign) bits = 0;
  return (bits & kSign) ? ~bits : bits | kSign;
}
__device__ __forceinline__ float key_value(u32 key) {
  return __uint_as_float((key & 0x80000000u) ? key & 0x7fffffffu : ~key);
}
__device__ __forceinline__ double key_value(u64 key) {
  constexpr u64 kSign = 0x8000000000000000ull;
  return __longlong_as_double(static_cast<i64>((key & kSign) ? key & ~kSign : ~key));
}

// A token in the order of choice: the larger key first, of equal keys the lower id.
template <typename Key>
struct Token {
  Key key;
  int id;
  __device__ __forceinline__ bool before(const Token& other) const {
    return key > other.key || (key == other.key && id < other.id);
  }
};

// ---- exact sums of weights ------------------------------------------------------------------------------------------

constexpr int kWeightBits = 56;
constexpr int kLowBits = 38;
constexpr u64 kLowMask = (1ull << kLowBits) - 1;

// A weight in [0, 1] in units of 2^-56, rounded half up; by integer operations, which small GPUs have many more of.
__device__ __forceinline__ u64 units_of(double weight) {
  const u64 bits = static_cast<u64>(__double_as_longlong(weight));
  const u64 digits = (bits & 0x000fffffffffffffull) | 0x0010000000000000ull;
  const int shift = 1023 + 52 - kWeightBits - static_cast<int>(bits >> 52);  // -4 for a weight of 1
  return shift > 0 ? ((digits >> min(shift - 1, 63)) + 1) >> 1 : digits << -shift;
}

// A sum of weights: low + high * 2^38 units; of up to 2^24 weights each part stays below 2^63.
struct Mass {
  u64 low, high;
};
__device__ __forceinline__ Mass operator+(Mass a, Mass b) { return {a.low + b.low, a.high + b.high}; }
__device__ __forceinline__ Mass mass_of(u64 units) { return {units & kLowMask, units >> kLowBits}; }
__device__ __forceinline__ Mass times(Mass mass, int count) {
  return {mass.low * static_cast<u64>(count), mass.high * static_cast<u64>(count)};
}
// In units; rounded once, so a larger sum never gives a smaller number.
__device__ __forceinline__ double to_double(Mass mass) {
  const u64 high = mass.high + (mass.low >> kLowBits), low = mass.low & kLowMask;
  return __fma_rn(static_cast<double>(high), static_cast<double>(1ull << kLowBits), static_cast<double>(low));
}
__device__ __forceinline__ bool same(Mass a, Mass b) {
  return a.high + (a.low >> kLowBits) == b.high + (b.low >> kLowBits) && ((a.low ^ b.low) & kLowMask) == 0;
}

// How many tokens, and their weight.
struct Tally {
  int count;
  Mass mass;
};
__device__ __forceinline__ Tally operator+(Tally a, Tally b) { return {a.count + b.count, a.mass + b.mass}; }

// ---- reductions and scans of a block of kLogitThreads ---------------------------------------------------------------

template <typename V>
__device__ __forceinline__ V shuffle_xor(V value, int step) {
  return __shfl_xor_sync(kFullMask, value, step);
}
__device__ __forceinline__ Mass shuffle_xor(Mass mass, int step) {
  return {shuffle_xor(mass.low, step), shuffle_xor(mass.high, step)};
}
template <typename Key>
__device__ __forceinline__ Token<Key> shuffle_xor(Token<Key> token, int step) {
  return {shuffle_xor(token.key, step), shuffle_xor(token.id, step)};
}
template <typename V>
__device__ __forceinline__ V shuffle_up(V value, int step) {
  return __shfl_up_sync(kFullMask, value, step);
}
__device__ __forceinline__ Mass shuffle_up(Mass mass, int step) {
  return {shuffle_up(mass.low, step), shuffle_up(mass.high, step)};
}
__device__ __forceinline__ Tally shuffle_up(Tally tally, int step) {
  return {shuffle_up(tally.count, step), shuffle_up(tally.mass, step)};
}

struct Sum {
  static constexpr bool kCountsTwice = true;
  template <typename V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return a + b;
  }
};
struct Largest {
  static constexpr bool kCountsTwice = false;
  template <typename V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return a > b ? a : b;
  }
};
struct Least {
  static constexpr bool kCountsTwice = false;
  template <typename V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return a < b ? a : b;
  }
};
struct First {
  static constexpr bool kCountsTwice = false;
  template <typename V>
  __device__ __forceinline__ V operator()(V a, V b) const {
    return b.before(a) ? b : a;
  }
};

template <typename V, typename Op>
__device__ __forceinline__ V warp_reduce(V value, Op op) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value = op(value, shuffle_xor(value, step));
  return value;
}

// Of 32-bit numbers there is an instruction.
__device__ __forceinline__ u32 warp_reduce(u32 value, Largest) { return __reduce_max_sync(kFullMask, value); }
__device__ __forceinline__ u32 warp_reduce(u32 value, Least) { return __reduce_min_sync(kFullMask, value); }
__device__ __forceinline__ int warp_reduce(int value, Sum) { return __reduce_add_sync(kFullMask, value); }
__device__ __forceinline__ u64 warp_sum_of_22_bits(u64 value) {
  return __reduce_add_sync(kFullMask, static_cast<u32>(value) & 0x3fffffu);
}
__device__ __forceinline__ Mass warp_reduce(Mass mass, Sum) {
  return {warp_sum_of_22_bits(mass.low) + (warp_sum_of_22_bits(mass.low >> 22) << 22) +
              (warp_sum_of_22_bits(mass.low >> 44) << 44),
          warp_sum_of_22_bits(mass.high) + (warp_sum_of_22_bits(mass.high >> 22) << 22)};
}
__device__ __forceinline__ Token<u32> warp_reduce(Token<u32> token, First) {
  const u32 key = __reduce_max_sync(kFullMask, token.key);
  return {key, __reduce_min_sync(kFullMask, token.key == key ? token.id : kLastId)};
}

// What a warp makes of one value of each warp of the block.
template <typename V, typename Op>
__device__ __forceinline__ V reduce_warps(const V* scratch, Op op) {
  static_assert(kLogitWarps <= kWarp, "one warp reduces what the warps found");
  const int lane = threadIdx.x % kWarp;
  V value = scratch[lane % kLogitWarps];  // twice the same is once for every operation but the sum
  if constexpr (Op::kCountsTwice) {
    if (lane >= kLogitWarps) value = V{};
  }
  return warp_reduce(value, op);
}

// Every thread calls it and gets the same bits: the order is fixed.  Not inlined, for short code and compile time.
template <typename V, typename Op>
__device__ __noinline__ V block_reduce(V value, Op op) {
  __shared__ V scratch[kLogitWarps];
  value = warp_reduce(value, op);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = reduce_warps(scratch, op);
  __syncthreads();
  return value;
}
// The same where only the first warp needs the result: the other warps go on at once and get nothing of use.
template <typename V, typename Op>
__device__ __forceinline__ V first_warp_reduce(V value, Op op) {
  __shared__ V scratch[kLogitWarps];
  value = warp_reduce(value, op);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  return threadIdx.x < kWarp ? reduce_warps(scratch, op) : value;
}

// Who works on a set of tokens together: a whole block, or its first warp while the others wait.
struct WholeBlock {
  template <typename V, typename Op>
  __device__ static __forceinline__ V reduce(V value, Op op) {
    return block_reduce(value, op);
  }
};
struct FirstWarp {
  template <typename V, typename Op>
  __device__ static __forceinline__ V reduce(V value, Op op) {
    return warp_reduce(value, op);
  }
};

template <typename V>
__device__ __forceinline__ V warp_scan(V value) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    V before = shuffle_up(value, step);
    if (static_cast<int>(threadIdx.x % kWarp) >= step) value = before + value;
  }
  return value;
}

// The sum of the values of lower threads; `total` of all.  V{} is zero.
template <typename V>
__device__ __forceinline__ V block_scan(V value, V& total) {
  __shared__ V scratch[kLogitWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  V inside = warp_scan(value);
  if (lane == kWarp - 1) scratch[warp] = inside;
  __syncthreads();
  if (warp == 0) {
    const V sums = warp_scan(lane < kLogitWarps ? scratch[lane] : V{});
    if (lane < kLogitWarps) scratch[lane] = sums;
  }
  __syncthreads();
  V before = shuffle_up(inside, 1);
  if (lane == 0) before = V{};
  if (warp > 0) before = scratch[warp - 1] + before;
  total = scratch[kLogitWarps - 1];
  __syncthreads();
  return before;
}

// ---- one chunk of a row in registers --------------------------------------------------------------------------------

// f(i, id, value) for the ids of a chunk that this thread works on, ascending; the loads come before the work.
template <typename T, typename F>
__device__ __forceinline__ void for_each_of_chunk(const T* logits, int chunk, int vocab, F f) {
  using Value = typename LogitType<T>::Value;
  const int first = chunk * kChunk + static_cast<int>(threadIdx.x);
  Value values[kPerThread];
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int id = first + i * kLogitThreads;
    values[i] = id < vocab ? logit_value(logits[id]) : Value(0);
  }
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const int id = first + i * kLogitThreads;
    if (id < vocab) f(i, id, values[i]);
  }
}

// True in the last of `blocks` blocks to get here, which then sees what the others wrote; resets the counter.
__device__ __forceinline__ bool is_last_block(int* arrived, int blocks) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(arrived, 1) == blocks - 1;
    if (last) *arrived = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}

// The same by a block's first warp alone, for what its lanes wrote.
__device__ __forceinline__ bool is_last_first_warp(int* arrived, int blocks) {
  __threadfence();
  __syncwarp();
  int before = 0;
  if (threadIdx.x == 0) {
    before = atomicAdd(arrived, 1);
    if (before == blocks - 1) *arrived = 0;
  }
  const bool last = __shfl_sync(kFullMask, before, 0) == blocks - 1;
  if (last) __threadfence();
  return last;
}

}  // namespace edgellm
