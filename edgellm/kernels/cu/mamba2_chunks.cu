// The Mamba-2 selective scan of long sequences, kChunk tokens at a time on tensor cores: the state-space dual form (Dao
// and Gu, Transformers are SSMs, 2024, section 6).  Of a chunk that begins with state S, with L[t] = sum of dt a up to t:
//   out[t] = exp(L[t]) c[t] S^T + sum over s <= t of (c[t] . b[s]) exp(L[t] - L[s]) dt[s] x[s] + d x[t]
//   S'     = exp(L[end]) S + sum over s of exp(L[end] - L[s]) dt[s] x[s] b[s]^T
// Axes: token t and s of the chunk, row p of the state (kRows of a head's head_dim), column n (kColumns = state_dim).
// A block owns kRows rows of one head of one sequence and takes its chunks in turn; the state stays in float registers.
// Operands of products are rounded to T: c, b, x, the state of the chunk's beginning, and whatever is weighted.
// Warp w gives out rows 16 w.. of the chunk, and of the state 16 rows by a part of the columns.
#include "mamba2.cuh"
#include "mma.cuh"

namespace edgellm {

constexpr int kChunk = 64;
constexpr int kChunkThreads = 128;
constexpr float kLog2E = 1.4426950408889634f;

// Rows in shared memory, padded by 16 bytes so that the rows of a tile meet different banks.
template <typename T, int kWidth>
struct Panel {
  static constexpr int kPitch = kWidth * 2 + 16;
  u32 base;
  __device__ __forceinline__ u32 at(int row, int column) const { return base + row * kPitch + column * 2; }
};

template <typename T, int kColumns, int kRows>
struct ChunkLayout {
  static constexpr int kWideBytes = kChunk * Panel<T, kColumns>::kPitch;
  static constexpr int kStageBytes = 2 * kWideBytes + kChunk * Panel<T, kRows>::kPitch;
  static constexpr int kStateAt = 2 * kStageBytes;
  static constexpr int kDecaysAt = kStateAt + kRows * Panel<T, kColumns>::kPitch;
  static constexpr int kBytes = kDecaysAt + 2 * 3 * kChunk * 4;
};

// What one chunk brings; two of these are in shared memory.
template <typename T, int kColumns, int kRows>
struct ChunkStage {
  Panel<T, kColumns> b, c;
  Panel<T, kRows> x;

  __device__ __forceinline__ ChunkStage(u32 shared, int index) {
    using Layout = ChunkLayout<T, kColumns, kRows>;
    b.base = shared + index * Layout::kStageBytes;
    c.base = b.base + Layout::kWideBytes;
    x.base = c.base + Layout::kWideBytes;
  }

  template <int kWidth>
  static __device__ __forceinline__ void copy(const Panel<T, kWidth>& panel, const T* rows, i64 stride, int count) {
    constexpr int kPieces = kWidth / 8;
    static_assert(kChunk * kPieces % kChunkThreads == 0, "every thread copies as many pieces");
#pragma unroll
    for (int i = 0; i < kChunk * kPieces / kChunkThreads; ++i) {
      const int place = threadIdx.x + i * kChunkThreads, token = place / kPieces, column = place % kPieces * 8;
      const bool valid = token < count;
      cp_async_16_or_zero(panel.at(token, column), rows + (valid ? token * stride + column : 0), valid);
    }
  }

  // Tokens [first, first + count), zeros behind them; a group of its own.
  __device__ __forceinline__ void copy(const Mamba2Params& p, i64 first, int count, int head, int first_row) const {
    if (count > 0) {
      const i64 column = i64(head / (p.num_heads / p.num_groups)) * kColumns;
      copy(b, static_cast<const T*>(p.b) + first * p.b_stride + column, p.b_stride, count);
      copy(c, static_cast<const T*>(p.c) + first * p.c_stride + column, p.c_stride, count);
      const i64 row = i64(head) * p.head_dim + first_row;
      copy(x, static_cast<const T*>(p.x) + first * p.x_stride + row, p.x_stride, count);
    }
    cp_async_commit();
  }
};

// Of one chunk: L in units of log 2, dt, and what a token's x weighs in the state behind the chunk.
struct ChunkDecays {
  float* sums;
  float* steps;
  float* weights;

  __device__ __forceinline__ ChunkDecays(char* memory, int index) {
    sums = reinterpret_cast<float*>(memory) + index * 3 * kChunk;
    steps = sums + kChunk;
    weights = steps + kChunk;
  }

