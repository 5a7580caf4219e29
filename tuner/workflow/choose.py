"""The choice: which finalist is frozen, beside which baselines. A pure function of recorded trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tuner.arms import Arm, Role
from tuner.errors import MachineError
from tuner.problem import Problem
from tuner.space import Space
from tuner.stats import expected_optimism, relative_spread, tie_set
from tuner.workflow.measure import Outcome

VENDORS = 2
_RESOURCES = ("registers", "shared_bytes", "spill_bytes")


@dataclass(frozen=True)
class Standing:
    """Everything that exploration knows when it ends.

    Attributes:
        problem: The problem explored.
        roles: Role of each family.
        spaces: Spaces of the candidate families.
        finalists: Re-timed arms: candidates, library forms, ceilings.
        explored: Candidate outcomes of the search.
        asymptotic: Ceilings on at least 800 MB.
        dropped: Arms that failed, with reasons.
        wait_s: Seconds that the device waited for compiles.
        measure_s: Seconds of measuring.
    """

    problem: Problem
    roles: dict[str, Role]
    spaces: tuple[Space, ...]
    finalists: tuple[Outcome, ...]
    explored: tuple[Outcome, ...]
    asymptotic: tuple[Outcome, ...]
    dropped: tuple[Outcome, ...]
    wait_s: float
    measure_s: float


def choose(standing: Standing, replay: bool) -> dict[str, Any]:
    """Choose among the finalists; the same trials give the same choice.

    Raises:
        MachineError: No candidate among them was correct on fresh data.
    """
    candidates = _timed(standing, "candidate")
    vendors = _timed(standing, "baseline")[:VENDORS]
    ceilings = _timed(standing, "ceiling")
    defaults = {space.family: space.arm(space.default) for space in standing.spaces}
    if not candidates:
        reasons = Counter(f"{o.status}: {o.reason}" for o in standing.finalists if o.status != "correct")
        worst = "; ".join(f"{count} x {text}" for text, count in reasons.most_common(3))
        raise MachineError(f"no finalist was correct on fresh data, so nothing is chosen: {worst}")
    tied = tie_set({o.arm: o.samples_us for o in candidates}, _preference(candidates, set(defaults.values())))
    chosen = tied[0]
    others = [o.arm for o in candidates if o.arm.family != chosen.family]
    twin = _twin(chosen, standing.spaces)
    noise = relative_spread([o.samples_us for o in candidates])
    return {
        "schema": 1,
        "problem": {"shape": str(standing.problem.shape), "weights": standing.problem.weights},
        "chosen": arm_record(chosen),
        "tie_set": [arm_record(arm) for arm in tied],
        "default": arm_record(defaults[chosen.family]),
        "twin": arm_record(twin) if twin else None,
        "other": arm_record(others[0]) if others else None,
        "vendors": [arm_record(o.arm) for o in vendors],
        "ceiling": arm_record(ceilings[0].arm) if ceilings else None,
        "ceilings": [{**arm_record(o.arm), "median_us": o.median_us} for o in ceilings],
        "asymptotic": _asymptotic(standing),
        "estimates": {o.arm.key: o.median_us for o in standing.finalists if o.median_us is not None},
        "optimism": expected_optimism(len([o for o in standing.explored if o.median_us is not None]), noise),
        "space": {
            "size": sum(space.size for space in standing.spaces),
            "pruned": {f"{s.family}: {why}": n for s in standing.spaces for why, n in s.pruned().items()},
        },
        "measured": len(standing.explored),
        "dropped": [{**arm_record(o.arm), "status": o.status, "reason": o.reason} for o in standing.dropped],
        "compile_wait": {"wait_s": round(standing.wait_s, 3), "measure_s": round(standing.measure_s, 3)},
        "replay": replay,
    }


def arm_record(arm: Arm) -> dict[str, Any]:
    """An arm as plain data."""
    return {"family": arm.family, "kernel": arm.kernel, "config": arm.config}


def _timed(standing: Standing, role: Role) -> list[Outcome]:
    timed = [o for o in standing.finalists if o.median_us is not None and standing.roles[o.arm.family] == role]
    return sorted(timed, key=lambda o: (o.median_us, o.arm.key))


def _preference(candidates: Sequence[Outcome], defaults: set[Arm]) -> dict[Arm, tuple[Any, ...]]:
    """The fixed order within a tie: a default first, then fewer resources, then the hash of the config."""

    def rank(outcome: Outcome) -> tuple[Any, ...]:
        resources = tuple(float(outcome.receipt.get(name, 0) or 0) for name in _RESOURCES)
        return (outcome.arm not in defaults, resources, outcome.arm.key)

    return {outcome.arm: rank(outcome) for outcome in candidates}


def _twin(chosen: Arm, spaces: Sequence[Space]) -> Arm | None:
    """The same config with `m_spec` turned round, if the space has it."""
    config = chosen.config
    if "m_spec" not in config:
        return None
    twin = {**config, "m_spec": not config["m_spec"]}
    for space in spaces:
        if (space.family, space.kernel) == (chosen.family, chosen.kernel) and space.violated(twin) is None:
            return space.arm(twin)
    return None


def _asymptotic(standing: Standing) -> dict[str, Any] | None:
    timed = [o for o in standing.asymptotic if o.median_us is not None]
    if not timed:
        return None
    best = min(timed, key=lambda o: (o.median_us, o.arm.key))
    assert best.median_us is not None
    return {
        **arm_record(best.arm),
        "shape": str(best.problem.shape),
        "median_us": best.median_us,
        "bytes_per_us": best.problem.weight_bytes / best.median_us,
    }
