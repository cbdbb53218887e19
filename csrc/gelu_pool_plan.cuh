// gelu_pool: which kernel runs, on which tiles. Pure functions of shape, dtype, address and device; the plan prints itself.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <string>

#include "common/cuda.cuh"
#include "common/text.h"

namespace fxfuse::gelu_pool {

constexpr int kThreads = 256;
constexpr int64_t kFewPixels = 64;  // a window that one thread reads by itself

struct PoolShape {
  int64_t batch, channels;
  int64_t in[3], out[3];  // depth, height, width; leading ones for 1-d and 2-d
  bool channels_last;      // the input's channels are innermost
  bool out_channels_last;  // so are the output's

  __host__ __device__ int64_t in_pixels() const { return in[0] * in[1] * in[2]; }
  int64_t out_pixels() const { return out[0] * out[1] * out[2]; }
  int64_t outputs() const { return batch * channels * out_pixels(); }
  bool is_global() const { return out_pixels() == 1; }
  // A window is floor(o I / O) .. ceil((o + 1) I / O): at most one longer than I / O rounded up.
  int64_t largest_window() const {
    int64_t pixels = 1;
    for (int i = 0; i < 3; ++i) pixels *= std::min(in[i], in[i] / out[i] + (in[i] % out[i] == 0 ? 0 : 2));
    return pixels;
  }
};

enum class Path {
  Rows,      // global, contiguous: 1 to 32 lanes or a block a row (n, c)
  Channels,  // global, channels_last: a block a (n, run of pixels, tile of channels)
  Outputs,   // small windows: a thread an output
  Windows,   // large windows: several lanes an output
};

struct PoolPlan {
  Path path;
  int64_t blocks;
  int lanes;              // Rows: threads a row. Windows: threads an output
  int64_t chunks = 1;     // parts that a row, image or window is cut into; their sums meet in a second kernel
  int64_t chunk_len = 0;  // Rows: elements. Channels: pixels
  int vec_len = 1;        // elements a load in channels_last
  int columns = 0;        // Channels: loads until the channels repeat, lcm(C, vec_len) / vec_len
  int tile_columns = 0;   // Channels: of these, in one block
  int tiles = 1;