  // By one warp, whose lane holds the steps of tokens 2 lane and + 1.
  __device__ __forceinline__ void fill(float2 step, float rate) const {
    const int lane = threadIdx.x % kWarp;
    const float first = step.x * rate, second = step.y * rate;
    float total = first + second;
#pragma unroll
    for (int apart = 1; apart < kWarp; apart *= 2) {
      const float before = __shfl_up_sync(kFullMask, total, apart);
      if (lane >= apart) total += before;
    }
    const float before = __shfl_up_sync(kFullMask, total, 1);
    const float2 sum = make_float2((lane > 0 ? before : 0.0f) + first, total);
    const float end = __shfl_sync(kFullMask, total, kWarp - 1);
    *reinterpret_cast<float2*>(sums + 2 * lane) = sum;
    *reinterpret_cast<float2*>(steps + 2 * lane) = step;
    *reinterpret_cast<float2*>(weights + 2 * lane) =
        make_float2(exp2f(end - sum.x) * step.x, exp2f(end - sum.y) * step.y);
  }
};

// dt of tokens 2 lane and + 1 of [first, first + count), zero behind them.
__device__ __forceinline__ float2 chunk_steps(const Mamba2Params& p, i64 first, int count, int head) {
  const int token = threadIdx.x % kWarp * 2;
  const float* from = p.dt + (first + token) * p.dt_stride + head;
  return make_float2(token < count ? from[0] : 0.0f, token + 1 < count ? from[p.dt_stride] : 0.0f);
}

// Operands of mma: a (16 rows), from rows stored one after the other or (transposed) from stored columns; b (8 columns)
// of two neighbouring k steps, or (transposed) of one k step for two neighbouring tiles of columns.
template <typename T, int kWidth>
__device__ __forceinline__ void load_rows(u32 (&a)[4], const Panel<T, kWidth>& panel, int row, int k) {
  const int lane = threadIdx.x % kWarp;
  ldmatrix_x4(a, panel.at(row + lane % 16, k + lane / 16 * 8));
}
template <typename T, int kWidth>
__device__ __forceinline__ void load_rows_transposed(u32 (&a)[4], const Panel<T, kWidth>& panel, int row, int k) {
  const int lane = threadIdx.x % kWarp;
  ldmatrix_x4_trans(a, panel.at(k + lane / 16 * 8 + lane % 8, row + lane / 8 % 2 * 8));
}
template <typename T, int kWidth>
__device__ __forceinline__ void load_columns(u32 (&b)[4], const Panel<T, kWidth>& panel, int column, int k) {
  const int lane = threadIdx.x % kWarp;
  ldmatrix_x4(b, panel.at(column + lane % 8, k + lane / 8 * 8));
}
template <typename T, int kWidth>
__device__ __forceinline__ void load_columns_transposed(u32 (&b)[4], const Panel<T, kWidth>& panel, int column, int k) {
  const int lane = threadIdx.x % kWarp;
  ldmatrix_x4_trans(b, panel.at(k + lane % 16, column + lane / 16 * 8));
}

template <typename T>
__device__ __forceinline__ void mma_first(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[4]) {
  mma_16816<T>(sum, a, {b[0], b[1]});
}
template <typename T>
__device__ __forceinline__ void mma_second(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[4]) {
  mma_16816<T>(sum, a, {b[2], b[3]});
}

// A warp's part of the state: 16 rows by kTiles tiles of 8 columns.
template <typename T, int kColumns, int kRows>
struct ChunkState {
  static constexpr int kRowTiles = kRows / 16;
  static constexpr int kParts = kChunkThreads / kWarp / kRowTiles;  // of the columns
  static constexpr int kTiles = kColumns / 8 / kParts;
  static_assert(kParts * kRowTiles * kWarp == kChunkThreads && kTiles % 2 == 0, "warps share the state equally");
  float held[kTiles][4];
  int row, column;  // of the warp

  __device__ __forceinline__ ChunkState() {
    const int warp = threadIdx.x / kWarp;
    row = warp % kRowTiles * 16;
    column = warp / kRowTiles * kTiles * 8;
  }
  // Of held[tile][0] in (rows, kColumns); [2] stands 8 rows further on.
  __device__ __forceinline__ int place(int tile) const {
    const int lane = threadIdx.x % kWarp;
    return (row + lane / 4) * kColumns + column + tile * 8 + lane % 4 * 2;
  }

