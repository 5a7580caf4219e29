"""The `triton` family: hand-written Triton kernels. Importing this imports neither Triton nor torch."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from search_spaces import skinny_gemm as operation
from tuner.arms import Arm, Artifact, CodeLaunch, Launch, Loader, Role, Slots, Tape, Target
from tuner.problem import Problem

if TYPE_CHECKING:
    from tuner.space import Space

__all__ = ["Triton"]


class Triton:
    """Arms that Triton compiles. Its default, and at M=1 the default's general twin, are always measured."""

    name = "triton"
    role: Role = "candidate"

    def missing(self, target: Target) -> str | None:
        """Why there are no Triton arms for the target; None where there are."""
        if target.backend == "host":
            return "Triton arms cannot be timed on host: the interpreter is no kernel"
        if importlib.util.find_spec("triton") is None:
            if target.backend == "hip":
                return "Triton is not installed; it comes with PyTorch's own builds for ROCm: install one of those"
            return "Triton is not installed; install it with: pip install 'triton>=3.5'"
        return None

    def spaces(self, problem: Problem, target: Target) -> tuple[Space, ...]:
        """One space: the skinny product."""
        return (operation.space(self.name, problem, target),)

    def fixed(self, problem: Problem, target: Target) -> tuple[Arm, ...]:
        """The default arm, at M=1 its twin (the same config with m_spec off), and arms known to be good."""
        return operation.fixed(self.spaces(problem, target)[0])

    def build(self, problem: Problem, arm: Arm, target: Target) -> Artifact:
        """Compile an arm; see `kernels_triton.build.build`."""
        from kernels_triton.build import build

        return build(problem, arm, target)

    def bind(self, artifact: Artifact, slots: Slots, tape: Tape, loader: Loader) -> Launch:
        """Load compiled code and bind it to memory."""
        return CodeLaunch(artifact, slots, tape, loader)
