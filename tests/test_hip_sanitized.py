"""The HIP sources under AddressSanitizer and UndefinedBehaviorSanitizer, in buffers of exactly the right size."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from hip_rig import Case, unit_of

from kernels_hip import host, toolchain
from tuner.problem import Shape

CASES = (
    Case.of("1x4097x5", cpt=1, warps=2, unroll=4),
    Case.of("1x1x3", cpt=1, rows=2),
    Case.of("1x2050x7", cpt=2, rows=4, unroll=2),
    Case.of("1x360x17", cpt=8, rows=16, warps=2, split_k=4),
    Case.of("1x1040x5", cpt=16, rows=4, m_spec=False),
    Case.of("3x1025x7", cpt=1, rows=2, split_k=2, unroll=4),
    Case.of("8x264x9", cpt=8, rows=8, warps=4, unroll=2),
)
MAIN = """
#define LOADS 4
#define THREADS 64
#define PASSES 1
#define CACHE_STREAM 0
#define PDL 0
#include "read.hip"
COLDTUNE_EXPORT(read_flat)
COLDTUNE_EXPORT(read_stride)
#include <cmath>
#include <cstdlib>
typedef int (*Launcher)(unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void**, int);
struct Test { Launcher launch; int m, k, n, split, bound, gx, gy, threads; };
static u16* words(size_t count) { return static_cast<u16*>(malloc(2 * count)); }
static double wide(u16 v) { return as_float((u32)v << 16); }
static u32 state = 12345;
static u16 draw() {  // bfloat16 between -2 and 2
  state = state * 1664525u + 1013904223u;
  return (u16)((state >> 16 & 0x807f) | (0x3f80 - (state >> 8 & 3) * 128));
}
static int check(const Test& t, size_t missing) {
  const size_t weights = (size_t)t.n * t.k;
  u16* x = words((size_t)t.m * t.k);
  u16* w = words(weights - missing);
  u16* y = words((size_t)t.m * t.n + 1) + 1;  // not aligned to more than an element
  float* partials = static_cast<float*>(malloc(4 * (size_t)t.split * t.m * t.n));
  unsigned* counters = static_cast<unsigned*>(calloc(t.gx, 4));
  for (size_t i = 0; i < (size_t)t.m * t.k; ++i) x[i] = draw();
  for (size_t i = 0; i < weights - missing; ++i) w[i] = draw();
  int m = t.m;
  void* args[6]; int count = 0;
  args[count++] = &x; args[count++] = &w; args[count++] = &y;
  if (t.split > 1) { args[count++] = &partials; args[count++] = &counters; }
  if (t.bound) args[count++] = &m;
  for (int threads = 1; threads <= 3; ++threads) {
    if (t.launch(t.gx, t.gy, 1, t.threads, 1, 1, 0, args, threads)) { puts(coldtune_error()); return 1; }
  }
  for (int a = 0; a < t.m; ++a) for (int b = 0; b < t.n; ++b) {
    double ref = 0, size = 0;
    for (int i = 0; i < t.k; ++i) {
      const double p = wide(x[a * t.k + i]) * wide(w[b * t.k + i]);
      ref += p; size += std::fabs(p);
    }
    const double error = std::fabs(wide(y[a * t.n + b]) - ref);
    if (error > std::fabs(ref) / 256 + 4 * size / (1 << 24)) { puts("wrong"); return 1; }
  }
  free(x); free(w); free(y - 1); free(partials); free(counters);
  return 0;
}
static int read(size_t bytes, size_t missing) {
  u16* data = static_cast<u16*>(calloc(bytes - missing, 1));
  u16* output = words(1);
  long long length = bytes; int groups = (bytes + 4095) / 4096, side = 3;
  void* flat[] = {&data, &output, &length, &groups};
  void* stride[] = {&data, &output, &length, &side};
  if (coldtune_launch_read_flat(groups, 1, 1, 64, 1, 1, 0, flat, 2)) return 1;
  if (coldtune_launch_read_stride(side, 1, 1, 64, 1, 1, 0, stride, 2)) return 1;
  free(data); free(output);
  return 0;
}
int main(int argc, char** argv) {
  const Test tests[] = {TESTS};
  const int which = argc > 1 ? atoi(argv[1]) : -1;  // a case whose weights are one word short, or the read
  const int total = sizeof tests / sizeof *tests;
  if (which == total) return read(50005, 1);
  for (int i = 0; i < total; ++i) if (which < 0 || which == i) if (check(tests[i], which == i)) return 1;
  const size_t lengths[] = {1, 15, 16, 17, 4096, 12320, 50005};
  for (size_t bytes : lengths) if (read(bytes, 0)) return 1;
  puts("all well");
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = toolchain.host_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("sanitized")
    tests = []
    for i, case in enumerate(CASES):
        shape, what = Shape.parse(case.shape), case.plan(32)
        macros, (step,) = what.kernel.macros, what.steps
        numbers = [shape.m, shape.k, shape.n, macros["SPLIT_K"], macros["BOUND_M"], *step.grid[:2], step.block[0]]
        tests.append(f"{{c{i}::coldtune_launch_e{i}, {', '.join(map(str, numbers))}}}")
    text = unit_of(CASES, 32) + MAIN.replace("{TESTS}", "{" + ", ".join(tests) + "}")
    (folder / "program.cpp").write_text(text)
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g", "-o", "program"]
    command = [str(compiler), *host.options(), *sanitizers, "program.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if "asan" in done.stderr or "ubsan" in done.stderr:
        pytest.skip(f"the compiler has no sanitizers: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return folder / "program"


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    environment.pop("LD_PRELOAD", None)
    return subprocess.run(
        [str(program), *arguments], env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_odd_shapes_touch_nothing_outside_their_buffers(program: Path) -> None:
    done = run(program)
    assert done.returncode == 0 and done.stdout == "all well\n", done.stdout + done.stderr


@pytest.mark.parametrize("which", range(len(CASES) + 1))
def test_a_weight_buffer_that_is_one_word_short_is_seen(program: Path, which: int) -> None:
    done = run(program, str(which))
    assert done.returncode != 0
    # A load of 32 bytes that begins inside a buffer and ends behind it is called an unknown crash.
    seen = re.search(r"AddressSanitizer: (heap-buffer-overflow|unknown-crash)", done.stderr)
    assert seen and "READ of size" in done.stderr, done.stdout + done.stderr
