// conv_norm_pool_gelu: the kernels with Tf32x3 operands.
#define FXFUSE_OPERAND Operand::Tf32x3
#include "conv_norm_pool_gelu_launch.cuh"
