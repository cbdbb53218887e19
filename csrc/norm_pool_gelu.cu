// fxfuse::norm_pool_gelu: gelu(avg_pool3d(layer_norm(input + bias[c] + addend))); the tail of conv -> add -> layer_norm -> pool -> gelu.
//
// Why one kernel: apart, the add, the norm and the pool each read and write the convolution's output. Here it is read once and only the
// pooled result is written: 1.07 GB + 0.13 GB in fp32 at [32, 64, 32, 64, 64] pooled by 2. That bounds the time, as long as the
// arithmetic stays inside the issue slots that the loads leave over: about 20 instructions an element in fp32, half of that in 16 bits.
//
//   norm_pool_gelu_plan.cuh           which path, which tiles: pure functions
//   norm_pool_gelu_problem.cuh        what is computed; the arithmetic that the kernels share
//   norm_pool_gelu_rows.cuh           contiguous, norm over W, rows in registers
//   norm_pool_gelu_channels_last.cuh  channels_last_3d, norm over W, rows in registers
//   norm_pool_gelu_block.cuh          contiguous, norm over one to three dimensions, in a block's registers
//   norm_pool_gelu_statistics.cuh     everything else: statistics first
//   this file                         launch, op, registration

#include <cstring>
#include <string>
#include <vector>

#include "common/args.h"
#include "common/cuda.cuh"
#include "norm_pool_gelu_block.cuh"
#include "norm_pool_gelu_channels_last.cuh"
#include "norm_pool_gelu_plan.cuh"
#include "norm_pool_gelu_rows.cuh"
#include "norm_pool_gelu_statistics.cuh"

