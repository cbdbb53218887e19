// conv_norm_pool_gelu: the kernels with Fp16 operands.
#define FXFUSE_OPERAND Operand::Fp16
#include "conv_norm_pool_gelu_launch.cuh"
