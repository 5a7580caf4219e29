"""The compile pool: arms become artifacts in processes of their own, ahead of the device."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from tuner.arms import Arm, Artifact, Target
from tuner.child import Child, ChildDiedError, Failure, Handler
from tuner.errors import ArmCompileError
from tuner.problem import Problem

FLOOR_S = 60.0
FULL_BYTES = 1 << 20
TAIL_FACTOR = 6.0


@dataclass(frozen=True)
class Built:
    """The outcome of one compile: an artifact, or a status with its reason; and the seconds it took."""

    arm: Arm
    artifact: Artifact | None
    status: str
    reason: str | None
    compile_s: float


@dataclass
class _Job:
    arm: Arm
    problem: Problem
    started_s: float


def compile_handler(target: Target, plugin: str | None, cache_dir: str) -> Handler:
    """What a compile process answers: the artifact of a (problem, arm), and the seconds that it took."""
    os.environ["TRITON_CACHE_DIR"] = cache_dir
    # What a killed compiler leaves behind lies in the run folder, not in the system's.
    scratch = Path(cache_dir) / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    from tuner.registry import build

    def handle(request: tuple[Problem, Arm]) -> tuple[Artifact, float]:
        began = time.monotonic()
        try:
            artifact = build(request[0], request[1], target, plugin)
        except Exception as error:
            # On a full disk compilers leave cut-off files, and what is said of those hides the cause.
            if shutil.disk_usage(scratch).free < FULL_BYTES:
                raise ArmCompileError(f"no space is left in {scratch}, where compilers keep their files") from error
            raise
        return artifact, time.monotonic() - began

    return handle


class CompilePool:
    """`size` processes that compile in the order asked; a hang or a crash costs one arm."""

    def __init__(self, size: int, target: Target, plugin: str | None, folder: Path) -> None:
        """Start nothing yet; processes start with the first work."""
        self._size = size
        self._args: tuple[Target, str | None, str] = (target, plugin, str(folder / "cache"))
        self._log = folder / "compile.log"
        self._children: list[Child] = []
        self._jobs: dict[Child, _Job] = {}
        self._queue: deque[tuple[Problem, Arm]] = deque()
        self._done: dict[tuple[Problem, Arm], Built] = {}
        self._times_s: list[float] = []

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for child in self._children:
            child.kill()
        self._children.clear()

    @property
    def size(self) -> int:
        """Processes at most."""
        return self._size

    @property
    def limit_s(self) -> float:
        """Seconds a compile may take: a multiple of the slowest so far, with a floor."""
        return max(FLOOR_S, TAIL_FACTOR * max(self._times_s, default=0.0))

    def submit(self, problem: Problem, arm: Arm) -> None:
        """Queue an arm; asking twice is asking once."""
        key = (problem, arm)
        if key in self._done or key in self._queue or any((j.problem, j.arm) == key for j in self._jobs.values()):
            return
        self._queue.append(key)
        self._feed()

    def result(self, problem: Problem, arm: Arm) -> Built:
        """Wait for an arm that was submitted, and forget it."""
        self.submit(problem, arm)
        while (problem, arm) not in self._done:
            self._pump(1.0)
        return self._done.pop((problem, arm))

    def drain(self) -> None:
        """Wait until nothing compiles, so that the processor is quiet."""
        while self._jobs or self._queue:
            self._pump(1.0)

    def _feed(self) -> None:
        while self._queue:
            idle = next((child for child in self._children if child not in self._jobs), None)
            if idle is None:
                if len(self._children) >= self._size:
                    return
                idle = Child("the compiler", self._log, compile_handler, *self._args)
                self._children.append(idle)
            problem, arm = self._queue.popleft()
            self._jobs[idle] = _Job(arm, problem, time.monotonic())
            try:
                idle.send((problem, arm))
            except ChildDiedError as error:
                self._finish(idle, Failure("compile", str(error), "", True))

    def _pump(self, timeout_s: float) -> None:
        self._feed()
        ready = wait([child.connection for child in self._jobs], timeout_s)
        for child in list(self._jobs):
            if child.connection in ready:
                try:
                    self._finish(child, child.receive(0.0))
                except ChildDiedError as error:
                    self._finish(child, Failure("compile", str(error), "", True))
            elif time.monotonic() - self._jobs[child].started_s > self.limit_s:
                child.kill()
                self._finish(child, Failure("timeout", f"compile took over {self.limit_s:.0f} s", "", True))
        self._feed()

    def _finish(self, child: Child, answer: Any) -> None:
        job = self._jobs.pop(child)
        if isinstance(answer, Failure):
            # Of a process that died only this side knows the time; it may hold some waiting.
            took_s = time.monotonic() - job.started_s if answer.took_s is None else answer.took_s
            status = answer.status if answer.status in ("constraints", "timeout") else "compile"
            built = Built(job.arm, None, status, answer.message, took_s)
            if answer.fatal:
                child.kill()
                self._children.remove(child)
        else:
            artifact, compile_s = answer
            self._times_s.append(compile_s)
            built = Built(job.arm, artifact, "correct", None, compile_s)
        self._done[job.problem, job.arm] = built


def default_size(backend: str) -> int:
    """Compile processes: on a GPU all cores but two, on host all (it compiles and measures in turn)."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(32, cores)) if backend == "host" else max(1, min(32, cores - 2))
