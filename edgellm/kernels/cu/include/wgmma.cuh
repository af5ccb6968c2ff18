// Warpgroup products of 9.0 (128 threads, 64 rows): operands in shared memory in the 128-byte swizzle, float sums.
// A panel is rows of 128 bytes (64 elements of 16 bits); within 8 rows the 16-byte chunks are exchanged by the row
// number, so a panel starts at a multiple of 1024 bytes.  Sums lie as those of mma.m16n8k16; warp w has rows 16 w on.
#pragma once

#include "types.cuh"

namespace edgellm {

constexpr int kPanelBytes = 128;  // of a row

// Descriptor of an operand at a shared address.  Row-major along k (query, keys): groups of 8 rows 1024 bytes apart.
// Transposed (values): 64 columns a panel, panels `panel_stride` bytes apart, groups of 8 k-rows 1024 bytes apart.
__device__ __forceinline__ u64 wgmma_operand(u32 address, u32 panel_stride) {
  return static_cast<u64>(address >> 4 & 0x3fff) | static_cast<u64>(panel_stride >> 4) << 16 |
         static_cast<u64>(1024 >> 4) << 32 | 1ull << 62;
}

__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Wait until at most kPending committed groups are under way.  Follow it by `wgmma_settle` of what they wrote.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// The compiler must not use these registers before this point.
template <int kTiles>
__device__ __forceinline__ void wgmma_settle(float (&d)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(d[n][i])::"memory");
}

// d (64 x kColumns) (+)= a (64 x 16) b (16 x kColumns), both from shared memory, both row-major along k.
template <typename T, int kColumns>
__device__ __forceinline__ void wgmma_shared(float (&d)[kColumns / 8][4], u64 a, u64 b, bool add);
// d += a b, a from registers as an operand of mma.m16n8k16, b transposed.
template <typename T, int kColumns>
__device__ __forceinline__ void wgmma_registers(float (&d)[kColumns / 8][4], const u32 (&a)[4], u64 b);

// Operands %0 to %(n - 1) of an asm statement, by name and as its outputs: the sums of n / 4 tiles of 8 columns.
#define EDGELLM_SUMS_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EDGELLM_SUMS_64 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63"
#define EDGELLM_SUMS_128 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, " \
  "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, " \
  "%100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define EDGELLM_OUT_4(t) "+f"(d[t][0]), "+f"(d[t][1]), "+f"(d[t][2]), "+f"(d[t][3])
#define EDGELLM_OUT_16(t) EDGELLM_OUT_4(t), EDGELLM_OUT_4(t + 1), EDGELLM_OUT_4(t + 2), EDGELLM_OUT_4(t + 3)
#define EDGELLM_OUT_32 EDGELLM_OUT_16(0), EDGELLM_OUT_16(4)
#define EDGELLM_OUT_64 EDGELLM_OUT_32, EDGELLM_OUT_16(8), EDGELLM_OUT_16(12)
#define EDGELLM_OUT_128 \
  EDGELLM_OUT_64, EDGELLM_OUT_16(16), EDGELLM_OUT_16(20), EDGELLM_OUT_16(24), EDGELLM_OUT_16(28)

#define EDGELLM_WGMMA_SHARED(type, columns, sums, a_at, b_at, add_at)                                              \
  template <>                                                                                                      \
  __device__ __forceinline__ void wgmma_shared<type, columns>(float (&d)[columns / 8][4], u64 a, u64 b, bool add) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #add_at ", 0;\n"                                                \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type "." #type " {" EDGELLM_SUMS_##sums   \
                 "}, %" #a_at ", %" #b_at ", p, 1, 1, 0, 0;}"                                                       \
                 : EDGELLM_OUT_##sums                                                                              \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                                    \
  }
EDGELLM_WGMMA_SHARED(bf16, 64, 32, 32, 33, 34)
EDGELLM_WGMMA_SHARED(bf16, 128, 64, 64, 65, 66)
EDGELLM_WGMMA_SHARED(f16, 64, 32, 32, 33, 34)
EDGELLM_WGMMA_SHARED(f16, 128, 64, 64, 65, 66)

#define EDGELLM_WGMMA_REGISTERS(type, columns, sums, a0, a1, a2, a3, b_at)                                          \
  template <>                                                                                                      \
  __device__ __forceinline__ void wgmma_registers<type, columns>(float (&d)[columns / 8][4], const u32 (&a)[4],     \
                                                                 u64 b) {                                          \
    asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"                                                           \
                 "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." #type "." #type " {" EDGELLM_SUMS_##sums   \
                 "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b_at ", p, 1, 1, 1;}"                            \
                 : EDGELLM_OUT_##sums                                                                              \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                            \
  }
EDGELLM_WGMMA_REGISTERS(bf16, 64, 32, 32, 33, 34, 35, 36)
EDGELLM_WGMMA_REGISTERS(bf16, 128, 64, 64, 65, 66, 67, 68)
EDGELLM_WGMMA_REGISTERS(bf16, 256, 128, 128, 129, 130, 131, 132)
EDGELLM_WGMMA_REGISTERS(f16, 64, 32, 32, 33, 34, 35, 36)
EDGELLM_WGMMA_REGISTERS(f16, 128, 64, 64, 65, 66, 67, 68)
EDGELLM_WGMMA_REGISTERS(f16, 256, 128, 128, 129, 130, 131, 132)

// ---- barriers in shared memory -------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ bool barrier_done(u32 barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  while (!barrier_done(barrier, parity)) {
  }
}
// Writes of this thread to shared memory become visible to warpgroup products.
__device__ __forceinline__ void fence_for_wgmma() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace edgellm
