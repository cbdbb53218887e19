// norm_pool_gelu for spatial-innermost input: lanes run along W.
//
// An output row needs kernel_d * kernel_h rows of W. Rows are taken in batches that stay in L1: all their sums, all their sums of what
// is left without the mean, all their scales, and then each output row's sum of normalised rows, pooled along W. Step by step over a
// batch, no instruction waits for a sum over lanes or a root of its own row, which would be most of the time. GELU comes last, on
// adjacent output rows at once.
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
FXFUSE_INLINE void pool_row(const NormPool& p, const float* acc, float divisor, int64_t first, int64_t count, float* pooled) {
  for (int64_t o = 0; o < count; o += kLanes) store(pooled + o, pool_w(p, acc, o, count - o) / (load(p.w_count + first + o) * divisor));
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

// ---- batches of rows ---------------------------------------------------------------------------------------------

// Some output rows and the rows that they are pooled from.
template <typename T>
struct Batch {
  struct Output { int64_t first, count; float divisor, trace; };  // rows, in order
  int64_t first_output, num_outputs, num_rows;
  Output outputs[kBatchRows];
  const T* rows[kBatchRows];
};

// Fills a batch from `out` on, up to `end` and max_outputs, and moves `out` behind it. values: holds the rows where T is not the input's
// type, because an addend changes along W.
template <typename Input, typename T>
void gather(const NormPool& p, OutputRow& out, int64_t end, int64_t max_outputs, float* values, Batch<T>& batch) {
  const int64_t w = p.in[2];
  const bool by_channel = constant_by_channel(p), along_w = addend_varies_along_w(p);
  batch.first_output = out.index;
  batch.num_outputs = batch.num_rows = 0;
  for (; batch.num_outputs < max_outputs && out.index < end; out.next(p, p.c)) {
    auto& output = batch.outputs[batch.num_outputs++];
    output = {batch.num_rows, 0, out.divisor(p), 0.f};
    float constant = row_constant(p, {out.at.n, out.at.c, out.d.begin, out.h.begin});
    for (int64_t d = out.d.begin; d < out.d.end; ++d) {
      for (int64_t h = out.h.begin; h < out.h.end; ++h) {
        const Row row{out.at.n, out.at.c, d, h};
        if (!by_channel) constant = row_constant(p, row);
        const Input* x = static_cast<const Input*>(p.input) + (((row.n * p.c + row.c) * p.in[0] + d) * p.in[1] + h) * w;
        if (!along_w) {
          output.trace += trace_of(constant);
          batch.rows[batch.num_rows++] = reinterpret_cast<const T*>(x);
          continue;
        }
        load_addend(p, row, constant, 0, w, values);
        for_each_step(w, [&](int64_t i, auto step) {
          each<step.kVecs>([&](int k) { store(values + i + k * kLanes, load(values + i + k * kLanes) + step.load(x + i, k)); });
        });
        batch.rows[batch.num_rows++] = reinterpret_cast<const T*>(values);
        values += w + kMaxLanes;
      }
    }
    output.count = batch.num_rows - output.first;
  }
}

struct BatchScales { float mean[kBatchRows], rstd[kBatchRows], shift[kBatchRows]; };

template <typename T>
void take_statistics(const Batch<T>& batch, const Batch<T>& next, int64_t w, float eps, BatchScales& scales) {
  const auto count = static_cast<float>(w);
  Vec sum1[kBatchRows], sum2[kBatchRows];
  for (int64_t r = batch.num_rows; r % kLanes != 0; ++r) sum1[r] = sum2[r] = Vec{};
  for (int64_t r = 0; r < batch.num_rows; ++r) {
    Vec total[4] = {};
    for_each_step(w, [&](int64_t i, auto step) { each<step.kVecs>([&](int k) { total[k] += step.load(batch.rows[r] + i, k); }); });
    sum1[r] = (total[0] + total[1]) + (total[2] + total[3]);
  }
  for (int64_t r = 0; r < batch.num_rows; r += kLanes) store(scales.mean + r, sum_each(sum1 + r) / count);
  for (int64_t r = 0; r < batch.num_rows; ++r) {
    if (r < next.num_rows) prefetch(next.rows[r], w);
    const Vec mean = splat(scales.mean[r]);
    Vec part1[4] = {}, part2[4] = {};
    for_each_step(w, [&](int64_t i, auto step) {
      each<step.kVecs>([&](int k) {
        const Vec centred = step.keep(step.load(batch.rows[r] + i, k) - mean);
        part1[k] += centred;
        part2[k] += centred * centred;
      });
    });
    sum1[r] = (part1[0] + part1[1]) + (part1[2] + part1[3]);
    sum2[r] = (part2[0] + part2[1]) + (part2[2] + part2[3]);
  }
  for (int64_t r = 0; r < batch.num_rows; r += kLanes) {
    // The mean was rounded to fp32; what it is off by comes off variance and result here.
    const Vec residual = sum_each(sum1 + r) / count, variance = sum_each(sum2 + r) / count - residual * residual;
    const Vec rstd = 1.f / sqrt((variance < 0.f ? Vec{} : variance) + eps);
    store(scales.rstd + r, rstd);
    store(scales.shift + r, -residual * rstd);
  }
}

// acc = the sum of an output's normalised rows.
template <typename T>
FXFUSE_INLINE void sum_normalised(const NormPool& p, const Batch<T>& batch, const BatchScales& scales, const typename Batch<T>::Output& output, float* acc) {
  const int64_t begin = output.first, end = output.first + output.count;
  float shifts = output.trace;
  for (int64_t r = begin; r < end; ++r) shifts += scales.shift[r];
  for_each_step(p.in[2], [&](int64_t i, auto step) {
    Vec sum[step.kVecs] = {};
    for (int64_t r = begin; r < end; ++r) {
      const Vec mean = splat(scales.mean[r]), rstd = splat(scales.rstd[r]);
      each<step.kVecs>([&](int k) { sum[k] += (step.load(batch.rows[r] + i, k) - mean) * rstd; });
    }
    each<step.kVecs>([&](int k) { store(acc + i + k * kLanes, step.keep(sum[k] + shifts)); });
  });
}

// The same with weight and bias, in the order that gives nan and inf where layer_norm has them.
template <typename T>
FXFUSE_INLINE void sum_affine(const NormPool& p, const Batch<T>& batch, const BatchScales& scales, const typename Batch<T>::Output& output, float* acc) {
  const int64_t begin = output.first, end = output.first + output.count;
  for_each_step(p.in[2], [&](int64_t i, auto step) {
    Vec sum[step.kVecs], weight[step.kVecs];
    each<step.kVecs>([&](int k) {
      weight[k] = step.load(p.norm_weight + i, k);
      sum[k] = step.load(p.norm_bias + i, k) * static_cast<float>(output.count) + output.trace;
    });
    for (int64_t r = begin; r < end; ++r) {
      const Vec mean = splat(scales.mean[r]), rstd = splat(scales.rstd[r]), shift = splat(scales.shift[r]);
      each<step.kVecs>([&](int k) { sum[k] += ((step.load(batch.rows[r] + i, k) - mean) * rstd + shift) * weight[k]; });
    }
    each<step.kVecs>([&](int k) { store(acc + i + k * kLanes, step.keep(sum[k])); });
  });
}

// Rows that fit into batches, whose statistics are their own.
template <typename Input, typename T>
void pool_batches(const NormPool& p, float* scratch, int64_t begin, int64_t end) {
  const int64_t max_outputs = batch_outputs(p), values_size = max_outputs * p.kernel[0] * p.kernel[1] * (p.in[2] + kMaxLanes);
  float* pooled = scratch + max_outputs * sums_size(p);
  float* first_values = pooled + max_outputs * p.out[2] + kMaxLanes;
  float* values[2] = {first_values, first_values + values_size};
  for (int64_t i = 0; i < max_outputs * sums_size(p); ++i) scratch[i] = 0.f;
  Batch<T> batches[2];
  BatchScales scales;
  OutputRow out(p, p.c, begin);
  gather<Input>(p, out, end, max_outputs, values[0], batches[0]);
  for (int current = 0; batches[current].num_outputs > 0; current ^= 1) {
    const Batch<T>& batch = batches[current];
    gather<Input>(p, out, end, max_outputs, values[current ^ 1], batches[current ^ 1]);
    take_statistics(batch, batches[current ^ 1], p.in[2], p.eps, scales);
    for (int64_t o = 0; o < batch.num_outputs; ++o) {
      float* acc = scratch + o * sums_size(p) + p.padding[2];
      p.norm_weight ? sum_affine(p, batch, scales, batch.outputs[o], acc) : sum_normalised(p, batch, scales, batch.outputs[o], acc);
    }
    for (int64_t o = 0; o < batch.num_outputs; ++o) {
      pool_row(p, scratch + o * sums_size(p), batch.outputs[o].divisor, 0, p.out[2], pooled + o * p.out[2]);
    }
    store_gelu(p, pooled, batch.first_output * p.out[2], batch.num_outputs * p.out[2]);
  }
}

// ---- rows of any length ------------------------------------------------------------------------------------------

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
    pool_row(p, scratch, out.divisor(p), first, count, pooled);
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
