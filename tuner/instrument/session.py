"""A measuring session: one problem in one layout on one opened device, and the arms that are bound to it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuner.arms import Artifact, Family, Launch, Slots, Value
from tuner.errors import ArmCorrectnessError
from tuner.instrument import gate, rotation
from tuner.instrument.neighbour import make_neighbour
from tuner.instrument.tape import OutputTape
from tuner.instrument.timer import TimerSettings, Unit, make_unit, untimed, with_neighbour
from tuner.problem import Problem

if TYPE_CHECKING:
    from tuner.devices.base import Device

TAPE_BYTES = 512 << 20
CHECK_BYTES = 1 << 30
FASTEST_BYTES_PER_US = 8_000_000
FASTEST_LAUNCH_US = 0.6
SAMPLED_PLACES = 8


@dataclass
class BoundArm:
    """An arm that passed its gate, with one timed unit a neighbour.

    Attributes:
        artifact: What was bound.
        launch: Enqueues one operation.
        checked: False for ceilings, which have no output.
        norm_error: The larger norm error at the gate.
        units: Timed units by neighbour.
        notes: What is unusual about them.
        last: The tape places of the last timed run, by neighbour.
    """

    artifact: Artifact
    launch: Launch
    checked: bool
    norm_error: float
    units: dict[str, Unit] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    last: dict[str, range] = field(default_factory=dict)

    def receipt(self) -> dict[str, Value]:
        """The launch's own receipt, and what the captured graph says."""
        facts = self.launch.receipt()
        for unit in list(self.units.values())[:1]:
            nodes = unit.nodes()
            facts["launches"] = unit.launches
            facts["nodes"] = len(nodes)
            names = sorted({node.kernel for node in nodes})
            if names:
                facts["kernels"] = " ".join(names)
        return facts


class Session:
    """Rotation, tape, gate and timed units for one problem."""

    def __init__(self, device: Device, problem: Problem, layout: str, seed: int, timer: TimerSettings) -> None:
        """Plan, allocate and fill.

        Raises:
            MemoryPlanError: The rotation does not fit the device.
        """
        import torch

        self.device, self.problem, self.layout, self.timer = device, problem, layout, timer
        self._draw = random.Random(seed)
        generator = torch.Generator(device=device.torch_device).manual_seed(seed)
        operands = problem.format.operands(problem.shape, layout)
        self.plan = rotation.plan(operands, device.info.llc_bytes, device.free_bytes(), reserve_bytes(problem))
        self.rotation = rotation.Rotation(problem, layout, self.plan, device.torch_device, generator)
        places = tape_places(problem, self.plan, timer)
        self.tape = OutputTape(problem, places, device.torch_device, generator)
        self.gate = gate.Gate(problem, layout, self.rotation, device, generator)
        self._neighbours = {name: make_neighbour(name, device) for name in ("plain", "self")}
        device.synchronize()

    def bind(self, family: Family, artifact: Artifact, slots: Slots | None = None) -> BoundArm:
        """Load an arm and hold it to the gate; ceilings have no output to hold."""
        launch = family.bind(artifact, slots or self.rotation, self.tape, self.device)
        if family.role == "ceiling":
            launch(0)
            self.device.synchronize()
            return BoundArm(artifact, launch, False, 0.0)
        return BoundArm(artifact, launch, True, self.gate.check(launch, self.tape))

    def add_unit(self, arm: BoundArm, neighbour: str, slots: int | None = None) -> Unit:
        """Make the timed unit of a bound arm behind one neighbour."""
        enqueue = with_neighbour(arm.launch, self._neighbours[neighbour])
        self.tape.poison()
        unit, note = make_unit(self.device, enqueue, slots or self.rotation.count, self.tape, self.timer)
        self.device.synchronize()
        if note:
            arm.notes.append(note)
        arm.units[neighbour] = unit
        return unit

    def block(self, arm: BoundArm, neighbour: str, repeats: int) -> list[float]:
        """Untimed rotations, then `repeats` timed runs; microseconds a launch, neighbour included."""
        unit = arm.units[neighbour]
        untimed(self.device, unit, self.timer.untimed_us)
        samples = []
        for _ in range(repeats):
            places = unit.places()
            # Every timed launch must fill its own place again: a launch that skips its work leaves NaN.
            if arm.checked:
                self.tape.poison(places.start, len(places))
            samples.append(self.device.time_us(unit.run) / unit.launches)
            arm.last[neighbour] = places
        return samples

    def check(self, arm: BoundArm, neighbour: str) -> float:
        """Hold a sample of the launches timed last (first, last, 8 at random) to float64, while they lie on the tape.

        Returns:
            The largest norm error.

        Raises:
            ArmCorrectnessError: A timed launch left its place unwritten or wrong.
        """
        places = arm.last.get(neighbour)
        if not arm.checked or places is None:
            return 0.0
        chosen = {places[0], places[-1], *self._draw.sample(places, min(SAMPLED_PLACES, len(places)))}
        unwritten = [i for i in places if bool(self.tape.output(i).isnan().any())] if self._any_nan(places) else []
        if unwritten:
            raise ArmCorrectnessError(
                f"tape: {len(unwritten):,} of {len(places):,} timed launches left NaN, first launch {unwritten[0]}"
            )
        worst = 0.0
        for i in sorted(chosen):
            x = self.tape.activation(i)
            ref = gate.reference(self.problem, self.rotation.operands(i), self.layout, x)
            worst = max(worst, gate.compare(self.tape.output(i), ref, self.problem, f"tape, timed launch {i}"))
        return worst

    def _any_nan(self, places: range) -> bool:
        first = self.tape.output(places[0]).data_ptr()
        start = (first - self.tape.buffer.data_ptr()) // 2
        last = self.tape.output(places[-1])
        stop = (last.data_ptr() - self.tape.buffer.data_ptr()) // 2 + last.numel()
        return bool(self.tape.buffer[start:stop].isnan().any())

    def touched_slots(self, unit: Unit) -> list[int | None] | None:
        """The slot that each launch of a unit reads, by the addresses in its graph; None where there are none."""
        touched: list[int | None] = []
        for node in unit.nodes():
            slots = {slot for slot in map(self.rotation.slot_of, node.words) if slot is not None}
            if len(slots) == 1:
                touched.extend(slots)
        return touched if len(touched) == unit.launches else None


def reserve_bytes(problem: Problem) -> int:
    """Memory that a session needs beside its rotation: tape, float64 checks, workspaces."""
    return TAPE_BYTES // 4 + min(CHECK_BYTES, 8 * problem.weight_bytes) + (64 << 20)


def tape_places(problem: Problem, ring: rotation.RotationPlan, timer: TimerSettings) -> int:
    """Places on the tape, in whole rotations: enough for the timed unit of the fastest thinkable arm."""
    least = math.ceil(timer.min_launches / ring.slots) * ring.slots
    fastest_us = FASTEST_LAUNCH_US + ring.slot_bytes / FASTEST_BYTES_PER_US
    wanted = math.ceil(timer.min_window_us / fastest_us / ring.slots) * ring.slots
    if timer.max_nodes == 0:
        return least * 8
    places = max(least, wanted)
    while places > least and OutputTape.nbytes(problem, places) > TAPE_BYTES:
        places = max(least, places // 2 // ring.slots * ring.slots)
    return max(2, places)
