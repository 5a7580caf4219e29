"""Asking for arms: no repeats, nothing invalid, the same for the same seed, taught by what is told, ended at last."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from tuner.arms import Arm, Config, Target
from tuner.errors import UsageError
from tuner.problem import Problem, Shape
from tuner.registry import builtin_families
from tuner.space import Constraint, Parameter, Space
from tuner.workflow.search import SAMPLERS, Search

TARGET = Target("cuda", "sm_90", 32, 132, 1024, 232448)
PROBLEM = Problem(Shape(1, 4096, 12288), "bf16")
NUMBERS = tuple(range(8))


def space(family: str = "one", kernel: str = "k", **axes: tuple[int, ...]) -> Space:
    """A space in which a + b must be even."""
    found = {"a": NUMBERS, "b": NUMBERS, "c": NUMBERS, **axes}
    even = Constraint("even", "a + b is even", lambda config, problem, target: (config["a"] + config["b"]) % 2 == 0)
    parameters = tuple(Parameter(name, values, "an axis") for name, values in found.items())
    return Space(family, kernel, PROBLEM, TARGET, parameters, (even,), {name: 2 for name in found})


def ask(search: Search, count: int, time_us: Callable[[Config], float | None]) -> list[Arm]:
    found = []
    for _ in range(count):
        arm = search.ask()
        if arm is None:
            break
        found.append(arm)
        search.tell(arm, time_us(arm.config))
    return found


def valley(config: Config) -> float | None:
    """Fast at a = 3; every config with c = 7 fails."""
    return None if config["c"] == 7 else 10.0 + abs(int(config["a"]) - 3)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_real_spaces_are_proposed_once_each_and_the_same_for_the_same_seed(sampler: str) -> None:
    spaces = [s for f in ("triton", "hip") for s in builtin_families()[f].spaces(PROBLEM, TARGET)]

    def proposals(seed: int) -> list[Arm]:
        return ask(Search(sampler, spaces, seed), 40, lambda config: 20.0 + len(str(config)) % 5)

    first = proposals(3)
    assert len(set(first)) == 40 and first == proposals(3)
    by_name = {s.family: s for s in spaces}
    assert all(by_name[arm.family].violated(arm.config) is None for arm in first)
    if sampler != "grid":
        assert first != proposals(4)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_it_ends_when_every_valid_arm_was_proposed_once(sampler: str) -> None:
    small = {"a": (0, 1, 2), "b": (1, 2), "c": (2, 7)}
    spaces = [space("one", **small), space("two", **small)]
    search = Search(sampler, spaces, 1)
    excluded = spaces[0].arm(spaces[0].default)
    search.exclude(excluded)
    found = Counter(ask(search, 99, valley))
    valid = {s.arm(config) for s in spaces for config in s.valid()}
    assert len(valid) == 12, "3 of 6 pairs are even, times 2, times 2 families"
    assert found == Counter(valid - {excluded})
    assert search.ask() is None


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_record_is_all_that_may_be_proposed(sampler: str) -> None:
    one = space()
    held = {one.arm({"a": a, "b": a, "c": 5}) for a in NUMBERS}
    search = Search(sampler, [one], 1)
    search.restrict(held)
    assert Counter(ask(search, 99, valley)) == Counter(held)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_told_again_from_a_record_it_goes_on_as_it_would_have(sampler: str) -> None:
    whole = ask(Search(sampler, [space()], 5), 40, valley)
    again = Search(sampler, [space()], 5)
    assert ask(again, 25, valley) + ask(again, 15, valley) == whole


def test_it_learns_also_from_arms_that_it_never_asked_for() -> None:
    def at_the_valley(taught: bool) -> int:
        one = space()
        search = Search("tpe", [one], 1)
        for config in random.Random(1).sample(list(one.valid()), 64) if taught else ():
            search.tell(one.arm(config), valley(config))
        return sum(arm.config["a"] == 3 for arm in (search.ask() for _ in range(16)) if arm)

    assert at_the_valley(taught=True) >= at_the_valley(taught=False) + 6


def test_failures_drive_it_away() -> None:
    one = space()
    found = ask(Search("tpe", [one], 2), 80, valley)
    early, late = found[:16], found[40:]
    share = [sum(arm.config["c"] == 7 for arm in part) / len(part) for part in (early, late)]
    assert share[1] < share[0] / 2


def test_where_the_model_repeats_itself_its_neighbourhood_is_searched() -> None:
    """A bowl of 256 arms: by chance 48 draws find 3 of the best 16; a model that falls back to chance finds no more."""

    def bowl(config: Config) -> float:
        return 10.0 + sum((int(config[name]) - 5) ** 2 for name in ("a", "b", "c"))

    one = space()
    best = set(sorted((one.arm(config) for config in one.valid()), key=lambda arm: bowl(arm.config))[:16])
    found = [len(best & set(ask(Search("tpe", [one], seed), 48, bowl))) for seed in range(4)]
    assert min(found) >= 9, found


def test_a_fixed_arm_that_no_space_can_express_is_no_lesson() -> None:
    search = Search("tpe", [space()], 1)
    for arm in (
        Arm.of("one", "k", {"a": 99, "b": 1, "c": 1}),
        Arm.of("one", "k", {"a": 1}),
        Arm.of("one", "other", {"a": 1, "b": 1, "c": 1}),
        Arm.of("vendor", "mm"),
    ):
        search.tell(arm, 10.0)
    assert search.ask() is not None


def test_two_kernels_of_one_family_may_give_an_axis_different_values() -> None:
    spaces = [space("one", "k"), space("one", "l", a=(0, 2)), space("two", "k")]
    for s in spaces:
        search = Search("tpe", spaces, 1)
        for other in spaces:
            search.tell(other.arm(other.default), 10.0)
        found = ask(search, 60, valley)
        assert len(set(found)) == 60 and {(a.family, a.kernel) for a in found} >= {(s.family, s.kernel)}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_without_a_space_nothing_is_proposed(sampler: str) -> None:
    assert Search(sampler, [], 1).ask() is None


def test_an_unknown_sampler_names_the_known_ones() -> None:
    with pytest.raises(UsageError, match="unknown sampler 'bayes'; choose one of tpe, random, grid"):
        Search("bayes", [], 1)
