// Few rows times a weight that is stored in 4 or 8 bits: out (M, N) = x (M, K) weight (N, K)^T.  Each weight is expanded
// to T in registers; from there on the sum is linear.cuh's, so that the bits are those of skinny_linear on the expanded
// weight, but for one thing: slices are whole units (`unit_slice_blocks`).
//
// A panel is 16 rows of the weight, two tiles of 8.  A unit is a panel's rows by kUnitBlocks blocks of 32 k: 16 bytes a
// lane, 512 in a row, [panel][unit][lane]; lane 4 * row + i holds k 8 * i.. of each block, for rows `row` and 8 + `row`.
// A place holds a unit of each of a block's kPanels panels, with their scales, in shared memory that no other lane
// touches; a warp has kPlaces of them and fills one again when it is used up.  A warp takes kSlices / kWarps neighbouring
// slices of K, one after the other; the slices meet in shared memory.  A block walks through groups of kPanels panels,
// blockIdx.y, + gridDim.y, .., and takes the x rows [blockIdx.x * 8 * kRowTiles, ..): neighbours in the grid read one
// weight.  Weights are on their way before the
// previous kernel is waited for; x only after.
//
// kGated: the weight has 2 * N rows, gate then up; both sums are rounded to T, and out = T(silu(gate) * up).  Half of a
// group's panels are gate rows, half the up rows of the same columns.
#pragma once

#include "linear_slices.cuh"

namespace edgellm {

// Strides in elements.  `out_is_float`: out and residual are float32 instead of T.
struct QuantisedParams {
  const void* x;
  const void* packed;
  const void* scales;    // by format
  const void* zeros;     // by format
  const void* bias;      // T (N, twice that where gated), or null
  const void* residual;  // type of out, or null; may be out itself
  void* out;
  i64 x_stride;
  i64 residual_stride;
  i64 out_stride;
  int num_rows;   // M
  int in_width;   // K, whole units
  int out_width;  // N, whole panels
  int out_is_float;
  int num_units;    // of a panel
  int num_groups;   // scales of a row
  int group_shift;  // a scale is for 1 << group_shift blocks of 32 k
  int scale_step;   // 1: a scale for each row; 0: rows of a panel share it
  int span_mask;    // units of a slice at 0, span_mask + 1, .. begin a span that shares scales
  int reserved;
};

constexpr int kPanelRows = 16;
constexpr int kUnitBytes = kWarp * 16;
constexpr int kUnitPlaceBytes = kUnitBytes + kWarp * 8;  // with a lane's scales behind

__device__ __forceinline__ void cp_async_8(u32 target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ uint2 load_shared_8(u32 address) {
  uint2 bits;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "r"(address) : "memory");
  return bits;
}

// The part that the end of a sum needs.
__device__ __forceinline__ LinearParams linear_of(const QuantisedParams& p) {
  return {p.x,       nullptr,    p.bias,     p.residual,  p.out,       p.x_stride, p.residual_stride, p.out_stride,
          p.num_rows, p.in_width, p.out_width, p.out_is_float};
}

// Blocks that share an SM: some cards take more registers for addresses.
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
template <int kBlocksPerSm>
constexpr int kBlocksOfSm = kBlocksPerSm > 1 ? kBlocksPerSm - 1 : 1;
#else
template <int kBlocksPerSm>
constexpr int kBlocksOfSm = kBlocksPerSm;
#endif

// Blocks of a slice, whole units.
template <int kUnitBlocks>
__device__ __forceinline__ int unit_slice_blocks(int in_width) {
  return ceil_div(slice_blocks(in_width), kUnitBlocks) * kUnitBlocks;
}

// This thread's warp, known to be the same in all its lanes.
__device__ __forceinline__ int warp_of_block() { return __shfl_sync(kFullMask, int(threadIdx.x) / kWarp, 0); }

// A value that the compiler keeps rather than works out again at every use.
__device__ __forceinline__ u32 kept(u32 value) {
  asm volatile("mov.u32 %0, %0;" : "+r"(value));
  return value;
}

// Brings units and their scales into places, in the order in which a warp uses them.
template <typename Format, int kPanels, int kWarps, bool kGated>
struct UnitFetch {
  static constexpr int kRounds = kSlices / kWarps, kHalf = kGated ? kPanels / 2 : kPanels;
  static constexpr int kPlaceBytes = kPanels * kUnitPlaceBytes;
  const char* source;  // the lane's bytes of the next unit, in the group's first panel
  typename Format::ScaleSource scales;
  int warp;
  int panel;        // first of the group
  int block;        // first of the unit that comes next
  int unit, round;  // that unit in the slice, the slice of the warp

