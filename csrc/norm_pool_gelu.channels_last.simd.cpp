// norm_pool_gelu for channel-innermost input: lanes run along C, so that statistics along W need no sum over lanes.
//
// A task takes blocks of up to 4 vectors of channels of one output row: its kernel_d * kernel_h rows are W short runs of adjacent
// channels, read once from memory and twice again from L1. The normalised values go straight into sums of the outputs along W. The
// output is spatial-innermost: kLanes outputs x kLanes channels are transposed in registers, and each channel gets a run of its row.
#include "norm_pool_gelu.simd.h"

namespace fxfuse::FXFUSE_ISA {
namespace {

// kVecs vectors of adjacent channels, of which the last may be cut.
template <int kVecs>
struct Block {
  static constexpr int64_t kPadded = kVecs * kLanes;
  int64_t first, channels;

  template <typename T>
  __attribute__((always_inline)) Vec load_vec(const T* pixel, int v) const {
    return v < kVecs - 1 ? load(pixel + v * kLanes) : load_up_to(pixel + v * kLanes, channels - v * kLanes);
  }
};

// f(block) for blocks of up to 4 vectors that make up the channels [begin, end).
template <typename F>
FXFUSE_INLINE void for_each_block(int64_t begin, int64_t end, F&& f) {
  int64_t c = begin;
  for (; c + 3 * kLanes < end; c += 4 * kLanes) f(Block<4>{c, end - c < 4 * kLanes ? end - c : 4 * kLanes});
  if (c + 2 * kLanes < end) f(Block<3>{c, end - c});
  else if (c + kLanes < end) f(Block<2>{c, end - c});
  else if (c < end) f(Block<1>{c, end - c});
}

// What is added to a row, a value a channel; `trace` is trace_of it.
template <int kVecs>
struct Constants { float value[kVecs * kLanes], trace[kVecs * kLanes]; };

template <int kVecs>
void load_constants(const NormPool& p, const Block<kVecs>& block, const Row& row, Constants<kVecs>& constants) {
  for (int64_t i = 0; i < block.kPadded; ++i) {
    const Row at{row.n, block.first + (i < block.channels ? i : 0), row.d, row.h};
    constants.value[i] = row_constant(p, at);
    constants.trace[i] = trace_of(constants.value[i]);
  }
}

// constant + addend_scale * addend for n pixels from w on, kPadded values a pixel.
template <int kVecs>
void load_addends(const NormPool& p, const Block<kVecs>& block, const Row& row, const float* constants, int64_t w, int64_t n, float* out) {
  const int64_t stride = p.addend_stride[1], first = addend_index(p, row) + w * p.addend_stride[4];
  const float scale = p.addend_scale;
  with_type(p.addend_dtype, [&]<typename T>(T) {
    for (int64_t j = 0; j < n; ++j) {
      const T* addend = static_cast<const T*>(p.addend) + first + j * p.addend_stride[4];
      float* to = out + j * block.kPadded;
      if (stride == 1) {
        for (int v = 0; v < kVecs; ++v) store(to + v * kLanes, block.load_vec(addend, v) * scale + load(constants + v * kLanes));
        continue;
      }
      for (int64_t i = 0; i < block.channels; ++i) to[i] = load_one(p.addend_dtype, addend, i * stride) * scale + constants[i];
    }
  });
}

// Calls f with the loader y(j, v) of the channels v of pixel j: x, or, where offsets are given, x + offsets[j * stride].
template <int kVecs, typename T, typename F>
FXFUSE_INLINE void with_values(const Block<kVecs>& given, const T* x, int64_t c, const float* offsets, int64_t stride, F&& f) {
  const Block<kVecs> block = given;
  if (offsets) f([=](int64_t j, int v) { return block.load_vec(x + j * c, v) + load(offsets + j * stride + v * kLanes); });
  else f([=](int64_t j, int v) { return block.load_vec(x + j * c, v); });
}

template <int kVecs>
struct ColumnSums { Vec mean[kVecs], sum1[kVecs], sum2[kVecs]; };  // of n pixels: sums of (y - mean) and its square

// Two passes over n pixels, with meanwhile(j) in the second. Sums of up to 64 pixels are summed again: long rows keep fp32's accuracy.
template <int kVecs, typename F, typename G>
FXFUSE_INLINE ColumnSums<kVecs> column_sums(int64_t n, F&& y, G&& meanwhile) {
  Vec mean[kVecs] = {}, sum1[kVecs] = {}, sum2[kVecs] = {};
  for (int64_t j = 0; j < n; ++j) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) mean[v] += y(j, v);
  }
  for (int v = 0; v < kVecs; ++v) mean[v] /= static_cast<float>(n);
  for (int64_t begin = 0; begin < n; begin += 64) {
    Vec part1[kVecs] = {}, part2[kVecs] = {};
    for (int64_t j = begin; j < n && j < begin + 64; ++j) {
      meanwhile(j);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        const Vec centred = y(j, v) - mean[v];
        part1[v] += centred;
        part2[v] += centred * centred;
      }
    }
    for (int v = 0; v < kVecs; ++v) sum1[v] += part1[v], sum2[v] += part2[v];
  }
  ColumnSums<kVecs> sums;
  for (int v = 0; v < kVecs; ++v) sums.mean[v] = mean[v], sums.sum1[v] = sum1[v], sums.sum2[v] = sum2[v];
  return sums;
}

