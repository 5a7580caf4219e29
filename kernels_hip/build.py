"""From an arm to an artifact: which kernel with which macros, how it is launched, and the compile itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kernels_hip import amd, elf, host, nvidia, source
from kernels_hip.source import Compiled, Kernel
from tuner.arms import Arm, Artifact, Pointer, Scalar, Step, Target, Value, Workspace
from tuner.errors import ArmConstraintError, UsageError
from tuner.problem import MAX_M, Problem

LOAD_BYTES = 16
_FORMS = {"read.flat": "read_flat", "read.stride": "read_stride"}


@dataclass(frozen=True)
class Plan:
    """What is compiled and how it is launched, all derived from problem, arm and target."""

    kernel: Kernel
    steps: tuple[Step, ...]
    workspaces: tuple[Workspace, ...] = ()
    shared_bytes: int = 0


def build(problem: Problem, arm: Arm, target: Target) -> Artifact:
    """Compile one arm. Pure: it needs no device and leaves no files.

    Raises:
        ArmCompileError: The compiler refused it; the message is its first error line.
        ArmConstraintError: It needs more shared memory than a workgroup of the target can have.
        ToolchainError: The compiler is missing; the message has the line that installs it.
        UsageError: There is no such kernel.
    """
    what = plan(problem, arm, target)
    _hold_shared(what.shared_bytes, target)
    compiled = _compile(what.kernel, target)
    _hold_shared(int(compiled.resources.get("shared_bytes", 0)), target)
    return Artifact(
        arm=arm,
        problem=problem,
        target=target,
        code=compiled.code,
        code_hash=elf.code_hash(compiled.code),
        source_hash=source.source_hash(what.kernel.file, target.backend),
        steps=what.steps,
        workspaces=what.workspaces,
        resources=compiled.resources,
    )


def plan(problem: Problem, arm: Arm, target: Target) -> Plan:
    """Translate an arm of either family into macros and launches.

    Raises:
        UsageError: There is no such kernel.
    """
    if arm.kernel == "skinny_gemm":
        return _skinny_gemm(problem, arm.config, target)
    if arm.kernel in _FORMS:
        return _read(problem, arm, target)
    if arm.kernel == "empty":
        threads = target.warp
        macros = {"WARP": target.warp, "THREADS": threads, "LOADS": 1, "PASSES": 1, "CACHE_STREAM": 0, "PDL": 0}
        step = Step("empty", (1, 1, 1), (threads, 1, 1), (Pointer("output"),))
        return Plan(Kernel("read.hip", "empty", macros), (step,))
    raise UsageError(f"unknown kernel {arm.kernel!r}; there are skinny_gemm, {', '.join(_FORMS)} and empty")


def _skinny_gemm(problem: Problem, config: Mapping[str, Value], target: Target) -> Plan:
    shape = problem.shape
    rows, warps, split_k = int(config["rows"]), int(config["warps"]), int(config["split_k"])
    m_spec, pdl = bool(config["m_spec"]), bool(config.get("pdl", False))
    # The twin of the M=1 kernel is what serves any M <= 8, and is told that there is one activation row.
    bound = not m_spec and shape.m == 1
    macros = {
        "WARP": target.warp,
        "K": shape.k,
        "N": shape.n,
        "M": MAX_M if bound else shape.m,
        "BOUND_M": int(bound),
        "M_SPEC": int(m_spec),
        "CPT": int(config["cpt"]),
        "ROWS": rows,
        "WARPS": warps,
        "SPLIT_K": split_k,
        "UNROLL": int(config["unroll"]),
        "CACHE_STREAM": int(config.get("cache") == "stream"),
        "PDL": int(pdl),
        "WAVES_PER_EU": int(config.get("waves_per_eu", 0)),
    }
    blocks = -(-shape.n // rows)
    args: list[Pointer | Scalar] = [Pointer("activation"), Pointer("weight"), Pointer("output")]
    workspaces: tuple[Workspace, ...] = ()
    if split_k > 1:
        workspaces = (
            Workspace("partials", 4 * split_k * shape.m * shape.n),
            Workspace("counters", 4 * blocks, zeroed=True),
        )
        args += [Pointer(workspace.name) for workspace in workspaces]
    if bound:
        args.append(Scalar("i32", shape.m))
    step = Step("skinny_gemm", (blocks, split_k, 1), (target.warp * warps, 1, 1), tuple(args), dependent=pdl)
    shared = table_bytes(rows * macros["M"], warps, split_k)
    return Plan(Kernel("skinny_gemm.hip", "skinny_gemm", macros), (step,), workspaces, shared)


def table_bytes(outputs: int, warps: int, split_k: int) -> int:
    """Shared memory of `skinny_gemm.hip`: one sum a warp for each output (a power of two of them), and a ticket."""
    table = 4 * warps * (1 << (outputs - 1).bit_length()) if warps > 1 else 0
    return table + (4 if split_k > 1 else 0)


def _read(problem: Problem, arm: Arm, target: Target) -> Plan:
    config = arm.config
    block, loads, passes = int(config["block"]), int(config["loads"]), int(config.get("passes", 1))
    pdl = bool(config.get("pdl", False))
    macros = {
        "WARP": target.warp,
        "THREADS": block,
        "LOADS": loads,
        "PASSES": passes,
        "CACHE_STREAM": int(config.get("cache") == "stream"),
        "PDL": int(pdl),
    }
    entry = _FORMS[arm.kernel]
    # Every operand is read: with several, one launch each.
    steps = []
    for operand in problem.format.operands(problem.shape, problem.format.layouts[0]):
        if arm.kernel == "read.flat":
            workgroups = max(1, -(-operand.nbytes // (block * loads * passes * LOAD_BYTES)))
        else:
            workgroups = int(config["groups"]) * target.units
        args = (
            Pointer(operand.name),
            Pointer("output"),
            Scalar("i64", operand.nbytes),
            Scalar("i32", workgroups),
        )
        steps.append(Step(entry, (workgroups, 1, 1), (block, 1, 1), args, dependent=pdl))
    return Plan(Kernel("read.hip", entry, macros), tuple(steps))


def _compile(kernel: Kernel, target: Target) -> Compiled:
    if target.backend == "hip":
        return amd.compile_kernel(kernel, target)
    if target.backend == "cuda":
        return nvidia.compile_kernel(kernel, target)
    return host.compile_kernel(kernel)


def _hold_shared(needed: int, target: Target) -> None:
    if needed > target.shared_bytes:
        name = "shared memory" if target.backend == "cuda" else "LDS"
        raise ArmConstraintError(
            f"out of {name}: needs {needed / 1024:g} KB of {target.shared_bytes / 1024:g} KB; lower rows or warps"
        )
