// Gated delta rule (Yang et al. 2024), token by token.
// Axes: tokens t; heads h of v, h / group of q and k; state rows d in [0, key_dim), columns e in [0, value_dim).
//   S = exp(decay) S;  u = beta (v - S^T k);  S = S + k u^T;  out = scale S^T q;   q, k of unit length with is_unit
// Columns of a state do not meet, so a warp keeps some of them in registers from a row's first token to its last; a
// lane has four columns, and of the rows those of its group.  Both products are taken with the state before the token,
// out = scale (exp(decay) S^T q + (k . q) u), so that there is one reduction a token.
// Every row takes the same steps in the same order whatever is beside it: decode, verification and prompts of any
// chunking agree to the bit.
#include "delta_rows.cuh"

namespace edgellm {

constexpr int kDeltaWarps = 4;  // at most, a block

// How the lanes of a warp share kColumns columns of a state.
template <int kKeyDim>
struct DeltaLanes {
  static constexpr int kColumnLanes = kKeyDim > 128 ? 2 : 4;
  static constexpr int kColumns = 4 * kColumnLanes;
  static constexpr int kGroups = kWarp / kColumnLanes;
  static constexpr int kRows = kKeyDim / kGroups;  // of a group, one behind the other
};

// One token as read, before anything is done with it.
template <typename T, int kKeyDim>
struct DeltaToken {
  static constexpr int kParts = kKeyDim / kWarp;
  T query[kParts], key[kParts], value[4];
  float decay, beta;

  __device__ __forceinline__ void load(const GatedDeltaParams& p, i64 token, int head, int column, int lane) {
    const int key_head = head / p.group;
    const T* q = static_cast<const T*>(p.q) + token * p.q_stride + key_head * p.key_dim;
    const T* k = static_cast<const T*>(p.k) + token * p.k_stride + key_head * p.key_dim;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int d = lane + i * kWarp;
      query[i] = d < p.key_dim ? q[d] : from_float<T>(0.0f);
      key[i] = d < p.key_dim ? k[d] : from_float<T>(0.0f);
    }
    const T* v = static_cast<const T*>(p.v) + token * p.v_stride + static_cast<i64>(head) * p.value_dim;
#pragma unroll
    for (int c = 0; c < 4; ++c) value[c] = column + c < p.value_dim ? v[column + c] : from_float<T>(0.0f);
    decay = p.decay[token * p.decay_stride + head];
    beta = p.beta[token * p.beta_stride + head];
  }
};

// q and k of a token in shared memory, with gaps so that the groups' rows lie in different banks.
template <int kKeyDim>
struct DeltaKeys {
  static constexpr int kRows = DeltaLanes<kKeyDim>::kRows, kGroups = DeltaLanes<kKeyDim>::kGroups;
  static constexpr int kPitch = kRows + 4;
  alignas(16) float query[kGroups * kPitch];
  alignas(16) float key[kGroups * kPitch];

  static __device__ __forceinline__ int place(int d) { return d / kRows * kPitch + d % kRows; }
};

// A warp's columns of one state.
template <int kKeyDim>
struct DeltaState {
  static constexpr int kRows = DeltaLanes<kKeyDim>::kRows;
  float s[kRows][4];

  // `place` is that of the lane's first row and column; rows and columns that there are none of count as zero.
  __device__ __forceinline__ void load(const GatedDeltaParams& p, const float* place, int rows, int columns) {
#pragma unroll
    for (int i = 0; i < kRows; ++i, place += p.value_dim) {
#pragma unroll
      for (int c = 0; c < 4; ++c) s[i][c] = 0.0f;
      if (i >= rows || columns <= 0) continue;
      if (p.is_wide) {
        load_floats(place, s[i]);
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (c < columns) s[i][c] = place[c];
      }
    }
  }
  __device__ __forceinline__ void store(const GatedDeltaParams& p, float* place, int rows, int columns) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i, place += p.value_dim) {
      if (i >= rows || columns <= 0) continue;
      if (p.is_wide) {
        store_floats(place, s[i]);
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (c < columns) place[c] = s[i][c];
      }
    }
  }
  // S^T k and S^T q of the columns, the same in every row group.
  __device__ __forceinline__ void read(const DeltaKeys<kKeyDim>& keys, int group, float (&by_key)[4],
                                       float (&by_query)[4]) const {
#pragma unroll
    for (int c = 0; c < 4; ++c) by_key[c] = by_query[c] = 0.0f;
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      float k[4], q[4];
      load_floats(keys.key + group * DeltaKeys<kKeyDim>::kPitch + i, k);
      load_floats(keys.query + group * DeltaKeys<kKeyDim>::kPitch + i, q);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          by_key[c] = fmaf(s[i + j][c], k[j], by_key[c]);
          by_query[c] = fmaf(s[i + j][c], q[j], by_query[c]);
        }
      }
    }
#pragma unroll
    for (int step = kWarp / 2; step >= DeltaLanes<kKeyDim>::kColumnLanes; step /= 2) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        by_key[c] += __shfl_xor_sync(kFullMask, by_key[c], step);
        by_query[c] += __shfl_xor_sync(kFullMask, by_query[c], step);
      }
    }
  }
  __device__ __forceinline__ void write(const DeltaKeys<kKeyDim>& keys, int group, float kept, const float (&u)[4]) {
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      float k[4];
      load_floats(keys.key + group * DeltaKeys<kKeyDim>::kPitch + i, k);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) s[i + j][c] = fmaf(k[j], u[c], kept * s[i + j][c]);
      }
    }
  }
};