  __device__ __forceinline__ void load(const float* source) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float2 low = *reinterpret_cast<const float2*>(source + place(tile));
      const float2 high = *reinterpret_cast<const float2*>(source + place(tile) + 8 * kColumns);
      held[tile][0] = low.x, held[tile][1] = low.y, held[tile][2] = high.x, held[tile][3] = high.y;
    }
  }
  __device__ __forceinline__ void store(float* target) const {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      *reinterpret_cast<float2*>(target + place(tile)) = make_float2(held[tile][0], held[tile][1]);
      *reinterpret_cast<float2*>(target + place(tile) + 8 * kColumns) = make_float2(held[tile][2], held[tile][3]);
    }
  }
  // Rounded, for the products of the next chunk.
  __device__ __forceinline__ void publish(char* shared, const Panel<T, kColumns>& panel, u32 shared_base) const {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const u32 at = panel.at(row + lane / 4, column + tile * 8 + lane % 4 * 2) - shared_base;
      *reinterpret_cast<u32*>(shared + at) = pack2<T>(held[tile][0], held[tile][1]);
      *reinterpret_cast<u32*>(shared + at + 8 * Panel<T, kColumns>::kPitch) = pack2<T>(held[tile][2], held[tile][3]);
    }
  }

  // On to the end of the chunk.
  __device__ __forceinline__ void take(const ChunkStage<T, kColumns, kRows>& stage, const ChunkDecays& decays) {
    const float decay = exp2f(decays.sums[kChunk - 1]);
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) (&held[0][0])[i] *= decay;
#pragma unroll
    for (int k = 0; k < kChunk; k += 16) {
      u32 x[4];
      load_rows_transposed(x, stage.x, row, k);
      weigh(x, decays.weights + k);
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        u32 b[4];
        load_columns_transposed(b, stage.b, column + tile * 8, k);
        mma_first<T>(held[tile], x, b);
        mma_second<T>(held[tile + 1], x, b);
      }
    }
  }

  // x of 16 tokens times their weights.
  static __device__ __forceinline__ void weigh(u32 (&x)[4], const float* weights) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 weight = *reinterpret_cast<const float2*>(weights + lane % 4 * 2 + i / 2 * 8);
      const float2 value = unpack2<T>(x[i]);
      x[i] = pack2<T>(value.x * weight.x, value.y * weight.y);
    }
  }
};

// A warp's 16 tokens of the chunk: out without d x.
template <typename T, int kColumns, int kRows>
struct ChunkOut {
  float sums[kRows / 8][4];

  // From the state of the chunk's beginning; c: the operands of the warp's tokens.
  __device__ __forceinline__ void from_state(const u32 (&c)[kColumns / 16][4], const Panel<T, kColumns>& state,
                                             float low_decay, float high_decay) {
#pragma unroll
    for (int i = 0; i < kRows / 8 * 4; ++i) (&sums[0][0])[i] = 0.0f;
#pragma unroll
    for (int k = 0; k < kColumns; k += 32)
#pragma unroll
      for (int tile = 0; tile < kRows / 8; ++tile) {
        u32 b[4];
        load_columns(b, state, tile * 8, k);
        mma_first<T>(sums[tile], c[k / 16], b);
        mma_second<T>(sums[tile], c[k / 16 + 1], b);
      }
#pragma unroll
    for (int tile = 0; tile < kRows / 8; ++tile) {
      float(&sum)[4] = sums[tile];
      sum[0] *= low_decay, sum[1] *= low_decay, sum[2] *= high_decay, sum[3] *= high_decay;
    }
  }

  // From tokens s = [begin, begin + 16), those that are not behind t; t: the lane's lower row.
  __device__ __forceinline__ void from_tokens(const u32 (&c)[kColumns / 16][4],
                                              const ChunkStage<T, kColumns, kRows>& stage, const ChunkDecays& decays,
                                              int begin, int t) {
    float products[2][4] = {}, others[2][4] = {};  // of every other 16 columns, so that fewer products wait for others
#pragma unroll
    for (int k = 0; k < kColumns; k += 32)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        u32 b[4];
        load_columns(b, stage.b, begin + tile * 8, k);
        mma_first<T>(products[tile], c[k / 16], b);
        mma_second<T>(others[tile], c[k / 16 + 1], b);
      }
#pragma unroll
    for (int i = 0; i < 8; ++i) (&products[0][0])[i] += (&others[0][0])[i];
    u32 weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows t and t + 8 of the first 8 tokens, then of the others
      const int s = begin + i / 2 * 8 + threadIdx.x % 4 * 2, row = t + i % 2 * 8;
      const float end = decays.sums[row];
      float pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e)
        pair[e] = s + e <= row
                      ? products[i / 2][i % 2 * 2 + e] * exp2f(end - decays.sums[s + e]) * decays.steps[s + e]
                      : 0.0f;
      weights[i] = pack2<T>(pair[0], pair[1]);
    }
