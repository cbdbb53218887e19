// conv_gelu_pool: what the op knows of its two code paths. Each lives in a .cu of its own, so that they compile side by side.
#pragma once

#include <memory>
#include <string>

#include "conv_gelu_pool_problem.cuh"
#include "conv_gelu_pool_shares.cuh"

namespace fxfuse::conv_gelu_pool {

// A convolution made ready for one path on one device.
struct Plan {
  int64_t packed;  // uint4 of packed weights
  int steps;       // of an image, at most
  std::string description;

  // Of no more than INT32_MAX steps.
  virtual Shares share(int images) const = 0;
  // Packs the weights; then sums GELU over the pixels of the shares' images, from first_image on, into data.partials.
  virtual void pack(const Tensor& on, const View& weight, const Param& bias, uint4* packed) const = 0;
  virtual void run(const Tensor& on, const ConvData& data, int64_t first_image, const Shares& shares, bool is_tanh) const = 0;
  virtual ~Plan() = default;
};

std::shared_ptr<const Plan> plan_portable(const ConvShape& shape, Product product, int device_index);

// Null where the Hopper path does not take the shape. has_pairs: neighbours along W lie side by side, in aligned pairs.
std::shared_ptr<const Plan> plan_hopper(const ConvShape& shape, bool has_pairs, Product product, int device_index);

// Calls f.operator()<product>() with one that the forward multiplies.
template <typename F>
void dispatch_product(Product product, F&& f) {
  switch (product) {
    case Product::Tf32: return f.template operator()<Product::Tf32>();
    case Product::Fp32: return f.template operator()<Product::Fp32>();
    case Product::Bf16: return f.template operator()<Product::Bf16>();
    case Product::Fp16: return f.template operator()<Product::Fp16>();
    case Product::Bf16Pair:
    case Product::Bf16Triple: break;
  }
}

}  // namespace fxfuse::conv_gelu_pool
