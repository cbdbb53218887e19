// What all kernels of spatial-innermost rows share: addends along W, pooling along W, GELU on adjacent outputs.
#pragma once

#include "norm_pool_gelu.simd.h"

namespace fxfuse::FXFUSE_ISA {
namespace {

// constant + addend_scale * addend for n values of a row from w on; out holds n rounded up to kLanes.
void load_addend(const NormPool& p, const Row& row, float constant, int64_t w, int64_t n, float* out) {
  const int64_t stride = p.addend_stride[4], first = addend_index(p, row) + w * stride;
  const float scale = p.addend_scale;
  with_type(p.addend_dtype, [&]<typename T>(T) {
    const T* addend = static_cast<const T*>(p.addend) + first;
    if (stride == 1) {
      return for_each_step(n, [&](int64_t i, auto step) {
        each<step.kVecs>([&](int k) { store(out + i + k * kLanes, step.load(addend + i, k) * scale + constant); });
      });
    }
    for (int64_t i = 0; i < n; ++i) out[i] = load_one(p.addend_dtype, addend, i * stride) * scale + constant;
  });
}

// The sums over the window along W for the outputs from o on (n of them) of a tile whose inputs, padding included, lie in acc.
FXFUSE_INLINE Vec pool_w(const NormPool& p, const float* acc, int64_t o, int64_t n) {
  const int64_t stride = p.stride[2];
  const float* from = acc + o * stride;
  if (stride == 1) return sum_window(p.kernel[2], [&](int64_t j) { return load(from + j); });
  if (stride == 2) {
    const bool odd = p.kernel[2] % 2 != 0;
    const Vec last = odd ? every_other<0>(load(from + p.kernel[2] - 1), load(from + p.kernel[2] - 1 + kLanes)) : Vec{};
    return last + sum_window(p.kernel[2] / 2, [&](int64_t j) {
      const Vec low = load(from + 2 * j), high = load(from + 2 * j + kLanes);
      return every_other<0>(low, high) + every_other<1>(low, high);
    });
  }
  return sum_window(p.kernel[2], [&](int64_t j) {
    Vec values{};
    for (int64_t i = 0; i < n && i < kLanes; ++i) values[i] = from[i * stride + j];
    return values;
  });
}

// The pooled values of `count` outputs along W from `first` on; pooled holds them rounded up to kLanes.
FXFUSE_INLINE void pool_row(const NormPool& p, const float* acc, float share, int64_t first, int64_t count, float* pooled) {
  for (int64_t o = 0; o < count; o += kLanes) store(pooled + o, pool_w(p, acc, o, count - o) * (load(p.w_share + first + o) * share));
}

// n adjacent outputs from `to` on.
void store_gelu(const NormPool& p, const float* pooled, int64_t to, int64_t n) {
  with_type(p.output_dtype, [&]<typename T>(T) {
    T* output = static_cast<T*>(p.output) + to;
    for_each_step(n, [&](int64_t i, auto step) {
      Vec x[step.kVecs];
      each<step.kVecs>([&](int k) { x[k] = load(pooled + i + k * kLanes); });
      p.tanh_form ? gelu_tanh(x) : gelu_erf(x);
      each<step.kVecs>([&](int k) { step.store(output + i, k, x[k]); });
    });
  });
}

}  // namespace
}  // namespace fxfuse::FXFUSE_ISA
