// Argument checks and geometry of the tail ops, on the host and for every device.
//
// Every op sees its input as [N, C, D, H, W]: a missing batch and missing spatial dimensions have size 1. A refusal is one
// sentence: what was given, what is accepted, what to do.
#pragma once

#include "common/kernel_types.h"
#include "common/text.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace fxfuse {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Ints = std::span<const int64_t>;
using Dims5 = std::array<int64_t, 5>;

template <typename... Parts>
void require(bool ok, const Parts&... sentence) {
  if (!ok) throw std::runtime_error(text_from("fxfuse: ", sentence...));
}

inline std::string text_of(Ints values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

inline Ints sizes_of(const Tensor& tensor) { return {tensor.sizes().data(), static_cast<size_t>(tensor.dim())}; }
inline Ints strides_of(const Tensor& tensor) { return {tensor.strides().data(), static_cast<size_t>(tensor.dim())}; }

// ---- dtypes and devices ------------------------------------------------------------------------------------------

inline std::string name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Half: return "float16";
    case ScalarType::Double: return "float64";
    default: return torch::headeronly::toString(dtype);
  }
}

inline void check_input_dtype(const Tensor& input) {
  const ScalarType dtype = input.scalar_type();
  require(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, "input is ", name_of(dtype),
          ", but float32, bfloat16 and float16 are supported: cast it first.");
}

inline ScalarType output_dtype(const Tensor& input, std::optional<ScalarType> out_dtype) {
  const ScalarType dtype = out_dtype.value_or(input.scalar_type());
  require(dtype == ScalarType::Float || dtype == input.scalar_type(), "out_dtype is ", name_of(dtype),
          ", but float32 and the input's ", name_of(input.scalar_type()), " are supported: cast the result instead.");
  return dtype;
}

// What holds for every tensor that joins the input: the same device, float32 or the input's dtype.
inline void check_joins(const Tensor& tensor, const Tensor& input, std::string_view name) {
  const ScalarType dtype = tensor.scalar_type();
  require(dtype == ScalarType::Float || dtype == input.scalar_type(), name, " is ", name_of(dtype),
          ", but float32 and the input's ", name_of(input.scalar_type()), " are supported: cast it first.");
  require(tensor.is_cpu() == input.is_cpu() && tensor.get_device_index() == input.get_device_index(), name,
          " and input are on different devices: move them to one.");
}

// A parameter that is read without strides: the shape is exact.
inline void check_parameter(const std::optional<Tensor>& parameter, const Tensor& input, std::string_view name, Ints shape) {
  if (!parameter) return;
  check_joins(*parameter, input, name);
  const Ints given = sizes_of(*parameter);
  require(std::equal(given.begin(), given.end(), shape.begin(), shape.end()), name, " has shape ", text_of(given), ", but ",
          text_of(shape), " is needed for an input of shape ", text_of(sizes_of(input)), ".");
}

inline bool is_tanh_form(std::string_view approximate) {
  require(approximate == "none" || approximate == "tanh", "approximate is '", approximate,
          "', but GELU takes 'none' (exact) or 'tanh'.");
  return approximate == "tanh";
}

// ---- memory order ------------------------------------------------------------------------------------------------

enum class MemoryOrder { kSpatialInnermost, kChannelInnermost, kOther };

// From the strides as they are; those of dimensions of size 1 mean nothing. A tensor that is dense in both orders (one channel,
// or one pixel) counts as spatial-innermost.
inline MemoryOrder memory_order(const Dims5& size, const Dims5& stride) {
  const auto dense = [&](std::array<int, 5> innermost_first) {
    int64_t expected = 1;
    for (const int dim : innermost_first) {
      if (size[dim] == 1) continue;
      if (stride[dim] != expected) return false;
      expected *= size[dim];
    }
    return true;
  };
  if (dense({4, 3, 2, 1, 0})) return MemoryOrder::kSpatialInnermost;
  if (dense({1, 4, 3, 2, 0})) return MemoryOrder::kChannelInnermost;
  return MemoryOrder::kOther;
}

