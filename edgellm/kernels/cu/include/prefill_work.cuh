// Which rows and keys a block of paged_prefill works on: parameters, tile search, key ranges, parts, merge arithmetic.
// A sequence's packed rows are (token, head in group), r = token * group + head; a tile is kTileRows of them, one kv
// head.  Keys are numbered by absolute position; a key tile is 64 keys that start at a multiple of 64.
#pragma once

#include "types.cuh"

namespace edgellm {

struct PagedPrefillParams {
  const void* query;        // (num_rows, >= num_heads * D) T, rows query_stride elements apart
  const void* pages;        // (pages, 2, num_kv_heads, page_size, D); fp8: that many bytes, then page_size scales
  const int* page_table;    // (slots, pages_per_slot), -1 unused
  const int* slots;         // (num_sequences,), -1: a padding sequence, whose rows are not written
  const int* query_start;   // (num_sequences + 1,)
  const int* past_len;      // (num_sequences,) keys before the first query row
  const float* sinks;       // (num_heads,) logits, or null
  const int* tree_mask;     // (num_rows, mask_words) bits, or null
  void* out;                // (num_rows, num_heads * D) T
  float* partial_out;       // (parts, num_rows * num_heads, D), where parts of the keys are spread over blocks
  float* partial_stats;     // (parts, num_rows * num_heads, 2): maximum (log2 units), sum
  i64 query_stride;
  int num_rows;
  int num_sequences;
  int num_heads;
  int num_kv_heads;
  int group;
  int head_bytes;           // of one head's keys (or values) in a page
  int page_bytes;
  int page_shift;           // page_size = 1 << page_shift
  int pages_per_slot;
  int mask_words;
  int window;               // 0: none
  int tile_rows;
  int splits;               // blocks that share the keys of a row tile, at most
  int blocks;               // that run at the same time
  int ring;                 // key or value tiles in shared memory, 2 to 4
  int deterministic;
  int head_dim;             // where it is no template argument
  float scale;
  float soft_cap;           // 0: none
};

constexpr int kKeyTile = 64;
constexpr int kSegmentTokens = 1024;    // deterministic mode: keys of a segment
constexpr int kMinPartTokens = 512;     // otherwise: no smaller piece is split off,
constexpr int kPartUnit = 128;          // and pieces are multiples of this
constexpr float kLog2e = 1.4426950408889634f;

// 2^x, within 2 units in the last place; results below 2^-126 are zero, 2^0 is exactly 1.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// tanh within about 1e-7.
__device__ __forceinline__ float tanh_fast(float x) {
  return 1.0f - __fdividef(2.0f, 1.0f + exp2_fast(x * (2.0f * kLog2e)));
}

// ---- rows ----------------------------------------------------------------------------------------------------------

struct SequenceRows {
  int slot;
  int query_start;
  int tokens;
  int past;
  __device__ __forceinline__ int keys() const { return past + tokens; }
};

__device__ __forceinline__ SequenceRows sequence_rows(const PagedPrefillParams& p, int sequence) {
  int start = p.query_start[sequence];
  return {p.slots[sequence], start, p.query_start[sequence + 1] - start, p.past_len[sequence]};
}

__device__ __forceinline__ int row_tiles(const PagedPrefillParams& p, int sequence, int tile_rows) {
  if (sequence >= p.num_sequences || p.slots[sequence] < 0) return 0;
  return ceil_div((p.query_start[sequence + 1] - p.query_start[sequence]) * p.group, tile_rows);
}

__device__ __forceinline__ int neighbouring_row_tiles(const PagedPrefillParams& p, int first, int each,
                                                      int tile_rows) {
  int tiles = 0;
#pragma unroll 4
  for (int i = 0; i < each; ++i) tiles += row_tiles(p, first + i, tile_rows);
  return tiles;
}

// Row tiles that there are: fewer than the host, which does not know the lengths, makes room for.  Called by whole
// warps.
__device__ __forceinline__ int count_row_tiles(const PagedPrefillParams& p, int tile_rows) {
  const int each = ceil_div(p.num_sequences, kWarp);
  int tiles = neighbouring_row_tiles(p, threadIdx.x % kWarp * each, each, tile_rows);
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2) tiles += __shfl_xor_sync(kFullMask, tiles, apart);
  return tiles;
}

