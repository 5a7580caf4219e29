"""The `hip` and `ceiling` families: one HIP source an operation, for AMD, NVIDIA and the host.

Importing this imports neither torch nor CUDA and runs no compiler.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from search_spaces import skinny_gemm as operation
from tuner.arms import Arm, Artifact, CodeLaunch, Launch, Loader, Role, Slots, Tape, Target, Value
from tuner.problem import Problem

if TYPE_CHECKING:
    from tuner.space import Space

__all__ = ["Ceiling", "Hip"]

# (block, loads in flight) of the flat reads, (block, loads in flight, workgroups a unit) of the grid-stride ones.
_FLAT = ((128, 8), (256, 2), (256, 4), (256, 8), (512, 2), (512, 4), (512, 8))
_STRIDE = ((256, 4, 8), (512, 4, 4), (1024, 2, 2))
# On the host one thread a workgroup reads a long chunk: (loads in flight, passes).
_HOST = ((16, 256), (32, 512), (8, 4096))


class _Compiled:
    """What both families share: compilers, and code that is bound as it is."""

    def missing(self, target: Target) -> str | None:
        """Which compiler is missing, with the line that installs it; None where all is there."""
        from kernels_hip import toolchain

        if target.backend == "cuda":
            return None if _importable("cuda.bindings") else "cuda-core is not installed; pip install 'cuda-core[cu13]'"
        if target.backend == "hip":
            return None if toolchain.clang_for_amd() else f"no clang for AMD GPUs; {toolchain.AMD_INSTALL}"
        return None if toolchain.host_compiler() else f"no C++ compiler; {toolchain.HOST_INSTALL}"

    def build(self, problem: Problem, arm: Arm, target: Target) -> Artifact:
        """Compile an arm; see `kernels_hip.build.build`."""
        from kernels_hip.build import build

        return build(problem, arm, target)

    def bind(self, artifact: Artifact, slots: Slots, tape: Tape, loader: Loader) -> Launch:
        """Load compiled code and bind it to memory."""
        return CodeLaunch(artifact, slots, tape, loader)


class Hip(_Compiled):
    """Hand-written HIP kernels."""

    name = "hip"
    role: Role = "candidate"

    def spaces(self, problem: Problem, target: Target) -> tuple[Space, ...]:
        """One space: the skinny product."""
        return (operation.space(self.name, problem, target),)

    def fixed(self, problem: Problem, target: Target) -> tuple[Arm, ...]:
        """The default arm, at M=1 its twin (the same config with m_spec off), and arms known to be good."""
        return operation.fixed(self.spaces(problem, target)[0])


class Ceiling(_Compiled):
    """Kernels that only read: what the memory of a device can give to any arm."""

    name = "ceiling"
    role: Role = "ceiling"

    def spaces(self, problem: Problem, target: Target) -> tuple[Space, ...]:
        """None: the sweep is fixed."""
        return ()

    def fixed(self, problem: Problem, target: Target) -> tuple[Arm, ...]:
        """The sweep: flat and grid-stride, block sizes, loads in flight, every launch form that an arm can use."""
        if target.backend == "host":
            return tuple(
                Arm.of(self.name, "read.flat", {"block": 1, "loads": loads, "passes": passes})
                for loads, passes in _HOST
            )
        plain = [Arm.of(self.name, "read.flat", {"block": block, "loads": loads}) for block, loads in _FLAT]
        plain += [
            Arm.of(self.name, "read.stride", {"block": block, "loads": loads, "groups": groups})
            for block, loads, groups in _STRIDE
        ]
        if not operation.has_dependent_launch(target):
            return tuple(plain)
        return (*plain, *(self._with(arm, {"pdl": True}) for arm in plain))

    def probe(self, problem: Problem, target: Target) -> dict[str, Arm]:
        """Arms of the self-check: a kernel that does nothing, and a plain read without cache hints."""
        return {"empty": Arm.of(self.name, "empty"), "read": self.fixed(problem, target)[0]}

    def _with(self, arm: Arm, more: dict[str, Value]) -> Arm:
        return Arm.of(arm.family, arm.kernel, {**arm.config, **more})


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        # The parent package is missing.
        return False
