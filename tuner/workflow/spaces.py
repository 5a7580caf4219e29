"""`tune space`: what a search would walk through, for any architecture and without a GPU."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner import registry
from tuner.arms import Target
from tuner.devices import host, target_of
from tuner.devices.base import DeviceInfo
from tuner.errors import UsageError
from tuner.problem import Problem, Shape
from tuner.space import Space

if TYPE_CHECKING:
    from rich.console import RenderableType


def show(shape: str, weights: Sequence[str], arch: str, plugin: Path | None = None) -> list[RenderableType]:
    """Tables of every family's space for a shape.

    Raises:
        UsageError: Shape, format, architecture or plugin is wrong.
    """
    parsed = Shape.parse(shape)
    target = target_of_arch(arch)
    shown: list[RenderableType] = []
    for name in weights:
        problem = Problem.of(parsed, name)
        label = ", latency-bound" if problem.latency_bound else ""
        shown.append(f"space of {problem} on {target.arch}: {problem.weight_bytes / 1e6:,.2f} MB of weights{label}")
        for family in registry.families(None if plugin is None else str(plugin)).values():
            missing = family.missing(target)
            spaces = () if target.backend == "host" and missing else family.spaces(problem, target)
            fixed = len(family.fixed(problem, target)) if spaces or missing is None else 0
            why = f"{fixed} fixed arms, always measured first" if missing is None else f"not here: {missing}"
            shown.append(f"\n{family.name}: {why}")
            for space in spaces:
                shown.extend(_space(space))
    return shown


def target_of_arch(arch: str) -> Target:
    """What code for an architecture is compiled for, without such a device.

    Raises:
        UsageError: It is no architecture that coldtune knows the form of.
    """
    if arch == "host":
        return target_of(host.discover())
    if re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        return target_of(_info("cuda", arch, 32))
    if re.fullmatch(r"gfx[0-9a-f]{3,4}", arch):
        # gfx9 is CDNA (and Vega) with wavefronts of 64; RDNA kernels run in wavefronts of 32.
        return target_of(_info("rocm", arch, 64 if arch.startswith("gfx9") else 32))
    raise UsageError(f"--arch {arch!r} is unknown; write sm_90, sm_120, gfx1100, gfx942, … or host")


def _info(kind: str, arch: str, warp: int) -> DeviceInfo:
    return DeviceInfo(kind, 0, arch, arch, "", "", 0, warp, 0, "", 0)


def _space(space: Space) -> list[RenderableType]:
    from rich.table import Table

    table = Table("parameter", "values", "default", "meaning", title_justify="left")
    for parameter in space.parameters:
        values = ", ".join(str(value) for value in parameter.values)
        table.add_row(parameter.name, values, str(space.default[parameter.name]), parameter.meaning)
    pruned = space.pruned()
    left = space.size - pruned.total()
    lines: list[RenderableType] = [f"{space.family}/{space.kernel}", table]
    lines.append(f"  {space.size:,} configs; {pruned.total():,} pruned; {left:,} can run")
    lines += [f"  {count:>7,} pruned: {sentence}" for sentence, count in pruned.most_common()]
    return lines