#pragma unroll
    for (int tile = 0; tile < kRows / 8; tile += 2) {
      u32 x[4];
      load_columns_transposed(x, stage.x, tile * 8, begin);
      mma_first<T>(sums[tile], weights, x);
      mma_second<T>(sums[tile + 1], weights, x);
    }
  }

  // Rows t and t + 8 that exist; `x`: the chunk's x, `target`: out of the chunk's first token.
  __device__ __forceinline__ void store(T* target, i64 stride, const char* x, float skip, int t, int count) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = t + half * 8;
      if (row >= count) break;
#pragma unroll
      for (int tile = 0; tile < kRows / 8; ++tile) {
        const int column = tile * 8 + threadIdx.x % 4 * 2;
        const float2 own = unpack2<T>(*reinterpret_cast<const u32*>(x + row * Panel<T, kRows>::kPitch + column * 2));
        *reinterpret_cast<u32*>(target + row * stride + column) =
            pack2<T>(fmaf(skip, own.x, sums[tile][half * 2]), fmaf(skip, own.y, sums[tile][half * 2 + 1]));
      }
    }
  }
};

template <typename T, int kColumns, int kRows>
__global__ void __launch_bounds__(kChunkThreads) mamba2_chunks(const __grid_constant__ Mamba2Params p) {
  using Layout = ChunkLayout<T, kColumns, kRows>;
  using Stage = ChunkStage<T, kColumns, kRows>;
  extern __shared__ __align__(16) char shared[];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const StateRow sequence = sequence_of(p, blockIdx.y);
  if (!is_chunked(p, sequence)) return;

  const u32 shared_base = shared_address(shared);
  const int tiles = p.head_dim / kRows, head = blockIdx.x / tiles, first_row = blockIdx.x % tiles * kRows;
  const int warp = threadIdx.x / kWarp, t = warp * 16 + threadIdx.x % kWarp / 4;
  const float rate = p.a[head] * kLog2E, skip = p.d[head];
  const i64 row = i64(head) * p.head_dim + first_row;
  float* const state_rows = p.state + sequence.slot * p.state_stride + row * kColumns;
  T* out = static_cast<T*>(p.out) + sequence.first * p.out_stride + row;
  const Panel<T, kColumns> state_panel{shared_base + Layout::kStateAt};

  for (int index = 0; index < 2; ++index)
    Stage(shared_base, index)
        .copy(p, sequence.first + index * kChunk, sequence.length() - index * kChunk, head, first_row);
  ChunkState<T, kColumns, kRows> state;
  state.load(state_rows);
  state.publish(shared, state_panel, shared_base);
  float2 steps = chunk_steps(p, sequence.first, sequence.length(), head);
  if (warp == 0) ChunkDecays(shared + Layout::kDecaysAt, 0).fill(steps, rate);

#pragma unroll 1
  for (int begin = 0; begin < sequence.length(); begin += kChunk) {
    const int index = begin / kChunk % 2, left = sequence.length() - begin;
    const Stage stage(shared_base, index);
    const ChunkDecays decays(shared + Layout::kDecaysAt, index);
    if (warp == 0) steps = chunk_steps(p, sequence.first + begin + kChunk, left - kChunk, head);
    cp_async_wait<1>();
    __syncthreads();
    {
      u32 c[kColumns / 16][4];
#pragma unroll
      for (int k = 0; k < kColumns; k += 16) load_rows(c[k / 16], stage.c, warp * 16, k);
      ChunkOut<T, kColumns, kRows> rows;
      rows.from_state(c, state_panel, exp2f(decays.sums[t]), exp2f(decays.sums[t + 8]));
#pragma unroll 1
      for (int s = 0; s <= warp * 16; s += 16) rows.from_tokens(c, stage, decays, s, t);
      rows.store(out, p.out_stride, shared + (stage.x.base - shared_base), skip, t, left);
    }
    out += kChunk * p.out_stride;
    state.take(stage, decays);
    if (warp == 0) ChunkDecays(shared + Layout::kDecaysAt, 1 - index).fill(steps, rate);
    __syncthreads();  // the stage and the rounded state are read to their ends
    state.publish(shared, state_panel, shared_base);
    stage.copy(p, sequence.first + begin + 2 * kChunk, left - 2 * kChunk, head, first_row);
  }
  state.store(state_rows);
}

}  // namespace edgellm
