// State of resident slots put back to checkpoints, several pieces at once: live[slots[n]] = checkpoint[sources[n]].
// Axes: entries n, words w of a piece's row; a word is kWord.  Entries with slot -1, or out of range, move nothing.
// Grid: x parts of kScatterThreads words, with a stride; y entries; z pieces.
#include "types.cuh"

namespace edgellm {

constexpr int kScatterPieces = 64;
constexpr int kScatterThreads = 128;

struct ScatterStateParams {
  void* live[kScatterPieces];
  const void* checkpoint[kScatterPieces];
  const int* slots;
  const int* sources;
  i64 words[kScatterPieces];
  int num_slots;
  int num_checkpoints;
};

template <typename Word>
__global__ void __launch_bounds__(kScatterThreads) scatter_state(const __grid_constant__ ScatterStateParams p) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int slot = p.slots[blockIdx.y], source = p.sources[blockIdx.y];
  if (slot < 0 || slot >= p.num_slots || source < 0 || source >= p.num_checkpoints) return;
  const i64 words = p.words[blockIdx.z];
  Word* to = static_cast<Word*>(p.live[blockIdx.z]) + slot * words;
  const Word* from = static_cast<const Word*>(p.checkpoint[blockIdx.z]) + source * words;
  const i64 step = static_cast<i64>(gridDim.x) * kScatterThreads;
#pragma unroll 4
  for (i64 word = static_cast<i64>(blockIdx.x) * kScatterThreads + threadIdx.x; word < words; word += step)
    to[word] = from[word];
}

}  // namespace edgellm
