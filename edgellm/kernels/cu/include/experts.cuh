// What the kernels of routed experts share: their arguments, the work lists that routing leaves, and the activation.
// Axes: token t, choice j of k, pair t * k + j, expert e; hidden size D, inner size F.  Pairs stand sorted by expert, at
// places; an item is up to `item_rows` neighbouring places of one expert.
#pragma once

#include "types.cuh"

namespace edgellm {

constexpr int kMaxExperts = 1024;
constexpr int kMaxChoices = 32;

// Strides in elements.
struct ExpertsParams {
  const void* rows;      // T (num_rows, D)
  const float* shares;   // (num_rows, k)
  const void* chosen;    // int32 or int64 (num_rows, k); numbers outside the experts are skipped
  const void* gate_up;   // T (E, 2F, D), gate rows, then up rows
  const void* down;      // T (E, D, F)
  float* total;          // (num_rows, D)
  int4* items;           // [0].x: how many follow; then expert, first place, places
  int* order;            // the pair of a place
  int* places;           // the place of a pair, -1 where it is skipped
  void* inner;           // T (places, F), activated
  float* product;        // (places, D)
  i64 rows_stride;
  i64 total_stride;
  int num_rows;
  int count;  // k
  int num_experts;
  int hidden;
  int inner_size;
  int item_rows;
  int chosen_is_wide;  // int64
  int is_gelu;         // the tanh form of gelu, not silu
  int accumulate;      // add to total
};

// Of a pair; -1 where it is skipped.
__device__ __forceinline__ int expert_of(const ExpertsParams& p, int pair) {
  const i64 expert = p.chosen_is_wide ? static_cast<const i64*>(p.chosen)[pair] : static_cast<const int*>(p.chosen)[pair];
  return expert >= 0 && expert < p.num_experts ? static_cast<int>(expert) : -1;
}

// activation(gate) * up.
__device__ __forceinline__ float activated(float gate, float up, bool is_gelu) {
  if (is_gelu) {
    const float inner = 0.7978845608028654f * (gate + 0.044715f * gate * gate * gate);
    return 0.5f * gate * (1.0f + tanhf(inner)) * up;
  }
  return gate / (1.0f + expf(-gate)) * up;
}

// The same, of sums that are rounded to T first.
template <typename T>
__device__ __forceinline__ float activated_rounded(float gate, float up, bool is_gelu) {
  return activated(to_float(from_float<T>(gate)), to_float(from_float<T>(up)), is_gelu);
}

}  // namespace edgellm
