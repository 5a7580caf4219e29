"""What makes a confirmation void, and what is only told."""

from __future__ import annotations

from typing import Any

import pytest

from tuner.workflow.integrity import Observed, disclosures, gates, hottest

RECEIPT = {"kernel": "k", "code_hash": "c", "compiles_in_worker": 0}
LIBRARY = {"form": "mm", "library": "cublas", "compiles_in_worker": 0}
RECEIPTS = {"chosen": RECEIPT, "vendor-1": LIBRARY}
CLEAN = {"sm_clock_mhz": 1980, "mem_clock_mhz": 3201, "power_cap_w": 700.0, "slowdown": "", "temperature_c": 43}


def state(**telemetry: Any) -> dict[str, Any]:
    return {"telemetry": {**CLEAN, **telemetry}, "tenants": []}


def seen(**changes: Any) -> Observed:
    return Observed(**{"process": 2, "slots": 5, "states": [state()], **changes})


def failed(observed: Observed, receipts: dict[str, Any] = RECEIPTS, kind: str = "cuda") -> dict[str, str]:
    found = gates(kind, ["chosen", "vendor-1"], 5, [seen(), observed], receipts)
    return {gate.name: gate.detail for gate in found if gate.status != "pass"}


def test_a_clean_confirmation_passes_every_gate() -> None:
    assert failed(seen()) == {}


@pytest.mark.parametrize(
    ("changes", "gate", "detail"),
    [
        (
            {"failures": [{"arm": "chosen", "status": "correctness", "reason": "tape: launch 3"}]},
            "results",
            "process 2: chosen: correctness: tape: launch 3",
        ),
        (
            {"checks": [{"name": "reuse distance", "verdict": "failed", "figure": "100 MB", "meaning": ""}]},
            "cold rotation",
            "process 2: reuse distance: 100 MB",
        ),
        ({"slots": 3}, "slots", "process 2: 3 slots, frozen with 5"),
        ({"changed": True}, "inputs", "process 2: weights changed"),
        ({"states": [state(slowdown="hw_thermal_slowdown")]}, "slowdown", "process 2: hw_thermal_slowdown"),
        (
            {"states": [{**state(), "tenants": [{"pid": 7, "name": "game", "busy_percent": 40}]}]},
            "tenants",
            "game (pid 7) up to 40 %",
        ),
    ],
)
def test_what_was_seen_voids_under_its_own_name(changes: dict[str, Any], gate: str, detail: str) -> None:
    assert failed(seen(**changes)) == {gate: detail}


@pytest.mark.parametrize(
    ("receipts", "detail"),
    [
        ({"chosen": RECEIPT}, "vendor-1: no kernel, code_hash, compiles_in_worker"),
        ({**RECEIPTS, "chosen": {"kernel": "k"}}, "chosen: no code_hash, compiles_in_worker"),
        ({**RECEIPTS, "chosen": {**RECEIPT, "compiles_in_worker": 1}}, "chosen: compiled in the worker"),
    ],
)
def test_no_receipt_no_arm(receipts: dict[str, Any], detail: str) -> None:
    assert failed(seen(), receipts) == {"receipts": detail}


def test_an_idle_tenant_and_an_unknown_check_void_nothing() -> None:
    idle = {**state(), "tenants": [{"pid": 7, "name": "desktop", "memory_bytes": 10**8, "busy_percent": 1}]}
    unknown = {"name": "reuse distance", "verdict": "unknown", "figure": "", "meaning": ""}
    assert failed(seen(states=[idle], checks=[unknown])) == {}


def test_on_host_other_processes_are_told_and_void_nothing() -> None:
    busy = {**state(), "tenants": [{"pid": 7, "name": "make", "busy_percent": 90}]}
    assert failed(seen(states=[busy]), kind="host") == {}


def test_disclosures_stand_also_when_they_are_nothing() -> None:
    told = disclosures([seen()], replicate=False, device="card")
    assert "other processes seen: none" in told and "telemetry that could not be read: none" in told
    assert "SM clock 1980 to 1980 MHz; memory clock 3201 to 3201 MHz" in told and "power cap: 700 W" in told
    blind = disclosures([seen(states=[state(sm_clock_mhz=None)])], replicate=True, device="card")
    assert any(text.startswith("SM clock not verified") for text in blind)
    assert any("replication on card" in text for text in blind)


def test_the_hottest_reading() -> None:
    assert hottest(state(temperature_c=96)) == 96.0 and hottest(state(temperature_c=None)) is None
