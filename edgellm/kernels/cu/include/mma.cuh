// Tensor cores of 8.0 and newer, by warp: ldmatrix, mma.m16n8k16 with float accumulators, and cp.async.
// Shared memory is addressed by 32-bit byte addresses (`shared_address`).  Layouts as in the PTX ISA, where lane =
// 4 * group + member: accumulator d[0], d[1] are row `group`, columns 2 * member and + 1; d[2], d[3] row group + 8.
#pragma once

#include "types.cuh"

namespace edgellm {

__device__ __forceinline__ u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// ---- ldmatrix: 8x8 tiles of 16-bit elements; lane i of tile i / 8 gives the address of row i % 8 (16 bytes) --------

__device__ __forceinline__ void ldmatrix_x4(u32 (&out)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row_address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&out)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row_address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(u32 (&out)[2], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(row_address)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&out)[2], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
               : "=r"(out[0]), "=r"(out[1])
               : "r"(row_address)
               : "memory");
}

// ---- mma: d (16 x 8 float) += a (16 x 16) * b (16 x 8), T is f16 or bf16 -------------------------------------------
// a: {rows g, k 2m..}, {rows g + 8, k 2m..}, {rows g, k 2m + 8..}, {rows g + 8, k 2m + 8..}; b: {k 2m.., column g},
// {k 2m + 8.., column g}.

template <typename T>
__device__ __forceinline__ void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]);
template <>
__device__ __forceinline__ void mma_16816<f16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_16816<bf16>(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- cp.async: global to shared memory without registers; addresses aligned to the size ---------------------------

// 16 bytes, past L1 (streamed data).
__device__ __forceinline__ void cp_async_16(u32 target, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}
// 16 bytes, or 16 zero bytes when not valid; source is not read then but must still be a mapped-looking pointer.
__device__ __forceinline__ void cp_async_16_or_zero(u32 target, const void* source, bool valid) {
  int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}
// 4 bytes, or zero; for scales and other narrow columns.
__device__ __forceinline__ void cp_async_4_or_zero(u32 target, const void* source, bool valid) {
  int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(target), "l"(source), "r"(bytes) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most kPending of this thread's groups are still under way.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace edgellm
