"""The measuring worker: one process a device, killable. The parent asks step by step; the child only measures."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tuner.arms import Artifact, Value
from tuner.child import Child, ChildDiedError, ChildTimeoutError, Failure, Handler
from tuner.devices.base import DeviceInfo
from tuner.errors import ArmError, MachineError
from tuner.instrument.timer import TimerSettings
from tuner.problem import Problem

if TYPE_CHECKING:
    from tuner.instrument.rotation import RotationPlan
    from tuner.instrument.selfcheck import Check

OPEN_LIMIT_S = 300.0


class TrialError(ArmError):
    """An arm failed in the worker; `status` is the trial status it has."""

    def __init__(self, status: str, message: str) -> None:
        """Carry the status of this one failure."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Opened:
    """What a session found when it opened."""

    plan: RotationPlan
    places: int


@dataclass(frozen=True)
class Prepared:
    """What is known of an arm once it is bound and captured."""

    receipt: dict[str, Value]
    notes: tuple[str, ...]
    launches: dict[str, int]
    reuse: Check


@dataclass(frozen=True)
class Request:
    """One call of a method of `Bench`."""

    method: str
    kwargs: dict[str, Any] = field(default_factory=dict)


class Bench:
    """The child's side: an opened device, its sessions, and the arms bound to them."""

    def __init__(self, info: DeviceInfo, plugin: str | None) -> None:
        """Import what measuring needs; the device is touched only by `open`."""
        import torch  # noqa: F401  # imported here so that the next process can start up while one measures

        from tuner.registry import families

        self._info = info
        self._families = families(plugin)
        self._timer = TimerSettings.of(info.kind)
        self._sessions: dict[tuple[Problem, str], Any] = {}
        self._arms: dict[str, Any] = {}
        self._device: Any = None
        self._warm = False

    def ready(self) -> int:
        """Answer once the imports are done."""
        return os.getpid()

    def open(self, problem: Problem, layout: str, seed: int, alone: bool = True) -> Opened:
        """Open the device and make a session; `alone` drops all earlier ones and the arms bound to them."""
        from tuner.devices import open_device
        from tuner.instrument.session import Session

        if self._device is None:
            self._device = open_device(self._info)
        if alone and self._sessions:
            # The old data's memory must be free before new data is planned.
            self._sessions.clear()
            self._arms.clear()
            gc.collect()
            self._device.trim()
        session = Session(self._device, problem, layout, seed, self._timer)
        self._sessions[problem, layout] = session
        return Opened(session.plan, session.tape.launches)

    def prepare(self, artifact: Artifact, neighbours: Sequence[str], name: str) -> Prepared:
        """Bind an arm under a name, hold it to the gate, and make its timed units."""
        from tuner.instrument.selfcheck import structural
        from tuner.instrument.timer import untimed

        session = self._session(artifact)
        arm = session.bind(self._families[artifact.arm.family], artifact)
        for neighbour in neighbours:
            session.add_unit(arm, neighbour)
        if not self._warm and self._timer.warmup_us:
            # Once a process: launches until the clocks are up, before anything is timed.
            untimed(session.device, arm.units[neighbours[0]], self._timer.warmup_us)
        self._warm = True
        self._arms[name] = (session, arm)
        launches = {neighbour: unit.launches for neighbour, unit in arm.units.items()}
        return Prepared(arm.receipt(), tuple(arm.notes), launches, structural(session, arm, neighbours[0]))

    def block(self, name: str, neighbour: str, repeats: int) -> list[float]:
        """Time one block; microseconds a launch."""
        session, arm = self._arms[name]
        samples: list[float] = session.block(arm, neighbour, repeats)
        return samples

    def check(self, name: str, neighbour: str) -> float:
        """Check launches that were timed last against float64."""
        session, arm = self._arms[name]
        return float(session.check(arm, neighbour))

    def release(self, name: str) -> None:
        """Forget an arm and free what it holds."""
        self._arms.pop(name, None)

    def self_check(self, problem: Problem, layout: str, artifacts: dict[str, Artifact], seed: int) -> list[Check]:
        """Empty launch, A/A, S against S/2, warm against cold. `artifacts`: `empty`, `arm`, `probe`."""
        from tuner.instrument import selfcheck
        from tuner.instrument.session import Session

        session = self._sessions[problem, layout]
        arm, probe = artifacts["arm"], artifacts["probe"]
        checks = [selfcheck.empty_launch(session, self._families[artifacts["empty"].arm.family], artifacts["empty"])]
        checks += selfcheck.halves_agree(session, self._families[arm.arm.family], arm)
        small = Session(self._device, probe.problem, layout, seed, self._timer)
        checks.append(selfcheck.warm_probe(self._device, small, self._families[probe.arm.family], probe))
        return checks

    def fingerprint(self) -> int:
        """A sum over all weights of all sessions: the same as long as nothing wrote to them."""
        return sum(session.rotation.fingerprint() for session in self._sessions.values())

    def state(self) -> dict[str, Any]:
        """Telemetry and tenants, read between blocks."""
        return {"telemetry": self._device.telemetry(), "tenants": self._device.tenants()}

    def _session(self, artifact: Artifact) -> Any:
        layout = str(artifact.arm.config.get("layout", artifact.problem.format.layouts[0]))
        return self._sessions[artifact.problem, layout]


