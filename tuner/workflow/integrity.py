"""Integrity gates: from what a confirmation observed to what makes it void."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.protocol import Gate

BUSY_PERCENT = 3.0
REQUIRED = ("kernel", "code_hash", "compiles_in_worker")
REQUIRED_LIBRARY = ("form", "library")


@dataclass
class Observed:
    """One process of a confirmation, as seen from outside its timed regions.

    Attributes:
        process: Its number.
        pid: Its process id.
        slots: Slots of its rotation.
        checks: Self-checks: name, verdict, figure, meaning.
        failures: Arms that failed, with status and reason.
        norm_errors: Largest norm error on the tape, by arm and neighbour.
        states: Telemetry and tenants between blocks.
        changed: True if the weights were not at the end what they were at the start.
    """

    process: int
    pid: int = 0
    slots: int = 0
    checks: list[dict[str, str]] = field(default_factory=list)
    failures: list[dict[str, str]] = field(default_factory=list)
    norm_errors: dict[str, float] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    changed: bool = False


def gates(
    kind: str, labels: Iterable[str], slots: int, observed: Sequence[Observed], receipts: Mapping[str, Any]
) -> list[Gate]:
    """One gate a rule, each with what was found.

    Args:
        kind: Kind of the device; on `host` other processes are disclosed and void nothing.
        labels: Arms of the protocol, each of which needs a receipt.
        slots: Slots that were frozen; memory may have become short since.
        observed: Every process.
        receipts: Receipts by arm label.
    """
    return [
        _gate("results", _wrong(observed), "every sampled timed launch agreed with float64"),
        _gate("cold rotation", _warm(observed), "no check found a warm rotation"),
        _gate("slots", _slots(slots, observed), f"every process had the {slots} slots that were frozen"),
        _gate("receipts", _missing(labels, receipts), "every arm was read back from the running system"),
        _gate("inputs", [f"process {o.process}: weights changed" for o in observed if o.changed], "weights unchanged"),
        _tenants(kind, observed),
        _gate("slowdown", _slowdown(observed), "no thermal or hardware slowdown was reported"),
    ]


def hottest(state: Mapping[str, Any]) -> float | None:
    """The temperature that a state reports, in degrees Celsius, or None."""
    value = state.get("telemetry", {}).get("temperature_c")
    return float(value) if value is not None else None


def _gate(name: str, found: Sequence[str], fine: str) -> Gate:
    if not found:
        return Gate(name=name, status="pass", detail=fine)
    more = f" (+{len(found) - 3} more)" if len(found) > 3 else ""
    return Gate(name=name, status="void", detail="; ".join(found[:3]) + more)


def _wrong(observed: Sequence[Observed]) -> list[str]:
    return [f"process {o.process}: {f['arm']}: {f['status']}: {f['reason']}" for o in observed for f in o.failures]


def _warm(observed: Sequence[Observed]) -> list[str]:
    return [
        f"process {o.process}: {check['name']}: {check['figure']}"
        for o in observed
        for check in o.checks
        if check["verdict"] == "failed"
    ]


def _slots(frozen: int, observed: Sequence[Observed]) -> list[str]:
    return [f"process {o.process}: {o.slots} slots, frozen with {frozen}" for o in observed if o.slots != frozen]


def _missing(labels: Iterable[str], receipts: Mapping[str, Any]) -> list[str]:
    faults = {label: receipt_fault(receipts.get(label) or {}) for label in labels}
    return [f"{label}: {fault}" for label, fault in faults.items() if fault]


def receipt_fault(receipt: Mapping[str, Any]) -> str | None:
    """What an arm's receipt lacks or admits, or None."""
    required = REQUIRED_LIBRARY if "library" in receipt else REQUIRED
    absent = [name for name in required if name not in receipt]
    if absent:
        return f"no {', '.join(absent)}"
    return "compiled in the worker" if receipt.get("compiles_in_worker", 0) != 0 else None


def _tenants(kind: str, observed: Sequence[Observed]) -> Gate:
    busy: dict[str, float] = {}
    for state in (s for o in observed for s in o.states):
        for tenant in state.get("tenants", []):
            percent = float(tenant.get("busy_percent") or 0.0)
            if percent > BUSY_PERCENT:
                name = f"{tenant.get('name', '?')} (pid {tenant.get('pid', '?')})"
                busy[name] = max(percent, busy.get(name, 0.0))
    if not busy:
        return Gate(name="tenants", status="pass", detail=f"no other process used over {BUSY_PERCENT:.0f} %")
    text = "; ".join(f"{name} up to {percent:.0f} %" for name, percent in sorted(busy.items())[:5])
    if kind == "host":
        return Gate(name="tenants", status="pass", detail=f"disclosed, on host it voids nothing: {text}")
    return Gate(name="tenants", status="void", detail=text)


def _slowdown(observed: Sequence[Observed]) -> list[str]:
    found = set()
    for o in observed:
        for state in o.states:
            words = state.get("telemetry", {}).get("slowdown")
            if words:
                found.add(f"process {o.process}: {words}")
    return sorted(found)


def disclosures(observed: Sequence[Observed], replicate: bool, device: str) -> list[str]:
    """What stands beside every verdict, also when it is nothing: tenants, clocks, power cap, missing telemetry."""
    states = [state for o in observed for state in o.states]
    told = [_clock_text(states), _tenant_text(states), _missing_text(states)]
    caps = sorted({float(s["telemetry"]["power_cap_w"]) for s in states if s["telemetry"].get("power_cap_w")})
    told.append(f"power cap: {', '.join(f'{cap:.0f} W' for cap in caps) or 'unknown'}")
    if replicate:
        told.append(f"a replication on {device}, not on the device that the protocol was frozen on")
    return told


def _clock_text(states: Sequence[Mapping[str, Any]]) -> str:
    texts = []
    for name, what in (("sm_clock_mhz", "SM clock"), ("mem_clock_mhz", "memory clock")):
        values = [float(s["telemetry"][name]) for s in states if s["telemetry"].get(name) is not None]
        texts.append(f"{what} {min(values):.0f} to {max(values):.0f} MHz" if values else f"{what} not verified")
    return "; ".join(texts)


def _tenant_text(states: Sequence[Mapping[str, Any]]) -> str:
    found: dict[str, int] = {}
    for state in states:
        for tenant in state.get("tenants", []):
            name = str(tenant.get("name", "?"))
            found[name] = max(int(tenant.get("memory_bytes") or 0), found.get(name, 0))
    text = ", ".join(f"{name} ({size / 1e6:,.0f} MB)" for name, size in sorted(found.items())[:8])
    return f"other processes seen: {text or 'none'}"


def _missing_text(states: Sequence[Mapping[str, Any]]) -> str:
    names = sorted({name for state in states for name, value in state["telemetry"].items() if value is None})
    return f"telemetry that could not be read: {', '.join(names) or 'none'}"
