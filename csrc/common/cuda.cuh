// What every CUDA op shares: sentences as errors, fp32 conversion, wide loads, reductions, and the one way to launch.
#pragma once

#include "common/text.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <stdexcept>

namespace fxfuse {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---- errors: one sentence, no file names -------------------------------------------------------------------------

template <typename... Args>
void check(bool ok, const Args&... sentence) {
  if (!ok) throw std::runtime_error(text_from(sentence...));
}

// ---- dtypes ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < __int_as_float(0x7f800000); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  else return x;
}

// Calls f.operator()<T>() with the device type of an input dtype.
template <typename F>
auto dispatch_dtype(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::Float: return f.template operator()<float>();
    case ScalarType::BFloat16: return f.template operator()<__nv_bfloat16>();
    case ScalarType::Half: return f.template operator()<__half>();
    default:
      throw std::runtime_error(std::string("input is ") + torch::headeronly::toString(dtype) +
                               "; float32, bfloat16 and float16 are supported: cast it first");
  }
}

// ---- wide loads --------------------------------------------------------------------------------------------------

constexpr int kVecBytes = 16;
template <typename T>
constexpr int kVecLen = kVecBytes / static_cast<int>(sizeof(T));

template <int kBytes> struct RawOf;
template <> struct RawOf<2> { using type = unsigned short; };
template <> struct RawOf<4> { using type = unsigned int; };
template <> struct RawOf<8> { using type = uint2; };
template <> struct RawOf<16> { using type = uint4; };

// kLen elements that travel as one access of 2 to 16 bytes; the address must be a multiple of that size, which
// rows_are_aligned proves on the host. kLen = 1 is the scalar path of a kernel written once for both.
template <typename T, int kLen = kVecLen<T>>
struct alignas(sizeof(T) * kLen) Vec {
  using Raw = typename RawOf<sizeof(T) * kLen>::type;
  T value[kLen];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && kLen > 1) {
      // A bf16 is the upper half of a float: one shift or one mask, where the compiler spends two instructions on the odd ones.
      const uint32_t pair = reinterpret_cast<const uint32_t*>(value)[i / 2];
      return __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
    }
    return to_float(value[i]);
  }

  __device__ __forceinline__ void zero() {
#pragma unroll
    for (int i = 0; i < kLen; ++i) value[i] = from_float<T>(0.f);
  }
  __device__ __forceinline__ void load(const T* from) {
    *reinterpret_cast<Raw*>(value) = *reinterpret_cast<const Raw*>(from);
  }
  // For bytes that are read once: evict-first, so that they do not push out what is read again.
  __device__ __forceinline__ void load_streaming(const T* from) {
    *reinterpret_cast<Raw*>(value) = __ldcs(reinterpret_cast<const Raw*>(from));
  }
  __device__ __forceinline__ void store(T* to) const {
    *reinterpret_cast<Raw*>(to) = *reinterpret_cast<const Raw*>(value);
  }
};

// True when every row of row_len elements that starts at data + i * row_len may be read in Vec<T, vec_len>.
inline bool rows_are_aligned(const void* data, int64_t row_len, int vec_len, int element_size) {
  return row_len % vec_len == 0 && reinterpret_cast<uintptr_t>(data) % (vec_len * element_size) == 0;
}

// ---- parameters whose dtype is known at run time only ------------------------------------------------------------

// float32 or the input's dtype T; absent when data is null. The branch is uniform over the grid, so it costs an instruction or two
// and not a second set of kernels.
struct Param {
  const void* data = nullptr;
  bool is_float = true;
  bool is_aligned = false;  // to kVecBytes

  __host__ __device__ explicit operator bool() const { return data != nullptr; }

  template <typename T>
  __device__ __forceinline__ float at(int64_t i) const {
    return is_float ? static_cast<const float*>(data)[i] : to_float(static_cast<const T*>(data)[i]);
  }

  // kLen consecutive values from i, which is a multiple of kLen.
  template <typename T, int kLen>
  __device__ __forceinline__ void load(int64_t i, float (&values)[kLen]) const {
    if (is_float) load_as<float>(i, values);
    else load_as<T>(i, values);
  }