// c10::is_channels_last_strides_2d / _3d for the batched tensor's own sizes and strides: what Tensor::suggest_memory_format asks, so
// what eager's pools ask. It does look at the strides of dimensions of size 1.
inline bool is_channels_last_like(Ints size, Ints stride) {
  const auto rank = static_cast<int64_t>(size.size());
  if ((rank != 4 && rank != 5) || stride[1] == 0) return false;
  int64_t least = 0;
  for (int64_t i = 0; i < rank; ++i) {
    const int64_t dim = i == 0 ? 1 : i == rank - 1 ? 0 : rank - i;  // C, then the spatial dimensions from the last, then N
    if (size[dim] == 0 || stride[dim] < least) return false;
    if (dim == 0 && least == stride[1]) return false;
    least = stride[dim] * (size[dim] > 1 ? size[dim] : 1);
  }
  return true;
}

// A tensor of a rank from `spatial + 1` (no batch) to `spatial + 2` as [N, C, D, H, W]; `fill` for the dimensions it lacks.
inline Dims5 as_5d(Ints values, int64_t spatial, int64_t fill) {
  Dims5 result;
  result.fill(fill);
  const auto rank = static_cast<int64_t>(values.size());
  for (int64_t i = 0; i < rank; ++i) {
    const int64_t from_end = rank - i;
    result[from_end <= spatial ? 5 - from_end : from_end == spatial + 1 ? 1 : 0] = values[i];
  }
  return result;
}

// The strides that read `addend` over all of the input; 0 along a dimension that it repeats.
inline Dims5 broadcast_strides(const Tensor& addend, const Tensor& input) {
  const Ints size = sizes_of(addend), stride = strides_of(addend), full = sizes_of(input);
  bool fits = size.size() <= full.size();
  Dims5 result{};
  for (size_t i = 1; fits && i <= size.size(); ++i) {
    const int64_t own = size[size.size() - i];
    fits = own == 1 || own == full[full.size() - i];
    if (own != 1) result[5 - i] = stride[size.size() - i];
  }
  require(fits, "addend has shape ", text_of(size), ", which does not broadcast to the input's ", text_of(full),
          " without enlarging it.");
  return result;
}

// ---- pool geometry -----------------------------------------------------------------------------------------------

// For kernel <= in. torch's rule: in ceil_mode the last window still has to start inside the input or its left padding.
inline int64_t pool_output_size(int64_t in, int64_t kernel, int64_t stride, int64_t padding, bool ceil_mode) {
  int64_t out = (in + 2 * padding - kernel + (ceil_mode ? stride - 1 : 0)) / stride + 1;
  if (ceil_mode && (out - 1) * stride >= in + padding) --out;
  return out;
}

struct NormPoolGeometry {
  Dims5 size;                        // input as [N, C, D, H, W]
  std::array<int64_t, 3> out;        // pooled [D, H, W]
  std::vector<int64_t> output_size;  // the output's own sizes: 4 or 5
};

