"""The executor that runs HIP sources on the host: barriers, shuffles, atomics, shared memory, errors."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

import pytest
import torch
from hip_rig import compile_library, launch

from kernels_hip import toolchain

pytestmark = pytest.mark.skipif(toolchain.host_compiler() is None, reason="no C++ compiler")

KERNELS = """
#include "host_prelude.h"
extern "C" void shuffles(int* out) {
  const int t = threadIdx.x + blockDim.x * threadIdx.y;
  int* mine = out + 4 * (t + blockDim.x * blockDim.y * blockIdx.x);
  mine[0] = __shfl_xor(t, 5);
  mine[1] = __shfl_down(t, 3);
  mine[2] = __shfl(t, 7);
  mine[3] = __shfl_xor(t, 4, 8);
}
extern "C" void turns(int* out) {  // a neighbour's value is there only if the barrier holds
  __shared__ int table[256];
  const int t = threadIdx.x, n = blockDim.x;
  int value = t + blockIdx.x;
  for (int round = 0; round < 3; ++round) {
    table[t] = value;
    __syncthreads();
    value = table[(t + 33) % n];
    __syncthreads();
  }
  out[blockIdx.x * n + t] = value;
}
extern "C" void counts(u32* total, float* sum) {
  atomicAdd(total, 1u);
  atomicAdd(sum, 0.5f);
}
extern "C" void dynamic(int* out, int n) {
  DYNAMIC_SHARED(int, box);
  const int t = threadIdx.x;
  for (int i = t; i < n; i += blockDim.x) box[i] = i * 3;
  __syncthreads();
  if (t == 0) for (int i = 0; i < n; ++i) out[i] = box[i];
}
extern "C" void some_skip(int* out) {
  if (threadIdx.x < 16) __syncthreads();
  out[0] = 1;
}
extern "C" void two_places(int* out) {
  if (threadIdx.x % 2) __syncthreads();
  else
    __syncthreads();
  out[0] = 2;
}
extern "C" void half_warp(float* out) {
  float v = threadIdx.x;
  if (threadIdx.x % 32 < 8) v += __shfl_xor(v, 1);
  out[threadIdx.x] = v;
}
__attribute__((noinline)) int fill() {
  volatile char big[160 * 1024];
  for (int i = sizeof big - 1; i >= 0; i -= 4) big[i] = 0;
  return big[5];
}
extern "C" void deep(int* out) {
  if (threadIdx.x == 1) out[0] = fill();
}
extern "C" void where(int* out) {
  out[blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z)] =
      blockIdx.x + 10 * blockIdx.y + 100 * blockIdx.z + 1000 * gridDim.z;
}
COLDTUNE_EXPORT(shuffles)
COLDTUNE_EXPORT(turns)
COLDTUNE_EXPORT(counts)
COLDTUNE_EXPORT(dynamic)
COLDTUNE_EXPORT(some_skip)
COLDTUNE_EXPORT(two_places)
COLDTUNE_EXPORT(half_warp)
COLDTUNE_EXPORT(deep)
COLDTUNE_EXPORT(where)
"""


@pytest.fixture(scope="module", params=["fast", "portable"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    extra = ["-DCOLDTUNE_PORTABLE_FIBERS"] if request.param == "portable" else []
    options = ["-DWARP=32", "-DCOLDTUNE_IDLE_MS=200", *extra]
    return compile_library(KERNELS, tmp_path_factory.mktemp("executor"), *options)


def at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@pytest.mark.parametrize("block", [(64, 1, 1), (8, 12, 1)])
def test_shuffles_reach_the_lane_they_name(library: ctypes.CDLL, block: tuple[int, int, int]) -> None:
    count = block[0] * block[1]
    out = torch.full((2 * count, 4), -1, dtype=torch.int32)
    assert launch(library, "shuffles", (2, 1, 1), block, [at(out)]) == ""
    for i in range(2 * count):
        t = i % count
        base, lane = t // 32 * 32, t % 32
        down = t + 3 if lane + 3 < 32 else t
        assert out[i].tolist() == [base + (lane ^ 5), down, base + 7, base + (lane ^ 4)], t


@pytest.mark.parametrize("threads", [1, 3])
def test_barriers_hold_for_the_whole_block(library: ctypes.CDLL, threads: int) -> None:
    n, blocks = 192, 50
    out = torch.full((blocks, n), -1, dtype=torch.int32)
    assert launch(library, "turns", (blocks, 1, 1), (n, 1, 1), [at(out)], threads) == ""
    expected = (torch.arange(n) + 3 * 33) % n + torch.arange(blocks)[:, None]
    assert torch.equal(out.long(), expected)


def test_atomics_count_every_thread_of_every_worker(library: ctypes.CDLL) -> None:
    total, sum_ = torch.zeros(1, dtype=torch.int32), torch.zeros(1)
    assert launch(library, "counts", (100, 2, 1), (40, 1, 1), [at(total), at(sum_)], 4) == ""
    assert total.item() == 8000 and sum_.item() == 4000.0


def test_dynamic_shared_memory_has_the_size_that_was_asked_for(library: ctypes.CDLL) -> None:
    for n in (100, 20_000, 50):
        out = torch.zeros(n, dtype=torch.int32)
        args = [at(out), ctypes.c_int32(n)]
        assert launch(library, "dynamic", (1, 1, 1), (32, 1, 1), args, 1, shared_bytes=4 * n) == ""
        assert torch.equal(out, torch.arange(n, dtype=torch.int32) * 3)


def test_blocks_know_their_place(library: ctypes.CDLL) -> None:
    out = torch.zeros(2 * 3 * 4, dtype=torch.int32)
    assert launch(library, "where", (2, 3, 4), (1, 1, 1), [at(out)]) == ""
    assert out.tolist() == [4000 + x + 10 * y + 100 * z for z in range(4) for y in range(3) for x in range(2)]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("some_skip", "divergent barrier: 16 of 64 threads wait"),
        ("two_places", "divergent barrier: one thread waits at line"),
        ("half_warp", "divergent barrier: 16 of 64 threads wait"),
    ],
)
def test_a_divergent_barrier_is_an_error_and_the_next_launch_is_well(
    library: ctypes.CDLL, entry: str, words: str
) -> None:
    out = torch.zeros(256, dtype=torch.int32)
    assert words in launch(library, entry, (3, 1, 1), (64, 1, 1), [at(out)])
    test_barriers_hold_for_the_whole_block(library, 2)


def test_a_stack_that_is_too_small_is_an_error(library: ctypes.CDLL) -> None:
    out = torch.zeros(4, dtype=torch.int32)
    # Thread 1 of 2 runs over into the stack of thread 0, which has ended.
    error = launch(library, "deep", (1, 1, 1), (2, 1, 1), [at(out)], 1)
    assert "KB of stack" in error


@pytest.mark.parametrize(("grid", "block"), [((1, 1, 1), (1025, 1, 1)), ((1, 1, 1), (0, 1, 1)), ((0, 1, 1), (1, 1, 1))])
def test_a_launch_without_a_meaning_is_refused(
    library: ctypes.CDLL, grid: tuple[int, int, int], block: tuple[int, int, int]
) -> None:
    out = torch.zeros(4, dtype=torch.int32)
    assert "1 to 1024 threads" in launch(library, "some_skip", grid, block, [at(out)])


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_idle_workers_end_and_come_back(library: ctypes.CDLL) -> None:
    def tasks() -> int:
        return len(os.listdir("/proc/self/task"))

    test_barriers_hold_for_the_whole_block(library, 3)
    working = tasks()
    deadline = time.monotonic() + 8
    while tasks() > working - 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert tasks() <= working - 3
    test_barriers_hold_for_the_whole_block(library, 3)
