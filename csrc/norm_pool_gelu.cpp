// norm_pool_gelu on the CPU: gelu(avg_pool3d(layer_norm(input + bias + addend))).
//
// Bytes moved: the input once and the output once, where statistics are taken per row of W and windows hardly share rows. Otherwise
// a statistics pass comes first; it and the pool pass alternate over units (whole samples or channels) that fit into L2, or, where
// those are too large or too few for the threads, run one after the other over everything. The arithmetic is the same either way,
// and each output and each segment of the statistics is one thread's, so that results do not depend on the number of threads.
#include "norm_pool_gelu.h"

#include "common/args.h"
#include "common/cpu.h"
#include "cpu_ops.h"

#include <algorithm>
#include <cmath>
#include <memory>

FXFUSE_DECLARE_PER_ISA(FXFUSE_NORM_POOL_KERNELS)

namespace fxfuse {
namespace {

// ---- policy ------------------------------------------------------------------------------------------------------

constexpr int64_t kLongestRow = 8192;      // spatial-innermost: a row's values stay in L1 over three passes
constexpr int64_t kLongestColumn = 1024;   // channel-innermost: kMaxChannels of them in L2
constexpr int64_t kUnitBytes = 512 << 10;  // half of a common L2
constexpr double kRereads = 1.5;           // above this, statistics of a row are not taken again for each window it is in

// True if statistics need no pass of their own.
bool is_one_pass(const NormPool& p, int64_t norm_ndim, bool channels_last) {
  if (norm_ndim != 1 || p.in[2] > (channels_last ? kLongestColumn : kLongestRow)) return false;
  double reads = 1.;
  for (int i = 0; i < 2; ++i) reads *= static_cast<double>(p.out[i] * p.kernel[i]) / static_cast<double>(p.in[i]);
  return reads <= kRereads;
}

// Outputs along W a task, so that its inputs stay in cache; a row needs all of them where it takes its own statistics.
int64_t tile_of(const NormPool& p, bool one_pass, bool channels_last) {
  const int64_t room = (channels_last ? kLongestColumn / 2 : kLongestRow) - p.kernel[2];
  return one_pass ? p.out[2] : std::clamp<int64_t>(room / p.stride[2] + 1, 1, p.out[2]);
}

// What the passes run over: units of whole normalised blocks and whole pooled volumes.
struct Schedule {
  int64_t units, segments_per_unit, blocks_per_unit, tasks_per_unit;
  int64_t segments_per_block, lanes_per_block;  // lanes: channels of a channel-innermost row
  int64_t values_per_unit, scratch;
};

Schedule schedule_of(const NormPool& p, bool channels_last) {
  const int64_t volume_rows = p.in[0] * p.in[1], rows = p.n * volume_rows * (channels_last ? 1 : p.c);
  const int64_t unit_rows = std::max(p.rows_per_block, volume_rows), segments_per_row_run = segments_per_run(p);
  const int64_t lanes = channels_last ? p.c : 1, channel_blocks = channels_last ? (p.c + kMaxChannels - 1) / kMaxChannels : 1;
  return {
      .units = rows / unit_rows,
      .segments_per_unit = unit_rows / p.run_rows * segments_per_row_run,
      .blocks_per_unit = unit_rows / p.rows_per_block,
      .tasks_per_unit = unit_rows / volume_rows * p.out[0] * p.out[1] * num_tiles(p) * channel_blocks,
      .segments_per_block = p.rows_per_block / p.run_rows * segments_per_row_run,
      .lanes_per_block = lanes,
      .values_per_unit = unit_rows * p.in[2] * lanes,
      .scratch = channels_last ? column_scratch(p) : row_scratch(p),
  };
}

// ---- passes ------------------------------------------------------------------------------------------------------

// Merges the segments of one block, in double; all have p.segment values but the last of each run.
void block_scale(const NormPool& p, const Schedule& s, Moments moments, int64_t block, int64_t lane, int64_t num_lanes, Scales scales) {
  const int64_t first = block * s.segments_per_block, per_run = segments_per_run(p);
  const auto each = [&](auto&& f) {
    for (int64_t i = 0; i < s.segments_per_block; ++i) {
      const bool last = i % per_run == per_run - 1;
      const auto n = static_cast<double>(last ? p.values_per_run - (per_run - 1) * p.segment : p.segment);
      for (int64_t l = lane; l < lane + num_lanes; ++l) f((first + i) * s.lanes_per_block + l, n);
    }
  };
  double total = 0., mean = 0., deviation = 0.;
  each([&](int64_t i, double n) { total += n, mean += n * moments.mean[i]; });
  mean /= total;
  each([&](int64_t i, double n) { deviation += moments.deviation[i] + n * (moments.mean[i] - mean) * (moments.mean[i] - mean); });
  const double rstd = 1. / std::sqrt(deviation / total + p.eps);
  for (int64_t l = lane; l < lane + num_lanes; ++l) {
    const int64_t to = block * s.lanes_per_block + l;
    scales.mean[to] = static_cast<float>(mean);
    scales.rstd[to] = static_cast<float>(rstd);
    scales.shift[to] = static_cast<float>((scales.mean[to] - mean) * rstd);
  }
}

void block_scales(const NormPool& p, const Schedule& s, Moments moments, int64_t begin, int64_t end, Scales scales) {
  const int64_t merged = p.block_spans_channels ? s.lanes_per_block : 1;
  for (int64_t block = begin; block < end; ++block) {
    for (int64_t lane = 0; lane < s.lanes_per_block; lane += merged) block_scale(p, s, moments, block, lane, merged, scales);
  }
}

void run_one_pass(const NormPool& p, const Schedule& s, bool channels_last) {
  const auto pool = channels_last ? FXFUSE_KERNEL(norm_pool_columns) : FXFUSE_KERNEL(norm_pool_rows);
  parallel_tasks(s.units * s.tasks_per_unit, s.units * s.values_per_unit, s.scratch,
                 [&](float* scratch, int64_t begin, int64_t end) { pool(p, nullptr, scratch, begin, end); });
}

void run_two_pass(const NormPool& p, const Schedule& s, bool channels_last) {
  const auto pool = channels_last ? FXFUSE_KERNEL(norm_pool_columns) : FXFUSE_KERNEL(norm_pool_rows);
  const auto take_moments = channels_last ? FXFUSE_KERNEL(norm_pool_column_moments) : FXFUSE_KERNEL(norm_pool_row_moments);
  const int64_t num_moments = s.units * s.segments_per_unit * s.lanes_per_block, num_scales = s.units * s.blocks_per_unit * s.lanes_per_block;
  const std::unique_ptr<double[]> moments_data(new double[2 * num_moments]);
  const std::unique_ptr<float[]> scales_data(new float[3 * num_scales]);
  const Moments moments{moments_data.get(), moments_data.get() + num_moments};
  const Scales scales{scales_data.get(), scales_data.get() + num_scales, scales_data.get() + 2 * num_scales};

  const auto run_units = [&](float* scratch, int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      take_moments(p, moments, scratch, unit * s.segments_per_unit, (unit + 1) * s.segments_per_unit);
      block_scales(p, s, moments, unit * s.blocks_per_unit, (unit + 1) * s.blocks_per_unit, scales);
      pool(p, &scales, scratch, unit * s.tasks_per_unit, (unit + 1) * s.tasks_per_unit);
    }
  };
  const int64_t values = s.units * s.values_per_unit, value_bytes = p.input_dtype == DType::kFloat32 ? 4 : 2;
  if (s.values_per_unit * value_bytes <= kUnitBytes && s.units >= 4 * static_cast<int64_t>(torch::stable::get_num_threads())) {
    return parallel_tasks(s.units, values, s.scratch, run_units);
  }
  parallel_tasks(s.units * s.segments_per_unit, values, s.scratch,
                 [&](float* scratch, int64_t begin, int64_t end) { take_moments(p, moments, scratch, begin, end); });
  parallel_tasks(s.units * s.blocks_per_unit, num_moments, 0,
                 [&](float*, int64_t begin, int64_t end) { block_scales(p, s, moments, begin, end, scales); });
  parallel_tasks(s.units * s.tasks_per_unit, values, s.scratch,
                 [&](float* scratch, int64_t begin, int64_t end) { pool(p, &scales, scratch, begin, end); });
}

// ---- op ----------------------------------------------------------------------------------------------------------

// Weight and bias as the kernels read them: both, or neither; in the order of the block's memory.
struct Affine {
  std::optional<Tensor> weight, bias;
  std::vector<float> filler;