template <int kVecs>
struct ColumnScales { Vec mean[kVecs], rstd[kVecs], shift[kVecs]; };

template <int kVecs>
FXFUSE_INLINE ColumnScales<kVecs> scales_of(const ColumnSums<kVecs>& sums, float n, float eps, const float* trace) {
  ColumnScales<kVecs> scales;
  for (int v = 0; v < kVecs; ++v) {
    const Vec residual = sums.sum1[v] / n, variance = sums.sum2[v] / n - residual * residual;
    scales.mean[v] = sums.mean[v];
    scales.rstd[v] = 1.f / sqrt((variance < 0.f ? Vec{} : variance) + eps);
    scales.shift[v] = load(trace + v * kLanes) - residual * scales.rstd[v];
  }
  return scales;
}

template <int kVecs>
FXFUSE_INLINE ColumnScales<kVecs> load_scales(const NormPool& p, const Scales& from, const Block<kVecs>& block, int64_t row) {
  const int64_t first = row / p.rows_per_block * p.c + block.first;
  ColumnScales<kVecs> scales;
  for (int v = 0; v < kVecs; ++v) {
    scales.mean[v] = block.load_vec(from.mean + first, v);
    scales.rstd[v] = block.load_vec(from.rstd + first, v);
    scales.shift[v] = block.load_vec(from.shift + first, v);
  }
  return scales;
}

// Outputs [first, first + count) along W.
struct Tile { int64_t first, count; };

// acc[o] += the sum over output o's window along W of normalised pixels. y counts pixels from w on; `within` is pixel 0's place in its
// normalised block.
template <int kVecs, typename F>
FXFUSE_INLINE void add_pooled(const NormPool& p, const Block<kVecs>& block, const Tile& tile, F&& y, int64_t w, const ColumnScales<kVecs>& scales,
                              int64_t within, float* acc) {
  const float *weight = p.norm_weight, *bias = p.norm_bias;
  const bool by_channel = p.block_spans_channels;
  const int64_t c = p.c, in = p.in[2], kernel = p.kernel[2], stride = p.stride[2], padding = p.padding[2];
  const auto add = [&](auto normalised) {
    for (int64_t o = 0; o < tile.count; ++o) {
      const int64_t start = (tile.first + o) * stride - padding;
      const int64_t begin = start > 0 ? start : 0, end = start + kernel < in ? start + kernel : in;
      float* to = acc + o * block.kPadded;
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) {
        store(to + v * kLanes, load(to + v * kLanes) + sum_window(end - begin, [&](int64_t j) { return normalised(begin + j, v); }));
      }
    }
  };
  const auto plain = [&](int64_t j, int v) { return (y(j - w, v) - scales.mean[v]) * scales.rstd[v] + scales.shift[v]; };
  if (!weight) add(plain);
  else if (!by_channel) add([&](int64_t j, int v) { return plain(j, v) * weight[within + j] + bias[within + j]; });
  else add([&](int64_t j, int v) {
    const int64_t at = (within + j) * c + block.first;
    return plain(j, v) * block.load_vec(weight + at, v) + block.load_vec(bias + at, v);
  });
}

