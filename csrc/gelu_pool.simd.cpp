// gelu_pool: windows' means of gelu(input + bias), for both memory orders.
//
// Bytes moved: the input once; windows of an adaptive pool that overlap share a row at most. About 25 instructions a vector, nearly all
// of them GELU's, so that the loops only have to stay out of its way: loads are whole vectors whatever the layout, and sums go
// to registers or to a row in L1. Sums of at most 16 values a lane are taken in fp32 and then added up in double.
#include "common/simd_gelu.h"
#include "common/simd_lanes.h"
#include "gelu_pool.h"

namespace fxfuse::FXFUSE_ISA {
namespace {

constexpr int64_t kAddedInFloat = 16;

// ---- one value a pixel -------------------------------------------------------------------------------------------

template <bool tanh_form, typename T>
double sum_of_gelu(const T* x, int64_t n, float bias) {
  DoubleSum total;
  constexpr int64_t kBlock = 4 * kAddedInFloat * kLanes;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    Vec sum{};
    for_each_step(n - begin < kBlock ? n - begin : kBlock, [&](int64_t i, auto step) {
      Vec y[step.kVecs], step_sum{};
      each<step.kVecs>([&](int k) { y[k] = step.load(x + begin + i, k) + bias; });
      gelu<tanh_form>(y);
      each<step.kVecs>([&](int k) { step_sum += step.keep(y[k]); });
      sum += step_sum;
    });
    total += sum;
  }
  return total.of_lanes();
}

// ---- rows of values ----------------------------------------------------------------------------------------------

// The sum of up to any number of rows of n values; in fp32 first, in double from there.
struct RowSum {
  float *bias, *part;  // n values, padded to whole vectors
  double* total;
  int64_t added = 0;

  RowSum(float* scratch, int64_t n)
      : bias(scratch), part(scratch + n + kMaxLanes), total(reinterpret_cast<double*>(scratch + 2 * (n + kMaxLanes))) {}

  void clear(int64_t n) {
    for (int64_t i = 0; i < n + kLanes; ++i) part[i] = 0.f;
    for (int64_t i = 0; i < n; ++i) total[i] = 0.;
    added = 0;
  }

  template <bool tanh_form, typename T>
  __attribute__((always_inline)) void add(const T* x, int64_t n) {
    for_each_step(n, [&](int64_t i, auto step) {
      Vec y[step.kVecs];
      each<step.kVecs>([&](int k) { y[k] = step.load(x + i, k) + load(bias + i + k * kLanes); });
      gelu<tanh_form>(y);
      each<step.kVecs>([&](int k) { store(part + i + k * kLanes, load(part + i + k * kLanes) + step.keep(y[k])); });
    });
    if (++added % kAddedInFloat == 0) flush(n);
  }

  void flush(int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      total[i] += part[i];
      part[i] = 0.f;
    }
  }
};

// Pixels side by side, one bias each channel.
void repeat_bias(const GeluPool& p, int64_t pixels, float* to) {
  for (int64_t j = 0; j < pixels; ++j) {
    for (int64_t c = 0; c < p.inner; ++c) to[j * p.inner + c] = p.bias ? p.bias[c] : 0.f;
  }
}

// The sums over the pixels [begin, end) of one volume, a channel each.
template <bool tanh_form, typename T>
void sum_pixels(const GeluPool& p, const T* volume, int64_t begin, int64_t end, RowSum& row, double* sums) {
  const int64_t width = pixels_per_row(p), n = width * p.inner;
  row.clear(n);
  int64_t pixel = begin;
  for (; pixel + width <= end; pixel += width) row.add<tanh_form>(volume + pixel * p.inner, n);
  row.flush(n);
  if (pixel < end) row.add<tanh_form>(volume + pixel * p.inner, (end - pixel) * p.inner);
  row.flush(n);
  for (int64_t c = 0; c < p.inner; ++c) {
    double sum = 0.;
    for (int64_t j = 0; j < width; ++j) sum += row.total[j * p.inner + c];
    sums[c] = sum;
  }
}

// ---- windows -----------------------------------------------------------------------------------------------------

struct Span { int64_t begin, end; };