  Affine(const std::optional<Tensor>& weight, const std::optional<Tensor>& bias, bool channels_innermost)
      : weight(prepare(weight, channels_innermost)), bias(prepare(bias, channels_innermost)) {
    if (weight.has_value() != bias.has_value()) filler.assign(weight ? weight->numel() : bias->numel(), weight ? 0.f : 1.f);
  }

  static std::optional<Tensor> prepare(const std::optional<Tensor>& parameter, bool channels_innermost) {
    const auto dense = dense_float32(parameter);
    if (!dense || !channels_innermost) return dense;
    const Tensor batched = dense->dim() == 4 ? torch::stable::unsqueeze(*dense, 0) : *dense;
    return torch::stable::contiguous(batched, torch::headeronly::MemoryFormat::ChannelsLast3d);
  }

  const float* weight_data() const { return weight ? data_of(weight) : filler.empty() ? nullptr : filler.data(); }
  const float* bias_data() const { return bias ? data_of(bias) : filler.empty() ? nullptr : filler.data(); }
};

// 1 / the divisor's count along W for each output, padded to whole vectors.
std::vector<float> shares_along_w(const NormPool& p) {
  std::vector<float> shares(p.out[2] + kMaxLanes, 1.f);
  for (int64_t o = 0; p.divisor == 0.f && o < p.out[2]; ++o) shares[o] = 1.f / static_cast<float>(pool_window(p, 2, o).count);
  return shares;
}

}  // namespace

