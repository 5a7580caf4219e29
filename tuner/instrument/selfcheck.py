"""The instrument's own checks: is the rotation cold, is a launch cheap, do identical arms agree."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from tuner.instrument.rotation import SlotSubset, reuse_distance
from tuner.instrument.session import BoundArm, Session
from tuner.problem import Problem, Shape

if TYPE_CHECKING:
    from tuner.arms import Artifact, Family
    from tuner.devices.base import Device
    from tuner.instrument.timer import Unit

WARM_SPEEDUP = 1.3
HALF_TOLERANCE = 0.01
SHORT_TOLERANCE = 0.05
SHORT_US = 5.0
HOST_TOLERANCE = 0.30
EMPTY_LIMIT_US = 2.0
PROBE_K = 4096


@dataclass(frozen=True)
class Check:
    """One figure with its verdict: `ok`, `failed`, or `unknown` where it cannot be known here."""

    name: str
    verdict: Literal["ok", "failed", "unknown"]
    figure: str
    meaning: str


def structural(session: Session, arm: BoundArm, neighbour: str) -> Check:
    """The reuse distance computed from the addresses in the captured graph, against the plan."""
    return reuse_check(session, arm.units[neighbour], str(arm.artifact.arm.kernel))


def reuse_check(session: Session, unit: Unit, kernel: str) -> Check:
    """See `structural`; for any timed unit of the session."""
    meaning = "distinct bytes between two reads of a byte, from the addresses in the graph; at least the plan"
    touched = session.touched_slots(unit)
    distance = reuse_distance(touched, session.plan.slot_bytes) if touched else None
    planned = min(session.plan.distinct_bytes, unit.launches * session.plan.slot_bytes)
    if distance is None:
        why = "no addresses in the graph" if unit.nodes() else "stream launches, so there is no graph to read"
        return Check("reuse distance", "unknown", f"{kernel}: {why}", meaning)
    figure = f"{distance / 1e6:,.1f} MB of {planned / 1e6:,.1f} MB planned ({kernel})"
    return Check("reuse distance", "ok" if distance >= planned else "failed", figure, meaning)


def halves_agree(session: Session, family: Family, artifact: Artifact) -> list[Check]:
    """S slots against S/2 slots, and S against itself again: more slots must change nothing."""
    count = session.rotation.count
    full, again = (_median_us(session, family, artifact, count) for _ in range(2))
    noise = abs(again / full - 1)
    floor = SHORT_TOLERANCE if full < SHORT_US else HALF_TOLERANCE
    if session.device.info.kind == "host":
        floor = HOST_TOLERANCE
    twin = Check(
        "A/A in one process",
        _timed(session.device, noise <= floor),
        f"{full:.2f} us and {again:.2f} us, {100 * noise:.2f} % apart",
        f"one arm timed twice agrees within {100 * floor:.0f} %",
    )
    if count // 2 * session.plan.slot_bytes < 2 * session.plan.llc_bytes or count < 4:
        text = f"{count // 2} slots would be under twice the last-level cache"
        return [twin, Check("S against S/2 slots", "unknown", text, "half the slots must time the same")]
    half = _median_us(session, family, artifact, count // 2)
    apart = abs(half / full - 1)
    limit = max(floor, noise)
    agree = Check(
        "S against S/2 slots",
        _timed(session.device, apart <= limit),
        f"{count} slots {full:.2f} us, {count // 2} slots {half:.2f} us, {100 * apart:.2f} % apart",
        f"half the slots time the same within {100 * limit:.1f} %",
    )
    return [twin, agree]


def empty_launch(session: Session, family: Family, artifact: Artifact) -> Check:
    """What a kernel that does nothing costs in a timed unit, back to back."""
    arm = session.bind(family, artifact)
    session.add_unit(arm, "self")
    us = statistics.median(session.block(arm, "self", 3))
    host = session.device.info.kind == "host"
    verdict: Literal["ok", "failed", "unknown"] = "ok" if host or us < EMPTY_LIMIT_US else "failed"
    return Check("empty launch", verdict, f"{us:.2f} us", f"a kernel that does nothing takes under {EMPTY_LIMIT_US} us")


def probe_problem(problem: Problem, llc_bytes: int) -> Problem:
    """A problem in the same format whose weights are a quarter of the last-level cache."""
    shape = Shape(1, PROBE_K, 1)
    row_bytes = sum(operand.nbytes for operand in problem.format.operands(shape, problem.format.layouts[0]))
    return replace(problem, shape=replace(shape, n=max(1, llc_bytes // 4 // row_bytes)))


def warm_probe(device: Device, session: Session, family: Family, artifact: Artifact) -> Check:
    """A plain read of a quarter of the cache is faster on one buffer than rotated, or the rotation is warm."""
    cold_us = _median_us(session, family, artifact, session.rotation.count)
    warm_us = _median_us(session, family, artifact, 1)
    speedup = cold_us / warm_us
    verdict = _timed(device, speedup >= WARM_SPEEDUP)
    figure = f"rotated {cold_us:.2f} us, one buffer {warm_us:.2f} us: {speedup:.2f}x"
    return Check("warm against cold", verdict, figure, f"reading a cached buffer is at least {WARM_SPEEDUP}x faster")


def _timed(device: Device, fine: bool) -> Literal["ok", "failed", "unknown"]:
    """The verdict of a check that rests on times.

    On host it can be `unknown`: a processor shares its cores and its last-level cache with whatever else runs, so a
    disagreement there does not show that the instrument is wrong.
    """
    if fine:
        return "ok"
    return "unknown" if device.info.kind == "host" else "failed"


def _median_us(session: Session, family: Family, artifact: Artifact, slots: int) -> float:
    arm = session.bind(family, artifact, SlotSubset(session.rotation, slots))
    session.add_unit(arm, "self", slots)
    return statistics.median(session.block(arm, "self", 3))
