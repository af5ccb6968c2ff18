// What the two linear kernels share, so that both give an output element the same bits: parameters, the cut of K, the
// fragments and the end of a sum.
//
// out[m, n] = T((sum over k of x[m, k] * weight[n, k]) + bias[n]), after adding residual[m, n] in float if there is one.
// Order of the sum: K is taken in blocks of 32, the blocks in kSlices runs of `slice_blocks` neighbours (the last ones
// shorter or empty).  A run is one ascending chain of mma.m16n8k16 from zero, two a block; the runs are added in order.
// Inside a block the first mma takes k = 8 * i + {0, 1, 2, 3}, the second k = 8 * i + {4, 5, 6, 7}, i in [0, 4), so that
// a lane's operands of both are 16 neighbouring bytes.  Missing k count as zeros.
#pragma once

#include "mma.cuh"
#include "types.cuh"

namespace edgellm {

// Strides in elements.  `out_is_float`: out and residual are float32 instead of T.
struct LinearParams {
  const void* x;
  const void* weight;
  const void* bias;      // T (out_width), or null
  const void* residual;  // type of out, or null; may be out itself
  void* out;
  i64 x_stride;
  i64 residual_stride;
  i64 out_stride;
  int num_rows;   // M
  int in_width;   // K, a multiple of 8
  int out_width;  // N; weight is (N, K) contiguous
  int out_is_float;
};

constexpr int kSlices = 16;
constexpr int kBlockK = 32;

__device__ __forceinline__ int slice_blocks(int in_width) { return ceil_div(ceil_div(in_width, kBlockK), kSlices); }

__device__ __forceinline__ uint4 load_shared_16(u32 address) {
  uint4 bits;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "r"(address)
               : "memory");
  return bits;
}

// sum = x * weight^T, nothing added; otherwise as mma_16816.
template <typename T>
__device__ __forceinline__ void mma_from_zero(float (&sum)[4], const u32 (&x)[4], const u32 (&weight)[2]);
template <>
__device__ __forceinline__ void mma_from_zero<f16>(float (&sum)[4], const u32 (&x)[4], const u32 (&weight)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(weight[0]), "r"(weight[1]), "f"(0.0f));
}
template <>
__device__ __forceinline__ void mma_from_zero<bf16>(float (&sum)[4], const u32 (&x)[4], const u32 (&weight)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%10, %10, %10, %10};"
      : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
      : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(weight[0]), "r"(weight[1]), "f"(0.0f));
}

// Half a block of 32 k: rows `low` (m) and `high` (m + 8) of x against 8 weight rows; lane 4 * row + i holds the 16 bytes
// from k 8 * i.  `restart`: from zero.
template <typename T>
__device__ __forceinline__ void mma_half_block(float (&sum)[4], const uint4& low, const uint4& high,
                                               const uint4& weight, bool second, bool restart = false) {
  const u32 x[4] = {second ? low.z : low.x, second ? high.z : high.x, second ? low.w : low.y, second ? high.w : high.y};
  const u32 columns[2] = {second ? weight.z : weight.x, second ? weight.w : weight.y};
  if (restart) mma_from_zero<T>(sum, x, columns);
  else mma_16816<T>(sum, x, columns);
}

// 16 bytes of a weight: read once, so not kept in L1, and with its neighbours into the L2.
__device__ __forceinline__ uint4 load_streamed_16(const void* address) {
  uint4 bits;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(address));
  return bits;
}

template <typename T>
__device__ __forceinline__ float bias_of(const LinearParams& p, int column) {
  return p.bias ? to_float(static_cast<const T*>(p.bias)[column]) : 0.0f;
}

template <typename T>
__device__ __forceinline__ float residual_of(const LinearParams& p, int row, int column) {
  const i64 place = row * p.residual_stride + column;
  if (!p.residual) return 0.0f;
  return p.out_is_float ? static_cast<const float*>(p.residual)[place]
                        : to_float(static_cast<const T*>(p.residual)[place]);
}

// One rounding, whatever is added.
__device__ __forceinline__ float finish(float sum, float bias, float residual) {
  return __fadd_rn(residual, __fadd_rn(sum, bias));
}

template <typename T>
__device__ __forceinline__ void store_element(const LinearParams& p, int row, int column, float value) {
  const i64 place = row * p.out_stride + column;
  if (p.out_is_float) {
    static_cast<float*>(p.out)[place] = value;
  } else {
    static_cast<T*>(p.out)[place] = from_float<T>(value);
  }
}

// Two neighbouring sums of a row, finished and stored.
template <typename T>
__device__ __forceinline__ void store_pair(const LinearParams& p, int row, int column, float first, float second) {
  if (row >= p.num_rows || column >= p.out_width) return;
  first = finish(first, bias_of<T>(p, column), residual_of<T>(p, row, column));
  const bool both = column + 1 < p.out_width;
  if (both) second = finish(second, bias_of<T>(p, column + 1), residual_of<T>(p, row, column + 1));
  if (both && !p.out_is_float && p.out_stride % 2 == 0) {
    *reinterpret_cast<u32*>(static_cast<T*>(p.out) + row * p.out_stride + column) = pack2<T>(first, second);
    return;
  }
  store_element<T>(p, row, column, first);
  if (both) store_element<T>(p, row, column + 1, second);
}

}  // namespace edgellm
