// Gated delta rule of long rows, kChunk tokens at a time (the WY and UT transforms of Yang et al., 2024).
// Axes as in gated_delta.cu.  Of a chunk: tokens i and j, G_i = sum of its decays up to i, S the state before it:
//   A_ij = beta_i (k_i . k_j) exp(G_i - G_j), j < i
//   U = (1 + A)^-1 diag(beta) V           ("values")
//   W = (1 + A)^-1 diag(beta exp(G)) K    ("reads": what the updates take back of the old state)
//   X = U - W S;   out_i = scale (exp(G_i) S^T q_i + sum_{j <= i} P_ij X_j),   P_ij = (q_i . k_j) exp(G_i - G_j)
//   S = exp(G_last) S + sum_j k_j exp(G_last - G_j) X_j^T
// delta_solve makes U, W and P of every chunk, all at once; delta_scan goes through the chunks of a row in order.
// Products are of float16 with float sums: q and k have unit length, W and P are at most about 1, and S and X are
// brought near 2^13 by a power of two first, so that neither their range nor that of bfloat16 rows matters.
// Workspace, by place: chunk c of row n has place query_start[n] / kChunk + n + c, less p.first_place.
//   units (place, heads / group, 2 (q, k), kChunk, key_dim) f16    reads (place, heads, kChunk, key_dim) f16
//   scores (place, heads, kChunk, kChunk) f16, on and left of the diagonal's 16 x 16 blocks
//   values (place, heads, kChunk, value_dim) float                 totals (place, heads, kChunk) float: G
#include "delta_rows.cuh"
#include "mma.cuh"

