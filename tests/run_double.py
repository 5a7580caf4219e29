"""A run folder as a real run leaves it, made by hand: a plugin's arm against a real vendor form on this host."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from kernels_vendor import Vendor
from tuner.arms import Arm
from tuner.devices import discover, target_of
from tuner.problem import Problem, Shape
from tuner.protocol import Gate, Protocol, Verdict, save
from tuner.store import Run, RunInfo, Trial, versions

SHAPE = "1x64x48"
CONFIG = {"layout": "nk", "rows": 2, "warps": 4, "num_stages": 2}
VENDOR = "mm_out.cpu.nk"

PLUGIN = """
from dataclasses import replace

from kernels_vendor import Vendor
from tuner.arms import Arm, Artifact, Workspace


class Mine(Vendor):
    name = "mine"
    role = "candidate"

    def fixed(self, problem, target):
        return (Arm.of("mine", "toy", {"layout": "nk", "rows": 2, "warps": 4, "num_stages": 2}),)

    def build(self, problem, arm, target):
        return Artifact(arm, problem, target, b"", "c" * 64, "5" * 64, (), (Workspace("partials", 512, True),))

    def bind(self, artifact, slots, tape, loader):
        return super().bind(replace(artifact, arm=Arm.of("vendor", "mm_out.cpu.nk")), slots, tape, loader)


