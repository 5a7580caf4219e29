// The skinny product in layout nk: y[M,N] = x[M,K] * W[N,K]^T; bf16 in and out (raw 16-bit words), sums in fp32.
//
// One source for AMD (clang), NVIDIA (NVRTC) and the host (fibers). A prelude in front of it gives the few names that
// differ; the parameters come as macros:
//   K, N, M      sizes; M is the number of activation rows that the code can take
//   BOUND_M      1: an argument says how many of the M rows there are (the general kernel at M=1)
//   M_SPEC       1: specialised to M=1
//   CPT          weights that one load brings: 1, 2, 4, 8, 16 (two 16-byte loads); divides K
//   ROWS         rows of W that a workgroup owns
//   WARPS, WARP  warps of a workgroup, threads of a warp
//   SPLIT_K      workgroups along K; the last to end adds their parts in a fixed order
//   UNROLL       loads of one row that are in flight before the first is used
//   CACHE_STREAM 1: weights are marked as read once
//   PDL          1: programmatic dependent launch (NVIDIA sm_90 and later)
//   WAVES_PER_EU AMD: waves a SIMD to aim for, 0 = the compiler's choice
//
// The threads of a workgroup lie side by side along K, so each activation is read once a workgroup, by the thread that
// needs it, and used for ROWS rows. Staging activations in LDS would share nothing, so both forms read them directly.

#ifndef ENTRY
#define ENTRY skinny_gemm
#endif
#if PDL
// The launch in front may still be writing the activations when this kernel starts: no read-only cache for them.
#define INPUT
#else
#define INPUT __restrict__
#endif

constexpr int THREADS = WARP * WARPS;
constexpr int CHUNKS = K / CPT;                          // loads that cover one row
constexpr int PASS = THREADS * UNROLL;                   // loads of one row that a workgroup has in flight
constexpr int LEAST = CHUNKS / SPLIT_K;                  // loads of the smallest part of a row
constexpr int MOST = (CHUNKS + SPLIT_K - 1) / SPLIT_K;   // loads of the largest
constexpr int FULL = LEAST / PASS;                       // passes that every part has in full
constexpr bool REST = MOST > FULL * PASS;                // one guarded pass behind them
constexpr int WORDS = CPT > 1 ? CPT / 2 : 1;
constexpr int OUTPUTS = ROWS * M;

constexpr int next_power(int value) {
  int power = 1;
  while (power < value) power *= 2;
  return power;
}
constexpr int PADDED = next_power(OUTPUTS);
constexpr int KEPT = PADDED > WARP ? PADDED / WARP : 1;    // sums that a lane holds after the reduction
constexpr int SHARERS = PADDED < WARP ? WARP / PADDED : 1;  // lanes that then hold the same sum

// Of the guarded pass, load u of every thread is inside (whole) or outside (none) of every part.
constexpr bool whole(int u) { return FULL * PASS + (u + 1) * THREADS <= LEAST; }
constexpr bool none(int u) { return FULL * PASS + u * THREADS >= MOST; }

// A load brings a Chunk: pairs of weights in 32-bit words, the first of a pair in the low half. Sums is what a thread adds
// up for one output: one float on a GPU. On the host it is a vector with a lane for each word, which the compiler may use
// without reordering any addition.
#ifdef HOST_VECTORS
typedef u32 Chunk __attribute__((vector_size(4 * WORDS)));
typedef u32 Aligned __attribute__((vector_size(4 * WORDS), aligned(CPT < 8 ? 2 * CPT : 16), may_alias));
typedef float Sums __attribute__((vector_size(4 * WORDS)));

