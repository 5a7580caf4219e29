// What the HIP sources need of HIP, for clang without any ROCm file: -x hip --cuda-device-only -nogpuinc -nogpulib.
#pragma once
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(threads, threads)))

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u32 word1;
typedef u32 word2 __attribute__((ext_vector_type(2)));
typedef u32 word4 __attribute__((ext_vector_type(4)));

#define UNROLLED _Pragma("unroll")
#define ROLLED _Pragma("nounroll")
// Dependent launch is NVIDIA's; no space offers it here.
#define LAUNCH_DEPENDENTS(on)
#define WAIT_FOR_INPUTS(on)
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#define COLDTUNE_JOIN_(a, b) a##b
#define COLDTUNE_JOIN(a, b) COLDTUNE_JOIN_(a, b)
#define COLDTUNE_WAVES_0
#define COLDTUNE_WAVES_1 __attribute__((amdgpu_waves_per_eu(1, 1)))
#define COLDTUNE_WAVES_2 __attribute__((amdgpu_waves_per_eu(2, 2)))
#define COLDTUNE_WAVES_4 __attribute__((amdgpu_waves_per_eu(4, 4)))
#define WAVES_HINT(waves) COLDTUNE_JOIN(COLDTUNE_WAVES_, waves)

struct ColdtuneIndex {
  u32 x, y, z;
};
#define threadIdx \
  (ColdtuneIndex{__builtin_amdgcn_workitem_id_x(), __builtin_amdgcn_workitem_id_y(), __builtin_amdgcn_workitem_id_z()})
#define blockIdx                                                                        \
  (ColdtuneIndex{__builtin_amdgcn_workgroup_id_x(), __builtin_amdgcn_workgroup_id_y(), \
                 __builtin_amdgcn_workgroup_id_z()})

__device__ __forceinline__ float as_float(u32 bits) { return __builtin_bit_cast(float, bits); }
__device__ __forceinline__ u32 as_bits(float value) { return __builtin_bit_cast(u32, value); }

__device__ __forceinline__ u64 fold(word4 bits) { return ((u64)(bits.x ^ bits.y) << 32) | (bits.z ^ bits.w); }

// A load of data that nobody reads again.
template <typename T>
__device__ __forceinline__ T load_once(const T* at) {
  return __builtin_nontemporal_load(at);
}

__device__ __forceinline__ void __syncthreads() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

__device__ __forceinline__ void __threadfence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }

__device__ __forceinline__ u32 atomicAdd(u32* at, u32 value) {
  return __hip_atomic_fetch_add(at, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// All lanes take part, and width is the whole wave.
__device__ __forceinline__ float __shfl_xor(float value, int mask, int width) {
  (void)width;
#if __AMDGCN_WAVEFRONT_SIZE == 64
  const int lane = (int)__builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
#else
  const int lane = (int)__builtin_amdgcn_mbcnt_lo(~0u, 0u);
#endif
  const int from = (lane ^ mask) << 2;
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(from, __builtin_bit_cast(int, value)));
}