namespace edgellm {

constexpr int kChunk = 64;
constexpr int kChunkThreads = 128;
constexpr int kChunkWarps = kChunkThreads / kWarp;
constexpr int kScanColumns = 32;
constexpr int kPad = 8;          // elements: rows of a shared tile start in different banks
constexpr float kLeast = -90.0f;  // of a decay: exp is 0 from here on

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

// The exponent e for which values up to `amax` times 2^e stay below 2^14.
__device__ __forceinline__ int half_exponent(float amax) {
  return max(-120, min(120, 13 - ((__float_as_int(amax) >> 23 & 255) - 127)));
}
__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// ---- tiles of float16 in shared memory -----------------------------------------------------------------------------

template <int kPitch>
__device__ __forceinline__ void load_a(u32 (&a)[4], const f16* tile, int row, int column, int lane) {
  ldmatrix_x4(a, shared_address(tile + (row + lane % 16) * kPitch + column + lane / 16 * 8));
}
// The transpose of what is stored: a's rows are the tile's columns.
template <int kPitch>
__device__ __forceinline__ void load_a_trans(u32 (&a)[4], const f16* tile, int row, int column, int lane) {
  const int part = lane / 8;
  ldmatrix_x4_trans(a, shared_address(tile + (column + lane % 8 + part / 2 * 8) * kPitch + row + part % 2 * 8));
}
// 16 columns of b, stored by column: two operands.
template <int kPitch>
__device__ __forceinline__ void load_b_columns(u32 (&b)[2][2], const f16* tile, int depth, int column, int lane) {
  const int part = lane / 8;
  u32 four[4];
  ldmatrix_x4(four, shared_address(tile + (column + lane % 8 + part / 2 * 8) * kPitch + depth + part % 2 * 8));
  b[0][0] = four[0], b[0][1] = four[1], b[1][0] = four[2], b[1][1] = four[3];
}
// 16 columns of b, stored by row.
template <int kPitch>
__device__ __forceinline__ void load_b_rows(u32 (&b)[2][2], const f16* tile, int depth, int column, int lane) {
  u32 four[4];
  ldmatrix_x4_trans(four, shared_address(tile + (depth + lane % 16) * kPitch + column + lane / 16 * 8));
  b[0][0] = four[0], b[0][1] = four[1], b[1][0] = four[2], b[1][1] = four[3];
}

// ---- delta_solve: a block for a chunk and a head of v --------------------------------------------------------------

constexpr int kSolveColumns = 128;  // of v, at once
constexpr int kInversePitch = kChunk + kPad;

template <int kKeyDim>
struct SolveShared {
  static constexpr int kPitch = kKeyDim + kPad;
  static constexpr int kSystemPitch = kChunk + 4;
  static constexpr int kValuePitch = kSolveColumns + kPad;
  alignas(16) f16 keys[kChunk * kPitch];
  union {  // one after the other
    alignas(16) f16 queries[kChunk * kPitch];
    alignas(16) float system[kChunk * kSystemPitch];       // A by column: system[j][i]
    alignas(16) f16 key_inverse[kChunk * kInversePitch];  // (1 + A)^-1 diag(beta exp(G))
    alignas(16) f16 values[kChunk * kValuePitch];         // diag(beta) V
  };
  alignas(16) f16 inverse[kChunk * kInversePitch];
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

// One head of the chunk's rows, of unit length with is_unit, to shared memory and, unless null, to the workspace.
template <typename T, int kKeyDim>
__device__ __forceinline__ void load_units(const GatedDeltaParams& p, const Chunk& chunk, const void* rows, i64 stride,
                                           int key_head, f16* tile, f16* saved) {
  constexpr int kParts = kKeyDim / kWarp, kPitch = kKeyDim + kPad;
  const int lane = threadIdx.x % kWarp;
  const int first = lane * kParts;
#pragma unroll 4
  for (int token = threadIdx.x / kWarp; token < kChunk; token += kChunkWarps) {
    const T* source = static_cast<const T*>(rows) + (chunk.first + token) * stride + key_head * kKeyDim;
    float values[kParts], squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) values[i] = 0.0f;
    if (token < chunk.length) load_floats(source + first, values);
#pragma unroll
    for (int i = 0; i < kParts; ++i) squares = fmaf(values[i], values[i], squares);
    const float unit = p.is_unit ? rsqrtf(warp_sum(squares) + kUnitEps) : 1.0f;
#pragma unroll
    for (int i = 0; i < kParts; ++i) values[i] *= unit;
    store_floats(tile + token * kPitch + first, values);
    if (saved != nullptr) store_floats(saved + token * kKeyDim + first, values);
  }
}

// Products of the warp's 16 rows of `left` with the keys up to its last row: sums[n] is columns 8 n on.
template <int kKeyDim>
__device__ __forceinline__ void products(const f16* left, const f16* keys, int warp, int lane,
                                         float (&sums)[kChunk / 8][4]) {
  constexpr int kPitch = kKeyDim + kPad;
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
#pragma unroll 2
  for (int depth = 0; depth < kKeyDim; depth += 16) {
    u32 a[4];
    load_a<kPitch>(a, left, 16 * warp, depth, lane);
#pragma unroll
    for (int n = 0; n < kChunk / 16; ++n) {
      if (n > warp) continue;
      u32 b[2][2];
      load_b_columns<kPitch>(b, keys, depth, 16 * n, lane);
      mma_16816<f16>(sums[2 * n], a, b[0]);
      mma_16816<f16>(sums[2 * n + 1], a, b[1]);
    }
  }
}

// exp(G_i - G_j), or 0 above the diagonal (and on it, when it is left out).
__device__ __forceinline__ float decay_between(const float* totals, int i, int j, bool with_diagonal) {
  return j < i || (with_diagonal && j == i) ? __expf(totals[i] - totals[j]) : 0.0f;
}

template <int kKeyDim>
__device__ __forceinline__ void write_scores(const SolveShared<kKeyDim>& shared, f16* scores, int warp, int lane) {
  float sums[kChunk / 8][4];
  products<kKeyDim>(shared.queries, shared.keys, warp, lane, sums);
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
    if (n / 2 > warp) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 16 * warp + lane / 4 + 8 * half, j = 8 * n + lane % 4 * 2;
      const float low = sums[n][2 * half] * decay_between(shared.totals, i, j, true);
      const float high = sums[n][2 * half + 1] * decay_between(shared.totals, i, j + 1, true);
      *reinterpret_cast<u32*>(scores + i * kChunk + j) = pack2<f16>(low, high);
    }
  }
}

