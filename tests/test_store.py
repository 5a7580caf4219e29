"""The run folder: what a crash, a stranger's file or a full disk may do to it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner import files, ledger
from tuner.arms import Arm
from tuner.errors import MachineError, RefusedError, UsageError
from tuner.folders import slug
from tuner.store import SCHEMA, STATUSES, Run, RunInfo, Trial, list_runs, read_json, read_trials, state_dir, versions

INFO = RunInfo(created="2026-01-02T03:04:05+00:00", shape="1x64x48", weights=["bf16"], device={"name": "NVIDIA H200"})


def a_trial(number: int, **changes: object) -> Trial:
    fields: dict[str, object] = {
        "trial": number,
        "stage": "explore",
        "family": "hip",
        "kernel": "skinny_gemm",
        "config": {"rows": 1, "m_spec": True, "layout": "nk"},
        "problem": "1x64x48",
        "weights": "bf16",
        "status": "correct",
        "samples_us": [2.0, 1.0, 3.0],
        "median_us": 2.0,
    }
    return Trial.model_validate({**fields, **changes})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "runs", INFO)


def test_a_trial_line_has_the_fields_of_the_design_in_order_and_comes_back() -> None:
    line = a_trial(7).to_line()
    assert line.endswith("\n") and line.count("\n") == 1
    assert list(json.loads(line)) == [
        *("schema", "trial", "stage", "family", "kernel", "config", "problem", "weights"),
        *("status", "reason", "samples_us", "median_us", "receipt", "cost"),
    ]
    back = Trial.from_line(line)
    assert back == a_trial(7)
    assert back.config["m_spec"] is True and back.config["rows"] == 1 and type(back.config["rows"]) is int
    assert back.arm == Arm.of("hip", "skinny_gemm", {"m_spec": True, "layout": "nk", "rows": 1})


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_is_taken(status: str) -> None:
    assert a_trial(0, status=status).status == status


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"status": "great"}, "status"),
        ({"stage": "later"}, "stage"),
        ({"trial": -1}, "trial"),
        ({"surprise": 1}, "surprise"),
        ({"samples_us": ["fast"]}, "samples_us"),
        ({"config": {"rows": [1]}}, "config"),
        ({"schema": 0}, "schema"),
    ],
)
def test_a_wrong_field_is_refused_and_named(change: dict[str, object], named: str) -> None:
    data = {**json.loads(a_trial(0).to_line()), **change}
    with pytest.raises(RefusedError, match=named):
        Trial.from_line(json.dumps(data))


def test_a_newer_schema_is_refused_with_both_numbers() -> None:
    data = {**json.loads(a_trial(0).to_line()), "schema": SCHEMA + 1, "unknown": 1}
    with pytest.raises(RefusedError, match=rf"schema {SCHEMA + 1}.*up to {SCHEMA}.*Update"):
        Trial.from_line(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "1", "null", "{", '{"a": NaN}', "[" * 100_000, "\udcff", "1" * 10_000])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(RefusedError):
        Trial.from_line(text.encode("utf-8", "surrogateescape"))


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_or_a_trial(data: bytes) -> None:
    with pytest.raises(RefusedError):
        Trial.from_line(data)


def test_folders_are_named_and_numbered(tmp_path: Path) -> None:
    runs = [Run.create(tmp_path, INFO) for _ in range(3)]
    base = runs[0].name
    assert base.endswith("-1x64x48-nvidia-h200") and len(base.split("-")[0]) == 4
    assert [run.name for run in runs] == [base, f"{base}-2", f"{base}-3"]
    assert Run.open("latest", tmp_path).name == f"{base}-3"
    assert Run.open(base, tmp_path).info == INFO
    assert Run.open(tmp_path / base).info == INFO
    assert [path.name for path in list_runs(tmp_path)] == [base, f"{base}-2", f"{base}-3"]


def test_latest_as_a_text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(Path, "symlink_to", no_links)
    run = Run.create(tmp_path, INFO)
    assert (tmp_path / "latest").read_text() == f"{run.name}\n"
    assert Run.open("latest", tmp_path).name == run.name
    (tmp_path / "latest").write_text("../../etc\n")
    with pytest.raises((UsageError, RefusedError)):
        Run.open("latest", tmp_path)


@pytest.mark.parametrize(
    ("text", "want"), [("AMD Radeon RX 7900 XTX", "amd-radeon-rx-7900-xtx"), ("../..", "device"), ("ä" * 99, "device")]
)
def test_slug(text: str, want: str) -> None:
    assert slug(text) == want


def test_an_unknown_run_lists_what_exists(run: Run) -> None:
    with pytest.raises(UsageError, match=f"'nope'.*{run.name}.*latest"):
        Run.open("nope", run.path.parent)


def test_no_run_yet(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run in .*tune --shape"):
        Run.open("latest", tmp_path)


def test_half_made_and_damaged_run_folders(run: Run) -> None:
    (run.path / "run.json").write_text('{"schema": 1, "cre')
    with pytest.raises(RefusedError, match=r"run\.json is damaged"):
        Run.open(run.path)
    (run.path / "run.json").unlink()
    with pytest.raises(RefusedError, match=r"no run\.json.*tune --shape"):
        Run.open(run.path)


def test_trials_are_appended_and_a_cut_line_is_dropped_and_said(run: Run) -> None:
    for number in range(3):
        run.append(a_trial(number))
    file = run.path / "trials.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    again = Run.open(run.path)
    assert [trial.trial for trial in again.trials()] == [0, 1]
    assert again.notes == ["trials.jsonl ends in a half-written line, which is left out; 2 trials are kept"]
    again.append(a_trial(2))
    assert file.read_bytes() == whole


def test_every_cut_of_the_file_keeps_all_whole_lines(run: Run, tmp_path: Path) -> None:
    for number in range(2):
        run.append(a_trial(number))
    data = (run.path / "trials.jsonl").read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(0, len(data), 7):
        (tmp_path / "cut.jsonl").write_bytes(data[:cut])
        found = read_trials(tmp_path / "cut.jsonl")
        assert len(found.trials) == (1 if cut >= first else 0)
        assert found.good_bytes == (first if cut >= first else 0)


def test_a_damaged_line_inside_is_refused_by_number_and_left(run: Run) -> None:
    for number in range(3):
        run.append(a_trial(number))
    file = run.path / "trials.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    damaged = lines[0] + lines[1][:10] + b"\n" + lines[2]
    file.write_bytes(damaged)
    with pytest.raises(RefusedError, match=r"trials\.jsonl line 2"):
        run.trials()
    with pytest.raises(RefusedError, match="line 2"):
        Run.open(run.path).append(a_trial(3))
    assert file.read_bytes() == damaged


def test_a_full_disk_keeps_earlier_trials(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.append(a_trial(0))
    real = os.write

    def half_then_full(handle: int, data: bytes) -> int:
        if len(data) > 50:
            return real(handle, data[:50])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", half_then_full)
        with pytest.raises(MachineError, match="disk is full"):
            run.append(a_trial(1))
    assert [trial.trial for trial in run.trials()] == [0]
    run.append(a_trial(1))
    assert [trial.trial for trial in run.trials()] == [0, 1]


@pytest.mark.parametrize(("number", "words"), [(errno.EROFS, "read-only"), (errno.ENOSPC, "disk is full")])
def test_atomic_write_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    file = tmp_path / "a.json"
    files.write_json(file, {"old": 1})

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(MachineError, match=words):
        files.write_json(file, {"new": 1})
    assert read_json(file) == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"cannot write .*--runs"):
        Run.create(tmp_path / "file" / "runs", INFO)


def test_json_never_holds_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "a.json", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_large_and_special_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "big.json").write_text("[" + "1," * 100 + "1]")
    with pytest.raises(RefusedError, match="more than"):
        read_json(tmp_path / "big.json", limit_bytes=100)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RefusedError, match="regular file"):
        read_json(tmp_path / "pipe")
    with pytest.raises(UsageError, match="does not exist"):
        read_json(tmp_path / "none.json")


def test_the_lock_names_its_holder_and_may_be_held_twice(run: Run) -> None:
    code = f"from tuner.store import Run; from pathlib import Path\nwith Run.open(Path({str(run.path)!r})).lock(): pass"
    with run.lock(), run.lock():
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode != 0
        assert f"in use by process {os.getpid()}" in done.stderr
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_confirmations_are_numbered_and_numbers_are_never_used_twice(run: Run) -> None:
    assert run.confirmations() == []
    assert [run.next_confirm()[0] for _ in range(3)] == [1, 2, 3]
    (run.path / "confirm-002").rmdir()
    number, path = run.next_confirm()
    assert (number, path.name) == (4, "confirm-004")
    assert [path.name for path in run.confirmations()] == ["confirm-001", "confirm-003", "confirm-004"]


def test_versions_name_this_python_and_import_nothing() -> None:
    found = versions()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["coldtune"] and found["numpy"]


def test_state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDTUNE_STATE", str(tmp_path / "own"))
    assert state_dir() == tmp_path / "own" and (tmp_path / "own").is_dir()
    monkeypatch.delenv("COLDTUNE_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert state_dir() == tmp_path / "xdg" / "coldtune"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert state_dir() == tmp_path / "home" / ".local" / "state" / "coldtune"


def test_the_ledger_keeps_devices_and_shapes_apart_and_survives_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLDTUNE_STATE", str(tmp_path))
    assert ledger.attempts("GPU-1", "1x2x3") == []
    ledger.append("GPU-1", "1x2x3", {"number": 1})
    ledger.append("GPU-2", "1x2x3", {"number": 1})
    ledger.append("GPU-1", "1x2x4", {"number": 1})
    with (tmp_path / "attempts.jsonl").open("a") as stream:
        stream.write('{"schema": 1, "dev')
    ledger.append("GPU-1", "1x2x3", {"number": 2})
    assert ledger.attempts("GPU-1", "1x2x3") == [{"number": 1}, {"number": 2}]
    assert ledger.attempts("GPU-2", "1x2x3") == [{"number": 1}]