// Sums of n outputs from w on become outputs, in kRows output rows that are `across` rows apart.
template <int kRows>
FXFUSE_INLINE void finish(const NormPool& p, Vec (&sums)[kRows], Vec share, int64_t row, int64_t across, int64_t w, int64_t n) {
  each<kRows>([&](int k) { sums[k] *= share; });
  p.tanh_form ? gelu_tanh(sums) : gelu_erf(sums);
  each<kRows>([&](int k) { store_as(p.output_dtype, p.output, (row + k * across) * p.out[2] + w, sums[k], n); });
}

// The sums of a tile's outputs, a block of channels each, become outputs of each channel's row.
template <int kVecs>
void finish_block(const NormPool& p, const Block<kVecs>& block, const Tile& tile, const float* acc, const OutputRow& out) {
  const int64_t across = p.out[0] * p.out[1];  // from a channel's output row to the next channel's
  for (int64_t o = 0; o < tile.count; o += kLanes) {
    const Vec share = load(p.w_share + tile.first + o) * out.share(p);
    for (int v = 0; v < kVecs; ++v) {
      Vec rows[kLanes];
      for (int i = 0; i < kLanes; ++i) rows[i] = load(acc + (o + i) * block.kPadded + v * kLanes);
      transpose(rows);
      const int64_t channels = block.channels - v * kLanes < kLanes ? block.channels - v * kLanes : kLanes;
      const int64_t row = ((out.at.n * p.c + block.first + v * kLanes) * p.out[0] + out.at.d) * p.out[1] + out.at.h;
      int64_t i = 0;
      for (; i + 4 <= channels; i += 4) {
        Vec sums[4] = {rows[i], rows[i + 1], rows[i + 2], rows[i + 3]};
        finish(p, sums, share, row + i * across, across, tile.first + o, tile.count - o);
      }
      for (; i < channels; ++i) {
        Vec sums[1] = {rows[i]};
        finish(p, sums, share, row + i * across, across, tile.first + o, tile.count - o);
      }
    }
  }
}

// One tile of an output row for a block of channels: with scales from the statistics pass, or, scales being null, with statistics of
// rows that are whole in the tile.
template <typename T, int kVecs>
void pool_block(const NormPool& p, const Scales* scales, const Block<kVecs>& block, const OutputRow& out, const Tile& tile, float* scratch) {
  const int64_t w = p.in[2], start = tile.first * p.stride[2] - p.padding[2], span = tile_span(p);
  const int64_t w_begin = start > 0 ? start : 0, w_end = start + span < w ? start + span : w, n = w_end - w_begin;
  const bool along_w = addend_varies_along_w(p);
  const int64_t acc_size = (tile.count + kLanes) * block.kPadded;
  float* addends = scratch + acc_size;
  for (int64_t i = 0; i < acc_size; i += kLanes) store(scratch + i, Vec{});
  Constants<kVecs> constants;
  const bool one_constant = constant_by_channel(p);
  if (one_constant) load_constants(p, block, {out.at.n, 0, 0, 0}, constants);
  for (int64_t d = out.d.begin; d < out.d.end; ++d) {
    for (int64_t h = out.h.begin; h < out.h.end; ++h) {
      const Row at{out.at.n, block.first, d, h};
      const int64_t row = (at.n * p.in[0] + d) * p.in[1] + h;
      if (!one_constant) load_constants(p, block, at, constants);
      if (along_w) load_addends(p, block, at, constants.value, w_begin, n, addends);
      const T* x = static_cast<const T*>(p.input) + (row * w + w_begin) * p.c + block.first;
      const int64_t next_d = h + 1 < out.h.end || d + 1 == out.d.end ? d : d + 1;
      const int64_t next_h = h + 1 < out.h.end ? h + 1 : next_d > d ? out.h.begin : h + 1 < p.in[1] ? h + 1 : h;
      const T* next = x + ((next_d - d) * p.in[1] + next_h - h) * w * p.c;
      const auto fetch_next = [=, c = p.c](int64_t j) { prefetch(next + j * c, kVecs * kLanes); };
      // A row's own statistics absorb what is constant along W.
      const float* offsets = along_w ? addends : scales ? constants.value : nullptr;
      with_values(block, x, p.c, offsets, along_w ? block.kPadded : 0, [&](auto y) {
        const ColumnScales<kVecs> row_scales = scales ? load_scales(p, *scales, block, row)
                                                      : scales_of(column_sums<kVecs>(n, y, fetch_next), static_cast<float>(n), p.eps, constants.trace);
        add_pooled(p, block, tile, y, w_begin, row_scales, row % p.rows_per_block * w, scratch);
      });
    }
  }
  finish_block(p, block, tile, scratch, out);
}