template <int kKeyDim>
__device__ __forceinline__ void write_system(SolveShared<kKeyDim>& shared, int warp, int lane) {
  float sums[kChunk / 8][4];
  products<kKeyDim>(shared.keys, shared.keys, warp, lane, sums);
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) {
    if (n / 2 > warp) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int i = 16 * warp + lane / 4 + e / 2 * 8, j = 8 * n + lane % 4 * 2 + e % 2;
      shared.system[j * SolveShared<kKeyDim>::kSystemPitch + i] =
          shared.betas[i] * sums[n][e] * decay_between(shared.totals, i, j, false);
    }
  }
}

// A column of (1 + A)^-1, by substitution from the first row down.
template <int kPitch>
__device__ __forceinline__ void invert_column(const float* system, int column, float (&x)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk; ++i) x[i] = i == column ? 1.0f : 0.0f;
#pragma unroll
  for (int j = 0; j < kChunk - 1; ++j) {
#pragma unroll
    for (int start = (j + 1) / 4 * 4; start < kChunk; start += 4) {
      float a[4];
      load_floats(system + j * kPitch + start, a);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (start + i > j) x[start + i] = fmaf(-a[i], x[j], x[start + i]);
    }
  }
}

// The inverse in float16, by itself and times diag(beta exp(G)).  Every thread calls it.
template <int kKeyDim>
__device__ __forceinline__ void invert_system(SolveShared<kKeyDim>& shared) {
  const int column = threadIdx.x;
  float x[kChunk];
  if (column < kChunk) invert_column<SolveShared<kKeyDim>::kSystemPitch>(shared.system, column, x);
  __syncthreads();  // the second inverse takes the place of the system
  if (column >= kChunk) return;
  const float factor = shared.betas[column] * __expf(shared.totals[column]);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    shared.inverse[i * kInversePitch + column] = __float2half_rn(x[i]);
    shared.key_inverse[i * kInversePitch + column] = __float2half_rn(x[i] * factor);
  }
}

// The largest of a value of each thread, for all of them.
__device__ __forceinline__ float largest_of_block(float value, float (&scratch)[kChunkWarps]) {
  value = warp_max(value);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kChunkWarps; ++w) value = fmaxf(value, scratch[w]);
  return value;
}

// kSolveColumns columns of diag(beta) V from `first` on, times a power of two whose inverse is returned.
template <typename T, int kKeyDim>
__device__ __forceinline__ float load_values(const GatedDeltaParams& p, const Chunk& chunk, int head, int first,
                                             SolveShared<kKeyDim>& shared) {
  const int column = threadIdx.x;
  const bool is_real = first + column < p.value_dim;
  const T* v = static_cast<const T*>(p.v) + chunk.first * p.v_stride + static_cast<i64>(head) * p.value_dim;
  v += first + column;
  float values[kChunk], amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kChunk; ++i, v += p.v_stride) {
    values[i] = is_real && i < chunk.length ? shared.betas[i] * to_float(*v) : 0.0f;
    amax = fmaxf(amax, fabsf(values[i]));
  }
  // Behind the barrier in it nobody reads what the values take the place of.
  const int exponent = half_exponent(largest_of_block(amax, shared.largest));
  const float factor = power_of_two(exponent);
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    shared.values[i * SolveShared<kKeyDim>::kValuePitch + column] = __float2half_rn(values[i] * factor);
  __syncthreads();
  return power_of_two(-exponent);
}

