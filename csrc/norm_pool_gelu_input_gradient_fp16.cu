// norm_pool_gelu_input_gradient: the kernels with fp16 input.
#define FXFUSE_TYPE __half
#include "norm_pool_gelu_input_gradient_launch.cuh"
