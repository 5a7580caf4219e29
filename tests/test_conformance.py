"""Every family keeps the contract, and the suite that says so catches families that do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from bench_double import DoubleDevice, DoubleFamily, TorchLaunch

from tuner.arms import Arm, Artifact, Config, Pointer, Step, Target, Value
from tuner.devices import choose, open_device
from tuner.problem import Problem, Shape
from tuner.registry import builtin_families
from tuner.space import Constraint, Parameter, Space
from tuner.testing import REQUIRED, REQUIRED_LIBRARY, ConformanceError, arms_of, check_arms, check_contract, problems
from tuner.workflow import integrity

HOST = Target("host", "none", 32, 1)
TARGETS = {
    "sm_90": Target("cuda", "sm_90", 32, 132, 1024, 232448),
    "gfx1100": Target("hip", "gfx1100", 32, 96),
    "gfx942": Target("hip", "gfx942", 64, 304),
}
SMALL = Problem.of(Shape.parse("1x512x64"), "bf16")
SEVERAL = Problem.of(Shape.parse("5x96x33"), "bf16")


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize(
    ("name", "problem"),
    [("triton", SMALL), ("triton", SEVERAL), ("hip", SMALL), ("hip", SEVERAL), ("ceiling", SMALL)],
    ids=str,
)
def test_compiled_families_keep_the_contract(name: str, problem: Problem, arch: str) -> None:
    artifacts = check_contract(builtin_families()[name], TARGETS[arch], problem)
    assert all(artifact.code and int(artifact.resources["registers"]) > 0 for artifact in artifacts)


# For each family: shapes whose fixed arms run, and a shape whose default is run with changes too.
ON_HOST: dict[str, tuple[tuple[str, ...], str, tuple[Config, ...]]] = {
    "hip": (("1x1x1", "1x17x33", "3x360x321", "8x4304x1"), "2x4303x33", ({"rows": 4, "split_k": 2, "warps": 2},)),
    "vendor": (("1x1x1", "1x17x33", "3x360x321", "8x4304x1"), "5x4303x33", ()),
    "ceiling": (("1x360x321",), "", ()),
}


@pytest.mark.parametrize("name", ON_HOST)
def test_families_of_the_host_are_right_over_odd_shapes(name: str) -> None:
    family, device = builtin_families()[name], open_device(choose("host"))
    shapes, changed, changes = ON_HOST[name]
    assert check_arms(family, device, problems(shapes)) >= len(shapes)
    if changed:
        over = problems([changed])
        arms = arms_of(family, over[0], device.target, changes)
        assert len(arms) == len(family.fixed(over[0], device.target)) + len(changes)
        assert check_arms(family, device, over, changes) == len(arms)


@pytest.mark.parametrize("name", ["hip", "vendor"])
def test_families_of_the_host_keep_the_contract(name: str) -> None:
    check_contract(builtin_families()[name], open_device(choose("host")).target, SEVERAL)


def test_a_family_says_why_it_has_no_arms_for_a_target() -> None:
    with pytest.raises(ConformanceError, match="triton has no arms for none: Triton arms cannot be timed on host"):
        check_contract(builtin_families()["triton"], HOST, SMALL)


def test_the_suite_asks_for_the_receipts_that_a_confirmation_asks_for() -> None:
    assert (REQUIRED, REQUIRED_LIBRARY) == (integrity.REQUIRED, integrity.REQUIRED_LIBRARY)


def double(launch: type[TorchLaunch] = TorchLaunch) -> DoubleFamily:
    return DoubleFamily(launch)


def test_a_right_family_passes() -> None:
    assert len(check_contract(double(), HOST, SMALL)) == 1
    assert check_arms(double(), DoubleDevice(), problems()) == len(problems())  # type: ignore[arg-type]


@pytest.mark.parametrize("graphs", [True, False])
def test_the_ring_is_short_so_that_every_slot_is_read_again(graphs: bool) -> None:
    seen: list[tuple[int, int]] = []

    class Watched(TorchLaunch):
        def compute(self, i: int, weight: torch.Tensor) -> None:
            seen.append((i, weight.data_ptr()))
            super().compute(i, weight)

    device = DoubleDevice(graphs)
    assert check_arms(double(Watched), device, [SMALL]) == 1  # type: ignore[arg-type]
    slots = [address for _, address in seen]
    assert len(set(slots)) == 3 and min(map(slots.count, slots)) > 3
    assert device.info.llc_bytes == DoubleDevice().info.llc_bytes  # the caller's device stays as it was


class SkipsTail(TorchLaunch):
    def compute(self, i: int, weight: torch.Tensor) -> None:
        y = self.tape.activation(i).float() @ weight.float().t()
        self.tape.output(i)[:, :-1].copy_(y[:, :-1])


class LeavesItsWorkspaceDirty(TorchLaunch):
    """Right when it meets a slot for the first time."""

    def compute(self, i: int, weight: torch.Tensor) -> None:
        sums = self.__dict__.setdefault("sums", {}).setdefault(weight.data_ptr(), torch.zeros(()))
        y = self.tape.activation(i).float() @ weight.float().t()
        self.tape.output(i).copy_(y + sums)
        sums += 1.0


class WritesBehindItsWeights(TorchLaunch):
    """Right in its output; what it spoils is padding, which no product reads."""

    def compute(self, i: int, weight: torch.Tensor) -> None:
        super().compute(i, weight)
        end = torch.as_strided(weight, (1,), (1,), weight.storage_offset() + weight.numel())
        end.fill_(1.0)


class CompilesLate(TorchLaunch):
    def receipt(self) -> dict[str, Value]:
        return {**super().receipt(), "compiles_in_worker": 2}


class NoReceipt(TorchLaunch):
    def receipt(self) -> dict[str, object]:  # type: ignore[override]
        return {"note": "trust me"}


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        (SkipsTail, "3x17x33 bf16: double/product: correctness: gate, input 1: 3 of 99 outputs are NaN"),
        (LeavesItsWorkspaceDirty, r"3x17x33 bf16: double/product: correctness: tape, timed launch \d+: .* are wrong"),
        (WritesBehindItsWeights, "3x17x33 bf16: double/product: it wrote into the ring of weights"),
        (CompilesLate, "compiles_in_worker is 2; code must come from build alone"),
        (NoReceipt, "its receipt has no kernel, code_hash, compiles_in_worker; it has .*note"),
    ],
)
def test_wrong_arms_are_caught(launch: type[TorchLaunch], message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_arms(double(launch), DoubleDevice(), problems(["3x17x33"]))  # type: ignore[arg-type]


class ReadsOneSlot(TorchLaunch):
    """A ceiling has no output, so only the addresses tell."""

    def __call__(self, i: int) -> None:
        super().__call__(0)


def test_a_ceiling_that_stays_on_one_slot_is_caught() -> None:
    family = double(ReadsOneSlot)
    family.role = "ceiling"
    with pytest.raises(ConformanceError, match="does not read every slot of the ring in turn"):
        check_arms(family, DoubleDevice(), [SMALL])  # type: ignore[arg-type]


def test_every_wrong_arm_is_named() -> None:
    with pytest.raises(ConformanceError) as caught:
        check_arms(double(SkipsTail), DoubleDevice(), problems())  # type: ignore[arg-type]
    named = [line.partition(":")[0] for line in str(caught.value).splitlines()]
    assert named == [str(problem) for problem in problems()]


def test_an_arm_that_raises_something_else_is_named_too() -> None:
    class Raises(TorchLaunch):
        def compute(self, i: int, weight: torch.Tensor) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        check_arms(double(Raises), DoubleDevice(), [SMALL])  # type: ignore[arg-type]
    assert caught.value.__notes__ == ["while double/product of 1x512x64 bf16 was held to the contract"]


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


class Mute(DoubleFamily):
    def missing(self, target: Target) -> str | None:
        return ""


class Unhashed(DoubleFamily):
    def build(self, problem: Problem, arm: Arm, target: Target) -> Artifact:
        return replace(super().build(problem, arm, target), source_hash="")


class Searching(DoubleFamily):
    """Has a space of one parameter: rows is 1 or 2, and even."""

    def __init__(self, default: Config, *fixed: Config) -> None:
        super().__init__()
        self._default, self._listed = default, fixed

    def spaces(self, problem: Problem, target: Target) -> tuple[Space, ...]:
        rows = Parameter("rows", (1, 2), "rows of a workgroup")
        even = Constraint("even", "rows is even, for this is a test", lambda c, p, t: int(c["rows"]) % 2 == 0)
        return (Space("double", "product", problem, target, (rows,), (even,), self._default),)

    def fixed(self, problem: Problem, target: Target) -> tuple[Arm, ...]:
        return tuple(Arm.of("double", "product", config) for config in self._listed)


def test_changes_run_where_the_space_allows_them() -> None:
    family = Searching({"rows": 2}, {"rows": 2})
    assert len(check_contract(family, HOST, SMALL)) == 1
    wanted: tuple[Mapping[str, Value], ...] = ({"rows": 1}, {"rows": 3}, {"rows": 2, "pdl": True})
    assert arms_of(family, SMALL, HOST, wanted) == family.fixed(SMALL, HOST)


class Compiled(DoubleFamily):
    """Has code, and one step that is changed."""

    def __init__(self, **changes: object) -> None:
        super().__init__()
        args = (Pointer("activation"), Pointer("weight"), Pointer("output"))
        self._step = replace(Step("product", (1, 1, 1), (32, 1, 1), args), **changes)  # type: ignore[arg-type]

    def build(self, problem: Problem, arm: Arm, target: Target) -> Artifact:
        artifact = super().build(problem, arm, target)
        return replace(artifact, code=b"x", code_hash="a" * 64, steps=(self._step,), resources={"registers": 8})


def test_code_with_a_step_that_can_be_launched_passes() -> None:
    assert check_contract(Compiled(), HOST, SMALL)[0].code


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (Impure(), "build must be pure"),
        (Foreign(), "does not bear the name"),
        (Nothing(), "has no fixed arm"),
        (Absent(), "no compiler; apt install one"),
        (Mute(), r"missing\(\) must say why"),
        (Unhashed(), "without both hashes"),
        (Searching({"rows": 1}, {"rows": 1}), "outside its space: rows is even, for this is a test"),
        (Searching({"rows": 2}, {"rows": 2}, {"rows": 1}), "breaks its own space: rows is even"),
        (Searching({"rows": 2}, {"rows": 2}, {"rows": 4}), r"breaks its own space: rows=4 is none of \(1, 2\)"),
        (Searching({"rows": 2}, {"rows": 2}, {"warps": 2}), "breaks its own space: its keys are not the parameters"),
        (Searching({"rows": 2}, {}), "breaks its own space"),
        (Compiled(args=(Pointer("weights"),)), r"step product takes \['weights'\]; there are \['activation'"),
        (Compiled(grid=(0, 1, 1)), "launches nothing"),
        (Compiled(block=(2048, 1, 1)), "2048 threads and 0 bytes: over the limits"),
    ],
)
def test_broken_families_are_caught(family: DoubleFamily, message: str) -> None:
    with pytest.raises(ConformanceError, match=message):
        check_contract(family, HOST, SMALL)
