"""A protocol and samples of a confirmation, made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from tuner.protocol import Gate, Protocol, Verdict, order
from tuner.verdict import judge

BYTES = 100_000_000
# Microseconds by label behind `plain`: the chosen arm is 10 % faster than the best vendor form.
TIMES_US = {
    **{"chosen": 25.0, "again": 25.0, "default": 26.0, "twin": 25.5, "other": 25.25},
    **{"vendor-1": 27.5, "vendor-2": 28.0, "ceiling": 24.0},
}
FINE = [Gate(name="results", status="pass", detail="right")]


def record(label: str) -> dict[str, Any]:
    role = label.split("-")[0]
    family = {"vendor": "vendor", "ceiling": "ceiling", "other": "hip"}.get(role, "triton")
    return {
        **{"label": label, "role": role, "family": family, "kernel": "k", "config": {"rows": 1, "m_spec": True}},
        **{"code_hash": f"code {role}", "source_hash": "source", "shape": "1x4096x12288", "weights": "bf16"},
    }


def content(labels: tuple[str, ...] = tuple(TIMES_US), **changes: Any) -> dict[str, Any]:
    """A protocol as plain data."""
    baseline = "vendor-1" if "vendor-1" in labels else "default"
    pair = {"baseline": baseline, "chosen": "chosen", "neighbour": "plain"}
    data: dict[str, Any] = {
        "schema": 1,
        "question": "Is it faster?",
        "shape": "1x4096x12288",
        "weights": ["bf16"],
        "device": {
            **{"kind": "cuda", "name": "NVIDIA H200", "arch": "sm_90", "uuid": "GPU-1", "units": 132},
            **{"llc_bytes": 60_000_000, "peak_bytes_per_s": 4.8e12},
        },
        "versions": {"torch": "2.13.0", "optuna": "5.0.0"},
        "arms": [record(label) for label in labels],
        "primary": {"baseline": baseline, "chosen": "chosen"},
        "instrument": {
            **{"neighbour": "plain", "other_neighbour": "self", "slots": {"bf16": 5}, "weight_bytes": {"bf16": BYTES}},
            **{"llc_bytes": 60_000_000, "min_launches": 200, "min_window_us": 5000.0, "untimed_us": 20000.0},
            **{"warmup_s": 1.0, "max_nodes": 900, "timer_version": 1, "asymptotic_bytes_per_us": 4.5e6},
        },
        "design": {"processes": 4, "cycles": 2, "blocks": 2, "repeats": 3, "seed": 7},
        "predictions": [{"id": "P1", "reason": "guess", "low": 1.05, "high": 1.2, "explored": False, **pair}],
        "falsifiers": [{"id": "F1", "reason": "no gain", "below": 0.995, "above": None, **pair}],
        "claim_rule": {"name": "default", "margin": 0.005, "confidence": 0.95},
        "exclusions": ["none is left out"],
        "seeds": {"bootstrap": 1, "data": 2},
        "drafted_by_tool": True,
        "data_seen": "none",
        "disclosures": ["arms dropped: none"],
        "exploration": {
            **{"trials": 9, "size": 100, "pruned": {"too | large": 3}, "space_hash": "s", "tie_set": ["triton/k"]},
            **{"optimism": 0.01, "replay": False},
        },
    }
    return {**data, **changes}


def protocol(labels: tuple[str, ...] = tuple(TIMES_US), **changes: Any) -> Protocol:
    return Protocol.model_validate(content(labels, **changes))


def frame(
    frozen: Protocol,
    times_us: Mapping[str, float] | None = None,
    noise: float = 0.001,
    process_noise: float = 0.001,
    seed: int = 1,
) -> pd.DataFrame:
    """Samples in the frozen order: each arm about its time, every process with its own factor a arm."""
    rng = np.random.default_rng(seed)
    times_us = {**TIMES_US, **(times_us or {})}
    rows = []
    for process in range(frozen.design.processes):
        factor = {label: float(np.exp(rng.normal(0, process_noise))) for label in frozen.labels}
        for neighbour in frozen.neighbours:
            for cycle in range(frozen.design.cycles):
                labels = order(frozen, process, cycle)
                for position, label in enumerate(labels):
                    block = position // len(frozen.labels)
                    for repeat in range(frozen.design.repeats):
                        us = times_us[label] * factor[label] * float(np.exp(rng.normal(0, noise)))
                        rows.append((process, cycle, block, position, label, neighbour, repeat, us, 200))
    columns = ["process", "cycle", "block", "position", "arm", "neighbour", "repeat", "us", "launches"]
    return pd.DataFrame(rows, columns=columns)


def judged(frozen: Protocol, samples: pd.DataFrame, gates: list[Gate] | None = None) -> Verdict:
    return judge(frozen, samples, FINE if gates is None else gates, replicates=500)
