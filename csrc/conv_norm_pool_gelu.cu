// fxfuse::conv_norm_pool_gelu: gelu(avg_pool3d(layer_norm(conv(input, weight) + bias[c] + addend))); the convolution's output never
// reaches memory.
//
// Why one kernel: at [32, 32, 16, 32, 32] -> ConvTranspose3d(32 -> 64, k3, s2, p1, output_padding 1) -> pool 2 the convolution's output is
// 1.07 GB in fp32, which every other way writes and reads back. Here 67 MB come in and 134 MB go out, beside 58 GFLOP.
//
//   conv_norm_pool_gelu_problem.cuh   what is computed; taps of plain and transposed convolutions
//   conv_norm_pool_gelu_plan.cuh      which tiles: pure functions
//   conv_norm_pool_gelu_pack.cuh      weights in fragment order
//   conv_norm_pool_gelu_params.cuh    bias, addend, norm_weight and norm_bias
//   conv_norm_pool_gelu_operand.cuh   dtypes and precisions of matrix products
//   conv_norm_pool_gelu_portable.cuh  the kernel for sm_80 and newer; _stage, _weights, _epilogue: its parts
//   conv_norm_pool_gelu_hopper.cuh    the kernel for sm_90a and the headline's class; _plan, _load, _epilogue: its parts
//   conv_norm_pool_gelu_launch.cuh    launches, instantiated by conv_norm_pool_gelu_{tf32,fp32,bf16,fp16,hopper}.cu
//   this file                         checks, op, registration

#include <cstdlib>
#include <string>
#include <vector>

#include "common/args.h"
#include "common/params.cuh"
#include "conv_norm_pool_gelu_launch.cuh"

namespace fxfuse::conv_norm_pool_gelu {
namespace {

// ---- arguments ---------------------------------------------------------------------------------------------------

Operand operand_of(ScalarType dtype, std::string_view precision) {
  require(precision == "tf32" || precision == "ieee", "precision is '", precision, "', but 'tf32' or 'ieee' is needed.");
  if (dtype == ScalarType::BFloat16) return Operand::Bf16;
  if (dtype == ScalarType::Half) return Operand::Fp16;
  return precision == "tf32" ? Operand::Tf32 : Operand::Fp32;
}

struct Convolution {
  bool transposed;
  Ints kernel, stride, padding, output_padding, pool;
};

Axis axis(const Tensor& input, int64_t in, const Convolution& conv, int i) {
  const int64_t kernel = conv.kernel[i], stride = conv.stride[i], padding = conv.padding[i], output_padding = conv.output_padding[i];
  require(kernel >= 1 && kernel <= kMaxKernel, "the kernel is ", text_of(conv.kernel), ", but sizes from 1 to ", kMaxKernel,
          " are supported.");
  require(stride == 1 || stride == 2, "stride is ", text_of(conv.stride), ", but 1 and 2 are supported.");
  require(padding >= 0 && padding < (1 << 20), "padding is ", text_of(conv.padding), ", but it cannot be negative, nor 2^20 or more.");
  require(output_padding >= 0 && (output_padding == 0 || (conv.transposed && output_padding < stride)), "output_padding is ",
          text_of(conv.output_padding), ", but it must be smaller than stride ", text_of(conv.stride), ", and 0 without transposed.");
  require(conv.pool[i] >= 1 && conv.pool[i] <= kMaxPool, "pool_size is ", text_of(conv.pool), ", but sizes from 1 to ", kMaxPool,
          " are supported.");
  const int64_t room = conv.transposed ? (in - 1) * stride - 2 * padding + kernel + output_padding - 1 : in + 2 * padding - kernel;
  const int64_t out = room < 0 ? 0 : conv.transposed ? room + 1 : room / stride + 1;
  require(out >= conv.pool[i], "pool_size ", text_of(conv.pool), " does not fit into the convolution's output of an input of shape ",
          text_of(sizes_of(input)), ".");
  require(i < 2 || out <= kMaxWidth, "rows of the convolution's output are ", out, " wide, but at most ", kMaxWidth, " is supported.");
  return {checked_int(in, "a dimension of the input"), checked_int(out, "a dimension of the convolution's output"),
          static_cast<int>(kernel), static_cast<int>(stride), static_cast<int>(padding), static_cast<int>(conv.pool[i]),
          static_cast<int>(out / conv.pool[i])};
}

// One value (stride 0), or one for each channel: [C, 1, 1, 1], [1, C, 1, 1, 1].
int64_t addend_channel_stride(const Tensor& addend, int64_t out_channels, int64_t input_dim) {
  const Ints size = sizes_of(addend);
  const auto dim = static_cast<int64_t>(size.size());
  const int64_t channels = dim >= 4 ? size[dim - 4] : 1;
  require(dim <= input_dim && addend.numel() == channels && (channels == 1 || channels == out_channels), "addend has shape ", text_of(size),
          ", but one value or one for each of ", out_channels, " channels, of no more dimensions than the input, is needed.");
  return channels == 1 ? 0 : strides_of(addend)[dim - 4];
}

bool reads_records(const Problem& p, int element_size) {
  const int channels = kRecordBytes / element_size;
  bool aligned = p.input_stride[1] == 1 && p.in_channels % channels == 0 && reinterpret_cast<uintptr_t>(p.input) % kVecBytes == 0;
  for (const int dim : {0, 2, 3, 4}) aligned &= p.input_stride[dim] * element_size % kVecBytes == 0;
  return aligned;
}

Weight make_weight(const Tensor& weight, const Problem& p) {
  Weight w{};
  const Ints stride = strides_of(weight);
  w.data = weight.data_ptr();
  w.stride[0] = stride[p.transposed ? 1 : 0];
  w.stride[1] = stride[p.transposed ? 0 : 1];
  std::copy(stride.begin() + 2, stride.end(), w.stride + 2);
  w.taps_d = p.d.kernel;
  w.taps_h = p.h.kernel;
  w.taps_w = p.w.kernel;
  const WidthTaps taps(p);
  std::copy(std::begin(taps.kernel), std::end(taps.kernel), w.kernel_w);
  w.in_channels = p.in_channels;
  w.out_channels = p.out_channels;
  return w;
}

// ---- choice of the kernel ----------------------------------------------------------------------------------------

// FXFUSE_PORTABLE=1 takes the portable kernel on Hopper too, so that it is tested there.
bool portable_is_forced() {
  const char* value = std::getenv("FXFUSE_PORTABLE");
  return value != nullptr && std::string_view(value) == "1";
}

template <typename Plan, typename Run>
void run_plan(const Plan& plan, const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + " (conv_norm_pool_gelu, " + plan.describe() + ")");
  }
}