// The warp's 16 rows of left (lower triangular) times 64 columns of right from `column` on.
template <int kPitch>
__device__ __forceinline__ void solve_rows(const f16* left, const f16* right, int column, int warp, int lane,
                                           float (&sums)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    if (step > warp) continue;
    u32 a[4];
    load_a<kInversePitch>(a, left, 16 * warp, 16 * step, lane);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      u32 b[2][2];
      load_b_rows<kPitch>(b, right, 16 * step, column + 16 * n, lane);
      mma_16816<f16>(sums[2 * n], a, b[0]);
      mma_16816<f16>(sums[2 * n + 1], a, b[1]);
    }
  }
}

template <int kKeyDim>
__device__ __forceinline__ void write_reads(const SolveShared<kKeyDim>& shared, f16* reads, int warp, int lane) {
#pragma unroll 1
  for (int column = 0; column < kKeyDim; column += 64) {
    float sums[8][4];
    solve_rows<SolveShared<kKeyDim>::kPitch>(shared.key_inverse, shared.keys, column, warp, lane, sums);
    f16* place = reads + (16 * warp + lane / 4) * kKeyDim + column + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      *reinterpret_cast<u32*>(place + 8 * n) = pack2<f16>(sums[n][0], sums[n][1]);
      *reinterpret_cast<u32*>(place + 8 * kKeyDim + 8 * n) = pack2<f16>(sums[n][2], sums[n][3]);
    }
  }
}

// Columns [first, first + kSolveColumns) of U, as far as there are any.
template <int kKeyDim>
__device__ __forceinline__ void write_values(const GatedDeltaParams& p, const SolveShared<kKeyDim>& shared,
                                             float* values, int first, float factor, int warp, int lane) {
#pragma unroll 1
  for (int column = 0; column < kSolveColumns && first + column < p.value_dim; column += 64) {
    float sums[8][4];
    solve_rows<SolveShared<kKeyDim>::kValuePitch>(shared.inverse, shared.values, column, warp, lane, sums);
    float* place = values + static_cast<i64>(16 * warp + lane / 4) * p.value_dim + first + column + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      if (first + column + 8 * n >= p.value_dim) continue;
      *reinterpret_cast<float2*>(place + 8 * n) = make_float2(sums[n][0] * factor, sums[n][1] * factor);
      *reinterpret_cast<float2*>(place + static_cast<i64>(8) * p.value_dim + 8 * n) =
          make_float2(sums[n][2] * factor, sums[n][3] * factor);
    }
  }
}

// Grid: x places from p.first_place on, y heads.
template <typename T, int kKeyDim>
__global__ void __launch_bounds__(kChunkThreads, 4) delta_solve(const __grid_constant__ GatedDeltaParams p) {
  __shared__ SolveShared<kKeyDim> shared;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, head = blockIdx.y, key_head = head / p.group;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Chunk chunk = chunk_at(p, p.first_place + blockIdx.x);
  if (chunk.length == 0) return;
  const i64 place = static_cast<i64>(blockIdx.x) * p.heads + head;
  const int key_heads = p.heads / p.group;
  const i64 units_at = (static_cast<i64>(blockIdx.x) * key_heads + key_head) * (2 * kChunk * kKeyDim);
  f16* units = head % p.group == 0 ? static_cast<f16*>(p.units) + units_at : nullptr;  // one head of the group saves
  if (warp == 0) sum_decays(p, chunk, head, lane, shared.totals, shared.betas);
  load_units<T, kKeyDim>(p, chunk, p.q, p.q_stride, key_head, shared.queries, units);
  load_units<T, kKeyDim>(p, chunk, p.k, p.k_stride, key_head, shared.keys,
                         units == nullptr ? nullptr : units + kChunk * kKeyDim);
  __syncthreads();
  if (threadIdx.x < kChunk) p.totals[place * kChunk + threadIdx.x] = shared.totals[threadIdx.x];
  write_scores<kKeyDim>(shared, static_cast<f16*>(p.scores) + place * kChunk * kChunk, warp, lane);
  __syncthreads();  // the system takes the place of the queries
  write_system<kKeyDim>(shared, warp, lane);
  __syncthreads();
  invert_system<kKeyDim>(shared);
  __syncthreads();
  write_reads<kKeyDim>(shared, static_cast<f16*>(p.reads) + place * (kChunk * kKeyDim), warp, lane);
#pragma unroll 1
  for (int first = 0; first < p.value_dim; first += kSolveColumns) {
    const float factor = load_values<T, kKeyDim>(p, chunk, head, first, shared);
    write_values<kKeyDim>(p, shared, p.values + place * kChunk * p.value_dim, first, factor, warp, lane);
  }
}

