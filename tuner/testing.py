"""The conformance suite: what any family of kernels must keep.

`check_contract` needs no device, only the compilers that the family uses. `check_arms` runs arms on an opened device
and holds them to the same gate and tape that `tune` uses, so there is no second idea of what is right.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tuner.arms import Arm, Artifact, Config, Family, Pointer, Target, Value
from tuner.errors import ArmError, ColdtuneError, UsageError
from tuner.problem import Problem, Shape
from tuner.space import Space

if TYPE_CHECKING:
    from tuner.devices.base import Device
    from tuner.instrument.session import Session

ODD_SHAPES = ("1x1x1", "1x17x33", "2x360x21", "3x96x77", "5x43x19", "8x40x12", "1x1000x5")
ROLES = ("candidate", "baseline", "ceiling")
# Receipts of arms with code, and of library arms; a confirmation asks for the same.
REQUIRED = ("kernel", "code_hash", "compiles_in_worker")
REQUIRED_LIBRARY = ("form", "library")
RING_SLOTS = 3
REPEATS = 3
SHOWN = 20

Build = Callable[[Problem, Arm], Artifact]


class ConformanceError(ColdtuneError):
    """A family does not keep the contract; the message says which arm, what was expected and what was found."""


def problems(shapes: Iterable[str] = ODD_SHAPES, weights: str = "bf16") -> list[Problem]:
    """Problems of odd shapes, as `check_arms` takes them."""
    return [Problem.of(Shape.parse(text), weights) for text in shapes]


def arms_of(family: Family, problem: Problem, target: Target, changes: Iterable[Config] = ()) -> tuple[Arm, ...]:
    """The fixed arms of a family, and the default of each of its spaces with each change that the space allows.

    Args:
        family: Any family.
        problem: What the arms are for.
        target: What they are compiled for.
        changes: Parameters to change together; those that a space does not have are left out.
    """
    arms = list(family.fixed(problem, target))
    for space in family.spaces(problem, target):
        for change in changes:
            config = {**space.default, **{name: value for name, value in change.items() if name in space.default}}
            if _outside(space, config) is None:
                arms.append(space.arm(config))
    return tuple(dict.fromkeys(arms))


def check_contract(family: Family, target: Target, problem: Problem) -> list[Artifact]:
    """Hold the part of the contract that needs no device.

    The family has a name and a role, has arms for the target, lists fixed arms that lie in its spaces and bear its
    name, and builds them purely: twice the same code, which survives pickling and whose launches can be made.

    Returns:
        The artifacts of the fixed arms.

    Raises:
        ConformanceError: Something of this does not hold.
    """
    _expect(bool(family.name) and family.role in ROLES, f"{family!r}: needs a name, and a role out of {ROLES}")
    missing = family.missing(target)
    _expect(missing is None or bool(missing.strip()), f"{family.name}: missing() must say why, or answer None")
    _expect(missing is None, f"{family.name} has no arms for {target.arch}: {missing}")
    arms = _fixed(family, target, problem)
    first = [family.build(problem, arm, target) for arm in arms]
    # The other way round, so that what one build leaves behind shows in the next.
    again = [family.build(problem, arm, target) for arm in reversed(arms)][::-1]
    for arm, one, two in zip(arms, first, again, strict=True):
        _hold_artifact(arm, one, two, target, problem)
    return first


def _fixed(family: Family, target: Target, problem: Problem) -> tuple[Arm, ...]:
    try:
        listed = family.spaces(problem, target)
        arms = family.fixed(problem, target)
    except UsageError as error:  # a space refuses a default that lies outside it
        raise ConformanceError(f"{family.name}, {problem}: {error}") from error
    spaces = {space.kernel: space for space in listed}
    _expect(len(spaces) == len(listed), f"{family.name} has two spaces for one kernel")
    _expect(bool(arms), f"{family.name} has no fixed arm for {problem}; its default must always be measured")
    _expect(len(set(arms)) == len(arms), f"{family.name} lists a fixed arm twice for {problem}")
    for arm in arms:
        _expect(arm.family == family.name, f"{arm} does not bear the name of its family, {family.name}")
        broken = _outside(spaces[arm.kernel], arm.config) if arm.kernel in spaces else None
        _expect(broken is None, f"fixed arm {arm} breaks its own space: {broken}")
    for space in listed:
        _expect(space.family == family.name, f"the space of {space.family}/{space.kernel} is in family {family.name}")
        _expect(space.arm(space.default) in arms, f"the default of {family.name}/{space.kernel} is no fixed arm")
    return arms


def _outside(space: Space, config: Config) -> str | None:
    """Why a config does not lie in a space, or None."""
    values = {parameter.name: parameter.values for parameter in space.parameters}
    if set(config) != set(values):
        return f"its keys are not the parameters {', '.join(values)}"
    for name, value in config.items():
        # repr tells True from 1, which compare as equal.
        if repr(value) not in map(repr, values[name]):
            return f"{name}={value} is none of {values[name]}"
    broken = space.violated(config)
    return None if broken is None else broken.sentence


def _hold_artifact(arm: Arm, first: Artifact, again: Artifact, target: Target, problem: Problem) -> None:
    same = all(
        getattr(first, name) == getattr(again, name)
        for name in ("code_hash", "source_hash", "steps", "workspaces", "resources")
    )
    _expect(same, f"{arm}: building it twice gives different code; build must be pure")
    _expect(pickle.loads(pickle.dumps(first)) == first, f"{arm}: its artifact does not survive pickling")
    named = (first.arm, first.problem, first.target) == (arm, problem, target)
    _expect(named, f"{arm}: its artifact names another arm, problem or target")
    _expect(
        bool(first.code_hash and first.source_hash), f"{arm}: without both hashes a changed arm passes for this one"
    )
    if not first.code:
        return
    _expect(len(first.code_hash) == 64, f"{arm}: code_hash must be a SHA-256 in hex, found {first.code_hash!r}")
    _expect(bool(first.resources), f"{arm}: has code, but its artifact says nothing of the resources found in it")
    _expect(bool(first.steps), f"{arm}: has code but no step that launches it")
    layouts = [problem.format.operands(problem.shape, layout) for layout in problem.format.layouts]
    operands = {operand.name for layout in layouts for operand in layout}
    known = {"activation", "output", *operands, *(workspace.name for workspace in first.workspaces)}
    for step in first.steps:
        unknown = sorted({arg.name for arg in step.args if isinstance(arg, Pointer)} - known)
        _expect(not unknown, f"{arm}: step {step.entry} takes {unknown}; there are {sorted(known)}")
        threads = step.block[0] * step.block[1] * step.block[2]
        _expect(min(*step.grid, threads) >= 1, f"{arm}: step {step.entry} launches nothing: {step.grid} x {step.block}")
        fits = threads <= target.max_threads and step.shared_bytes <= target.shared_bytes
        _expect(fits, f"{arm}: step {step.entry} has {threads} threads and {step.shared_bytes} bytes: over the limits")


def check_arms(
    family: Family,
    device: Device,
    over: Sequence[Problem],
    changes: Sequence[Config] = (),
    seed: int = 1,
    build: Build | None = None,
) -> int:
    """Bind arms on a device and hold them to the gate and, over several timed runs, to the activation tape.

    The ring has three slots, so each is read again and again: an arm that leaves its workspace dirty, reads one slot
    only, or writes to its weights is found.

    Args:
        family: Any family; ceilings are launched, and have no output to check.
        device: An opened device.
        over: Problems; see `problems`.
        changes: Changes of the default to run beside the fixed arms; see `arms_of`.
        seed: Seed of weights and activations.
        build: Gives an arm's artifact; default is the family's own `build`, here and now.

    Returns:
        How many arms were held.

    Raises:
        ConformanceError: Arms are wrong, write where they must not, or give no receipt; one line for each.
    """
    held, failed = 0, []
    for problem in over:
        sessions: dict[str, Session] = {}
        fixed = family.fixed(problem, device.target)
        for arm in arms_of(family, problem, device.target, changes):
            try:
                artifact = build(problem, arm) if build else family.build(problem, arm, device.target)
                layout = str(arm.config.get("layout", problem.format.layouts[0]))
                if layout not in sessions:
                    sessions[layout] = _session(device, problem, layout, seed)
                _hold_arm(sessions[layout], family, artifact)
                held += 1
            except ArmError as error:
                # A space may hold configs whose needs only a compile tells; a fixed arm must run.
                if error.status == "constraints" and arm not in fixed:
                    continue
                failed.append(f"{problem}: {arm}: {error.status}: {error}")
                if getattr(error, "sticky", False):  # the context is lost, so nothing more can be learnt
                    raise ConformanceError("\n".join(failed)) from error
            except ConformanceError as error:
                failed.append(f"{problem}: {error}")
            except Exception as error:
                error.add_note(f"while {arm} of {problem} was held to the contract")
                raise
    if failed:
        more = [f"and {len(failed) - SHOWN} more"] if len(failed) > SHOWN else []
        raise ConformanceError("\n".join(failed[:SHOWN] + more))
    return held


def _session(device: Device, problem: Problem, layout: str, seed: int) -> Session:
    """A session whose ring is short and whose units are brief: nothing is judged by its time here."""
    from tuner.instrument.rotation import FACTOR
    from tuner.instrument.session import Session
    from tuner.instrument.timer import TimerSettings

    short = copy.copy(device)
    short.info = replace(device.info, llc_bytes=max(1, RING_SLOTS * problem.weight_bytes // FACTOR))
    timer = replace(TimerSettings.of(device.info.kind), min_window_us=0.0, untimed_us=0.0)
    # On host two launches make a repeat: here enough of them to come round the ring.
    timer = replace(timer, min_launches=max(timer.min_launches, RING_SLOTS + 1))
    return Session(short, problem, layout, seed, timer)


def _hold_arm(session: Session, family: Family, artifact: Artifact) -> None:
    from tuner.instrument.selfcheck import structural

    arm = artifact.arm
    weights = session.rotation.fingerprint()
    bound = session.bind(family, artifact)
    session.add_unit(bound, "self")
    session.block(bound, "self", REPEATS)
    session.check(bound, "self")
    _expect(session.rotation.fingerprint() == weights, f"{arm}: it wrote into the ring of weights")
    reuse = structural(session, bound, "self")
    _expect(reuse.verdict != "failed", f"{arm}: it does not read every slot of the ring in turn: {reuse.figure}")
    _hold_receipt(arm, bound.receipt())


def _hold_receipt(arm: Arm, receipt: Mapping[str, Value]) -> None:
    required = REQUIRED_LIBRARY if "library" in receipt else REQUIRED
    absent = [name for name in required if name not in receipt]
    _expect(not absent, f"{arm}: its receipt has no {', '.join(absent)}; it has {', '.join(sorted(receipt))}")
    compiles = receipt.get("compiles_in_worker", 0)
    _expect(compiles == 0, f"{arm}: compiles_in_worker is {compiles}; code must come from build alone")


def _expect(held: bool, message: str) -> None:
    if not held:
        raise ConformanceError(message)
