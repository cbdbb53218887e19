// fxfuse::conv_gelu_pool, on every device: what it takes, and the sizes and strides it returns.
#pragma once

#include "common/args.h"

namespace fxfuse {

// Every convolution as a 3-d one: 1-d and 2-d have leading dims of size 1, kernel 1, stride 1, padding 0.
struct ConvPoolGeometry {
  int64_t dims;  // of the convolution: 1, 2 or 3
  bool is_batched;
  int64_t batch, channels_in, channels_out;
  std::array<int64_t, 3> in, out, kernel, stride, padding, dilation;
  std::vector<int64_t> output_size, output_stride;
};

// `values` of a dims-d convolution as three, `fill` for the dimensions it lacks; one value stands for all.
inline std::array<int64_t, 3> as_3d(Ints values, int64_t dims, int64_t fill, std::string_view name) {
  require(values.size() == 1 || static_cast<int64_t>(values.size()) == dims, name, " is ", text_of(values), ", but ", dims,
          " entries are needed, or one for all.");
  std::array<int64_t, 3> result{fill, fill, fill};
  for (int64_t i = 0; i < dims; ++i) result[3 - dims + i] = values[values.size() == 1 ? 0 : i];
  return result;
}

// The weights are packed into a workspace of at most 8 MB; a convolution with more of them is bound by its products, and a library's
// convolution with fxfuse::gelu_pool behind it is faster anyway. Python asks the same before it chooses this op.
inline bool conv_gelu_pool_takes(int64_t channels_in, int64_t channels_out, int64_t taps) {
  constexpr int64_t kMostWeights = 1 << 19;  // 6 MB at most: 8 bytes a weight in two parts, a third of padding
  const auto padded = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
  return padded(channels_in, 8) * padded(channels_out, 64) * taps <= kMostWeights;
}

inline ConvPoolGeometry check_conv_gelu_pool(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, Ints stride,
                                             Ints padding, Ints dilation, bool keepdim, std::string_view precision) {
  check_input_dtype(input);
  const Ints own = sizes_of(input), filter = sizes_of(weight);
  const int64_t dims = weight.dim() - 2, rank = input.dim();
  require(dims >= 1 && dims <= 3, "weight has shape ", text_of(filter), ", but [C_out, C_in] and one to three kernel sizes are needed.");
  require(rank == dims + 2 || rank == dims + 1, "input has shape ", text_of(own), " and weight ", text_of(filter),
          ", but input needs a channel dimension and may have a batch dimension before ", dims, " spatial ones.");
  require(weight.scalar_type() == input.scalar_type(), "weight is ", name_of(weight.scalar_type()), " and input ",
          name_of(input.scalar_type()), ", but both must have one dtype: cast one of them.");
  check_joins(weight, input, "weight");
  check_parameter(bias, input, "bias", filter.first(1));
  require(precision == "tf32" || precision == "ieee", "precision is '", precision, "', but 'tf32' or 'ieee' is needed.");

  ConvPoolGeometry g{.dims = dims, .is_batched = rank == dims + 2, .batch = rank == dims + 2 ? own[0] : 1,
                     .channels_in = own[rank - dims - 1], .channels_out = filter[0],
                     .in = as_3d(own.last(dims), dims, 1, "input's shape"), .out = {},
                     .kernel = as_3d(filter.last(dims), dims, 1, "weight's shape"), .stride = as_3d(stride, dims, 1, "stride"),
                     .padding = as_3d(padding, dims, 0, "padding"), .dilation = as_3d(dilation, dims, 1, "dilation"),
                     .output_size = {}, .output_stride = {}};
  require(filter[1] == g.channels_in && g.channels_in > 0, "input has ", g.channels_in, " channels and weight takes ", filter[1],
          ", but the two must be equal and positive: groups are not supported.");
  for (int i = 0; i < 3; ++i) {
    require(g.kernel[i] > 0 && g.stride[i] > 0 && g.padding[i] >= 0 && g.dilation[i] > 0, "weight has shape ", text_of(filter),
            ", stride is ", text_of(stride), ", padding ", text_of(padding), " and dilation ", text_of(dilation),
            ", but kernel sizes, strides and dilations are positive and padding is not negative.");
    const int64_t room = g.in[i] + 2 * g.padding[i] - g.dilation[i] * (g.kernel[i] - 1) - 1;
    require(room >= 0 && g.in[i] > 0, "input has shape ", text_of(own), ", but a kernel of ", text_of(filter.last(dims)), " with padding ",
            text_of(padding), " and dilation ", text_of(dilation), " needs more pixels.");
    g.out[i] = room / g.stride[i] + 1;
  }

  // As eager: the convolution's output is channels_last where input or weight is, and the global pool keeps that; but gelu makes strides
  // contiguous that are both, those of one channel or one pixel.
  const bool is_both = g.channels_out == 1 || g.out[0] * g.out[1] * g.out[2] == 1;
  const bool channels_last = keepdim && g.is_batched && dims >= 2 && !is_both &&
                             (is_channels_last_like(own, strides_of(input)) || is_channels_last_like(filter, strides_of(weight)));
  if (g.is_batched) g.output_size.push_back(g.batch), g.output_stride.push_back(std::max<int64_t>(g.channels_out, 1));
  g.output_size.push_back(g.channels_out), g.output_stride.push_back(1);
  for (int64_t i = 0; keepdim && i < dims; ++i) {
    g.output_size.push_back(1), g.output_stride.push_back(channels_last ? g.channels_out : 1);
  }
  return g;
}

}  // namespace fxfuse
