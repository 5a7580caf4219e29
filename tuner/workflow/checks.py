"""The instrument's self-check on its own, as `tune doctor` shows it, and the probes that a confirmation uses too."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tuner.arms import Artifact
from tuner.devices import device_lock, target_of
from tuner.devices.base import DeviceInfo
from tuner.errors import ToolchainError
from tuner.instrument.selfcheck import Check, probe_problem
from tuner.problem import Problem
from tuner.registry import available
from tuner.worker import Worker

SEED = 1
LIMIT_S = 120.0


def probes(problem: Problem, info: DeviceInfo) -> dict[str, Artifact] | None:
    """The ceiling family's empty launch and plain read probe, built; None where no family offers them."""
    target = target_of(info)
    for family in available(target)[0].values():
        offer = getattr(family, "probe", None)
        if offer is None:
            continue
        small = probe_problem(problem, info.llc_bytes)
        return {
            "empty": family.build(problem, offer(problem, target)["empty"], target),
            "probe": family.build(small, offer(small, target)["read"], target),
        }
    return None


def self_checks(info: DeviceInfo, problem: Problem) -> list[Check]:
    """Run every self-check with the first candidate family's default arm.

    Raises:
        ToolchainError: No family can be built for the device.
        MachineError: The device is taken, or its memory does not hold the rotation.
    """
    target = target_of(info)
    artifacts = probes(problem, info)
    candidates = [f for f in available(target)[0].values() if f.role == "candidate"]
    if artifacts is None or not candidates:
        raise ToolchainError("no kernel family can be built for this device; see the compilers above")
    arm = candidates[0].build(problem, candidates[0].fixed(problem, target)[0], target)
    layout = problem.format.layouts[0]
    with tempfile.TemporaryDirectory() as folder, device_lock(info):
        with Worker(info, None, Path(folder) / "worker.log", LIMIT_S) as worker:
            worker.open(problem, layout, SEED)
            prepared = worker.prepare(arm, ["self"], "arm")
            return [prepared.reuse, *worker.self_check(problem, layout, {**artifacts, "arm": arm}, SEED)]
