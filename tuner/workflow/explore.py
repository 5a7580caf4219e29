"""Exploration: fixed arms first, then what the search asks for, then the finalists on fresh data, then a choice."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner import registry
from tuner.arms import Arm, Family, Target
from tuner.devices import device_lock, target_of
from tuner.devices.base import DeviceInfo
from tuner.errors import MachineError, ToolchainError, UsageError
from tuner.problem import Problem, Shape
from tuner.space import Space
from tuner.store import Run, Trial, read_trials
from tuner.workflow.choose import Standing, choose
from tuner.workflow.measure import LiveMeasurer, Measurer, Outcome, ReplayMeasurer
from tuner.workflow.progress import Progress
from tuner.workflow.search import Search, check_sampler

FINALISTS = 8
QUICK_FORMS = 4
ASYMPTOTIC_BYTES = 800_000_000
OVERPEAK = 1.02


@dataclass(frozen=True)
class ExploreSettings:
    """What a person may set.

    Attributes:
        trials: Arms that the sampler proposes; None takes the device's default.
        sampler: `tpe`, `random` or `grid`.
        seed: Seed of sampler and data.
        neighbour: `plain` or `self`.
        quick: A fifth of the trials, and a shorter confirmation.
        timeout_s: Seconds that one step of one trial may take.
        record: A recorded run to replay instead of a device.
        plugin: A Python file with more families.
    """

    trials: int | None = None
    sampler: str = "tpe"
    seed: int = 1
    neighbour: str = "plain"
    quick: bool = False
    timeout_s: float = 60.0
    record: Path | None = None
    plugin: Path | None = None

    @property
    def plugin_text(self) -> str | None:
        """The plugin's path as text."""
        return str(self.plugin) if self.plugin else None


@dataclass(frozen=True)
class Pace:
    """How much is measured on a kind of device.

    Attributes:
        trials: Arms that the sampler proposes by default.
        ahead: Arms that are asked for before they are measured, so that compiles run ahead.
        batch: True where compiles must not run beside measuring: ask for `ahead` arms, compile all, measure all.
        rounds: Turns of the finalists.
        repeats: Timed runs in each.
    """

    trials: int
    ahead: int
    batch: bool
    rounds: int
    repeats: int

    @classmethod
    def of(cls, kind: str, quick: bool) -> Pace:
        """The pace of a kind of device."""
        if kind == "host":
            return cls(4 if quick else 12, 4, True, 2, 2)
        return cls(20 if quick else 96, 24, False, 2 if quick else 4, 3)


def explore(run: Run, info: DeviceInfo, settings: ExploreSettings, progress: Progress) -> dict[str, Any]:
    """Explore one run's problem, going on where its trials end, and write `choice.json`.

    The same seed and the same recorded trials give the same arms in the same order and the same choice.

    Returns:
        The choice, as written.

    Raises:
        MachineError: No candidate is correct on this device.
    """
    check_sampler(settings.sampler)
    if settings.trials is not None and settings.trials < 0:
        raise UsageError(f"--trials {settings.trials} is negative; give 0 (fixed arms only) or more")
    shape = Shape.parse(run.info.shape)
    problem = Problem.of(shape, run.info.weights[0])
    target = target_of(info)
    usable, left_out = registry.available(target, settings.plugin_text)
    for name, why in sorted(left_out.items()) if settings.record is None else ():
        progress.say(f"{name} arms are left out: {why}")
    if settings.record is not None:  # a record answers for families that cannot be built here
        usable = registry.families(settings.plugin_text)
    if not any(family.role == "candidate" for family in usable.values()):
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(left_out.items()))
        raise ToolchainError(f"no kernel can be built for {info.name}, so there is nothing to tune. {reasons}")
    with _measurer(run, info, target, settings, problem) as measurer:
        explorer = _Explorer(run, problem, target, usable, settings, Pace.of(info.kind, settings.quick), progress)
        standing = explorer.run_all(measurer)
        choice = choose(standing, replay=settings.record is not None)
        choice["left_out"] = left_out
        choice["slots"] = explorer.slots
        if isinstance(measurer, LiveMeasurer):
            _add_hashes(choice, problem, measurer)
    run.write_json("choice.json", choice)
    return choice


