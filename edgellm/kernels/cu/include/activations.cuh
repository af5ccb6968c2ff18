// Activations in float.  16-bit results hide the errors of the fast exponential and division (a few 1e-6 of the value);
// float32 ones do not, so T, the type of the result, chooses.
#pragma once

#include "types.cuh"

namespace edgellm {

template <typename T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return 1.0f / (1.0f + expf(-x));
  } else {
    return __fdividef(1.0f, 1.0f + __expf(-x));
  }
}

template <typename T>
__device__ __forceinline__ float silu(float x) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return x / (1.0f + expf(-x));
  } else {
    // __fdividef gives 0 for a denominator above 2^126, the limit of silu there.
    return __fdividef(x, 1.0f + __expf(-x));
  }
}

// log(1 + exp(x)); x itself where the difference is below float's precision.
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

}  // namespace edgellm
