"""The HIP sources compiled for GPUs that are not here: resources, load widths, hashes, errors, missing tools."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from kernels_hip import Ceiling, Hip, amd, elf, nvidia, source, toolchain
from kernels_hip.build import build, plan, table_bytes
from kernels_hip.source import Kernel
from tuner.arms import Arm, Artifact, Pointer, Scalar, Target, Value
from tuner.errors import ArmCompileError, ArmConstraintError, ToolchainError
from tuner.problem import Problem, Shape

TARGETS = {
    "sm_90": Target("cuda", "sm_90", 32, 132, 1024, 232448),
    "gfx1100": Target("hip", "gfx1100", 32, 96),
    "gfx942": Target("hip", "gfx942", 64, 304),
    "gfx1030": Target("hip", "gfx1030", 32, 80),
}
HEADLINE = Problem(Shape.parse("1x4096x12288"), "bf16")


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> Target:
    chosen: Target = TARGETS[request.param]
    reason = Hip().missing(chosen)
    if reason:
        pytest.skip(reason)
    return chosen


def built(problem: Problem, target: Target, **config: Value) -> Artifact:
    default = Hip().fixed(problem, target)[0]
    return build(problem, Arm.of("hip", "skinny_gemm", {**default.config, **config}), target)


def test_the_default_and_its_twin_load_16_bytes_and_spill_nothing(target: Target) -> None:
    default, twin = (build(HEADLINE, arm, target) for arm in Hip().fixed(HEADLINE, target)[:2])
    for artifact in (default, twin):
        assert artifact.resources["load_bytes"] == 16
        assert artifact.resources["spill_bytes"] == 0
        assert 8 <= int(artifact.resources["registers"]) <= 64
        assert artifact.code[:4] == b"\x7fELF"
    # The general kernel really is another one, not the specialised code under another name.
    assert default.code_hash != twin.code_hash
    assert int(twin.resources["shared_bytes"]) > int(default.resources["shared_bytes"])
    assert twin.steps[0].args[-1] == Scalar("i32", 1)


def test_the_sums_of_eight_activation_rows_stay_in_registers(target: Target) -> None:
    eight = Problem(Shape.parse("8x4096x12288"), "bf16")
    assert built(eight, target, rows=4).resources["spill_bytes"] == 0


def test_unroll_decides_how_many_loads_are_in_flight(target: Target) -> None:
    # One warp goes over K=4096 in 16 passes or more: the compiler must not unroll them by itself.
    registers = [int(built(HEADLINE, target, warps=1, unroll=u).resources["registers"]) for u in (1, 4)]
    assert registers[0] + 8 <= registers[1]


def test_split_k_and_odd_sizes_compile_with_the_launch_that_they_need(target: Target) -> None:
    split = built(HEADLINE, target, split_k=4, rows=2)
    assert split.steps[0].grid == (6144, 4, 1)
    assert split.steps[0].args[3:] == (Pointer("partials"), Pointer("counters"))
    assert {w.name: (w.nbytes, w.zeroed) for w in split.workspaces} == {
        "partials": (4 * 4 * 12288, False),
        "counters": (4 * 6144, True),
    }
    odd = Problem(Shape.parse("3x4097x5"), "bf16")
    artifact = built(odd, target, rows=4)
    assert artifact.resources["load_bytes"] == 2 and artifact.steps[0].grid == (2, 1, 1)


@pytest.mark.parametrize("cpt", [1, 2, 4, 8, 16])
def test_the_load_width_found_in_the_code_is_the_one_asked_for(cpt: int) -> None:
    for name in ("sm_90", "gfx1100"):
        if Hip().missing(TARGETS[name]) is None:
            for cache in ("default", "stream"):
                artifact = built(HEADLINE, TARGETS[name], cpt=cpt, cache=cache)
                assert artifact.resources["load_bytes"] == min(16, 2 * cpt)


def test_shared_memory_found_is_the_shared_memory_foretold(target: Target) -> None:
    for rows, warps, split_k in ((1, 4, 1), (16, 8, 1), (2, 1, 1), (4, 4, 2)):
        artifact = built(HEADLINE, target, rows=rows, warps=warps, split_k=split_k)
        assert artifact.resources["shared_bytes"] == table_bytes(rows, warps, split_k)


def test_out_of_shared_memory_is_a_constraint_with_both_numbers() -> None:
    small = Target("hip", "gfx1100", 32, 96, 1024, 4096)
    wide = Problem(Shape.parse("8x4096x64"), "bf16")
    arm = Arm.of("hip", "skinny_gemm", {**Hip().fixed(wide, small)[0].config, "rows": 16, "warps": 16})
    with pytest.raises(ArmConstraintError, match="out of LDS: needs 8 KB of 4 KB"):
        build(wide, arm, small)


def test_equal_code_has_an_equal_hash_in_any_folder(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = built(HEADLINE, target)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    again = built(HEADLINE, target)
    assert first.code_hash == again.code_hash and first.source_hash == again.source_hash
    assert os.listdir(tmp_path) == [], "a compile leaves no files"
    other = built(HEADLINE, target, rows=2)
    assert other.code_hash != first.code_hash and other.source_hash == first.source_hash


def test_pdl_stands_in_the_code_and_in_the_launch() -> None:
    target = TARGETS["sm_90"]
    if Hip().missing(target):
        pytest.skip("no NVRTC")
    plain, dependent = built(HEADLINE, target, pdl=False), built(HEADLINE, target, pdl=True)
    assert not plain.steps[0].dependent and dependent.steps[0].dependent
    assert plain.code_hash != dependent.code_hash


def test_waves_per_eu_reaches_the_amd_compiler() -> None:
    target = TARGETS["gfx942"]
    if Hip().missing(target):
        pytest.skip("no clang for AMD")
    free, two = built(HEADLINE, target, rows=8, waves_per_eu=0), built(HEADLINE, target, rows=8, waves_per_eu=2)
    assert int(two.resources["occupancy"]) <= int(free.resources["occupancy"])
    assert free.code_hash != two.code_hash


def test_every_ceiling_compiles_and_reads_16_bytes_at_once(target: Target) -> None:
    family = Ceiling()
    arms = family.fixed(HEADLINE, target)
    assert family.spaces(HEADLINE, target) == () and 10 <= len(arms) <= 24
    assert {arm.kernel for arm in arms} == {"read.flat", "read.stride"}
    dependent = [arm for arm in arms if arm.config.get("pdl")]
    assert bool(dependent) == (target.backend == "cuda")
    for arm in (arms[0], arms[-1]):
        artifact = build(HEADLINE, arm, target)
        assert artifact.resources["load_bytes"] == 16 and artifact.resources["spill_bytes"] == 0
    empty = build(HEADLINE, family.probe(HEADLINE, target)["empty"], target)
    assert empty.resources["load_bytes"] == 0 and empty.steps[0].grid == (1, 1, 1)


def test_ceilings_read_exactly_the_bytes_of_the_problem() -> None:
    for name, target in TARGETS.items():
        for arm in Ceiling().fixed(HEADLINE, target):
            (step,) = plan(HEADLINE, arm, target).steps
            assert step.args[2] == Scalar("i64", 2 * 4096 * 12288), name
            assert step.args[3] == Scalar("i32", step.grid[0])
            if arm.kernel == "read.flat":
                chunk = 16 * int(arm.config["block"]) * int(arm.config["loads"])
                assert (step.grid[0] - 1) * chunk < 2 * 4096 * 12288 <= step.grid[0] * chunk


@pytest.mark.parametrize("name", ["sm_90", "gfx1100"])
def test_a_compile_error_is_the_first_error_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = TARGETS[name]
    if Hip().missing(target):
        pytest.skip("no compiler")
    monkeypatch.setattr(
        source, "_read", lambda file: "\n__global__ void k() { return nothing; }\n" if file == "x" else ""
    )
    compiler = nvidia.compile_kernel if name == "sm_90" else amd.compile_kernel
    with pytest.raises(ArmCompileError) as caught:
        compiler(Kernel("x", "k", {"WARP": 32}), target)
    assert str(caught.value).startswith("x") and "error" in str(caught.value)


def test_an_unknown_architecture_is_a_compile_error(target: Target) -> None:
    unknown = Target(target.backend, "sm_13" if target.backend == "cuda" else "gfx1", 32, 1)
    with pytest.raises(ArmCompileError):
        built(HEADLINE, unknown, pdl=False, cache="default", waves_per_eu=0)


def test_what_is_missing_is_named_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "clang_for_amd", lambda: None)
    monkeypatch.setattr(toolchain, "host_compiler", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    host = Target("host", "any", 32, 2)
    assert "apt-get install clang-19 lld-19" in str(Hip().missing(TARGETS["gfx1100"]))
    assert "apt-get install g++" in str(Ceiling().missing(host))
    assert "pip install 'cuda-core[cu13]'" in str(Hip().missing(TARGETS["sm_90"]))
    arm = Hip().fixed(HEADLINE, host)[0]
    with pytest.raises(ToolchainError, match=r"apt-get install g\+\+"):
        build(HEADLINE, arm, host)


def test_figures_are_read_from_the_words_of_the_compilers() -> None:
    log = (
        "ptxas info    : Compiling entry function 'other' for 'sm_90'\nptxas info    : Used 99 registers\n"
        "ptxas info    : Compiling entry function 'k' for 'sm_90'\nptxas info    : Function properties for k\n"
        "    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n"
        "ptxas info    : Used 40 registers, used 1 barriers, 640 bytes smem\n"
    )
    assert nvidia.log_resources(log, "k") == {"registers": 40, "shared_bytes": 640, "spill_bytes": 24}
    said = (
        "remark: f:1:0: Function Name: j [-Rpass]\nremark: f:1:0:     VGPRs: 9 [-Rpass]\n"
        "remark: f:1:0: Function Name: k [-Rpass]\nremark: f:1:0:     TotalSGPRs: 30 [-Rpass]\n"
        "remark: f:1:0:     VGPRs: 17 [-Rpass]\nremark: f:1:0:     ScratchSize [bytes/lane]: 12 [-Rpass]\n"
        "remark: f:1:0:     SGPRs Spill: 3 [-Rpass]\nremark: f:1:0:     VGPRs Spill: 4 [-Rpass]\n"
        "remark: f:1:0:     LDS Size [bytes/block]: 64 [-Rpass]\n"
    )
    found = amd.remarks(said, "k")
    assert found["registers"] == 17 and found["spill_bytes"] == 12 and found["shared_bytes"] == 64
    assert found["spilled_registers"] == 4 and found["spilled_scalar_registers"] == 3
    assert found["scalar_registers"] == 30
    ptx = ".entry k(\n ld.param.u64 %rd1;\n ld.global.nc.v2.u32 {%r1, %r2}, [%rd1];\n ld.global.u16 %r3, [%rd2];\n}\n"
    assert nvidia.widest_load_bytes(ptx, "k") == 8
    assembly = "\nj:\n\tglobal_load_b128 v[0:3], v0\n\ts_endpgm\n\nk:\n\tglobal_load_dwordx2 v[0:1], v0\n\ts_endpgm\n"
    assert amd.widest_load_bytes(assembly, "k") == 8


def test_the_registers_in_a_cubin_are_those_that_ptxas_names(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TARGETS["sm_90"]
    if Hip().missing(target):
        pytest.skip("no NVRTC")
    logs: dict[str, str] = {}

    def keep(log: str, entry: str) -> dict[str, Value]:
        logs["log"] = log
        return {}

    monkeypatch.setattr(nvidia, "log_resources", keep)
    for arm in (*Hip().fixed(HEADLINE, target), *Ceiling().fixed(HEADLINE, target)[-1:]):
        logs.clear()
        found = build(HEADLINE, arm, target).resources
        part = logs["log"].split(f"entry function '{plan(HEADLINE, arm, target).kernel.entry}'")[1]
        assert f"Used {found['registers']} registers" in part and found["spill_bytes"] == 0


def test_the_hash_covers_code_and_constants_only(target: Target) -> None:
    code = built(HEADLINE, target).code
    noted = bytearray(code)
    # The last byte of the ELF identification is padding, not code.
    noted[15] ^= 1
    assert elf.code_hash(bytes(noted)) == elf.code_hash(code)
    text = next(s for s in ELFFile(io.BytesIO(code)).iter_sections() if s.name.startswith(".text"))
    changed = bytearray(code)
    changed[text["sh_offset"]] ^= 1
    assert elf.code_hash(bytes(changed)) != elf.code_hash(code)