template <Operand operand>
void run(const Tensor& input, const Tensor& weight, const Problem& p) {
  const auto attribute = [&](cudaDeviceAttr a) { return device_attribute(a, input.get_device_index()); };
  Weight packing = make_weight(weight, p);
  const int num_processors = attribute(cudaDevAttrMultiProcessorCount);
  if (hopper_takes(p, attribute(cudaDevAttrComputeCapabilityMajor), num_processors) && !portable_is_forced()) {
    const HopperPlan plan = make_hopper_plan<operand>(p, num_processors);
    return run_plan(plan, [&] { run_hopper<operand>(input, p, plan, packing); });
  }
  const int max_shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const std::string sentence = refusal(p, max_shared_bytes);
  require(sentence.empty(), sentence);
  const PortablePlan plan = make_portable_plan(p, kRecordChannels<operand>, max_shared_bytes);
  require(plan.packed_bytes <= kMaxWorkspaceBytes, "weight has shape ", text_of(sizes_of(weight)), " and needs ", plan.packed_bytes,
          " bytes of workspace, but at most ", kMaxWorkspaceBytes, " are used.");
  packing.num_chunks = plan.num_chunks;
  packing.tiles_per_block = plan.tiles_per_block();
  packing.num_blocks = static_cast<int>(plan.channel_blocks);
  run_plan(plan, [&] { run_portable<operand>(input, p, plan, packing); });
}

// ---- op ----------------------------------------------------------------------------------------------------------