  __device__ __forceinline__ UnitFetch(const QuantisedParams& p, int warp, int units) : warp(warp) {
    panel = blockIdx.y * kHalf;
    unit = round = 0;
    start_slice(p, units);
  }

  __device__ __forceinline__ void start_slice(const QuantisedParams& p, int units) {
    const int at = (warp * kRounds + round) * units;
    block = at * Format::kUnitBlocks;
    source = static_cast<const char*>(p.packed) + (i64(panel) * p.num_units + at) * kUnitBytes + threadIdx.x % kWarp * 16;
    scales = Format::scale_source(p, panel * p.num_groups);
  }

  // The next unit into a place: `weights` is where the lane's 16 bytes go, `scale` the 8 of its scales.
  __device__ __forceinline__ void next(const QuantisedParams& p, u32 weights, u32 scale, int units, int blocks) {
    if (block < blocks) {
      const int panels = p.out_width / kPanelRows, group = block >> p.group_shift;
      const bool begins_span = (unit & p.span_mask) == 0;
      cp_async_16(weights, source);
      if (begins_span) Format::fetch_scales(p, scales, scale, group);
#pragma unroll
      for (int i = 1; i < kPanels; ++i) {
        if (kHalf > 1 && panel + i % kHalf >= panels) continue;
        const int apart = i % kHalf + (i >= kHalf ? panels : 0);
        cp_async_16(weights + i * kUnitPlaceBytes, source + i64(apart) * p.num_units * kUnitBytes);
        if (begins_span) Format::fetch_scales(p, scales, scale + i * kUnitPlaceBytes, apart * p.num_groups + group);
      }
    }
    cp_async_commit();
    source += kUnitBytes;
    block += Format::kUnitBlocks;
    if (++unit == units) next_slice(p, units, blocks);
  }

  __device__ __forceinline__ void next_slice(const QuantisedParams& p, int units, int blocks) {
    unit = 0;
    if (++round == kRounds) {
      round = 0;
      panel += gridDim.y * kHalf;
    }
    if (panel * kPanelRows < p.out_width) start_slice(p, units);
    else block = blocks;
  }
};

// A lane's pieces of x, 8 k of each block of a unit: rows lane / 4 and + 8.  Rows past the last are the last again, whose
// sums nobody reads.
template <typename T, int kUnitBlocks, int kRowTiles>
struct UnitX {
  const T* source[kRowTiles];  // of the next unit

  __device__ __forceinline__ UnitX(const QuantisedParams& p, int first_row, int block) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const int row = min(first_row + tile * 8 + int(threadIdx.x) % kWarp / 4, p.num_rows - 1);
      source[tile] = static_cast<const T*>(p.x) + row * p.x_stride + block * kBlockK + threadIdx.x % 4 * 8;
    }
  }

  __device__ __forceinline__ void load(uint4 (&x)[kUnitBlocks][kRowTiles]) {
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kUnitBlocks; ++i) x[i][tile] = *reinterpret_cast<const uint4*>(source[tile] + i * kBlockK);
      source[tile] += kUnitBlocks * kBlockK;
    }
  }
};