  std::string describe() const {
    static const char* const names[] = {"rows", "channels", "outputs", "windows"};
    return text_from(names[static_cast<int>(path)], "(blocks=", blocks, ", lanes=", lanes, ", chunks=", chunks, ", chunk_len=", chunk_len,
                     ", vec_len=", vec_len, ", columns=", columns, ", tile_columns=", tile_columns, ", tiles=", tiles, ")");
  }
};

// n, c, d, h, w of a dense tensor, as torch gives them: in channels_last a size of 0 makes strides 0, in contiguous it counts as 1.
inline std::array<int64_t, 5> dense_strides(int64_t channels, const int64_t (&size)[3], bool channels_last) {
  const auto [d, h, w] = size;
  if (channels_last) return {channels * d * h * w, 1, channels * h * w, channels * w, channels};
  const auto at_least_1 = [](int64_t x) { return std::max<int64_t>(x, 1); };
  const int64_t h_stride = at_least_1(w), d_stride = h_stride * at_least_1(h), c_stride = d_stride * at_least_1(d);
  return {c_stride * at_least_1(channels), c_stride, d_stride, h_stride, 1};
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline int pow2_at_least(int64_t x, int most) {
  int p = 1;
  while (p < x && p < most) p *= 2;
  return p;
}

// Parts to cut each of `items` runs of `len` elements into: none longer than `longest`, so that fp32 sums stay exact enough (a thread
// adds longest / 256 values) and blocks many enough; enough to fill the card; none so short that a block's start outweighs its loads.
inline int64_t num_chunks(int64_t items, int64_t len, int64_t longest, int num_sms) {
  constexpr int64_t kShortest = 1 << 13;
  const int64_t wave = 4 * num_sms;  // blocks that run at once
  int64_t chunks = ceil_div(len, longest);
  if (items < wave) {
    const int64_t in_one_wave = wave / items;
    const bool is_balanced = in_one_wave * items * 8 >= wave * 7;
    chunks = std::max(chunks, is_balanced ? in_one_wave : ceil_div(2 * wave, items));
  }
  return std::max<int64_t>(1, std::min(chunks, len / kShortest));
}

inline PoolPlan plan_rows(const PoolShape& shape, int element_size, int num_sms) {
  const int64_t rows = shape.batch * shape.channels, len = shape.in_pixels();
  const int vec_len = kVecBytes / element_size;
  if (len <= 1024 || (len <= 4096 && rows >= 32 * num_sms)) {
    const int lanes = pow2_at_least(ceil_div(len, 4 * vec_len), kWarpSize);
    return {.path = Path::Rows, .blocks = ceil_div(rows * lanes, kThreads), .lanes = lanes, .chunk_len = len};
  }
  // Chunks are whole loads long, so that cutting a row adds no unaligned head.
  const int64_t chunk_len = ceil_div(ceil_div(len, num_chunks(rows, len, 1 << 17, num_sms)), vec_len) * vec_len;
  const int64_t chunks = ceil_div(len, chunk_len);
  return {.path = Path::Rows, .blocks = rows * chunks, .lanes = kThreads, .chunks = chunks, .chunk_len = chunk_len};
}

// An image is one run of pixels * C elements. A thread that steps by a multiple of lcm(C, vec_len) sees the same channels in
// every load, so loads stay 16 bytes wide for odd C too. Only where one period of channels is wider than a block, and C is no
// multiple of vec_len or the address is no multiple of 16, are elements loaded one by one.
inline PoolPlan plan_channels(const PoolShape& shape, int element_size, uintptr_t address, int num_sms) {
  const int64_t channels = shape.channels, pixels = shape.in_pixels();
  int64_t vec_len = kVecBytes / element_size;
  int64_t columns = channels / std::gcd(channels, vec_len);
  if (columns > kThreads && (channels % vec_len != 0 || address % kVecBytes != 0)) vec_len = 1, columns = channels;
  const int64_t tiles = ceil_div(columns, kThreads), tile_columns = ceil_div(columns, tiles);
  const int64_t items = shape.batch * tiles;
  const int64_t chunk_len = ceil_div(pixels, num_chunks(items, pixels * channels / tiles, 1 << 18, num_sms));
  const int64_t chunks = ceil_div(pixels, chunk_len);
  return {.path = Path::Channels, .blocks = items * chunks, .lanes = kThreads, .chunks = chunks, .chunk_len = chunk_len,
          .vec_len = static_cast<int>(vec_len), .columns = static_cast<int>(columns),
          .tile_columns = static_cast<int>(tile_columns), .tiles = static_cast<int>(tiles)};
}

inline PoolPlan plan_windows(const PoolShape& shape, int element_size, uintptr_t address, int num_sms) {
  const int64_t window = shape.largest_window();
  int vec_len = kVecBytes / element_size;
  if (!shape.channels_last || shape.channels % vec_len != 0 || address % kVecBytes != 0) vec_len = 1;
  const int64_t loads = shape.outputs() / vec_len;  // a pixel of each window
  if (window <= kFewPixels && (window <= 16 || loads >= 1024 * num_sms)) {
    return {.path = Path::Outputs, .blocks = ceil_div(loads, kThreads), .lanes = 1, .vec_len = vec_len};
  }
  // channels_last: neighbouring lanes take neighbouring channels, up to a warp of them. Contiguous: neighbouring pixels, and a warp an
  // output unless that leaves the card empty or a lane with a thousand pixels.
  int lanes = window <= 1024 || (window <= 32768 && loads >= 64 * num_sms) ? kWarpSize : kThreads;
  if (shape.channels_last) lanes = kThreads / pow2_at_least(shape.channels / vec_len, kWarpSize);
  const int64_t items = ceil_div(loads, kThreads / lanes);
  const int64_t chunks = num_chunks(items, window * vec_len * (kThreads / lanes), 1 << 17, num_sms);
  return {.path = Path::Windows, .blocks = items * chunks, .lanes = lanes, .chunks = chunks, .vec_len = vec_len};
}

inline PoolPlan make_plan(const PoolShape& shape, int element_size, uintptr_t address, int num_sms) {
  if (shape.is_global() && !shape.channels_last) return plan_rows(shape, element_size, num_sms);
  if (shape.is_global() && shape.in_pixels() > kFewPixels) return plan_channels(shape, element_size, address, num_sms);
  return plan_windows(shape, element_size, address, num_sms);
}

}  // namespace fxfuse::gelu_pool
