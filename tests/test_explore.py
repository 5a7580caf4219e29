"""Exploration on the committed H200 record, and on host through a kill: same trials, same choice, no repeats."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from tuner.arms import Arm
from tuner.errors import MachineError, UsageError
from tuner.problem import Problem, Shape
from tuner.registry import builtin_families
from tuner.store import Run, RunInfo, Trial, read_trials
from tuner.workflow import explore as explore_module
from tuner.workflow import measure
from tuner.workflow.explore import ExploreSettings, explore
from tuner.workflow.measure import ReplayMeasurer
from tuner.workflow.progress import Silent
from tuner.workflow.tune import Order, begin, recorded_device, walk

RECORD = Path(__file__).parents[1] / "bench" / "results" / "h200" / "1x4096x12288"
SHAPE = Shape(1, 4096, 12288)


def replay(tmp_path: Path, record: Path = RECORD, **settings: object) -> Run:
    chosen = ExploreSettings(record=record, **settings)  # type: ignore[arg-type]
    return begin(Order(SHAPE, ("bf16",), None, chosen, runs=tmp_path), Silent())[0]


def settings_fields(run: Run) -> ExploreSettings:
    kept = {k: v for k, v in run.info.settings.items() if k not in ("confirm", "llc_bytes")}
    return ExploreSettings(**{**kept, "record": Path(str(kept["record"])), "plugin": None})


def finish(run: Run) -> bytes:
    explore(run, recorded_device(run), settings_fields(run), Silent())
    return run.file("choice.json").read_bytes()


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_the_same_record_gives_the_same_choice(sampler: str, tmp_path: Path) -> None:
    first = finish(replay(tmp_path / "a", sampler=sampler, trials=25))
    again = finish(replay(tmp_path / "b", sampler=sampler, trials=25))
    assert first == again
    choice = json.loads(first)
    assert choice["replay"] is True and choice["chosen"]["family"] in ("hip", "triton")
    assert len(choice["vendors"]) == 2 and choice["ceiling"] is not None


def test_a_run_that_was_cut_off_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = replay(tmp_path / "whole", trials=20)
    wanted = finish(whole)
    lines = whole.file("trials.jsonl").read_bytes().splitlines(keepends=True)
    cut = replay(tmp_path / "cut", trials=20)
    cut.file("trials.jsonl").write_bytes(b"".join(lines[:40]) + lines[40][: len(lines[40]) // 2])
    measured: Counter[tuple[str, Arm]] = Counter()
    real = ReplayMeasurer.measure

    def counting(self: ReplayMeasurer, problem: Problem, arm: Arm, best_us: float | None) -> measure.Outcome:
        measured[str(problem.shape), arm] += 1
        return real(self, problem, arm, best_us)

    monkeypatch.setattr(ReplayMeasurer, "measure", counting)
    assert finish(cut) == wanted
    before = {(t.problem, t.arm) for t in map(Trial.from_line, lines[:40])}
    explore_lines = [t for t in read_trials(cut.file("trials.jsonl")).trials if t.stage == "explore"]
    assert len({(t.problem, t.arm) for t in explore_lines}) == len(explore_lines), "an arm was explored twice"
    assert [t.to_line().encode() for t in explore_lines[:40]] == lines[:40], "a finished trial was changed"
    assert not [key for key in before if measured[key] > 1]


def edited(tmp_path: Path, change) -> Path:
    """The record with every trial line passed through `change`."""
    folder = tmp_path / "record"
    folder.mkdir()
    shutil.copy(RECORD / "run.json", folder)
    lines = [change(json.loads(line)) for line in (RECORD / "trials.jsonl").read_text().splitlines()]
    (folder / "trials.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if line))
    return folder


def test_a_failing_arm_is_never_chosen(tmp_path: Path) -> None:
    best = json.loads(finish(replay(tmp_path / "a", trials=20)))["chosen"]

    def fail_best(trial: dict) -> dict:
        if trial["config"] == best["config"] and trial["family"] == best["family"]:
            return {**trial, "status": "correctness", "reason": "planted", "median_us": None}
        return trial

    choice = json.loads(finish(replay(tmp_path / "b", edited(tmp_path, fail_best), trials=20)))
    assert choice["chosen"] != best
    assert any(d["config"] == best["config"] and d["reason"] == "planted" for d in choice["dropped"])


def test_a_time_that_no_memory_could_give_is_marked_and_not_chosen(tmp_path: Path) -> None:
    """100.66 MB in 20 us are 5.03 TB/s, more than the fastest read of 805 MB in this record."""
    best = json.loads(finish(replay(tmp_path / "a", trials=0)))["chosen"]

    def impossible(trial: dict) -> dict:
        if trial["config"] == best["config"] and trial["family"] == best["family"]:
            return {**trial, "samples_us": [20.0, 20.0, 20.0], "median_us": 20.0}
        return trial

    run = replay(tmp_path / "b", edited(tmp_path, impossible), trials=0)
    choice = json.loads(finish(run))
    assert choice["chosen"] != best
    (marked,) = [t for t in run.trials() if t.stage == "explore" and t.arm == Arm.of(*best.values())]
    share = 4096 * 12288 * 2 / 20.0 / json.loads((RECORD / "choice.json").read_text())["asymptotic"]["bytes_per_us"]
    assert share > 1.02 and marked.status == "invalid"
    assert marked.reason == f"INVALID_OVERPEAK: {100 * share:.0f} % of the fastest read measured"


def test_a_replay_holds_arms_to_the_recorded_ceilings_too(tmp_path: Path) -> None:
    choice = json.loads(finish(replay(tmp_path, trials=0)))
    recorded = json.loads((RECORD / "choice.json").read_text())
    assert choice["asymptotic"] == recorded["asymptotic"] and choice["asymptotic"]["shape"] == "1x4096x98304"


class Counting:
    """A measurer that makes up a time from an arm's key, and counts."""

    def __init__(self) -> None:
        self.measured: Counter[tuple[Problem, Arm]] = Counter()
        self.interleaved = 0

    def open(self, problem: Problem, seed: int) -> None:
        return None

    def ahead(self, problem: Problem, arm: Arm) -> None:
        return None

    def measure(self, problem: Problem, arm: Arm, best_us: float | None) -> measure.Outcome:
        self.measured[problem, arm] += 1
        return self._made_up(problem, arm)

    def interleave(self, problem: Problem, arms: Sequence[Arm], rounds: int, repeats: int) -> list[measure.Outcome]:
        self.interleaved += 1
        return [self._made_up(problem, arm) for arm in arms]

    def _made_up(self, problem: Problem, arm: Arm) -> measure.Outcome:
        us = problem.weight_bytes / 4.5e6 * (1 + int(arm.key[:4], 16) / 65536)
        if arm.key.endswith("0"):
            return measure.Outcome(problem, arm, "runtime", "made up")
        return measure.Outcome(problem, arm, "correct", None, (us, us * 1.001))


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Explore an H200 that is not there."""
    counter = Counting()

    @contextmanager
    def measurer(*_: object) -> Iterator[Counting]:
        yield counter

    monkeypatch.setattr(explore_module, "_measurer", measurer)
    monkeypatch.setattr(explore_module.registry, "available", lambda target, plugin: (builtin_families(), {}))
    return counter


def explored_live(root: Path, shape: Shape, trials: int) -> Run:
    """A run on the record's device, as if it were here."""
    info = recorded_device(Run.open(str(RECORD), root))
    kept = {"trials": trials, "record": None, "plugin": None, "confirm": True, "llc_bytes": None}
    facts = {"argv": [], "shape": str(shape), "weights": ["bf16"], "versions": {}, "plugin": None}
    created = "2026-01-02T03:04:05+00:00"
    return Run.create(root, RunInfo(created=created, device=asdict(info), settings=kept, **facts))  # type: ignore[arg-type]


