// fxfuse::gelu_pool: out[n, c, o] = mean over the window of o of gelu(input[n, c, p] + bias[c]), the tail of conv -> gelu -> pool.
//
// Why one kernel: apart, the bias, GELU and pool each read the convolution's output again, and two of them write it. Here it is read
// once: 2.11 GB in fp32 at [128, 64, 254, 254], of which 32 KB are left to write. Bytes bound the time as long as GELU stays inside
// the issue slots that the loads leave over (gelu_pool_global.cuh).
//
//   gelu_pool_plan.cuh     which path, which tiles: pure functions
//   gelu_pool_map.cuh      the kernels' arguments; where an output and its window lie
//   gelu_pool_global.cuh   whole planes, contiguous and channels_last
//   gelu_pool_windows.cuh  any other adaptive size; the sum of chunks
//   this file              launch, op, registration

#include <string>
#include <string_view>
#include <vector>

#include "common/cuda.cuh"
#include "common/gelu.cuh"
#include "gelu_pool_global.cuh"
#include "gelu_pool_map.cuh"
#include "gelu_pool_plan.cuh"
#include "gelu_pool_windows.cuh"

namespace fxfuse::gelu_pool {
namespace {

// ---- launch ------------------------------------------------------------------------------------------------------

// sum_form: for planes that are summed whole. value_form: for rows and windows that may be as small as one value.
template <typename T, Gelu sum_form, Gelu value_form>
void launch_rows(const Tensor& input, const PoolShape& shape, const PoolPlan& plan, const PoolData& pool) {
  const auto kernel = plan.lanes == kThreads ? pool_rows<T, sum_form, true> : pool_rows<T, value_form, false>;
  launch(input, {plan.blocks, kThreads}, kernel, pool, shape, plan);
}

template <typename T, Gelu form>
void launch_channels(const Tensor& input, const PoolShape& shape, const PoolPlan& plan, const PoolData& pool) {
  const auto kernel = plan.vec_len == 1 ? pool_channels<T, form, 1> : pool_channels<T, form, kVecLen<T>>;
  launch(input, {plan.blocks, kThreads}, kernel, pool, shape, plan);
}

template <typename T, Gelu form, typename Index, int kLen>
void launch_windows(const Tensor& input, const PoolShape& shape, const PoolPlan& plan, const PoolData& pool) {
  const OutputMap<Index> map(shape, kLen);
  if (plan.path == Path::Outputs) launch(input, {plan.blocks, kThreads}, pool_outputs<T, form, Index, kLen>, pool, map);
  else launch(input, {plan.blocks, kThreads}, pool_windows<T, form, Index, kLen>, pool, map, plan);
}

template <typename T, Gelu sum_form, Gelu value_form>
void launch_path(const Tensor& input, const PoolShape& shape, const PoolPlan& plan, const PoolData& pool) {
  if (plan.path == Path::Rows) return launch_rows<T, sum_form, value_form>(input, shape, plan, pool);
  if (plan.path == Path::Channels) return launch_channels<T, sum_form>(input, shape, plan, pool);
  const bool is_narrow = OutputMap<uint32_t>::fits_narrow(shape), is_wide_load = plan.vec_len > 1;
  if (is_narrow && is_wide_load) launch_windows<T, value_form, uint32_t, kVecLen<T>>(input, shape, plan, pool);
  else if (is_narrow) launch_windows<T, value_form, uint32_t, 1>(input, shape, plan, pool);
  else if (is_wide_load) launch_windows<T, value_form, int64_t, kVecLen<T>>(input, shape, plan, pool);
  else launch_windows<T, value_form, int64_t, 1>(input, shape, plan, pool);
}

template <typename T>
void launch_plan(const Tensor& input, const PoolShape& shape, const PoolPlan& plan, bool is_tanh, const PoolData& pool) {
  constexpr bool is_float = std::is_same_v<T, float>;
  if (is_tanh) launch_path<T, Gelu::Tanh, Gelu::Tanh>(input, shape, plan, pool);
  else if constexpr (is_float) launch_path<T, Gelu::Accurate, Gelu::Accurate>(input, shape, plan, pool);
  else launch_path<T, Gelu::Coarse, Gelu::Fast>(input, shape, plan, pool);
  if (plan.chunks == 1) return;
  const int lanes = pow2_at_least(plan.chunks, kThreads);
  launch(input, {ceil_div(shape.outputs(), kThreads / lanes), kThreads}, add_chunks<T>, pool, OutputMap<int64_t>(shape),
         plan.chunks, lanes);
}

// ---- op ----------------------------------------------------------------------------------------------------------

// True when dims in `order`, innermost first, lie densely in memory. A dim of size 1 may have any stride.
bool is_dense(const Tensor& tensor, const std::vector<int>& order) {
  int64_t expected = 1;
  for (const int dim : order) {
    if (tensor.size(dim) == 1) continue;
    if (tensor.stride(dim) != expected) return false;
    expected *= tensor.size(dim);
  }
  return true;
}

// c10's is_channels_last_strides_2d and _3d: what Tensor::suggest_memory_format, and so eager's output, goes by.
bool suggests_channels_last(const Tensor& tensor) {
  const int rank = static_cast<int>(tensor.dim());
  if (rank < 4 || tensor.stride(1) == 0) return false;
  std::vector<int> order{1};
  for (int dim = rank - 1; dim >= 2; --dim) order.push_back(dim);
  order.push_back(0);
  int64_t least = 0;
  for (const int dim : order) {
    if (tensor.size(dim) == 0 || tensor.stride(dim) < least) return false;
    if (dim == 0 && least == tensor.stride(1)) return false;
    least = tensor.stride(dim) * std::max<int64_t>(tensor.size(dim), 1);
  }
  return true;
}

struct Layout {
  bool is_batched;
  int num_spatial;

