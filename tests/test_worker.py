"""The measuring worker: an arm that dies, hangs, raises or lies costs its own trial, and the next one is measured."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tuner.arms import Arm
from tuner.devices import choose, target_of
from tuner.problem import Problem, Shape
from tuner.registry import build
from tuner.worker import TrialError, Worker

PROBLEM = Problem(Shape(1, 64, 48), "bf16")
PLUGIN = """
import os, time
from tuner.arms import Arm, Artifact

class Launch:
    def __init__(self, kernel, slots, tape):
        self.kernel, self.slots, self.tape, self.calls = kernel, slots, tape, 0
    def __call__(self, i):
        self.calls += 1
        y = self.tape.activation(i).float() @ self.slots.operand(i, "weight").float().t()
        if self.kernel == "stale" and self.calls > 6:
            return
        if self.kernel == "wrong":
            y = y * 1.1
        self.tape.output(i).copy_(y)
    def receipt(self):
        return {"form": self.kernel, "library": "test", "compiles_in_worker": 0}

class Odd:
    name, role = "odd", "candidate"
    def missing(self, target): return None
    def spaces(self, problem, target): return ()
    def fixed(self, problem, target): return (Arm.of("odd", "right"),)
    def build(self, problem, arm, target): return Artifact(arm, problem, target, b"", "0", "0")
    def bind(self, artifact, slots, tape, loader):
        kernel = artifact.arm.kernel
        if kernel == "dies": os._exit(3)
        if kernel == "hangs": time.sleep(60)
        if kernel == "raises": raise ValueError("boom")
        if kernel == "prints": print("a line in the middle")
        return Launch(kernel, slots, tape)

FAMILIES = [Odd()]
"""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("worker")
    (folder / "odd_plugin.py").write_text(PLUGIN)
    with Worker(choose("host"), str(folder / "odd_plugin.py"), folder / "worker.log", limit_s=10.0) as one:
        one.open(PROBLEM, "nk", seed=1)
        one.folder = folder  # type: ignore[attr-defined]
        yield one


def measured(worker: Worker, kernel: str) -> list[float]:
    artifact = build(PROBLEM, Arm.of("odd", kernel), target_of(choose("host")), str(worker.folder / "odd_plugin.py"))  # type: ignore[attr-defined]
    worker.prepare(artifact, ["self"], kernel)
    samples = worker.block(kernel, "self", 2)
    worker.check(kernel, "self")
    worker.release(kernel)
    return samples


@pytest.mark.parametrize(
    ("kernel", "status", "reason"),
    [
        ("dies", "runtime", "prepare: the worker ended with exit code 3"),
        ("raises", "runtime", "ValueError: boom"),
        ("wrong", "correctness", "gate, input 1: 48 of 48 outputs are wrong"),
        ("stale", "correctness", "tape: 2 of 2 timed launches left NaN"),
        ("hangs", "timeout", "prepare: no answer within 10 s; the worker was restarted"),
    ],
)
def test_a_bad_arm_costs_its_trial_and_the_next_is_measured(
    worker: Worker, kernel: str, status: str, reason: str
) -> None:
    with pytest.raises(TrialError) as failure:
        measured(worker, kernel)
    assert failure.value.status == status and str(failure.value).startswith(reason)
    assert len(measured(worker, "right")) == 2


def test_what_an_arm_prints_lies_in_the_log(worker: Worker) -> None:
    assert len(measured(worker, "prints")) == 2
    assert "a line in the middle" in (Path(worker.folder) / "worker.log").read_text()  # type: ignore[attr-defined]


def test_no_worker_outlives_its_parent_s_use(tmp_path: Path) -> None:
    with Worker(choose("host"), None, tmp_path / "log", limit_s=30.0) as one:
        pid = one.ready()
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid)
