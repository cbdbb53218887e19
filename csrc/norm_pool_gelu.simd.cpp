// norm_pool_gelu for spatial-innermost input: lanes run along W.
//
// An output row needs kernel_d * kernel_h rows of W. Where rows take their own statistics and a window has few of them, they go in
// batches (norm_pool_gelu_batches.simd.h); here is the rest: rows of any length in tiles, one after the other, and the statistics pass.
#include "norm_pool_gelu_batches.simd.h"

namespace fxfuse::FXFUSE_ISA {
namespace {

struct RowSums { float mean; double sum1, sum2; };  // sums of (y - mean) and its square

// Two passes over n values y(i, step, k), the second from cache. Sums of up to 1024 values go into double: long rows keep fp32's
// accuracy.
template <typename F>
FXFUSE_INLINE RowSums row_sums(int64_t n, F&& y) {
  Vec total[4] = {};
  for_each_step(n, [&](int64_t i, auto step) { each<step.kVecs>([&](int k) { total[k] += step.keep(y(i, step, k)); }); });
  RowSums sums{sum_lanes((total[0] + total[1]) + (total[2] + total[3]))[0] / static_cast<float>(n), 0., 0.};
  for (int64_t begin = 0; begin < n; begin += 1024) {
    Vec sum1[4] = {}, sum2[4] = {};
    for_each_step(n - begin < 1024 ? n - begin : 1024, [&](int64_t i, auto step) {
      each<step.kVecs>([&](int k) {
        const Vec centred = step.keep(y(begin + i, step, k) - sums.mean);
        sum1[k] += centred;
        sum2[k] += centred * centred;
      });
    });
    sums.sum1 += sum_lanes((sum1[0] + sum1[1]) + (sum1[2] + sum1[3]))[0];
    sums.sum2 += sum_lanes((sum2[0] + sum2[1]) + (sum2[2] + sum2[3]))[0];
  }
  return sums;
}

struct Scale { float mean, rstd, shift; };

FXFUSE_INLINE Scale scale_of(const RowSums& sums, int64_t n, float eps) {
  const auto count = static_cast<double>(n);
  const double residual = sums.sum1 / count, variance = sums.sum2 / count - residual * residual;
  const float rstd = 1.f / __builtin_sqrtf(static_cast<float>(variance < 0. ? 0. : variance) + eps);
  return {sums.mean, rstd, static_cast<float>(-residual) * rstd};
}

// acc[i] += the normalised value i of n.
template <typename F>
FXFUSE_INLINE void add_normalised(int64_t n, F&& y, const Scale& scale, const float* weight, const float* bias, float* acc) {
  const Vec mean = splat(scale.mean), rstd = splat(scale.rstd), shift = splat(scale.shift);
  for_each_step(n, [&](int64_t i, auto step) {
    each<step.kVecs>([&](int k) {
      Vec z = (y(i, step, k) - mean) * rstd + shift;
      if (weight) z = z * step.load(weight + i, k) + step.load(bias + i, k);
      float* to = acc + i + k * kLanes;
      store(to, load(to) + step.keep(z));
    });
  });
}

// Calls f with the loader of y = x + constant, or x + addends where those are given.
template <typename T, typename F>
FXFUSE_INLINE void with_values(const T* x, float constant, const float* addends, F&& f) {
  if (addends) f([=](int64_t i, auto step, int k) { return step.load(x + i, k) + load(addends + i + k * kLanes); });
  else if (constant != 0.f) f([=](int64_t i, auto step, int k) { return step.load(x + i, k) + constant; });
  else f([=](int64_t i, auto step, int k) { return step.load(x + i, k); });
}

// With scales from the statistics pass, or, scales being null, with statistics of rows that are whole in the tile.
template <typename T>
void pool_long_rows(const NormPool& p, const Scales* scales, float* scratch, int64_t begin, int64_t end) {
  const int64_t w = p.in[2], tiles = num_tiles(p), span = tile_span(p);
  const bool along_w = addend_varies_along_w(p);
  float* pooled = scratch + sums_size(p);
  float* addends = pooled + p.tile + kMaxLanes;
  for (int64_t task = begin; task < end; ++task) {
    const OutputRow out(p, p.c, task / tiles);
    const int64_t first = task % tiles * p.tile, count = first + p.tile < p.out[2] ? p.tile : p.out[2] - first;
    const int64_t start = first * p.stride[2] - p.padding[2], w_begin = start > 0 ? start : 0;
    const int64_t w_end = start + span < w ? start + span : w, n = w_end - w_begin;
    for (int64_t i = 0; i < sums_size(p); ++i) scratch[i] = 0.f;
    for (int64_t d = out.d.begin; d < out.d.end; ++d) {
      for (int64_t h = out.h.begin; h < out.h.end; ++h) {
        const Row at{out.at.n, out.at.c, d, h};
        const int64_t row = ((at.n * p.c + at.c) * p.in[0] + d) * p.in[1] + h, within = row % p.rows_per_block * w + w_begin;
        const float constant = row_constant(p, at);
        if (along_w) load_addend(p, at, constant, w_begin, n, addends);
        with_values(static_cast<const T*>(p.input) + row * w + w_begin, constant, along_w ? addends : nullptr, [&](auto y) {
          Scale scale;
          if (scales) scale = {scales->mean[row / p.rows_per_block], scales->rstd[row / p.rows_per_block], scales->shift[row / p.rows_per_block]};
          else scale = scale_of(row_sums(n, y), n, p.eps);
          const bool affine = p.norm_weight != nullptr;
          add_normalised(n, y, scale, affine ? p.norm_weight + within : nullptr, affine ? p.norm_bias + within : nullptr,
                         scratch + (w_begin - start));
        });
      }
    }
    pool_row(p, scratch, out.share(p), first, count, pooled);
    store_gelu(p, pooled, out.index * p.out[2] + first, count);
  }
}

template <typename T>
void segment_moments(const NormPool& p, Moments moments, float* scratch, int64_t begin, int64_t end) {
  for (int64_t segment = begin; segment < end; ++segment) {
    const int64_t run = segment / segments_per_run(p), first = segment % segments_per_run(p) * p.segment;
    const int64_t n = first + p.segment < p.values_per_run ? p.segment : p.values_per_run - first;
    const int64_t row = run * p.run_rows, planes = row / p.in[1], channels = planes / p.in[0];
    const Row at{channels / p.c, channels % p.c, planes % p.in[0], row % p.in[1]};
    const float constant = row_constant(p, at);
    const bool along_w = addend_varies_along_w(p);
    if (along_w) load_addend(p, at, constant, first, n, scratch);
    with_values(static_cast<const T*>(p.input) + run * p.values_per_run + first, constant, along_w ? scratch : nullptr, [&](auto y) {
      const RowSums sums = row_sums(n, y);
      const double residual = sums.sum1 / static_cast<double>(n);
      moments.mean[segment] = sums.mean + residual;
      moments.deviation[segment] = sums.sum2 - sums.sum1 * residual;
    });
  }
}

}  // namespace

void norm_pool_rows(const NormPool& p, const Scales* scales, float* scratch, int64_t begin, int64_t end) {
  with_type(p.input_dtype, [&]<typename T>(T) {
    if (scales || p.kernel[0] * p.kernel[1] > kBatchRows) return pool_long_rows<T>(p, scales, scratch, begin, end);
    if (addend_varies_along_w(p)) return pool_batches<T, float>(p, scratch, begin, end);
    pool_batches<T, T>(p, scratch, begin, end);
  });
}

void norm_pool_row_moments(const NormPool& p, Moments moments, float* scratch, int64_t begin, int64_t end) {
  with_type(p.input_dtype, [&]<typename T>(T) { segment_moments<T>(p, moments, scratch, begin, end); });
}

}  // namespace fxfuse::FXFUSE_ISA