def go(run: Run) -> bytes:
    explore(run, recorded_device(run), ExploreSettings(trials=int(run.info.settings["trials"])), Silent())
    return run.file("choice.json").read_bytes()


@pytest.mark.parametrize("kept", [5, 33, 70, -3])
def test_no_recorded_trial_is_measured_again_wherever_the_cut_was(
    kept: int, tmp_path: Path, counting: Counting
) -> None:
    whole = explored_live(tmp_path / "whole", SHAPE, 30)
    wanted = go(whole)
    assert set(counting.measured.values()) == {1}
    lines = whole.file("trials.jsonl").read_bytes().splitlines(keepends=True)
    cut = explored_live(tmp_path / "cut", SHAPE, 30)
    cut.file("trials.jsonl").write_bytes(b"".join(lines[:kept]) + lines[kept][:30])
    counting.measured.clear()
    assert go(cut) == wanted
    recorded = {(t.problem, t.arm) for t in map(Trial.from_line, lines[:kept]) if t.stage == "explore"}
    again = {(str(problem.shape), arm) for problem, arm in counting.measured}
    assert not recorded & again and len(recorded) + len(again) == sum(b'"explore"' in line for line in lines)


def test_of_a_problem_of_800_mb_each_ceiling_is_measured_once(tmp_path: Path, counting: Counting) -> None:
    """It is its own asymptotic problem, and a record that holds an arm twice could not be replayed."""
    run = explored_live(tmp_path, Shape(1, 4096, 128256), 3)
    go(run)
    assert set(counting.measured.values()) == {1}
    assert max(Counter((t.problem, t.arm) for t in run.trials() if t.stage == "explore").values()) == 1
    ReplayMeasurer(run.trials(), [Problem(Shape(1, 4096, 128256), "bf16")])


