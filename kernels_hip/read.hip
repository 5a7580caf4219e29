// Ceilings: kernels that only read, and one that does nothing. Parameters come as macros:
//   LOADS        16-byte loads that a thread has in flight
//   THREADS      threads of a workgroup
//   PASSES       rounds of such loads that a workgroup of read_flat makes
//   CACHE_STREAM 1: the data are marked as read once
//   PDL          1: programmatic dependent launch (NVIDIA sm_90 and later)
// The number of bytes is an argument, and any number will do; the data begin at a multiple of 16.

#if CACHE_STREAM
#define FETCH(at) load_once(at)
#else
#define FETCH(at) (*(at))
#endif

constexpr u64 LOAD_BYTES = 16;
// 1 in 2^64 threads would store, if the data were random; the compiler cannot know that none does.
constexpr u64 UNLIKELY = 0x9e3779b97f4a7c15ull;

// `folded` is the exclusive or of all that a thread has read. Storing it, were it the unlikely value, keeps every load.
__device__ __forceinline__ void keep(word4 folded, u16* output) {
  const u64 all = fold(folded);
  if (all == UNLIKELY) output[0] = (u16)all;
}

// LOADS loads `step` apart, all on their way before the first is used.
__device__ __forceinline__ void read_pass(word4& folded, const word4* at, u64 step) {
  word4 got[LOADS];
  UNROLLED
  for (int i = 0; i < LOADS; ++i) got[i] = FETCH(at + i * step);
  UNROLLED
  for (int i = 0; i < LOADS; ++i) folded ^= got[i];
}

// The bytes behind the last full 16.
__device__ __forceinline__ void read_end(word4& folded, const u16* data, u64 bytes, u64 thread, u64 threads) {
  for (u64 at = bytes / LOAD_BYTES * LOAD_BYTES + thread; at < bytes; at += threads) {
    folded ^= word4{reinterpret_cast<const unsigned char*>(data)[at]};
  }
}

// Each workgroup reads one contiguous chunk, PASSES * LOADS loads a thread; the last also reads what is left.
extern "C" __global__ void __launch_bounds__(THREADS)
    read_flat(const u16* __restrict__ data, u16* output, long long bytes, int workgroups) {
  LAUNCH_DEPENDENTS(PDL);
  const u64 count = (u64)bytes / LOAD_BYTES;
  constexpr u64 CHUNK = (u64)THREADS * LOADS * PASSES;
  const u64 first = (u64)blockIdx.x * CHUNK;
  const u64 at = first + threadIdx.x;
  const word4* from = reinterpret_cast<const word4*>(data);
  word4 folded = {};
  if (first + CHUNK <= count) {
    for (int pass = 0; pass < PASSES; ++pass) read_pass(folded, from + at + (u64)pass * (THREADS * LOADS), THREADS);
  } else {
    for (u64 i = at; i < count; i += THREADS) folded ^= FETCH(from + i);
  }
  if ((int)blockIdx.x == workgroups - 1) read_end(folded, data, (u64)bytes, threadIdx.x, THREADS);
  WAIT_FOR_INPUTS(PDL);
  keep(folded, output);
}

// The whole grid walks over the data side by side.
extern "C" __global__ void __launch_bounds__(THREADS)
    read_stride(const u16* __restrict__ data, u16* output, long long bytes, int workgroups) {
  LAUNCH_DEPENDENTS(PDL);
  const u64 count = (u64)bytes / LOAD_BYTES;
  const u64 step = (u64)workgroups * THREADS;
  const u64 thread = (u64)blockIdx.x * THREADS + threadIdx.x;
  const word4* from = reinterpret_cast<const word4*>(data);
  word4 folded = {};
  u64 at = thread;
  for (; at + (LOADS - 1) * step < count; at += LOADS * step) read_pass(folded, from + at, step);
  for (; at < count; at += step) folded ^= FETCH(from + at);
  read_end(folded, data, (u64)bytes, thread, step);
  WAIT_FOR_INPUTS(PDL);
  keep(folded, output);
}

extern "C" __global__ void __launch_bounds__(THREADS) empty(u16* output) {
  LAUNCH_DEPENDENTS(PDL);
  WAIT_FOR_INPUTS(PDL);
  (void)output;
}
#undef FETCH