// Puts q and k of a token where the row groups read them; returns their product.
template <typename T, int kKeyDim>
__device__ __forceinline__ float share_keys(const DeltaToken<T, kKeyDim>& token, bool is_unit, int lane,
                                            DeltaKeys<kKeyDim>& keys) {
  float query[DeltaToken<T, kKeyDim>::kParts], key[DeltaToken<T, kKeyDim>::kParts];
  float queries = 0.0f, products = 0.0f, squares = 0.0f;
#pragma unroll
  for (int i = 0; i < DeltaToken<T, kKeyDim>::kParts; ++i) {
    query[i] = to_float(token.query[i]);
    key[i] = to_float(token.key[i]);
    queries = fmaf(query[i], query[i], queries);
    squares = fmaf(key[i], key[i], squares);
    products = fmaf(key[i], query[i], products);
  }
  products = warp_sum(products);
  float query_scale = 1.0f, key_scale = 1.0f;
  if (is_unit) {
    query_scale = rsqrtf(warp_sum(queries) + kUnitEps);
    key_scale = rsqrtf(warp_sum(squares) + kUnitEps);
  }
#pragma unroll
  for (int i = 0; i < DeltaToken<T, kKeyDim>::kParts; ++i) {
    const int place = DeltaKeys<kKeyDim>::place(lane + i * kWarp);
    keys.query[place] = query[i] * query_scale;
    keys.key[place] = key[i] * key_scale;
  }
  __syncwarp();
  return products * query_scale * key_scale;
}

template <typename T>
__device__ __forceinline__ void store_columns(const GatedDeltaParams& p, i64 token, int head, int column,
                                              const float (&values)[4]) {
  T* out = static_cast<T*>(p.out) + token * p.out_stride + static_cast<i64>(head) * p.value_dim;
#pragma unroll
  for (int c = 0; c < 4; ++c)
    if (column + c < p.value_dim) out[column + c] = from_float<T>(values[c]);
}

// Starts the state's way into L2 while the kernels before this one still run.  The slot may be that of an earlier step
// as yet: a wrong guess costs time and nothing else, and it is read again behind them (past L1 here, for that reason).
__device__ __forceinline__ void prefetch_state(const GatedDeltaParams& p, int row, int head, int column, int lane) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const int slot = __ldcg(p.slots + row);
  if (slot < 0 || slot >= p.num_slots || column >= p.value_dim) return;
  const float* state = p.state + slot * p.state_stride + static_cast<i64>(head) * p.key_dim * p.value_dim + column;
  for (int d = lane; d < p.key_dim; d += kWarp)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(state + static_cast<i64>(d) * p.value_dim));
#endif
}

// Grid: x tiles of columns, a warp each, y heads, z rows.
template <typename T, int kKeyDim>
__global__ void __launch_bounds__(kDeltaWarps* kWarp, kKeyDim > 64 ? 3 : 4)
    gated_delta(const __grid_constant__ GatedDeltaParams p) {
  __shared__ DeltaKeys<kKeyDim> shared[kDeltaWarps][2];  // two: a warp writes one while its lanes may read the other
  using Lanes = DeltaLanes<kKeyDim>;
  const int lane = threadIdx.x, group = lane / Lanes::kColumnLanes, head = blockIdx.y;
  const int tile = (blockIdx.x * blockDim.y + threadIdx.y) * Lanes::kColumns;
  const int column = tile + lane % Lanes::kColumnLanes * 4, first_row = group * Lanes::kRows;
  let_next_kernel_start();
  prefetch_state(p, blockIdx.z, head, tile, lane);
  wait_for_previous_kernel();
  const StateRow row = delta_row(p, blockIdx.z);
  if (row.is_idle() || goes_by_chunks(p, row) || tile >= p.value_dim) return;
  const int rows = p.key_dim - first_row, columns = p.value_dim - column;  // of this lane's part, all or fewer
  const i64 part = (static_cast<i64>(head) * p.key_dim + first_row) * p.value_dim + column;
  float* home = p.state + row.slot * p.state_stride + part;
  DeltaToken<T, kKeyDim> token;
  token.load(p, row.first, head, column, lane);
  DeltaState<kKeyDim> state;
  state.load(p, home, rows, columns);
#pragma unroll 1
  for (int t = row.first; t < row.end; ++t) {
    DeltaKeys<kKeyDim>& keys = shared[threadIdx.y][(t - row.first) & 1];
    const float product = share_keys(token, p.is_unit != 0, lane, keys);
    const float kept = expf(token.decay), beta = token.beta;
    float value[4], by_key[4], by_query[4], u[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) value[c] = to_float(token.value[c]);
    if (t + 1 < row.end) token.load(p, t + 1, head, column, lane);
    state.read(keys, group, by_key, by_query);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      u[c] = beta * fmaf(-kept, by_key[c], value[c]);
      by_query[c] = p.scale * fmaf(product, u[c], kept * by_query[c]);
    }
    if (group == 0) store_columns<T>(p, t, head, column, by_query);
    state.write(keys, group, kept, u);
    const int checkpoint = row.checkpoint + t - row.first;
    if (row.checkpoint >= 0 && checkpoint < p.num_checkpoints)
      state.store(p, p.checkpoint + checkpoint * p.checkpoint_stride + part, rows, columns);
  }
  state.store(p, home, rows, columns);
}

}  // namespace edgellm
