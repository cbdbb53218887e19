// conv_norm_pool_gelu: from an op's arguments to the problem that its kernels are told.
#pragma once

#include <string_view>
#include <vector>

#include "common/args.h"
#include "common/gelu.cuh"
#include "common/params.cuh"
#include "conv_norm_pool_gelu_pack.cuh"

namespace fxfuse::conv_norm_pool_gelu {

inline Operand operand_of(ScalarType dtype, std::string_view precision) {
  require(precision == "tf32" || precision == "ieee", "precision is '", precision, "', but 'tf32' or 'ieee' is needed.");
  if (dtype == ScalarType::BFloat16) return Operand::Bf16;
  if (dtype == ScalarType::Half) return Operand::Fp16;
  return precision == "tf32" ? Operand::Tf32 : Operand::Fp32;
}

struct Convolution {
  bool transposed;
  Ints kernel, stride, padding, output_padding, pool;
};

inline Axis axis(const Tensor& input, int64_t in, const Convolution& conv, int i) {
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
inline int64_t addend_channel_stride(const Tensor& addend, int64_t out_channels, int64_t input_dim) {
  const Ints size = sizes_of(addend);
  const auto dim = static_cast<int64_t>(size.size());
  const int64_t channels = dim >= 4 ? size[dim - 4] : 1;
  require(dim <= input_dim && addend.numel() == channels && (channels == 1 || channels == out_channels), "addend has shape ", text_of(size),
          ", but one value or one for each of ", out_channels, " channels, of no more dimensions than the input, is needed.");
  return channels == 1 ? 0 : strides_of(addend)[dim - 4];
}

inline bool reads_records(const Problem& p, int element_size) {
  const int channels = kRecordBytes / element_size;
  bool aligned = p.input_stride[1] == 1 && p.in_channels % channels == 0 && reinterpret_cast<uintptr_t>(p.input) % kVecBytes == 0;
  for (const int dim : {0, 2, 3, 4}) aligned &= p.input_stride[dim] * element_size % kVecBytes == 0;
  return aligned;
}

inline Weight make_weight(const Tensor& weight, const Problem& p) {
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

// What a call comes to. The tensors are what the problem's parameters point into.
struct Arguments {
  Problem problem{};
  Operand operand;
  ScalarType dtype;  // of the output
  std::vector<int64_t> output_size;
  std::optional<Tensor> bias, norm_weight, norm_bias;
};

// The output's address is left open.
inline Arguments check_arguments(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                 const std::optional<Tensor>& addend, const std::optional<Tensor>& norm_weight,
                                 const std::optional<Tensor>& norm_bias, bool transposed, Ints stride, Ints padding, Ints output_padding,
                                 double addend_scale, double addend_value, double eps, Ints pool_size, std::string_view approximate,
                                 std::string_view precision, std::optional<ScalarType> out_dtype) {
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

  Arguments made;
  Problem& p = made.problem;
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
  made.dtype = output_dtype(input, out_dtype);
  p.gelu_is_tanh = gelu_is_tanh(approximate);
  made.operand = operand_of(input.scalar_type(), precision);

  made.output_size = {out_channels, p.d.pooled, p.h.pooled, p.w.pooled};
  if (own.size() == 5) made.output_size.insert(made.output_size.begin(), size[0]);
  made.bias = dense_parameter(bias), made.norm_weight = dense_parameter(norm_weight), made.norm_bias = dense_parameter(norm_bias);
  p.input = input.data_ptr();
  std::copy(input_stride.begin(), input_stride.end(), p.input_stride);
  p.num_n = size[0];
  p.in_channels = checked_int(in_channels, "the number of input channels");
  p.out_channels = checked_int(out_channels, "the number of output channels");
  p.transposed = transposed;
  p.reads_records = reads_records(p, static_cast<int>(input.element_size()));
  p.bias = make_param(made.bias, input, "bias");
  p.norm_weight = make_param(made.norm_weight, input, "norm_weight");
  p.norm_bias = make_param(made.norm_bias, input, "norm_bias");
  p.addend_scale = static_cast<float>(addend_scale);
  p.addend_value = static_cast<float>(addend_on_cpu ? addend_value + addend_scale * cpu_scalar(*addend, input) : addend_value);
  if (addend && !addend_on_cpu) {
    p.addend = make_param(addend, input, "addend");
    p.addend_stride = addend_channel_stride(*addend, out_channels, input.dim());
  }
  p.eps = static_cast<float>(eps);
  p.inverse_width = static_cast<float>(1. / p.w.output);
  p.output_is_float = made.dtype == ScalarType::Float;
  return made;
}

}  // namespace fxfuse::conv_norm_pool_gelu
