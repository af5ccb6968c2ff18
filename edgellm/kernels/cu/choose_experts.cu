// The experts of each token: those of the highest scores, and their shares by a softmax over all or over the chosen.
//   chosen[t, j]: expert of the j-th highest score, the lower number first where two are equal.
//   shares[t, j] = exp(score) / (sum of exp over the chosen, or over all experts) * factors[expert]
// Axes: tokens t in [0, num_rows), experts e in [0, num_experts), places j in [0, count); strides in elements.
// A warp has a token and walks over its scores once for each place: the next is the highest behind the one before, so
// nothing is marked.  NaN is never chosen: -1 stands where no other score is left.
#include "types.cuh"

namespace edgellm {

struct ChooseExpertsParams {
  const float* scores;
  const float* factors;  // (num_experts,), or null
  float* shares;         // (num_rows, count)
  int* chosen;           // (num_rows, count)
  i64 scores_stride;
  int num_rows;
  int num_experts;
  int count;
  int normalise;  // over the chosen
};

constexpr int kChooseWarps = 4;
constexpr int kNoExpert = 0x7fffffff;

struct Ranked {
  float score;
  int expert;
  __device__ __forceinline__ bool before(const Ranked& other) const {
    return score > other.score || (score == other.score && expert < other.expert);
  }
};

// The first of the lane's experts that stand behind `last` in the order, then of all lanes'.
__device__ __forceinline__ Ranked next_expert(const float* scores, int num_experts, const Ranked& last) {
  Ranked best = {negative_infinity(), kNoExpert};
  for (int e = threadIdx.x % kWarp; e < num_experts; e += kWarp) {
    const Ranked here = {scores[e], e};
    if (last.before(here) && here.before(best)) best = here;
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const Ranked other = {__shfl_xor_sync(kFullMask, best.score, step), __shfl_xor_sync(kFullMask, best.expert, step)};
    if (other.before(best)) best = other;
  }
  return best;
}

__device__ __forceinline__ float sum_of_exponentials(const float* scores, int num_experts, float maximum) {
  float sum = 0.0f;
  for (int e = threadIdx.x % kWarp; e < num_experts; e += kWarp) sum += expf(scores[e] - maximum);
  return warp_sum(sum);
}

template <int kWarps>
__global__ void __launch_bounds__(kWarps* kWarp) choose_experts(const __grid_constant__ ChooseExpertsParams p) {
  static_assert(kWarps == kChooseWarps, "warps a block");
  let_next_kernel_start();
  wait_for_previous_kernel();
  const i64 row = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  const int lane = threadIdx.x % kWarp;
  if (row >= p.num_rows) return;  // whole warps
  const float* scores = p.scores + row * p.scores_stride;
  float* shares = p.shares + row * p.count;
  int* chosen = p.chosen + row * p.count;
  Ranked last = {-negative_infinity(), -1};
  float maximum = 0.0f, total = 0.0f;
  for (int j = 0; j < p.count; ++j) {
    last = next_expert(scores, p.num_experts, last);
    if (j == 0) maximum = last.score;
    const float share = expf(last.score - maximum);
    total += share;
    if (lane == 0) {
      chosen[j] = last.expert == kNoExpert ? -1 : last.expert;
      shares[j] = share;
    }
  }
  if (!p.normalise) total = sum_of_exponentials(scores, p.num_experts, maximum);
  __syncwarp();
  for (int j = lane; j < p.count; j += kWarp) {
    const float share = __fdiv_rn(shares[j], total);
    shares[j] = p.factors == nullptr || chosen[j] < 0 ? share : share * p.factors[chosen[j]];
  }
}

}  // namespace edgellm
