// Calls of torch's own ops by name.
#pragma once

#include "common/text.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <stdexcept>

// Of torch 2.13 on, and null before: an older torch prints what an op said, and gives only that it failed.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace fxfuse {

template <size_t kArgs>
torch::stable::Tensor call(const char* op, std::array<StableIValue, kArgs> stack) {
  if (torch_call_dispatcher(op, "", stack.data(), TORCH_ABI_VERSION) != TORCH_SUCCESS) {
    const char* const reason = torch_exception_get_what_without_backtrace ? torch_exception_get_what_without_backtrace() : "torch printed the reason";
    throw std::runtime_error(text_from("fxfuse: ", op, " failed: ", reason));
  }
  return torch::stable::detail::to<torch::stable::Tensor>(stack[0]);
}

}  // namespace fxfuse
