// What the kernels of the gated delta rule share: their operands, and which of them takes a row.
#pragma once

#include "state_rows.cuh"

namespace edgellm {

struct GatedDeltaParams {
  const void* q;
  const void* k;
  const void* v;
  const float* decay;
  const float* beta;
  float* state;
  float* checkpoint;  // or null
  void* out;
  const int* query_start;
  const int* slots;
  const int* checkpoint_start;  // or null
  void* queries;                // workspace of the chunks, or null: see delta_chunks.cuh
  void* keys;
  void* reads;
  void* scores;
  void* values;
  void* states;
  float* totals;
  void* scales;
  i64 q_stride;  // elements from token to token; heads lie side by side
  i64 k_stride;
  i64 v_stride;
  i64 decay_stride;
  i64 beta_stride;
  i64 out_stride;
  i64 state_stride;  // from slot to slot
  i64 checkpoint_stride;
  int num_rows;
  int num_slots;
  int num_checkpoints;
  int heads;  // of v
  int group;  // heads of v for one of q and k
  int key_dim;
  int value_dim;
  int longest;    // rows of more tokens that keep no checkpoints are left to the chunks
  int is_wide;    // columns may be read four at a time
  int is_unit;    // divide q and k by their lengths
  int first_place;  // of the chunks that this launch works on
  int num_places;
  float scale;
};

constexpr float kUnitEps = 1e-6f;

__device__ __forceinline__ StateRow delta_row(const GatedDeltaParams& p, int row) {
  return state_row(p.query_start, p.slots, p.checkpoint_start, row, p.num_slots);
}
__device__ __forceinline__ bool goes_by_chunks(const GatedDeltaParams& p, const StateRow& row) {
  return row.checkpoint < 0 && row.length() > p.longest;
}

}  // namespace edgellm