// 32 k of a panel times up to 8 rows of x: the weight is the operand of 16 rows.
template <typename T>
__device__ __forceinline__ void mma_panel(float (&sum)[4], const uint4& low, const uint4& high, const uint4& x) {
  const u32 first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
  const u32 x_first[2] = {x.x, x.y}, x_second[2] = {x.z, x.w};
  mma_16816<T>(sum, first, x_first);
  mma_16816<T>(sum, second, x_second);
}

// One slice's sums of the group to shared memory: [x row][weight row] floats.
template <int kPanels, int kRowTiles>
__device__ __forceinline__ void write_panel_sums(float* target, const float (&sums)[kPanels][kRowTiles][4], int rows) {
  const int weight_row = threadIdx.x % kWarp / 4, x_row = threadIdx.x % 4 * 2;
#pragma unroll
  for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
    for (int i = 0; i < kPanels; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = tile * 8 + x_row + e % 2;
        if (row < rows) target[(row * kPanels + i) * kPanelRows + e / 2 * 8 + weight_row] = sums[i][tile][e];
      }
}

// What is added to one element besides its sum, in this order.
struct QuantisedAddends {
  float bias, residual;
};

template <typename T>
__device__ __forceinline__ QuantisedAddends quantised_addends(const LinearParams& p, int row, int column) {
  if (row >= p.num_rows || column >= p.out_width) return {0.0f, 0.0f};
  return {bias_of<T>(p, column), residual_of<T>(p, row, column)};
}

template <typename T, typename Format, int kPanels, int kRowTiles, int kWarps, int kPlaces, bool kGated>
__device__ __forceinline__ void quantised_rows(const QuantisedParams& p) {
  using Fetch = UnitFetch<Format, kPanels, kWarps, kGated>;
  extern __shared__ __align__(16) char shared[];
  constexpr int kThreads = kWarps * kWarp, kUnitBlocks = Format::kUnitBlocks;
  constexpr int kColumns = kPanelRows * Fetch::kHalf;
  constexpr int kPartials = 8 * kRowTiles * kPanelRows * kPanels;         // of a slice
  constexpr int kOutputs = ceil_div(8 * kRowTiles * kColumns, kThreads);  // of a thread
  constexpr int kRingBytes = kPlaces * Fetch::kPlaceBytes;                // of a warp
  const int warp = warp_of_block(), lane = threadIdx.x % kWarp;
  const int first_row = blockIdx.x * 8 * kRowTiles, rows = min(p.num_rows - first_row, 8 * kRowTiles);
  const int run = unit_slice_blocks<kUnitBlocks>(p.in_width), units = run / kUnitBlocks, blocks = p.in_width / kBlockK;
  float* const partials = reinterpret_cast<float*>(shared + kWarps * kRingBytes);
  const u32 ring = shared_address(shared) + warp * kRingBytes;
  const u32 weights = kept(ring + lane * 16), scales = kept(ring + kUnitBytes + lane * 8);

  Fetch fetch(p, warp, units);
#pragma unroll 1
  for (int place = 0; place < kRingBytes; place += Fetch::kPlaceBytes)
    fetch.next(p, weights + place, scales + place, units, blocks);
  let_next_kernel_start();
  wait_for_previous_kernel();

  const typename Format::Reader reader;
  int place = 0;
#pragma unroll 1
  for (int column = blockIdx.y * kColumns; column < p.out_width; column += gridDim.y * kColumns) {
#pragma unroll 1
    for (int round = 0; round < Fetch::kRounds; ++round) {
      float sums[kPanels][kRowTiles][4] = {};
      const int slice = warp * Fetch::kRounds + round;
      UnitX<T, kUnitBlocks, kRowTiles> x_rows(p, first_row, slice * run);
      int units_left = min(units, (blocks - slice * run) / kUnitBlocks);  // those past the last block are not there
      typename Format::Scales unit_scales[kPanels];
#pragma unroll 1
      for (int unit = 0; unit < units; ++unit) {
        if (--units_left >= 0) {
          uint4 x[kUnitBlocks][kRowTiles];
          x_rows.load(x);
          cp_async_wait<kPlaces - 1>();
#pragma unroll
          for (int i = 0; i < kPanels; ++i) {
            const uint4 packed = load_shared_16(weights + place + i * kUnitPlaceBytes);
            if ((unit & p.span_mask) == 0) unit_scales[i] = reader.scales(scales + place + i * kUnitPlaceBytes);
#pragma unroll
            for (int half = 0; half < kUnitBlocks; ++half) {
              const uint4 low = Format::expand(packed, unit_scales[i], half, 0);
              const uint4 high = Format::expand(packed, unit_scales[i], half, 1);
#pragma unroll
              for (int tile = 0; tile < kRowTiles; ++tile) mma_panel<T>(sums[i][tile], low, high, x[half][tile]);
            }
          }
        }
        fetch.next(p, weights + place, scales + place, units, blocks);
        place = place + Fetch::kPlaceBytes == kRingBytes ? 0 : place + Fetch::kPlaceBytes;
      }
      write_panel_sums<kPanels, kRowTiles>(partials + slice * kPartials, sums, rows);
    }
    const LinearParams linear = linear_of(p);
    QuantisedAddends addends[kOutputs];  // on their way before the other warps are waited for
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int output = threadIdx.x + i * kThreads, m = output / kColumns;
      if (!kGated && m < rows) addends[i] = quantised_addends<T>(linear, first_row + m, column + output % kColumns);
    }
    __syncthreads();
    const int used_slices = ceil_div(blocks, run);
#pragma unroll
    for (int i = 0; i < kOutputs; ++i) {
      const int output = threadIdx.x + i * kThreads, m = output / kColumns, n = output % kColumns;
      if (m >= rows || column + n >= p.out_width) continue;
      const float* sum = partials + m * kPanels * kPanelRows + n;
      float value = add_slices<kPartials>(sum, used_slices);
      if constexpr (kGated) {
        const float up = add_slices<kPartials>(sum + kColumns, used_slices);
        value = gated<T>(__fadd_rn(value, bias_of<T>(linear, column + n)),
                         __fadd_rn(up, bias_of<T>(linear, p.out_width + column + n)));
      } else {
        value = finish(value, addends[i].bias, addends[i].residual);
      }
      store_element<T>(linear, first_row + m, column + n, value);
    }
    if (column + int(gridDim.y) * kColumns < p.out_width) __syncthreads();  // sums are read before the next group's come
  }
}

