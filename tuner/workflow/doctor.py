"""`tune doctor`: what this machine has, what is missing, how a shape would be timed, and whether the timer is sound."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from tuner import devices, registry
from tuner.devices.base import DeviceInfo
from tuner.errors import ColdtuneError, MachineError
from tuner.instrument.rotation import plan
from tuner.problem import Problem, Shape
from tuner.store import versions
from tuner.workflow.tune import device_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tuner.instrument.selfcheck import Check

Checks = Callable[[DeviceInfo, Problem], Sequence["Check"]]
_CLANGS = ("/opt/rocm/llvm/bin/clang", "clang", "clang-21", "clang-20", "clang-19")
_INSTALL = {
    "clang": "for AMD: ROCm's own, or a distribution's: apt install clang-19 lld-19",
    "g++": "for host: apt install g++",
    "NVRTC": "for NVIDIA: pip install 'coldtune[cuda]'",
    "Triton": "comes with torch on AMD; for NVIDIA: pip install 'coldtune[cuda]'",
}


def doctor(spec: str | None, shape: str, checks: Checks | None = None) -> Iterator[RenderableType]:
    """Everything that a person needs to know before the first run, as soon as it is known.

    Args:
        spec: As for `--device`.
        shape: Shape to plan for.
        checks: Gives the figures of the self-check; None measures on the device.

    Raises:
        UsageError: The shape or the device is wrong.
        MachineError: The device cannot be used.
    """
    problem = Problem.of(Shape.parse(shape), "bf16")
    found = devices.survey()
    info = devices.choose(spec)
    yield device_line(info, asked=spec is not None, replay=False)
    yield _devices(found.devices)
    yield from (f"passed over: {line}" for line in found.skipped)
    yield _compilers()
    yield "versions: " + ", ".join(f"{name} {value}" for name, value in versions().items())
    yield from _families(info)
    yield from _rotation(info, problem)
    yield _checks(info, problem, checks or _measured)


def _devices(found: Sequence[DeviceInfo]) -> RenderableType:
    from rich.table import Table

    table = Table("device", "name", "arch", "units", "memory", "last-level cache", "read from", "peak")
    for info in found:
        label = info.kind if info.kind == "host" else f"{info.kind}:{info.index}"
        peak = f"{info.peak_bytes_per_s / 1e12:.2f} TB/s" if info.peak_bytes_per_s else "not told"
        memory, llc = f"{info.memory_bytes / 1e9:,.1f} GB", f"{info.llc_bytes / 1e6:,.1f} MB"
        table.add_row(label, info.name, info.arch, str(info.units), memory, llc, info.llc_source, peak)
    return table


def _compilers() -> RenderableType:
    from rich.table import Table

    table = Table("compiler", "found")
    for name, text in compilers().items():
        table.add_row(name, text or f"missing; {_INSTALL[name]}")
    return table


def compilers() -> dict[str, str]:
    """Compilers by name, with what was found; empty text where one is missing."""
    return {
        "clang": _tool(_CLANGS),
        "g++": _tool(("g++", "c++")),
        "NVRTC": _package("cuda-core", "cuda.core"),
        "Triton": _package("triton", "triton"),
    }


def _tool(names: Sequence[str]) -> str:
    path = next((found for name in names if (found := shutil.which(name))), None)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path}, but it does not answer: {error}"
    return f"{path}: {(done.stdout or done.stderr).strip().splitlines()[0]}" if done.returncode == 0 else ""


def _package(name: str, module: str) -> str:
    try:
        here = find_spec(module) is not None
    except ModuleNotFoundError:
        here = False
    if not here:
        return ""
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"{name}, version unknown"


def _families(info: DeviceInfo) -> list[RenderableType]:
    usable, left_out = registry.available(devices.target_of(info))
    lines: list[RenderableType] = ["families: " + (", ".join(sorted(usable)) or "none")]
    return lines + [f"left out: {name}: {reason}" for name, reason in sorted(left_out.items())]


def _rotation(info: DeviceInfo, problem: Problem) -> list[RenderableType]:
    operands = problem.format.operands(problem.shape, problem.format.layouts[0])
    try:
        ring = plan(operands, info.llc_bytes, info.memory_bytes)
    except MachineError as error:
        return [f"rotation for {problem}: {error}"]
    factor = ring.distinct_bytes / max(1, info.llc_bytes)
    text = (
        f"rotation for {problem}: {ring.slots} slots of {ring.slot_bytes / 1e6:,.2f} MB = "
        f"{ring.distinct_bytes / 1e6:,.1f} MB, {factor:.1f} times the last-level cache, if all memory is free"
    )
    note = "; latency-bound: launch cost decides more than memory" if problem.latency_bound else ""
    return [text + (f"; {ring.note}" if ring.note else "") + note]


def _measured(info: DeviceInfo, problem: Problem) -> Sequence[Check]:
    from tuner.workflow.checks import self_checks

    return self_checks(info, problem)


def _checks(info: DeviceInfo, problem: Problem, checks: Checks) -> RenderableType:
    from rich.table import Table

    try:
        found = checks(info, problem)
    except ColdtuneError as error:
        return f"self-check: could not be made: {error}"
    table = Table("self-check", "verdict", "figure", "meaning")
    for check in found:
        table.add_row(check.name, check.verdict, check.figure, check.meaning)
    return table
