// conv_gelu_pool: from tensors to what the kernels are told.
#pragma once

#include <algorithm>
#include <string_view>
#include <vector>

#include "conv_gelu_pool.h"
#include "conv_gelu_pool_problem.cuh"

namespace fxfuse::conv_gelu_pool {

inline Tensor empty(const Tensor& input, const std::vector<int64_t>& size, const std::vector<int64_t>& stride, ScalarType dtype) {
  AtenTensorHandle handle = nullptr;
  const auto dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(size.size()), size.data(), stride.data(), dtype_code,
                                                  aoti_torch_device_type_cuda(), input.get_device_index(), &handle));
  return Tensor(handle);
}

inline ConvShape shape_of(const ConvPoolGeometry& g) {
  ConvShape shape{.batch = g.batch, .channels_in = static_cast<int>(g.channels_in), .channels_out = static_cast<int>(g.channels_out)};
  for (int i = 0; i < 3; ++i) {
    const int64_t largest = std::max({g.in[i] + 2 * g.padding[i], g.kernel[i] * g.dilation[i], g.stride[i]});
    require(largest < (1 << 30), "one dimension of the convolution reaches ", largest, ", but the fused convolution ",
            "takes less than 2^30: use fxfuse::gelu_pool behind the convolution.");
    shape.in[i] = static_cast<int>(g.in[i]), shape.out[i] = static_cast<int>(g.out[i]);
    shape.kernel[i] = static_cast<int>(g.kernel[i]), shape.stride[i] = static_cast<int>(g.stride[i]);
    shape.padding[i] = static_cast<int>(g.padding[i]), shape.dilation[i] = static_cast<int>(g.dilation[i]);
  }
  return shape;
}

// Offsets within one image are 32 bits; those of the image itself are 64.
inline void check_image(const Tensor& input, const View& view, const ConvShape& shape) {
  int64_t last = (shape.channels_in - 1) * view.channel;
  for (int i = 0; i < 3; ++i) last += (shape.in[i] - 1) * view.pixel[i];
  require(last < INT32_MAX, "input has shape ", text_of(sizes_of(input)), " and strides ", text_of(strides_of(input)),
          ", but one image of the fused convolution spans 2^31 elements at most: use fxfuse::gelu_pool behind the convolution.");
}

inline View view_of(const Tensor& tensor, int64_t dims, bool has_outer) {
  const int64_t rank = tensor.dim(), vec_len = kChunkBytes / tensor.element_size();
  View view{.data = tensor.data_ptr(), .outer = has_outer ? tensor.stride(0) : 0, .channel = tensor.stride(rank - dims - 1), .pixel = {}};
  bool is_wide = (view.channel == 1 || tensor.size(rank - dims - 1) == 1) && tensor.size(rank - dims - 1) % vec_len == 0 &&
                 view.outer % vec_len == 0 && reinterpret_cast<uintptr_t>(view.data) % kChunkBytes == 0;
  for (int64_t i = 0; i < dims; ++i) {
    view.pixel[3 - dims + i] = tensor.stride(rank - dims + i);
    is_wide &= tensor.stride(rank - dims + i) % vec_len == 0;
  }
  view.is_wide = is_wide;
  return view;
}

// Whether memory lets a load bring two neighbours along the width: they lie side by side, and all pairs are aligned.
inline bool has_pairs(const View& input, const ConvShape& shape, int64_t element_size) {
  const auto is_even = [](int64_t stride, int64_t size) { return size == 1 || stride % 2 == 0; };
  return input.pixel[2] == 1 && shape.in[2] % 2 == 0 && is_even(input.outer, shape.batch) && is_even(input.channel, shape.channels_in) &&
         is_even(input.pixel[0], shape.in[0]) && is_even(input.pixel[1], shape.in[1]) &&
         reinterpret_cast<uintptr_t>(input.data) % (2 * element_size) == 0 && input.channel * element_size <= UINT32_MAX;
}

inline Product product_of(ScalarType dtype, std::string_view precision) {
  if (dtype == ScalarType::BFloat16) return Product::Bf16;
  if (dtype == ScalarType::Half) return Product::Fp16;
  return precision == "tf32" ? Product::Tf32 : Product::Fp32;
}

}  // namespace fxfuse::conv_gelu_pool
