"""Every family keeps the contract, and the suite that says so catches families that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_double import DoubleDevice, DoubleFamily, TorchLaunch

from tuner.arms import Arm, Artifact, Target
from tuner.devices import choose, open_device
from tuner.problem import Problem, Shape
from tuner.registry import builtin_families
from tuner.testing import ConformanceError, check_arms, check_contract, problems

HOST = Target("host", "none", 32, 1)
TARGETS = {
    "sm_90": Target("cuda", "sm_90", 32, 132, 1024, 232448),
    "gfx1100": Target("hip", "gfx1100", 32, 96),
    "gfx942": Target("hip", "gfx942", 64, 304),
}
SMALL = Problem.of(Shape.parse("1x512x64"), "bf16")
SEVERAL = Problem.of(Shape.parse("5x96x33"), "bf16")


@pytest.mark.parametrize("problem", [SMALL, SEVERAL], ids=str)
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("name", ["triton", "hip", "ceiling"])
def test_compiled_families_keep_the_contract(name: str, arch: str, problem: Problem) -> None:
    artifacts = check_contract(builtin_families()[name], TARGETS[arch], problem)
    assert all(artifact.code and int(artifact.resources["registers"]) > 0 for artifact in artifacts)


@pytest.mark.parametrize("name", ["hip", "vendor"])
def test_families_of_the_host_are_right_over_odd_shapes(name: str) -> None:
    family, device = builtin_families()[name], open_device(choose("host"))
    check_contract(family, device.target, SMALL)
    over = problems(("1x1x1", "1x17x33", "3x96x77", "8x40x12"))
    assert check_arms(family, device, over) >= len(over)


def double(launch: type[TorchLaunch] = TorchLaunch) -> DoubleFamily:
    return DoubleFamily(launch)


def test_a_right_family_passes() -> None:
    assert len(check_contract(double(), HOST, SMALL)) == 1
    assert check_arms(double(), DoubleDevice(), problems()) == len(problems())  # type: ignore[arg-type]


class SkipsTail(TorchLaunch):
    def compute(self, i: int, weight: torch.Tensor) -> None:
        y = self.tape.activation(i).float() @ weight.float().t()
        self.tape.output(i)[:, :-1].copy_(y[:, :-1])


class NoReceipt(TorchLaunch):
    def receipt(self) -> dict[str, object]:  # type: ignore[override]
        return {"note": "trust me"}


@pytest.mark.parametrize(
    ("launch", "message"),
    [(SkipsTail, "1x1x1 bf16: double/product: correctness: gate"), (NoReceipt, "its receipt has neither")],
)
def test_wrong_arms_are_caught(launch: type[TorchLaunch], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_arms(double(launch), DoubleDevice(), problems())  # type: ignore[arg-type]


class Impure(DoubleFamily):
    builds = 0

    def build(self, problem: Problem, arm: Arm, target: Target) -> Artifact:
        self.builds += 1
        return replace(super().build(problem, arm, target), code_hash=str(self.builds))


class Foreign(DoubleFamily):
    def fixed(self, problem: Problem, target: Target) -> tuple[Arm, ...]:
        return (Arm.of("another", "product"),)


class Nothing(DoubleFamily):
    def fixed(self, problem: Problem, target: Target) -> tuple[Arm, ...]:
        return ()


class Absent(DoubleFamily):
    def missing(self, target: Target) -> str | None:
        return "no compiler; apt install one"


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (Impure(), "build must be pure"),
        (Foreign(), "does not bear the name"),
        (Nothing(), "has no fixed arm"),
        (Absent(), "no compiler; apt install one"),
    ],
)
def test_broken_families_are_caught(family: DoubleFamily, message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_contract(family, HOST, SMALL)
