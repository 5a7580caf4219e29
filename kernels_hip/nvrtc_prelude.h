// HIP names that NVRTC spells otherwise.
#pragma once
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned int word1;
typedef uint2 word2;
typedef uint4 word4;

#define UNROLLED _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#define WAVES_HINT(waves)
#define __shfl_xor(value, mask, width) __shfl_xor_sync(0xffffffffu, (value), (mask), (width))

// Dependent launch: the next kernel may start now; from the wait on, all that the kernels in front wrote is visible.
#define LAUNCH_DEPENDENTS(on)                                                      \
  do {                                                                             \
    if (on) COLDTUNE_DEPENDENT("griddepcontrol.launch_dependents;");               \
  } while (0)
#define WAIT_FOR_INPUTS(on)                                                        \
  do {                                                                             \
    if (on) COLDTUNE_DEPENDENT("griddepcontrol.wait;");                            \
  } while (0)
#if __CUDA_ARCH__ >= 900
#define COLDTUNE_DEPENDENT(instruction) asm volatile(instruction ::: "memory")
#else
#define COLDTUNE_DEPENDENT(instruction)
#endif

__device__ __forceinline__ float as_float(u32 bits) { return __uint_as_float(bits); }
__device__ __forceinline__ u32 as_bits(float value) { return __float_as_uint(value); }

__device__ __forceinline__ u64 fold(const word4& bits) { return ((u64)(bits.x ^ bits.y) << 32) | (bits.z ^ bits.w); }
__device__ __forceinline__ void operator^=(word4& bits, const word4& more) {
  bits = word4{bits.x ^ more.x, bits.y ^ more.y, bits.z ^ more.z, bits.w ^ more.w};
}

// A load of data that nobody reads again: it takes no place in L1. Not volatile, so the compiler may move it up.
__device__ __forceinline__ u16 load_once(const u16* at) {
  u16 v;
  asm("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(at));
  return v;
}
__device__ __forceinline__ word1 load_once(const word1* at) {
  word1 v;
  asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}
__device__ __forceinline__ word2 load_once(const word2* at) {
  word2 v;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
  return v;
}
__device__ __forceinline__ word4 load_once(const word4* at) {
  word4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(at));
  return v;
}
