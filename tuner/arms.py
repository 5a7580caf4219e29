"""The contract between the framework and every family of kernels: arms, artifacts, launches.

A family gives `build`, which is pure and needs no GPU, and `bind`, which runs in the worker. An `Artifact` says in
plain values how its code is launched, so one loader a device serves all families that compile code.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from tuner.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from tuner.space import Space

Value = int | str | bool
Config = Mapping[str, Value]
Role = Literal["candidate", "baseline", "ceiling"]


@dataclass(frozen=True)
class Target:
    """What code is compiled for. Limits are those of one workgroup.

    Attributes:
        backend: `cuda`, `hip` (AMD) or `host`.
        arch: `sm_90`, `gfx1100`, … or the host's machine name.
        warp: Threads in a warp (wavefront).
        units: SMs, CUs or CPU cores.
        max_threads: Threads in a workgroup at most.
        shared_bytes: Shared memory (LDS) of a workgroup at most.
    """

    backend: Literal["cuda", "hip", "host"]
    arch: str
    warp: int
    units: int
    max_threads: int = 1024
    shared_bytes: int = 65536


@dataclass(frozen=True)
class Arm:
    """One implementation with every parameter fixed."""

    family: str
    kernel: str
    items: tuple[tuple[str, Value], ...] = ()

    @classmethod
    def of(cls, family: str, kernel: str, config: Config | None = None) -> Arm:
        """Make an arm from a config mapping; the order of its keys does not matter."""
        return cls(family, kernel, tuple(sorted((config or {}).items())))

    @property
    def config(self) -> dict[str, Value]:
        """The parameters as a mapping."""
        return dict(self.items)

    @property
    def key(self) -> str:
        """Twelve hex digits that stand for family, kernel and config."""
        text = json.dumps([self.family, self.kernel, self.config], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.items]
        return " ".join([f"{self.family}/{self.kernel}", *parts])


@dataclass(frozen=True)
class Pointer:
    """A kernel argument that is an address: `activation`, `output`, an operand's or a workspace's name."""

    name: str


@dataclass(frozen=True)
class Scalar:
    """A kernel argument passed by value: `i32`, `i64`, `f32`, or `ptr` for a literal (usually null) address."""

    ctype: Literal["i32", "i64", "f32", "ptr"]
    value: int | float


@dataclass(frozen=True)
class Workspace:
    """Device memory that an arm needs: zeroed once when bound, and left zeroed by each launch if `zeroed`.

    The framework keeps one copy a slot, so a workspace rotates with the weights.
    """

    name: str
    nbytes: int
    zeroed: bool = False


@dataclass(frozen=True)
class Step:
    """One kernel launch. `dependent` asks for programmatic dependent launch behind the one before it."""

    entry: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[Pointer | Scalar, ...]
    shared_bytes: int = 0
    dependent: bool = False


@dataclass(frozen=True)
class Artifact:
    """What `build` gives: picklable, needs no device.

    Attributes:
        arm: The arm that this is the code of.
        problem: The problem it was built for.
        target: The target it was built for.
        code: cubin, code object or shared library; empty for library arms.
        code_hash: SHA-256 of the code sections, not of debug information; equal code is measured once.
        source_hash: SHA-256 of the kernel source it came from.
        steps: The launches that make one operation, in order; empty for library arms.
        workspaces: Memory that the steps name beside operands, activation and output.
        resources: Figures found in the compiled code: `registers`, `spill_bytes`, `shared_bytes`, `load_bytes`, ….
    """

    arm: Arm
    problem: Problem
    target: Target
    code: bytes
    code_hash: str
    source_hash: str
    steps: tuple[Step, ...] = ()
    workspaces: tuple[Workspace, ...] = ()
    resources: Mapping[str, Value] = field(default_factory=dict)


class Slots(Protocol):
    """The rotation as an arm sees it: launch i reads the operands of slot `i % count`."""

    @property
    def count(self) -> int:
        """Number of slots."""

    def operand(self, i: int, name: str) -> Tensor:
        """The operand tensor that launch i reads."""


class Tape(Protocol):
    """Where launch i finds its activations and leaves its output."""

    def activation(self, i: int) -> Tensor:
        """Activations of launch i, (M, K)."""

    def output(self, i: int) -> Tensor:
        """Output of launch i, (M, N)."""


class Module(Protocol):
    """Loaded code."""

    def launch(self, step: Step, values: Sequence[tuple[str, int | float]]) -> None:
        """Enqueue one step on the current stream; values are (`ptr`|`i32`|`i64`|`f32`, value) in argument order."""

    def attributes(self, entry: str) -> dict[str, Value]:
        """What the driver says of a loaded kernel: registers, local and shared bytes."""


class Loader(Protocol):
    """The part of a device that families may use."""

    def load(self, artifact: Artifact) -> Module:
        """Load compiled code."""

    def zeros(self, nbytes: int) -> Tensor:
        """Zeroed device memory as an int8 tensor, aligned to 256 bytes."""


class Launch(Protocol):
    """A bound arm. Calling it with i enqueues operation i; it allocates nothing that a graph cannot capture."""

    def __call__(self, i: int) -> object:
        """Enqueue operation i."""

    def receipt(self) -> dict[str, Value]:
        """What really runs, read back from the running system."""


class Family(Protocol):
    """Where arms come from."""

    name: str
    role: Role

    def missing(self, target: Target) -> str | None:
        """Why this family has no arms for the target, with the line that installs what is missing; else None."""

    def spaces(self, problem: Problem, target: Target) -> tuple[Space, ...]:
        """The search spaces, one a kernel; empty for families whose arms are all fixed."""

    def fixed(self, problem: Problem, target: Target) -> tuple[Arm, ...]:
        """Arms that are always measured, first: defaults, library forms, the ceiling sweep."""

    def build(self, problem: Problem, arm: Arm, target: Target) -> Artifact:
        """Compile one arm. Pure; runs in the compile pool; raises `ArmCompileError` or `ArmConstraintError`."""

    def bind(self, artifact: Artifact, slots: Slots, tape: Tape, loader: Loader) -> Launch:
        """Load and bind in the worker; compiles nothing."""


class CodeLaunch:
    """The launch of any artifact that carries code: resolves named arguments and calls the loaded module."""

    def __init__(self, artifact: Artifact, slots: Slots, tape: Tape, loader: Loader) -> None:
        """Load the code and allocate one copy of each workspace a slot."""
        self._artifact = artifact
        self._slots = slots
        self._tape = tape
        self._module = loader.load(artifact)
        self._stride = {w.name: -(-w.nbytes // 256) * 256 for w in artifact.workspaces}
        self._memory = {name: loader.zeros(stride * slots.count) for name, stride in self._stride.items()}

    def __call__(self, i: int) -> None:
        """Enqueue every step of operation i."""
        for step in self._artifact.steps:
            values: list[tuple[str, int | float]] = []
            for arg in step.args:
                if isinstance(arg, Scalar):
                    values.append((arg.ctype, arg.value))
                else:
                    values.append(("ptr", self._address(arg.name, i)))
            self._module.launch(step, values)

    def _address(self, name: str, i: int) -> int:
        if name == "activation":
            return self._tape.activation(i).data_ptr()
        if name == "output":
            return self._tape.output(i).data_ptr()
        if name in self._memory:
            return self._memory[name].data_ptr() + (i % self._slots.count) * self._stride[name]
        return self._slots.operand(i, name).data_ptr()

    def receipt(self) -> dict[str, Value]:
        """Kernel names, launch geometry, driver attributes, static resources and the code hash."""
        facts: dict[str, Value] = dict(self._artifact.resources)
        for step in self._artifact.steps[:1]:
            facts.update(self._module.attributes(step.entry))
        facts["kernel"] = "+".join(step.entry for step in self._artifact.steps)
        facts["grid"] = "+".join("x".join(map(str, step.grid)) for step in self._artifact.steps)
        facts["block"] = "+".join("x".join(map(str, step.block)) for step in self._artifact.steps)
        facts["dependent"] = any(step.dependent for step in self._artifact.steps)
        facts["code_hash"] = self._artifact.code_hash[:16]
        facts["compiles_in_worker"] = 0
        return facts
