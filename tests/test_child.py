"""Supervised children and the compile pool: a crash, a hang or an exit costs one answer and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import child_handlers
import psutil
import pytest

from tuner import child as child_module
from tuner import pool as pool_module
from tuner.arms import Arm, Target
from tuner.child import Child, ChildDiedError, ChildTimeoutError, Failure
from tuner.pool import CompilePool
from tuner.problem import Problem, Shape

TESTS = Path(__file__).parent
TARGET = Target("host", "none", 32, 1)
PROBLEM = Problem(Shape(1, 64, 48), "bf16")


def child(tmp_path: Path) -> Child:
    return Child("the child", tmp_path / "log", child_handlers.make_handler, "a test")


def test_it_answers_and_its_output_goes_to_the_log(tmp_path: Path) -> None:
    one = child(tmp_path)
    assert one.call("x", 60) == "echo x"
    assert one.call("pid", 60) == one.pid
    one.stop()
    assert "hello from a test" in (tmp_path / "log").read_text()
    assert not psutil.pid_exists(one.pid)


@pytest.mark.parametrize(
    ("request_", "status", "message", "fatal"),
    [
        ("arm", "constraints", "out of LDS: needs 72 KB of 64 KB", False),
        ("machine", "machine", "no such device", False),
        ("cuda", "runtime", "RuntimeError: CUDA error: an illegal memory access was encountered", True),
        ("memory", "runtime", "out of host memory", True),
    ],
)
def test_failures_are_answers(tmp_path: Path, request_: str, status: str, message: str, fatal: bool) -> None:
    one = child(tmp_path)
    answer = one.call(request_, 60)
    assert isinstance(answer, Failure)
    assert (answer.status, answer.message, answer.fatal) == (status, message, fatal)
    if not fatal:
        assert one.call("x", 60) == "echo x"
    one.kill()


def test_a_hang_is_killed_within_its_limit(tmp_path: Path) -> None:
    one = child(tmp_path)
    one.call("x", 60)
    began = time.monotonic()
    with pytest.raises(ChildTimeoutError, match="no answer within 1 s"):
        one.call("hang", 1)
    assert time.monotonic() - began < 5
    assert not psutil.pid_exists(one.pid)


def gone(pid: int) -> bool:
    """True once the process is no more, or is a zombie that init has not collected yet."""
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.05)
    return False


def test_what_a_killed_child_has_started_ends_with_it(tmp_path: Path) -> None:
    one = child(tmp_path)
    one.call("x", 60)
    with pytest.raises(ChildTimeoutError):
        one.call("compiler hangs", 2)
    started = [int(line) for line in (tmp_path / "log").read_text().splitlines() if line.isdigit()]
    assert len(started) == 1 and gone(started[0])


def test_ctrl_c_reaches_the_parent_only(tmp_path: Path) -> None:
    one = child(tmp_path)
    one.call("x", 60)
    assert os.getpgid(one.pid) == one.pid != os.getpgid(0), "a terminal signals its foreground group"
    os.kill(one.pid, signal.SIGINT)
    assert one.call("x", 60) == "echo x"
    one.stop()


@pytest.mark.parametrize(("real", "ends"), [(1, False), (77, True)])
def test_process_1_may_be_the_parent_as_in_a_container(real: int, ends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Parent:
        pid = real

    exits: list[int] = []
    monkeypatch.setattr(child_module.ctypes, "CDLL", lambda name: type("C", (), {"prctl": lambda *a: 0})())
    monkeypatch.setattr(multiprocessing, "parent_process", Parent)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(os, "_exit", exits.append)
    child_module._die_with_parent()
    assert exits == ([1] if ends else [])


@pytest.mark.parametrize(("request_", "text"), [("abort", "killed by SIGABRT"), ("exit", "exit code 7")])
def test_a_death_says_how(tmp_path: Path, request_: str, text: str) -> None:
    one = child(tmp_path)
    with pytest.raises(ChildDiedError, match=text):
        one.call(request_, 60)


def test_a_child_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import sys, os, pathlib, child_handlers\nfrom tuner.child import Child\n"
        "if __name__ == '__main__':\n"
        "    one = Child('c', pathlib.Path(sys.argv[1]), child_handlers.make_handler, 'x')\n"
        "    print(one.call('pid', 60), flush=True)\n    os.kill(os.getpid(), 9)\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "log")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=False,
    )
    assert gone(int(done.stdout)), "the child outlived its parent"


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "stubborn_plugin.py"
    path.write_text("import child_handlers\nFAMILIES = [child_handlers.Stubborn()]\n")
    monkeypatch.setenv("STUBBORN_LOG", str(tmp_path / "builds"))
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    return str(path)


def arm(kernel: str) -> Arm:
    return Arm.of("stubborn", kernel)


def test_one_arm_s_failure_never_fails_another(tmp_path: Path, plugin: str) -> None:
    with CompilePool(1, TARGET, plugin, tmp_path) as pool:
        for kernel in ("fine", "crash", "refused", "syntax", "after"):
            pool.submit(PROBLEM, arm(kernel))
        found = {k: pool.result(PROBLEM, arm(k)) for k in ("fine", "crash", "refused", "syntax", "after")}
    assert [found[k].status for k in found] == ["correct", "compile", "constraints", "compile", "correct"]
    assert found["crash"].reason == "the compiler was killed by SIGABRT"
    assert found["refused"].reason == "out of LDS: needs 72 KB of 64 KB"
    assert found["after"].artifact is not None and found["after"].artifact.arm == arm("after")


def test_asking_twice_builds_once(tmp_path: Path, plugin: str) -> None:
    with CompilePool(2, TARGET, plugin, tmp_path) as pool:
        for _ in range(3):
            pool.submit(PROBLEM, arm("fine"))
        pool.drain()
        pool.submit(PROBLEM, arm("fine"))
        assert pool.result(PROBLEM, arm("fine")).status == "correct"
    assert (tmp_path / "builds").read_text() == "fine\n"


def test_arms_are_built_in_the_order_asked(tmp_path: Path, plugin: str) -> None:
    names = ["fine", "c", "a", "b"]
    with CompilePool(1, TARGET, plugin, tmp_path) as pool:
        for name in names:
            pool.submit(PROBLEM, arm(name))
        assert pool.result(PROBLEM, arm("b")).status == "correct"
    assert (tmp_path / "builds").read_text().split() == names


def test_the_time_of_a_compile_holds_no_waiting(tmp_path: Path, plugin: str) -> None:
    with CompilePool(1, TARGET, plugin, tmp_path) as pool:
        for kernel, least_s in (("slow", 0.5), ("refused", 0.2)):
            pool.submit(PROBLEM, arm(kernel))
            time.sleep(2.5)  # the parent measures, and reads the answer only then
            took_s = pool.result(PROBLEM, arm(kernel)).compile_s
            assert least_s <= took_s < least_s + 0.5


def test_a_compile_that_never_ends_costs_its_limit(
    tmp_path: Path, plugin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "FLOOR_S", 3.0)
    with CompilePool(1, TARGET, plugin, tmp_path) as pool:
        pool.submit(PROBLEM, arm("hang"))
        pool.submit(PROBLEM, arm("fine"))
        began = time.monotonic()
        hung = pool.result(PROBLEM, arm("hang"))
        assert (hung.status, hung.reason) == ("timeout", "compile took over 3 s")
        assert time.monotonic() - began < 8
        assert pool.result(PROBLEM, arm("fine")).status == "correct"
    assert not [p for p in psutil.Process().children(recursive=True) if "spawn_main" in " ".join(p.cmdline())]