namespace fxfuse::norm_pool_gelu {
namespace {

// ---- launch ------------------------------------------------------------------------------------------------------

// Calls f(first_n, rows) for runs of samples whose output rows, `rows_per_sample` each, a 31-bit index can count.
template <typename F>
void for_each_run_of_samples(const Problem& p, int64_t rows_per_sample, const F& f) {
  const int64_t run = std::max<int64_t>(1, INT32_MAX / rows_per_sample);
  for (int64_t first_n = 0; first_n < p.num_n; first_n += run) f(first_n, std::min(run, p.num_n - first_n) * rows_per_sample);
}

template <typename T, int kVec, int kVecs, int kRows, RowsMode kMode, bool kAddend = false>
void launch_rows_kernel(const Tensor& input, const Problem& p, const RowsPlan& plan) {
  const int groups = kRowsThreads / plan.lanes;
  const size_t shared_bytes = sizeof(float) * p.w.input * (kMode == RowsMode::General ? 2 + groups : 2);
  uint32_t log2_lanes = 0;
  while ((1 << log2_lanes) < plan.lanes) ++log2_lanes;
  const int64_t rows_per_sample = p.num_channels * p.output_rows();
  for_each_run_of_samples(p, rows_per_sample, [&](int64_t first_n, int64_t rows) {
    const RowsGrid grid{static_cast<uint32_t>(plan.lanes), log2_lanes, static_cast<uint32_t>(rows), first_n, first_n * p.num_channels,
                        first_n * rows_per_sample, FastDiv(p.h.output), FastDiv(p.d.output), FastDiv(p.num_channels)};
    launch(input, {ceil_div(rows, groups), kRowsThreads, shared_bytes}, rows_kernel<T, kVec, kVecs, kRows, kMode, kAddend>, p, grid);
  });
}

// kMostRows: rows in flight that the registers allow.
template <typename T, int kVec, int kVecs, int kMostRows>
void launch_rows_tile(const Tensor& input, const Problem& p, const RowsPlan& plan) {
  constexpr bool kWide = kVec > 2;
  if (!p.addend_is_per_channel) return launch_rows_kernel<T, kVec, kVecs, 1, RowsMode::General, true>(input, p, plan);
  if constexpr (kWide && kMostRows > 1) {
    if (plan.rows_in_flight == 1) return launch_rows_tile<T, kVec, kVecs, 1>(input, p, plan);
  }
  if constexpr (kWide) {
    if (plan.exact) return launch_rows_kernel<T, kVec, kVecs, kMostRows, RowsMode::Exact>(input, p, plan);
  }
  if constexpr (kVec > 1) {
    if (plan.pairs) return launch_rows_kernel<T, kVec, kVecs, kMostRows, RowsMode::Pairs>(input, p, plan);
  }
  launch_rows_kernel<T, kVec, kVecs, kMostRows, RowsMode::General>(input, p, plan);
}

template <typename T>
void launch_plan(const Tensor& input, const Problem& p, const RowsPlan& plan) {
  constexpr int kWide = kVecLen<T>;
  if (plan.vec_len == kWide && plan.vecs == 1) return launch_rows_tile<T, kWide, 1, 2>(input, p, plan);
  if (plan.vec_len == kWide && plan.vecs == 2) return launch_rows_tile<T, kWide, 2, 2>(input, p, plan);
  if (plan.vec_len == kWide && plan.vecs == 4) return launch_rows_tile<T, kWide, 4, 1>(input, p, plan);
  if (plan.vec_len == 2 && plan.vecs == 4) return launch_rows_tile<T, 2, 4, 2>(input, p, plan);
  if (plan.vec_len == 2 && plan.vecs == 8) return launch_rows_tile<T, 2, 8, 1>(input, p, plan);
  if (plan.vec_len == 1 && plan.vecs == 8) return launch_rows_tile<T, 1, 8, 2>(input, p, plan);
  if (plan.vec_len == 1 && plan.vecs == 16) return launch_rows_tile<T, 1, 16, 1>(input, p, plan);
  throw std::runtime_error("no kernel has this tile");
}

template <typename T, int kChannels, int kWidth, bool kExact, bool kAddend>
void launch_channels_kernel(const Tensor& input, const Problem& p, const ChannelsPlan& plan) {
  constexpr int kColumns = kWarpSize * kChannels, kRows = kAddend ? 1 : 2;
  // In floats. Odd, so that lanes hit different banks with single floats; 16 bytes past the outputs, so that they do with 16 bytes each.
  const int out_size = p.output_is_float ? sizeof(float) : sizeof(T);
  const int tile_stride = kExact ? (p.w.output * out_size + kVecBytes) / static_cast<int>(sizeof(float)) : p.w.input | 1;
  const int piece = kExact ? std::min(kVecBytes / out_size, kWidth / 2) : 1;
  const size_t batches = p.window_rows() > kRows ? 2 : 1;
  const size_t moments = plan.warps_per_row == 1 ? 0 : sizeof(Moments) * kRows * plan.warps_per_row * batches;
  const size_t shared_bytes = sizeof(float) * 2 * p.w.input + plan.rows_per_block * kColumns * (sizeof(float) * tile_stride + moments);
  const int64_t channel_tiles = ceil_div(p.num_channels, kColumns), rows_per_sample = p.output_rows();
  for_each_run_of_samples(p, rows_per_sample * channel_tiles, [&](int64_t first_n, int64_t blocks) {
    const int64_t rows = blocks / channel_tiles;
    const ChannelsGrid grid{plan.warps_per_row, plan.rows_per_block, tile_stride, static_cast<uint32_t>(rows), first_n,
                            FastDiv(plan.warps_per_row), FastDiv(channel_tiles), FastDiv(p.h.output), FastDiv(p.d.output),
                            FastDiv(p.w.output / piece)};
    launch(input, {ceil_div(rows, plan.rows_per_block) * channel_tiles, kWarpSize * plan.warps_per_row * plan.rows_per_block, shared_bytes},
           channels_last_kernel<T, kChannels, kWidth, kRows, kExact, kAddend>, p, grid);
  });
}

template <typename T, int kChannels, int kWidth>
void launch_channels_tile(const Tensor& input, const Problem& p, const ChannelsPlan& plan) {
  if (!p.addend_is_per_channel) return launch_channels_kernel<T, kChannels, kWidth, false, true>(input, p, plan);
  if constexpr (kChannels * sizeof(T) == 4) {
    if (plan.exact) return launch_channels_kernel<T, kChannels, kWidth, true, false>(input, p, plan);
  }
  launch_channels_kernel<T, kChannels, kWidth, false, false>(input, p, plan);
}

template <typename T>
void launch_plan(const Tensor& input, const Problem& p, const ChannelsPlan& plan) {
  constexpr int kPacked = 4 / sizeof(T);
  if (plan.channels == kPacked) {
    if (plan.width == 8) return launch_channels_tile<T, kPacked, 8>(input, p, plan);
    return launch_channels_tile<T, kPacked, 16>(input, p, plan);
  }
  if constexpr (kPacked > 1) {
    if (plan.width == 8) return launch_channels_tile<T, 1, 8>(input, p, plan);
    launch_channels_tile<T, 1, 16>(input, p, plan);
  }
}

template <typename T, int kVec, int kVecs>
void launch_block_tile(const Tensor& input, const Problem& p, const BlockPlan& plan) {
  const int out_h = p.norm_ndim >= 2 ? p.h.output : 1, out_d = p.norm_ndim >= 3 ? p.d.output : 1;
  const int64_t blocks = p.num_n * p.num_channels * (p.d.output / out_d) * (p.h.output / out_h);
  const BlockGrid grid{static_cast<int>(p.group_size()), out_d * out_h * p.w.output, FastDiv(p.h.output), FastDiv(p.d.output),
                       FastDiv(p.num_channels), FastDiv(out_h), FastDiv(p.w.output), FastDiv(p.h.input), FastDiv(p.w.input)};
  constexpr int kRows = kVec * kVecs == 8 ? 2 : 1;
  const auto kernel = p.addend_is_per_channel ? block_kernel<T, kVec, kVecs, kRows, false> : block_kernel<T, kVec, kVecs, 1, true>;
  launch(input, {blocks, plan.threads, sizeof(float) * p.group_size()}, kernel, p, grid);
}

template <typename T>
void launch_plan(const Tensor& input, const Problem& p, const BlockPlan& plan) {
  constexpr int kWide = kVecLen<T>;
  if (plan.vec_len == 1 && plan.values == 8) return launch_block_tile<T, 1, 8>(input, p, plan);
  if (plan.vec_len == 1) return launch_block_tile<T, 1, 16>(input, p, plan);
  if (plan.values == 8) return launch_block_tile<T, kWide, 8 / kWide>(input, p, plan);
  launch_block_tile<T, kWide, 16 / kWide>(input, p, plan);
}

// Dense strides of [N, C, D, H, W] in the input's layout.
Affine dense_strides(const Problem& p) {
  const int64_t c = p.num_channels, w = p.w.input, h = p.h.input, volume = p.volume_size;
  if (p.channels_last) return {c * volume, 1, c * h * w, c * w, c};
  return {c * volume, volume, h * w, w, 1};
}

// Groups are numbered in the order of the dimensions that they do not span; a channel's, in channels_last, next to its neighbour's.
Affine group_index(const Problem& p) {
  int64_t sizes[] = {p.d.input, p.h.input, p.num_channels};
  if (p.norm_ndim >= 2) sizes[1] = 1;
  if (p.norm_ndim >= 3) sizes[0] = 1;
  const auto [d, h, c] = sizes;
  const auto if_outside = [&](int spanned_from, int64_t stride) { return p.norm_ndim >= spanned_from ? 0 : stride; };
  if (p.channels_last && p.norm_ndim <= 3) return {d * h * c, 1, if_outside(3, h * c), if_outside(2, c), 0};
  return {if_outside(5, if_outside(4, c * d * h) + (p.norm_ndim == 4 ? 1 : 0)), if_outside(4, d * h), if_outside(3, h), if_outside(2, 1), 0};
}

Affine param_index(const Problem& p) {
  const int64_t w = p.w.input, h = p.h.input, volume = p.volume_size;
  const auto if_inside = [&](int norm_ndim, int64_t stride) { return p.norm_ndim >= norm_ndim ? stride : 0; };
  return {if_inside(5, p.num_channels * volume), if_inside(4, volume), if_inside(3, h * w), if_inside(2, w), 1};
}

template <typename T>
void launch_plan(const Tensor& input, const Problem& p, const StatisticsPlan& plan) {
  const int64_t channel_size = p.output_spatial();
  check(channel_size <= INT32_MAX, "a channel has ", channel_size, " outputs, but less than 2^31 are supported: split the input");
  Statistics s;
  s.unit_size = plan.unit_size;
  s.chunk_size = plan.chunk_size;
  s.units_per_channel = p.volume_size / plan.unit_size;
  s.chunks_per_unit = ceil_div(plan.unit_size, plan.chunk_size);
  const int64_t num_chunks = p.num_n * p.num_channels * s.units_per_channel * s.chunks_per_unit;
  s.num_groups = p.num_n * p.num_channels * p.volume_size / p.group_size();
  s.chunks_per_group = num_chunks / s.num_groups;
  s.merge_stride = p.channels_last && p.norm_ndim <= 3 ? p.num_channels : 1;
  s.input = dense_strides(p);
  s.group = group_index(p);
  s.param = param_index(p);
  s.by_out_h = FastDiv(p.h.output);
  s.by_out_w = FastDiv(p.w.output);
  const auto workspace = [&](size_t bytes) {
    return torch::stable::empty(std::vector<int64_t>{static_cast<int64_t>(bytes)}, ScalarType::Byte, std::nullopt, input.device());
  };
  const Tensor groups = workspace(s.num_groups * sizeof(float2));
  const Tensor chunks = workspace(s.chunks_per_group > 1 ? num_chunks * sizeof(RunningMoments) : 0);
  s.groups = static_cast<float2*>(groups.data_ptr());
  if (s.chunks_per_group > 1) s.chunks = static_cast<RunningMoments*>(chunks.data_ptr());

  constexpr int kThreads = kStatisticsThreads, kWarps = kThreads / kWarpSize;
  if (p.channels_last) launch(input, {ceil_div(num_chunks, kThreads), kThreads}, statistics_kernel<T, 1>, p, s);
  else launch(input, {ceil_div(num_chunks, kWarps), kThreads}, statistics_kernel<T, kWarpSize>, p, s);
  if (s.chunks) launch(input, {ceil_div(s.num_groups, kWarps), kThreads}, merge_chunks_kernel, p, s);
  const int64_t channels = p.num_n * p.num_channels;
  if (!p.channels_last) return launch(input, {channels * ceil_div(channel_size, kThreads), kThreads}, pool_contiguous_kernel<T>, p, s);
  const int64_t tiles = p.num_n * ceil_div(channel_size, kPoolTile) * ceil_div(p.num_channels, kPoolTile);
  launch(input, {tiles, kThreads}, pool_channels_last_kernel<T>, p, s);
}

// ---- op ----------------------------------------------------------------------------------------------------------

int checked_int(int64_t value, const char* what) {
  constexpr int64_t kMost = int64_t{1} << 30;
  require(value < kMost, what, " is ", value, ", but less than 2^30 is supported: split the input.");
  return static_cast<int>(value);
}

Axis axis(const NormPoolGeometry& geometry, int i, Ints kernel, Ints stride, Ints padding) {
  return {checked_int(geometry.size[2 + i], "a dimension of the input"), static_cast<int>(geometry.out[i]),
          checked_int(kernel[i], "a kernel size"), checked_int(stride[i], "a stride"), checked_int(padding[i], "a padding")};
}

// A 0-dim CPU tensor is a legal operand of a CUDA tensor in eager. Its value is at hand: no copy, no synchronisation.
bool is_cpu_scalar(const Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

double cpu_scalar(const Tensor& tensor, const Tensor& input) {
  const ScalarType dtype = tensor.scalar_type();
  require(dtype == ScalarType::Float || dtype == input.scalar_type(), "addend is ", name_of(dtype), ", but float32 and the input's ",
          name_of(input.scalar_type()), " are supported: cast it first.");
  if (dtype == ScalarType::Float) return *static_cast<const float*>(tensor.data_ptr());
  uint16_t bits;
  std::memcpy(&bits, tensor.data_ptr(), sizeof(bits));
  if (dtype == ScalarType::BFloat16) return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}));
  return __half2float(__half(__half_raw{bits}));
}

