"""Confirmation on host with a short design: what is written, counted, kept when cut off, refused, and void."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest

from tuner import ledger
from tuner.arms import Arm, Artifact
from tuner.devices import choose, target_of
from tuner.errors import RefusedError, UsageError
from tuner.problem import Problem, Shape
from tuner.protocol import Design, Protocol, Verdict, load
from tuner.registry import build
from tuner.store import Run
from tuner.worker import Prepared, Worker
from tuner.workflow import confirm as step
from tuner.workflow import explore
from tuner.workflow.freeze import freeze
from tuner.workflow.progress import Silent
from tuner.workflow.results import read_verdict
from tuner.workflow.tune import Order, begin, settings_of

LLC_BYTES = 1 << 20
DESIGN = Design(processes=2, cycles=1, blocks=2, repeats=2, seed=7)


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on host, explored with a last-level cache given by hand and frozen with a short design."""
    root = tmp_path_factory.mktemp("confirm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLDTUNE_STATE", str(root / "state"))
        patch.setattr(explore, "ASYMPTOTIC_BYTES", 1 << 16)
        settings = explore.ExploreSettings(trials=0, quick=True)
        order = Order(Shape(1, 64, 48), ("bf16",), "host", settings, llc_bytes=LLC_BYTES, runs=root / "runs")
        run, info = begin(order, Silent())
        explore.explore(run, info, settings_of(run), Silent())
        freeze(run, design=DESIGN)
    return run.path


@pytest.fixture
def run(frozen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A copy of it, with a ledger of its own."""
    monkeypatch.setenv("COLDTUNE_STATE", str(tmp_path / "state"))
    shutil.copytree(frozen, tmp_path / "runs" / frozen.name)
    return Run.open(frozen.name, tmp_path / "runs")


def events(run: Run, protocol: Protocol) -> list[tuple[int, str]]:
    device = protocol.device
    return [(e["attempt"], e["event"]) for e in ledger.attempts(device["uuid"] or device["name"], protocol.shape)]


def gate(verdict: Verdict, name: str) -> tuple[str, str]:
    return next((g.status, g.detail) for g in verdict.gates if g.name == name)


def test_an_attempt_is_measured_judged_numbered_and_kept(run: Run) -> None:
    protocol = load(run.file("protocol.json"))
    assert protocol.device["llc_bytes"] == LLC_BYTES, "the cache given to exploration is that of the confirmation"
    verdict = step.confirm(run, Silent())
    assert (verdict.attempt, verdict.attempts) == (1, 1) and verdict.outcome == "VALID", verdict.gates
    assert events(run, protocol) == [(1, "started"), (1, "VALID")]
    (folder,) = run.confirmations()
    assert read_verdict(folder) == verdict
    frame = pd.read_parquet(folder / "samples.parquet")
    assert len(frame) == 2 * 2 * 2 * len(protocol.labels) and (frame["us"] > 0).all()
    assert set(frame["arm"]) == set(protocol.labels)
    receipts = json.loads((folder / "receipts.json").read_text())
    assert set(receipts["arms"]) == set(protocol.labels)
    pids = {process["pid"] for process in receipts["processes"]}
    assert len(pids) == 2 and os.getpid() not in pids


def test_an_edited_protocol_is_refused_before_anything_is_counted(run: Run) -> None:
    protocol = load(run.file("protocol.json"))
    path = run.file("protocol.json")
    path.write_text(path.read_text().replace('"processes": 2', '"processes": 3'))
    with pytest.raises(RefusedError, match="was edited after it was frozen"):
        step.confirm(run, Silent())
    assert run.confirmations() == [] and events(run, protocol) == []


def test_a_changed_kernel_and_another_cache_are_refused_with_all_reasons(
    run: Run, artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = load(run.file("protocol.json"))
    changed = {label: replace(artifact, source_hash="0" * 64) for label, artifact in artifacts.items()}
    monkeypatch.setattr(step, "_build", lambda protocol, pool: changed)
    run.info.settings.pop("llc_bytes")
    with pytest.raises(RefusedError) as refused:
        step.confirm(run, Silent())
    assert "kernel source of arm chosen" in str(refused.value)
    assert f"device llc_bytes was {LLC_BYTES}, is " in str(refused.value)
    assert run.confirmations() == [] and events(run, protocol) == []


def test_a_replay_is_never_confirmed(run: Run) -> None:
    run.info.settings["record"] = "somewhere"
    run.file("protocol.json").unlink()  # a replay freezes nothing
    with pytest.raises(UsageError, match=r"replays a record.*no fresh data.*tune --shape 1x64x48"):
        step.confirm(run, Silent())


@pytest.fixture
def built(run: Run, artifacts: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare the compiles."""
    monkeypatch.setattr(step, "_build", lambda protocol, pool: artifacts)


@pytest.fixture(scope="module")
def artifacts(frozen: Path) -> dict[str, Artifact]:
    protocol, target = load(frozen / "protocol.json"), target_of(choose("host"))
    return {
        record.label: build(
            Problem.of(Shape.parse(record.shape), record.weights),
            Arm.of(record.family, record.kernel, record.config),
            target,
        )
        for record in protocol.arms
    }


class Stopping(Silent):
    """Ctrl-C when the first process is done."""

    def advance(self, text: str, best_us: float | None, failed: Mapping[str, int]) -> None:
        raise KeyboardInterrupt


class Troubled(Worker):
    """The third block of all ends its process; in the second process an arm says that it compiled."""

    blocks: ClassVar[list[str]] = []
    pids: ClassVar[set[int]] = set()

    def prepare(self, artifact: Artifact, neighbours: Sequence[str], name: str) -> Prepared:
        found = super().prepare(artifact, neighbours, name)
        self.pids.add(self.ready())
        late = name == "again" and len(self.pids) == 2
        return replace(found, receipt={**found.receipt, "compiles_in_worker": 1}) if late else found

    def block(self, name: str, neighbour: str, repeats: int) -> list[float]:
        self.blocks.append(name)
        if len(self.blocks) == 3:
            os.kill(self.ready(), signal.SIGKILL)
        return super().block(name, neighbour, repeats)


def test_an_interrupt_keeps_what_was_measured_and_trouble_is_told_under_its_own_name(
    run: Run, built: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    protocol = load(run.file("protocol.json"))
    with pytest.raises(KeyboardInterrupt):
        step.confirm(run, Stopping())
    (folder,) = run.confirmations()
    assert set(pd.read_parquet(folder / "samples.parquet")["process"]) == {0}
    assert not (folder / "verdict.json").exists()
    assert events(run, protocol) == [(1, "started"), (1, "interrupted")]

    monkeypatch.setattr(step, "Worker", Troubled)
    verdict = step.confirm(run, Silent())
    assert (verdict.attempt, verdict.attempts) == (2, 2), "an attempt that was cut off counts"
    assert verdict.outcome == "VOID" and verdict.primary.verdict == "VOID"
    died = f"process 0: {Troubled.blocks[2]}: runtime: block: the worker was killed by SIGKILL"
    assert gate(verdict, "results") == ("void", died), "arms that were lost with it are not accused"
    assert gate(verdict, "receipts") == ("void", "again: compiled in the worker"), "whichever process it was in"
    frame = pd.read_parquet(run.confirmations()[1] / "samples.parquet")
    assert [len(frame[frame["process"] == p]) for p in (0, 1)] == [4, 4 * len(protocol.labels)]
    assert events(run, protocol)[2:] == [(2, "started"), (2, "VOID")]