// ---- delta_scan: a block for a row, a head of v and kScanColumns columns -------------------------------------------

constexpr int kScanPitch = kScanColumns + kPad;
constexpr int kScorePitch = kChunk + kPad;

template <int kKeyDim>
struct ScanShared {
  static constexpr int kPitch = kKeyDim + kPad;
  alignas(16) f16 reads[kChunk * kPitch];
  alignas(16) f16 queries[kChunk * kPitch];
  alignas(16) f16 keys[kChunk * kPitch];
  alignas(16) f16 scores[kChunk * kScorePitch];
  alignas(16) f16 state[kKeyDim * kScanPitch];
  alignas(16) f16 updates[kChunk * kScanPitch];  // X
  alignas(16) f16 decayed[kChunk * kScanPitch];  // X_j exp(G_last - G_j)
  float largest[2][kChunkWarps];
};

// Rows of kWidth float16 from the workspace to a tile, by the whole block.
template <int kRows, int kWidth>
__device__ __forceinline__ void copy_tile(f16* tile, const f16* source) {
  constexpr int kVectors = kRows * kWidth / 8;
#pragma unroll
  for (int i = 0; i < kVectors / kChunkThreads; ++i) {
    const int vector = i * kChunkThreads + threadIdx.x;
    const int row = vector / (kWidth / 8), column = vector % (kWidth / 8) * 8;
    cp_async_16(shared_address(tile + row * (kWidth + kPad) + column), source + vector * 8);
  }
}

// What the warps noted.
__device__ __forceinline__ float largest_noted(const float (&largest)[kChunkWarps]) {
  float amax = 0.0f;
#pragma unroll
  for (int w = 0; w < kChunkWarps; ++w) amax = fmaxf(amax, largest[w]);
  return amax;
}

template <int N>
__device__ __forceinline__ float largest_of(const float (&tiles)[N][4], float amax) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) amax = fmaxf(amax, fabsf(tiles[n][i]));
  return amax;
}

// Two rows (lane / 4 and 8 further) of 8 columns a tile to shared memory as float16.
template <int N>
__device__ __forceinline__ void publish(f16* tile, int row, int lane, const float (&tiles)[N][4], float low_factor,
                                        float high_factor) {
  f16* place = tile + (row + lane / 4) * kScanPitch + lane % 4 * 2;
#pragma unroll
  for (int n = 0; n < N; ++n) {
    *reinterpret_cast<u32*>(place + 8 * n) = pack2<f16>(tiles[n][0] * low_factor, tiles[n][1] * low_factor);
    *reinterpret_cast<u32*>(place + 8 * kScanPitch + 8 * n) =
        pack2<f16>(tiles[n][2] * high_factor, tiles[n][3] * high_factor);
  }
}

constexpr int kScanTiles = kScanColumns / 8;

// sums += a (16 rows) b, with b's kScanColumns columns stored by row.
__device__ __forceinline__ void multiply(float (&sums)[kScanTiles][4], const u32 (&a)[4],
                                         const u32 (&b)[kScanTiles / 2][2][2]) {
#pragma unroll
  for (int n = 0; n < kScanTiles; ++n) mma_16816<f16>(sums[n], a, b[n / 2][n % 2]);
}
__device__ __forceinline__ void load_columns(u32 (&b)[kScanTiles / 2][2][2], const f16* tile, int depth, int lane) {
#pragma unroll
  for (int n = 0; n < kScanTiles / 2; ++n) load_b_rows<kScanPitch>(b[n], tile, depth, 16 * n, lane);
}
template <int N>
__device__ __forceinline__ void clear(float (&sums)[N][4]) {
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
}

