// What norm_pool_gelu.cpp hands to its CPU kernels: plain values only, since *.simd.cpp files see no torch header.
#pragma once

#include "common/kernel_types.h"

#include <cstdint>

namespace fxfuse {

// A row is one line of W: of a channel, W adjacent values (spatial-innermost, rows counted in order n, c, d, h), or of all channels,
// W pixels of C adjacent values (channel-innermost, rows counted in order n, d, h). In both orders rows are adjacent in memory, and a
// normalised block is `rows_per_block` consecutive rows (with all their channels if `block_spans_channels`).
struct NormPool {
  const void* input;
  void* output;  // [N, C, D, H, W] of the pooled sizes, dense in that order
  DType input_dtype, output_dtype;
  int64_t n, c, in[3], out[3];  // in, out: D, H, W

  const float* bias;  // [C] or null
  const void* addend;  // or null; read through addend_stride (n, c, d, h, w)
  DType addend_dtype;
  int64_t addend_stride[5];
  float addend_scale, addend_value;

  int64_t rows_per_block;
  bool block_spans_channels;
  const float *norm_weight, *norm_bias;  // both or neither, in the order of the block's memory
  float eps;

  int64_t kernel[3], stride[3], padding[3];
  bool count_include_pad;
  float divisor;         // divisor_override, or 0
  const float* w_share;  // [out W + kMaxLanes]: 1 / what the divisor counts along W; 1 under divisor_override
  bool tanh_form;

  int64_t tile;            // outputs along W that one task makes
  int64_t run_rows;        // rows whose values are summed as one run in the statistics pass
  int64_t values_per_run;  // along W, and along D and H where run_rows > 1
  int64_t segment;         // values of a run whose statistics are taken in two passes over cache
};

constexpr int64_t kMaxChannels = 64;    // channels that one task of a channel-innermost kernel takes
constexpr int64_t kBatchRows = 64;      // rows that a spatial-innermost kernel works on at a time
constexpr int64_t kBatchValues = 2048;  // and their values

// The statistics pass leaves the mean and sum of squared deviations of each segment; `Scales` are what a block's make of them:
// layer_norm(y) = (y - mean) * rstd + shift, where shift carries what the fp32 mean cannot hold (at mean 1e4 that is 5e-4).
struct Moments { double *mean, *deviation; };
struct Scales { float *mean, *rstd, *shift; };

struct Window { int64_t begin, end, count; };  // clipped to the input; count: what the divisor counts

static inline Window pool_window(const NormPool& p, int dim, int64_t o) {
  const int64_t start = o * p.stride[dim] - p.padding[dim], in = p.in[dim];
  const int64_t padded_end = start + p.kernel[dim] < in + p.padding[dim] ? start + p.kernel[dim] : in + p.padding[dim];
  const int64_t begin = start > 0 ? start : 0, end = padded_end < in ? padded_end : in;
  return {begin, end, p.count_include_pad ? padded_end - start : end - begin};
}

static inline int64_t num_tiles(const NormPool& p) { return (p.out[2] + p.tile - 1) / p.tile; }
static inline int64_t segments_per_run(const NormPool& p) { return (p.values_per_run + p.segment - 1) / p.segment; }

// Inputs along W that a tile reads, padding included, and the rest of the row where statistics need it.
static inline int64_t tile_span(const NormPool& p) {
  const int64_t span = (p.tile - 1) * p.stride[2] + p.kernel[2], row = p.padding[2] + p.in[2];
  return p.tile < p.out[2] || span > row ? span : row;
}

static inline bool addend_varies_along_w(const NormPool& p) { return p.addend && p.addend_stride[4] != 0; }

// Adjacent output rows that a batch of a spatial-innermost kernel makes, so that inputs and sums stay in L1 beside the next batch, if inputs are not
// larger. Where windows leave rows out, a batch is one output row.
static inline int64_t batch_outputs(const NormPool& p) {
  const int64_t fit = kBatchValues / p.in[2] < kBatchRows ? kBatchValues / p.in[2] : kBatchRows;
  const int64_t more = (fit / p.kernel[0] - p.kernel[1]) / p.stride[1];
  return p.stride[1] > p.kernel[1] || more < 0 ? 1 : 1 + more;
}
static inline int64_t batch_rows(const NormPool& p) { return p.kernel[0] * ((batch_outputs(p) - 1) * p.stride[1] + p.kernel[1]); }

// Floats of scratch for sums along W of a tile, which kernels read past.
static inline int64_t sums_size(const NormPool& p) { return (tile_span(p) + 3 * kMaxLanes) / kMaxLanes * kMaxLanes + kMaxLanes; }

static inline int64_t row_scratch(const NormPool& p) {
  const int64_t batch = batch_outputs(p) * (p.out[2] + sums_size(p)) + (addend_varies_along_w(p) ? 2 * batch_rows(p) * (p.in[2] + kMaxLanes) : 0);
  const int64_t segment = p.segment < p.values_per_run ? p.segment : p.values_per_run, tile = p.tile + tile_span(p);
  const int64_t longer = batch > tile ? batch : tile;
  return sums_size(p) + (longer > segment ? longer : segment) + 3 * kMaxLanes;
}

static inline int64_t column_scratch(const NormPool& p) {
  const int64_t addends = addend_varies_along_w(p) ? (tile_span(p) > p.segment ? tile_span(p) : p.segment) : 0;
  return (p.tile + kMaxLanes + addends) * kMaxChannels;
}

// The kernels, once per instruction set. Ranges are of tasks: rows and tiles of the output, or segments of the input.
#define FXFUSE_NORM_POOL_KERNELS                                                                                   \
  void norm_pool_rows(const NormPool& p, const Scales* scales, float* scratch, int64_t begin, int64_t end);        \
  void norm_pool_row_moments(const NormPool& p, Moments moments, float* scratch, int64_t begin, int64_t end);      \
  void norm_pool_columns(const NormPool& p, const Scales* scales, float* scratch, int64_t begin, int64_t end);     \
  void norm_pool_column_moments(const NormPool& p, Moments moments, float* scratch, int64_t begin, int64_t end);

}  // namespace fxfuse
