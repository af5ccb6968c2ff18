// Gated delta rule by chunks: the state, chunk after chunk.  See delta_chunks.cuh.
// Four warps have kGroup columns, S^T (columns by keys) in their accumulators, a quarter of the keys each; of a chunk
// they compute X^T of 16 tokens each.  Packed to float16 the accumulators of a lane are its operands of the next
// product, so S^T and X^T pass from warp to warp, and to the workspace, 16 bytes a lane, with two barriers a chunk.
#include "delta_chunks.cuh"

namespace edgellm {

template <int kKeyDim>
struct ScanShared {  // of a group
  uint4 state[kHalves][kKeyDim / 16][kWarp];
  uint4 updates[kHalves][kTokenTiles][kWarp];  // X_j exp(G_last - G_j)
  float largest[kChunkWarps];
};

// The four warps of a group wait for each other.
__device__ __forceinline__ void group_barrier(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kChunkThreads) : "memory");
}

// The larger magnitudes of two pairs of float16.
__device__ __forceinline__ u32 larger_pair(u32 largest, u32 pair) {
  const u32 magnitudes = pair & 0x7fff7fffu;
  const __half2 larger =
      __hmax2(*reinterpret_cast<const __half2*>(&largest), *reinterpret_cast<const __half2*>(&magnitudes));
  return *reinterpret_cast<const u32*>(&larger);
}

// What a warp needs of a chunk besides S and X, read while the chunk before is worked on.
template <int kKeyDim>
struct ScanOperands {
  static constexpr int kKeyTiles = kKeyDim / 16;
  static constexpr int kOwnTiles = kKeyTiles / kChunkWarps;
  u32 reads[kKeyTiles][4];
  u32 keys[kOwnTiles][kTokenTiles][4];
  u32 values[kHalves][4];
  float totals[4];  // G of the lane's tokens
  float first, last;
  float largest;
  int exponent;

  __device__ __forceinline__ void load_reads(const ChunkPlace& place, int warp, int lane) {
    const uint4* source = place.reads() + warp * kKeyTiles * kWarp + lane;
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile) load_fragment(reads[tile], source + tile * kWarp);
  }
  __device__ __forceinline__ void load_keys(const ChunkPlace& place, int warp, int lane) {
    const uint4* source = place.keys() + warp * kOwnTiles * kTokenTiles * kWarp + lane;
#pragma unroll
    for (int tile = 0; tile < kOwnTiles; ++tile)
#pragma unroll
      for (int step = 0; step < kTokenTiles; ++step)
        load_fragment(keys[tile][step], source + (tile * kTokenTiles + step) * kWarp);
  }
  __device__ __forceinline__ void load_values(const ChunkPlace& place, int group, int warp, int lane) {
    const uint4* source = place.values() + (group * kHalves * kTokenTiles + warp) * kWarp + lane;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) load_fragment(values[half], source + half * kTokenTiles * kWarp);
    const float* sums = place.totals();
    const float2 low = *reinterpret_cast<const float2*>(sums + 16 * warp + lane % 4 * 2);
    const float2 high = *reinterpret_cast<const float2*>(sums + 16 * warp + lane % 4 * 2 + 8);
    totals[0] = low.x, totals[1] = low.y, totals[2] = high.x, totals[3] = high.y;
    first = sums[0], last = sums[kChunk - 1];
    const ChunkScales* scales = place.scales() + group;
    largest = scales->largest, exponent = scales->value;
  }
};

// One group of columns of one head of one row.
template <int kKeyDim>
struct Scan {
  static constexpr int kKeyTiles = kKeyDim / 16;
  static constexpr int kOwnTiles = kKeyTiles / kChunkWarps;

  const GatedDeltaParams& p;
  ScanShared<kKeyDim>& shared;
  int base;  // place of the row's first chunk
  int head, group, local_group, warp, lane;
  int exponent;                               // of the state below
  float state[kHalves][2 * kOwnTiles][4];     // S^T times 2^exponent
  ScanOperands<kKeyDim> operands;

  __device__ __forceinline__ ChunkPlace place(int chunk) const { return {p, base + chunk, head}; }

  // ---- the state's home: rows of columns; a lane has 4 of 8 columns after an exchange with its neighbour ----------

