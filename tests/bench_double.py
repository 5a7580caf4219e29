"""A device double for tests of the instrument: torch on the CPU, launches made at once, graphs as recorded closures."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from tuner.arms import Arm, Artifact, Launch, Loader, Slots, Tape, Target, Value
from tuner.devices.base import DeviceInfo, Node
from tuner.errors import ArmError
from tuner.instrument.session import Session
from tuner.problem import Problem
from tuner.space import Space

LLC_BYTES = 16_384


class Replayed:
    def __init__(self, enqueue: Callable[[], None], record: list[Node]) -> None:
        self._enqueue, self._nodes = enqueue, list(record)

    def replay(self) -> None:
        self._enqueue()

    def nodes(self) -> list[Node]:
        return self._nodes


class DoubleDevice:
    """Keeps the device contract; `log` receives the addresses that launches name while a capture runs."""

    torch_device = "cpu"

    def __init__(self, graphs: bool = True, free: int = 1 << 33) -> None:
        self.info = DeviceInfo("double", 0, "double", "none", "", "", 1, 32, LLC_BYTES, "a test", 1 << 34)
        self.target = Target("host", "none", 32, 1)
        self.graphs = graphs
        self.log: list[Node] = []
        self._free = free

    def capture(self, enqueue: Callable[[], None]) -> Replayed:
        self.log.clear()
        enqueue()
        return Replayed(enqueue, self.log)

    def time_us(self, run: Callable[[], None]) -> float:
        start = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - start) / 1000

    def synchronize(self) -> None:
        return None

    def free_bytes(self) -> int:
        return self._free

    def load(self, artifact: Artifact) -> object:
        raise ArmError("the double loads no code")

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.int8)

    def trim(self) -> None:
        return None

    def telemetry(self) -> dict[str, Value | float | None]:
        return {}

    def tenants(self) -> list[dict[str, Value]]:
        return []


class TorchLaunch:
    """A right arm: float32 product, rounded once."""

    def __init__(self, slots: Slots, tape: Tape, device: DoubleDevice) -> None:
        self.slots, self.tape, self.device = slots, tape, device
        self.calls = 0

    def __call__(self, i: int) -> None:
        weight = self.slots.operand(i, "weight")
        self.device.log.append(Node("product", (weight.data_ptr(),)))
        self.calls += 1
        self.compute(i, weight)

    def compute(self, i: int, weight: torch.Tensor) -> None:
        y = self.tape.activation(i).float() @ weight.float().t()
        self.tape.output(i).copy_(y)

    def receipt(self) -> dict[str, Value]:
        return {"kernel": "product", "code_hash": "0", "compiles_in_worker": 0}


class DoubleFamily:
    """Binds whatever launch class it is given; arms are told apart by name only."""

    name = "double"
    role = "candidate"

    def __init__(self, launch: type[TorchLaunch] = TorchLaunch) -> None:
        self._launch = launch

    def missing(self, target: Target) -> str | None:
        return None

    def spaces(self, problem: Problem, target: Target) -> tuple[Space, ...]:
        return ()

    def fixed(self, problem: Problem, target: Target) -> tuple[Arm, ...]:
        return (Arm.of("double", "product"),)

    def build(self, problem: Problem, arm: Arm, target: Target) -> Artifact:
        return Artifact(arm, problem, target, b"", "0", "0")

    def bind(self, artifact: Artifact, slots: Slots, tape: Tape, loader: Loader) -> Launch:
        return self._launch(slots, tape, loader)  # type: ignore[arg-type]


class FreezingSlots:
    """A ring that stops turning once it has passed the gate."""

    def __init__(self, s: Session) -> None:
        self.rotation, self.frozen = s.rotation, False

    @property
    def count(self) -> int:
        return self.rotation.count

    def operand(self, i: int, name: str) -> torch.Tensor:
        return self.rotation.operand(0 if self.frozen else i, name)


def artifact(problem: Problem) -> Artifact:
    return DoubleFamily().build(problem, Arm.of("double", "product"), Target("host", "none", 32, 1))
