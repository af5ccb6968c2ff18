// Gated delta rule by chunks: U, W and P of every chunk, a block for a chunk and a head of v.  See delta_chunks.cuh.
#include "delta_inverse.cuh"

namespace edgellm {

constexpr int kPad = 8;             // elements: rows of a shared tile start in different banks
constexpr int kSolveColumns = 128;  // of v, at once
constexpr int kValuePitch = kSolveColumns + kPad;
constexpr int kInversePitch = kChunk + kPad;
constexpr int kOwnRows = kChunk / kChunkWarps;  // of q, k or v, that a warp loads

template <int kKeyDim>
struct SolveShared {
  static constexpr int kPitch = kKeyDim + kPad;
  union {  // one after the other
    alignas(16) f16 keys[kChunk * kPitch];
    alignas(16) f16 values[kChunk * kValuePitch];  // diag(beta) V
  };
  union {
    alignas(16) f16 queries[kChunk * kPitch];
    InverseShared system;
    struct {  // by column
      alignas(16) f16 inverse[kChunk * kInversePitch];      // (1 + A)^-1
      alignas(16) f16 key_inverse[kChunk * kInversePitch];  // (1 + A)^-1 diag(beta exp(G))
    };
  };
  float totals[kChunk];
  float betas[kChunk];
  float largest[kChunkWarps];
};

// G and beta; tokens behind the last change nothing.  Called by the first warp.
__device__ __forceinline__ void sum_decays(const GatedDeltaParams& p, const Chunk& chunk, int head, int lane,
                                           float* totals, float* betas) {
  float decays[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int token = 2 * lane + i;
    const i64 at = chunk.first + token;
    const bool is_real = token < chunk.length;
    decays[i] = is_real ? fmaxf(p.decay[at * p.decay_stride + head], kLeast) : 0.0f;
    betas[token] = is_real ? p.beta[at * p.beta_stride + head] : 0.0f;
  }
  float sum = decays[0] + decays[1];
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const float below = __shfl_up_sync(kFullMask, sum, step);
    if (lane >= step) sum += below;
  }
  totals[2 * lane] = sum - decays[1];
  totals[2 * lane + 1] = sum;
}

// ---- rows of q and k ----------------------------------------------------------------------------------------------

// The warp's rows of one head, half a warp a row: a lane has 4 elements of every 64.
template <typename T, int kKeyDim>
struct UnitRows {
  static constexpr int kParts = kKeyDim / 64;
  static constexpr int kSteps = kOwnRows / 2;
  uint2 rows[kSteps][kParts];

  __device__ __forceinline__ static int token(int step) {
    return threadIdx.x / kWarp * kOwnRows + 2 * step + threadIdx.x % kWarp / 16;
  }
  __device__ __forceinline__ void load(const void* source, const Chunk& chunk, i64 stride, int key_head) {
    const T* first = static_cast<const T*>(source) + key_head * kKeyDim + threadIdx.x % 16 * 4;
    first += (chunk.first + token(0)) * stride;
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const bool is_real = token(s) < chunk.length;
        rows[s][part] = is_real ? *reinterpret_cast<const uint2*>(first + 2 * s * stride + 64 * part) : make_uint2(0, 0);
      }
  }
  // Divided by their lengths, to a tile.
  __device__ __forceinline__ void store(f16* tile) const {
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      float values[kParts][4], squares = 0.0f;
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const float2 low = unpack2<T>(rows[s][part].x), high = unpack2<T>(rows[s][part].y);
        values[part][0] = low.x, values[part][1] = low.y, values[part][2] = high.x, values[part][3] = high.y;
#pragma unroll
        for (int i = 0; i < 4; ++i) squares = fmaf(values[part][i], values[part][i], squares);
      }
      const float unit = rsqrtf(warp_sum<16>(squares) + kUnitEps);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[part][i] *= unit;
        store_floats(tile + token(s) * (kKeyDim + kPad) + threadIdx.x % 16 * 4 + 64 * part, values[part]);
      }
    }
  }
};

// ---- products of q and k ------------------------------------------------------------------------------------------

using RowSums = float[2 * kTokenTiles][4];  // of 16 rows with all tokens

