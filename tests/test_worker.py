"""The measuring worker: an arm that dies, hangs, raises or lies costs its own trial, and the next one is measured."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tuner.arms import Arm
from tuner.devices import choose, target_of
from tuner.errors import MachineError
from tuner.problem import Problem, Shape
from tuner.registry import build
from tuner.worker import TrialError, Worker
from tuner.workflow.measure import LiveMeasurer, Outcome

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
        if self.kernel == "dies late" and self.calls > 6:
            os._exit(4)
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
    def build(self, problem, arm, target):
        return Artifact(arm, problem, target, b"code" if arm.kernel.startswith("same") else b"", "0", "0")
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


@pytest.fixture
def live(worker: Worker, tmp_path: Path):
    info, plugin = choose("host"), str(worker.folder / "odd_plugin.py")  # type: ignore[attr-defined]
    with LiveMeasurer(info, target_of(info), "self", plugin, tmp_path, 10.0) as measurer:
        measurer.open(PROBLEM, seed=2)
        yield measurer


def test_a_finalist_that_ends_the_worker_does_not_take_the_others_along(live: LiveMeasurer) -> None:
    arms = [Arm.of("odd", kernel) for kernel in ("right", "dies late", "wrong", "prints")]
    found = {o.arm.kernel: o for o in live.interleave(PROBLEM, arms, rounds=2, repeats=2)}
    assert {kernel: o.status for kernel, o in found.items()} == {
        **{"right": "correct", "dies late": "runtime", "wrong": "correctness", "prints": "correct"}
    }
    assert "exit code 4" in str(found["dies late"].reason)
    for kernel in ("right", "prints"):
        assert len(found[kernel].samples_us) == 4 and found[kernel].receipt["norm_error"] < 1e-2


def test_an_arm_that_fails_when_timed_is_forgotten_by_the_worker(live: LiveMeasurer) -> None:
    def measured_now(kernel: str) -> Outcome:
        return live.measure(PROBLEM, Arm.of("odd", kernel), None)

    stale = measured_now("stale")
    assert stale.status == "correctness" and not live._worker.holds(stale.arm.key)
    assert measured_now("dies late").status == "runtime"
    assert measured_now("right").status == "correct" and live._worker.restarts == 1


def test_equal_code_is_measured_once_on_the_same_data(live: LiveMeasurer) -> None:
    first = live.measure(PROBLEM, Arm.of("odd", "same"), None)
    twin = live.measure(PROBLEM, Arm.of("odd", "same again"), None)
    assert twin.samples_us == first.samples_us and twin.cost["measure_s"] == 0.0
    assert twin.reason == "the same code as odd/same, measured once"
    live.open(PROBLEM, seed=3)
    fresh = live.measure(PROBLEM, Arm.of("odd", "same again"), None)
    assert fresh.reason is None and fresh.samples_us != first.samples_us


def test_a_device_that_cannot_be_opened_is_no_arm_s_failure(tmp_path: Path) -> None:
    (tmp_path / "dying_plugin.py").write_text("import os\nos._exit(9)\n")
    with Worker(choose("host"), str(tmp_path / "dying_plugin.py"), tmp_path / "log", limit_s=30.0) as one:
        with pytest.raises(MachineError, match=r"could not be opened for 1x64x48 bf16: .*exit code 9"):
            one.open(PROBLEM, "nk", seed=1)
