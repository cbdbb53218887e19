// conv_gelu_pool: what the op knows of its two code paths. Each lives in a .cu of its own, so that they compile side by side.
#pragma once

#include <memory>
#include <string>

#include "conv_gelu_pool_problem.cuh"

namespace fxfuse::conv_gelu_pool {

// A convolution made ready for one path on one device.
struct Plan {
  int64_t packed;     // uint4 of packed weights
  int64_t blocks;     // an image and part
  int boxes;          // pieces of an image that parts can be made of
  int blocks_per_sm;  // that run at a time
  std::string description;

  // Packs the weights; then sums GELU over the pixels of images first_image .. + images into data.partials.
  virtual void pack(const Tensor& on, const View& weight, const Param& bias, uint4* packed) const = 0;
  virtual void run(const Tensor& on, const ConvData& data, int64_t first_image, int64_t images, int parts, bool is_tanh) const = 0;
  virtual ~Plan() = default;
};

std::shared_ptr<const Plan> plan_portable(const ConvShape& shape, Product product, int device_index);

// Null where the Hopper path does not take the shape.
std::shared_ptr<const Plan> plan_hopper(const ConvShape& shape, Product product, int device_index);

// Calls f.operator()<product>().
template <typename F>
void dispatch_product(Product product, F&& f) {
  switch (product) {
    case Product::Tf32: return f.template operator()<Product::Tf32>();
    case Product::Tf32x3: return f.template operator()<Product::Tf32x3>();
    case Product::Bf16: return f.template operator()<Product::Bf16>();
    case Product::Fp16: return f.template operator()<Product::Fp16>();
  }
}

inline int chunk_len(Product product) { return product == Product::Tf32 || product == Product::Tf32x3 ? 4 : 8; }
inline int num_splits(Product product) { return product == Product::Tf32x3 ? 2 : 1; }

}  // namespace fxfuse::conv_gelu_pool
