// gelu_pool_input_gradient: which kernel runs, on which tiles. Pure functions of shape, dtype, addresses and device; the plan prints itself.
#pragma once

#include <algorithm>
#include <string>

#include "common/text.h"
#include "gelu_pool_input_gradient_problem.cuh"

namespace fxfuse::gelu_pool {

struct GradientPlan {
  int vec_len;       // elements an access: of a row; channels_last: of neighbouring channels
  int lanes;         // threads of a row: a warp or a block. channels_last: pixels that a block takes at a time
  int chunks;        // blocks of a row; channels_last: of a sample's pixels
  int chunk_len;     // pixels
  int columns = 1;   // channels_last: accesses across a tile of channels
  int tiles = 1;     // channels_last
  int64_t blocks;

  std::string describe() const {
    return text_from("vec_len=", vec_len, ", lanes=", lanes, ", chunks=", chunks, ", chunk_len=", chunk_len, ", columns=", columns,
                     ", tiles=", tiles, ", blocks=", blocks);
  }
};

// Chunks of `pixels` for `items` blocks, of a multiple of `step` pixels: many beside the blocks that run at once, none so short that its start
// outweighs its loads.
inline void cut_into_chunks(GradientPlan& plan, int64_t items, int64_t pixels, int64_t step, int64_t shortest, int num_sms) {
  const int64_t wanted = ceil_div(16 * int64_t{num_sms}, items), most = std::max<int64_t>(1, pixels / shortest);
  const int64_t chunks = std::clamp<int64_t>(wanted, 1, most);
  plan.chunk_len = static_cast<int>(ceil_div(ceil_div(pixels, chunks), step) * step);
  plan.chunks = static_cast<int>(ceil_div(pixels, plan.chunk_len));
}

inline GradientPlan plan_gradient(const PoolGradient& pool, int element_size, int num_sms) {
  constexpr int kMostPixelsOfWarp = 2048, kShortest = 4096;
  const int wide = kVecBytes / element_size;
  const auto from = reinterpret_cast<uintptr_t>(pool.input), to = reinterpret_cast<uintptr_t>(pool.of_input);
  GradientPlan plan{};
  if (!pool.channels_last) {
    const int64_t rows = pool.batch * pool.channels;
    plan.vec_len = (from - to) % kVecBytes == 0 ? wide : 1;
    plan.lanes = pool.pixels <= kMostPixelsOfWarp ? kWarpSize : kThreads;
    plan.chunks = 1, plan.chunk_len = pool.pixels;
    if (plan.lanes == kThreads) cut_into_chunks(plan, rows, pool.pixels, plan.vec_len, kShortest, num_sms);
    const int rows_per_block = kThreads / plan.lanes;
    plan.blocks = ceil_div(rows * plan.chunks, rows_per_block);
    return plan;
  }
  plan.vec_len = pool.channels % wide == 0 && from % kVecBytes == 0 && to % kVecBytes == 0 ? wide : 1;
  const int columns = pool.channels / plan.vec_len;
  plan.tiles = static_cast<int>(ceil_div(columns, kThreads));
  plan.columns = static_cast<int>(ceil_div(columns, plan.tiles));
  plan.lanes = kThreads / plan.columns;
  const int64_t items = pool.batch * plan.tiles;
  const int64_t shortest = std::max<int64_t>(1, kShortest / (plan.columns * plan.vec_len));
  cut_into_chunks(plan, items, pool.pixels, 1, shortest, num_sms);
  plan.blocks = items * plan.chunks;
  return plan;
}

}  // namespace fxfuse::gelu_pool