std::optional<Tensor> dense_parameter(const std::optional<Tensor>& parameter) {
  return parameter ? std::optional(torch::stable::contiguous(*parameter)) : std::nullopt;
}

Tensor norm_pool_gelu(const Tensor& input, const std::optional<Tensor>& bias, const std::optional<Tensor>& addend,
                      const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias, double addend_scale,
                      double addend_value, int64_t norm_ndim, double eps, const std::vector<int64_t>& kernel_size,
                      const std::vector<int64_t>& stride, const std::vector<int64_t>& padding, bool ceil_mode, bool count_include_pad,
                      std::optional<int64_t> divisor_override, const std::string& approximate, std::optional<ScalarType> out_dtype) {
  const NormPoolGeometry geometry = check_norm_pool(input, norm_ndim, kernel_size, stride, padding, ceil_mode, divisor_override);
  const Dims5& size = geometry.size;
  const Ints normalised = sizes_of(input).last(norm_ndim);
  check_parameter(bias, input, "bias", Ints(&size[1], 1));
  check_parameter(norm_weight, input, "norm_weight", normalised);
  check_parameter(norm_bias, input, "norm_bias", normalised);
  const bool addend_on_cpu = addend && is_cpu_scalar(*addend);
  if (addend && !addend_on_cpu) check_joins(*addend, input, "addend");
  const Dims5 addend_strides = addend ? broadcast_strides(*addend, input) : Dims5{};
  const ScalarType dtype = output_dtype(input, out_dtype);
  const bool is_tanh = gelu_is_tanh(approximate);
  Tensor output = torch::stable::new_empty(input, geometry.output_size, dtype);
  if (output.numel() == 0) return output;

  const MemoryOrder order = memory_order(size, as_5d(strides_of(input), 3, 0));
  const Tensor dense = order == MemoryOrder::kOther ? torch::stable::contiguous(input) : input;
  const std::optional<Tensor> dense_bias = dense_parameter(bias), dense_norm_weight = dense_parameter(norm_weight),
                              dense_norm_bias = dense_parameter(norm_bias);

  Problem p;
  p.input = dense.data_ptr();
  p.output = output.data_ptr();
  p.num_n = size[0];
  p.num_channels = checked_int(size[1], "the number of channels");
  p.d = axis(geometry, 0, kernel_size, stride, padding);
  p.h = axis(geometry, 1, kernel_size, stride, padding);
  p.w = axis(geometry, 2, kernel_size, stride, padding);
  p.bias = make_param(dense_bias, input, "bias");
  p.norm_weight = make_param(dense_norm_weight, input, "norm_weight");
  p.norm_bias = make_param(dense_norm_bias, input, "norm_bias");
  p.addend_scale = static_cast<float>(addend_scale);
  p.addend_value = static_cast<float>(addend_on_cpu ? addend_value + addend_scale * cpu_scalar(*addend, input) : addend_value);
  if (!addend_on_cpu) p.addend = make_param(addend, input, "addend");
  p.addend_strides = {addend_strides[0], addend_strides[1], addend_strides[2], addend_strides[3], addend_strides[4]};
  p.addend_is_per_channel = addend_strides[2] == 0 && addend_strides[3] == 0 && addend_strides[4] == 0;
  p.has_constant = p.bias || (p.addend && p.addend_is_per_channel);
  p.eps = static_cast<float>(eps);
  p.norm_ndim = static_cast<int>(norm_ndim);
  p.channels_last = order == MemoryOrder::kChannelInnermost;
  p.volume_size = size[2] * size[3] * size[4];
  p.inverse_group_size = static_cast<float>(1. / p.group_size());
  p.whole_windows = p.d.every_window_is_whole() && p.h.every_window_is_whole() && p.w.every_window_is_whole();
  p.count_include_pad = count_include_pad;
  p.divisor_override = static_cast<float>(divisor_override.value_or(0));
  p.inverse_divisor = 1.f / (divisor_override ? p.divisor_override : static_cast<float>(p.window_rows()) * p.w.kernel);
  p.next_row = p.channels_last ? size[4] * size[1] : size[4];
  p.next_plane = (size[3] - p.h.kernel + 1) * p.next_row;
  p.gelu_is_tanh = is_tanh;
  p.output_is_float = dtype == ScalarType::Float;

  const Plan plan = make_plan(p, static_cast<int>(input.element_size()));
  try {
    dispatch_dtype(input.scalar_type(), [&]<typename T>() {
      std::visit([&](const auto& chosen) { launch_plan<T>(dense, p, chosen); }, plan);
    });
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + " (norm_pool_gelu, " + describe(plan) + ")");
  }
  return output;
}

}  // namespace
}  // namespace fxfuse::norm_pool_gelu

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CUDA, m) { m.impl("norm_pool_gelu", TORCH_BOX(&fxfuse::norm_pool_gelu::norm_pool_gelu)); }
