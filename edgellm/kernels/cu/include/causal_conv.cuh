// What both forms of the causal convolution are given.
#pragma once

#include "state_rows.cuh"

namespace edgellm {

struct CausalConvParams {
  const void* x;
  const float* weight;
  const float* bias;  // or null
  float* state;       // (slots, channels, kWidth - 1), oldest first
  float* checkpoint;  // or null
  void* out;
  const int* query_start;
  const int* slots;
  const int* checkpoint_start;  // or null
  i64 x_stride;
  i64 out_stride;
  i64 state_stride;
  i64 checkpoint_stride;
  int num_rows;
  int num_slots;
  int num_checkpoints;
  int channels;
  int has_silu;
  int tile;  // tokens a block of causal_conv_tiles takes
};

}  // namespace edgellm