// Products of 16 rows of `left` with the keys up to the last of them; the operands a go to `saved`, unless null.
template <int kKeyDim>
__device__ __forceinline__ void products(const f16* left, const f16* keys, int tile, int lane, uint4* saved,
                                         RowSums& sums) {
  constexpr int kPitch = kKeyDim + kPad;
  clear(sums);
#pragma unroll 1
  for (int depth = 0; depth < kKeyDim; depth += 16) {
    u32 a[4], b[kTokenTiles][4];
    load_a<kPitch>(a, left, 16 * tile, depth, lane);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n)
      if (n <= tile) load_b_columns<kPitch>(b[n], keys, depth, 16 * n, lane);
    if (saved != nullptr) store_fragment(saved + (tile * (kKeyDim / 16) + depth / 16) * kWarp + lane, a);
#pragma unroll
    for (int n = 0; n < kTokenTiles; ++n)
      if (n <= tile) multiply_pair(sums[2 * n], sums[2 * n + 1], a, b[n]);
  }
}

// exp(G_i - G_j), or 0 above the diagonal (and on it, when it is left out).
__device__ __forceinline__ float decay_between(const float* totals, int i, int j, bool with_diagonal) {
  return j < i || (with_diagonal && j == i) ? __expf(totals[i] - totals[j]) : 0.0f;
}

// sums[n][e] times the decay between its tokens.
__device__ __forceinline__ void decay_products(RowSums& sums, const float* totals, int tile, int lane,
                                               bool with_diagonal) {
#pragma unroll
  for (int n = 0; n < 2 * kTokenTiles; ++n) {
    if (n / 2 > tile) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * tile + lane / 4 + e / 2 * 8, j = 8 * n + lane % 4 * 2 + e % 2;
      sums[n][e] *= decay_between(totals, i, j, with_diagonal);
    }
  }
}

__device__ __forceinline__ void write_scores(uint4* scores, int tile, int lane, const RowSums& sums) {
#pragma unroll
  for (int n = 0; n < kTokenTiles; ++n) {
    if (n > tile) continue;
    u32 fragment[4];
    pack_fragment(fragment, sums[2 * n], sums[2 * n + 1]);
    store_fragment(scores + (tile * (tile + 1) / 2 + n) * kWarp + lane, fragment);
  }
}

__device__ __forceinline__ void write_system(InverseShared& system, const float* betas, int tile, int lane,
                                             const RowSums& sums) {
#pragma unroll
  for (int n = 0; n < 2 * kTokenTiles; ++n) {
    if (n / 2 > tile) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * tile + lane / 4 + e / 2 * 8, j = 8 * n + lane % 4 * 2 + e % 2;
      put_system(system, i, j, betas[i] * sums[n][e]);
    }
  }
}

// The warp's column of blocks of the inverse, by itself and times diag(beta exp(G)).
template <int kKeyDim>
__device__ __forceinline__ void write_inverse(SolveShared<kKeyDim>& shared, int warp, int lane,
                                              const SplitFragment (&blocks)[kTokenTiles]) {
  const int column = 16 * warp + lane / 4;
  float factors[2];
#pragma unroll
  for (int half = 0; half < 2; ++half)
    factors[half] = shared.betas[column + 8 * half] * __expf(shared.totals[column + 8 * half]);
#pragma unroll
  for (int row = 0; row < kTokenTiles; ++row) {
    if (row < warp) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // registers of a fragment: 8 rows further (here columns), then 8 columns
      const int at = (column + i % 2 * 8) * kInversePitch + 16 * row + lane % 4 * 2 + i / 2 * 8;
      const float2 two = blocks[row].pair(i);
      *reinterpret_cast<u32*>(shared.inverse + at) = blocks[row].high[i];
      *reinterpret_cast<u32*>(shared.key_inverse + at) = pack2<f16>(two.x * factors[i % 2], two.y * factors[i % 2]);
    }
  }
}

// ---- W --------------------------------------------------------------------------------------------------------------

// K of the warp's quarter of the keys, as the scan reads it.
template <int kKeyDim>
struct OwnKeys {
  static constexpr int kOwnTiles = kKeyDim / 16 / kChunkWarps;
  u32 tiles[kOwnTiles][kTokenTiles][4];

