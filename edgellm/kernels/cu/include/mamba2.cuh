// What both forms of the Mamba-2 scan are given, and which of them takes a sequence.
#pragma once

#include "state_rows.cuh"

namespace edgellm {

// Strides in elements, from one token (or state row) to the next; x and out are (T, H, P), b and c (T, G, N).
struct Mamba2Params {
  const void* x;
  const float* dt;  // (T, H)
  const float* a;   // (H)
  const void* b;
  const void* c;
  const float* d;     // (H)
  float* state;       // (slots, H, P, N)
  float* checkpoint;  // (CK, H, P, N), or null
  const int* query_start;
  const int* slots;             // -1: padding
  const int* checkpoint_start;  // -1: none; or null
  void* out;
  i64 x_stride;
  i64 dt_stride;
  i64 b_stride;
  i64 c_stride;
  i64 out_stride;
  i64 state_stride;
  i64 checkpoint_stride;
  int num_heads;
  int head_dim;
  int state_dim;
  int num_groups;
  int num_slots;
  int num_checkpoints;
  int longest_scan;  // sequences of more tokens and without checkpoints go chunk by chunk
};

// Which form takes a sequence; the other leaves it alone, and so do both with one that is idle.
__device__ __forceinline__ bool is_scanned(const Mamba2Params& p, const StateRow& row) {
  return !row.is_idle() && (row.checkpoint >= 0 || row.length() <= p.longest_scan);
}
__device__ __forceinline__ bool is_chunked(const Mamba2Params& p, const StateRow& row) {
  return !row.is_idle() && !is_scanned(p, row);
}

__device__ __forceinline__ StateRow sequence_of(const Mamba2Params& p, int index) {
  const int* checkpoint_start = p.checkpoint == nullptr ? nullptr : p.checkpoint_start;
  return state_row(p.query_start, p.slots, checkpoint_start, index, p.num_slots);
}

}  // namespace edgellm
