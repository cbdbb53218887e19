// conv_norm_pool_gelu: the kernels with Bf16 operands.
#define FXFUSE_OPERAND Operand::Bf16
#include "conv_norm_pool_gelu_launch.cuh"
