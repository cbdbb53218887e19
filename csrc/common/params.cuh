// Parameters of an op on their way into a kernel: on the host, for CUDA ops alone (the CPU ops widen theirs to fp32, see cpu.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>

#include "common/args.h"

namespace fxfuse {

inline int checked_int(int64_t value, const char* what) {
  constexpr int64_t kMost = int64_t{1} << 30;
  require(value < kMost, what, " is ", value, ", but less than 2^30 is supported: split the input.");
  return static_cast<int>(value);
}

// A 0-dim CPU tensor is a legal operand of a CUDA tensor in eager. Its value is at hand: no copy, no synchronisation.
inline bool is_cpu_scalar(const Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

inline double cpu_scalar(const Tensor& tensor, const Tensor& input) {
  const ScalarType dtype = tensor.scalar_type();
  require(dtype == ScalarType::Float || dtype == input.scalar_type(), "addend is ", name_of(dtype), ", but float32 and the input's ",
          name_of(input.scalar_type()), " are supported: cast it first.");
  if (dtype == ScalarType::Float) return *static_cast<const float*>(tensor.data_ptr());
  uint16_t bits;
  std::memcpy(&bits, tensor.data_ptr(), sizeof(bits));
  if (dtype == ScalarType::BFloat16) return __bfloat162float(__nv_bfloat16(__nv_bfloat16_raw{bits}));
  return __half2float(__half(__half_raw{bits}));
}

inline std::optional<Tensor> dense_parameter(const std::optional<Tensor>& parameter) {
  return parameter ? std::optional(torch::stable::contiguous(*parameter)) : std::nullopt;
}

}  // namespace fxfuse
