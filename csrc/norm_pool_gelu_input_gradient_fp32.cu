// norm_pool_gelu_input_gradient: the kernels with fp32 input.
#define FXFUSE_TYPE float
#include "norm_pool_gelu_input_gradient_launch.cuh"