def bench_handler(info: DeviceInfo, plugin: str | None) -> Handler:
    """What the worker answers: the result of the named method."""
    bench = Bench(info, plugin)

    def handle(request: Request) -> Any:
        return getattr(bench, request.method)(**request.kwargs)

    return handle


class Worker:
    """The parent's side: typed calls with a time limit; a dead child is started again by the next call."""

    def __init__(self, info: DeviceInfo, plugin: str | None, log: Path, limit_s: float) -> None:
        """Start the child; it imports and waits."""
        self._args = (info, plugin)
        self._log = log
        self._limit_s = limit_s
        self._opened: list[dict[str, Any]] = []
        self._bound: set[str] = set()
        self.restarts = 0
        self._child: Child | None = self._start()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._child is not None:
            if kind is None:
                self._child.stop()
            else:
                self._child.kill()

    def _start(self) -> Child:
        return Child("the worker", self._log, bench_handler, *self._args)

    def open(self, problem: Problem, layout: str, seed: int, alone: bool = True) -> Opened:
        """Open a session on fresh data; raises MachineError when the device or its memory cannot."""
        request = {"problem": problem, "layout": layout, "seed": seed, "alone": alone}
        try:
            opened: Opened = self._call("open", OPEN_LIMIT_S, request)
        except TrialError as error:
            raise MachineError(f"the device could not be opened for {problem}: {error}") from error
        self._opened = [request] if alone else [*self._opened, request]
        if alone:
            self._bound.clear()
        return opened

    def prepare(self, artifact: Artifact, neighbours: Sequence[str], name: str) -> Prepared:
        """Bind, gate, capture."""
        request = {"artifact": artifact, "neighbours": tuple(neighbours), "name": name}
        prepared: Prepared = self._call("prepare", self._limit_s, request)
        self._bound.add(name)
        return prepared

    def holds(self, name: str) -> bool:
        """True while the child has this arm bound; with a child that died all are lost."""
        return name in self._bound

    def ready(self) -> int:
        """Wait until the child has imported what it needs; its process id."""
        return int(self._call("ready", OPEN_LIMIT_S, {}))

    def block(self, name: str, neighbour: str, repeats: int) -> list[float]:
        """Time one block; microseconds a launch."""
        samples: list[float] = self._call("block", self._limit_s, _named(name, neighbour, repeats=repeats))
        return samples

    def check(self, name: str, neighbour: str) -> float:
        """Check launches that were timed last; the largest norm error."""
        return float(self._call("check", self._limit_s, _named(name, neighbour)))

    def release(self, name: str) -> None:
        """Forget an arm."""
        self._bound.discard(name)
        self._call("release", self._limit_s, {"name": name})

    def self_check(self, problem: Problem, layout: str, artifacts: dict[str, Artifact], seed: int) -> list[Check]:
        """The instrument's checks."""
        request = {"problem": problem, "layout": layout, "artifacts": artifacts, "seed": seed}
        checks: list[Check] = self._call("self_check", OPEN_LIMIT_S, request)
        return checks

    def fingerprint(self) -> int:
        """A sum over all weights."""
        return int(self._call("fingerprint", self._limit_s, {}))

    def abandon(self) -> None:
        """End the child at once."""
        if self._child is not None:
            self._child.kill()
            self._lost()

    def state(self) -> dict[str, Any]:
        """Telemetry and tenants."""
        state: dict[str, Any] = self._call("state", self._limit_s, {})
        return state

    def _call(self, method: str, limit_s: float, kwargs: dict[str, Any]) -> Any:
        child = self._living()
        try:
            answer = child.call(Request(method, kwargs), limit_s)
        except ChildTimeoutError as error:
            self._lost()
            raise TrialError("timeout", f"{method}: {error}; the worker was restarted") from error
        except ChildDiedError as error:
            self._lost()
            raise TrialError("runtime", f"{method}: {error}") from error
        if isinstance(answer, Failure):
            if answer.fatal:
                child.kill()
                self._lost()
            if answer.status == "machine":
                raise MachineError(answer.message)
            raise TrialError(answer.status, answer.message)
        return answer

    def _lost(self) -> None:
        self._child = None
        self._bound.clear()

    def _living(self) -> Child:
        if self._child is None:
            self._child = self._start()
            self.restarts += 1
            for request in self._opened:
                try:
                    answer = self._child.call(Request("open", request), OPEN_LIMIT_S)
                except (ChildDiedError, ChildTimeoutError) as error:
                    self._lost()
                    raise MachineError(f"the device could not be opened again: {error}") from error
                if isinstance(answer, Failure):
                    raise MachineError(f"the device could not be opened again: {answer.message}")
        return self._child


def _named(name: str, neighbour: str, **more: object) -> dict[str, Any]:
    return {"name": name, "neighbour": neighbour, **more}