  __device__ __forceinline__ float* home(int slot) const {
    const i64 key = warp * kOwnTiles * 16 + lane % 4 * 2;
    return p.state + slot * p.state_stride + (static_cast<i64>(head) * kKeyDim + key) * p.value_dim +
           group * kGroup + lane / 8 * 8 + lane / 4 % 2 * 4;
  }
  __device__ __forceinline__ void load_state(int slot) {
    const float* rows = home(slot);
    const bool is_odd = lane / 4 % 2;
#pragma unroll
    for (int n = 0; n < 2 * kOwnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(rows + (8 * n + i) * p.value_dim);
        const float low = __shfl_xor_sync(kFullMask, is_odd ? four.x : four.y, 4);
        const float high = __shfl_xor_sync(kFullMask, is_odd ? four.z : four.w, 4);
        state[0][n][i] = is_odd ? low : four.x, state[0][n][i + 2] = is_odd ? high : four.z;
        state[1][n][i] = is_odd ? four.y : low, state[1][n][i + 2] = is_odd ? four.w : high;
      }
  }
  __device__ __forceinline__ void store_state(int slot) const {
    float* rows = home(slot);
    const bool is_odd = lane / 4 % 2;
    const float factor = power_of_two(-exponent);
#pragma unroll
    for (int n = 0; n < 2 * kOwnTiles; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float own[4] = {state[0][n][i] * factor, state[0][n][i + 2] * factor, state[1][n][i] * factor,
                              state[1][n][i + 2] * factor};
        const float low = __shfl_xor_sync(kFullMask, is_odd ? own[0] : own[2], 4);
        const float high = __shfl_xor_sync(kFullMask, is_odd ? own[1] : own[3], 4);
        *reinterpret_cast<float4*>(rows + (8 * n + i) * p.value_dim) =
            is_odd ? make_float4(low, own[2], high, own[3]) : make_float4(own[0], low, own[1], high);
      }
  }

  __device__ __forceinline__ void scale_state(float factor) {
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int n = 0; n < 2 * kOwnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) state[half][n][i] *= factor;
  }
  // The first power of two, from the largest of the group.
  __device__ __forceinline__ void start_exponent() {
    float amax = 0.0f;
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int n = 0; n < 2 * kOwnTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) amax = fmaxf(amax, fabsf(state[half][n][i]));
    amax = warp_max(amax);
    if (lane == 0) shared.largest[warp] = amax;
    group_barrier(local_group);