FAMILIES = [Mine()]
"""


def begin(root: Path, settings: dict[str, Any] | None = None) -> Run:
    """A run that was begun on this host, with the plugin beside it."""
    plugin = root.parent / "mine.py"
    plugin.write_text(PLUGIN)
    info = discover()[-1]
    kept = {
        **{"trials": 1, "sampler": "tpe", "seed": 1, "neighbour": "plain", "quick": True, "timeout_s": 60.0},
        **{"record": None, "plugin": str(plugin), "confirm": True, "llc_bytes": None},
    }
    return Run.create(
        root,
        RunInfo(
            created="2026-01-02T03:04:05+00:00",
            argv=["tune", "--shape", SHAPE],
            shape=SHAPE,
            weights=["bf16"],
            device=asdict(info),
            settings={**kept, **(settings or {})},
            versions=versions(),
            plugin=str(plugin),
        ),
    )


def explored(run: Run, config: dict[str, Any] | None = None) -> None:
    """Leave what exploration leaves."""
    chosen = {"family": "mine", "kernel": "toy", "config": config or CONFIG}
    for number, us in enumerate((12.0, 10.0, None)):
        run.append(
            Trial(
                trial=number,
                stage="explore",
                family="mine",
                kernel="toy",
                config={**CONFIG, "rows": number + 1},
                problem=SHAPE,
                weights="bf16",
                status="correct" if us else "constraints",
                reason=None if us else "needs 72 KB of 64 KB",
                samples_us=[us] if us else [],
                median_us=us,
            )
        )
    run.write_json("choice.json", {"schema": 1, "chosen": chosen, "tie_set": [chosen], "optimism": 0.021})


def protocol(run: Run, **changes: Any) -> Protocol:
    """A protocol with a chosen arm and one vendor form, with true hashes."""
    problem = Problem.of(Shape.parse(SHAPE), "bf16")
    form = Vendor().build(problem, Arm.of("vendor", VENDOR), target_of(discover()[-1]))
    common = {"shape": SHAPE, "weights": "bf16"}
    toy = {
        "family": "mine",
        "kernel": "toy",
        "config": CONFIG,
        "code_hash": "c" * 64,
        "source_hash": "5" * 64,
        **common,
    }
    arms = [
        {"label": "chosen", "role": "chosen", **toy},
        {"label": "again", "role": "again", **toy},
        {
            **{"label": "vendor-1", "role": "vendor", "family": "vendor", "kernel": VENDOR, "config": {}},
            **{"code_hash": form.code_hash, "source_hash": form.source_hash, **common},
        },
    ]
    pair = {"baseline": "vendor-1", "chosen": "chosen"}
    data = {
        "question": f"Is the chosen arm faster for {SHAPE}?",
        "shape": SHAPE,
        "weights": ["bf16"],
        "device": run.info.device,
        "versions": run.info.versions,
        "arms": arms,
        "primary": pair,
        "instrument": {
            **{"neighbour": "plain", "other_neighbour": None, "slots": {"bf16": 2}, "weight_bytes": {"bf16": 6144}},
            **{"llc_bytes": 1024, "min_launches": 2, "min_window_us": 0.0, "untimed_us": 0.0, "warmup_s": 0.0},
            **{"max_nodes": 0, "timer_version": 1},
        },
        "design": {"processes": 5, "cycles": 1, "blocks": 2, "repeats": 3, "seed": 7},
        "predictions": [
            {"id": "P1", "reason": "<why>", "neighbour": "plain", "low": 1.0, "high": 1.4, "explored": False, **pair}
        ],
        "falsifiers": [{"id": "F1", "reason": "no gain", "neighbour": "plain", "below": 1.0, **pair}],
        "claim_rule": {},
        "exclusions": [],
        "seeds": {"bootstrap": 1, "data": 2},
        "exploration": {
            **{"trials": 3, "size": 9, "pruned": {}, "space_hash": "0", "tie_set": ["toy"], "optimism": 0.021},
            "replay": False,
        },
        "disclosures": ["dropped arms: none"],
        "drafted_by_tool": True,
    }
    return Protocol.model_validate({**data, **changes})


def freeze(run: Run, **changes: Any) -> Protocol:
    """Leave what the freeze leaves."""
    frozen = protocol(run, **changes)
    save(frozen, run.file("protocol.json"))
    run.file("protocol.md").write_text("# protocol\n")
    return frozen


def confirm(run: Run, verdict: str = "FASTER", outcome: str = "VALID", **changes: Any) -> Verdict:
    """Leave what a confirmation leaves."""
    number, folder = run.next_confirm()
    interval = {"low": 1.177, "high": 1.180, "bootstrap_low": 1.176, "bootstrap_high": 1.181, "ranges_overlap": False}
    claim = {
        **{"baseline": "vendor-1", "chosen": "chosen", "neighbour": "plain", "ratio": 1.178, **interval},
        **{"process_ratios": [1.178] * 5, "p_value": 0.001, "p_holm": None},
        **{"verdict": verdict, "without_outliers": verdict},
        "reasons": [] if verdict == "FASTER" else ["the interval holds 1"],
    }
    pair = {"baseline": "vendor-1", "chosen": "chosen", "neighbour": "plain"}
    measured = {"found": 1.178, "found_low": 1.177, "found_high": 1.18}
    shares = {
        **{"share_of_ceiling": 0.98, "share_of_asymptotic": None, "share_of_peak": None, "other_neighbour_us": None},
        **{"spread": 0.004, "notes": []},
    }
    found = {
        "protocol_sha256": protocol(run).sha256,
        "attempt": number,
        "attempts": number,
        "outcome": outcome,
        "primary": claim,
        "secondary": [],
        "predictions": [
            {
                **{"id": "P1", "reason": "<why>", **pair, "low": 1.0, "high": 1.4, **measured, "straddles": False},
                "result": "HELD",
            }
        ],
        "falsifiers": [{"id": "F1", "reason": "no gain", "condition": "below 1", **measured, "result": "not met"}],
        "gates": [Gate(name="receipts", status="void" if outcome == "VOID" else "pass", detail="chosen has none")],
        "arms": [
            {"label": "chosen", "median_us": 10.0, "tb_per_s": 0.614, **shares},
            {"label": "vendor-1", "median_us": 11.78, "tb_per_s": 0.522, **shares},
        ],
        "outliers": [
            {
                **{"arm": "chosen", "neighbour": "plain", "process": 0, "cycle": 0, "block": 0, "repeat": 1},
                **{"us": 14.0, "times_median": 1.4},
            }
        ],
        "disclosures": ["tenants: none"],
    }
    judged = Verdict.model_validate({**found, **changes})
    run.write_json(f"{folder.name}/verdict.json", judged)
    return judged


def finish(root: Path, verdict: str = "FASTER", outcome: str = "VALID", settings: dict[str, Any] | None = None) -> Run:
    """A run with all steps done but the export."""
    run = begin(root, settings)
    explored(run)
    freeze(run)
    confirm(run, verdict, outcome)
    return run