def _add_hashes(choice: dict[str, Any], problem: Problem, measurer: LiveMeasurer) -> None:
    """Note what each arm of the choice compiles to; a twin that does not compile is left out."""
    choice["code_hashes"], choice["source_hashes"] = {}, {}
    listed = [choice[name] for name in ("chosen", "default", "twin", "other")] + choice["vendors"] + choice["ceilings"]
    for data in listed:
        if data is None:
            continue
        arm = Arm.of(data["family"], data["kernel"], data["config"])
        artifact = measurer.artifact(problem, arm)
        if artifact is not None:
            choice["code_hashes"][arm.key] = artifact.code_hash
            choice["source_hashes"][arm.key] = artifact.source_hash
        elif data is choice["twin"]:
            choice["twin"] = None


@contextmanager
def _measurer(
    run: Run, info: DeviceInfo, target: Target, settings: ExploreSettings, problem: Problem
) -> Iterator[Measurer]:
    if settings.record is not None:
        yield ReplayMeasurer(read_trials(record_file(settings.record)).trials, [problem, large(problem)])
        return
    with (
        device_lock(info),
        LiveMeasurer(info, target, settings.neighbour, settings.plugin_text, run.path, settings.timeout_s) as live,
    ):
        yield live


def large(problem: Problem) -> Problem:
    """The problem of the asymptotic ceiling: as many times wider as gives at least 800 MB in one launch."""
    times = max(1, -(-ASYMPTOTIC_BYTES // problem.weight_bytes))
    return Problem(Shape(1, problem.shape.k, problem.shape.n * times), problem.weights)


def record_file(record: Path) -> Path:
    """The trials of a record, which is a run folder or a file of trial lines."""
    return record / "trials.jsonl" if record.is_dir() else record


class _Explorer:
    """One exploration: what was recorded, what is asked next, what is best so far."""

    def __init__(
        self,
        run: Run,
        problem: Problem,
        target: Target,
        usable: dict[str, Family],
        settings: ExploreSettings,
        pace: Pace,
        progress: Progress,
    ) -> None:
        self._run, self._problem, self._target, self._usable = run, problem, target, usable
        self._settings, self._pace, self._progress = settings, pace, progress
        self._recorded = run.trials()
        self._memo = {(t.problem, t.weights, t.arm): t for t in self._recorded if t.stage == "explore"}
        self._count = len(self._recorded)
        self._failed: Counter[str] = Counter()
        self._peak_bytes_per_us: float | None = None
        self._best_us: float | None = None
        self._waited_s = self._measured_s = 0.0
        self.slots: int | None = None

    def run_all(self, measurer: Measurer) -> Standing:
        """Ceilings, library forms, defaults, search, finalists."""
        spaces = [s for f in self._usable.values() for s in f.spaces(self._problem, self._target)]
        fixed = self._fixed()
        search = Search(self._settings.sampler, spaces, self._settings.seed)
        if isinstance(measurer, ReplayMeasurer):
            held = measurer.arms(self._problem)
            search.restrict(held)
            fixed = [arm for arm in fixed if arm in held]
        budget = self._pace.trials if self._settings.trials is None else self._settings.trials
        ceilings = self._asymptotic(measurer)
        opened = measurer.open(self._problem, self._settings.seed)
        if opened is not None:
            ring = opened.plan
            self.slots = ring.slots
            times, note = ring.distinct_bytes / ring.llc_bytes, f"; {ring.note}" if ring.note else ""
            self._progress.say(
                f"rotation: {ring.slots} slots of {ring.slot_bytes / 1e6:,.2f} MB, {times:.1f} times the last-level "
                f"cache of {ring.llc_bytes / 1e6:,.1f} MB{note}"
            )
        if self._problem.latency_bound:
            self._progress.say("latency-bound: under 2 MB of weights, launch cost decides more than memory")
        outcomes = self._arms(measurer, fixed, search, budget)
        finalists = self._finalists(measurer, outcomes)
        self._say_wait()
        return self._standing(spaces, outcomes, ceilings, finalists)

    def _fixed(self) -> list[Arm]:
        """Library forms first, as they need no compile; then ceilings, the bound of all others; then defaults."""
        order = {"baseline": 0, "ceiling": 1, "candidate": 2}
        ranked = sorted(self._usable.values(), key=lambda family: (order[family.role], family.name))
        return [arm for family in ranked for arm in family.fixed(self._problem, self._target)]

    def _arms(self, measurer: Measurer, fixed: list[Arm], search: Search, budget: int) -> dict[Arm, Outcome]:
        waiting = deque(fixed)
        for arm in fixed:
            search.exclude(arm)
            measurer.ahead(self._problem, arm)
        outcomes: dict[Arm, Outcome] = {}
        left = budget
        self._progress.begin("explore", len(fixed) + budget)
        while True:
            room = self._pace.ahead - len(waiting) if not waiting or not self._pace.batch else 0
            if len(outcomes) == 0 and not self._pace.batch:
                room = self._pace.ahead
            for _ in range(min(room, left)):
                asked = search.ask()
                if asked is None:
                    left = 0
                    break
                left -= 1
                waiting.append(asked)
                measurer.ahead(self._problem, asked)
            if not waiting:
                break
            arm = waiting.popleft()
            outcomes[arm] = self._one(measurer, self._problem, arm)
            search.tell(arm, outcomes[arm].median_us)
        self._progress.end()
        return outcomes

    def _one(self, measurer: Measurer, problem: Problem, arm: Arm) -> Outcome:
        known = self._memo.get((str(problem.shape), problem.weights, arm))
        if known is not None:
            outcome = Outcome.of(known, problem)
        else:
            outcome = self._judged(measurer.measure(problem, arm, self._best_us))
            self._record("explore", outcome)
        self._note(outcome)
        return outcome

    def _judged(self, outcome: Outcome) -> Outcome:
        """Refuse a time that no memory could give."""
        us, peak = outcome.median_us, self._peak_bytes_per_us
        if us is None or peak is None or self._usable[outcome.arm.family].role == "ceiling":
            return outcome
        if self._target.backend == "host":  # the executor's read kernel is no ceiling of a CPU
            return outcome
        share = outcome.problem.weight_bytes / us / peak
        if share <= OVERPEAK:
            return outcome
        reason = f"INVALID_OVERPEAK: {100 * share:.0f} % of the fastest read measured"
        return Outcome(
            outcome.problem, outcome.arm, "invalid", reason, outcome.samples_us, outcome.receipt, outcome.cost
        )

    def _note(self, outcome: Outcome) -> None:
        role = self._usable[outcome.arm.family].role
        us = outcome.median_us
        self._waited_s += outcome.cost.get("wait_s", 0.0)
        self._measured_s += outcome.cost.get("measure_s", 0.0)
        if us is None:
            self._failed[outcome.status] += 1
        elif role == "ceiling":
            self._peak_bytes_per_us = max(self._peak_bytes_per_us or 0.0, outcome.problem.weight_bytes / us)
        elif self._best_us is None or us < self._best_us:
            self._best_us = us
        text = f"{outcome.arm}: {us:.2f} us" if us is not None else f"{outcome.arm}: {outcome.status}, {outcome.reason}"
        self._progress.advance(text, self._best_us, self._failed)

    def _record(self, stage: str, outcome: Outcome) -> None:
        trial = Trial.model_validate(
            {
                "trial": self._count,
                "stage": stage,
                "family": outcome.arm.family,
                "kernel": outcome.arm.kernel,
                "config": outcome.arm.config,
                "problem": str(outcome.problem.shape),
                "weights": outcome.problem.weights,
                "status": outcome.status,
                "reason": outcome.reason,
                "samples_us": list(outcome.samples_us),
                "median_us": outcome.median_us,
                "receipt": outcome.receipt,
                "cost": outcome.cost,
            }
        )
        self._run.append(trial)
        self._count += 1
        if stage == "explore":  # a problem of 800 MB is its own asymptotic one, and its ceilings are measured once
            self._memo[trial.problem, trial.weights, trial.arm] = trial

    def _asymptotic(self, measurer: Measurer) -> list[Outcome]:
        """The ceiling sweep on at least 800 MB in one launch: what the memory gives when nothing starts or ends.

        It comes first: no arm of any shape may be faster than this. `--quick` takes the first arm of each launch form.
        """
        wide = large(self._problem)
        arms = [a for f in self._usable.values() if f.role == "ceiling" for a in f.fixed(wide, self._target)]
        if isinstance(measurer, ReplayMeasurer):
            arms = [arm for arm in arms if arm in measurer.arms(wide)]
        if self._settings.quick:
            arms = list({str(arm.config.get("pdl", False)): arm for arm in reversed(arms)}.values())
        missing = [arm for arm in arms if (str(wide.shape), wide.weights, arm) not in self._memo]
        try:
            for arm in missing:
                measurer.ahead(wide, arm)
            if missing:
                measurer.open(wide, self._settings.seed)
        except MachineError as error:
            self._progress.say(f"no asymptotic ceiling: {error}")
            return []
        self._progress.begin("asymptotic ceiling", len(arms))
        found = [self._one(measurer, wide, arm) for arm in arms]
        self._progress.end()
        return found

    def _finalists(self, measurer: Measurer, outcomes: dict[Arm, Outcome]) -> list[Outcome]:
        arms = self._finalist_arms(outcomes)
        done = {t.arm: t for t in self._recorded if t.stage == "finalist"}
        if arms and all(arm in done for arm in arms):
            return [Outcome.of(done[arm], self._problem) for arm in arms]
        measurer.open(self._problem, self._settings.seed + 1)
        self._progress.begin("finalists", None)
        found = measurer.interleave(self._problem, arms, self._pace.rounds, self._pace.repeats)
        judged = [self._judged(outcome) for outcome in found]
        for outcome in judged:
            self._record("finalist", outcome)
        self._progress.end()
        return judged

    def _finalist_arms(self, outcomes: dict[Arm, Outcome]) -> list[Arm]:
        """The best candidates, every default, every library form that works, the best ceiling of each launch form."""
        timed = [o for o in outcomes.values() if o.median_us is not None]
        by_role: dict[str, list[Outcome]] = {"candidate": [], "baseline": [], "ceiling": []}
        for outcome in sorted(timed, key=lambda o: (o.median_us, o.arm.key)):
            by_role[self._usable[outcome.arm.family].role].append(outcome)
        if not by_role["candidate"]:
            reasons = Counter(f"{o.status}: {o.reason}" for o in outcomes.values() if o.median_us is None)
            worst = "; ".join(f"{count} x {text}" for text, count in reasons.most_common(3))
            raise MachineError(f"no candidate arm is correct on this device, so there is nothing to choose: {worst}")
        arms = [o.arm for o in by_role["candidate"][:FINALISTS]]
        arms += [o.arm for o in by_role["candidate"] if o.arm in set(self._fixed())]
        for family in {o.arm.family for o in by_role["candidate"]}:
            arms.append(next(o.arm for o in by_role["candidate"] if o.arm.family == family))
        forms = by_role["baseline"][:QUICK_FORMS] if self._settings.quick else by_role["baseline"]
        arms += [o.arm for o in forms] + best_by_form(by_role["ceiling"])
        return sorted(dict.fromkeys(arms), key=lambda arm: arm.key)

    def _say_wait(self) -> None:
        total_s = self._waited_s + self._measured_s
        if total_s > 0 and not self._pace.batch:
            share = 100 * self._waited_s / total_s
            self._progress.say(f"the device waited for compiles {share:.0f} % of {total_s:.1f} s of exploration")

    def _standing(
        self, spaces: Sequence[Space], outcomes: dict[Arm, Outcome], ceilings: list[Outcome], finalists: list[Outcome]
    ) -> Standing:
        roles = {name: family.role for name, family in self._usable.items()}
        searched = [o for o in outcomes.values() if roles[o.arm.family] == "candidate"]
        return Standing(
            problem=self._problem,
            roles=roles,
            spaces=tuple(spaces),
            finalists=tuple(finalists),
            explored=tuple(searched),
            asymptotic=tuple(ceilings),
            dropped=tuple(o for o in outcomes.values() if o.status != "correct"),
            wait_s=self._waited_s,
            measure_s=self._measured_s,
        )


def best_by_form(outcomes: Sequence[Outcome]) -> list[Arm]:
    """The fastest ceiling of each launch form (plain, dependent)."""
    best: dict[str, Outcome] = {}
    for outcome in sorted((o for o in outcomes if o.median_us is not None), key=lambda o: (o.median_us, o.arm.key)):
        best.setdefault(str(outcome.arm.config.get("pdl", False)), outcome)
    return [outcome.arm for outcome in best.values()]
