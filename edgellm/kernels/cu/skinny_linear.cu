// Few rows times a weight: out (M, N) = x (M, K) weight (N, K)^T, M small; the order of the sum is in linear.cuh.
// A group is kTiles tiles of 8 weight rows; a block takes the x rows [blockIdx.y * 8 * kRowTiles, ..).  Its warp s adds up
// slice s of K, and the slices meet in shared memory.  A tile of one 32-k block is 16 bytes a lane: row lane / 4,
// k 8 * (lane % 4)...  A lane has kBlocks places for a block of weight (kTiles * 16 bytes), in registers or (kShared) in
// shared memory that no other lane touches.  How a block walks:
//   kOnce  one group; a place for every block of the slice
//   kLong  groups blockIdx.x, + gridDim.x, .., slices of any length; a place is filled again when it is used up
// Weights are on their way before the previous kernel is waited for; x only after.
//
// kGated: the weight has 2 * N rows, gate then up; both sums are rounded to T, and out = T(silu(gate) * up).  A group's
// tiles are half gate rows, half the up rows of the same columns.
#include "linear_slices.cuh"

namespace edgellm {

enum SkinnyWalk { kOnce, kLong };

constexpr int kSkinnyThreads = kSlices * kWarp;

// A lane's part of the weight: places for kBlocks blocks, and the next round of blocks to copy into them.
template <typename T, int kTiles, int kBlocks, bool kShared, bool kGated>
struct SkinnyWeight {
  static constexpr int kHalf = kGated ? kTiles / 2 : kTiles;  // tiles of different columns
  uint4 held[kShared ? 1 : kBlocks][kTiles];
  const T* source;  // tile 0, first block of the round
  int first;        // block of the slice that the round starts with
  int rows_left;    // of the group, from this lane's row of tile 0
  u32 target;

  __device__ __forceinline__ SkinnyWeight(const LinearParams& p, int first_row, int first_k, u32 shared) {
    source = static_cast<const T*>(p.weight) + i64(first_row) * p.in_width + first_k;
    first = 0;
    rows_left = p.out_width - first_row;
    target = shared + threadIdx.x * 16;
  }

  // One block of the round; rows and k past the end are not read (the address is not used then): zeros.
  __device__ __forceinline__ void load(const LinearParams& p, int place, int lane_blocks) {
    const T* from = source + place * kBlockK;
    const int rows = first + place < lane_blocks ? rows_left : 0;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const i64 row = tile % kHalf * 8 + (tile >= kHalf ? p.out_width : 0);
      const bool valid = tile % kHalf * 8 < rows;
      if constexpr (kShared) {
        cp_async_16_or_zero(target + (place * kTiles + tile) * kSkinnyThreads * 16, from + row * p.in_width, valid);
      } else {
        held[place][tile] = make_uint4(0, 0, 0, 0);
        if (valid) held[place][tile] = load_streamed_16(from + row * p.in_width);
      }
    }
    if constexpr (kShared) cp_async_commit();
  }

  // After a round: on to the next blocks of the group, or the first of the group that is `columns` further on.
  __device__ __forceinline__ void next_round(const LinearParams& p, int group_blocks, int columns) {
    first += kBlocks;
    source += kBlocks * kBlockK;
    if (first < group_blocks) return;
    first = 0;
    source += i64(columns) * p.in_width - group_blocks * kBlockK;
    rows_left -= columns;
  }

  __device__ __forceinline__ void multiply(float (&sums)[kTiles][4], const uint4 (&x)[2], int place) const {
    uint4 tiles[kTiles];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if constexpr (kShared) tiles[tile] = load_shared_16(target + (place * kTiles + tile) * kSkinnyThreads * 16);
      else tiles[tile] = held[place][tile];
    }
#pragma unroll
    for (int second = 0; second < 2; ++second)
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) mma_half_block<T>(sums[tile], x[0], x[1], tiles[tile], second);
  }
};

// A lane's part of x: rows lane / 4 and + 8, blocks of the warp's slice.
template <typename T, int kRowTiles>
struct SkinnyX {
  const T* source;
  i64 tile_step;
  int blocks[kRowTiles];  // that exist, of each row

  __device__ __forceinline__ SkinnyX(const LinearParams& p, int first_k, int lane_blocks) {
    const int row = blockIdx.y * 8 * kRowTiles + threadIdx.x % kWarp / 4;
    source = static_cast<const T*>(p.x) + row * p.x_stride + first_k;
    tile_step = 8 * p.x_stride;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) blocks[tile] = row + tile * 8 < p.num_rows ? lane_blocks : 0;
  }

  template <int kCount>
  __device__ __forceinline__ void load(uint4 (&x)[kCount][2], int first) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        x[i][tile] = make_uint4(0, 0, 0, 0);
        if (tile < kRowTiles && first + i < blocks[tile % kRowTiles])
          x[i][tile] = *reinterpret_cast<const uint4*>(source + tile * tile_step + (first + i) * kBlockK);
      }
  }
};

// What is added to one element besides its sum; read before the sum is ready.
struct SkinnyAddends {
  float bias, second;  // second: the residual, or the bias of the up row
};

template <typename T, bool kGated>
__device__ __forceinline__ SkinnyAddends addends_of(const LinearParams& p, int row, int column) {
  if (row >= p.num_rows || column >= p.out_width) return {0.0f, 0.0f};
  const float second = kGated ? bias_of<T>(p, p.out_width + column) : residual_of<T>(p, row, column);
  return {bias_of<T>(p, column), second};
}

