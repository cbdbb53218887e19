// norm_pool_gelu: which kernel runs, on which tiles. Pure functions of the problem's shape, dtype, address and device; plans print themselves.
#pragma once

#include <algorithm>
#include <string>
#include <variant>

#include "common/text.h"
#include "norm_pool_gelu_problem.cuh"

namespace fxfuse::norm_pool_gelu {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Contiguous, norm over W: 2^k lanes a row (norm_pool_gelu_rows.cuh).
struct RowsPlan {
  int vec_len;         // elements an access: as many as 16 bytes hold, or 2, or 1, by what every row is aligned to
  int vecs;            // accesses a lane makes for one row
  int lanes;           // lanes a row is spread over
  int rows_in_flight;  // rows loaded before the first is used
  bool pairs;          // windows of two along w, pooled in registers
  bool exact;          // the same, and lanes * vecs * vec_len == W

  std::string describe() const;
};

constexpr int kSegment = 16;     // channels_last: positions of W that a thread has in registers
constexpr int kLineBytes = 128;  // channels_last: what a block takes of every position

template <typename T>
constexpr int kLineChannels = kLineBytes / static_cast<int>(sizeof(T));

// Byte offsets into a block's shared memory. Values end in a spare segment, because the last segment of a row reads past the row.
struct ChannelsShared {
  int64_t values, statistics, tile, norm_params, poison, total;
};

// channels_last_3d, norm over W: the rows of a window in shared memory (norm_pool_gelu_channels_last.cuh).
struct ChannelsPlan {
  int rows_per_block;  // output rows
  int threads;
  bool pairs;          // windows of two along w, pooled in registers
  int padded_width;    // W, rounded up to segments
  int tile_stride;     // floats from one channel to the next in the tile of outputs
  ChannelsShared shared;

  std::string describe() const;
};

// Contiguous, norm over up to three dimensions, a norm group in a block's registers (norm_pool_gelu_block.cuh).
struct BlockPlan {
  int vec_len, values;  // elements an access, and of a group in a thread
  int threads;

  std::string describe() const;
};

// Everything else: statistics first (norm_pool_gelu_statistics.cuh). A unit is the positions of one channel in one norm group.
struct StatisticsPlan {
  int64_t unit_size, chunk_size;

