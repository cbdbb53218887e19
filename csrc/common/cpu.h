// What the CPU ops share: the run-time choice of the instruction set that a kernel was compiled for (see common/simd.h), tensors as
// kernels read them, and threads.
#pragma once

#include "common/args.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#if defined(__x86_64__)
#define FXFUSE_DECLARE_PER_ISA(declarations) \
  namespace fxfuse::baseline { declarations } \
  namespace fxfuse::avx2 { declarations }     \
  namespace fxfuse::avx512 { declarations }
#define FXFUSE_KERNEL(name) \
  (isa() == Isa::kAvx512 ? &avx512::name : isa() == Isa::kAvx2 ? &avx2::name : &baseline::name)
#else
#define FXFUSE_DECLARE_PER_ISA(declarations) namespace fxfuse::baseline { declarations }
#define FXFUSE_KERNEL(name) (isa(), &baseline::name)
#endif

namespace fxfuse {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
inline Isa widest_isa() {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kBaseline;
#else
  return Isa::kBaseline;
#endif
}

// FXFUSE_CPU_ISA asks for a narrower one, so that a test reaches each.
inline Isa choose_isa(const char* asked) {
  constexpr std::string_view kNames[] = {"baseline", "avx2", "avx512"};
  const Isa widest = widest_isa();
  if (asked == nullptr || *asked == '\0') return widest;
  for (const Isa isa : {Isa::kBaseline, Isa::kAvx2, Isa::kAvx512}) {
    if (kNames[static_cast<int>(isa)] != asked) continue;
    require(isa <= widest, "FXFUSE_CPU_ISA is '", asked, "', but this machine has no more than ", kNames[static_cast<int>(widest)],
            ": unset it.");
    return isa;
  }
  require(false, "FXFUSE_CPU_ISA is '", asked, "', but baseline, avx2 and avx512 are known: set one of them or unset it.");
  return widest;
}

inline Isa isa() {
  static const Isa chosen = choose_isa(std::getenv("FXFUSE_CPU_ISA"));
  return chosen;
}

inline DType dtype_of(ScalarType dtype) {
  return dtype == ScalarType::Float ? DType::kFloat32 : dtype == ScalarType::BFloat16 ? DType::kBFloat16 : DType::kFloat16;
}

// A parameter as kernels read it: dense float32.
inline std::optional<Tensor> dense_float32(const std::optional<Tensor>& parameter) {
  if (!parameter) return std::nullopt;
  const Tensor dense = parameter->is_contiguous() ? *parameter : torch::stable::contiguous(*parameter);
  return dense.scalar_type() == ScalarType::Float ? dense : torch::stable::to(dense, ScalarType::Float);
}

inline const float* data_of(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const float*>(tensor->const_data_ptr()) : nullptr;
}

// f(scratch, begin, end) over ranges of `tasks`, in which `values` inputs are read in all; scratch: that many floats a thread.
template <typename F>
void parallel_tasks(int64_t tasks, int64_t values, int64_t scratch, const F& f) {
  constexpr int64_t kValuesPerThread = 32768;  // less is not worth waking a thread
  const int64_t grain = std::max<int64_t>(1, kValuesPerThread * tasks / std::max<int64_t>(1, values));
  torch::stable::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
    // Vectors that straddle cache lines cost twice.
    constexpr std::align_val_t kLine{64};
    const auto free = [](float* p) { operator delete[](p, kLine); };
    const std::unique_ptr<float[], decltype(free)> buffer(new (kLine) float[scratch], free);
    f(buffer.get(), begin, end);
  });
}

}  // namespace fxfuse
