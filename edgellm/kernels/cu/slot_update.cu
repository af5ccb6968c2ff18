// Rows of per-slot state by a list of slots: clear (0), set to values[i], or add values[i].
// Axes: entries i (grid x), columns in [0, width) (grid y, threads); strides in elements.  Slots out of range
// (-1: padding) are skipped.  Each slot stands at most once in the list.  Floats are added in float32, rounded once.
#include "types.cuh"

namespace edgellm {

struct SlotUpdateParams {
  void* state;
  const int* slots;
  const void* values;  // null: clear
  i64 state_stride;
  i64 values_stride;
  int width;
  int num_slots;
  int is_add;
};

constexpr int kSlotThreads = 128;

__device__ __forceinline__ int add(int a, int b) { return a + b; }
__device__ __forceinline__ i64 add(i64 a, i64 b) { return a + b; }
template <typename T>
__device__ __forceinline__ T add(T a, T b) {
  return from_float<T>(to_float(a) + to_float(b));
}

template <typename T, int kStep>
__global__ void __launch_bounds__(kSlotThreads) slot_update(const __grid_constant__ SlotUpdateParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 slot = p.slots[blockIdx.x];
  const int column = (blockIdx.y * kSlotThreads + threadIdx.x) * kStep;
  if (slot < 0 || slot >= p.num_slots || column >= p.width) return;
  T* target = static_cast<T*>(p.state) + slot * p.state_stride + column;
  Vec<T, kStep> result = {};
  if (p.values != nullptr) {
    const i64 offset = blockIdx.x * p.values_stride + column;
    result = load_vec<T, kStep>(static_cast<const T*>(p.values) + offset);
    if (p.is_add) {
      const Vec<T, kStep> old = load_vec<T, kStep>(target);
#pragma unroll
      for (int k = 0; k < kStep; ++k) result[k] = add(old[k], result[k]);
    }
  }
  store_vec(target, result);
}

}  // namespace edgellm
