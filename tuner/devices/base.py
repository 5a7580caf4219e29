"""What the instrument asks of a device. One implementation a kind: cuda, rocm, host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tuner.arms import Artifact, Module, Target, Value

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class DeviceInfo:
    """Facts of one device, each read from the system.

    Attributes:
        kind: `cuda`, `rocm` or `host`.
        index: Ordinal within its kind, as the runtime counts.
        name: The vendor's product name.
        arch: `sm_90`, `gfx1100`, or the host's machine name.
        uuid: Stable identity; empty where the system has none.
        pci: PCI address `0000:01:00.0`; empty where there is none.
        units: SMs, CUs or cores.
        warp: Threads a warp.
        llc_bytes: Last-level cache in front of DRAM.
        llc_source: Where that figure was read.
        memory_bytes: Total device memory.
        peak_bytes_per_s: Specified memory peak, or None where the system does not say.
        integrated: True for a GPU that shares the host's memory.
        versions: Driver, runtime and compiler versions by name.
    """

    kind: str
    index: int
    name: str
    arch: str
    uuid: str
    pci: str
    units: int
    warp: int
    llc_bytes: int
    llc_source: str
    memory_bytes: int
    peak_bytes_per_s: float | None = None
    integrated: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Node:
    """One kernel of a captured graph.

    Attributes:
        kernel: Its name, as the driver gives it.
        words: Every aligned 8-byte word of its arguments: addresses are among them.
        grid: Blocks.
        block: Threads a block.
    """

    kernel: str
    words: tuple[int, ...]
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)


class Replay(Protocol):
    """Captured launches that can be enqueued again."""

    def replay(self) -> None:
        """Enqueue all captured launches once more."""

    def nodes(self) -> list[Node]:
        """The captured kernels in order, read back from the graph."""


class Device(Protocol):
    """One opened device. It is also the `Loader` that families see."""

    info: DeviceInfo
    target: Target
    torch_device: str
    graphs: bool

    def load(self, artifact: Artifact) -> Module:
        """Load compiled code."""

    def zeros(self, nbytes: int) -> Tensor:
        """Zeroed device memory as an int8 tensor, aligned to 256 bytes."""

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        """Capture what `enqueue` launches.

        Raises:
            CaptureError: The runtime cannot capture it.
        """

    def time_us(self, run: Callable[[], None]) -> float:
        """Microseconds on the device's own clock from before the first to after the last launch of `run`."""

    def synchronize(self) -> None:
        """Wait for the device; raises `ArmError` with the driver's words on a device fault."""

    def free_bytes(self) -> int:
        """Device memory that can be allocated now."""

    def trim(self) -> None:
        """Give cached but unused memory back to the device."""

    def telemetry(self) -> dict[str, Value | float | None]:
        """Clocks, temperature, power, throttle reasons, fan, memory in use; None for what cannot be read."""

    def tenants(self) -> list[dict[str, Value]]:
        """Other processes on the device now: `pid`, `name`, `memory_bytes`, `busy_percent` where known."""