FXFUSE_INLINE Span window(const GeluPool& p, int dim, int64_t o) {
  return {adaptive_begin(o, p.in[dim], p.out[dim]), adaptive_end(o, p.in[dim], p.out[dim])};
}

// Eight sums side by side: one alone would wait for each addition, and in memory for each store.
double sum_of(const double* x, int64_t n) {
  constexpr int64_t kSums = 8;
  double sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= n; i += kSums) {
    for (int64_t j = 0; j < kSums; ++j) sums[j] += x[i + j];
  }
  double sum = 0.;
  for (; i < n; ++i) sum += x[i];
  for (const double part : sums) sum += part;
  return sum;
}

// sums[o, c] += the pixels of `columns` (their sums over D and H, from pixel `tile.begin` on) that lie in window o along W.
void add_windows(const GeluPool& p, const Span* windows, const Span& tile, const double* columns, double* sums) {
  int64_t o = tile.begin * p.out[2] / p.in[2];
  while (o > 0 && windows[o - 1].end > tile.begin) --o;
  for (; o < p.out[2] && windows[o].begin < tile.end; ++o) {
    const Span w = windows[o];
    const int64_t begin = w.begin > tile.begin ? w.begin : tile.begin, end = w.end < tile.end ? w.end : tile.end;
    if (p.inner == 1) {
      sums[o] += sum_of(columns + (begin - tile.begin), end - begin);
      continue;
    }
    for (int64_t j = begin; j < end; ++j) {
      for (int64_t c = 0; c < p.inner; ++c) sums[o * p.inner + c] += columns[(j - tile.begin) * p.inner + c];
    }
  }
}

// Windows of one row, wide enough to fill vectors: straight from the input, without a row of sums between.
FXFUSE_INLINE bool has_wide_windows_of_one_row(const GeluPool& p, int64_t rows) {
  return p.inner == 1 && rows == 1 && p.in[2] >= 2 * kLanes * p.out[2];
}

// The outputs of one (volume, d, h): sums over windows divided by their sizes.
void store_row(const GeluPool& p, const Span* windows, int64_t volume, int64_t od, int64_t oh, double rows, const double* sums, float* means) {
  for (int64_t o = 0; o < p.out[2]; ++o) {
    const double count = rows * static_cast<double>(windows[o].end - windows[o].begin);
    for (int64_t c = 0; c < p.inner; ++c) means[o * p.inner + c] = static_cast<float>(sums[o * p.inner + c] / count);
  }
  const int64_t n = volume / (p.channels / p.inner), first_channel = volume % (p.channels / p.inner);
  const int64_t base = n * p.output_stride[0] + first_channel * p.output_stride[1] + od * p.output_stride[2] + oh * p.output_stride[3];
  const int64_t along = p.inner == 1 ? p.output_stride[4] : p.output_stride[1], across = p.inner == 1 ? 0 : p.output_stride[4];
  const int64_t length = p.inner == 1 ? p.out[2] : p.inner, step = along == 1 ? kLanes : 1;
  for (int64_t o = 0; o < (p.inner == 1 ? 1 : p.out[2]); ++o) {
    for (int64_t i = 0; i < length; i += step) {
      store_as(p.output_dtype, p.output, base + o * across + i * along, load(means + o * p.inner + i), along == 1 ? length - i : 1);
    }
  }
}

