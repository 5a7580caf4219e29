"""The choice from hand-made finalists: ties by the fixed order, baselines, twin, what is left out, what cannot be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tuner.arms import Arm, Config, Role, Target
from tuner.errors import MachineError
from tuner.problem import Problem, Shape
from tuner.space import Constraint, Parameter, Space
from tuner.workflow.choose import Standing, choose
from tuner.workflow.measure import Outcome

TARGET = Target("cuda", "sm_90", 32, 132)
PROBLEM = Problem(Shape(1, 4096, 4096), "bf16")
LARGE = Problem(Shape(1, 4096, 98304), "bf16")
ROLES: dict[str, Role] = {"hip": "candidate", "triton": "candidate", "vendor": "baseline", "ceiling": "ceiling"}


def space(family: str, twins: bool = True) -> Space:
    def holds(config: Config, problem: Problem, target: Target) -> bool:
        return twins or bool(config["m_spec"])

    parameters = (Parameter("rows", (1, 2, 4), "rows"), Parameter("m_spec", (True, False), "for M=1"))
    only = (Constraint("only", "only m_spec", holds),)
    return Space(family, "k", PROBLEM, TARGET, parameters, only, {"rows": 1, "m_spec": True})


def candidate(family: str, rows: int, m_spec: bool = True) -> Arm:
    return Arm.of(family, "k", {"rows": rows, "m_spec": m_spec})


def timed(arm: Arm, us: float, **receipt: int) -> Outcome:
    """Six repeats with a spread of 0.1 %."""
    samples = tuple(us * (1 + 0.001 * step) for step in (-1, 1, -0.5, 0.5, -0.2, 0.2))
    return Outcome(PROBLEM, arm, "correct", None, samples, dict(receipt))


def failed(arm: Arm, status: str = "correctness", reason: str = "tape: planted") -> Outcome:
    return Outcome(PROBLEM, arm, status, reason)


VENDORS = [timed(Arm.of("vendor", form), us) for form, us in (("mm", 30.0), ("mv", 28.0), ("linear", 29.0))]
CEILINGS = [timed(Arm.of("ceiling", kernel), us) for kernel, us in (("flat", 19.0), ("stride", 20.0))]


def decide(*finalists: Outcome, twins: bool = True, **changes: Any) -> dict[str, Any]:
    found = {
        **{"problem": PROBLEM, "roles": ROLES, "spaces": (space("hip", twins), space("triton", twins))},
        **{"finalists": finalists, "explored": finalists, "asymptotic": (), "dropped": ()},
        **{"wait_s": 0.0, "measure_s": 1.0},
    }
    return choose(Standing(**{**found, **changes}), replay=False)


def test_a_clear_winner_is_chosen_beside_its_baselines() -> None:
    choice = decide(
        timed(candidate("hip", 4), 21.0), timed(candidate("triton", 2), 22.0), timed(candidate("hip", 1), 23.0),
        *VENDORS, *CEILINGS,
    )  # fmt: skip
    assert choice["chosen"] == {"family": "hip", "kernel": "k", "config": {"rows": 4, "m_spec": True}}
    assert choice["tie_set"] == [choice["chosen"]]
    assert choice["default"]["config"] == {"rows": 1, "m_spec": True}
    assert choice["twin"] == {"family": "hip", "kernel": "k", "config": {"rows": 4, "m_spec": False}}
    assert choice["other"]["family"] == "triton"
    assert [v["kernel"] for v in choice["vendors"]] == ["mv", "linear"], "the two fastest forms"
    assert choice["ceiling"]["kernel"] == "flat" and len(choice["ceilings"]) == 2
    assert choice["space"]["size"] == 12 and choice["measured"] == 8


def test_within_the_noise_the_default_comes_first_and_then_fewer_resources() -> None:
    default, lean, fat = candidate("hip", 1), candidate("hip", 2), candidate("hip", 4)
    three = [timed(fat, 21.0, registers=99), timed(lean, 21.005, registers=30), timed(default, 21.01, registers=255)]
    assert decide(*three)["chosen"]["config"]["rows"] == 1
    assert [arm["config"]["rows"] for arm in decide(*three)["tie_set"]] == [1, 2, 4]
    assert decide(*three[:2])["chosen"]["config"]["rows"] == 2
    slow_default = timed(default, 22.0, registers=10)
    assert decide(*three[:2], slow_default)["chosen"]["config"]["rows"] == 2, "a default outside the noise ties not"


def test_the_order_of_the_finalists_does_not_matter() -> None:
    outcomes = [timed(candidate("hip", 4), 21.0), timed(candidate("triton", 2), 21.01), *VENDORS, CEILINGS[0]]
    wanted = decide(*outcomes)
    for order in itertools.islice(itertools.permutations(outcomes), 0, 720, 37):
        assert {**decide(*order), "estimates": 0} == {**wanted, "estimates": 0}
        assert decide(*order)["estimates"] == wanted["estimates"]


def test_the_fastest_that_failed_is_not_chosen() -> None:
    wrong = Outcome(PROBLEM, candidate("hip", 4), "correctness", "tape: planted", (5.0, 5.0))
    choice = decide(wrong, timed(candidate("triton", 2), 22.0), dropped=(wrong,))
    assert choice["chosen"]["family"] == "triton" and choice["other"] is None
    assert wrong.arm.key not in choice["estimates"]
    (dropped,) = choice["dropped"]
    assert (dropped["status"], dropped["reason"]) == ("correctness", "tape: planted")
    assert dropped["config"] == {"rows": 4, "m_spec": True}


def test_when_all_finalists_fail_the_reasons_are_counted() -> None:
    arms = [failed(candidate("hip", rows)) for rows in (1, 2)] + [failed(candidate("triton", 1), "timeout", "block")]
    with pytest.raises(MachineError, match=r"nothing is chosen: 2 x correctness: tape: planted; 1 x timeout: block"):
        decide(*arms, *VENDORS)


def test_what_is_not_there_is_none() -> None:
    choice = decide(timed(candidate("hip", 1), 21.0), twins=False)
    assert choice["twin"] is None and choice["other"] is None and choice["ceiling"] is None
    assert choice["vendors"] == [] and choice["asymptotic"] is None and choice["optimism"] == 0.0
    assert choice["space"]["pruned"] == {"hip: only m_spec": 3, "triton: only m_spec": 3}


def test_the_asymptotic_ceiling_is_the_fastest_read_of_the_large_problem() -> None:
    large = [Outcome(LARGE, Arm.of("ceiling", k), "correct", None, (us,)) for k, us in (("flat", 180.0), ("s", 179.0))]
    found = decide(timed(candidate("hip", 1), 21.0), asymptotic=tuple(large))["asymptotic"]
    assert (found["kernel"], found["shape"], found["median_us"]) == ("s", "1x4096x98304", 179.0)
    assert found["bytes_per_us"] == pytest.approx(4096 * 98304 * 2 / 179.0)
