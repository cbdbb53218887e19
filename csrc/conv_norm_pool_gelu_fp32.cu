// conv_norm_pool_gelu: the kernels with Fp32 operands.
#define FXFUSE_OPERAND Operand::Fp32
#include "conv_norm_pool_gelu_launch.cuh"