// G of a lane's two rows, and of the chunk's last token.
struct Totals {
  float low, high, last;
};

// What one block of delta_scan works on.  A warp has 16 tokens of a chunk, and kStateTiles * 16 rows of the state.
template <typename T, int kKeyDim>
struct Scan {
  static constexpr int kPitch = kKeyDim + kPad;
  static constexpr int kStateTiles = kKeyDim / (16 * kChunkWarps);

  const GatedDeltaParams& p;
  ScanShared<kKeyDim>& shared;
  StateRow row;
  int head, column;  // the first of the block's
  int warp, lane;
  float state[kStateTiles][kScanTiles][4];

  __device__ __forceinline__ i64 place(int chunk) const {
    const int at = row.first / kChunk + static_cast<int>(blockIdx.z) + chunk - p.first_place;
    return static_cast<i64>(at) * p.heads + head;
  }
  __device__ __forceinline__ const f16* units(int chunk) const {
    const int key_heads = p.heads / p.group;
    const i64 at = (place(chunk) - head) / p.heads * key_heads + head / p.group;
    return static_cast<const f16*>(p.units) + at * (2 * kChunk * kKeyDim);
  }
  __device__ __forceinline__ void fetch_reads(int chunk) const {
    copy_tile<kChunk, kKeyDim>(shared.reads, static_cast<const f16*>(p.reads) + place(chunk) * (kChunk * kKeyDim));
    copy_tile<kChunk, kKeyDim>(shared.queries, units(chunk));
  }
  __device__ __forceinline__ void fetch_keys(int chunk) const {
    copy_tile<kChunk, kKeyDim>(shared.keys, units(chunk) + kChunk * kKeyDim);
    copy_tile<kChunk, kChunk>(shared.scores, static_cast<const f16*>(p.scores) + place(chunk) * (kChunk * kChunk));
  }

  // Each lane's elements of the state: two rows of two columns a tile.
  template <typename Do>
  __device__ __forceinline__ void each_pair(Do&& work) {
    float* home = p.state + row.slot * p.state_stride + static_cast<i64>(head) * kKeyDim * p.value_dim + column;
#pragma unroll
    for (int m = 0; m < kStateTiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kScanTiles; ++n) {
          const int d = (warp * kStateTiles + m) * 16 + lane / 4 + 8 * half;
          work(home + static_cast<i64>(d) * p.value_dim + 8 * n + lane % 4 * 2, &state[m][n][2 * half]);
        }
  }
  __device__ __forceinline__ void load_state() {
    each_pair([](const float* place, float* pair) {
      const float2 two = *reinterpret_cast<const float2*>(place);
      pair[0] = two.x, pair[1] = two.y;
    });
  }
  __device__ __forceinline__ void store_state() {
    each_pair([](float* place, const float* pair) {
      *reinterpret_cast<float2*>(place) = make_float2(pair[0], pair[1]);
    });
  }
  __device__ __forceinline__ void note_largest_state() const {
    float amax = 0.0f;
#pragma unroll
    for (int m = 0; m < kStateTiles; ++m) amax = largest_of(state[m], amax);
    amax = warp_max(amax);
    if (lane == 0) shared.largest[0][warp] = amax;
  }
  __device__ __forceinline__ int publish_state() const {
    const int exponent = half_exponent(largest_noted(shared.largest[0]));
    const float factor = power_of_two(exponent);
#pragma unroll
    for (int m = 0; m < kStateTiles; ++m)
      publish(shared.state, (warp * kStateTiles + m) * 16, lane, state[m], factor, factor);
    return exponent;
  }

