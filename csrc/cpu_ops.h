// The tail ops on a CPU, for the ops that end in one. Called as they are: the dispatcher would keep a refusal's sentence to itself.
#pragma once

#include "common/args.h"

namespace fxfuse {

Tensor gelu_pool(const Tensor& input, const std::optional<Tensor>& bias, const std::vector<int64_t>& output_size, bool keepdim,
                 const std::string& approximate, std::optional<ScalarType> out_dtype);

Tensor norm_pool_gelu(const Tensor& input, const std::optional<Tensor>& bias, const std::optional<Tensor>& addend,
                      const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& norm_bias, double addend_scale,
                      double addend_value, int64_t norm_ndim, double eps, const std::vector<int64_t>& kernel_size,
                      const std::vector<int64_t>& stride, const std::vector<int64_t>& padding, bool ceil_mode, bool count_include_pad,
                      std::optional<int64_t> divisor_override, const std::string& approximate, std::optional<ScalarType> out_dtype);

}  // namespace fxfuse