Tensor conv_norm_pool_gelu(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                           const std::optional<Tensor>& addend, const std::optional<Tensor>& norm_weight,
                           const std::optional<Tensor>& norm_bias, bool transposed, const std::vector<int64_t>& stride,
                           const std::vector<int64_t>& padding, const std::vector<int64_t>& output_padding, double addend_scale,
                           double addend_value, double eps, const std::vector<int64_t>& pool_size, const std::string& approximate,
                           const std::string& precision, std::optional<ScalarType> out_dtype) {
  check_input_dtype(input);
  const Ints own = sizes_of(input), weight_size = sizes_of(weight);
  require(own.size() == 4 || own.size() == 5, "input has shape ", text_of(own), ", but [N, C, D, H, W] or [C, D, H, W] is needed.");
  require(weight_size.size() == 5, "weight has shape ", text_of(weight_size), ", but five dimensions are needed.");
  require(weight.scalar_type() == input.scalar_type(), "weight is ", name_of(weight.scalar_type()), " and input ",
          name_of(input.scalar_type()), ", but one dtype for both is needed: cast one.");
  check_joins(weight, input, "weight");
  require(stride.size() == 3 && padding.size() == 3 && output_padding.size() == 3 && pool_size.size() == 3,
          "stride, padding, output_padding and pool_size are ", text_of(stride), ", ", text_of(padding), ", ", text_of(output_padding),
          " and ", text_of(pool_size), ", but each needs three entries.");
  const Dims5 size = as_5d(own, 3, 1), input_stride = as_5d(strides_of(input), 3, 0);
  const int64_t in_channels = weight_size[transposed ? 0 : 1], out_channels = weight_size[transposed ? 1 : 0];
  require(size[1] == in_channels && in_channels > 0 && out_channels > 0, "input has shape ", text_of(own), " and weight ",
          text_of(weight_size), ", but their input channels must be as many (groups are not supported), and none of the sizes 0.");
  for (int i = 2; i < 5; ++i) require(size[i] > 0, "input has shape ", text_of(own), ", but only the batch may be empty.");

  Problem p{};
  const Convolution conv{transposed, weight_size.last(3), stride, padding, output_padding, pool_size};
  p.d = axis(input, size[2], conv, 0);
  p.h = axis(input, size[3], conv, 1);
  p.w = axis(input, size[4], conv, 2);
  const int64_t row[1] = {p.w.output};
  check_parameter(bias, input, "bias", Ints(&out_channels, 1));
  check_parameter(norm_weight, input, "norm_weight", row);
  check_parameter(norm_bias, input, "norm_bias", row);
  const bool addend_on_cpu = addend && is_cpu_scalar(*addend);
  if (addend && !addend_on_cpu) check_joins(*addend, input, "addend");
  const ScalarType dtype = output_dtype(input, out_dtype);
  p.gelu_is_tanh = gelu_is_tanh(approximate);
  const Operand operand = operand_of(input.scalar_type(), precision);

  std::vector<int64_t> output_size{out_channels, p.d.pooled, p.h.pooled, p.w.pooled};
  if (own.size() == 5) output_size.insert(output_size.begin(), size[0]);
  Tensor output = torch::stable::new_empty(input, output_size, dtype);
  if (output.numel() == 0) return output;

  const std::optional<Tensor> dense_bias = dense_parameter(bias), dense_norm_weight = dense_parameter(norm_weight),
                              dense_norm_bias = dense_parameter(norm_bias);
  p.input = input.data_ptr();
  std::copy(input_stride.begin(), input_stride.end(), p.input_stride);
  p.output = output.data_ptr();
  p.num_n = size[0];
  p.in_channels = checked_int(in_channels, "the number of input channels");
  p.out_channels = checked_int(out_channels, "the number of output channels");
  p.transposed = transposed;
  p.reads_records = reads_records(p, static_cast<int>(input.element_size()));
  p.bias = make_param(dense_bias, input, "bias");
  p.norm_weight = make_param(dense_norm_weight, input, "norm_weight");
  p.norm_bias = make_param(dense_norm_bias, input, "norm_bias");
  p.addend_scale = static_cast<float>(addend_scale);
  p.addend_value = static_cast<float>(addend_on_cpu ? addend_value + addend_scale * cpu_scalar(*addend, input) : addend_value);
  if (addend && !addend_on_cpu) {
    p.addend = make_param(addend, input, "addend");
    p.addend_stride = addend_channel_stride(*addend, out_channels, input.dim());
  }
  p.eps = static_cast<float>(eps);
  p.inverse_width = static_cast<float>(1. / p.w.output);
  p.output_is_float = dtype == ScalarType::Float;

  switch (operand) {
    case Operand::Tf32: run<Operand::Tf32>(input, weight, p); break;
    case Operand::Fp32: run<Operand::Fp32>(input, weight, p); break;
    case Operand::Bf16: run<Operand::Bf16>(input, weight, p); break;
    case Operand::Fp16: run<Operand::Fp16>(input, weight, p); break;
  }
  return output;
}

}  // namespace
}  // namespace fxfuse::conv_norm_pool_gelu

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CUDA, m) { m.impl("conv_norm_pool_gelu", TORCH_BOX(&fxfuse::conv_norm_pool_gelu::conv_norm_pool_gelu)); }