  int channel_dim() const { return is_batched ? 1 : 0; }
  std::vector<int> channels_innermost() const {
    std::vector<int> order{channel_dim()};
    for (int i = num_spatial; i > 0; --i) order.push_back(channel_dim() + i);
    if (is_batched) order.push_back(0);
    return order;
  }
};

Layout layout_of(const Tensor& input, const std::vector<int64_t>& output_size) {
  const int num_spatial = static_cast<int>(output_size.size());
  check(num_spatial >= 1 && num_spatial <= 3, "output_size has ", num_spatial, " entries; 1, 2 or 3 are supported");
  check(input.dim() == num_spatial + 2 || input.dim() == num_spatial + 1, "input has ", input.dim(),
        " dims and output_size ", num_spatial, " entries; input needs a channel dim, and may have a batch dim, beside them");
  return {input.dim() == num_spatial + 2, num_spatial};
}

PoolShape shape_of(const Tensor& input, const Layout& layout, const std::vector<int64_t>& output_size) {
  PoolShape shape{.batch = layout.is_batched ? input.size(0) : 1, .channels = input.size(layout.channel_dim()),
                  .in = {1, 1, 1}, .out = {1, 1, 1}};
  for (int i = 0; i < layout.num_spatial; ++i) {
    const int axis = 3 - layout.num_spatial + i;
    shape.in[axis] = input.size(layout.channel_dim() + 1 + i);
    shape.out[axis] = output_size[i] == -1 ? shape.in[axis] : output_size[i];
    check(shape.out[axis] >= 0, "output_size[", i, "] is ", output_size[i], "; a size of 0 or more, or -1 for the input's, ",
          "is supported");
  }
  check(shape.is_global() || shape.in_pixels() > 0, "input has a spatial dim of size 0, and a pool over nothing has no values ",
        "unless it is global: give it at least one pixel");
  return shape;
}

Tensor empty(const Tensor& input, const std::vector<int64_t>& size, const std::vector<int64_t>& stride, ScalarType dtype) {
  AtenTensorHandle handle = nullptr;
  const auto dtype_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  // The shim's own function: the dispatcher's aten::empty costs several microseconds more a call.
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(size.size()), size.data(), stride.data(), dtype_code,
                                                  aoti_torch_device_type_cuda(), input.get_device_index(), &handle));
  return Tensor(handle);
}