inline NormPoolGeometry check_norm_pool(const Tensor& input, int64_t norm_ndim, Ints kernel_size, Ints stride, Ints padding,
                                        bool ceil_mode, std::optional<int64_t> divisor_override) {
  check_input_dtype(input);
  const Ints own = sizes_of(input);
  require(own.size() == 4 || own.size() == 5, "input has shape ", text_of(own), ", but [N, C, D, H, W] or [C, D, H, W] is needed.");
  require(norm_ndim >= 1 && norm_ndim <= static_cast<int64_t>(own.size()), "norm_ndim is ", norm_ndim, ", but 1 to ", own.size(),
          " dimensions of an input of shape ", text_of(own), " can be normalised.");
  require(kernel_size.size() == 3 && stride.size() == 3 && padding.size() == 3, "kernel_size, stride and padding are ",
          text_of(kernel_size), ", ", text_of(stride), " and ", text_of(padding), ", but each needs three entries.");
  require(!divisor_override || *divisor_override != 0, "divisor_override is 0, but a pool cannot divide by zero.");
  NormPoolGeometry geometry{.size = as_5d(own, 3, 1), .out = {}, .output_size = {own.begin(), own.end()}};
  for (int64_t i = 1; i < 5; ++i) {
    require(geometry.size[i] > 0, "input has shape ", text_of(own), ", but only the batch may be empty.");
  }
  for (int i = 0; i < 3; ++i) {
    const int64_t in = geometry.size[2 + i];
    require(kernel_size[i] > 0 && stride[i] > 0, "kernel_size is ", text_of(kernel_size), " and stride ", text_of(stride),
            ", but every entry must be positive.");
    require(padding[i] >= 0 && padding[i] <= kernel_size[i] / 2, "padding is ", text_of(padding),
            ", but every entry must be between 0 and half of kernel_size ", text_of(kernel_size), ".");
    require(kernel_size[i] <= in, "kernel_size ", text_of(kernel_size), " is larger than an input of shape ", text_of(own),
            ", but it has to fit without padding.");
    geometry.out[i] = pool_output_size(in, kernel_size[i], stride[i], padding[i], ceil_mode);
    geometry.output_size[own.size() - 3 + i] = geometry.out[i];
  }
  return geometry;
}

struct GeluPoolGeometry {
  Dims5 size;                        // input as [N, C, D, H, W]
  std::array<int64_t, 3> out;        // pooled [D, H, W]
  std::vector<int64_t> output_size;  // the output's own sizes
  bool channels_last;                // the output is channels_last (two spatial dimensions) or channels_last_3d
};

inline bool is_global(const GeluPoolGeometry& geometry) {
  return geometry.out[0] == 1 && geometry.out[1] == 1 && geometry.out[2] == 1;
}

inline GeluPoolGeometry check_gelu_pool(const Tensor& input, Ints output_size, bool keepdim) {
  check_input_dtype(input);
  const Ints own = sizes_of(input);
  const auto spatial = static_cast<int64_t>(output_size.size()), rank = static_cast<int64_t>(own.size());
  require(spatial >= 1 && spatial <= 3, "output_size is ", text_of(output_size), ", but one to three entries are needed.");
  require(rank == spatial + 1 || rank == spatial + 2, "input has shape ", text_of(own), " and output_size is ", text_of(output_size),
          ", but one entry for each dimension behind the channels is needed.");
  GeluPoolGeometry geometry{.size = as_5d(own, spatial, 1), .out = {1, 1, 1}, .output_size = {own.begin(), own.end() - spatial}, .channels_last = false};
  bool empty_input = false;
  for (int64_t i = 0; i < spatial; ++i) {
    const int64_t in = own[rank - spatial + i], out = output_size[i] == -1 ? in : output_size[i];
    require(out >= 0, "output_size is ", text_of(output_size), ", but sizes are 0 or more, or -1 for the input's.");
    geometry.out[3 - spatial + i] = out;
    if (keepdim) geometry.output_size.push_back(out);
    empty_input |= in == 0;
  }
  const bool global = is_global(geometry);
  require(keepdim || global, "output_size is ", text_of(output_size), ", but dimensions are dropped (keepdim=False) only at size 1.");
  require(!empty_input || global, "input has shape ", text_of(own), ", but only a global pool takes an empty plane.");
  // As eager: gelu makes strides contiguous that are both, and adaptive_avg_pool3d keeps channels_last_3d for its global case only.
  geometry.channels_last = keepdim && rank == spatial + 2 && (spatial == 2 || (spatial == 3 && global)) &&
                           is_channels_last_like(own, strides_of(input)) && !input.is_contiguous();
  return geometry;
}

}  // namespace fxfuse
