"""Handlers that children of the tests serve; a child imports them by name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from tuner.arms import Arm, Artifact, Target
from tuner.errors import ArmCompileError, ArmConstraintError, MachineError
from tuner.problem import Problem


def make_handler(greeting: str):
    print(f"hello from {greeting}")
    return answer


def answer(request: str) -> object:
    if request == "pid":
        return os.getpid()
    if request == "hang":
        time.sleep(60)
    if request == "compiler hangs":
        subprocess.run([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"])
    if request == "abort":
        os.kill(os.getpid(), signal.SIGABRT)
    if request == "exit":
        os._exit(7)
    if request == "arm":
        raise ArmConstraintError("out of LDS: needs 72 KB of 64 KB")
    if request == "machine":
        raise MachineError("no such device")
    if request == "cuda":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if request == "memory":
        raise MemoryError
    return f"echo {request}"


class Stubborn:
    """A family whose builds fail in every way; a plugin file lists it."""

    name = "stubborn"
    role = "candidate"

    def missing(self, target: Target) -> str | None:
        return None

    def spaces(self, problem: Problem, target: Target) -> tuple:
        return ()

    def fixed(self, problem: Problem, target: Target) -> tuple[Arm, ...]:
        return tuple(Arm.of("stubborn", kernel) for kernel in ("fine", "crash", "refused", "syntax"))

    def build(self, problem: Problem, arm: Arm, target: Target) -> Artifact:
        if arm.kernel == "crash":
            os.kill(os.getpid(), signal.SIGABRT)
        if arm.kernel == "hang":
            time.sleep(60)
        if arm.kernel == "slow":
            time.sleep(0.5)
        if arm.kernel == "refused":
            time.sleep(0.2)
            raise ArmConstraintError("out of LDS: needs 72 KB of 64 KB")
        if arm.kernel == "syntax":
            raise ArmCompileError("error: expected ';'")
        counter = Path(os.environ["STUBBORN_LOG"])
        with counter.open("a") as stream:
            stream.write(arm.kernel + "\n")
        return replace(Artifact(arm, problem, target, b"", "0", "0"))

    def bind(self, artifact: Artifact, slots, tape, loader):
        raise AssertionError("nothing here is bound")
