// norm_pool_gelu_input_gradient: the kernels with bf16 input.
#define FXFUSE_TYPE __nv_bfloat16
#include "norm_pool_gelu_input_gradient_launch.cuh"
