"""Triton arms compiled for NVIDIA and AMD without a GPU: what the compiled code says of itself."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from kernels_triton import Triton, binary
from kernels_triton import build as building
from tuner.arms import Artifact, Pointer, Scalar, Step, Target, Value
from tuner.errors import ArmCompileError, ArmConstraintError
from tuner.problem import Problem, Shape

SM_90 = Target("cuda", "sm_90", 32, 132, shared_bytes=232_448)
GFX1100 = Target("hip", "gfx1100", 32, 96)
GFX942 = Target("hip", "gfx942", 64, 304)
TARGETS = [SM_90, GFX1100, GFX942]
HEADLINE = "1x4096x12288"
POINTERS = ("activation", "weight", "output")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def problem(shape: str) -> Problem:
    return Problem.of(Shape.parse(shape), "bf16")


def build(target: Target, shape: str = HEADLINE, /, **changes: Value) -> Artifact:
    space = Triton().spaces(problem(shape), target)[0]
    config = {**space.default, **changes}
    assert space.violated(config) is None
    return Triton().build(problem(shape), space.arm(config), target)


def assembly(target: Target, shape: str = HEADLINE, /, **changes: Value) -> str:
    space = Triton().spaces(problem(shape), target)[0]
    plan = building.plan(problem(shape), {**space.default, **changes}, target)
    return str(building._compile(plan, problem(shape), target).asm["ptx" if target.backend == "cuda" else "amdgcn"])


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.arch)
def test_the_fixed_arms_load_16_bytes_and_spill_nothing(target: Target) -> None:
    default, twin = Triton().fixed(problem(HEADLINE), target)[:2]
    assert default.config == {**twin.config, "m_spec": True}
    artifacts = [Triton().build(problem(HEADLINE), arm, target) for arm in (default, twin)]
    for artifact in artifacts:
        assert artifact.resources["load_bytes"] == 16
        assert artifact.resources["spill_bytes"] == 0
        assert 16 <= int(artifact.resources["registers"]) <= 128
        assert artifact.steps[0].grid == (12288, 1, 1)
        assert artifact.steps[0].block == (4 * target.warp, 1, 1)
        assert artifact.workspaces == ()
        assert artifact.source_hash == hashlib.sha256(building._SOURCE.read_bytes()).hexdigest()
    assert artifacts[0].code_hash != artifacts[1].code_hash, "the twin is another kernel"


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.arch)
def test_arguments_are_those_of_the_compiled_kernel(target: Target) -> None:
    null = Scalar("ptr", 0)
    cases: list[tuple[dict[str, Value], tuple[Pointer | Scalar, ...]]] = [
        ({}, ()),
        ({"m_spec": False}, (Scalar("i32", 1),)),
        ({"split_k": 4}, (Pointer("partials"), Pointer("counters"))),
    ]
    for changes, middle in cases:
        artifact = build(target, **changes)
        step = artifact.steps[0]
        assert step.args == (*(Pointer(name) for name in POINTERS), *middle, null, null)
        text = assembly(target, **changes)
        widths = [4 if arg == Scalar("i32", 1) else 8 for arg in step.args]
        assert binary.parameters(text, step.entry, target.backend) == widths


def test_split_k_has_its_workspaces_and_one_acquiring_release() -> None:
    artifact = build(SM_90, "3x4096x1001", split_k=4, rows=4)
    assert artifact.steps[0].grid == (251, 4, 1)
    assert [(w.name, w.nbytes, w.zeroed) for w in artifact.workspaces] == [
        ("partials", 4 * 4 * 3 * 1001, False),
        ("counters", 4 * 251, True),
    ]
    ptx = assembly(SM_90, "3x4096x1001", split_k=4, rows=4)
    assert re.findall(r"atom\.\S+", ptx) == ["atom.global.gpu.acq_rel.add.u32"]
    barriers = [match.start() for match in re.finditer(r"bar\.sync", ptx)]
    parts, count = ptx.rindex("st.global.b32", 0, ptx.index("atom.")), ptx.index("atom.")
    assert any(parts < barrier < count for barrier in barriers), "all parts are stored before one thread counts"


def test_amd_waits_for_the_parts_of_every_wave() -> None:
    for target in (GFX1100, GFX942):
        text = assembly(target, split_k=4)
        swap, count = text.index("global_atomic_swap"), text.index("global_atomic_add")
        between = text[swap:count]
        assert re.search(r"s_waitcnt(_vscnt null, 0x0| vmcnt\(0\))[\s\S]*s_barrier", between)


def position(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None
    return found.start()


@pytest.mark.parametrize(("m", "rows", "stages"), [(1, 4, 1), (1, 4, 2), (8, 4, 1), (8, 16, 2)])
def test_dependent_launch_loads_weights_before_it_waits(m: int, rows: int, stages: int) -> None:
    changes: dict[str, Value] = {"rows": rows, "warps": 8, "unroll": 1, "num_stages": stages, "cache": "stream"}
    shape = f"{m}x4096x4096"
    artifact = build(SM_90, shape, pdl=True, **changes)
    assert artifact.steps[0].dependent
    ptx = assembly(SM_90, shape, pdl=True, **changes)
    # A weight load is told by its hint, an activation load has none.
    launch, wait = position(r"griddepcontrol\.launch_dependents", ptx), position(r"griddepcontrol\.wait", ptx)
    weights = [hit.start() for hit in re.finditer(r"ld\.global\S*evict_first\S*v4", ptx)]
    assert launch < weights[0] < wait
    assert position(r"ld\.global\.(v\d\.)?[bu]|cp\.async\.ca|st\.global", ptx) > wait
    if (rows, stages) == (4, 2):
        assert max(weights) < wait, "two stages hold both blocks of K before the wait"
    plain = build(SM_90, shape, **changes)
    assert not plain.steps[0].dependent
    assert "griddepcontrol" not in assembly(SM_90, shape, **changes)
    assert plain.code_hash != artifact.code_hash


def test_cache_hints_reach_the_code() -> None:
    hints = [(SM_90, r"ld\.global\S*evict_first"), (GFX942, "dwordx4 .* nt")]
    if building._read_once_modifier() == ".cs":  # older Triton has no hint for gfx11
        hints.append((GFX1100, "b128 .* slc"))
    for target, hint in hints:
        assert re.search(hint, assembly(target, HEADLINE, cache="stream"))
        assert not re.search(hint, assembly(target))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.arch)
def test_the_receipt_tells_narrow_loads(target: Target) -> None:
    """With odd K only one weight at a time is aligned; activations still come 16 bytes at a time."""
    artifact = build(target, "1x4097x1001", rows=2)
    assert artifact.resources["load_bytes"] == 2
    # With K a multiple of four, four weights are; LLVM may join two such loads.
    assert build(target, "1x4100x1001").resources["load_bytes"] in ((8,) if target is SM_90 else (8, 16))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.arch)
def test_the_matrix_unit_is_used_for_sixteen_rows(target: Target) -> None:
    instruction = {
        "sm_90": r"mma\.sync\.aligned\.m16n8k16",
        "gfx1100": "v_wmma_f32_16x16x16_bf16",
        "gfx942": "v_mfma_f32_16x16x16",
    }
    changes: dict[str, Value] = {"rows": 16, "warps": 4, "unroll": 1, "cpt": 4, "num_stages": 2}
    artifact = build(target, "8x4096x4096", **changes)
    assert re.search(instruction[target.arch], assembly(target, "8x4096x4096", **changes))
    assert artifact.resources["spill_bytes"] == 0
    assert artifact.resources["load_bytes"] == 16
    assert not re.search(instruction[target.arch], assembly(target, "8x4096x4096", **{**changes, "rows": 4}))


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.arch)
@pytest.mark.parametrize("m", [1, 8])
def test_offsets_behind_two_gigabytes(target: Target, m: int) -> None:
    """16 rows of 2^27 weights do not fit 32-bit offsets; loads stay as wide."""
    artifact = build(target, f"{m}x134217728x48", rows=16, warps=4, unroll=1, cpt=4, split_k=2)
    assert artifact.resources["load_bytes"] == 16
    assert artifact.steps[0].grid == (3, 2, 1)


def test_too_much_shared_memory_is_a_constraint_with_both_numbers() -> None:
    small = dataclasses.replace(SM_90, shared_bytes=16 * 1024)
    with pytest.raises(ArmConstraintError, match=r"out of shared memory: needs [\d.]+ KB of 16 KB"):
        build(small, "8x4096x4096", rows=16, warps=4, unroll=1, num_stages=3)
    with pytest.raises(ArmConstraintError, match=r"out of LDS: needs [\d.]+ KB of 64 KB"):
        build(GFX942, "8x4096x4096", rows=16, warps=4, unroll=1, num_stages=3)


def test_a_compiler_error_is_an_arm_error() -> None:
    with pytest.raises(ArmCompileError, match=r"^ValueError: .+"):
        Triton().build(problem(HEADLINE), Triton().fixed(problem(HEADLINE), GFX1100)[0],
                       dataclasses.replace(GFX1100, arch="nonsense"))  # fmt: skip


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("at 3:4:\n    x = y\n        ^\nNameError('y is not defined')", "ValueError: NameError('y is not defined')"),
        ("ptxas\nptxas fatal   : no such arch\nRepro", "ValueError: ptxas fatal   : no such arch"),
        ("", "ValueError"),
    ],
)
def test_first_useful_line(message: str, line: str) -> None:
    assert building.first_useful_line(ValueError(message)) == line


def test_code_hash_does_not_depend_on_places(tmp_path: Path) -> None:
    """Kernels compiled from another folder, with another cache, are the same code; their debug sections differ."""
    root = Path(building.__file__).parents[1]
    copy = tmp_path / "elsewhere" / "kernels_triton"
    copy.mkdir(parents=True)
    for file in (root / "kernels_triton").glob("*.py"):
        (copy / file.name).write_text(file.read_text())
    script = textwrap.dedent(
        f"""
        import sys
        sys.path[:0] = [{str(copy.parent)!r}, {str(root)!r}]
        import kernels_triton
        from tuner.arms import Target
        from tuner.problem import Problem, Shape
        assert {str(copy)!r} in kernels_triton.__file__
        problem = Problem(Shape(1, 512, 64), "bf16")
        for target in {TARGETS!r}:
            artifact = kernels_triton.Triton().build(problem, kernels_triton.Triton().fixed(problem, target)[0], target)
            print(artifact.code_hash, artifact.source_hash, {str(copy)!r}.encode() in artifact.code)
        """
    )
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    here = [build(target, "1x512x64") for target in TARGETS]
    there = [line.split() for line in run.stdout.splitlines()]
    assert [(a.code_hash, a.source_hash) for a in here] == [(code, source) for code, source, _ in there]
    assert any(found == "True" for _, _, found in there), "the test is void if no code object holds its path"


def test_code_hash_sees_code_and_geometry(tmp_path: Path) -> None:
    artifact = build(SM_90, "1x512x64")
    step = artifact.steps[0]
    assert binary.code_hash(artifact.code, step) == artifact.code_hash
    assert binary.code_hash(artifact.code, dataclasses.replace(step, grid=(1, 1, 1))) != artifact.code_hash
    file = tmp_path / "a.cubin"
    file.write_bytes(artifact.code)
    with file.open("rb") as stream:
        text = next(s for s in ELFFile(stream).iter_sections() if s.name.startswith(".text"))
        offset = text["sh_offset"]
    changed = bytearray(artifact.code)
    changed[offset] ^= 1
    assert binary.code_hash(bytes(changed), step) != artifact.code_hash


def test_weight_loads_are_followed_through_ptx() -> None:
    ptx = """
    .visible .entry k(.param .u64 k_param_0, .param .u64 k_param_1)
    ld.param.b64 %rd1, [k_param_0];
    ld.param.b64 %rd2, [k_param_1];
    mad.wide.s32 %rd3, %r1, 8, %rd2;
    ld.global.v4.b32 { %r2, %r3, %r4, %r5 }, [ %rd1 + 0 ];
    ld.global.L1::evict_first.v2.b32 { %r6, %r7 }, [ %rd3 + 16 ], %rd9;
    cp.async.cg.shared.global [ %r10 + 0 ], [ %rd1 + 0 ], 0x10, 0x10;
    """
    assert binary.ptx_load_bytes(ptx, "k", 1) == 8
    assert binary.ptx_load_bytes(ptx, "k", 0) == 16
    assert binary.ptx_load_bytes(ptx, "other", 0) == 0
    assert binary.parameters(ptx, "k", "cuda") == [8, 8]
    with pytest.raises(ArmCompileError, match="cannot find the arguments"):
        binary.parameters(ptx, "other", "cuda")


def test_loads_are_found_by_line_in_amd_assembly() -> None:
    text = """
    .file 1 "/a" "standard.py"
    .file 2 "/a" "skinny_gemm.py"
    .loc 1 30 1
    global_load_b128 v[0:3], v0, s[0:1]
    .loc 2 30 12 is_stmt 0
    s_load_b128 s[4:7], s[0:1], 0x0
    buffer_load_dwordx2 v[1:2], v1, s[8:11], 0 offen
    .loc 2 57 12
    buffer_load_b128 v[1:4], v1, s[8:11], 0 offen
    """
    assert binary.amdgcn_load_bytes(text, "skinny_gemm.py", range(25, 41)) == 8
    assert binary.amdgcn_load_bytes(text, "skinny_gemm.py", range(57, 58)) == 16
    assert binary.amdgcn_load_bytes(text, "other.py", range(100)) == 0


def test_family_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Triton().missing(SM_90) is None
    assert Triton().missing(Target("host", "x86_64", 1, 2)) == (
        "Triton arms cannot be timed on host: the interpreter is no kernel"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install" in str(Triton().missing(SM_90))
    assert "ROCm" in str(Triton().missing(GFX942))


def test_import_is_cheap() -> None:
    """The command line loads every family, so a family may not load Triton or torch."""
    code = "import sys, kernels_triton; print([m for m in ('triton', 'torch', 'elftools') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_step_is_plain_data() -> None:
    artifact = build(SM_90, "1x512x64")
    assert isinstance(artifact.steps[0], Step)
    assert all(isinstance(value, int | str) for value in artifact.resources.values())
