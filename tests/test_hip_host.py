"""The HIP sources, run on the host: every form against float64."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from hip_rig import Case, Data, compile_library, launch, unit_of

from kernels_hip import Ceiling, Hip, host, toolchain
from kernels_hip.build import plan
from tuner.arms import Arm, Pointer, Scalar, Target
from tuner.devices.host import HostModule
from tuner.devices.host_trace import Recorder
from tuner.errors import ArmCompileError, UsageError
from tuner.problem import Problem, Shape

pytestmark = pytest.mark.skipif(toolchain.host_compiler() is None, reason="no C++ compiler")

# M = 1 specialised; its general twin (m_spec off); M of 2 to 8; odd K; tails; K below one pass; N no multiple of rows.
WARP32 = (
    Case.of("1x4097x5", cpt=1, warps=2, unroll=4),
    Case.of("1x1x3", cpt=1),
    Case.of("1x2050x7", cpt=2, rows=4, unroll=2),
    Case.of("1x4096x33", cpt=8, rows=2, warps=4, unroll=2, split_k=2),
    Case.of("1x4304x19", cpt=16, rows=4, split_k=8),
    Case.of("1x360x17", cpt=8, rows=16, warps=2),
    Case.of("1x2880x9", cpt=4, rows=8, warps=4, split_k=4, unroll=2),
    Case.of("1x1027x6", cpt=1, rows=4, split_k=8, m_spec=False),
    Case.of("1x4096x9", cpt=16, rows=2, m_spec=False),
    Case.of("2x2880x9", cpt=8, rows=4, warps=2, unroll=2),
    Case.of("3x1025x7", cpt=1, rows=2, split_k=2, unroll=4),
    Case.of("5x1160x6", cpt=4, rows=1, warps=2),
    Case.of("8x1024x35", cpt=16, rows=16, unroll=1),
)
WARP64 = (
    Case.of("1x4097x5", cpt=1, warps=2, unroll=4),
    Case.of("1x4096x33", cpt=8, rows=2, warps=4, unroll=2, split_k=2),
    Case.of("1x2880x19", cpt=4, rows=16, split_k=4),
    Case.of("1x1032x6", cpt=8, rows=4, warps=2, m_spec=False),
    Case.of("7x1158x5", cpt=2, rows=4, warps=2, split_k=8),
)


@pytest.fixture(scope="module", params=[(32, WARP32), (64, WARP64)], ids=["warp32", "warp64"])
def group(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    warp, cases = request.param
    return warp, cases, compile_library(unit_of(cases, warp), tmp_path_factory.mktemp("group"))


def test_every_form_is_within_the_bound_of_float64(group) -> None:  # type: ignore[no-untyped-def]
    warp, cases, library = group
    for i, case in enumerate(cases):
        data = Data.of(case, warp)
        data.run(library, f"e{i}", case, warp)
        try:
            data.check()
            assert data.untouched(), "something outside the output or a workspace was written"
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_split_k_leaves_its_counters_at_zero_and_gives_the_same_bits_each_time(group) -> None:  # type: ignore[no-untyped-def]
    warp, cases, library = group
    split = [(i, case) for i, case in enumerate(cases) if case.config["split_k"] != 1]
    assert split
    for i, case in split:
        data = Data.of(case, warp, seed=3)
        results = []
        for threads in (1, 2, 4, 2):
            data.y.fill_(float("nan"))
            data.run(library, f"e{i}", case, warp, threads)
            assert not bool(data.memory["counters"].any()), case
            results.append(data.y.clone())
        assert all(torch.equal(results[0], other) for other in results[1:]), case
        data.check()


def test_a_planted_mistake_is_seen(group) -> None:  # type: ignore[no-untyped-def]
    warp, cases, library = group
    data = Data.of(cases[0], warp)
    data.run(library, "e0", cases[0], warp)
    # The last weight of the last row: what a kernel without its tail would miss.
    data.w[-1, -1] += 1.0
    data.x[0, -1] = 4.0
    with pytest.raises(AssertionError, match="wrong"):
        data.check()


def test_rounds_to_nearest_even_and_keeps_nan_and_infinity(tmp_path: Path) -> None:
    case = Case.of("1x2x6", cpt=2, rows=4)
    library = compile_library(unit_of([case], 32), tmp_path)
    data = Data.of(case, 32)
    inf, nan = float("inf"), float("nan")
    step = 2.0**-7  # of bfloat16 at 1
    data.x[:] = 1.0
    data.w[:] = torch.tensor(
        [[1, step / 2], [1 + step, step / 2], [-1, -step / 2], [1, step * 0.504], [inf, 1], [nan, 1]]
    ).bfloat16()
    data.run(library, "e0", case, 32)
    got = data.y[0].float().tolist()
    # Ties go to even; a little over a half goes up.
    assert got[:5] == [1.0, 1.0 + 2 * step, -1.0, 1.0 + step, inf]
    assert got[5] != got[5]


def _bound(problem: Problem, arm: Arm, target: Target):  # type: ignore[no-untyped-def]
    family = Ceiling() if arm.family == "ceiling" else Hip()
    artifact = family.build(problem, arm, target)
    return artifact, HostModule(artifact, target.units, Recorder())


def test_the_default_arm_as_it_is_built_and_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    problem = Problem(Shape.parse("1x512x37"), "bf16")
    target = Target("host", "any", 32, 2)
    arm = Hip().fixed(problem, target)[0]
    artifact, module = _bound(problem, arm, target)
    case = Case("1x512x37", arm.config)
    data = Data.of(case, 32)
    where = {"activation": data.x, "weight": data.w, "output": data.y}
    module.launch(artifact.steps[0], [("ptr", where[a.name].data_ptr()) for a in artifact.steps[0].args])
    data.check()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    again, _ = _bound(problem, arm, target)
    assert again.code_hash == artifact.code_hash and again.source_hash == artifact.source_hash
    assert list(tmp_path.iterdir()) == [], "a compile leaves no files"
    assert artifact.resources["compiler"]


def test_a_compile_error_is_the_first_error_line_and_names_no_folder() -> None:
    with pytest.raises(ArmCompileError) as caught:
        host.compile_text('#include "host_prelude.h"\n#line 7 "mine.hip"\nint f() { return nothing; }\n')
    assert "mine.hip:7" in str(caught.value) and "nothing" in str(caught.value)
    assert "/" not in str(caught.value)


def test_an_unknown_kernel_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'other'"):
        plan(Problem(Shape.parse("1x8x8"), "bf16"), Arm.of("hip", "other"), Target("host", "any", 32, 2))


SPY = """
#define WARP 32
#include "host_prelude.h"
#define LOADS {loads}
#define THREADS {threads}
#define PASSES {passes}
#define PDL 0
#define CACHE_STREAM 1
// Notes each 16 bytes that are loaded, by their index.
static unsigned* seen; static const u16* base;
inline word4 noted(const word4* at) {{
  atomicAdd(seen + (reinterpret_cast<const u16*>(at) - base) / 8, 1u);
  return *at;
}}
#define load_once noted
#include "read.hip"
extern "C" __attribute__((visibility("default"))) void spy(unsigned* s, const u16* b) {{ seen = s; base = b; }}
COLDTUNE_EXPORT(read_flat)
COLDTUNE_EXPORT(read_stride)
"""


@pytest.mark.parametrize(("threads", "loads", "passes"), [(64, 4, 1), (1, 16, 4)])
def test_the_ceilings_read_every_byte_once(tmp_path: Path, threads: int, loads: int, passes: int) -> None:
    library = compile_library(SPY.format(loads=loads, threads=threads, passes=passes), tmp_path)
    output = torch.zeros(8, dtype=torch.int16)
    for nbytes in (2, 16, 4096, 3 * 4096 + 32, 50_006):
        data = torch.randint(0, 255, (nbytes + 64,), dtype=torch.uint8)
        for entry, groups in (("read_flat", -(-nbytes // (threads * loads * passes * 16))), ("read_stride", 3)):
            seen = torch.zeros(nbytes // 16 + 8, dtype=torch.int32)
            library.spy(ctypes.c_void_p(seen.data_ptr()), ctypes.c_void_p(data.data_ptr()))
            args = [ctypes.c_void_p(data.data_ptr()), ctypes.c_void_p(output.data_ptr()), ctypes.c_int64(nbytes)]
            error = launch(library, entry, (groups, 1, 1), (threads, 1, 1), [*args, ctypes.c_int32(groups)])
            assert not error
            assert seen[: nbytes // 16].eq(1).all() and not seen[nbytes // 16 :].any(), (entry, nbytes)
    assert not output.any()


def test_the_host_ceiling_and_the_empty_kernel_run_as_built() -> None:
    problem = Problem(Shape.parse("1x512x37"), "bf16")
    target = Target("host", "any", 32, 2)
    probes = Ceiling().probe(problem, target)
    data, output = torch.randn(37, 512).bfloat16(), torch.zeros(8).bfloat16()
    for arm in probes.values():
        artifact, module = _bound(problem, arm, target)
        values: list[tuple[str, int | float]] = []
        for arg in artifact.steps[0].args:
            if isinstance(arg, Scalar):
                values.append((arg.ctype, arg.value))
            else:
                assert isinstance(arg, Pointer)
                values.append(("ptr", (data if arg.name == "weight" else output).data_ptr()))
        module.launch(artifact.steps[0], values)
    assert not output.any()
