"""The timed unit: what lies between two events, and how an arm's launches and its neighbour are put into it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tuner.errors import CaptureError

if TYPE_CHECKING:
    from tuner.arms import Launch
    from tuner.devices.base import Device, Node, Replay
    from tuner.instrument.tape import OutputTape

TIMER_VERSION = 1


@dataclass(frozen=True)
class TimerSettings:
    """How long a timed unit is.

    Attributes:
        min_launches: Launches between two events at least.
        min_window_us: Microseconds between two events at least.
        untimed_us: Untimed launches in front of a block, at least so long.
        warmup_us: Launches once a process, before anything is timed, to bring the clocks up.
        max_nodes: Kernels in one graph at most.
    """

    min_launches: int = 200
    min_window_us: float = 5_000.0
    untimed_us: float = 20_000.0
    warmup_us: float = 1_000_000.0
    max_nodes: int = 900

    @classmethod
    def of(cls, kind: str) -> TimerSettings:
        """The settings of a kind of device: `host` launches cost milliseconds, so two make a repeat."""
        if kind == "host":
            return cls(min_launches=2, min_window_us=0.0, untimed_us=0.0, warmup_us=0.0, max_nodes=0)
        return cls()


class Unit(Protocol):
    """A timed unit of a number of launches; every run of it writes `places` of the tape."""

    launches: int

    def run(self) -> None:
        """Enqueue all launches."""

    def places(self) -> range:
        """The launches, as the tape counts them, that the next run makes."""

    def nodes(self) -> list[Node]:
        """Kernels as captured; empty for stream launches."""


class GraphUnit:
    """Graphs of consecutive launches, replayed one behind the other."""

    def __init__(self, graphs: list[Replay], launches: int) -> None:
        """Take captured graphs that hold `launches` launches together."""
        self._graphs = graphs
        self._nodes: list[Node] | None = None
        self.launches = launches

    def run(self) -> None:
        """Replay every graph once."""
        for graph in self._graphs:
            graph.replay()

    def places(self) -> range:
        """Always the same launches, from the first."""
        return range(self.launches)

    def nodes(self) -> list[Node]:
        """Kernels of all graphs in order."""
        if self._nodes is None:
            self._nodes = [node for graph in self._graphs for node in graph.nodes()]
        return self._nodes


class StreamUnit:
    """Launches made one by one, going on round the rotation and along the tape from run to run."""

    def __init__(self, enqueue: Callable[[int], None], launches: int, slots: int, places: int) -> None:
        """Make a unit of `launches`, on a tape with so many places."""
        self._enqueue = enqueue
        self._slots = slots
        self._limit = places
        self._next = 0
        self.launches = launches

    def places(self) -> range:
        """The launches that the next run makes."""
        start = self._next
        if start + self.launches > self._limit:
            start %= self._slots
            if start + self.launches > self._limit:
                start = 0
        return range(start, start + self.launches)

    def run(self) -> None:
        """Launch."""
        places = self.places()
        for i in places:
            self._enqueue(i)
        self._next = places.stop

    def nodes(self) -> list[Node]:
        """Nothing was captured."""
        return []


def with_neighbour(launch: Launch, neighbour: Callable[[], None] | None) -> Callable[[int], None]:
    """One launch of the arm, followed by its neighbour if there is one."""

    def enqueue(i: int) -> None:
        launch(i)
        if neighbour is not None:
            neighbour()

    return enqueue


def make_unit(
    device: Device, enqueue: Callable[[int], None], slots: int, tape: OutputTape, settings: TimerSettings
) -> tuple[Unit, str]:
    """Build the timed unit of an arm: whole rotations, long enough, in graphs if the device can capture them.

    Returns:
        The unit, and a note that says why it is not made of graphs, or nothing.
    """
    rotations = math.ceil(settings.min_launches / slots)
    if not device.graphs:
        return StreamUnit(enqueue, settings.min_launches, slots, tape.launches), ""
    launches = min(rotations * slots, tape.launches)
    try:
        return _graphs(device, enqueue, launches, slots, tape.launches, settings), ""
    except CaptureError as error:
        note = f"stream launches, the capture failed: {error}"
        return StreamUnit(enqueue, launches, slots, tape.launches), note


def _graphs(
    device: Device, enqueue: Callable[[int], None], launches: int, slots: int, limit: int, settings: TimerSettings
) -> GraphUnit:
    probe = _capture(device, enqueue, range(2))
    nodes_each = max(1, math.ceil(len(probe.nodes()) / 2))
    per_graph = max(1, settings.max_nodes // nodes_each)
    graphs = _captures(device, enqueue, range(launches), per_graph)
    unit = GraphUnit(graphs, launches)
    unit.run()
    device.synchronize()
    once_us = device.time_us(unit.run)
    if once_us < settings.min_window_us:
        wanted = math.ceil(launches * 1.05 * settings.min_window_us / max(once_us, 1.0) / slots) * slots
        total = min(max(wanted, launches), limit // slots * slots)
        if total > launches:
            graphs = graphs + _captures(device, enqueue, range(launches, total), per_graph)
            unit = GraphUnit(graphs, total)
    return unit


def _captures(device: Device, enqueue: Callable[[int], None], places: range, per_graph: int) -> list[Replay]:
    starts = range(places.start, places.stop, per_graph)
    return [_capture(device, enqueue, range(start, min(start + per_graph, places.stop))) for start in starts]


def _capture(device: Device, enqueue: Callable[[int], None], places: range) -> Replay:
    def all_of_them() -> None:
        for i in places:
            enqueue(i)

    return device.capture(all_of_them)


def untimed(device: Device, unit: Unit, at_least_us: float) -> None:
    """Run a unit, at least once, until so much device time has passed."""
    passed_us = 0.0
    while True:
        passed_us += device.time_us(unit.run)
        if passed_us >= at_least_us:
            return
