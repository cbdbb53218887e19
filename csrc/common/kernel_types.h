// Plain values and arithmetic that host code and CPU kernels share: *.simd.cpp files see no torch header, and no function here has
// external linkage (see common/simd.h for why).
#pragma once

#include <cstdint>

namespace fxfuse {

enum class DType : int { kFloat32, kBFloat16, kFloat16 };

constexpr int64_t kMaxLanes = 16;  // fp32 lanes of the widest registers

// Window o of an adaptive pool from `in` to `out` is [adaptive_begin(o), adaptive_end(o)); neighbours may overlap.
static inline int64_t adaptive_begin(int64_t o, int64_t in, int64_t out) { return o * in / out; }
static inline int64_t adaptive_end(int64_t o, int64_t in, int64_t out) { return ((o + 1) * in + out - 1) / out; }

}  // namespace fxfuse
