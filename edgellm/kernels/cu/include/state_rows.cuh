// Rows of a step whose layers keep state; see state_rows.py.  Lengths and slots are read where they lie: no value of
// them is baked into a launch, so a captured one serves any step.
#pragma once

#include "types.cuh"

namespace edgellm {

struct StateRow {
  int first;  // token
  int end;
  int slot;        // of the state; -1: padding, or out of range
  int checkpoint;  // row of the checkpoints for the first token, or -1

  __device__ __forceinline__ int length() const { return end - first; }
  __device__ __forceinline__ bool is_idle() const { return slot < 0 || end <= first; }
};

// checkpoint_start: null where no row has any.  Checkpoints beyond the last are not written.
__device__ __forceinline__ StateRow state_row(const int* query_start, const int* slots, const int* checkpoint_start,
                                              int row, int num_slots) {
  StateRow found{query_start[row], query_start[row + 1], slots[row],
                 checkpoint_start == nullptr ? -1 : checkpoint_start[row]};
  if (found.slot >= num_slots) found.slot = -1;
  return found;
}

}  // namespace edgellm
