// norm_pool_gelu_input_gradient: which kernel runs, on which tiles. Pure functions of shape, dtype, address and device; plans print themselves.
#pragma once

#include <algorithm>
#include <string>

#include "common/text.h"
#include "norm_pool_gelu_input_gradient_channels_last.cuh"
#include "norm_pool_gelu_input_gradient_rows.cuh"

namespace fxfuse::norm_pool_gelu {

// Blocks that are many beside those that run at once, and few beside the rows: each leaves a row of partial sums.
inline int64_t usual_blocks(int num_sms) { return int64_t{16} * num_sms; }

struct GradientRowsPlan {
  int vec_len, values;  // elements an access (of 16 bytes, or 4 of 16 bits, or 1), and of a row in a lane
  int lanes;            // of a row
  bool exact;           // pairs along w, and lanes * values == W
  bool resident;        // a window's rows stay in registers
  int64_t blocks;
  int steps;            // output rows of a group

  std::string describe() const {
    return text_from("rows(vec_len=", vec_len, ", values=", values, ", lanes=", lanes, ", exact=", exact, ", resident=", resident,
                     ", blocks=", blocks, ", steps=", steps, ")");
  }
};

struct GradientChannelsPlan {
  int vec_len, columns;  // channels an access, and accesses across a block's channels
  bool pairs;
  int windows, steps, chunks;
  int64_t blocks;
  GradientShared shared;

  std::string describe() const {
    return text_from("channels(vec_len=", vec_len, ", columns=", columns, ", pairs=", pairs, ", windows=", windows, ", steps=", steps,
                     ", chunks=", chunks, ", shared_bytes=", shared.total, ")");
  }
};

// Values of a row in a lane, all lanes together a thread's registers: 4 rows of 8, 2 of 16 or 1 of 32.
constexpr int kRegisterValues = 32;

inline GradientRowsPlan plan_gradient_rows(const GradientProblem& gradient, int element_size, int num_sms) {
  const Problem& p = gradient.forward;
  const int wide = kVecBytes / element_size;
  GradientRowsPlan plan{};
  plan.vec_len = 1;
  const auto takes = [&](const void* rows, int vec_len) { return rows_are_aligned(rows, p.w.input, vec_len, element_size); };
  for (const int vec_len : {4, wide}) {
    if (!p.addend_is_per_channel) break;  // addends that vary come element by element anyway
    if (takes(p.input, vec_len) && takes(gradient.of_input, vec_len)) plan.vec_len = vec_len;
  }
  plan.values = 8;
  while (plan.values < kRegisterValues && plan.values * kWarpSize < p.w.input) plan.values *= 2;
  plan.lanes = 1;
  while (plan.lanes < kWarpSize && plan.lanes * plan.values < p.w.input) plan.lanes *= 2;
  check(plan.lanes * plan.values >= p.w.input, "input has rows of ", p.w.input, " elements; up to ", kWarpSize * kRegisterValues, " are supported");
  plan.resident = p.addend_is_per_channel && p.window_rows() <= kRegisterValues / plan.values;
  plan.exact = plan.resident && plan.vec_len == wide && p.w.kernel == 2 && plan.values < kRegisterValues && plan.lanes * plan.values == p.w.input;
  const int64_t sets = ceil_div(p.num_n * p.num_channels * p.output_rows(), kRowsThreads / plan.lanes);
  plan.steps = static_cast<int>(ceil_div(sets, usual_blocks(num_sms)));
  plan.blocks = ceil_div(sets, plan.steps);
  return plan;
}

inline GradientShared gradient_shared(const Problem& p, int windows, int channels, int element_size) {
  const int64_t rows = int64_t{windows} * p.window_rows(), float_size = sizeof(float), align = kVecBytes;
  const auto aligned = [&](int64_t bytes) { return ceil_div(bytes, align) * align; };
  GradientShared at{};
  at.statistics = aligned(std::max<int64_t>(rows * p.w.input * channels * element_size, kGradientWarps * channels * float_size));
  at.grads = at.statistics + aligned(rows * channels * static_cast<int64_t>(sizeof(float2)));
  at.norm_params = at.grads + aligned(int64_t{windows} * p.w.output * channels * float_size);
  at.norm_sums = at.norm_params + aligned(2 * p.w.input * float_size);
  at.total = at.norm_sums + windows * 2 * p.w.input * float_size;
  return at;
}

// 64 bytes of channels where that leaves room for several blocks, else 32; a warp's rows at least, and 16 KB where windows are small.
inline GradientChannelsPlan plan_gradient_channels(const GradientProblem& gradient, int element_size, int num_sms, int max_shared_bytes) {
  constexpr int64_t kUsualBytes = 16 * 1024, kMostWindows = 16, kWideTileBytes = 40 * 1024;
  const Problem& p = gradient.forward;
  const int wide = kVecBytes / element_size;
  const bool aligned = p.num_channels % wide == 0 && rows_are_aligned(p.input, wide, wide, element_size) &&
                       rows_are_aligned(gradient.of_input, wide, wide, element_size);
  const int64_t window_values = int64_t{p.window_rows()} * p.w.input;
  GradientChannelsPlan plan{};
  plan.vec_len = aligned ? wide : 1;
  plan.columns = !aligned ? 8 : window_values * 4 * kVecBytes <= kWideTileBytes && p.num_channels > 2 * wide ? 4 : 2;
  plan.pairs = p.w.kernel == 2;
  const int channels = plan.vec_len * plan.columns;
  const int64_t window_bytes = window_values * channels * element_size, of_warps = ceil_div(kGradientWarps, p.window_rows());
  const int64_t windows = std::min(std::max(of_warps, kUsualBytes / window_bytes), std::max(int64_t{1}, kWideTileBytes / window_bytes));
  plan.windows = static_cast<int>(std::min({windows, kMostWindows, p.output_rows()}));
  const int64_t sets = ceil_div(p.output_rows(), plan.windows), tiles = ceil_div(p.num_channels, channels);
  plan.steps = static_cast<int>(ceil_div(sets * tiles * p.num_n, usual_blocks(num_sms)));
  plan.steps = static_cast<int>(std::min<int64_t>(plan.steps, sets));
  plan.chunks = static_cast<int>(ceil_div(sets, plan.steps));
  plan.blocks = tiles * plan.chunks * p.num_n;
  plan.shared = gradient_shared(p, plan.windows, channels, element_size);
  check(plan.shared.total <= max_shared_bytes, "a window of ", window_values, " positions takes ", plan.shared.total,
        " bytes of shared memory and the device has ", max_shared_bytes, ": make the input contiguous");
  return plan;
}

}  // namespace fxfuse::norm_pool_gelu
