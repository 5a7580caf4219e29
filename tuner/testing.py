"""The conformance suite: what any family of kernels must keep.

`check_contract` needs no device, only the compilers that the family uses. `check_arms` runs arms on an opened device
and holds them to the same gate and tape that `tune` uses, so there is no second idea of what is right.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tuner.arms import Arm, Artifact, Family, Target
from tuner.errors import ArmError, ColdtuneError
from tuner.problem import Problem, Shape

if TYPE_CHECKING:
    from tuner.devices.base import Device

ODD_SHAPES = ("1x1x1", "1x17x33", "2x360x21", "3x96x77", "5x43x19", "8x40x12", "1x1000x5")
ROLES = ("candidate", "baseline", "ceiling")
RECEIPTS = (("kernel", "code_hash", "compiles_in_worker"), ("form", "library"))


class ConformanceError(ColdtuneError):
    """A family does not keep the contract; the message says which arm, what was expected and what was found."""


def problems(shapes: Iterable[str] = ODD_SHAPES, weights: str = "bf16") -> list[Problem]:
    """Problems of odd shapes, as `check_arms` takes them."""
    return [Problem.of(Shape.parse(text), weights) for text in shapes]


def check_contract(family: Family, target: Target, problem: Problem) -> list[Artifact]:
    """Hold the part of the contract that needs no device.

    The family has a name and a role, has arms for the target, lists fixed arms that lie in its spaces and bear its
    name, and builds them purely: twice the same code, which survives pickling.

    Returns:
        The artifacts of the fixed arms.

    Raises:
        ConformanceError: Something of this does not hold.
    """
    _expect(bool(family.name) and family.role in ROLES, f"{family!r}: needs a name, and a role out of {ROLES}")
    missing = family.missing(target)
    _expect(missing is None, f"{family.name} has no arms for {target.arch}: {missing}")
    spaces = {space.kernel: space for space in family.spaces(problem, target)}
    arms = family.fixed(problem, target)
    _expect(bool(arms), f"{family.name} has no fixed arm for {problem}; its default must always be measured")
    _expect(len(set(arms)) == len(arms), f"{family.name} lists a fixed arm twice for {problem}")
    for arm in arms:
        _expect(arm.family == family.name, f"{arm} does not bear the name of its family, {family.name}")
        space = spaces.get(arm.kernel)
        if space is not None:
            broken = space.violated(arm.config)
            _expect(broken is None, f"fixed arm {arm} breaks its own space: {broken.sentence if broken else ''}")
    for space in spaces.values():
        _expect(space.arm(space.default) in arms, f"the default of {family.name}/{space.kernel} is no fixed arm")
    return [_built_twice(family, problem, arm, target) for arm in arms]


def _built_twice(family: Family, problem: Problem, arm: Arm, target: Target) -> Artifact:
    first, again = family.build(problem, arm, target), family.build(problem, arm, target)
    same = first.code_hash == again.code_hash and first.steps == again.steps and first.workspaces == again.workspaces
    _expect(same, f"{arm}: building it twice gives different code; build must be pure")
    _expect(pickle.loads(pickle.dumps(first)) == first, f"{arm}: its artifact does not survive pickling")
    _expect(
        (first.arm, first.problem, first.target) == (arm, problem, target), f"{arm}: its artifact names another arm"
    )
    if first.code:
        _expect(len(first.code_hash) == 64, f"{arm}: code_hash must be a SHA-256 in hex, found {first.code_hash!r}")
        _expect(bool(first.steps), f"{arm}: has code but no step that launches it")
    return first


def check_arms(family: Family, device: Device, over: Sequence[Problem], seed: int = 1) -> int:
    """Bind fixed arms on a device and hold them to the gate and, over two timed runs, to the activation tape.

    Args:
        family: Any family; ceilings are launched, and have no output to check.
        device: An opened device.
        over: Problems; see `problems`.
        seed: Seed of weights and activations.

    Returns:
        How many arms were held.

    Raises:
        ConformanceError: An arm is wrong, writes where it must not, or gives no receipt.
    """
    from tuner.instrument.session import Session
    from tuner.instrument.timer import TimerSettings

    held = 0
    for problem in over:
        layout = problem.format.layouts[0]
        session = Session(device, problem, layout, seed, TimerSettings.of(device.info.kind))
        for arm in family.fixed(problem, device.target):
            try:
                bound = session.bind(family, family.build(problem, arm, device.target))
                session.add_unit(bound, "self")
                session.block(bound, "self", 2)
                session.check(bound, "self")
            except ArmError as error:
                raise ConformanceError(f"{problem}: {arm}: {error.status}: {error}") from error
            receipt = bound.receipt()
            known = any(all(key in receipt for key in keys) for keys in RECEIPTS)
            _expect(known, f"{arm}: its receipt has neither {RECEIPTS[0]} nor {RECEIPTS[1]}: {sorted(receipt)}")
            held += 1
    return held


def _expect(held: bool, message: str) -> None:
    if not held:
        raise ConformanceError(message)