Tensor norm_pool_gelu(const Tensor& input, const std::optional<Tensor>& bias, const std::optional<Tensor>& addend,
                      const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias, double addend_scale,
                      double addend_value, int64_t norm_ndim, double eps, const std::vector<int64_t>& kernel_size,
                      const std::vector<int64_t>& stride, const std::vector<int64_t>& padding, bool ceil_mode, bool count_include_pad,
                      std::optional<int64_t> divisor_override, const std::string& approximate, std::optional<ScalarType> out_dtype) {
  const NormPoolGeometry geometry = check_norm_pool(input, norm_ndim, kernel_size, stride, padding, ceil_mode, divisor_override);
  const Dims5& size = geometry.size;
  const Ints own = sizes_of(input), normalised = own.last(norm_ndim);
  check_parameter(bias, input, "bias", Ints(&size[1], 1));
  check_parameter(norm_weight, input, "norm_weight", normalised);
  check_parameter(norm_bias, input, "norm_bias", normalised);
  if (addend) check_joins(*addend, input, "addend");
  const Dims5 addend_stride = addend ? broadcast_strides(*addend, input) : Dims5{};
  const bool tanh_form = is_tanh_form(approximate);
  const ScalarType dtype = output_dtype(input, out_dtype);
  Tensor output = torch::stable::new_empty(input, geometry.output_size, dtype);
  if (output.numel() == 0) return output;

  const MemoryOrder order = memory_order(size, as_5d(strides_of(input), 3, 0));
  const bool channels_last = order == MemoryOrder::kChannelInnermost;
  const Tensor dense = order == MemoryOrder::kOther ? torch::stable::contiguous(input) : input;
  const bool spans_channels = norm_ndim > 3;
  const auto float_bias = dense_float32(bias);
  const Affine affine(norm_weight, norm_bias, channels_last && spans_channels);

  NormPool p{
      .input = dense.const_data_ptr(), .output = output.mutable_data_ptr(),
      .input_dtype = dtype_of(input.scalar_type()), .output_dtype = dtype_of(dtype),
      .n = size[0], .c = size[1], .in = {size[2], size[3], size[4]}, .out = {geometry.out[0], geometry.out[1], geometry.out[2]},
      .bias = data_of(float_bias), .addend = addend ? addend->const_data_ptr() : nullptr,
      .addend_dtype = dtype_of(addend ? addend->scalar_type() : ScalarType::Float),
      .addend_stride = {addend_stride[0], addend_stride[1], addend_stride[2], addend_stride[3], addend_stride[4]},
      .addend_scale = static_cast<float>(addend_scale), .addend_value = static_cast<float>(addend_value),
      .rows_per_block = 1, .block_spans_channels = channels_last && spans_channels,
      .norm_weight = affine.weight_data(), .norm_bias = affine.bias_data(), .eps = static_cast<float>(eps),
      .kernel = {kernel_size[0], kernel_size[1], kernel_size[2]}, .stride = {stride[0], stride[1], stride[2]},
      .padding = {padding[0], padding[1], padding[2]}, .count_include_pad = count_include_pad,
      .divisor = static_cast<float>(divisor_override.value_or(0)), .w_share = nullptr, .tanh_form = tanh_form,
      .tile = 0, .run_rows = 1, .values_per_run = size[4], .segment = channels_last ? kLongestColumn / 2 : kLongestRow / 2};
  for (int64_t i = 5 - norm_ndim; i < 4; ++i) {
    if (i >= 0 && !(channels_last && i == 1)) p.rows_per_block *= size[i];
  }
  const bool along_volume = addend_stride[2] != 0 || addend_stride[3] != 0 || addend_stride[4] != 0;
  for (int64_t i = 3; i >= 2 && !channels_last && !along_volume && i >= 5 - norm_ndim; --i) p.run_rows *= size[i];
  p.values_per_run *= p.run_rows;
  const std::vector<float> w_share = shares_along_w(p);
  p.w_share = w_share.data();
  const bool one_pass = is_one_pass(p, norm_ndim, channels_last);
  p.tile = tile_of(p, one_pass, channels_last);

  const Schedule schedule = schedule_of(p, channels_last);
  if (one_pass) run_one_pass(p, schedule, channels_last);
  else run_two_pass(p, schedule, channels_last);
  return output;
}

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CPU, m) { m.impl("norm_pool_gelu", TORCH_BOX(&norm_pool_gelu)); }

}  // namespace fxfuse
