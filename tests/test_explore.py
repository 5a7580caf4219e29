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
from pathlib import Path

import pytest

from tuner.arms import Arm
from tuner.errors import MachineError, UsageError
from tuner.problem import Problem, Shape
from tuner.registry import builtin_families
from tuner.store import Run, Trial, read_trials
from tuner.workflow import measure
from tuner.workflow.explore import ExploreSettings, explore
from tuner.workflow.measure import ReplayMeasurer
from tuner.workflow.progress import Silent
from tuner.workflow.search import Search
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
    measured: Counter[Arm] = Counter()
    real = ReplayMeasurer.measure

    def counting(self: ReplayMeasurer, problem: Problem, arm: Arm, best_us: float | None) -> measure.Outcome:
        measured[arm] += 1
        return real(self, problem, arm, best_us)

    monkeypatch.setattr(ReplayMeasurer, "measure", counting)
    assert finish(cut) == wanted
    before = {Trial.from_line(line).arm for line in lines[:40]}
    explore_lines = [t for t in read_trials(cut.file("trials.jsonl")).trials if t.stage == "explore"]
    assert len({t.arm for t in explore_lines}) == len(explore_lines), "an arm was explored twice"
    assert [t.to_line().encode() for t in explore_lines[:40]] == lines[:40], "a finished trial was changed"
    assert not [arm for arm in before if measured[arm] > 1]


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


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_search_proposes_each_valid_arm_once_and_the_same_for_the_same_seed(sampler: str) -> None:
    from tuner.arms import Target

    target, problem = Target("cuda", "sm_90", 32, 132, 1024, 232448), Problem(SHAPE, "bf16")
    spaces = [s for f in ("triton", "hip") for s in builtin_families()[f].spaces(problem, target)]

    def proposals(seed: int) -> list[Arm]:
        search = Search(sampler, spaces, seed)
        found = []
        for number in range(40):
            arm = search.ask()
            assert arm is not None
            found.append(arm)
            search.tell(arm, None if number % 7 == 0 else 20.0 + number % 5)
        return found

    first = proposals(3)
    assert len(set(first)) == 40 and first == proposals(3)
    by_name = {s.family: s for s in spaces}
    assert all(by_name[arm.family].violated(arm.config) is None for arm in first)
    if sampler != "grid":
        assert first != proposals(4)


def test_a_replay_needs_no_compiler_and_no_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = json.loads(finish(replay(tmp_path / "a", trials=5)))
    for family in builtin_families().values():
        monkeypatch.setattr(type(family), "missing", lambda self, target: "not installed")
    choice = json.loads(finish(replay(tmp_path / "b", trials=5)))
    assert choice["chosen"] == wanted["chosen"] and choice["vendors"] == wanted["vendors"]


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
def test_search_without_a_space_proposes_nothing(sampler: str) -> None:
    assert Search(sampler, [], 1).ask() is None


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
