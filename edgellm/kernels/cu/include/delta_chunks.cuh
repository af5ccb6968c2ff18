// Gated delta rule of long rows, kChunk tokens at a time (the WY and UT transforms of Yang et al., 2024).
// Axes as in gated_delta.cu.  Of a chunk: tokens i and j, G_i = sum of its decays up to i, S the state before it:
//   A_ij = beta_i (k_i . k_j) exp(G_i - G_j), j < i
//   U = (1 + A)^-1 diag(beta) V           ("values")
//   W = (1 + A)^-1 diag(beta exp(G)) K    ("reads": what the updates take back of the old state)
//   X = U - W S;   out_i = scale (exp(G_i) S^T q_i + sum_{j <= i} P_ij X_j),   P_ij = (q_i . k_j) exp(G_i - G_j)
//   S = exp(G_last) S + sum_j k_j exp(G_last - G_j) X_j^T
// delta_solve makes U, W and P of every chunk, all at once; delta_scan goes through the chunks of a row in order and
// keeps S and X of each; delta_read makes out of every chunk, all at once.
// Products are of float16 with float sums: q and k have unit length, W and P are at most about 1, and U, S and X are
// multiplied by powers of two, so that neither their range nor that of bfloat16 rows matters.
//
// Workspace, by place: chunk c of row n has place query_start[n] / kChunk + n + c, less p.first_place.  Operands lie
// in fragments: what the 32 lanes of a warp hold of a 16 x 16 tile for mma.m16n8k16, 16 bytes each, lane by lane.
//   queries (place, key heads, token tile, key tile)     of q, as a
//   keys    (place, key heads, key tile, token tile)     of K, as b of S^T += X^T K
//   reads   (place, heads, token tile, key tile)         of W, as b of S^T W^T
//   scores  (place, heads, tiles on and left of the diagonal, row by row)    of P, as a
//   values  (place, heads, column tile, token tile)      of U^T and in its place X^T, as a (and of X as b)
//   states  (place, heads, column tile, key tile)        of S^T, as a (and of S as b)
//   totals  (place, heads, kChunk) float: G              scales (place, heads, kGroup columns): ChunkScales
// Of kGroup columns the tiles hold rows in an order that gives a lane of delta_read 8 neighbours: see column_in_group.
#pragma once

#include "delta_rows.cuh"
#include "mma.cuh"

namespace edgellm {

constexpr int kChunk = 64;
constexpr int kTokenTiles = kChunk / 16;
constexpr int kScoreTiles = kTokenTiles * (kTokenTiles + 1) / 2;
constexpr int kChunkThreads = 128;
constexpr int kChunkWarps = kChunkThreads / kWarp;
constexpr int kGroup = 32;        // columns of the state that share their powers of two
constexpr int kHalves = kGroup / 16;
constexpr float kLeast = -90.0f;  // of a decay: exp is 0 from here on

struct alignas(16) ChunkScales {
  float largest;  // of |U|
  int value;      // exponents: stored U is U times 2^value,
  int state;      // S before the chunk,
  int update;     // and X
};

struct Chunk {
  int first;   // token
  int length;  // tokens; 0: nothing to do
};

// The chunk at a place; every warp finds it for itself.
__device__ __forceinline__ Chunk chunk_at(const GatedDeltaParams& p, int place) {
  const int lane = threadIdx.x % kWarp;
  int row = -1;  // the last one whose chunks begin here or before
  for (int start = 0; start < p.num_rows; start += kWarp) {
    const int n = start + lane;
    const bool before = n < p.num_rows && p.query_start[n] / kChunk + n <= place;
    const int count = __popc(__ballot_sync(kFullMask, before));
    row += count;
    if (count < kWarp) break;
  }
  if (row < 0) return {0, 0};
  const StateRow found = delta_row(p, row);
  const int first = found.first + (place - found.first / kChunk - row) * kChunk;
  if (found.is_idle() || !goes_by_chunks(p, found) || first >= found.end) return {0, 0};
  return {first, min(kChunk, found.end - first)};
}

// ---- powers of two --------------------------------------------------------------------------------------------------

// The exponent e for which values up to `amax` times 2^e stay below 2^14.
__device__ __forceinline__ int half_exponent(float amax) {
  return max(-120, min(120, 13 - ((__float_as_int(amax) >> 23 & 255) - 127)));
}
__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((max(-126, min(127, exponent)) + 127) << 23);
}