  std::string describe() const;
};

using Plan = std::variant<RowsPlan, ChannelsPlan, BlockPlan, StatisticsPlan>;

inline int widest_vec(const void* data, int64_t row_len, int element_size) {
  for (const int vec_len : {kVecBytes / element_size, 2}) {
    if (rows_are_aligned(data, row_len, vec_len, element_size)) return vec_len;
  }
  return 1;
}

// 8 values of a row in a lane, 16 where 16-bit types come in 16-byte accesses: every row costs a lane some forty instructions beside those
// for its values, and every doubling of the lanes four shuffles more. An access by few lanes then covers less than a line, but the
// lane's next one takes the rest of it. More values where 32 lanes are not enough.
inline std::optional<RowsPlan> plan_rows(const Problem& p, int element_size) {
  constexpr int kMostValues = 16;  // 32 in 16-byte accesses of 16-bit types
  if (p.channels_last || p.norm_ndim != 1 || p.num_channels * p.output_rows() > INT32_MAX) return std::nullopt;
  const int vec_len = widest_vec(p.input, p.w.input, element_size);
  int vecs = vec_len > 2 ? 2 : 8 / vec_len;
  if (vec_len > 2 && p.w.input == vec_len) vecs = 1;
  while (vecs * vec_len * kWarpSize < p.w.input) vecs *= 2;
  if (vecs * vec_len > (vec_len == 8 ? 2 * kMostValues : kMostValues)) return std::nullopt;
  int lanes = 1;
  while (lanes * vecs * vec_len < p.w.input) lanes *= 2;
  const bool pairs = vec_len > 1 && p.pools_pairs();
  const bool exact = pairs && vec_len > 2 && lanes * vecs * vec_len == p.w.input;
  const bool two_rows = (vecs * vec_len <= 8 || (vec_len == 8 && vecs == 2)) && p.addend_is_per_channel;
  return RowsPlan{vec_len, vecs, lanes, two_rows && (p.window_rows() > 1 || vec_len <= 2) ? 2 : 1, pairs, exact};
}

inline ChannelsShared channels_shared(const Problem& p, const ChannelsPlan& plan, int channels, int value_bytes) {
  const int64_t input_rows = int64_t{plan.rows_per_block} * p.window_rows(), float_size = sizeof(float);
  ChannelsShared at{};
  at.statistics = at.values + (input_rows * p.w.input + kSegment) * channels * value_bytes;
  at.tile = at.statistics + input_rows * channels * static_cast<int64_t>(sizeof(float2));
  at.norm_params = at.tile + int64_t{plan.rows_per_block} * channels * plan.tile_stride * float_size;
  at.poison = at.norm_params + 2 * plan.padded_width * float_size;
  at.total = at.poison + channels * float_size;
  return at;
}

// Output rows until a block has 32 KB of input, so that five blocks share a multiprocessor; more threads where one row takes more.
inline std::optional<ChannelsPlan> plan_channels(const Problem& p, int element_size, int max_shared_bytes) {
  constexpr int64_t kUsualBytes = 32 * 1024, kBytesPerThread = 256, kMostRows = 32;
  constexpr int kFewestThreads = 128, kMostThreads = 512;
  const int channels = kLineBytes / element_size, float_size = sizeof(float), out_size = p.output_is_float ? float_size : element_size;
  const int64_t blocks_per_sample = ceil_div(p.num_channels, channels) * p.output_rows();
  if (!p.channels_last || p.norm_ndim != 1 || blocks_per_sample > INT32_MAX) return std::nullopt;
  const int value_bytes = p.addend_is_per_channel ? element_size : float_size;
  const int64_t window_bytes = int64_t{p.window_rows()} * p.w.input * channels * value_bytes;
  ChannelsPlan plan{};
  plan.rows_per_block = static_cast<int>(std::clamp(kUsualBytes / window_bytes, int64_t{1}, std::min(p.output_rows(), kMostRows)));
  plan.pairs = p.pools_pairs();
  plan.padded_width = static_cast<int>(ceil_div(p.w.input, kSegment)) * kSegment;
  // Odd, so that lanes hit different banks with single floats; 16 bytes past the outputs, so that they do with 16 bytes each.
  plan.tile_stride = plan.pairs ? (plan.padded_width / 2 * out_size + kVecBytes) / float_size : plan.padded_width | 1;
  plan.shared = channels_shared(p, plan, channels, value_bytes);
  if (plan.shared.total > max_shared_bytes) return std::nullopt;
  plan.threads = kFewestThreads;
  while (plan.threads < kMostThreads && 2 * plan.threads * kBytesPerThread <= plan.shared.total) plan.threads *= 2;
  return plan;
}

inline std::optional<BlockPlan> plan_block(const Problem& p, int element_size) {
  constexpr int kFewValues = 8, kManyValues = 16, kMostThreads = 1024;
  if (p.channels_last || p.norm_ndim > 3) return std::nullopt;
  const int64_t size = p.group_size();
  const int64_t blocks = p.num_n * p.num_channels * (p.norm_ndim <= 2 ? p.d.output : 1) * (p.norm_ndim == 1 ? p.h.output : 1);
  const bool aligned = rows_are_aligned(p.input, size, kVecBytes / element_size, element_size);
  const int most_values = aligned ? kManyValues : kFewValues;
  if (blocks > INT32_MAX || size > most_values * kMostThreads) return std::nullopt;
  const int values = size <= kFewValues * kMostThreads ? kFewValues : kManyValues;
  const int threads = static_cast<int>(ceil_div(size, values * kWarpSize)) * kWarpSize;
  return BlockPlan{aligned ? kVecBytes / element_size : 1, values, threads};
}

// Chunks where units alone would not fill the card with warps; none so short that a lane has less than 64 elements, and none so long
// that fp32 cannot count them.
inline StatisticsPlan plan_statistics(const Problem& p) {
  constexpr int64_t kEnoughWarps = 8192, kShortest = 64, kLongest = 1 << 22;
  const int64_t unit_size = std::min(p.group_size(), p.volume_size);
  const int64_t units = p.num_n * p.num_channels * p.volume_size / unit_size;
  const int64_t warps = p.channels_last ? ceil_div(units, kWarpSize) : units;
  const int64_t shortest = p.channels_last ? kShortest : kShortest * kWarpSize;
  const int64_t chunk_size = std::clamp(ceil_div(unit_size, ceil_div(kEnoughWarps, warps)), shortest, kLongest);
  return {unit_size, chunk_size};
}

inline Plan make_plan(const Problem& p, int element_size, int max_shared_bytes) {
  if (const auto plan = plan_rows(p, element_size)) return *plan;
  if (const auto plan = plan_channels(p, element_size, max_shared_bytes)) return *plan;
  if (const auto plan = plan_block(p, element_size)) return *plan;
  return plan_statistics(p);
}

// ---- printing ----------------------------------------------------------------------------------------------------

inline std::string RowsPlan::describe() const {
  return text_from("rows(vec_len=", vec_len, ", vecs=", vecs, ", lanes=", lanes, ", rows_in_flight=", rows_in_flight, ", pairs=", pairs,
                   ", exact=", exact, ")");
}

inline std::string ChannelsPlan::describe() const {
  return text_from("channels(rows_per_block=", rows_per_block, ", threads=", threads, ", pairs=", pairs, ", shared_bytes=", shared.total,
                   ")");
}

inline std::string BlockPlan::describe() const {
  return text_from("block(vec_len=", vec_len, ", values=", values, ", threads=", threads, ")");
}

inline std::string StatisticsPlan::describe() const {
  return text_from("statistics(unit_size=", unit_size, ", chunk_size=", chunk_size, ")");
}

inline std::string describe(const Plan& plan) {
  return std::visit([](const auto& chosen) { return chosen.describe(); }, plan);
}

}  // namespace fxfuse::norm_pool_gelu
