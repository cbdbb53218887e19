// conv_norm_pool_gelu: the kernels with Tf32 operands.
#define FXFUSE_OPERAND Operand::Tf32
#include "conv_norm_pool_gelu_launch.cuh"