  __device__ __forceinline__ void load(const f16* keys, int warp, int lane) {
#pragma unroll
    for (int t = 0; t < kOwnTiles; ++t)
#pragma unroll
      for (int step = 0; step < kTokenTiles; ++step)
        load_b_rows<kKeyDim + kPad>(tiles[t][step], keys, 16 * step, (warp * kOwnTiles + t) * 16, lane);
  }
  __device__ __forceinline__ void save(uint4* target, int warp, int lane) const {
#pragma unroll
    for (int t = 0; t < kOwnTiles; ++t)
#pragma unroll
      for (int step = 0; step < kTokenTiles; ++step)
        store_fragment(target + ((warp * kOwnTiles + t) * kTokenTiles + step) * kWarp + lane, tiles[t][step]);
  }
  // Its columns of W.
  __device__ __forceinline__ void write_reads(const f16* key_inverse, uint4* reads, int warp, int lane) const {
#pragma unroll
    for (int row = 0; row < kTokenTiles; ++row) {
      float sums[2 * kOwnTiles][4];
      clear(sums);
#pragma unroll
      for (int step = 0; step <= row; ++step) {
        u32 a[4];
        load_a_trans<kInversePitch>(a, key_inverse, 16 * row, 16 * step, lane);
#pragma unroll
        for (int t = 0; t < kOwnTiles; ++t) multiply_pair(sums[2 * t], sums[2 * t + 1], a, tiles[t][step]);
      }
#pragma unroll
      for (int t = 0; t < kOwnTiles; ++t) {
        u32 a[4];
        pack_fragment(a, sums[2 * t], sums[2 * t + 1]);
        const u32 b[4] = {a[0], a[2], a[1], a[3]};  // the transpose as b
        store_fragment(reads + (row * (kKeyDim / 16) + warp * kOwnTiles + t) * kWarp + lane, b);
      }
    }
  }
};

// ---- U --------------------------------------------------------------------------------------------------------------

// The warp's rows of kSolveColumns columns of V: a lane has 4 of each.
template <typename T>
struct ValueRows {
  uint2 rows[kOwnRows];

  __device__ __forceinline__ static int token(int step) { return threadIdx.x / kWarp * kOwnRows + step; }
  __device__ __forceinline__ static int column() { return threadIdx.x % kWarp * 4; }

  __device__ __forceinline__ void load(const GatedDeltaParams& p, const Chunk& chunk, int head, int first) {
    const T* source = static_cast<const T*>(p.v) + static_cast<i64>(head) * p.value_dim + first + column();
    const bool is_real = first + column() < p.value_dim;
    source += (chunk.first + token(0)) * p.v_stride;
#pragma unroll
    for (int s = 0; s < kOwnRows; ++s) {
      rows[s] = is_real && token(s) < chunk.length ? *reinterpret_cast<const uint2*>(source) : make_uint2(0, 0);
      source += p.v_stride;
    }
  }
  __device__ __forceinline__ float largest() const {
    float amax = 0.0f;
#pragma unroll
    for (int s = 0; s < kOwnRows; ++s) {
      const float2 low = unpack2<T>(rows[s].x), high = unpack2<T>(rows[s].y);
      amax = fmaxf(amax, fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y))));
    }
    return warp_max(amax);
  }
  // Times beta and the factor, columns in the order of column_in_group.
  __device__ __forceinline__ void store(f16* tile, const float* betas, float factor) const {
    const int pair = column() % 8 / 2, at = column() / kGroup * kGroup + 8 * pair + column() % kGroup / 8 * 2;
#pragma unroll
    for (int s = 0; s < kOwnRows; ++s) {
      const float by = betas[token(s)] * factor;
      const float2 low = unpack2<T>(rows[s].x), high = unpack2<T>(rows[s].y);
      f16* place = tile + token(s) * kValuePitch + at;
      *reinterpret_cast<u32*>(place) = pack2<f16>(low.x * by, low.y * by);
      *reinterpret_cast<u32*>(place + 8) = pack2<f16>(high.x * by, high.y * by);
    }
  }
};

// U^T of the warp's kGroup columns of the tile to the workspace; returns the largest.
__device__ __forceinline__ float write_values(const f16* values, const f16* inverse, uint4* target, int warp,
                                              int lane) {
  u32 a[kHalves][kTokenTiles][4];
#pragma unroll
  for (int half = 0; half < kHalves; ++half)
#pragma unroll
    for (int step = 0; step < kTokenTiles; ++step)
      load_a_trans<kValuePitch>(a[half][step], values, warp * kGroup + 16 * half, 16 * step, lane);
  float amax = 0.0f;
#pragma unroll
  for (int tile = 0; tile < kTokenTiles; ++tile) {
    float sums[kHalves][2][4];
#pragma unroll
    for (int half = 0; half < kHalves; ++half) clear(sums[half]);
#pragma unroll
    for (int step = 0; step <= tile; ++step) {
      u32 b[4];
      load_b_rows<kInversePitch>(b, inverse, 16 * step, 16 * tile, lane);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) multiply_pair(sums[half][0], sums[half][1], a[half][step], b);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      u32 fragment[4];
      pack_fragment(fragment, sums[half][0], sums[half][1]);
      store_fragment(target + (half * kTokenTiles + tile) * kWarp + lane, fragment);
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) amax = fmaxf(amax, fabsf(sums[half][n][i]));
    }
  }
  return warp_max(amax);
}