// Blocks of x that a lane holds at once: as many as leave room for two blocks an SM.
template <int kRowTiles, int kBlocks, SkinnyWalk kWalk>
constexpr int kSkinnyBatch = kRowTiles * kBlocks > 8 || (kWalk == kLong && kRowTiles > 1) ? kBlocks / 2 : kBlocks;

// Registers decide how many blocks an SM can hold: weight, x and sums of a thread, and some for all else.
template <int kTiles, int kRowTiles, int kBlocks, SkinnyWalk kWalk, bool kShared, bool kGated>
constexpr int kSkinnyRegisters = (kShared ? 1 : kBlocks) * kTiles * 4 +
                                 kSkinnyBatch<kRowTiles, kBlocks, kWalk> * kRowTiles * 4 + kTiles * 5 +
                                 (kWalk == kOnce ? 24 : 32 + 8 * (kTiles - 1) * (kRowTiles - 1)) + (kGated ? 8 : 0);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kSkinnyRoom = 64;  // addresses take more registers there
#else
constexpr int kSkinnyRoom = 73;
#endif

template <typename T, int kTiles, int kRowTiles, int kBlocks, SkinnyWalk kWalk, bool kShared, bool kGated>
__global__ void __launch_bounds__(
    kSkinnyThreads, kSkinnyRegisters<kTiles, kRowTiles, kBlocks, kWalk, kShared, kGated> <= kSkinnyRoom ? 2 : 1)
    skinny_linear(const __grid_constant__ LinearParams p) {
  static_assert(kWalk == kOnce || kShared, "places that are filled again are in shared memory");
  extern __shared__ __align__(16) char shared[];
  constexpr int kHalf = kGated ? kTiles / 2 : kTiles, kColumns = 8 * kHalf;
  constexpr int kPartials = 8 * kRowTiles * 8 * kTiles;                         // of a slice
  constexpr int kOutputs = ceil_div(8 * kRowTiles * kColumns, kSkinnyThreads);  // of a thread
  constexpr int kBatch = kSkinnyBatch<kRowTiles, kBlocks, kWalk>;
  constexpr int kHeldBytes = kShared ? kBlocks * kTiles * kSkinnyThreads * 16 : 0;
  float* const partials = reinterpret_cast<float*>(shared + kHeldBytes);
  const int slice = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int first_row = blockIdx.y * 8 * kRowTiles, rows = min(p.num_rows - first_row, 8 * kRowTiles);
  const int stride = gridDim.x * kColumns;
  const int run = slice_blocks(p.in_width), blocks = ceil_div(p.in_width, kBlockK), used_slices = ceil_div(blocks, run);
  const int first_k = slice * run * kBlockK + lane % 4 * 8;
  const int num_blocks = min(run, blocks - slice * run);  // of the warp's slice; may be negative
  const int lane_blocks = min(num_blocks, (p.in_width - first_k + kBlockK - 8) / kBlockK);  // with k inside the rows
  // Blocks that a group takes in every warp, whole rounds of places; those past the slice are zeros and not multiplied.
  const int group_blocks = kWalk == kLong ? ceil_div(run, kBlocks) * kBlocks : kBlocks;

  SkinnyWeight<T, kTiles, kBlocks, kShared, kGated> weight(p, blockIdx.x * kColumns + lane / 4, first_k,
                                                          shared_address(shared));
#pragma unroll
  for (int place = 0; place < kBlocks; ++place) weight.load(p, place, lane_blocks);
  if constexpr (kWalk != kOnce) weight.next_round(p, group_blocks, stride);
  let_next_kernel_start();
  wait_for_previous_kernel();

  const SkinnyX<T, kRowTiles> x_rows(p, first_k, lane_blocks);
  int buffer = 0;
#pragma unroll 1
  for (int column = blockIdx.x * kColumns; column < p.out_width; column += stride) {
    float sums[kTiles][4] = {};
    SkinnyAddends addends[kOutputs];
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int output = threadIdx.x + i * kSkinnyThreads, m = output / kColumns;
      if (m < 8 * kRowTiles) addends[i] = addends_of<T, kGated>(p, first_row + m, column + output % kColumns);
    }
#pragma unroll 1
    for (int first = 0; first < (kWalk == kLong ? group_blocks : 1); first += kBlocks) {
#pragma unroll
      for (int part = 0; part < kBlocks; part += kBatch) {
        uint4 x[kBatch][2];
        x_rows.load(x, first + part);
        if constexpr (kShared && kWalk == kOnce) cp_async_wait<0>();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if constexpr (kWalk != kOnce) cp_async_wait<kBlocks - 1>();
          if (first + part + i < num_blocks) weight.multiply(sums, x[i], part + i);
          if constexpr (kWalk != kOnce) weight.load(p, part + i, lane_blocks);
        }
      }
      if constexpr (kWalk != kOnce) weight.next_round(p, group_blocks, stride);
    }

    float* const group_partials = partials + buffer * kSlices * kPartials;
    write_partials<kTiles, kRowTiles>(group_partials + slice * kPartials, sums, rows);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int output = threadIdx.x + i * kSkinnyThreads, m = output / kColumns, n = output % kColumns;
      if (m >= rows || column + n >= p.out_width) continue;
      const float* sum = group_partials + m * 8 * kTiles + n;
      float value = add_slices<kPartials>(sum, used_slices);
      if constexpr (kGated) {
        const float up = add_slices<kPartials>(sum + kColumns, used_slices);
        value = gated<T>(__fadd_rn(value, addends[i].bias), __fadd_rn(up, addends[i].second));
      } else {
        value = finish(value, addends[i].bias, addends[i].second);
      }
      store_element<T>(p, first_row + m, column + n, value);
    }
    if constexpr (kWalk == kOnce) return;
    buffer ^= 1;
  }
}

}  // namespace edgellm
