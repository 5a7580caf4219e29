"""Using an exported config: `tuner.load("best.json")` gives `.pack(weight)`, which gives a callable.

A config fits or it does not. HIT: shape, device, versions and kernel source are those of the confirmation, so the tuned
arm runs. MISS: another shape or device. STALE: the same, but the kernel source, its code, torch, Triton or the driver
changed since. On MISS and STALE torch computes the product, with the reason logged once; a near match is a MISS.

Configs may come from anybody: the file is limited and checked, and only an arm that lies in this installation's own
space is ever built. A config names no code; the plugin of a plugin's arm must be given by the caller.
"""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tuner import registry
from tuner.arms import Arm, Artifact, Family, Launch, Target
from tuner.errors import ColdtuneError, UsageError
from tuner.problem import Problem, Shape
from tuner.store import Best, read_json, validate, versions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch import dtype as torch_dtype

    from tuner.devices.base import Device, DeviceInfo

LIMIT_BYTES = 2**20
ALIGN = 16
# Versions that change neither a kernel nor its speed.
_INDIFFERENT = ("coldtune", "python", "numpy", "optuna", "scipy")
_log = logging.getLogger("coldtune")
_said: set[tuple[str, str]] = set()


@dataclass(frozen=True)
class Answer:
    """Whether a config fits, and why not."""

    status: Literal["HIT", "MISS", "STALE"]
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.status} ({self.reason})" if self.reason else self.status


def load(path: str | Path, plugin: str | Path | None = None) -> Tuned:
    """Read an exported config.

    Args:
        path: A `best.json`.
        plugin: The plugin file that the arm's family comes from; it is run. The config alone runs no file.

    Raises:
        UsageError: There is no such file.
        RefusedError: The file is damaged, too large, or of a newer version.
    """
    file = Path(path)
    best = validate(Best, read_json(file, LIMIT_BYTES), str(file))
    return Tuned(best, str(file), None if plugin is None else str(plugin))


class Tuned:
    """A tuned product: packs weights of its shape, and multiplies by the one packed last."""

    def __init__(self, best: Best, path: str, plugin: str | None) -> None:
        """Take a checked config."""
        self.best = best
        self.problem = Problem.of(Shape.parse(best.shape), best.weights)
        self._path = path
        self._plugin = plugin
        self._packed: Packed | None = None

    def ask(self, weight: Tensor) -> Answer:
        """Whether the config fits a weight (N, K) where it lies; logged once."""
        return self._fit(weight)[0]

    def pack(self, weight: Tensor) -> Packed:
        """Pack a dense (N, K) weight, as `nn.Linear` holds it; the result is called with activations.

        A contiguous bf16 weight is used as it is, without a copy. The weight counts as constant: no gradient flows.
        """
        answer, device, artifact = self._fit(weight)
        if device is None or artifact is None:
            self._packed = Packed(self.problem, weight.detach(), answer, None)
        else:
            operands = self.problem.format.pack(weight, self.best.packing.layout)
            operands = {name: _aligned(tensor) for name, tensor in operands.items()}
            family = registry.families(self._plugin)[artifact.arm.family]
            bound = _Bound(family, artifact, operands, device)
            dense = weight.detach().to(_activation_dtype(self.problem))
            self._packed = Packed(self.problem, dense, answer, bound)
        return self._packed

    def __call__(self, x: Tensor) -> Tensor:
        """Multiply by the weight packed last.

        Raises:
            UsageError: None was packed.
        """
        if self._packed is None:
            raise UsageError("no weight is packed yet; call pack(weight) first, with weight (N, K)")
        return self._packed(x)

    def _fit(self, weight: Tensor) -> tuple[Answer, Device | None, Artifact | None]:
        answer, device, artifact = self._look(weight)
        key = (self._path, str(answer))
        if key not in _said:
            _said.add(key)
            level = logging.INFO if answer.status == "HIT" else logging.WARNING
            use = "" if answer.status == "HIT" else "; torch computes this product"
            _log.log(level, "%s: %s%s", self._path, answer, use)
        return answer, device, artifact

    def _look(self, weight: Tensor) -> tuple[Answer, Device | None, Artifact | None]:
        shape = self.problem.shape
        if tuple(weight.shape) != (shape.n, shape.k):
            have = "x".join(map(str, weight.shape))
            return Answer("MISS", f"the weight is {have} (N x K), tuned is {shape.n}x{shape.k}"), None, None
        info = _device_of(weight)
        if info is None:
            return Answer("MISS", f"no device of coldtune holds a tensor on {weight.device}"), None, None
        for name in ("kind", "name", "arch", "units"):
            was, now = getattr(self.best.device, name), getattr(info, name)
            if was != now:
                return Answer("MISS", f"tuned on {name} {was}, this is {now}"), None, None
        if changed := changed_version(self.best.versions, {**versions(), **info.versions}):
            return Answer("STALE", changed), None, None
        from tuner.devices import target_of

        try:
            artifact = self._build(target_of(info))
            device = _open(info.kind, info.index)
        except ColdtuneError as error:
            # Serving goes on with torch; the reason is in the answer and in the log.
            return Answer("STALE", str(error)), None, None
        if artifact.source_hash != self.best.source_hash:
            return Answer("STALE", "the kernel source is not the confirmed one"), None, None
        if artifact.code_hash != self.best.code_hash:
            return Answer("STALE", "the compiler makes other code than the confirmed one"), None, None
        return Answer("HIT"), device, artifact

    def _build(self, target: Target) -> Artifact:
        arm = self.best.arm
        family = registry.families(self._plugin).get(arm.family)
        if family is None:
            hint = f'; load it with plugin="{self.best.plugin}"' if self.best.plugin else ""
            raise UsageError(f"there is no kernel family {arm.family!r} here{hint}")
        missing = family.missing(target)
        if missing is not None:
            raise UsageError(missing)
        if not in_space(family, arm, self.problem, target):
            raise UsageError(f"{arm} is not in the space of this version")
        return family.build(self.problem, arm, target)


