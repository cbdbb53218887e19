// Spatial-innermost rows in batches that stay in L1: all their sums, all their sums of what is left without the mean, all their scales,
// and then each output row's sum of normalised rows, pooled along W. Step by step over a batch, no instruction waits for a sum over
// lanes or a root of its own row, which would be most of the time. GELU comes last, on adjacent output rows at once.
#pragma once

#include "norm_pool_gelu_rows.simd.h"

namespace fxfuse::FXFUSE_ISA {
namespace {

// Adjacent output rows of one plane, and the rows that they are pooled from: rows_per_d adjacent ones in each of num_d planes, taken in
// the order of memory.
template <typename T>
struct Batch {
  struct Output { int64_t first, count; float share; };  // rows of the first plane
  int64_t first_output, num_outputs, num_d, rows_per_d, num_rows;
  Output outputs[kBatchRows];
  const T* rows[kBatchRows];
  float trace[kBatchRows];
};

// Fills a batch from `out` on, up to `end` and max_outputs, and moves `out` behind it. values: holds the rows where T is not the input's
// type, because an addend changes along W.
template <typename Input, typename T>
void gather(const NormPool& p, OutputRow& out, int64_t end, int64_t max_outputs, float* values, Batch<T>& batch) {
  batch.first_output = out.index;
  batch.num_outputs = batch.num_rows = 0;
  if (out.index >= end) return;
  const Row at = out.at;
  const Window d = out.d;
  const int64_t w = p.in[2], h_begin = out.h.begin;
  int64_t h_end;
  do {
    batch.outputs[batch.num_outputs++] = {out.h.begin - h_begin, out.h.end - out.h.begin, out.share(p)};
    h_end = out.h.end;
    out.next(p, p.c);
  } while (batch.num_outputs < max_outputs && out.index < end && out.at.h != 0);
  batch.num_d = d.end - d.begin;
  batch.rows_per_d = h_end - h_begin;
  const bool by_channel = constant_by_channel(p), along_w = addend_varies_along_w(p);
  float constant = row_constant(p, {at.n, at.c, d.begin, h_begin}), trace = trace_of(constant);
  int64_t r = 0;
  for (int64_t id = d.begin; id < d.end; ++id) {
    const Input* x = static_cast<const Input*>(p.input) + (((at.n * p.c + at.c) * p.in[0] + id) * p.in[1] + h_begin) * w;
    for (int64_t ih = h_begin; ih < h_end; ++ih, ++r, x += w) {
      if (!by_channel) {
        constant = row_constant(p, {at.n, at.c, id, ih});
        trace = trace_of(constant);
      }
      batch.trace[r] = trace;
      batch.rows[r] = reinterpret_cast<const T*>(x);
      if (!along_w) continue;
      float* row = values + r * (w + kMaxLanes);
      load_addend(p, {at.n, at.c, id, ih}, constant, 0, w, row);
      for_each_step(w, [&](int64_t i, auto step) {
        each<step.kVecs>([&](int k) { store(row + i + k * kLanes, load(row + i + k * kLanes) + step.load(x + i, k)); });
      });
      batch.rows[r] = reinterpret_cast<const T*>(row);
    }
  }
  batch.num_rows = r;
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
    store(scales.shift + r, load(batch.trace + r) - residual * rstd);
  }
}

// f(r) for each row of an output.
template <typename T, typename F>
FXFUSE_INLINE void for_each_row(const Batch<T>& batch, const typename Batch<T>::Output& output, F&& f) {
  for (int64_t d = 0; d < batch.num_d; ++d) {
    for (int64_t h = 0; h < output.count; ++h) f(d * batch.rows_per_d + output.first + h);
  }
}

// acc = the sum of an output's normalised rows.
template <typename T>
FXFUSE_INLINE void sum_normalised(const NormPool& p, const Batch<T>& batch, const BatchScales& scales, const typename Batch<T>::Output& output, float* acc) {
  float shifts = 0.f;
  for_each_row(batch, output, [&](int64_t r) { shifts += scales.shift[r]; });
  for_each_step(p.in[2], [&](int64_t i, auto step) {
    Vec sum[step.kVecs] = {};
    for_each_row(batch, output, [&](int64_t r) {
      const Vec mean = splat(scales.mean[r]), rstd = splat(scales.rstd[r]);
      each<step.kVecs>([&](int k) { sum[k] += (step.load(batch.rows[r] + i, k) - mean) * rstd; });
    });
    each<step.kVecs>([&](int k) { store(acc + i + k * kLanes, step.keep(sum[k] + shifts)); });
  });
}

// The same with weight and bias, in the order that gives nan and inf where layer_norm has them.
template <typename T>
FXFUSE_INLINE void sum_affine(const NormPool& p, const Batch<T>& batch, const BatchScales& scales, const typename Batch<T>::Output& output, float* acc) {
  const auto num_rows = static_cast<float>(batch.num_d * output.count);
  for_each_step(p.in[2], [&](int64_t i, auto step) {
    Vec sum[step.kVecs], weight[step.kVecs];
    each<step.kVecs>([&](int k) {
      weight[k] = step.load(p.norm_weight + i, k);
      sum[k] = step.load(p.norm_bias + i, k) * num_rows;
    });
    for_each_row(batch, output, [&](int64_t r) {
      const Vec mean = splat(scales.mean[r]), rstd = splat(scales.rstd[r]), shift = splat(scales.shift[r]);
      each<step.kVecs>([&](int k) { sum[k] += ((step.load(batch.rows[r] + i, k) - mean) * rstd + shift) * weight[k]; });
    });
    each<step.kVecs>([&](int k) { store(acc + i + k * kLanes, step.keep(sum[k])); });
  });
}

// Rows that fit into batches, whose statistics are their own.
template <typename Input, typename T>
void pool_batches(const NormPool& p, float* scratch, int64_t begin, int64_t end) {
  const int64_t max_outputs = batch_outputs(p), values_size = batch_rows(p) * (p.in[2] + kMaxLanes);
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
      pool_row(p, scratch + o * sums_size(p), batch.outputs[o].share, 0, p.out[2], pooled + o * p.out[2]);
    }
    store_gelu(p, pooled, batch.first_output * p.out[2], batch.num_outputs * p.out[2]);
  }
}

}  // namespace
}  // namespace fxfuse::FXFUSE_ISA
