"""From a config to an artifact: compile a kernel of `skinny_gemm.py` without a GPU, and say how it is launched."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels_triton import binary
from search_spaces.skinny_gemm import block_k
from tuner.arms import Arm, Artifact, Pointer, Scalar, Step, Target, Value, Workspace
from tuner.errors import ArmCompileError, ArmConstraintError
from tuner.problem import MAX_M, Problem

VECTOR_BYTES = 16
INT32_BYTES = 2**31
_POINTERS = {"activation": "*bf16", "weight": "*bf16", "output": "*bf16", "partials": "*fp32", "counters": "*i32"}
# Places on the tape follow one another, so an output is aligned to its elements and no further.
_UNALIGNED = frozenset({"output"})
_SOURCE = Path(__file__).with_name("skinny_gemm.py")


@dataclass(frozen=True)
class Plan:
    """What is compiled and how it is launched, all derived from problem, config and target.

    Attributes:
        kernel: Name of the kernel function.
        constants: Its compile-time arguments.
        scalars: Its run-time scalars, by name: Triton's type and the value.
        grid: Programs: row blocks, parts of K.
        workspaces: Memory beside operands, activation and output.
        options: Triton's compile options.
    """

    kernel: str
    constants: dict[str, Value]
    scalars: dict[str, tuple[str, int]]
    grid: tuple[int, int, int]
    workspaces: tuple[Workspace, ...]
    options: dict[str, Value]


def plan(problem: Problem, config: Mapping[str, Value], target: Target) -> Plan:
    """Translate a config of `search_spaces.skinny_gemm` for the kernels here."""
    shape = problem.shape
    rows, warps, split_k = int(config["rows"]), int(config["warps"]), int(config["split_k"])
    block = block_k(config, target.warp)
    stages = int(config["num_stages"])
    stream = config.get("cache") == "stream"
    # A thread sums the weights that one load brings it: what its share of the tile and the alignment of a row allow.
    share = max(1, rows * block // (warps * target.warp))
    vector = min(8, share, shape.k & -shape.k)
    constants: dict[str, Value] = {
        "K": shape.k,
        "N": shape.n,
        "ROWS": rows,
        "BLOCK_K": block,
        "SHARE": share,
        "VECTOR": vector,
        "SPLIT_K": split_k,
        "EXCHANGE": target.backend == "hip",
        "STAGES": stages,
        # NVIDIA's compiler takes the one hint, AMD's the other.
        "EVICT": "evict_first" if stream and target.backend == "cuda" else "",
        "MODIFIER": _read_once_modifier() if stream and target.backend == "hip" else "",
        "PDL": bool(config.get("pdl", False)),
    }
    scalars: dict[str, tuple[str, int]] = {}
    if not config["m_spec"]:
        columns = matrix_columns(problem, config, target)
        constants |= {"WARPS": warps, "MATRIX_UNIT": columns > 0}
        if shape.m == 1:
            # The twin of the M=1 kernel: what serves any M <= 8, and is given one activation row.
            scalars["M"] = ("i32", 1)
            constants |= {"COLUMNS": columns or MAX_M, "BOUND_M": True}
        else:
            constants |= {"COLUMNS": columns or shape.m, "BOUND_M": False, "M": shape.m}
    blocks = -(-shape.n // rows)
    workspaces: tuple[Workspace, ...] = ()
    if split_k > 1:
        workspaces = (
            Workspace("partials", 4 * split_k * shape.m * shape.n),
            Workspace("counters", 4 * blocks, zeroed=True),
        )
    options: dict[str, Value] = {"num_warps": warps, "num_stages": stages}
    if target.backend == "hip":
        options["waves_per_eu"] = int(config.get("waves_per_eu", 0))
    kernel = "skinny_gemm_m1" if config["m_spec"] else "skinny_gemm"
    return Plan(kernel, constants, scalars, (blocks, split_k, 1), workspaces, options)


def matrix_columns(problem: Problem, config: Mapping[str, Value], target: Target) -> int:
    """Activation rows of the matrix instruction that the general kernel uses, or 0 where it uses none.

    One instruction multiplies 16 rows of W by 8 (NVIDIA) or 16 (AMD) activation rows, so it is used with 16 rows. Two
    activation rows are cheaper without it, and the choice of `rows` lets a search compare both forms for more.
    """
    general = MAX_M if problem.shape.m == 1 else problem.shape.m
    if int(config["rows"]) != 16 or general <= 2:
        return 0
    if target.backend == "cuda":
        return 8 if _capability(target) >= 80 else 0
    return 16 if re.match(r"gfx(908|90a|94|95|11|12)", target.arch) else 0


def _read_once_modifier() -> str:
    """The strongest hint "read once" of `tl.load`: `.cs` since Triton 3.8."""
    import triton

    major, minor = (int(part) for part in triton.__version__.split(".")[:2])
    return ".cs" if (major, minor) >= (3, 8) else ".cg"


def _capability(target: Target) -> int:
    return int(target.arch.removeprefix("sm_").rstrip("af"))


def build(problem: Problem, arm: Arm, target: Target) -> Artifact:
    """Compile one arm.

    Raises:
        ArmCompileError: Triton or the assembler refuses it.
        ArmConstraintError: It needs more shared memory than a workgroup of the target can have.
    """
    what = plan(problem, arm.config, target)
    compiled = _compile(what, problem, target)
    metadata = compiled.metadata
    if metadata.shared > target.shared_bytes:
        name = "shared memory" if target.backend == "cuda" else "LDS"
        raise ArmConstraintError(
            f"out of {name}: needs {_kib(metadata.shared)} KB of {_kib(target.shared_bytes)} KB; "
            "lower rows, cpt, unroll, warps or num_stages"
        )
    # Triton 3.6 says this for NVIDIA only.
    if getattr(metadata, "global_scratch_size", 0) or getattr(metadata, "profile_scratch_size", 0):
        raise ArmCompileError("the compiled kernel asks for scratch memory in DRAM, which no launch here gives")
    backend = "ptx" if target.backend == "cuda" else "amdgcn"
    code: bytes = compiled.asm["cubin" if target.backend == "cuda" else "hsaco"]
    step = Step(
        entry=metadata.name,
        grid=what.grid,
        block=(target.warp * int(what.options["num_warps"]), 1, 1),
        args=_arguments(what, compiled.asm[backend], metadata.name, target),
        shared_bytes=metadata.shared,
        dependent=bool(what.constants["PDL"]),
    )
    return Artifact(
        arm=arm,
        problem=problem,
        target=target,
        code=code,
        code_hash=binary.code_hash(code, step),
        source_hash=hashlib.sha256(_SOURCE.read_bytes()).hexdigest(),
        steps=(step,),
        workspaces=what.workspaces,
        resources=_resources(compiled.asm[backend], code, step, target),
    )


def _compile(what: Plan, problem: Problem, target: Target) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels_triton import skinny_gemm

    fn = getattr(skinny_gemm, what.kernel)
    signature, constants, attrs = {}, dict(what.constants), {}
    for index, name in enumerate(fn.arg_names):
        if name in what.scalars:
            signature[name] = what.scalars[name][0]
        elif name in _POINTERS and (what.workspaces or name not in ("partials", "counters")):
            signature[name] = _POINTERS[name]
            attrs[(index,)] = _hints(name, problem, target)
        else:
            signature[name] = "constexpr"
            constants.setdefault(name, None)  # type: ignore[arg-type]
    arch: int | str = target.arch
    if target.backend == "cuda":
        arch = _capability(target)
    try:
        return triton.compile(
            ASTSource(fn, signature, constants, attrs),
            target=GPUTarget(target.backend, arch, target.warp),
            options=dict(what.options),
        )
    except Exception as error:  # Triton has no common base: assertions, LLVM's RuntimeError, ptxas errors, its own.
        raise ArmCompileError(first_useful_line(error)) from error


def _hints(name: str, problem: Problem, target: Target) -> list[list[object]]:
    """What Triton may take for granted of a pointer: its alignment, and that 32-bit offsets reach everything."""
    hints: list[list[object]] = []
    if name not in _UNALIGNED:
        hints.append(["tt.divisibility", VECTOR_BYTES])
    if target.backend == "hip" and name in ("activation", "weight") and problem.weight_bytes < INT32_BYTES:
        hints.append(["tt.pointer_range", 32])
    return hints


def _arguments(what: Plan, text: str, entry: str, target: Target) -> tuple[Pointer | Scalar, ...]:
    """The launch arguments, in the order of the compiled kernel.

    Triton drops compile-time arguments, keeps the rest in order and adds pointers to scratch memory behind them, two in
    the versions known. How many is counted in the compiled code. They are null, for no kernel here uses that memory.
    """
    from kernels_triton import skinny_gemm

    args: list[Pointer | Scalar] = []
    for name in getattr(skinny_gemm, what.kernel).arg_names:
        if name in what.scalars:
            args.append(Scalar("i32", what.scalars[name][1]))
        elif name in _POINTERS and (what.workspaces or name not in ("partials", "counters")):
            args.append(Pointer(name))
    found = binary.parameters(text, entry, target.backend)
    widths = [4 if isinstance(arg, Scalar) else 8 for arg in args]
    hidden = found[len(args) :]
    if found[: len(args)] != widths or any(width != 8 for width in hidden):
        raise ArmCompileError(
            f"the compiled kernel takes arguments of {found} bytes, the launch would give {widths} and null pointers; "
            "this Triton version is not known to Coldtune, install one from 3.5 to 3.8"
        )
    return (*args, *(Scalar("ptr", 0) for _ in hidden))


def _resources(text: str, code: bytes, step: Step, target: Target) -> dict[str, Value]:
    import triton

    found: dict[str, Value] = {"shared_bytes": step.shared_bytes, "triton": triton.__version__}
    if target.backend == "cuda":
        found |= binary.cubin_resources(code, step.entry)
        load_bytes = binary.ptx_load_bytes(text, step.entry, argument=1)
    else:
        found |= binary.amdgcn_resources(text)
        load_bytes = binary.amdgcn_load_bytes(text, _SOURCE.name, _weight_lines())
    if load_bytes:
        found["load_bytes"] = load_bytes
    return found


def _weight_lines() -> range:
    """Source lines of the function that reads weights."""
    from kernels_triton import skinny_gemm

    fn = skinny_gemm._weights.fn
    first = fn.__code__.co_firstlineno
    last = max(line for _, _, line in fn.__code__.co_lines() if line is not None)
    return range(first, last + 1)


def first_useful_line(error: BaseException) -> str:
    """The line of a compiler's message that says what is wrong."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    lines = [line.strip() for line in str(root).splitlines() if line.strip()]
    if not lines:
        return type(root).__name__
    named = [line for line in lines if re.search(r"\b(error|fatal)\b", line, flags=re.IGNORECASE)]
    # Triton's own errors quote the source first and end with the reason.
    line = named[0] if named else lines[-1]
    return f"{type(root).__name__}: {line}"[:300]


def _kib(nbytes: int) -> str:
    return f"{nbytes / 1024:.1f}".removesuffix(".0")