#pragma unroll
    for (int w = 0; w < kChunkWarps; ++w) amax = fmaxf(amax, shared.largest[w]);
    exponent = half_exponent(amax);
    scale_state(power_of_two(exponent));
  }

  // The state before a chunk, to the other warps and to the workspace.
  __device__ __forceinline__ void publish_state(int chunk) const {
    uint4* kept = place(chunk).states() + group * kHalves * kKeyTiles * kWarp + lane;
#pragma unroll
    for (int half = 0; half < kHalves; ++half)
#pragma unroll
      for (int t = 0; t < kOwnTiles; ++t) {
        const int tile = warp * kOwnTiles + t;
        u32 fragment[4];
        pack_fragment(fragment, state[half][2 * t], state[half][2 * t + 1]);
        store_fragment(&shared.state[half][tile][lane], fragment);
        store_fragment(kept + (half * kKeyTiles + tile) * kWarp, fragment);
      }
  }

  // S^T W^T of the warp's tokens, and the largest float16 of the published state.
  __device__ __forceinline__ float read_state(float (&taken)[kHalves][2][4]) const {
    u32 largest = 0;
#pragma unroll
    for (int half = 0; half < kHalves; ++half) clear(taken[half]);
#pragma unroll
    for (int tile = 0; tile < kKeyTiles; ++tile)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        u32 a[4];
        load_fragment(a, &shared.state[half][tile][lane]);
        multiply_pair(taken[half][0], taken[half][1], a, operands.reads[tile]);
#pragma unroll
        for (int i = 0; i < 4; ++i) largest = larger_pair(largest, a[i]);
      }
    const float2 two = unpack2<f16>(largest);
    // Magnitudes are ordered as their bits are.
    const int bits = __reduce_max_sync(kFullMask, __float_as_int(fmaxf(two.x, two.y)));
    return __int_as_float(bits);
  }

  // The chunk's power of two.  Keys have unit length and beta is at most 1, so |W S| is at most sqrt(kKeyDim) |S|, and
  // 64 updates add at most 64 times the largest to the state: neither X nor the next S leaves float16.
  __device__ __forceinline__ int next_exponent(float largest_state) const {
    const float taken = 12.0f * __expf(operands.first) * largest_state;
    const float bound = kChunk * (operands.largest + taken) + __expf(operands.last) * largest_state;
    return min(half_exponent(bound), exponent + 60);
  }

  // X^T in place of S^T W^T; decayed to the others, as it is to the workspace.
  __device__ __forceinline__ void publish_updates(const ChunkPlace& at, int next, float (&updates)[kHalves][2][4]) {
    uint4* kept = at.values() + (group * kHalves * kTokenTiles + warp) * kWarp + lane;
    const float value_up = power_of_two(next - operands.exponent);
    const float taken_up = -power_of_two(next - exponent);
    float decays[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) decays[i] = __expf(operands.last - operands.totals[i]);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      u32 fragment[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // registers of a fragment: rows 0 and 8 further of the first 8 tokens, then more
        const float2 value = unpack2<f16>(operands.values[half][i]);
        float* pair = &updates[half][i / 2][i % 2 * 2];
        pair[0] = fmaf(taken_up, pair[0], value_up * value.x);
        pair[1] = fmaf(taken_up, pair[1], value_up * value.y);
        fragment[i] = pack2<f16>(pair[0] * decays[i / 2 * 2], pair[1] * decays[i / 2 * 2 + 1]);
      }
      store_fragment(&shared.updates[half][warp][lane], fragment);
      pack_fragment(fragment, updates[half][0], updates[half][1]);
      store_fragment(kept + half * kTokenTiles * kWarp, fragment);
    }
  }

  // S^T += X^T K.
  __device__ __forceinline__ void add_updates() {
#pragma unroll
    for (int step = 0; step < kTokenTiles; ++step)
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        u32 a[4];
        load_fragment(a, &shared.updates[half][step][lane]);
#pragma unroll
        for (int t = 0; t < kOwnTiles; ++t)
          multiply_pair(state[half][2 * t], state[half][2 * t + 1], a, operands.keys[t][step]);
      }
  }

  __device__ __forceinline__ void note_scales(const ChunkPlace& at, int next) const {
    if (warp != 0 || lane != 0) return;
    ChunkScales* scales = at.scales() + group;
    scales->state = exponent, scales->update = next;
  }

  // One chunk; its operands are on their way, and the state before it is published.
  __device__ __forceinline__ void step(int chunk, bool has_next) {
    const ChunkPlace at = place(chunk), after = place(chunk + has_next);
    float updates[kHalves][2][4];
    group_barrier(local_group);  // the state is published, and the updates of the chunk before are read
    const float largest = read_state(updates) * power_of_two(-exponent);
    operands.load_reads(after, warp, lane);
    const int next = next_exponent(largest);
    publish_updates(at, next, updates);
    note_scales(at, next);
    scale_state(__expf(operands.last) * power_of_two(next - exponent));
    exponent = next;
    operands.load_values(after, group, warp, lane);
    group_barrier(local_group);  // the updates are published, and the state is read
    add_updates();
    operands.load_keys(after, warp, lane);
    if (has_next) publish_state(chunk + 1);
  }
};

// Grid: x groups of columns (blockDim.x / 128 a block), y heads, z rows.  Dynamic shared memory: ScanShared, each.
template <int kKeyDim>
__global__ void __launch_bounds__(2 * kChunkThreads, 1) delta_scan(const __grid_constant__ GatedDeltaParams p) {
  extern __shared__ __align__(16) u8 memory[];
  const int local_group = threadIdx.x / kChunkThreads;
  const int group = blockIdx.x * (blockDim.x / kChunkThreads) + local_group;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const StateRow row = delta_row(p, blockIdx.z);
  if (group * kGroup >= p.value_dim || row.is_idle() || !goes_by_chunks(p, row)) return;
  const int base = row.first / kChunk + blockIdx.z - p.first_place;
  const int begin = max(0, -base);
  const int end = min(ceil_div(row.length(), kChunk), p.num_places - base);
  if (begin >= end) return;
  Scan<kKeyDim> scan{p,
                     reinterpret_cast<ScanShared<kKeyDim>*>(memory)[local_group],
                     base,
                     static_cast<int>(blockIdx.y),
                     group,
                     local_group,
                     static_cast<int>(threadIdx.x) % kChunkThreads / kWarp,
                     static_cast<int>(threadIdx.x) % kWarp,
                     0,
                     {},
                     {}};
  const ChunkPlace first = scan.place(begin);
  scan.load_state(row.slot);
  scan.operands.load_reads(first, scan.warp, scan.lane);
  scan.operands.load_values(first, group, scan.warp, scan.lane);
  scan.operands.load_keys(first, scan.warp, scan.lane);
  scan.start_exponent();
  scan.publish_state(begin);
#pragma unroll 1
  for (int chunk = begin; chunk < end; ++chunk) scan.step(chunk, chunk + 1 < end);
  scan.store_state(row.slot);
}

}  // namespace edgellm
