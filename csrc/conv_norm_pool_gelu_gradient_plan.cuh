// conv_norm_pool_gelu, the gradient kernel: how it lays out shared memory, and how blocks share the work. Pure functions.
#pragma once

#include "conv_norm_pool_gelu_hopper_plan.cuh"

namespace fxfuse::conv_norm_pool_gelu {

constexpr int kGradientGroups = 2, kConsumerThreads = kGradientGroups * 128;  // warpgroups that multiply: planes d and d + 1 in turns
constexpr int kGradientThreads = kConsumerThreads + 128;                       // and one that brings planes
constexpr int kJobs = 5, kJobPairs = 2, kOfTap = kHopperInChannels / 2;        // a thread's sums of a tap
constexpr int kJobSums = kJobPairs * 3 * kOfTap;
// What a thread sums by column: the normalised output times its gradient, for norm_weight, and the windows' gradients, for norm_bias.
constexpr int kWeightSums = kHopperWidth / 2, kWindowSums = kHopperWidth / 4, kNormSums = kWeightSums + kWindowSums;

// Shared memory. Terms: the bf16 values whose sum an fp32 operand is. A tile has 64 output channels x kRows rows of 32 pixels; planes as in
// HopperTile.
template <Operand operand>
struct GradientTile {
  static constexpr int kTerms = operand == Operand::Fp32 ? 3 : operand == Operand::Tf32 ? 2 : 1;
  static constexpr int kRows = kTerms == 3 ? 1 : 2, kSlots = kTerms == 3 ? 3 : kPlaneSlots;
  static constexpr int kPixels = kRows * kHopperWidth, kChunkChannels = 8, kChunks = kHopperInChannels / kChunkChannels;
  static constexpr int kLineBytes = kHopperWidth * kChunkBytes, kCopyBytes = (kRows + 1) * kLineBytes, kChunkPitch = 2 * kCopyBytes;
  static constexpr int kTermBytes = kChunks * kChunkPitch, kPlaneBytes = kTerms * kTermBytes;
  static constexpr int kWeightPitch = kHopperOutChannels * kChunkBytes, kWeightBytes = kChunks * kWeightPitch;  // of a tap's term
  static constexpr bool kHoldsNormSums = kTerms < 3;  // else there is no room, and each tile adds to what is in memory
  static constexpr int kMostTaps = 12, kNormSumBytes = kHoldsNormSums ? kNormSums * kConsumerThreads * static_cast<int>(sizeof(float)) : 0;
  static constexpr int kHeaderBytes = 1024;  // barriers, the norm's parameters
  static constexpr int kSharedBytes =
      kHeaderBytes + kNormSumBytes + kMostTaps * kTerms * kWeightBytes + kSlots * kPlaneBytes;
  static_assert(kSharedBytes <= HopperTile<operand>::kMostBytes);
};

// The accumulators of a warpgroup hold 6 taps, those of one output parity (d, h) or half of the 12 of the last one: a job. Blocks stay at
// theirs, so that nothing but x and the windows' gradients moves; the last parity's output is computed twice.
struct GradientJob {
  int parity, first_pair, pairs;  // pairs of (plane, row) neighbours whose 3 taps it sums
  int first_block, blocks;

  __host__ __device__ int all_pairs() const { return (1 << (parity >> 1)) << (parity & 1); }
  // In the order of HopperTap.
  __host__ __device__ int first_tap() const { return parity == 0 ? 0 : parity == 1 ? 3 : parity == 2 ? 9 : 15; }
  // For norm_weight, of which every parity has a share; of two jobs of one parity the second sums the windows' gradients, which all jobs read.
  __host__ __device__ bool sums_output() const { return first_pair == 0; }
};

struct GradientPlan {
  GradientJob jobs[kJobs];
  int row_blocks, columns, blocks;

  __host__ __device__ int warpgroups() const { return blocks * kGradientGroups; }
};

// Blocks by what a tile costs a job: its arithmetic, and 3 taps of output and of gradient a pair, in cycles of an H200 about so; of three terms
// by estimate.
template <Operand operand>
GradientPlan make_gradient_plan(const Problem& p, int num_processors) {
  constexpr int kTerms = GradientTile<operand>::kTerms;
  constexpr double kArithmetic = kTerms == 3 ? 2500 : 4100, kOutput = kTerms == 3 ? 800 : kTerms == 2 ? 1100 : 380;
  constexpr double kGradient = kTerms == 3 ? 1000 : kTerms == 2 ? 1250 : 430;
  GradientPlan plan{.jobs = {{0, 0, 1}, {1, 0, 2}, {2, 0, 2}, {3, 0, 2}, {3, 2, 2}}, .row_blocks = 0, .columns = 0, .blocks = num_processors};
  plan.row_blocks = static_cast<int>(ceil_div(p.h.input, GradientTile<operand>::kRows));
  plan.columns = static_cast<int>(p.num_n * plan.row_blocks);
  double all = 0;
  const auto cost = [&](const GradientJob& job) { return kArithmetic + kOutput * job.all_pairs() + kGradient * job.pairs; };
  for (const GradientJob& job : plan.jobs) all += cost(job);
  double until = 0;
  int first = 0;
  for (int i = 0; i < kJobs; ++i) {
    until += cost(plan.jobs[i]);
    const int most_left = num_processors - (kJobs - 1 - i);
    const int end = i == kJobs - 1 ? num_processors : std::clamp(static_cast<int>(until / all * num_processors + 0.5), first + 1, most_left);
    plan.jobs[i].first_block = first, plan.jobs[i].blocks = end - first;
    first = end;
  }
  return plan;
}

}  // namespace fxfuse::conv_norm_pool_gelu