// Blocks that share the keys of each row tile: as many as there is room for beside each other.  Deterministic mode: the
// host's number, on which no bits depend.
__device__ __forceinline__ int splits_for(const PagedPrefillParams& p, int tiles) {
  if (p.deterministic || p.splits == 1) return p.splits;
  return min(p.splits, max(1, p.blocks / max(1, tiles * p.num_kv_heads)));
}

// Sequence and tile of the index-th row tile of the batch; false past the last.  Called by whole warps: every lane
// counts the tiles of some neighbouring sequences, a scan finds the lane, the lane finds the sequence.
__device__ __forceinline__ bool find_row_tile(const PagedPrefillParams& p, int index, int tile_rows, int& sequence,
                                              int& tile) {
  const int lane = threadIdx.x % kWarp, each = ceil_div(p.num_sequences, kWarp), first = lane * each;
  const int own = neighbouring_row_tiles(p, first, each, tile_rows);
  int end = own;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    int before = __shfl_up_sync(kFullMask, end, step);
    if (lane >= step) end += before;
  }
  const u32 past = __ballot_sync(kFullMask, end > index);
  if (past == 0) return false;
  const int owner = __ffs(static_cast<int>(past)) - 1;
  sequence = first;
  tile = index - (end - own);
  if (lane == owner) {
    for (int tiles; (tiles = row_tiles(p, sequence, tile_rows)) <= tile; ++sequence) tile -= tiles;
  }
  sequence = __shfl_sync(kFullMask, sequence, owner);
  tile = __shfl_sync(kFullMask, tile, owner);
  return true;
}

// Sequence of a row of the batch, -1 if none has it.  Called by whole warps.
__device__ __forceinline__ int find_sequence(const int* query_start, int num_sequences, int row) {
  const int lane = threadIdx.x % kWarp;
  int begun = 0;
  for (int base = 0; base < num_sequences; base += kWarp) {
    bool at_or_before = base + lane < num_sequences && query_start[base + lane] <= row;
    begun += __popc(__ballot_sync(kFullMask, at_or_before));
  }
  return begun > 0 && row < query_start[begun] ? begun - 1 : -1;
}

// ---- pages ---------------------------------------------------------------------------------------------------------

// Where a page begins, from the first on; that of page 0 for an absent one.
template <typename Params>
__device__ __forceinline__ u64 page_offset(const Params& p, int page) {
  return static_cast<u64>(static_cast<u32>(max(page, 0))) * static_cast<u32>(p.page_bytes);
}
// Place of a key in its page.
template <typename Params>
__device__ __forceinline__ u32 page_place(const Params& p, int key) {
  return static_cast<u32>(key) & ((1u << p.page_shift) - 1u);
}

// ---- keys ----------------------------------------------------------------------------------------------------------

struct KeyRange {
  int begin, end;
};

// Keys outside of which no row of tokens [first, last] sees anything.  With a tree mask a token sees as many keys as
// mask bits behind the past; how many is not known here, so the range is the widest.
__device__ __forceinline__ KeyRange key_range(const PagedPrefillParams& p, const SequenceRows& rows, int first,
                                              int last) {
  const bool tree = p.tree_mask != nullptr;
  const int first_end = tree ? rows.past : rows.past + first + 1;
  const int begin = p.window > 0 ? max(0, first_end - p.window) : 0;
  return {begin, tree ? rows.keys() : rows.past + last + 1};
}

// A row tile's keys in parts, each an own softmax: part i holds keys [base + i * step, base + (i + 1) * step) of the
// range.  Deterministic mode: segments at absolute positions, so that a row's parts do not depend on its tile (what a
// neighbour adds at either end is masked for this row: an empty part, which merging leaves without a trace).
// Otherwise about equal parts, one for each of `splits` blocks.
struct KeyParts {
  int base, step, count;
};