Tensor make_output(const Tensor& input, const Layout& layout, const PoolShape& shape, bool keepdim, ScalarType dtype) {
  const auto strides = dense_strides(shape.channels, shape.out, shape.out_channels_last);
  std::vector<int64_t> size, stride;
  if (layout.is_batched) size.push_back(shape.batch), stride.push_back(strides[0]);
  size.push_back(shape.channels), stride.push_back(strides[1]);
  for (int axis = 3 - layout.num_spatial; keepdim && axis < 3; ++axis) {
    size.push_back(shape.out[axis]), stride.push_back(strides[2 + axis]);
  }
  return empty(input, size, stride, dtype);
}

Tensor gelu_pool(const Tensor& input, const std::optional<Tensor>& bias, const std::vector<int64_t>& output_size, bool keepdim,
                 const std::string& approximate, std::optional<ScalarType> out_dtype) {
  dispatch_dtype(input.scalar_type(), []<typename T>() {});  // before anything else: refuses a dtype that has no kernels
  const Layout layout = layout_of(input, output_size);
  PoolShape shape = shape_of(input, layout, output_size);
  const bool is_tanh = gelu_is_tanh(approximate);
  const ScalarType dtype = out_dtype.value_or(input.scalar_type());
  check(dtype == ScalarType::Float || dtype == input.scalar_type(), "out_dtype is ", torch::headeronly::toString(dtype),
        "; float32 or the input's dtype ", torch::headeronly::toString(input.scalar_type()), " is supported");
  check(keepdim || shape.is_global(), "keepdim is False with output_size ", shape.out[0], "x", shape.out[1], "x", shape.out[2],
        "; dims can only be dropped where every output size is 1");
  check(!bias || (bias->dim() == 1 && bias->size(0) == shape.channels), "bias must have one dim of ", shape.channels,
        " values, one a channel");

  // Eager's adaptive_avg_pool3d keeps channels_last_3d only when it is global.
  shape.out_channels_last = layout.is_batched && layout.num_spatial >= 2 && suggests_channels_last(input) &&
                            (layout.num_spatial == 2 || shape.is_global());
  Tensor out = make_output(input, layout, shape, keepdim, dtype);
  if (out.numel() == 0) return out;

  const bool is_contiguous = input.is_contiguous();
  shape.channels_last = !is_contiguous && is_dense(input, layout.channels_innermost());
  const Tensor dense = is_contiguous || shape.channels_last ? input : torch::stable::contiguous(input);
  const std::optional<Tensor> dense_bias = !bias || bias->is_contiguous() ? bias : torch::stable::contiguous(*bias);
  const int num_sms = device_attribute(cudaDevAttrMultiProcessorCount, input.get_device_index());
  const PoolPlan plan = make_plan(shape, static_cast<int>(input.element_size()),
                                  reinterpret_cast<uintptr_t>(dense.data_ptr()), num_sms);
  std::optional<Tensor> partials;
  if (plan.chunks > 1) partials = empty(input, {plan.chunks, shape.outputs()}, {shape.outputs(), 1}, ScalarType::Float);
  const PoolData pool{.input = dense.data_ptr(), .bias = make_param(dense_bias, dense, "bias"), .out = out.data_ptr(),
                      .out_is_float = dtype == ScalarType::Float,
                      .partials = partials ? static_cast<float*>(partials->data_ptr()) : nullptr};
  try {
    dispatch_dtype(input.scalar_type(), [&]<typename T>() { launch_plan<T>(dense, shape, plan, is_tanh, pool); });
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string(error.what()) + " (gelu_pool, " + plan.describe() + ")");
  }
  return out;
}

}  // namespace
}  // namespace fxfuse::gelu_pool

STABLE_TORCH_LIBRARY_IMPL(fxfuse, CUDA, m) { m.impl("gelu_pool", TORCH_BOX(&fxfuse::gelu_pool::gelu_pool)); }