template <typename T, int kVecs>
void segment_moments(const NormPool& p, Moments moments, const Block<kVecs>& block, int64_t segment, float* scratch) {
  const int64_t row = segment / segments_per_run(p), first = segment % segments_per_run(p) * p.segment;
  const int64_t n = first + p.segment < p.in[2] ? p.segment : p.in[2] - first;
  const Row at{row / p.in[1] / p.in[0], block.first, row / p.in[1] % p.in[0], row % p.in[1]};
  const bool along_w = addend_varies_along_w(p);
  Constants<kVecs> constants;
  load_constants(p, block, at, constants);
  if (along_w) load_addends(p, block, at, constants.value, first, n, scratch);
  const T* x = static_cast<const T*>(p.input) + (row * p.in[2] + first) * p.c + block.first;
  with_values(block, x, p.c, along_w ? scratch : constants.value, along_w ? block.kPadded : 0, [&](auto y) {
    const ColumnSums<kVecs> sums = column_sums<kVecs>(n, y, [](int64_t) {});
    for (int64_t i = 0; i < block.channels; ++i) {
      const int64_t v = i / kLanes, lane = i % kLanes, to = segment * p.c + block.first + i;
      const double residual = static_cast<double>(sums.sum1[v][lane]) / static_cast<double>(n);
      moments.mean[to] = sums.mean[v][lane] + residual;
      moments.deviation[to] = sums.sum2[v][lane] - sums.sum1[v][lane] * residual;
    }
  });
}

}  // namespace

// Tasks are (output row of n, d, h; tile of W; kMaxChannels channels), channels innermost.
void norm_pool_columns(const NormPool& p, const Scales* scales, float* scratch, int64_t begin, int64_t end) {
  const int64_t blocks = (p.c + kMaxChannels - 1) / kMaxChannels, tiles = num_tiles(p);
  with_type(p.input_dtype, [&]<typename T>(T) {
    for (int64_t task = begin; task < end; ++task) {
      const OutputRow out(p, 1, task / blocks / tiles);
      const int64_t first = task / blocks % tiles * p.tile, c = task % blocks * kMaxChannels;
      const Tile tile{first, first + p.tile < p.out[2] ? p.tile : p.out[2] - first};
      for_each_block(c, c + kMaxChannels < p.c ? c + kMaxChannels : p.c,
                     [&](const auto& block) { pool_block<T>(p, scales, block, out, tile, scratch); });
    }
  });
}

void norm_pool_column_moments(const NormPool& p, Moments moments, float* scratch, int64_t begin, int64_t end) {
  with_type(p.input_dtype, [&]<typename T>(T) {
    for (int64_t segment = begin; segment < end; ++segment) {
      for_each_block(0, p.c, [&](const auto& block) { segment_moments<T>(p, moments, block, segment, scratch); });
    }
  });
}

}  // namespace fxfuse::FXFUSE_ISA
