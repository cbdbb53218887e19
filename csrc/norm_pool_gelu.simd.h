// What the kernels of both memory orders share.
#pragma once

#include "common/simd_gelu.h"
#include "common/simd_lanes.h"
#include "norm_pool_gelu.h"

namespace fxfuse::FXFUSE_ISA {
namespace {

struct Row { int64_t n, c, d, h; };

// The addend's element at W = 0 of a row.
FXFUSE_INLINE int64_t addend_index(const NormPool& p, const Row& row) {
  return row.n * p.addend_stride[0] + row.c * p.addend_stride[1] + row.d * p.addend_stride[2] + row.h * p.addend_stride[3];
}

// What is added to every value of a row: all of it, but for an addend that varies along W.
FXFUSE_INLINE float row_constant(const NormPool& p, const Row& row) {
  const float constant = p.addend_value + (p.bias ? p.bias[row.c] : 0.f);
  if (!p.addend || addend_varies_along_w(p)) return constant;
  return p.addend_scale * load_one(p.addend_dtype, p.addend, addend_index(p, row)) + constant;
}

// True if rows of a channel do not differ in their constant.
FXFUSE_INLINE bool constant_by_channel(const NormPool& p) { return !p.addend || (p.addend_stride[2] == 0 && p.addend_stride[3] == 0); }

// A constant vanishes from the normalised row, unless it is inf or nan and makes all of it nan: 0 or nan.
FXFUSE_INLINE float trace_of(float constant) { return constant - constant; }

// Runs over the pooled output rows, of `channels` channels; `at` holds the output's d and h, the windows the input's.
struct OutputRow {
  int64_t index;
  Row at;
  Window d, h;

  OutputRow(const NormPool& p, int64_t channels, int64_t index) : index(index) {
    at.h = index % p.out[1];
    at.d = index / p.out[1] % p.out[0];
    at.c = index / (p.out[1] * p.out[0]) % channels;
    at.n = index / (p.out[1] * p.out[0] * channels);
    d = pool_window(p, 0, at.d);
    h = pool_window(p, 1, at.h);
  }

  void next(const NormPool& p, int64_t channels) {
    if (++at.h == p.out[1]) {
      *this = OutputRow(p, channels, index + 1);
    } else {
      ++index;
      h = pool_window(p, 1, at.h);
    }
  }

  // What sums over the window are multiplied by, before w_share.
  float share(const NormPool& p) const { return 1.f / (p.divisor != 0.f ? p.divisor : static_cast<float>(d.count * h.count)); }
};

// value(0) + ... + value(n - 1); in double from 64 values on, so that long windows keep fp32's accuracy.
template <typename F>
FXFUSE_INLINE Vec sum_window(int64_t n, F&& value) {
  constexpr int64_t kPart = 64;
  DoubleSum sum;
  for (int64_t begin = 0; begin < n; begin += kPart) {
    Vec part{};
    for (int64_t j = begin; j < n && j < begin + kPart; ++j) part += value(j);
    if (n <= kPart) return part;
    sum += part;
  }
  return sum.rounded();
}

}  // namespace
}  // namespace fxfuse::FXFUSE_ISA
