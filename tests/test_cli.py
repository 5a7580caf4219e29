"""The command line as a person meets it: exit codes, messages, streams, speed."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import run_double

from tuner import cli
from tuner.store import Run

SHAPE = "1x64x48"


def tune(*arguments: str, code: int, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Run in this process; returns standard output and error."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == code, (out, err)
    return out, err


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLDTUNE_STATE", str(tmp_path / "state"))


BAD = {
    ("--shape", "4096"): "three whole numbers",
    ("--shape", "1x4096"): "three whole numbers",
    ("--shape", "0x4096x12288"): "M=0",
    ("--shape", "1x-3x5"): "three whole numbers",
    ("--shape", "9x4096x12288"): "M=9",
    ("--shape", "1x4096x12288x2"): "three whole numbers",
    ("--shape", "axbxc"): "three whole numbers",
    ("--shape", ""): "three whole numbers",
    ("--shape", "1x999999x999999"): "more than",
    ("--shape",): "requires an argument",
    (): "tune --shape 1x4096x12288",
    ("--shape", SHAPE, "--device", "tpu"): "'tpu'",
    ("--shape", SHAPE, "--sampler", "magic"): "'magic'",
    ("--shape", SHAPE, "--weights", "int3"): "'int3'",
    ("--shape", SHAPE, "--weights", "bf16,bf16"): "twice",
    ("--shape", SHAPE, "--weights", ""): "''",
    ("--shape", SHAPE, "--neighbour", "loud"): "'loud'",
    ("--shape", SHAPE, "--require", "luck"): "--require faster",
    ("--shape", SHAPE, "--trials", "-3"): "--trials '-3'",
    ("--shape", SHAPE, "--trials", "1.5"): "--trials '1.5'",
    ("--shape", SHAPE, "--trials", "many"): "--trials 200",
    ("--shape", SHAPE, "--seed", "-1"): "--seed '-1'",
    ("--shape", SHAPE, "--llc", "0"): "--llc '0'",
    ("--shape", SHAPE, "--require", "faster", "--no-confirm"): "needs a confirmation",
    ("--shape", SHAPE, "--plugin", "none.py"): "none.py",
    ("--shape", SHAPE, "--simulate", "nowhere"): "does not exist",
    ("--resume", "nope"): "'nope'",
    ("--resume", "latest"): "no run in",
    ("--resume", "latest", "--trials", "3"): "--trials",
    ("--trials", "3", "ls"): "--trials goes with tune --shape",
    ("show", "nope"): "'nope'",
    ("export", "nope"): "'nope'",
    ("confirm",): "no run in",
    ("freeze", "latest"): "no run in",
    ("frobnicate",): "frobnicate",
    ("--frobnicate",): "--frobnicate",
    ("space",): "--shape",
    ("space", "--shape", SHAPE, "--arch", "h200"): "'h200'",
    ("doctor", "--shape", "1x2"): "three whole numbers",
}


@pytest.mark.parametrize(("arguments", "words"), BAD.items(), ids=lambda value: " ".join(value) or "none")
def test_bad_usage_exits_2_with_one_clear_message(
    arguments: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = tune(*arguments, code=2, capsys=capsys)
    assert words in err
    assert "Traceback" not in err + out
    assert out == ""
    assert not (tmp_path / "runs").exists()


def test_an_error_is_one_json_object_where_json_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = tune("--shape", "4096", "--json", code=2, capsys=capsys)
    found = json.loads(out)
    assert found["exit_code"] == 2 and "'4096'" in found["error"] and "'4096'" in err


def test_no_such_gpu_exits_4(capsys: pytest.CaptureFixture[str]) -> None:
    _, err = tune("--shape", SHAPE, "--device", "cuda:97", code=4, capsys=capsys)
    assert "cuda:97" in err and "host" in err


def test_without_torch_the_line_that_installs_it_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    _, err = tune("--shape", SHAPE, code=4, capsys=capsys)
    assert "torch is not installed" in err and "pip install 'coldtune[cpu]'" in err
    assert not (tmp_path / "runs").exists()


def test_a_read_only_place_exits_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    _, err = tune("--shape", SHAPE, "--device", "host", "--runs", "file/runs", code=4, capsys=capsys)
    assert "cannot write" in err and "--runs" in err


def test_a_read_only_run_folder_exits_4(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import filelock

    def read_only(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    run = run_double.begin(tmp_path / "runs")
    monkeypatch.setattr(filelock.FileLock, "acquire", read_only)
    _, err = tune("--resume", "latest", code=4, capsys=capsys)
    assert f"cannot write {run.path}: it is read-only for you" in err and "copy the run folder" in err


def test_a_fault_of_ours_is_one_line_and_a_traceback_only_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tuner.workflow import report

    def broken(root: Path) -> None:
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr(report, "listing", broken)
    _, err = tune("ls", code=4, capsys=capsys)
    assert err.count("\n") == 1 and "ZeroDivisionError: one;" in err and "--debug" in err
    _, err = tune("ls", "--debug", code=4, capsys=capsys)
    assert "Traceback" in err and "broken" in err


def test_an_interrupt_before_a_run_says_that_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tuner.workflow import report

    def interrupted(root: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "listing", interrupted)
    _, err = tune("ls", code=130, capsys=capsys)
    assert "nothing was begun" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["", "freeze", "confirm", "export", "report", "show", "ls", "doctor", "space"])
def test_help_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = tune(*command.split(), "--help", code=0, capsys=capsys)
    assert "Examples:" in out and f"tune {command}".strip() in out


def test_ls_without_runs_says_how_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = tune("ls", code=0, capsys=capsys)
    assert "no run" in out and "tune --shape" in out


def test_the_space_is_shown_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = tune("space", "--shape", "1x4104x12288", "--arch", "gfx1100", code=0, capsys=capsys)
    for words in ("1x4104x12288 bf16", "split_k", "workgroups that share one output", "cpt divides K", "can run"):
        assert words in out


@pytest.mark.parametrize("arguments", [["--help"], ["ls"], ["show"]])
def test_quick_commands_import_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    run_double.finish(tmp_path / "runs")
    code = (
        "import sys; from tuner import cli\n"
        f"try: cli.main({arguments!r})\n"
        "except SystemExit as end: assert end.code == 0, end.code\n"
        "heavy = {'torch', 'pandas', 'scipy', 'optuna', 'triton', 'numpy', 'plotly'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


class Steps:
    """Stand-ins for explore, freeze and confirm that leave what the real ones leave, and count their calls."""

    def __init__(self, verdict: str = "FASTER", outcome: str = "VALID") -> None:
        self.calls: list[str] = []
        self.settings: Any = None
        self.info: Any = None
        self._verdict, self._outcome = verdict, outcome

    def explore(self, run: Run, info: Any, settings: Any, progress: Any) -> dict[str, Any]:
        self.calls.append("explore")
        self.settings, self.info = settings, info
        progress.begin("explore", 3)
        progress.advance("arm", 10.0, {"compile": 1})
        progress.end()
        run_double.explored(run)
        return {}

    def freeze(self, run: Run, **_: Any) -> Any:
        self.calls.append("freeze")
        return run_double.freeze(run)

    def confirm(self, run: Run, progress: Any, replicate: bool = False) -> Any:
        self.calls.append("confirm")
        return run_double.confirm(run, self._verdict, self._outcome)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> Steps:
        for name in ("explore", "freeze", "confirm"):
            module = importlib.import_module(f"tuner.workflow.{name}")
            monkeypatch.setattr(module, name, getattr(self, name))
        return self


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(run_double.PLUGIN)
    return str(tmp_path / "mine.py")


def test_a_whole_run_begins_with_the_device_and_ends_with_an_export(
    monkeypatch: pytest.MonkeyPatch, plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps().install(monkeypatch)
    arguments = ("--shape", SHAPE, "--trials", "7", "--seed", "3", "--neighbour", "self", "--plugin", plugin)
    out, _ = tune(*arguments, "--device", "host", "--llc", "1000000", code=0, capsys=capsys)
    assert out.startswith("rehearsal on host ") and "nothing here is a GPU result" in out.splitlines()[0]
    assert "FASTER: 1.178x" in out and "exported: runs/" in out and "--simulate" in out
    assert steps.calls == ["explore", "freeze", "confirm"]
    assert (steps.settings.trials, steps.settings.seed, steps.settings.neighbour) == (7, 3, "self")
    assert str(steps.settings.plugin) == plugin
    assert steps.info.llc_bytes == 1000000
    run = Run.open("latest")
    assert sorted(path.name for path in run.path.iterdir() if path.name[0] != ".") == [
        *("best.json", "choice.json", "confirm-001", "protocol.json", "protocol.md"),
        *("report.html", "run.json", "trials.jsonl"),
    ]


def test_without_a_gpu_the_default_says_so(
    monkeypatch: pytest.MonkeyPatch, plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from tuner import devices

    monkeypatch.setattr(devices, "choose", lambda spec, llc_bytes=None: devices.discover()[-1])
    Steps().install(monkeypatch)
    out, _ = tune("--shape", SHAPE, "--plugin", plugin, code=0, capsys=capsys)
    assert out.startswith("no GPU found: rehearsal on host ")


def test_json_is_one_object_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Steps("SLOWER").install(monkeypatch)
    arguments = ("--shape", SHAPE, "--device", "host", "--plugin", plugin, "--json", "--require", "faster")
    out, err = tune(*arguments, code=1, capsys=capsys)
    found = json.loads(out)
    assert out.count("\n") == 1
    assert (found["verdict"], found["outcome"], found["ratio"], found["interval"]) == (
        *("SLOWER", "VALID", 1.178),
        [1.177, 1.18],
    )
    assert found["choice"] == {"family": "mine", "kernel": "toy", "config": run_double.CONFIG}
    assert found["exit_code"] == 1 and "SLOWER" in found["exit_reason"]
    assert Path(found["export"]).is_file() and Path(found["run"]).is_dir()
    assert "rehearsal on host" in err


@pytest.mark.parametrize(
    ("verdict", "outcome", "arguments", "code"),
    [
        ("SLOWER", "VALID", (), 0),
        ("AMBIGUOUS", "VALID", (), 0),
        ("FASTER", "VALID", ("--require", "faster"), 0),
        ("SAME", "VALID", ("--require", "faster"), 1),
        ("FASTER", "VOID", (), 1),
    ],
)
def test_exit_code_by_verdict(
    monkeypatch: pytest.MonkeyPatch,
    plugin: str,
    capsys: pytest.CaptureFixture[str],
    verdict: str,
    outcome: str,
    arguments: tuple[str, ...],
    code: int,
) -> None:
    Steps(verdict, outcome).install(monkeypatch)
    tune("--shape", SHAPE, "--device", "host", "--plugin", plugin, *arguments, code=code, capsys=capsys)
    assert Run.open("latest").has("best.json") == (outcome == "VALID")


def test_no_confirm_stops_at_the_freeze_and_confirm_goes_on(
    monkeypatch: pytest.MonkeyPatch, plugin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps().install(monkeypatch)
    out, _ = tune("--shape", SHAPE, "--device", "host", "--plugin", plugin, "--no-confirm", code=0, capsys=capsys)
    assert steps.calls == ["explore", "freeze"] and "next: tune confirm" in out and "estimate" in out
    out, _ = tune("--resume", "latest", code=0, capsys=capsys)
    assert steps.calls == ["explore", "freeze"] and "finished" in out
    out, _ = tune("confirm", code=0, capsys=capsys)
    assert steps.calls[2:] == ["confirm"] and "FASTER" in out


def test_resume_goes_on_at_the_first_step_not_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps().install(monkeypatch)
    for prepare, left in (
        ((), ["explore", "freeze", "confirm"]),
        ((run_double.explored,), ["freeze", "confirm"]),
        ((run_double.explored, run_double.freeze), ["confirm"]),
        ((run_double.explored, run_double.freeze, run_double.confirm), []),
    ):
        steps.calls.clear()
        run = run_double.begin(tmp_path / "runs")
        for step in prepare:
            step(run)
        tune("--resume", run.name, code=0, capsys=capsys)
        assert steps.calls == left
        assert run.has("best.json")


def test_a_finished_run_says_so_and_exits_0_even_if_void(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = Steps().install(monkeypatch)
    run = run_double.finish(tmp_path / "runs", outcome="VOID")
    out, _ = tune("--resume", str(run.path), code=0, capsys=capsys)
    assert "is finished" in out and "tune confirm" in out and steps.calls == []


def test_resume_on_another_device_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_double.begin(tmp_path / "runs")
    data = run.read_json("run.json")
    data["device"]["units"] += 1
    run.write_json("run.json", data)
    _, err = tune("--resume", "latest", code=3, capsys=capsys)
    assert "units" in err and f"tune --shape {SHAPE}" in err


def _edit_protocol(run: Run) -> None:
    file = run.file("protocol.json")
    file.write_text(file.read_text().replace('"processes": 5', '"processes": 6'))


def _cut_choice(run: Run) -> None:
    run.file("choice.json").write_text('{"schema": 1, "cho')


def _damage_trials(run: Run) -> None:
    file = run.file("trials.jsonl")
    file.write_text("{nonsense\n" + file.read_text())


def _newer_run(run: Run) -> None:
    file = run.file("run.json")
    file.write_text(file.read_text().replace('"schema": 1', '"schema": 9'))


@pytest.mark.parametrize(
    ("damage", "command", "words"),
    [
        (_edit_protocol, ("show",), "edited after it was frozen"),
        (_edit_protocol, ("export",), "edited after it was frozen"),
        (_edit_protocol, ("confirm",), "edited after it was frozen"),
        (_cut_choice, ("--resume", "latest"), "choice.json is damaged"),
        (_damage_trials, ("show",), "trials.jsonl line 1"),
        (_newer_run, ("show",), "Update coldtune"),
        (lambda run: run.file("run.json").unlink(), ("show",), "no run.json"),
    ],
)
def test_what_was_changed_or_damaged_is_refused(
    damage: Any, command: tuple[str, ...], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_double.finish(tmp_path / "runs")
    damage(run)
    _, err = tune(*command, code=3, capsys=capsys)
    assert words in err and "Traceback" not in err


def test_simulate_takes_its_device_from_the_record_and_is_never_confirmed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_double.finish(tmp_path / "records")
    data = record.read_json("run.json")
    data["device"].update(kind="cuda", name="NVIDIA H200", arch="sm_90")
    record.write_json("run.json", data)
    steps = Steps().install(monkeypatch)
    out, _ = tune("--shape", SHAPE, "--simulate", str(record.path), code=0, capsys=capsys)
    assert out.startswith("replay of a recorded run on NVIDIA H200")
    assert steps.calls == ["explore"] and steps.info.arch == "sm_90"
    assert steps.settings.record == record.path
    assert "neither confirmed nor exported" in out
    _, err = tune("--shape", SHAPE, "--simulate", str(record.path), "--device", "host", code=2, capsys=capsys)
    assert "exclude each other" in err


SLOW = """
import subprocess, sys, time
from pathlib import Path
import run_double
import tuner.workflow.explore
from tuner import cli

def explore(run, info, settings, progress):
    run_double.explored(run)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path("ready").write_text(str(child.pid))
    time.sleep(60)

tuner.workflow.explore.explore = explore
cli.main(["--shape", "1x64x48", "--device", "host"] + sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_says_what_is_kept_and_leaves_no_child(tmp_path: Path, number: signal.Signals) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parent) + os.pathsep + os.environ.get("PYTHONPATH", ""),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    ready = tmp_path / "ready"
    deadline = time.monotonic() + 60
    while process.poll() is None and not (ready.exists() and ready.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "3 trials are kept in runs/" in err and "tune --resume runs/" in err and "Traceback" not in err
    assert json.loads(out)["exit_code"] == 130
    assert not psutil.pid_exists(int(ready.read_text()))
    assert len(Run.open("latest").trials()) == 3


def test_version_is_said_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert re.fullmatch(r"coldtune \d+\.\d+\.\d+\n", capsys.readouterr().out)
