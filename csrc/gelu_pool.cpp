// gelu_pool on the CPU: adaptive_avg_pool(gelu(input + bias)).
//
// A global pool is split into chunks of a size that does not depend on the number of threads; their sums are added in the chunks' order.
// Any other pool is split into windows along D and H. Each chunk and each window is one thread's.
#include "gelu_pool.h"

#include "common/args.h"
#include "common/cpu.h"
#include "cpu_ops.h"

#include <algorithm>
#include <memory>

FXFUSE_DECLARE_PER_ISA(FXFUSE_GELU_POOL_KERNELS)

namespace fxfuse {
namespace {

constexpr int64_t kChunkValues = 65536;

// Trailing dimensions that are pooled whole are one long row.
void merge_whole_dimensions(GeluPool& p) {
  for (int dim = 1; dim >= 0; --dim) {
    if (p.out[dim] != 1 || p.out[2] != 1 || (dim == 0 && p.in[1] != 1)) return;
    p.in[2] *= p.in[dim];
    p.in[dim] = 1;
  }
}

void pool_globally(GeluPool& p) {
  const int64_t pixels = num_pixels(p), per_row = pixels_per_row(p);
  p.chunk = p.inner == 1 ? kChunkValues : (std::max<int64_t>(1, kChunkValues / p.inner) + per_row - 1) / per_row * per_row;
  p.num_chunks = std::max<int64_t>(1, (pixels + p.chunk - 1) / p.chunk);
  const int64_t tasks = p.outer * p.num_chunks, means = p.outer * p.inner;
  const std::unique_ptr<double[]> partial(new double[tasks * p.inner]);
  const auto sum = FXFUSE_KERNEL(gelu_sum_chunks);
  const auto mean = FXFUSE_KERNEL(gelu_mean_of_chunks);
  parallel_tasks(tasks, means * pixels, chunk_scratch(p),
                 [&](float* scratch, int64_t begin, int64_t end) { sum(p, partial.get(), scratch, begin, end); });
  parallel_tasks(means, means * p.num_chunks, 0, [&](float*, int64_t begin, int64_t end) { mean(p, partial.get(), begin, end); });
}

void pool_windows(const GeluPool& p) {
  const auto pool = FXFUSE_KERNEL(gelu_pool_windows);
  parallel_tasks(p.outer * p.out[0] * p.out[1], p.outer * p.inner * num_pixels(p), window_scratch(p),
                 [&](float* scratch, int64_t begin, int64_t end) { pool(p, scratch, begin, end); });
}

Tensor empty_output(const Tensor& input, const GeluPoolGeometry& geometry, ScalarType dtype) {
  using torch::headeronly::MemoryFormat;
  if (!geometry.channels_last) return torch::stable::new_empty(input, geometry.output_size, dtype);
  const auto format = geometry.output_size.size() == 4 ? MemoryFormat::ChannelsLast : MemoryFormat::ChannelsLast3d;
  return torch::stable::empty(geometry.output_size, dtype, std::nullopt, input.device(), std::nullopt, format);
}

}  // namespace

Tensor gelu_pool(const Tensor& input, const std::optional<Tensor>& bias, const std::vector<int64_t>& output_size, bool keepdim,
                 const std::string& approximate, std::optional<ScalarType> out_dtype) {
  const GeluPoolGeometry geometry = check_gelu_pool(input, output_size, keepdim);
  const auto spatial = static_cast<int64_t>(output_size.size());
  const Dims5& size = geometry.size;
  check_parameter(bias, input, "bias", Ints(&size[1], 1));
  const bool tanh_form = is_tanh_form(approximate);
  const ScalarType dtype = output_dtype(input, out_dtype);
  Tensor output = empty_output(input, geometry, dtype);
  if (output.numel() == 0) return output;

  const MemoryOrder order = memory_order(size, as_5d(strides_of(input), spatial, 0));
  const Tensor dense = order == MemoryOrder::kOther ? torch::stable::contiguous(input) : input;
  const bool by_channel = order == MemoryOrder::kChannelInnermost;
  const auto float_bias = dense_float32(bias);
  const Dims5 output_stride = as_5d(strides_of(output), keepdim ? spatial : 0, 0);
  GeluPool p{.input = dense.const_data_ptr(), .output = output.mutable_data_ptr(),
             .input_dtype = dtype_of(input.scalar_type()), .output_dtype = dtype_of(dtype), .bias = data_of(float_bias),
             .tanh_form = tanh_form, .channels = size[1], .outer = size[0] * (by_channel ? 1 : size[1]),
             .inner = by_channel ? size[1] : 1, .in = {size[2], size[3], size[4]},
             .out = {geometry.out[0], geometry.out[1], geometry.out[2]},
             .output_stride = {output_stride[0], output_stride[1], output_stride[2], output_stride[3], output_stride[4]},
             .chunk = 0, .num_chunks = 0};
  if (is_global(geometry)) {
    pool_globally(p);
  } else {
    merge_whole_dimensions(p);
    pool_windows(p);
  }
  return output;
}

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CPU, m) { m.impl("gelu_pool", TORCH_BOX(&gelu_pool)); }

}  // namespace fxfuse