template <bool tanh_form, typename T>
void pool_windows(const GeluPool& p, float* scratch, int64_t begin, int64_t end) {
  const int64_t tile_pixels = pixels_per_tile(p), values = p.out[2] * p.inner;
  RowSum row(scratch, tile_pixels * p.inner);
  Span* windows = reinterpret_cast<Span*>(scratch + row_scratch(tile_pixels * p.inner));
  double* sums = reinterpret_cast<double*>(windows + p.out[2]);
  float* means = reinterpret_cast<float*>(sums + values);
  for (int64_t o = 0; o < p.out[2]; ++o) windows[o] = window(p, 2, o);  // divisions, which the loops below could not afford
  if (p.inner > 1 || !p.bias) repeat_bias(p, tile_pixels, row.bias);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t oh = task % p.out[1], od = task / p.out[1] % p.out[0], volume = task / p.out[1] / p.out[0];
    const Span d_window = window(p, 0, od), h_window = window(p, 1, oh);
    const int64_t rows = (d_window.end - d_window.begin) * (h_window.end - h_window.begin);
    if (has_wide_windows_of_one_row(p, rows)) {
      const T* x = static_cast<const T*>(p.input) + ((volume * p.in[0] + d_window.begin) * p.in[1] + h_window.begin) * p.in[2];
      for (int64_t o = 0; o < p.out[2]; ++o) {
        const Span w = windows[o];
        sums[o] = sum_of_gelu<tanh_form>(x + w.begin, w.end - w.begin, p.bias ? p.bias[volume % p.channels] : 0.f);
      }
      store_row(p, windows, volume, od, oh, 1., sums, means);
      continue;
    }
    if (p.inner == 1 && p.bias) {
      for (int64_t j = 0; j < tile_pixels + kLanes; ++j) row.bias[j] = p.bias[volume % p.channels];
    }
    for (int64_t i = 0; i < values; ++i) sums[i] = 0.;
    for (int64_t w = 0; w < p.in[2]; w += tile_pixels) {
      const Span tile{w, w + tile_pixels < p.in[2] ? w + tile_pixels : p.in[2]};
      const int64_t n = (tile.end - tile.begin) * p.inner;
      row.clear(n);
      for (int64_t d = d_window.begin; d < d_window.end; ++d) {
        for (int64_t h = h_window.begin; h < h_window.end; ++h) {
          const int64_t pixel = ((volume * p.in[0] + d) * p.in[1] + h) * p.in[2] + w;
          row.add<tanh_form>(static_cast<const T*>(p.input) + pixel * p.inner, n);
        }
      }
      row.flush(n);
      add_windows(p, windows, tile, row.total, sums);
    }
    store_row(p, windows, volume, od, oh, static_cast<double>(rows), sums, means);
  }
}

// f<T, tanh_form>() for the types at hand.
template <typename F>
void with_form(const GeluPool& p, F&& f) {
  with_type(p.input_dtype, [&]<typename T>(T) { p.tanh_form ? f.template operator()<T, true>() : f.template operator()<T, false>(); });
}

}  // namespace

void gelu_sum_chunks(const GeluPool& p, double* partial, float* scratch, int64_t begin, int64_t end) {
  const int64_t pixels = num_pixels(p);
  RowSum row(scratch, pixels_per_row(p) * p.inner);
  if (p.inner > 1) repeat_bias(p, pixels_per_row(p), row.bias);
  with_form(p, [&]<typename T, bool tanh_form>() {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t outer = task / p.num_chunks, first = task % p.num_chunks * p.chunk;
      const int64_t last = first + p.chunk < pixels ? first + p.chunk : pixels;
      const T* volume = static_cast<const T*>(p.input) + outer * pixels * p.inner;
      if (p.inner == 1) partial[task] = sum_of_gelu<tanh_form>(volume + first, last - first, p.bias ? p.bias[outer % p.channels] : 0.f);
      else sum_pixels<tanh_form>(p, volume, first, last, row, partial + task * p.inner);
    }
  });
}

void gelu_mean_of_chunks(const GeluPool& p, const double* partial, int64_t begin, int64_t end) {
  const auto pixels = static_cast<double>(num_pixels(p));
  const int64_t volumes = p.channels / p.inner;  // of a sample
  for (int64_t task = begin; task < end; ++task) {
    const int64_t outer = task / p.inner, c = task % p.inner;
    double sum = 0.;
    for (int64_t i = 0; i < p.num_chunks; ++i) sum += partial[(outer * p.num_chunks + i) * p.inner + c];
    const int64_t to = outer / volumes * p.output_stride[0] + (outer % volumes * p.inner + c) * p.output_stride[1];
    store_as(p.output_dtype, p.output, to, splat(static_cast<float>(sum / pixels)), 1);
  }
}

void gelu_pool_windows(const GeluPool& p, float* scratch, int64_t begin, int64_t end) {
  with_form(p, [&]<typename T, bool tanh_form>() { pool_windows<tanh_form, T>(p, scratch, begin, end); });
}

}  // namespace fxfuse::FXFUSE_ISA
