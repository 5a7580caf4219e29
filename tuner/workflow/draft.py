"""The draft of a protocol, from what exploration found. Pure.

Nothing in it depends on the clock or on the machine that drafts it, beyond the hashes of compiled code: the same
recorded trials and the same choice give the same protocol.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tuner.arms import Arm
from tuner.comparison import FAST_US, UNSTABLE_SHARE, Limits
from tuner.instrument import rotation
from tuner.instrument.session import reserve_bytes
from tuner.instrument.timer import TIMER_VERSION, TimerSettings
from tuner.problem import Problem, Shape
from tuner.protocol import (
    ArmRecord,
    ClaimRule,
    Design,
    Exploration,
    Instrument,
    Neighbour,
    Primary,
    Protocol,
    Role,
)
from tuner.stats import OUTLIER
from tuner.store import RunInfo
from tuner.workflow import predictions

EXCLUSIONS = (
    "no repeat is left out: one over 1.3 times its block's median is labelled, and verdicts are given with and without",
    "no process, cycle or block is left out or measured again; a confirmation is valid or void as a whole",
    "every confirmation is numbered and kept, and a verdict says how many there were",
)


@dataclass(frozen=True)
class Built:
    """What compiling an arm said of it."""

    code_hash: str
    source_hash: str


def draft(
    info: RunInfo,
    choice: Mapping[str, Any],
    hashes: Mapping[str, Built],
    measured: Iterable[str],
    space: str,
    rule: ClaimRule | None = None,
    design: Design | None = None,
) -> Protocol:
    """Draft a protocol; pure.

    Args:
        info: What the run is about.
        choice: The content of `choice.json`.
        hashes: Code and source hash by arm key, for every arm of the choice that stands in the protocol.
        measured: Keys of the arms that exploration timed.
        space: See `space_hash`.
        rule: The claim rule.
        design: How much to measure; None takes the device's default.
    """
    rule = rule or ClaimRule()
    problem, kind = problem_of(info, choice), str(info.device.get("kind"))
    records, labels = _records(choice, problem, hashes)
    instrument = _instrument(info, choice, problem)
    primary = Primary(baseline=_baseline(records), chosen="chosen")
    design = design or default_design(kind, bool(info.settings.get("quick")), seed_of(info, "order"))
    measured_keys = frozenset(measured)
    known = predictions.Known(
        arms={record.label: record for record in records},
        primary=primary,
        instrument=instrument,
        rule=rule,
        estimates=choice["estimates"],
        measured=measured_keys,
        optimism=float(choice["optimism"]),
        twin=labels.get("twin"),
        host=kind == "host",
    )
    return Protocol(
        question=_question(info, problem, records, primary, instrument.neighbour),
        shape=info.shape,
        weights=(problem.weights,),
        device=dict(info.device),
        versions={**info.versions, **info.device.get("versions", {})},
        arms=records,
        primary=primary,
        instrument=instrument,
        design=design,
        predictions=predictions.predictions(known),
        falsifiers=predictions.falsifiers(known),
        claim_rule=rule,
        exclusions=_exclusions(kind),
        seeds={"bootstrap": seed_of(info, "bootstrap"), "data": seed_of(info, "data")},
        drafted_by_tool=True,
        disclosures=_disclosures(info, choice, labels, design, instrument),
        exploration=Exploration(
            trials=len(measured_keys),
            size=int(choice["space"]["size"]),
            pruned=dict(choice["space"]["pruned"]),
            space_hash=space,
            tie_set=tuple(str(arm_of(entry)) for entry in choice["tie_set"]),
            optimism=float(choice["optimism"]),
            replay=bool(choice.get("replay", False)),
        ),
    )


def default_design(kind: str, quick: bool, seed: int) -> Design:
    """How much a confirmation measures: 10 x 3 x 2 x 3 on a GPU, 5 x 1 x 2 x 3 on host, 3 x 1 x 2 x 3 if quick."""
    if quick:
        return Design(processes=3, cycles=1, blocks=2, repeats=3, seed=seed)
    if kind == "host":
        return Design(processes=5, cycles=1, blocks=2, repeats=3, seed=seed)
    return Design(processes=10, cycles=3, blocks=2, repeats=3, seed=seed)


def seed_of(info: RunInfo, purpose: str) -> int:
    """A seed drawn from the run's seed, another one for each purpose; exploration uses none of these."""
    text = f"{info.settings.get('seed', 1)}/{info.shape}/{purpose}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")


def problem_of(info: RunInfo, choice: Mapping[str, Any]) -> Problem:
    """The problem that a choice is about."""
    weights = str(choice.get("problem", {}).get("weights", info.weights[0]))
    return Problem.of(Shape.parse(info.shape), weights)


def arm_of(entry: Mapping[str, Any]) -> Arm:
    """An arm from plain data."""
    return Arm.of(str(entry["family"]), str(entry["kernel"]), entry["config"])


def listed(choice: Mapping[str, Any]) -> list[tuple[str, Role, Arm]]:
    """Label, role and arm of everything in a choice that a protocol measures; arms may repeat."""
    listed: list[tuple[str, Role, Mapping[str, Any] | None]] = [
        ("chosen", "chosen", choice["chosen"]),
        ("again", "again", choice["chosen"]),
        ("default", "default", choice.get("default")),
        ("twin", "twin", choice.get("twin")),
        ("other", "other", choice.get("other")),
    ]
    listed += [(f"vendor-{number}", "vendor", entry) for number, entry in enumerate(choice["vendors"], 1)]
    listed.append(("ceiling", "ceiling", choice.get("ceiling")))
    return [(label, role, arm_of(entry)) for label, role, entry in listed if entry is not None]