// ---- the kernel -----------------------------------------------------------------------------------------------------

// What one block works on.
template <typename T, int kKeyDim>
struct Solve {
  const GatedDeltaParams& p;
  SolveShared<kKeyDim>& shared;
  const Chunk chunk;
  const ChunkPlace at;
  int head, warp, lane;

  __device__ __forceinline__ bool saves_keys() const { return head % p.group == 0; }

  __device__ __forceinline__ void load_units() const {
    UnitRows<T, kKeyDim> queries, keys;
    queries.load(p.q, chunk, p.q_stride, head / p.group);
    keys.load(p.k, chunk, p.k_stride, head / p.group);
    queries.store(shared.queries);
    keys.store(shared.keys);
    if (warp == 0) sum_decays(p, chunk, head, lane, shared.totals, shared.betas);
  }
  // P, and A in place of q; a warp has one of each four rows of blocks, long and short.
  __device__ __forceinline__ void multiply_keys() const {
    RowSums sums;
    const int long_tile = kTokenTiles - 1 - warp;
    products<kKeyDim>(shared.queries, shared.keys, long_tile, lane, saves_keys() ? at.queries() : nullptr, sums);
    decay_products(sums, shared.totals, long_tile, lane, true);
    write_scores(at.scores(), long_tile, lane, sums);
    products<kKeyDim>(shared.keys, shared.keys, warp, lane, nullptr, sums);
    decay_products(sums, shared.totals, warp, lane, false);
    __syncthreads();  // the system takes the place of the queries
    write_system(shared.system, shared.betas, warp, lane, sums);
  }
  __device__ __forceinline__ void invert() const {
    SplitFragment blocks[kTokenTiles];
    invert_diagonal(shared.system, warp, lane);
    __syncthreads();
    invert_below(shared.system, warp, lane, blocks);
    __syncthreads();  // the inverses take the place of the system
    write_inverse(shared, warp, lane, blocks);
  }
  __device__ __forceinline__ void write_reads() const {
    OwnKeys<kKeyDim> keys;
    keys.load(shared.keys, warp, lane);
    if (saves_keys()) keys.save(at.keys(), warp, lane);
    keys.write_reads(shared.key_inverse, at.reads(), warp, lane);
  }
  // U of kSolveColumns columns from `first` on, in place of the keys.
  __device__ __forceinline__ void write_values(const ValueRows<T>& rows, int first) const {
    const float amax = rows.largest();
    if (lane == 0) shared.largest[warp] = amax;
    __syncthreads();  // what was in the tile is read
    float largest = 0.0f;
#pragma unroll
    for (int w = 0; w < kChunkWarps; ++w) largest = fmaxf(largest, shared.largest[w]);
    // Each of the 64 updates can be as large as all of V before it together: 2^6 of room.
    const int exponent = half_exponent(largest) - 6;
    rows.store(shared.values, shared.betas, power_of_two(exponent));
    __syncthreads();
    const int group = first / kGroup + warp;
    if (group * kGroup >= p.value_dim) return;
    uint4* target = at.values() + group * (kHalves * kTokenTiles * kWarp);
    const float stored = edgellm::write_values(shared.values, shared.inverse, target, warp, lane);
    if (lane == 0) at.scales()[group] = {stored * power_of_two(-exponent), exponent, 0, 0};
  }
};

// Grid: x places from p.first_place on, y heads.
template <typename T, int kKeyDim>
__global__ void __launch_bounds__(kChunkThreads, 4) delta_solve(const __grid_constant__ GatedDeltaParams p) {
  __shared__ SolveShared<kKeyDim> shared;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, head = blockIdx.y;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Chunk chunk = chunk_at(p, p.first_place + blockIdx.x);
  if (chunk.length == 0) return;
  const Solve<T, kKeyDim> solve{p, shared, chunk, ChunkPlace(p, blockIdx.x, head), head, warp, lane};
  solve.load_units();
  __syncthreads();
  if (threadIdx.x < kChunk) solve.at.totals()[threadIdx.x] = shared.totals[threadIdx.x];
  solve.multiply_keys();
  __syncthreads();
  solve.invert();
  __syncthreads();
  solve.write_reads();
#pragma unroll 1
  for (int first = 0; first < p.value_dim; first += kSolveColumns) {
    ValueRows<T> rows;
    rows.load(p, chunk, head, first);
    solve.write_values(rows, first);
  }
}

}  // namespace edgellm