 private:
  template <typename T, int kLen>
  __device__ __forceinline__ void load_as(int64_t i, float (&values)[kLen]) const {
    constexpr int kStep = kLen < kVecLen<T> ? kLen : kVecLen<T>;
    const T* from = static_cast<const T*>(data) + i;
    if (is_aligned) {
#pragma unroll
      for (int j = 0; j < kLen; j += kStep) {
        Vec<T, kStep> vec;
        vec.load(from + j);
#pragma unroll
        for (int k = 0; k < kStep; ++k) values[j + k] = vec[k];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kLen; ++j) values[j] = to_float(from[j]);
    }
  }
};

inline Param make_param(const std::optional<Tensor>& tensor, const Tensor& input, const char* name) {
  if (!tensor.has_value()) return {};
  const ScalarType dtype = tensor->scalar_type();
  check(dtype == ScalarType::Float || dtype == input.scalar_type(), name, " is ", torch::headeronly::toString(dtype),
        "; float32 or the input's dtype ", torch::headeronly::toString(input.scalar_type()),
        " is supported: cast it first");
  check(tensor->is_cuda() && tensor->get_device_index() == input.get_device_index(), name,
        " is not on the input's device: move it there first");
  return {tensor->data_ptr(), dtype == ScalarType::Float,
          reinterpret_cast<uintptr_t>(tensor->data_ptr()) % kVecBytes == 0};
}

// ---- reductions: every participating lane gets the sum -----------------------------------------------------------

constexpr int kWarpSize = 32;

// Over aligned groups of `lanes` lanes (a power of two); the whole warp calls it.
template <typename T>
__device__ __forceinline__ T warp_sum(T x, int lanes = kWarpSize) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

// scratch: kWarpSize values of shared memory, free again when the call returns. The whole block calls it.
template <typename T>
__device__ __forceinline__ T block_sum(T x, T* scratch) {
  const int num_warps = blockDim.x / kWarpSize, warp_idx = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  x = warp_sum(x);
  if (lane == 0) scratch[warp_idx] = x;
  __syncthreads();
  x = warp_sum(lane < num_warps ? scratch[lane] : T{0});
  __syncthreads();
  return x;
}

// ---- integer division by a run-time constant: one multiply-high instead of ~40 instructions ------------------------

// Exact for dividends below 2^31.
struct FastDiv {
  uint32_t divisor = 1, magic = 1, shift = 0;

  FastDiv() = default;
  explicit FastDiv(int64_t d) : divisor(static_cast<uint32_t>(d)) {
    while ((int64_t{1} << shift) < d) ++shift;
    magic = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor)) / divisor + 1);
  }
  // dividend -> quotient, and the remainder through the reference.
  __device__ __forceinline__ uint32_t divide(uint32_t dividend, uint32_t& remainder) const {
    const uint32_t quotient = (__umulhi(dividend, magic) + dividend) >> shift;
    remainder = dividend - quotient * divisor;
    return quotient;
  }
};

// ---- launch ------------------------------------------------------------------------------------------------------

struct LaunchConfig {
  int64_t blocks;
  int threads;
  size_t shared_bytes = 0;
  // From sm_90 on: the kernel may start while the one before it on the stream ends, and calls wait_for_previous_kernel before it reads
  // or overwrites anything that one touched. Saves the microseconds between two kernels.
  bool overlaps_previous = false;
};

__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets a kernel that overlaps this one start as soon as all blocks have come here; it still waits for this one's end.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

inline int device_attribute(cudaDeviceAttr attribute, int device_index) {
  int value = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&value, attribute, device_index));
  return value;
}

// On the device and the current stream of `on`; an empty grid launches nothing.
template <typename... Params, typename... Args>
void launch(const Tensor& on, const LaunchConfig& config, void (*kernel)(Params...), Args&&... args) {
  if (config.blocks == 0) return;
  check(config.blocks <= INT32_MAX, "the launch needs ", config.blocks, " blocks and a CUDA grid holds 2^31 - 1: ",
        "split the batch");
  const auto device_index = on.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device_index);
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device_index, &stream));
  constexpr size_t kDefaultSharedBytes = 48 * 1024;
  if (config.shared_bytes > kDefaultSharedBytes) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(config.shared_bytes)));
  }
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t launched{};
  launched.gridDim = static_cast<unsigned>(config.blocks), launched.blockDim = config.threads;
  launched.dynamicSmemBytes = config.shared_bytes, launched.stream = static_cast<cudaStream_t>(stream);
  launched.attrs = &overlap;
  launched.numAttrs = config.overlaps_previous && device_attribute(cudaDevAttrComputeCapabilityMajor, device_index) >= 9 ? 1 : 0;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&launched, kernel, std::forward<Args>(args)...));
}

}  // namespace fxfuse