inline void multiply_add(Sums& sum, Chunk w, Chunk x) {
  sum += (Sums)(w & 0xffff0000u) * (Sums)(x & 0xffff0000u);
  if (CPT > 1) sum += (Sums)(w << 16) * (Sums)(x << 16);
}
inline float total_of(Sums sum) {
  float lanes[WORDS];
  UNROLLED
  for (int j = 0; j < WORDS; ++j) lanes[j] = sum[j];
  for (int half = WORDS / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}
#else
struct Chunk {
  u32 word[WORDS];
  __device__ __forceinline__ u32& operator[](int j) { return word[j]; }
};
typedef float Sums;

__device__ __forceinline__ void multiply_add(Sums& sum, const Chunk& w, const Chunk& x) {
  UNROLLED
  for (int j = 0; j < WORDS; ++j) {
    if (CPT > 1) sum += as_float(w.word[j] << 16) * as_float(x.word[j] << 16);
    sum += as_float(w.word[j] & 0xffff0000u) * as_float(x.word[j] & 0xffff0000u);
  }
}
__device__ __forceinline__ float total_of(Sums sum) { return sum; }

// Swap values with the lane whose number differs by `mask`. The host's prelude has its own, with one barrier for all.
template <int COUNT>
__device__ __forceinline__ void exchange(float (&value)[COUNT], int mask) {
  UNROLLED
  for (int i = 0; i < COUNT; ++i) value[i] = __shfl_xor(value[i], mask, WARP);
}
#endif

// Round to nearest, ties to even; a NaN stays one.
__device__ __forceinline__ u16 to_bf16(float value) {
  const u32 bits = as_bits(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)((bits >> 16) | 0x40u);
  return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <bool ONCE>
__device__ __forceinline__ Chunk load(const u16* at) {
  Chunk chunk;
#if CPT == 1
  chunk[0] = (u32)(ONCE ? load_once(at) : *at) << 16;
#elif defined(HOST_VECTORS)
  chunk = *reinterpret_cast<const Aligned*>(at);
#elif CPT == 2
  const word1* from = reinterpret_cast<const word1*>(at);
  chunk[0] = ONCE ? load_once(from) : *from;
#elif CPT == 4
  const word2* from = reinterpret_cast<const word2*>(at);
  const word2 two = ONCE ? load_once(from) : *from;
  chunk[0] = two.x;
  chunk[1] = two.y;
#else
  const word4* from = reinterpret_cast<const word4*>(at);
  UNROLLED
  for (int i = 0; i < CPT / 8; ++i) {
    const word4 four = ONCE ? load_once(from + i) : from[i];
    chunk[4 * i] = four.x;
    chunk[4 * i + 1] = four.y;
    chunk[4 * i + 2] = four.z;
    chunk[4 * i + 3] = four.w;
  }
#endif
  return chunk;
}

// What one thread works on: its place in the workgroup and the part of K that the workgroup has.
struct Place {
  int thread;
  int count;          // loads of a row in this part
  int used_m;         // activation rows that there are
  const u16* x;       // activations, at the start of the part
  const u16* w[ROWS]; // rows of W, at the start of the part
};

// Rows behind the last are read as the last; nobody uses the result.
__device__ __forceinline__ void find_rows(Place& place, const u16* weight, int row0, int first) {
  UNROLLED
  for (int r = 0; r < ROWS; ++r) {
    int row = row0 + r;
    if (N % ROWS != 0 && row >= N) row = N - 1;
    place.w[r] = weight + (u64)row * K + (u64)first * CPT;
  }
}

template <bool GUARDED>
__device__ __forceinline__ void load_weights(Chunk (&w)[UNROLL][ROWS], const Place& place, int pass) {
  UNROLLED
  for (int u = 0; u < UNROLL; ++u) {
    if (GUARDED && none(u)) continue;
    const int at = pass * PASS + u * THREADS + place.thread;
    const bool inside = !GUARDED || whole(u) || at < place.count;
    UNROLLED
    for (int r = 0; r < ROWS; ++r) w[u][r] = inside ? load<CACHE_STREAM>(place.w[r] + (u64)at * CPT) : Chunk{};
  }
}

template <bool GUARDED>
__device__ __forceinline__ void multiply(Sums (&sum)[ROWS][M], const Chunk (&w)[UNROLL][ROWS],
                                         const Place& place, int pass) {
  UNROLLED
  for (int u = 0; u < UNROLL; ++u) {
    if (GUARDED && none(u)) continue;
    const int at = pass * PASS + u * THREADS + place.thread;
    const bool inside = !GUARDED || whole(u) || at < place.count;
    UNROLLED
    for (int m = 0; m < M; ++m) {
      if (BOUND_M && m >= place.used_m) continue;
      const Chunk x = inside ? load<false>(place.x + (u64)m * K + (u64)at * CPT) : Chunk{};
      UNROLLED
      for (int r = 0; r < ROWS; ++r) multiply_add(sum[r][m], w[u][r], x);
    }
  }
}

// Add `value` over the lanes of a warp. In each step a lane gives half of its sums away and keeps the other half, so that
// COUNT sums cost about COUNT shuffles, not 5 * COUNT. `first` becomes the index of the first sum that the lane keeps.
template <int COUNT, int OFFSET>
__device__ __forceinline__ void reduce(float (&value)[PADDED], int lane, int& first) {
  if constexpr (OFFSET > 0 && COUNT > 1) {
    constexpr int HALF = COUNT / 2;
    const bool upper = (lane & OFFSET) != 0;
    float other[HALF];
    UNROLLED
    for (int i = 0; i < HALF; ++i) {
      // Values, not places, are chosen: a place chosen while it runs would keep the sums in memory.
      const float down = value[i], up = value[HALF + i];
      other[i] = upper ? down : up;
      value[i] = upper ? up : down;
    }
    exchange(other, OFFSET);
    UNROLLED
    for (int i = 0; i < HALF; ++i) value[i] += other[i];
    if (upper) first += HALF;
    reduce<HALF, OFFSET / 2>(value, lane, first);
  } else if constexpr (OFFSET > 0) {
    value[0] += __shfl_xor(value[0], OFFSET, WARP);
    reduce<1, OFFSET / 2>(value, lane, first);
  }
}

// Where finished sums go: to the output, or with SPLIT_K > 1 to the part's place in the workspace.
struct Sink {
  u16* output;
  float* partials;
  int row0;
  int used_m;
  int part;

  // Sum `index` of a workgroup belongs to row index / M of W and row index % M of the activations.
  __device__ __forceinline__ bool has(int index) const {
    return index < OUTPUTS && row0 + index / M < N && (!BOUND_M || index % M < used_m);
  }
  __device__ __forceinline__ u64 column(int index, int plane) const {
    return (u64)(plane * used_m + index % M) * N + row0 + index / M;
  }
  __device__ __forceinline__ void put(int index, float total) const {
    if (!has(index)) return;
    if (SPLIT_K > 1) partials[column(index, part)] = total;
    else output[column(index, 0)] = to_bf16(total);
  }
};

// Add the sums over the threads of the workgroup and put them into the sink.
__device__ __forceinline__ void finish(const Sums (&sum)[ROWS][M], int thread, const Sink& sink) {
  float value[PADDED];
  UNROLLED
  for (int i = 0; i < PADDED; ++i) value[i] = i < OUTPUTS ? total_of(sum[i / M % ROWS][i % M]) : 0.0f;
  const int lane = thread % WARP;
  int first = 0;
  reduce<PADDED, WARP / 2>(value, lane, first);
  const bool owner = lane % SHARERS == 0;
  if constexpr (WARPS == 1) {
    if (owner) {
      UNROLLED
      for (int i = 0; i < KEPT; ++i) sink.put(first + i, value[i]);
    }
  } else {
    __shared__ float table[WARPS][PADDED];
    if (owner) {
      UNROLLED
      for (int i = 0; i < KEPT; ++i) table[thread / WARP][first + i] = value[i];
    }
    __syncthreads();
    for (int index = thread; index < OUTPUTS; index += THREADS) {
      float total = 0.0f;
      UNROLLED
      for (int warp = 0; warp < WARPS; ++warp) total += table[warp][index];
      sink.put(index, total);
    }
  }
}

#if SPLIT_K > 1
// The last workgroup of a row block adds the parts in order, so the result does not depend on who was last. One thread
// fences for all: behind the barrier it has seen what the others wrote, and a fence passes on all that its thread has seen.
__device__ __forceinline__ void add_parts(const Sink& sink, u32* counter, int thread) {
  __shared__ u32 ticket;
  __syncthreads();
  if (thread == 0) {
    __threadfence();
    ticket = atomicAdd(counter, 1u);
  }
  __syncthreads();
  if (ticket != SPLIT_K - 1) return;
  __threadfence();
  for (int index = thread; index < OUTPUTS; index += THREADS) {
    if (!sink.has(index)) continue;
    float total = 0.0f;
    UNROLLED
    for (int part = 0; part < SPLIT_K; ++part) total += sink.partials[sink.column(index, part)];
    sink.output[sink.column(index, 0)] = to_bf16(total);
  }
  if (thread == 0) *counter = 0;
}
#endif

extern "C" __global__ void __launch_bounds__(WARP * WARPS) WAVES_HINT(WAVES_PER_EU) ENTRY(
    const u16* INPUT activation, const u16* __restrict__ weight, u16* output
#if SPLIT_K > 1
    , float* partials, u32* counters
#endif
#if BOUND_M
    , int used_m
#endif
) {
  LAUNCH_DEPENDENTS(PDL);
#if !BOUND_M
  constexpr int used_m = M;
#endif
#if SPLIT_K == 1
  float* const partials = nullptr;
#endif
  const int part = SPLIT_K > 1 ? (int)blockIdx.y : 0;
  const int first = (int)((u64)part * CHUNKS / SPLIT_K);
  const int row0 = (int)blockIdx.x * ROWS;
  Place place;
  place.thread = (int)threadIdx.x;
  place.count = (int)((u64)(part + 1) * CHUNKS / SPLIT_K) - first;
  place.used_m = used_m;
  place.x = activation + (u64)first * CPT;
  find_rows(place, weight, row0, first);

  Chunk w[UNROLL][ROWS];
  Sums sum[ROWS][M] = {};
  // Weights depend on no other launch, so the first of them are on their way before the wait.
  load_weights<FULL == 0>(w, place, 0);
  WAIT_FOR_INPUTS(PDL);
  // Not unrolled, so that UNROLL and not the compiler decides how many loads are in flight.
  ROLLED
  for (int pass = 0; pass < FULL; ++pass) {
    multiply<false>(sum, w, place, pass);
    if (pass + 1 < FULL) load_weights<false>(w, place, pass + 1);
    else if (REST) load_weights<true>(w, place, pass + 1);
  }
  if (REST) multiply<true>(sum, w, place, FULL);

  const Sink sink = {output, partials, row0, used_m, part};
  finish(sum, place.thread, sink);
#if SPLIT_K > 1
  add_parts(sink, counters + blockIdx.x, place.thread);
#endif
}
#undef INPUT
