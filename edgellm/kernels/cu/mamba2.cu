// The Mamba-2 selective scan, token after token (Dao and Gu, Transformers are SSMs, 2024): per head
//   S = exp(dt a) S + dt x b^T;  out = S c + d x
// Axes: token t, head h, row p of the state and of x (head_dim), column n (state_dim), group g = h / (H / G).
// A block owns kScanRows rows of one head of one sequence, in registers: kLanes lanes a row, each with the columns
// {4 (lane + kLanes v), .. + 3}.  What its tokens bring comes through shared memory, kScanTokens at a time, the next ones
// on their way meanwhile.  The order of every sum depends on the state's width alone, so a sequence's bits depend neither
// on how it is cut into steps nor on the sequences beside it.
#include "mamba2.cuh"

namespace edgellm {

constexpr int kScanThreads = 128;
constexpr int kScanRows = 32;

template <int kColumns>
struct ScanShape {
  static constexpr int kLanes = kColumns >= 256 ? 16 : kColumns >= 32 ? 8 : 4;
  static constexpr int kVecs = kColumns / (4 * kLanes);  // of a lane, in a row
  static constexpr int kRows = kLanes / 4;               // of a lane
  static constexpr int kApart = kScanRows / kRows;       // between a lane's rows
  static constexpr int kTokens = kColumns > 128 ? 4 : 8;
  static_assert(kScanThreads / kLanes == kApart && kVecs * 4 * kLanes == kColumns, "the block covers its rows");
};

// What some tokens bring for one head and the block's rows.
template <int kColumns>
struct ScanTokens {
  static constexpr int kTokens = ScanShape<kColumns>::kTokens;
  alignas(16) float b[kTokens][kColumns];
  alignas(16) float c[kTokens][kColumns];
  float x[kTokens][kScanRows];
  float step[kTokens], decay[kTokens];
};

// One thread's part of the tokens on their way from global to shared memory.
template <typename T, int kColumns>
struct ScanFetch {
  static constexpr int kTokens = ScanShape<kColumns>::kTokens;
  static constexpr int kWide = ceil_div(kTokens * kColumns, kScanThreads), kX = kTokens * kScanRows / kScanThreads;
  float b[kWide], c[kWide], x[kX], step;

  // Tokens [first, first + count); places of tokens, rows and columns that there are none of get zeros.
  __device__ __forceinline__ void load(const Mamba2Params& p, i64 first, int count, int head, int first_row) {
    const int group = head / (p.num_heads / p.num_groups);
    const T* b_rows = static_cast<const T*>(p.b) + first * p.b_stride + i64(group) * p.state_dim;
    const T* c_rows = static_cast<const T*>(p.c) + first * p.c_stride + i64(group) * p.state_dim;
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const int place = threadIdx.x + i * kScanThreads, token = place / kColumns, column = place % kColumns;
      const bool valid = token < count && column < p.state_dim;
      b[i] = valid ? to_float(b_rows[token * p.b_stride + column]) : 0.0f;
      c[i] = valid ? to_float(c_rows[token * p.c_stride + column]) : 0.0f;
    }
    const T* x_rows = static_cast<const T*>(p.x) + first * p.x_stride + i64(head) * p.head_dim + first_row;
#pragma unroll
    for (int i = 0; i < kX; ++i) {
      const int place = threadIdx.x + i * kScanThreads, token = place / kScanRows, row = place % kScanRows;
      const bool valid = token < count && first_row + row < p.head_dim;
      x[i] = valid ? to_float(x_rows[token * p.x_stride + row]) : 0.0f;
    }
    step = threadIdx.x < min(count, kTokens) ? p.dt[(first + threadIdx.x) * p.dt_stride + head] : 0.0f;
  }

  __device__ __forceinline__ void store(ScanTokens<kColumns>& tokens, float rate) const {
#pragma unroll
    for (int i = 0; i < kWide; ++i) {
      const int place = threadIdx.x + i * kScanThreads;
      if (place >= kTokens * kColumns) break;
      (&tokens.b[0][0])[place] = b[i];
      (&tokens.c[0][0])[place] = c[i];
    }
#pragma unroll
    for (int i = 0; i < kX; ++i) (&tokens.x[0][0])[threadIdx.x + i * kScanThreads] = x[i];
    if (threadIdx.x < kTokens) {
      tokens.step[threadIdx.x] = step;
      tokens.decay[threadIdx.x] = expf(__fmul_rn(step, rate));
    }
  }
};

// A lane's part of the block's rows.  kWhole: columns fill every lane and rows start at multiples of 16 bytes.
template <int kColumns, bool kWhole>
struct ScanState {
  using Shape = ScanShape<kColumns>;
  float4 held[Shape::kRows][Shape::kVecs];

  static __device__ __forceinline__ int column(int lane, int vec) { return 4 * (lane + Shape::kLanes * vec); }