// The weight itself, expanded: out (N, K) T, rows `out_stride` apart.  A warp a unit, in order.
template <typename T, typename Format, int kThreads>
__device__ __forceinline__ void expand_units(const QuantisedParams& p) {
  const i64 total = i64(p.out_width / kPanelRows) * p.num_units;
  const int lane = threadIdx.x % kWarp;
  const typename Format::Reader reader;
  wait_for_previous_kernel();
  for (i64 at = i64(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp; at < total;
       at += i64(gridDim.x) * (kThreads / kWarp)) {
    const int panel = at / p.num_units, unit = at % p.num_units;
    const uint4 packed = load_streamed_16(static_cast<const char*>(p.packed) + at * kUnitBytes + lane * 16);
    const int group = panel * p.num_groups + (unit * Format::kUnitBlocks >> p.group_shift);
    const typename Format::Scales scales = reader.load(p, Format::scale_source(p, group));
    T* const out = static_cast<T*>(p.out) + i64(panel * kPanelRows + lane / 4) * p.out_stride +
                   unit * (Format::kUnitBlocks * kBlockK) + lane % 4 * 8;
#pragma unroll
    for (int half = 0; half < Format::kUnitBlocks; ++half)
#pragma unroll
      for (int tile = 0; tile < 2; ++tile)
        *reinterpret_cast<uint4*>(out + tile * 8 * p.out_stride + half * kBlockK) =
            Format::expand(packed, scales, half, tile);
  }
}

}  // namespace edgellm