  // U of this lane: rows lane / 4 and 8 further of the warp's.
  __device__ __forceinline__ void load_values(int chunk, float (&sums)[kScanTiles][4]) const {
    const float* values = p.values + (place(chunk) * kChunk + 16 * warp + lane / 4) * p.value_dim;
    values += column + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kScanTiles; ++n) {
      const float2 low = *reinterpret_cast<const float2*>(values + 8 * n);
      const float2 high = *reinterpret_cast<const float2*>(values + 8 * p.value_dim + 8 * n);
      sums[n][0] = low.x, sums[n][1] = low.y, sums[n][2] = high.x, sums[n][3] = high.y;
    }
  }
  // W S and S^T q of the warp's tokens, both scaled as the published state.
  __device__ __forceinline__ void read_state(float (&taken)[kScanTiles][4], float (&recalled)[kScanTiles][4]) const {
    clear(taken);
    clear(recalled);
#pragma unroll 4
    for (int depth = 0; depth < kKeyDim; depth += 16) {
      u32 b[kScanTiles / 2][2][2], reads[4], queries[4];
      load_columns(b, shared.state, depth, lane);
      load_a<kPitch>(reads, shared.reads, 16 * warp, depth, lane);
      load_a<kPitch>(queries, shared.queries, 16 * warp, depth, lane);
      multiply(taken, reads, b);
      multiply(recalled, queries, b);
    }
  }
  // P X of the warp's tokens.
  __device__ __forceinline__ void read_updates(float (&within)[kScanTiles][4]) const {
    clear(within);
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      if (step > warp) continue;
      u32 b[kScanTiles / 2][2][2], scores[4];
      load_columns(b, shared.updates, 16 * step, lane);
      load_a<kScorePitch>(scores, shared.scores, 16 * warp, 16 * step, lane);
      multiply(within, scores, b);
    }
  }
  // S = kept S + factor K^T X.
  __device__ __forceinline__ void update_state(float kept, float factor) {
    float sums[kStateTiles][kScanTiles][4];
#pragma unroll
    for (int m = 0; m < kStateTiles; ++m) clear(sums[m]);
#pragma unroll
    for (int step = 0; step < kChunk / 16; ++step) {
      u32 b[kScanTiles / 2][2][2];
      load_columns(b, shared.decayed, 16 * step, lane);
#pragma unroll
      for (int m = 0; m < kStateTiles; ++m) {
        u32 keys[4];
        load_a_trans<kPitch>(keys, shared.keys, (warp * kStateTiles + m) * 16, 16 * step, lane);
        multiply(sums[m], keys, b);
      }
    }
#pragma unroll
    for (int m = 0; m < kStateTiles; ++m)
#pragma unroll
      for (int n = 0; n < kScanTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state[m][n][i] = fmaf(factor, sums[m][n][i], kept * state[m][n][i]);
  }
  __device__ __forceinline__ void store_out(int chunk, const float (&sums)[kScanTiles][4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int token = row.first + chunk * kChunk + 16 * warp + lane / 4 + 8 * half;
      if (token >= row.end) continue;
      T* out = static_cast<T*>(p.out) + token * p.out_stride + static_cast<i64>(head) * p.value_dim;
      out += column + lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kScanTiles; ++n)
        *reinterpret_cast<u32*>(out + 8 * n) = pack2<T>(sums[n][2 * half], sums[n][2 * half + 1]);
    }
  }

  __device__ __forceinline__ Totals load_totals(int chunk) const {
    const float* totals = p.totals + place(chunk) * kChunk;
    return {totals[16 * warp + lane / 4], totals[16 * warp + lane / 4 + 8], totals[kChunk - 1]};
  }
  // X to shared memory, by itself and decayed to the chunk's end; returns what undoes its scale.
  __device__ __forceinline__ float publish_updates(const Totals& totals, const float (&updates)[kScanTiles][4]) const {
    const int exponent = half_exponent(largest_noted(shared.largest[1]));
    const float up = power_of_two(exponent);
    publish(shared.updates, 16 * warp, lane, updates, up, up);
    publish(shared.decayed, 16 * warp, lane, updates, up * __expf(totals.last - totals.low),
            up * __expf(totals.last - totals.high));
    return power_of_two(-exponent);
  }
  // out of the warp's tokens: what they recall of the state, and of the chunk's updates.
  __device__ __forceinline__ void write_out(int chunk, const Totals& totals, float state_factor, float update_factor,
                                            float (&recalled)[kScanTiles][4]) const {
    float within[kScanTiles][4];
    read_updates(within);
    const float low = state_factor * __expf(totals.low), high = state_factor * __expf(totals.high);
#pragma unroll
    for (int n = 0; n < kScanTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        recalled[n][i] = p.scale * fmaf(i < 2 ? low : high, recalled[n][i], update_factor * within[n][i]);
    store_out(chunk, recalled);
  }

  // One chunk.  `exponent` is the published state's; reads and queries are on their way, then keys and scores.
  __device__ __forceinline__ void step(int chunk, bool has_next, int& exponent) {
    const Totals totals = load_totals(chunk);
    const float state_factor = power_of_two(-exponent);
    float updates[kScanTiles][4], taken[kScanTiles][4], recalled[kScanTiles][4];
    load_values(chunk, updates);
    cp_async_wait<1>();
    __syncthreads();  // reads and queries are here, and the state is published
    read_state(taken, recalled);
#pragma unroll
    for (int n = 0; n < kScanTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) updates[n][i] = fmaf(-state_factor, taken[n][i], updates[n][i]);
    const float amax = warp_max(largest_of(updates, 0.0f));
    if (lane == 0) shared.largest[1][warp] = amax;
    __syncthreads();
    if (has_next) fetch_reads(chunk + 1);
    cp_async_commit();
    const float update_factor = publish_updates(totals, updates);
    cp_async_wait<1>();
    __syncthreads();  // keys and scores are here, and the updates are published
    write_out(chunk, totals, state_factor, update_factor, recalled);
    update_state(__expf(totals.last), update_factor);
    note_largest_state();
    __syncthreads();
    if (has_next) fetch_keys(chunk + 1);
    cp_async_commit();
    exponent = publish_state();
  }
};