def _records(
    choice: Mapping[str, Any], problem: Problem, hashes: Mapping[str, Built]
) -> tuple[tuple[ArmRecord, ...], dict[str, str]]:
    """The arms, each measured under one label only (but for A/A), and under which label each role is found."""
    records: list[ArmRecord] = []
    first: dict[str, str] = {}
    labels: dict[str, str] = {}
    for label, role, arm in listed(choice):
        if role != "again":
            labels[label] = first.setdefault(arm.key, label)
            if labels[label] != label:
                continue
        built = hashes[arm.key]
        records.append(
            ArmRecord(
                label=label,
                role=role,
                family=arm.family,
                kernel=arm.kernel,
                config=arm.config,
                code_hash=built.code_hash,
                source_hash=built.source_hash,
                shape=str(problem.shape),
                weights=problem.weights,
            )
        )
    return tuple(records), labels


def _baseline(records: Iterable[ArmRecord]) -> str:
    """The best vendor form; where there is none, or it is chosen itself, the default or what else there is."""
    there = {record.label: record for record in records}
    vendor_chosen = there["chosen"].family == "vendor"
    wanted = ("default", "other", "twin") if vendor_chosen else ("vendor-1", "default", "other", "twin")
    return next((label for label in wanted if label in there), "again")


def _instrument(info: RunInfo, choice: Mapping[str, Any], problem: Problem) -> Instrument:
    kind = str(info.device.get("kind"))
    timer = TimerSettings.of(kind)
    neighbour = cast(Neighbour, info.settings.get("neighbour", "plain"))
    other: Neighbour | None = "self" if neighbour == "plain" else "plain"
    if kind == "host":
        neighbour, other = "self", None
    asymptotic = choice.get("asymptotic")
    return Instrument(
        neighbour=neighbour,
        other_neighbour=other,
        slots={problem.weights: int(choice.get("slots") or _planned_slots(info, problem))},
        weight_bytes={problem.weights: problem.weight_bytes},
        llc_bytes=int(info.device["llc_bytes"]),
        min_launches=timer.min_launches,
        min_window_us=timer.min_window_us,
        untimed_us=timer.untimed_us,
        warmup_s=timer.warmup_us / 1e6,
        max_nodes=timer.max_nodes,
        timer_version=TIMER_VERSION,
        asymptotic_bytes_per_us=float(asymptotic["bytes_per_us"]) if asymptotic else None,
    )


def _exclusions(kind: str) -> tuple[str, ...]:
    """What is left out (nothing), and the limits that bar a claim or void a confirmation."""
    limits = Limits.of(kind)
    peak = f", or an arm reads over {limits.over_peak:.0%} faster than the fastest ceiling" if limits.over_peak else ""
    return (
        *EXCLUSIONS,
        f"a claim is AMBIGUOUS if the repeats of one of its arms spread (p95 - p5) over {limits.spread:.0%} "
        f"({limits.spread_fast:.0%} under {FAST_US:g} us), if one drifts over {limits.drift:.0%} between the halves of "
        "its processes, if the chosen arm differs from itself by over half the margin with an interval that excludes "
        f"1, or if over {UNSTABLE_SHARE:.0%} of all repeats are over {OUTLIER} times their block's median",
        f"a confirmation is VOID if samples are missing, doubled or out of the frozen order{peak}, or if an integrity "
        "gate of the confirmation is broken",
    )


def _planned_slots(info: RunInfo, problem: Problem) -> int:
    """Slots on an empty device, for a choice from a record, which allocated none."""
    operands = problem.format.operands(problem.shape, problem.format.layouts[0])
    llc_bytes, memory_bytes = int(info.device["llc_bytes"]), int(info.device["memory_bytes"])
    return rotation.plan(operands, llc_bytes, memory_bytes, reserve_bytes(problem)).slots


def _question(
    info: RunInfo, problem: Problem, records: Iterable[ArmRecord], primary: Primary, neighbour: Neighbour
) -> str:
    there = {record.label: record for record in records}
    baseline = there[primary.baseline]
    against = "the best vendor form" if baseline.role == "vendor" else f"the arm {baseline.label}"
    chosen = there[primary.chosen]
    return (
        f"Is {chosen.family}/{chosen.kernel} faster than {against} ({baseline.family}/{baseline.kernel}) for {problem} "
        f"on {info.device.get('name')} ({info.device.get('arch')}), with weights cold, behind neighbour {neighbour}?"
    )


def _disclosures(
    info: RunInfo, choice: Mapping[str, Any], labels: Mapping[str, str], design: Design, instrument: Instrument
) -> tuple[str, ...]:
    dropped = Counter(f"{entry['status']}: {entry['reason']}" for entry in choice.get("dropped", ()))
    text = "; ".join(f"{count} x {why}" for why, count in sorted(dropped.items()))
    told = [f"arms dropped in exploration: {text or 'none'}"]
    left_out = choice.get("left_out") or {}
    told.append("families left out: " + ("; ".join(f"{n}: {w}" for n, w in sorted(left_out.items())) or "none"))
    told += [
        f"{label} is the same arm as {first} and is measured once" for label, first in labels.items() if first != label
    ]
    if "vendor-1" not in labels:
        told.append("no vendor form computes this problem here, so the baseline is another arm")
    if "ceiling" not in labels:
        told.append("no ceiling was measured, so no share of it is given")
    if info.settings.get("quick"):
        told.append(f"quick: {design.processes} processes instead of the default, so intervals are wider")
    if instrument.other_neighbour is None:
        told.append("this device has no neighbour kernel: launches run back to back")
    if info.device.get("kind") == "host":
        told.append("rehearsal on host: nothing here is a GPU result; limits of precision are wider")
    if choice.get("replay"):
        told.append("the choice was made from a recorded run")
    return tuple(told)
