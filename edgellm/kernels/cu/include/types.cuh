// Element types and what every kernel needs around them: conversions through float, 16-byte accesses, reductions.
// Device code only; compiled by nvcc and by NVRTC, so no host header.  Lanes: 32 a warp.  Sizes in bytes or elements.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace edgellm {

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

using f16 = __half;
using bf16 = __nv_bfloat16;
using fp8 = __nv_fp8_e4m3;

constexpr int kWarp = 32;
constexpr u32 kFullMask = 0xffffffffu;
constexpr float kFp8Max = 448.0f;  // largest finite e4m3 value

static_assert(sizeof(i32) == 4 && sizeof(i64) == 8 && sizeof(void*) == 8, "64-bit device code");

__host__ __device__ constexpr i64 ceil_div(i64 value, i64 unit) { return (value + unit - 1) / unit; }
__host__ __device__ constexpr int ceil_div(int value, int unit) { return (value + unit - 1) / unit; }

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

// ---- conversions: round to nearest even, fp8 saturating ------------------------------------------------------------

__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ float to_float(f16 value) { return __half2float(value); }
__device__ __forceinline__ float to_float(bf16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(fp8 value) { return static_cast<float>(value); }

template <typename T>
__device__ __forceinline__ T from_float(float value);
template <>
__device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__device__ __forceinline__ f16 from_float<f16>(float value) {
  return __float2half_rn(value);
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ __forceinline__ fp8 from_float<fp8>(float value) {
  return fp8(value);
}

// Two elements of a 16-bit type in one register, `low` at the lower address.
template <typename T>
__device__ __forceinline__ u32 pack2(float low, float high);
template <>
__device__ __forceinline__ u32 pack2<f16>(float low, float high) {
  __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<u32*>(&pair);
}
template <>
__device__ __forceinline__ u32 pack2<bf16>(float low, float high) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<u32*>(&pair);
}

template <typename T>
__device__ __forceinline__ float2 unpack2(u32 pair);
template <>
__device__ __forceinline__ float2 unpack2<f16>(u32 pair) {
  return __half22float2(*reinterpret_cast<__half2*>(&pair));
}
template <>
__device__ __forceinline__ float2 unpack2<bf16>(u32 pair) {
  return __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&pair));
}

// Four e4m3 bytes to four floats, lowest byte first.
__device__ __forceinline__ float4 fp8x4_to_float4(u32 bytes) {
  __half2_raw low = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes & 0xffffu), __NV_E4M3);
  __half2_raw high = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bytes >> 16), __NV_E4M3);
  float2 first = __half22float2(__half2(low)), second = __half22float2(__half2(high));
  return make_float4(first.x, first.y, second.x, second.y);
}

// Four floats to four e4m3 bytes, saturating, lowest byte first.
__device__ __forceinline__ u32 float4_to_fp8x4(float a, float b, float c, float d) {
  u32 low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  u32 high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | (high << 16);
}

// The stored scale of one token's head row whose largest magnitude is `amax`: value = fp8 * scale.  Rows so small that
// their scale would be a denormal number are stored as zeros.
__device__ __forceinline__ float fp8_scale(float amax) { return amax < 0x1p-100f ? 1.0f : __fdiv_rn(amax, kFp8Max); }

// ---- vectors: N elements moved by one access of N * sizeof(T) bytes, address aligned to that ----------------------

template <typename T, int N>
struct alignas(sizeof(T) * N) Vec {
  static_assert((sizeof(T) * N & (sizeof(T) * N - 1)) == 0 && sizeof(T) * N <= 16, "1, 2, 4, 8 or 16 bytes");
  T v[N];
  __device__ __forceinline__ T& operator[](int i) { return v[i]; }
  __device__ __forceinline__ const T& operator[](int i) const { return v[i]; }
};

template <typename T>
constexpr int kVec = 16 / static_cast<int>(sizeof(T));  // elements of a 16-byte access

template <typename T, int N = kVec<T>>
__device__ __forceinline__ Vec<T, N> load_vec(const T* address) {
  return *reinterpret_cast<const Vec<T, N>*>(address);
}
template <typename T, int N>
__device__ __forceinline__ void store_vec(T* address, const Vec<T, N>& vec) {
  *reinterpret_cast<Vec<T, N>*>(address) = vec;
}
// Through the read-only path, for memory that no thread of this kernel (nor a kernel it overlaps) writes.
template <typename T>
__device__ __forceinline__ Vec<T, kVec<T>> load_vec_readonly(const T* address) {
  uint4 bits = __ldg(reinterpret_cast<const uint4*>(address));
  return *reinterpret_cast<Vec<T, kVec<T>>*>(&bits);
}

// N elements to floats and back, one access when the element is narrower than a float (two or four for wide N).
template <int N, typename T>
__device__ __forceinline__ void load_floats(const T* address, float (&out)[N]) {
  constexpr int kStep = N < kVec<T> ? N : kVec<T>;
  static_assert(N % kStep == 0, "N is a multiple of the access");
#pragma unroll
  for (int start = 0; start < N; start += kStep) {
    Vec<T, kStep> part = load_vec<T, kStep>(address + start);
#pragma unroll
    for (int i = 0; i < kStep; ++i) out[start + i] = to_float(part[i]);
  }
}
template <int N, typename T>
__device__ __forceinline__ void store_floats(T* address, const float (&values)[N]) {
  constexpr int kStep = N < kVec<T> ? N : kVec<T>;
  static_assert(N % kStep == 0, "N is a multiple of the access");
#pragma unroll
  for (int start = 0; start < N; start += kStep) {
    Vec<T, kStep> part;
#pragma unroll
    for (int i = 0; i < kStep; ++i) part[i] = from_float<T>(values[start + i]);
    store_vec(address + start, part);
  }
}

// ---- reductions, in a fixed order: every lane gets the same bits --------------------------------------------------

// Over groups of kLanes neighbouring lanes (a power of two).
template <int kLanes = kWarp>
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullMask, value, step);
  return value;
}
template <int kLanes = kWarp>
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(kFullMask, value, step));
  return value;
}

// Over a block of kThreads (a multiple of 32, at most 1024).  `scratch`: 32 floats of shared memory.  Every thread
// calls it and gets the result; scratch may be used again after it returns.
template <int kThreads>
__device__ __forceinline__ float block_sum(float value, float* scratch) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp, "whole warps, at most 32");
  value = warp_sum(value);
  if constexpr (kWarps == 1) return value;
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = warp_sum(lane < kWarps ? scratch[lane] : 0.0f);
  __syncthreads();
  return value;
}
template <int kThreads>
__device__ __forceinline__ float block_max(float value, float* scratch) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp, "whole warps, at most 32");
  value = warp_max(value);
  if constexpr (kWarps == 1) return value;
  int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = warp_max(lane < kWarps ? scratch[lane] : negative_infinity());
  __syncthreads();
  return value;
}

// ---- overlap of dependent launches (9.0 and newer; nothing elsewhere) ---------------------------------------------

// Wait until the kernels before this one are complete and their writes visible.  Call it before the first access to
// memory that they write.  Returns at once when the launch had no `pdl`.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Let the next kernel, if launched with `pdl`, start its prologue once every block has called this or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace edgellm
