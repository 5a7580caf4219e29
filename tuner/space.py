"""Search spaces: parameters, named constraints, defaults. Declared once an operation, read by every family."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tuner.arms import Arm, Config, Target, Value
from tuner.errors import UsageError
from tuner.problem import Problem


@dataclass(frozen=True)
class Parameter:
    """One axis of a space: its values in order, and one sentence that says what it means."""

    name: str
    values: tuple[Value, ...]
    meaning: str


@dataclass(frozen=True)
class Constraint:
    """A named rule. `holds` is true for configs that may run; `sentence` is what a user reads when it is not."""

    name: str
    sentence: str
    holds: Callable[[Config, Problem, Target], bool]


@dataclass(frozen=True)
class Space:
    """All configs of one kernel of one family for one problem on one target."""

    family: str
    kernel: str
    problem: Problem
    target: Target
    parameters: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...]
    default: Config

    def __post_init__(self) -> None:
        """Hold that the default lies in the space."""
        broken = self.violated(self.default)
        if broken is not None or set(self.default) != {p.name for p in self.parameters}:
            rule = broken.sentence if broken else "its keys are not the parameters"
            raise UsageError(f"default of {self.family}/{self.kernel} is outside its space: {rule}")

    @property
    def size(self) -> int:
        """Number of configs before constraints."""
        return math.prod(len(p.values) for p in self.parameters)

    def arm(self, config: Config) -> Arm:
        """The arm that a config of this space makes."""
        return Arm.of(self.family, self.kernel, config)

    def violated(self, config: Config) -> Constraint | None:
        """The first constraint that a config breaks, or None."""
        for constraint in self.constraints:
            if not constraint.holds(config, self.problem, self.target):
                return constraint
        return None

    def configs(self) -> Iterator[dict[str, Value]]:
        """Every config, before constraints, in a fixed order."""
        names = [p.name for p in self.parameters]
        for values in itertools.product(*(p.values for p in self.parameters)):
            yield dict(zip(names, values, strict=True))

    def valid(self) -> Iterator[dict[str, Value]]:
        """Every config that breaks no constraint, in a fixed order."""
        return (config for config in self.configs() if self.violated(config) is None)

    def pruned(self) -> Counter[str]:
        """How many configs each constraint removes, by its sentence; a config counts under its first."""
        counts: Counter[str] = Counter()
        for config in self.configs():
            constraint = self.violated(config)
            if constraint is not None:
                counts[constraint.sentence] += 1
        return counts