// Grid: x tiles of columns, y heads, z rows.  Dynamic shared memory: ScanShared.
template <typename T, int kKeyDim>
__global__ void __launch_bounds__(kChunkThreads, 2) delta_scan(const __grid_constant__ GatedDeltaParams p) {
  extern __shared__ __align__(16) u8 memory[];
  ScanShared<kKeyDim>& shared = *reinterpret_cast<ScanShared<kKeyDim>*>(memory);
  let_next_kernel_start();
  wait_for_previous_kernel();
  const StateRow row = delta_row(p, blockIdx.z);
  if (row.is_idle() || !goes_by_chunks(p, row)) return;
  const int base = row.first / kChunk + blockIdx.z;
  const int begin = max(0, p.first_place - base);
  const int end = min(ceil_div(row.length(), kChunk), p.first_place + p.num_places - base);
  if (begin >= end) return;
  Scan<T, kKeyDim> scan{p,
                        shared,
                        row,
                        static_cast<int>(blockIdx.y),
                        static_cast<int>(blockIdx.x) * kScanColumns,
                        static_cast<int>(threadIdx.x) / kWarp,
                        static_cast<int>(threadIdx.x) % kWarp,
                        {}};
  scan.fetch_reads(begin);
  cp_async_commit();
  scan.fetch_keys(begin);
  cp_async_commit();
  scan.load_state();
  scan.note_largest_state();
  __syncthreads();
  int exponent = scan.publish_state();
#pragma unroll 1
  for (int chunk = begin; chunk < end; ++chunk) scan.step(chunk, chunk + 1 < end, exponent);
  scan.store_state();
  cp_async_wait<0>();
}

}  // namespace edgellm