  __device__ __forceinline__ void load(const float* source, int width, int rows, int lane) {
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r)
#pragma unroll
      for (int v = 0; v < Shape::kVecs; ++v) {
        const float* from = source + i64(r) * Shape::kApart * width + column(lane, v);
        const int left = r * Shape::kApart < rows ? width - column(lane, v) : 0;
        float4& four = held[r][v];
        four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if constexpr (kWhole) {
          if (left > 0) four = *reinterpret_cast<const float4*>(from);
        } else {
          if (left > 0) four.x = from[0];
          if (left > 1) four.y = from[1];
          if (left > 2) four.z = from[2];
          if (left > 3) four.w = from[3];
        }
      }
  }

  __device__ __forceinline__ void store(float* target, int width, int rows, int lane) const {
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r)
#pragma unroll
      for (int v = 0; v < Shape::kVecs; ++v) {
        float* to = target + i64(r) * Shape::kApart * width + column(lane, v);
        const int left = r * Shape::kApart < rows ? width - column(lane, v) : 0;
        const float4& four = held[r][v];
        if constexpr (kWhole) {
          if (left > 0) *reinterpret_cast<float4*>(to) = four;
        } else {
          if (left > 0) to[0] = four.x;
          if (left > 1) to[1] = four.y;
          if (left > 2) to[2] = four.z;
          if (left > 3) to[3] = four.w;
        }
      }
  }

  static __device__ __forceinline__ void cell(float& state, float& sum, float decay, float dx, float b, float c) {
    state = __fmaf_rn(dx, b, __fmul_rn(state, decay));
    sum = __fmaf_rn(state, c, sum);
  }

  // One token; sums[r] of row r is the same in all lanes of the row.
  __device__ __forceinline__ void take(const ScanTokens<kColumns>& tokens, int token, int row, int lane,
                                       float (&sums)[Shape::kRows]) {
    const float decay = tokens.decay[token], step = tokens.step[token];
    float4 parts[Shape::kRows];
    float dx[Shape::kRows];
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      parts[r] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      dx[r] = __fmul_rn(step, tokens.x[token][row + r * Shape::kApart]);
    }
#pragma unroll
    for (int v = 0; v < Shape::kVecs; ++v) {
      const float4 b = *reinterpret_cast<const float4*>(&tokens.b[token][column(lane, v)]);
      const float4 c = *reinterpret_cast<const float4*>(&tokens.c[token][column(lane, v)]);
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r) {
        cell(held[r][v].x, parts[r].x, decay, dx[r], b.x, c.x);
        cell(held[r][v].y, parts[r].y, decay, dx[r], b.y, c.y);
        cell(held[r][v].z, parts[r].z, decay, dx[r], b.z, c.z);
        cell(held[r][v].w, parts[r].w, decay, dx[r], b.w, c.w);
      }
    }
#pragma unroll
    for (int r = 0; r < Shape::kRows; ++r) {
      const float4& part = parts[r];
      sums[r] = warp_sum<Shape::kLanes>(__fadd_rn(__fadd_rn(part.x, part.y), __fadd_rn(part.z, part.w)));
    }
  }
};

template <typename T, int kColumns, bool kWhole>
__global__ void __launch_bounds__(kScanThreads) mamba2(const __grid_constant__ Mamba2Params p) {
  using Shape = ScanShape<kColumns>;
  __shared__ ScanTokens<kColumns> staged[2];
  wait_for_previous_kernel();
  let_next_kernel_start();
  const StateRow sequence = sequence_of(p, blockIdx.y);
  if (!is_scanned(p, sequence)) return;

  const int tiles = ceil_div(p.head_dim, kScanRows), head = blockIdx.x / tiles;
  const int first_row = blockIdx.x % tiles * kScanRows;
  const int lane = threadIdx.x % Shape::kLanes, row = threadIdx.x / Shape::kLanes;
  const int rows = p.head_dim - first_row - row;  // from the lane's first one; may be negative
  const i64 place = (i64(head) * p.head_dim + first_row + row) * p.state_dim;
  float* const state_rows = p.state + sequence.slot * p.state_stride + place;
  ScanState<kColumns, kWhole> state;
  state.load(state_rows, p.state_dim, rows, lane);
  ScanFetch<T, kColumns> next;
  next.load(p, sequence.first, sequence.length(), head, first_row);
  const float rate = p.a[head], skip = p.d[head];
  T* const out = static_cast<T*>(p.out) + i64(head) * p.head_dim + first_row + row;

#pragma unroll 1
  for (int begin = 0; begin < sequence.length(); begin += Shape::kTokens) {
    ScanTokens<kColumns>& tokens = staged[begin / Shape::kTokens % 2];
    next.store(tokens, rate);
    __syncthreads();
    const int left = sequence.length() - begin;
    if (left > Shape::kTokens)
      next.load(p, sequence.first + begin + Shape::kTokens, left - Shape::kTokens, head, first_row);
#pragma unroll 1
    for (int j = 0; j < min(left, Shape::kTokens); ++j) {
      const i64 token = i64(sequence.first) + begin + j;
      float sums[Shape::kRows];
      state.take(tokens, j, row, lane, sums);
#pragma unroll
      for (int r = 0; r < Shape::kRows; ++r)
        if (lane == r && r * Shape::kApart < rows)
          out[token * p.out_stride + r * Shape::kApart] =
              from_float<T>(__fmaf_rn(skip, tokens.x[j][row + r * Shape::kApart], sums[r]));
      const i64 kept = sequence.checkpoint + begin + j;
      if (sequence.checkpoint >= 0 && kept < p.num_checkpoints)
        state.store(p.checkpoint + kept * p.checkpoint_stride + place, p.state_dim, rows, lane);
    }
  }
  state.store(state_rows, p.state_dim, rows, lane);
}

}  // namespace edgellm
