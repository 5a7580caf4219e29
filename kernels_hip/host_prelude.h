// HIP names on the host: every thread of a workgroup is a fiber, see host_executor.hpp.
#pragma once
#include "host_executor.hpp"

#define __device__
#define __global__
#define __shared__ static thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads)
#define WAVES_HINT(waves)
#define LAUNCH_DEPENDENTS(on)
#define WAIT_FOR_INPUTS(on)
#define HOST_VECTORS
#define DYNAMIC_SHARED(type, name) type* const name = static_cast<type*>(::coldtune::block->shared)
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#define ROLLED _Pragma("nounroll")
#else
#define UNROLLED _Pragma("GCC unroll 128")
#define ROLLED _Pragma("GCC unroll 1")
#endif

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
// Data are 16-bit words in memory; loads of several at once may alias them.
typedef u32 word4 __attribute__((vector_size(16), may_alias));

inline float as_float(u32 bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
inline u32 as_bits(float value) {
  u32 bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline u64 fold(word4 bits) { return (static_cast<u64>(bits[0] ^ bits[1]) << 32) | (bits[2] ^ bits[3]); }
template <typename T>
inline T load_once(const T* at) {
  return *at;
}

#define threadIdx (::coldtune::block->fibers[::coldtune::block->current].index)
#define blockIdx (::coldtune::block->index)
#define blockDim (::coldtune::block->size)
#define gridDim (::coldtune::block->grid)

// The line of the call tells barriers apart: threads that wait at different ones are an error.
inline void __syncthreads(int line = __builtin_LINE()) { coldtune::block->wait_for_block(line); }
template <typename T>
inline T __shfl_xor(T value, int mask, int width = WARP, int line = __builtin_LINE()) {
  const int lane = coldtune::block->lane();
  const int from = lane ^ mask;
  return coldtune::block->exchange(value, from / width == lane / width ? from : lane, line);
}
template <typename T>
inline T __shfl_down(T value, unsigned delta, int width = WARP, int line = __builtin_LINE()) {
  const int lane = coldtune::block->lane();
  const int from = lane + static_cast<int>(delta);
  return coldtune::block->exchange(value, from / width == lane / width ? from : lane, line);
}
template <typename T>
inline T __shfl(T value, int source, int width = WARP, int line = __builtin_LINE()) {
  const int lane = coldtune::block->lane();
  return coldtune::block->exchange(value, lane / width * width + (source & (width - 1)), line);
}

// __shfl_xor of several values with one barrier: a switch of fibers costs more than a copy.
template <int COUNT>
inline void exchange(float (&value)[COUNT], int mask, int line = __builtin_LINE()) {
  static_assert(sizeof value <= coldtune::EXCHANGE_BYTES, "more values than a lane may exchange at once");
  coldtune::block->exchange_bytes(value, sizeof value, coldtune::block->lane() ^ mask, line);
}

inline u32 atomicAdd(u32* at, u32 value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline int atomicAdd(int* at, int value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline u64 atomicAdd(u64* at, u64 value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline float atomicAdd(float* at, float value) {
  float old, sum;
  __atomic_load(at, &old, __ATOMIC_RELAXED);
  do {
    sum = old + value;
  } while (!__atomic_compare_exchange(at, &old, &sum, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