__device__ __forceinline__ KeyParts key_parts(const PagedPrefillParams& p, const KeyRange& range, int splits) {
  if (p.deterministic) {
    int base = range.begin / kSegmentTokens * kSegmentTokens;
    return {base, kSegmentTokens, ceil_div(range.end - base, kSegmentTokens)};
  }
  int base = range.begin / kPartUnit * kPartUnit;
  int step = ceil_div(ceil_div(range.end - base, splits), kPartUnit) * kPartUnit;
  if (splits > 1) step = max(step, kMinPartTokens);
  return {base, step, ceil_div(range.end - base, step)};
}

// Bits of the 64 keys from tile_key on that a token sees.
__device__ __forceinline__ u64 low_bits(int count) {
  return count >= 64 ? ~0ull : count <= 0 ? 0ull : (1ull << count) - 1;
}

// Word i of a row's mask: only the sequence's own tokens, zero outside.
__device__ __forceinline__ u32 mask_word(const PagedPrefillParams& p, const int* words, int tokens, int i) {
  return i < 0 || i >= p.mask_words ? 0u : static_cast<u32>(words[i]) & static_cast<u32>(low_bits(tokens - 32 * i));
}

__device__ __forceinline__ u64 tree_bits(const PagedPrefillParams& p, const SequenceRows& rows, int token,
                                         int tile_key) {
  const int* words = p.tree_mask + static_cast<i64>(rows.query_start + token) * p.mask_words;
  const int first = tile_key - rows.past;  // new token at bit 0; negative in the past
  const int word = first >> 5, shift = first & 31;
  const u32 low = mask_word(p, words, rows.tokens, word), middle = mask_word(p, words, rows.tokens, word + 1);
  const u32 high = mask_word(p, words, rows.tokens, word + 2);
  const u64 bits = __funnelshift_r(low, middle, shift) | static_cast<u64>(__funnelshift_r(middle, high, shift)) << 32;
  u64 prefix = low_bits(-first);
  if (p.window > 0) {
    int seen = 0;
    for (int i = 0; i < p.mask_words; ++i) seen += __popc(mask_word(p, words, rows.tokens, i));
    prefix &= ~low_bits(seen - p.window - first);
  }
  return bits | prefix;
}

__device__ __forceinline__ u64 visible_keys(const PagedPrefillParams& p, const SequenceRows& rows, int token,
                                            int tile_key) {
  if (p.tree_mask != nullptr) return tree_bits(p, rows, token, tile_key);
  const int end = rows.past + token + 1 - tile_key;
  u64 bits = low_bits(end);
  if (p.window > 0) bits &= ~low_bits(end - p.window);
  return bits;
}

// ---- the arithmetic of merging, the same wherever it is done -------------------------------------------------------

// Weights of two softmax states with maxima (log2 units) and sums; an empty one is (-inf, 0).  Merging an empty one
// multiplies the other by exactly 1 and adds exactly 0.
struct Merged {
  float maximum, sum, keep, add;
};

__device__ __forceinline__ Merged merge_states(float maximum, float sum, float other_maximum, float other_sum) {
  Merged merged;
  merged.maximum = fmaxf(maximum, other_maximum);
  float base = merged.maximum == negative_infinity() ? 0.0f : merged.maximum;
  merged.keep = exp2_fast(__fsub_rn(maximum, base));
  merged.add = exp2_fast(__fsub_rn(other_maximum, base));
  merged.sum = __fmaf_rn(sum, merged.keep, __fmul_rn(other_sum, merged.add));
  return merged;
}
__device__ __forceinline__ float merge_values(float value, float other, const Merged& merged) {
  return __fmaf_rn(value, merged.keep, __fmul_rn(other, merged.add));
}

// What a row's weighted sum is multiplied with at the end: 1 / sum, the sink's term joined; 0 for a row without keys.
template <typename Params>
__device__ __forceinline__ float final_factor(const Params& p, int head, float maximum, float sum) {
  float weight = 1.0f;
  if (p.sinks != nullptr) {
    Merged joined = merge_states(maximum, sum, __fmul_rn(p.sinks[head], kLog2e), 1.0f);
    weight = joined.keep;
    sum = joined.sum;
  }
  return sum > 0.0f ? __fdiv_rn(weight, sum) : 0.0f;
}

}  // namespace edgellm