// ---- the parts of the workspace that belong to one head of one place ------------------------------------------------

struct ChunkPlace {
  const GatedDeltaParams& p;
  i64 index;  // place * heads + head
  i64 key_index;

  __device__ __forceinline__ ChunkPlace(const GatedDeltaParams& params, int place, int head) : p(params) {
    index = static_cast<i64>(place) * p.heads + head;
    key_index = static_cast<i64>(place) * (p.heads / p.group) + head / p.group;
  }
  __device__ __forceinline__ uint4* queries() const { return fragments(p.queries, key_index, p.key_dim); }
  __device__ __forceinline__ uint4* keys() const { return fragments(p.keys, key_index, p.key_dim); }
  __device__ __forceinline__ uint4* reads() const { return fragments(p.reads, index, p.key_dim); }
  __device__ __forceinline__ uint4* values() const { return fragments(p.values, index, p.value_dim); }
  __device__ __forceinline__ uint4* scores() const {
    return static_cast<uint4*>(p.scores) + index * (kScoreTiles * kWarp);
  }
  __device__ __forceinline__ uint4* states() const {
    return static_cast<uint4*>(p.states) + index * (p.key_dim * p.value_dim / 8);
  }
  __device__ __forceinline__ float* totals() const { return p.totals + index * kChunk; }
  __device__ __forceinline__ ChunkScales* scales() const {
    return static_cast<ChunkScales*>(p.scales) + index * (p.value_dim / kGroup);
  }

 private:
  // Of kChunk tokens by `width`.
  static __device__ __forceinline__ uint4* fragments(void* part, i64 at, int width) {
    return static_cast<uint4*>(part) + at * (kChunk / 8 * width);
  }
};

// ---- fragments --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void load_fragment(u32 (&fragment)[4], const uint4* source) {
  const uint4 four = *source;
  fragment[0] = four.x, fragment[1] = four.y, fragment[2] = four.z, fragment[3] = four.w;
}
__device__ __forceinline__ void store_fragment(uint4* target, const u32 (&fragment)[4]) {
  *target = make_uint4(fragment[0], fragment[1], fragment[2], fragment[3]);
}
// Two neighbouring 16 x 8 accumulators as a 16 x 16 operand a.
__device__ __forceinline__ void pack_fragment(u32 (&fragment)[4], const float (&low)[4], const float (&high)[4]) {
  fragment[0] = pack2<f16>(low[0], low[1]), fragment[1] = pack2<f16>(low[2], low[3]);
  fragment[2] = pack2<f16>(high[0], high[1]), fragment[3] = pack2<f16>(high[2], high[3]);
}
// sums += a b; b's two halves of 8 columns in one fragment, stored as {0, 0, 1, 1}.
__device__ __forceinline__ void multiply_pair(float (&low)[4], float (&high)[4], const u32 (&a)[4],
                                              const u32 (&b)[4]) {
  const u32 first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
  mma_16816<f16>(low, a, first);
  mma_16816<f16>(high, a, second);
}
template <int N>
__device__ __forceinline__ void clear(float (&sums)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
}

// Of the group's 32 columns, the one in row `row` of 16 of the tile `half`.
__device__ __forceinline__ int column_in_group(int half, int row) {
  return row % 8 / 2 * 8 + (2 * half + row / 8) * 2 + row % 2;
}

}  // namespace edgellm
