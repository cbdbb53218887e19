// What gelu_pool.cpp hands to its CPU kernels: plain values only, since *.simd.cpp files see no torch header.
#pragma once

#include "common/kernel_types.h"

#include <cstdint>

namespace fxfuse {

// Dense input in either memory order is `outer` volumes of D x H x W pixels, a pixel being `inner` adjacent values: N * C volumes of
// single values (spatial-innermost), or N volumes of C channels (channel-innermost).
struct GeluPool {
  const void* input;
  void* output;
  DType input_dtype, output_dtype;
  const float* bias;  // [C] or null
  bool tanh_form;
  int64_t channels, outer, inner, in[3], out[3];  // in, out: D, H, W
  int64_t output_stride[5];                       // n, c, d, h, w
  int64_t chunk, num_chunks;                      // a global pool's: pixels that make one partial sum, and the number of those a volume
};

constexpr int64_t kTile = 2048;  // values of a row whose sums over D and H are held at a time

// The kernels, once per instruction set. Tasks: chunks of all volumes; volumes; windows along D and H of all volumes.
// partial: [outer, num_chunks, inner].
#define FXFUSE_GELU_POOL_KERNELS                                                                        \
  void gelu_sum_chunks(const GeluPool& p, double* partial, float* scratch, int64_t begin, int64_t end); \
  void gelu_mean_of_chunks(const GeluPool& p, const double* partial, int64_t begin, int64_t end);       \
  void gelu_pool_windows(const GeluPool& p, float* scratch, int64_t begin, int64_t end);

static inline int64_t num_pixels(const GeluPool& p) { return p.in[0] * p.in[1] * p.in[2]; }

// Pixels that are summed side by side, so that few channels still fill vectors and hide the latency of an addition.
static inline int64_t pixels_per_row(const GeluPool& p) { return p.inner >= 256 ? 1 : (256 + p.inner - 1) / p.inner; }

static inline int64_t pixels_per_tile(const GeluPool& p) {
  const int64_t fit = p.inner >= kTile ? 1 : kTile / p.inner;
  return fit < p.in[2] ? fit : p.in[2];
}

// Floats of scratch for rows of n values: bias and sum, padded to whole vectors, and the sum in double.
static inline int64_t row_scratch(int64_t n) { return 4 * (n + kMaxLanes); }

static inline int64_t chunk_scratch(const GeluPool& p) { return row_scratch(pixels_per_row(p) * p.inner); }
// A row, its windows' bounds along W (two int64 each), their sums in double, and means.
static inline int64_t window_scratch(const GeluPool& p) {
  return row_scratch(pixels_per_tile(p) * p.inner) + 4 * p.out[2] + 3 * (p.out[2] * p.inner + kMaxLanes);
}

}  // namespace fxfuse
