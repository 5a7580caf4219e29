"""Asking for the next arm: Optuna's samplers over the shared space of several families, without repeats."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from tuner.arms import Arm, Config, Value
from tuner.errors import UsageError
from tuner.space import Space

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "random", "grid")
_FAILED_FACTOR = 10.0


class Search:
    """Proposes arms of one or more spaces and learns from their times.

    The sequence of proposals depends only on the spaces, the seed and the values told, in the order of asking.
    """

    def __init__(self, sampler: str, spaces: Sequence[Space], seed: int) -> None:
        """Start a search.

        Raises:
            UsageError: No such sampler.
        """
        check_sampler(sampler)
        self._spaces = {f"{space.family}/{space.kernel}": space for space in spaces}
        self._seen: set[Arm] = set()
        # Families whose arms are all fixed have no space, and then there is nothing to propose.
        self._source = self._model(seed) if sampler == "tpe" and spaces else None
        self._walk = iter(()) if self._source else self._listing(sampler, seed)
        self._seed = seed
        self._unseen: dict[str, _Unseen] = {}
        self._open: dict[Arm, optuna.trial.Trial] = {}
        self._worst_us = 1.0
        self._allowed: set[Arm] | None = None

    def restrict(self, arms: set[Arm]) -> None:
        """Propose only these arms: those that a record holds."""
        self._allowed = arms

    def exclude(self, arm: Arm) -> None:
        """Never propose an arm that is measured anyway."""
        self._seen.add(arm)

    def ask(self) -> Arm | None:
        """The next arm that was not proposed before, or None when the space is used up."""
        if self._source is None:
            return next((arm for arm in self._walk if self._new(arm)), None)
        trial = self._source.ask()
        wanted = self._suggest(trial)
        arm = self._nearest(wanted)
        if arm == wanted:
            self._open[arm] = trial
        else:
            self._source.tell(trial, state=_fail_state())
        return arm

    def _nearest(self, wanted: Arm) -> Arm | None:
        """The arm itself if it is new and valid, else the new one nearest to it: there lies what the model is after."""
        own = f"{wanted.family}/{wanted.kernel}"
        if self._spaces[own].violated(wanted.config) is None and self._new(wanted):
            return wanted
        for name in sorted(self._spaces, key=lambda name: name != own):
            if name not in self._unseen:
                self._unseen[name] = _Unseen(self._spaces[name], self._allowed, self._seed)
            found = next((arm for arm in self._unseen[name].by_distance(wanted.config) if self._new(arm)), None)
            if found is not None:
                return found
        return None

    def tell(self, arm: Arm, median_us: float | None) -> None:
        """Report a time, or None for an arm that failed. Arms that were never asked for are taught as well."""
        self._seen.add(arm)
        if self._source is None:
            return
        if median_us is not None:
            self._worst_us = max(self._worst_us, median_us)
        value = median_us if median_us is not None else self._worst_us * _FAILED_FACTOR
        trial = self._open.pop(arm, None)
        if trial is not None:
            self._source.tell(trial, value)
        elif self._holds(arm):
            self._source.add_trial(self._past(arm, value))

    def _holds(self, arm: Arm) -> bool:
        """True for an arm that a space can express; a fixed arm need not be one."""
        space = self._spaces.get(f"{arm.family}/{arm.kernel}")
        values = {p.name: p.values for p in space.parameters} if space else None
        return (
            values is not None
            and values.keys() == arm.config.keys()
            and all(value in values[name] for name, value in arm.config.items())
        )

    def _new(self, arm: Arm) -> bool:
        if arm in self._seen or (self._allowed is not None and arm not in self._allowed):
            return False
        self._seen.add(arm)
        return True

    def _model(self, seed: int) -> optuna.Study:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        return optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=16))

    def _suggest(self, trial: optuna.trial.Trial) -> Arm:
        """Draw shared parameters by one name for all families, so that what one family teaches serves the other."""
        kernel = trial.suggest_categorical("kernel", list(self._spaces))
        space = self._spaces[str(kernel)]
        config: dict[str, Value] = {}
        for parameter in space.parameters:
            name = _axis(space, parameter.name, self._spaces.values())
            config[parameter.name] = cast(Value, trial.suggest_categorical(name, parameter.values))
        return space.arm(config)

    def _past(self, arm: Arm, value: float) -> optuna.trial.FrozenTrial:
        import optuna
        from optuna.distributions import CategoricalDistribution

        name = f"{arm.family}/{arm.kernel}"
        space = self._spaces[name]
        params: dict[str, Value] = {"kernel": name}
        axes = {"kernel": CategoricalDistribution(list(self._spaces))}
        for parameter in space.parameters:
            axis = _axis(space, parameter.name, self._spaces.values())
            params[axis] = arm.config[parameter.name]
            axes[axis] = CategoricalDistribution(parameter.values)
        return optuna.trial.create_trial(params=params, distributions=dict(axes), value=value)

    def _listing(self, sampler: str, seed: int) -> Iterator[Arm]:
        arms = [space.arm(config) for space in self._spaces.values() for config in space.valid()]
        if sampler == "random":
            random.Random(seed).shuffle(arms)
        return iter(arms)


class _Unseen:
    """The valid arms of a space, or those of them that a record holds, for a search by distance."""

    def __init__(self, space: Space, allowed: set[Arm] | None, seed: int) -> None:
        import numpy as np

        self._parameters = space.parameters
        arms = [space.arm(config) for config in space.valid()]
        self._arms = [arm for arm in arms if allowed is None or arm in allowed]
        # Of arms equally near, a drawn one comes first, not that of the least parameters.
        random.Random(seed).shuffle(self._arms)
        rows = [self._row(arm.config) for arm in self._arms]
        self._places = np.array(rows, dtype=np.int32).reshape(len(rows), len(self._parameters))

    def _row(self, config: Config) -> list[int]:
        return [p.values.index(config[p.name]) for p in self._parameters]

    def by_distance(self, config: Config) -> Iterator[Arm]:
        """Arms by the number of parameters that differ, then by the steps between their values.

        Of a config of another space only what this space has too is compared.
        """
        import numpy as np

        known = [i for i, p in enumerate(self._parameters) if config.get(p.name) in p.values]
        wanted = [self._parameters[i].values.index(config[self._parameters[i].name]) for i in known]
        steps = np.abs(self._places[:, known] - np.array(wanted, dtype=np.int32))
        return (self._arms[i] for i in np.lexsort((steps.sum(axis=1), (steps > 0).sum(axis=1))))


def check_sampler(name: str) -> None:
    """Raise UsageError if there is no such sampler."""
    if name not in SAMPLERS:
        raise UsageError(f"unknown sampler {name!r}; choose one of {', '.join(SAMPLERS)}")


def _axis(space: Space, name: str, spaces: Iterable[Space]) -> str:
    """One Optuna parameter for all spaces that give it the same values, else one of its own."""
    values = {p.values for s in spaces for p in s.parameters if p.name == name}
    return name if len(values) == 1 else f"{space.family}/{space.kernel}.{name}"


def _fail_state() -> optuna.trial.TrialState:
    import optuna

    return optuna.trial.TrialState.FAIL
