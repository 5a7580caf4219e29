"""Where times come from during exploration: a live device, or a recorded run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from tuner.arms import Arm, Artifact, Target
from tuner.devices.base import DeviceInfo
from tuner.errors import RefusedError, UsageError
from tuner.pool import Built, CompilePool, default_size
from tuner.problem import Problem
from tuner.registry import families
from tuner.store import Trial
from tuner.worker import Opened, TrialError, Worker

STOP_FACTOR = 4.0


@dataclass(frozen=True)
class Outcome:
    """What measuring one arm gave: a trial without its number and stage."""

    problem: Problem
    arm: Arm
    status: str
    reason: str | None = None
    samples_us: tuple[float, ...] = ()
    receipt: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)

    @property
    def median_us(self) -> float | None:
        """Median of the samples, or None where the arm is not correct."""
        return statistics.median(self.samples_us) if self.samples_us and self.status == "correct" else None

    @classmethod
    def of(cls, trial: Trial, problem: Problem) -> Outcome:
        """Read a recorded trial back."""
        samples = tuple(trial.samples_us)
        return cls(problem, trial.arm, trial.status, trial.reason, samples, dict(trial.receipt), dict(trial.cost))


class Measurer(Protocol):
    """Measures arms of opened problems."""

    def open(self, problem: Problem, seed: int) -> Opened | None:
        """Make fresh data for a problem; None where nothing is allocated."""

    def ahead(self, problem: Problem, arm: Arm) -> None:
        """Say that an arm will be measured, so that it can be compiled."""

    def measure(self, problem: Problem, arm: Arm, best_us: float | None) -> Outcome:
        """Measure one arm; a failure is an outcome, not an error."""

    def interleave(self, problem: Problem, arms: Sequence[Arm], rounds: int, repeats: int) -> list[Outcome]:
        """Time several arms in turn, forth and back, on the same data."""


class LiveMeasurer:
    """A compile pool ahead of one worker on one device."""

    def __init__(
        self, info: DeviceInfo, target: Target, neighbour: str, plugin: str | None, folder: Path, limit_s: float
    ) -> None:
        """Start the worker; compile processes start with the first arm."""
        self._pool = CompilePool(default_size(target.backend), target, plugin, folder)
        self._worker = Worker(info, plugin, folder / "worker.log", limit_s)
        self._neighbour = neighbour
        self._families = families(plugin)
        self._artifacts: dict[tuple[Problem, Arm], Artifact] = {}
        self._by_code: dict[tuple[str, str], Outcome] = {}
        self._repeats = 3
        self._serial = target.backend == "host"

    def __enter__(self) -> LiveMeasurer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._worker.__exit__(kind, error, tb)
        self._pool.__exit__(kind, error, tb)

    def open(self, problem: Problem, seed: int) -> Opened:
        """Make fresh data; equal code is measured again on it."""
        self._by_code.clear()
        return self._worker.open(problem, problem.format.layouts[0], seed)

    def ahead(self, problem: Problem, arm: Arm) -> None:
        """Queue the compile."""
        if (problem, arm) not in self._artifacts:
            self._pool.submit(problem, arm)

    def measure(self, problem: Problem, arm: Arm, best_us: float | None) -> Outcome:
        """Compile if need be, bind, gate, time, check the tape."""
        began = time.monotonic()
        built = self._built(problem, arm)
        cost = {"compile_s": built.compile_s, "wait_s": time.monotonic() - began}
        if built.artifact is None:
            return Outcome(problem, arm, built.status, built.reason, cost=cost)
        if self._serial:
            self._pool.drain()
        twin = self._same_code(built.artifact)
        if twin is not None:
            reason = f"the same code as {twin.arm}, measured once"
            return replace(twin, arm=arm, reason=twin.reason or reason, cost={**cost, "measure_s": 0.0})
        began = time.monotonic()
        outcome = self._time(built.artifact, best_us)
        outcome = replace(outcome, cost={**cost, "measure_s": time.monotonic() - began})
        if built.artifact.code:
            self._by_code[_identity(built.artifact)] = outcome
        return outcome

    def _built(self, problem: Problem, arm: Arm) -> Built:
        known = self._artifacts.get((problem, arm))
        if known is not None:
            return Built(arm, known, "correct", None, 0.0)
        built = self._pool.result(problem, arm)
        if built.artifact is not None:
            self._artifacts[problem, arm] = built.artifact
        return built

    def _same_code(self, artifact: Artifact) -> Outcome | None:
        return self._by_code.get(_identity(artifact)) if artifact.code else None

    def _time(self, artifact: Artifact, best_us: float | None) -> Outcome:
        problem, arm, name = artifact.problem, artifact.arm, artifact.arm.key
        receipt: dict[str, Any] = {}
        samples: list[float] = []
        reason = None
        try:
            prepared = self._worker.prepare(artifact, [self._neighbour], name)
            receipt = {**prepared.receipt, **({"notes": "; ".join(prepared.notes)} if prepared.notes else {})}
            if prepared.reuse.verdict == "failed":
                self._worker.release(name)
                return Outcome(problem, arm, "invalid", f"INVALID_WARM: {prepared.reuse.figure}", (), receipt)
            receipt["reuse_distance"] = prepared.reuse.figure
            samples = self._worker.block(name, self._neighbour, 1)
            if best_us is not None and samples[0] > STOP_FACTOR * best_us:
                reason = f"stopped early: {samples[0] / best_us:.1f} times the best"
            else:
                samples = self._worker.block(name, self._neighbour, self._repeats)
            receipt["norm_error"] = self._worker.check(name, self._neighbour)
            self._worker.release(name)
        except TrialError as error:
            self._forget(name)
            return Outcome(problem, arm, error.status, str(error), tuple(samples), receipt)
        return Outcome(problem, arm, "correct", reason, tuple(samples), receipt)

    def _forget(self, name: str) -> None:
        """Free what a failed arm holds, if the worker still has it."""
        if self._worker.holds(name):
            try:
                self._worker.release(name)
            except TrialError:  # the worker died of it, and with it went what the arm held
                self._worker.abandon()

    def interleave(self, problem: Problem, arms: Sequence[Arm], rounds: int, repeats: int) -> list[Outcome]:
        """Bind all, then time them in turn; an arm that fails drops out and the others go on."""
        states = {arm: Outcome(problem, arm, "correct") for arm in arms}
        self._bind(states)
        if self._serial:
            self._pool.drain()
        for turn in range(rounds):
            for arm in arms if turn % 2 == 0 else list(reversed(arms)):
                self._add_block(states, arm, repeats)
        for arm in arms:
            self._close(states, arm)
        return [states[arm] for arm in arms]

    def _bind(self, states: dict[Arm, Outcome]) -> None:
        """Bind the arms that the worker does not hold: at first all, and again all if one has ended it.

        Never one alone: binding clears the tape, on which the arms that were bound before may be half-way.
        """
        for arm, state in states.items():
            if state.status != "correct" or self._worker.holds(arm.key):
                continue
            built = self._built(state.problem, arm)
            if built.artifact is None:
                states[arm] = replace(state, status=built.status, reason=built.reason)
                continue
            try:
                prepared = self._worker.prepare(built.artifact, [self._neighbour], arm.key)
                states[arm] = replace(state, receipt={**prepared.receipt, **state.receipt})
            except TrialError as error:
                states[arm] = replace(state, status=error.status, reason=str(error))

    def _add_block(self, states: dict[Arm, Outcome], arm: Arm, repeats: int) -> None:
        samples = self._block(states, arm, repeats)
        states[arm] = replace(states[arm], samples_us=(*states[arm].samples_us, *samples))

    def _block(self, states: dict[Arm, Outcome], arm: Arm, repeats: int) -> list[float]:
        """Time one block; nothing for an arm that has failed or fails now."""
        while states[arm].status == "correct" and not self._worker.holds(arm.key):
            self._bind(states)
        if states[arm].status != "correct":
            return []
        try:
            return self._worker.block(arm.key, self._neighbour, repeats)
        except TrialError as error:
            states[arm] = replace(states[arm], status=error.status, reason=str(error))
            return []

    def _close(self, states: dict[Arm, Outcome], arm: Arm) -> None:
        """Check an arm's last launches. The tape is shared, so they lie on it only behind a block of its own."""
        self._block(states, arm, 1)
        state = states[arm]
        if state.status != "correct":
            return
        try:
            error = self._worker.check(arm.key, self._neighbour)
            states[arm] = replace(state, receipt={**state.receipt, "norm_error": error})
        except TrialError as error:
            states[arm] = replace(state, status=error.status, reason=str(error))

    def artifact(self, problem: Problem, arm: Arm) -> Artifact | None:
        """The artifact of an arm, or None if it does not compile."""
        return self._built(problem, arm).artifact