class Packed:
    """One weight, ready to be multiplied: `y = packed(x)`."""

    def __init__(self, problem: Problem, weight: Tensor, answer: Answer, bound: _Bound | None) -> None:
        """Hold the dense weight for torch, and the bound arm where the config fits."""
        self.answer = answer
        self._problem = problem
        self._weight = weight
        self._bound = bound

    def __call__(self, x: Tensor) -> Tensor:
        """Activations (K,), (M, K) or (..., K) times the weight; outputs have N in the place of K.

        With another number of rows than tuned, and where `x` needs a gradient, torch computes the product.

        Raises:
            UsageError: K, the dtype or the device of `x` is not that of the packed weight.
        """
        import torch

        shape = self._problem.shape
        if self._bound is None:
            return torch.nn.functional.linear(x, self._weight)
        if x.dim() == 0 or x.shape[-1] != shape.k:
            raise UsageError(f"x is {tuple(x.shape)}; its last dimension must be K={shape.k}")
        if x.dtype != self._weight.dtype or x.device != self._weight.device:
            raise UsageError(
                f"x is {x.dtype} on {x.device}; the packed weight takes {self._weight.dtype} on {self._weight.device}: "
                "convert it with x.to(...)"
            )
        rows = x.numel() // shape.k
        if rows != shape.m or (torch.is_grad_enabled() and x.requires_grad):
            return torch.nn.functional.linear(x, self._weight)
        y = self._bound(_aligned(x.reshape(shape.m, shape.k).contiguous()))
        return y.view(*x.shape[:-1], shape.n)


class _Bound:
    """An arm bound to one packed weight. It is its own ring of one slot, and a tape of one place."""

    count = 1

    def __init__(self, family: Family, artifact: Artifact, operands: Mapping[str, Tensor], device: Device) -> None:
        self._operands = operands
        self._n = artifact.problem.shape.n
        self._lock = threading.Lock()
        # Something of the right dtype and device, for a family that looks while it binds.
        self._x, self._y = _empty(artifact.problem, device), _empty(artifact.problem, device)
        self._launch: Launch = family.bind(artifact, self, self, device)

    def __call__(self, x: Tensor) -> Tensor:
        """Enqueue the product on the current stream."""
        import torch

        y = torch.empty((x.shape[0], self._n), dtype=x.dtype, device=x.device)
        here = torch.cuda.device(x.device) if x.is_cuda else nullcontext()
        with self._lock, here:
            self._x, self._y = x, y
            self._launch(0)
        return y

    def operand(self, i: int, name: str) -> Tensor:
        """The packed weight."""
        return self._operands[name]

    def activation(self, i: int) -> Tensor:
        """The activations of this call."""
        return self._x

    def output(self, i: int) -> Tensor:
        """The output of this call."""
        return self._y


def in_space(family: Family, arm: Arm, problem: Problem, target: Target) -> bool:
    """True if an arm is one that the family itself would propose; values must also have the right type."""
    # repr tells True from 1, which compare as equal.
    if any(fixed == arm and repr(fixed) == repr(arm) for fixed in family.fixed(problem, target)):
        return True
    for space in family.spaces(problem, target):
        if space.kernel != arm.kernel or set(arm.config) != {parameter.name for parameter in space.parameters}:
            continue
        allowed = {parameter.name: set(map(repr, parameter.values)) for parameter in space.parameters}
        if all(repr(value) in allowed[name] for name, value in arm.items) and space.violated(arm.config) is None:
            return True
    return False


def changed_version(recorded: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The first version that matters and is not the recorded one, in words; empty if none."""
    for name in sorted(recorded):
        if name in _INDIFFERENT:
            continue
        if recorded[name] != now.get(name):
            return f"{name} was {recorded[name]}, is {now.get(name, 'absent')}"
    return ""


def _device_of(weight: Tensor) -> DeviceInfo | None:
    import torch

    kind = {"cpu": "host", "cuda": "rocm" if torch.version.hip else "cuda"}.get(weight.device.type)
    if kind is None:
        return None
    return _discovered().get((kind, weight.device.index or 0))


@cache
def _discovered() -> dict[tuple[str, int], DeviceInfo]:
    from tuner.devices import discover

    return {(info.kind, info.index): info for info in discover()}


@cache
def _open(kind: str, index: int) -> Device:
    from tuner.devices import open_device

    return open_device(_discovered()[kind, index])


def _activation_dtype(problem: Problem) -> torch_dtype:
    import torch

    dtype = getattr(torch, problem.format.activation_dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _empty(problem: Problem, device: Device) -> Tensor:
    import torch

    return torch.zeros(0, dtype=_activation_dtype(problem), device=device.torch_device)


def _aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it where it does not start at a multiple of 16 bytes."""
    return tensor if tensor.data_ptr() % ALIGN == 0 else tensor.clone()
