// What only Hopper (sm_90a) has: wgmma, mbarriers, bulk copies, register reallocation. Code that uses them is compiled for sm_90a alone:
// guard kernel bodies with FXFUSE_HAS_WGMMA.
//
// wgmma reads its operands from shared memory through descriptors. Without swizzle an operand is made of core matrices, 8 rows x 16
// bytes, 128 contiguous bytes each. K of one instruction is 32 bytes: two core matrices, `k_pitch` bytes apart; 8-row groups are
// `row_pitch` bytes apart. Rows 16 bytes apart make a shift by one row +1 in the descriptor: a convolution's tap.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define FXFUSE_HAS_WGMMA 1
#endif

namespace fxfuse {

// ---- wgmma ---------------------------------------------------------------------------------------------------------

// Addresses and pitches travel in units of 16 bytes, 14 bits each: adding n to a descriptor moves its address by 16 n bytes.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t k_pitch, uint32_t row_pitch) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>((k_pitch & 0x3ffff) >> 4) << 16 |
         static_cast<uint64_t>((row_pitch & 0x3ffff) >> 4) << 32;
}

// Before the first wgmma of a group, and whenever registers of the accumulator were touched in between.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

// Makes shared memory that threads wrote visible to wgmma and bulk copies: after the writes, before the barrier.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// D[64 x n] (+)= A[64 x K] * B[K x n] of one warpgroup, both operands in shared memory, `accumulate` = 0 overwrites D.
// Warp w of the four holds rows 16 w + g and + 8: d[4 j], d[4 j + 1] are row g, columns 8 j + 2 q and + 1; d[4 j + 2], d[4 j + 3] row g + 8.
#if defined(FXFUSE_HAS_WGMMA)

__device__ __forceinline__ void wgmma(float (&d)[16], uint64_t a, uint64_t b, int accumulate, __nv_bfloat16) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
      "}, %16, %17, p, 1, 1, 0, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulate));
}

#define FXFUSE_WGMMA_N64(name, k, type, transposes)                                                                    \
  __device__ __forceinline__ void wgmma(float (&d)[32], uint64_t a, uint64_t b, int accumulate, name) {                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"                                                          \
        "wgmma.mma_async.sync.aligned.m64n64k" k ".f32." type "." type " {"                                            \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                               \
        "}, %32, %33, p, 1, 1" transposes ";\n}\n"                                                                     \
        :                                                                                                              \
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])       \
        : "l"(a), "l"(b), "r"(accumulate));                                                                            \
  }
FXFUSE_WGMMA_N64(Tf32, "8", "tf32", "")
FXFUSE_WGMMA_N64(__nv_bfloat16, "16", "bf16", ", 0, 0")
FXFUSE_WGMMA_N64(__half, "16", "f16", ", 0, 0")
#undef FXFUSE_WGMMA_N64

#define FXFUSE_WGMMA_N128(name, k, type, transposes)                                                                   \
  __device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, int accumulate, name) {                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                          \
        "wgmma.mma_async.sync.aligned.m64n128k" k ".f32." type "." type " {"                                           \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                             \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                             \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"                               \
        "}, %64, %65, p, 1, 1" transposes ";\n}\n"                                                                     \
        :                                                                                                              \
          "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),      \
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),      \
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),      \
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),      \
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])       \
        : "l"(a), "l"(b), "r"(accumulate));                                                                            \
  }
FXFUSE_WGMMA_N128(Tf32, "8", "tf32", "")
FXFUSE_WGMMA_N128(__nv_bfloat16, "16", "bf16", ", 0, 0")
FXFUSE_WGMMA_N128(__half, "16", "f16", ", 0, 0")
#undef FXFUSE_WGMMA_N128

// The same with A in registers, as accumulators become it: two of 8 columns each, as pairs, are a K step of 16. B lies with N innermost:
// 8 rows of K are a core matrix of 128 bytes, 8 columns of N each, and the descriptor's pitches are those of K groups and of N groups.
#define FXFUSE_WGMMA_REGISTERS(name, type)                                                                             \
  __device__ __forceinline__ void wgmma(float (&d)[4], const uint32_t* a, uint64_t b, int accumulate, name) {          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"                                                           \
        "wgmma.mma_async.sync.aligned.m64n8k16.f32." type "." type " {"                                                \
        "%0, %1, %2, %3"                                                                                               \
        "}, {%4, %5, %6, %7}, %8, p, 1, 1, 1;\n}\n"                                                                    \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                        \
  }                                                                                                                    \
  __device__ __forceinline__ void wgmma(float (&d)[12], const uint32_t* a, uint64_t b, int accumulate, name) {         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %17, 0;\n"                                                          \
        "wgmma.mma_async.sync.aligned.m64n24k16.f32." type "." type " {"                                               \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"                                                             \
        "}, {%12, %13, %14, %15}, %16, p, 1, 1, 1;\n}\n"                                                               \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),                                      \
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])                                     \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                        \
  }                                                                                                                    \
  __device__ __forceinline__ void wgmma(float (&d)[16], const uint32_t* a, uint64_t b, int accumulate, name) {         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"                                                          \
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type " {"                                               \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"                                         \
        "}, {%16, %17, %18, %19}, %20, p, 1, 1, 1;\n}\n"                                                               \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]),                                      \
          "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]),                                    \
          "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])                                                           \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                        \
  }                                                                                                                    \
  __device__ __forceinline__ void wgmma(float (&d)[32], const uint32_t* a, uint64_t b, int accumulate, name) {         \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                          \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {"                                               \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                       \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"                               \
        "}, {%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}\n"                                                               \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),              \
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),        \
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),      \
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])       \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                                        \
  }
FXFUSE_WGMMA_REGISTERS(__nv_bfloat16, "bf16")
FXFUSE_WGMMA_REGISTERS(__half, "f16")
#undef FXFUSE_WGMMA_REGISTERS
#endif

// ---- mbarriers and bulk copies -------------------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile("{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT_%=;\n}\n"
               ::"r"(barrier), "r"(parity) : "memory");
}

// bytes: a multiple of 16, as are both addresses; the barrier's transaction count falls by it on arrival.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// ---- registers moved between warpgroups ----------------------------------------------------------------------------

#if defined(FXFUSE_HAS_WGMMA)
template <int kRegisters>
__device__ __forceinline__ void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
#endif

}  // namespace fxfuse