class ReplayMeasurer:
    """Answers from the trials of a recorded run; an arm that it does not hold cannot be measured."""

    def __init__(self, trials: Sequence[Trial], problems: Sequence[Problem]) -> None:
        """Index the record.

        Args:
            trials: All trials of the record.
            problems: The problem to replay, then those that its ceilings were measured on.

        Raises:
            UsageError: The record holds no trial of the first problem.
        """
        by_name = {(str(p.shape), p.weights): p for p in problems}
        self._explored: dict[tuple[Problem, Arm], Outcome] = {}
        self._finalists: dict[tuple[Problem, Arm], Outcome] = {}
        for trial in trials:
            problem = by_name.get((trial.problem, trial.weights))
            if problem is None:
                continue
            where = self._explored if trial.stage == "explore" else self._finalists
            if (problem, trial.arm) in where and where is self._explored:
                raise RefusedError(f"the record measures {trial.arm} twice; a record holds each arm once")
            where[problem, trial.arm] = Outcome.of(trial, problem)
        if not self.arms(problems[0]):
            held = sorted({f"{t.problem} {t.weights}" for t in trials})
            raise UsageError(f"the record has no trials of {problems[0]}; it has {', '.join(held) or 'none at all'}")

    def arms(self, problem: Problem) -> set[Arm]:
        """Every arm that the record can answer for."""
        return {arm for held, arm in self._explored if held == problem}

    def open(self, problem: Problem, seed: int) -> None:
        """Nothing is allocated."""

    def ahead(self, problem: Problem, arm: Arm) -> None:
        """Nothing is compiled."""

    def measure(self, problem: Problem, arm: Arm, best_us: float | None) -> Outcome:
        """The recorded outcome."""
        try:
            return self._explored[problem, arm]
        except KeyError:
            raise UsageError(f"the record does not hold {arm}") from None

    def interleave(self, problem: Problem, arms: Sequence[Arm], rounds: int, repeats: int) -> list[Outcome]:
        """The recorded finalist outcomes, or, for arms that were none, the explored ones."""
        return [self._finalists.get((problem, arm)) or self.measure(problem, arm, None) for arm in arms]


def _identity(artifact: Artifact) -> tuple[str, str]:
    return artifact.code_hash, repr((artifact.steps, artifact.workspaces))