def test_no_correct_candidate_is_said_with_reasons(tmp_path: Path) -> None:
    def fail_all(trial: dict) -> dict:
        if trial["family"] in ("hip", "triton"):
            return {**trial, "status": "runtime", "reason": "planted", "median_us": None}
        return trial

    run = replay(tmp_path / "runs", edited(tmp_path, fail_all), trials=5)
    with pytest.raises(MachineError, match=r"no candidate arm is correct.*runtime: planted"):
        finish(run)


def test_finalists_that_all_fail_on_fresh_data_are_said_with_reasons(tmp_path: Path) -> None:
    def fail_finalists(trial: dict) -> dict:
        if trial["family"] in ("hip", "triton") and trial["stage"] == "finalist":
            return {**trial, "status": "correctness", "reason": "tape: planted", "median_us": None}
        return trial

    run = replay(tmp_path / "runs", edited(tmp_path, fail_finalists), trials=0)
    with pytest.raises(MachineError, match=r"no finalist was correct on fresh data.*correctness: tape: planted"):
        finish(run)


def test_a_record_of_another_shape_is_refused(tmp_path: Path) -> None:
    order = Order(Shape(1, 64, 48), ("bf16",), None, ExploreSettings(record=RECORD), runs=tmp_path)
    run, info = begin(order, Silent())
    with pytest.raises(UsageError, match=r"has no trials of 1x64x48 bf16; it has .*1x4096x12288 bf16"):
        walk(run, info, Silent())


def test_a_replay_ends_without_a_confirmation(tmp_path: Path) -> None:
    run = replay(tmp_path, trials=5)
    outcome = walk(run, recorded_device(run), Silent())
    assert outcome.verdict is None and outcome.exported is None
    assert run.confirmations() == []


def test_a_replay_needs_no_compiler_and_no_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = json.loads(finish(replay(tmp_path / "a", trials=5)))
    for family in builtin_families().values():
        monkeypatch.setattr(type(family), "missing", lambda self, target: "not installed")
    choice = json.loads(finish(replay(tmp_path / "b", trials=5)))
    assert choice["chosen"] == wanted["chosen"] and choice["vendors"] == wanted["vendors"]


def test_no_compiler_is_said_with_the_line_that_installs_it(tmp_path: Path) -> None:
    environment = {**os.environ, "COLDTUNE_STATE": str(tmp_path / "state"), "PATH": str(tmp_path)}
    command = [sys.executable, "-m", "tuner", "--shape", "1x64x48", "--device", "host", "--quick"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 4
    last = done.stderr.strip().splitlines()[-1]
    assert (
        last.startswith("tune: no kernel can be built for")
        and "hip: no C++ compiler; install one: apt-get install g++" in last
    )


def test_kill_9_half_way_loses_no_trial_and_measures_none_again(tmp_path: Path) -> None:
    """The real tool on host, killed while it explores."""
    environment = {**os.environ, "COLDTUNE_STATE": str(tmp_path / "state")}
    command = [sys.executable, "-m", "tuner", "--shape", "1x64x48", "--device", "host", "--trials", "2", "--no-confirm"]
    child = subprocess.Popen(
        [*command, "--quick"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 90
    trials = tmp_path / "runs" / "latest" / "trials.jsonl"
    while time.monotonic() < deadline and (not trials.exists() or trials.read_bytes().count(b"\n") < 8):
        assert child.poll() is None, child.stderr.read() if child.stderr else ""
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept = read_trials(trials).trials
    assert len(kept) >= 8
    resume = [sys.executable, "-m", "tuner", "--resume", "latest"]
    done = subprocess.run(
        resume, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    after = read_trials(trials).trials
    assert list(after[: len(kept)]) == list(kept)
    explored_arms = Counter((t.problem, t.arm) for t in after if t.stage == "explore")
    assert max(explored_arms.values()) == 1
    assert (tmp_path / "runs" / "latest" / "protocol.json").exists()
