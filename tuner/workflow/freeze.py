"""Freeze: the tool drafts a protocol from what exploration found, a person may edit it, then it is hashed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from tuner import registry
from tuner.arms import Arm
from tuner.devices import target_of
from tuner.devices.base import DeviceInfo
from tuner.errors import ArmError, ColdtuneError, RefusedError, UsageError
from tuner.files import atomic_write, read_json
from tuner.instrument.timer import TIMER_VERSION
from tuner.problem import Problem, Shape
from tuner.protocol import ClaimRule, Design, Protocol, load, parse, save
from tuner.protocol_markdown import render_markdown
from tuner.space import Space
from tuner.store import Run, RunInfo
from tuner.workflow.draft import Built, arm_of, draft, listed, problem_of

CLAIM_RULES = ("default", "published")
# The sampler only proposes arms; another version of it changes neither a kernel nor a time nor a verdict.
_INDIFFERENT = ("optuna",)


def freeze(
    run: Run, claim_rule: str = "default", design: Design | None = None, draft_file: Path | None = None
) -> Protocol:
    """Draft the protocol of an explored run, or take an edited draft, and write `protocol.json` and `protocol.md`.

    Args:
        run: A run with a choice.
        claim_rule: `default`, or `published`: the two studies' rule.
        design: How much to measure; None takes the device's default.
        draft_file: A protocol without hash (or with one, which is not looked at), edited by a person.

    Raises:
        UsageError: Unknown rule, or no such draft.
        RefusedError: The run is not explored, the draft breaks a rule or is of another run, or another protocol of this
            run is frozen already.
    """
    if claim_rule not in CLAIM_RULES:
        raise UsageError(f"--claim-rule {claim_rule!r} is unknown; write {' or '.join(CLAIM_RULES)}")
    rule = ClaimRule(name=cast(Literal["default", "published"], claim_rule))
    choice = _choice(run)
    problem = problem_of(run.info, choice)
    choice = _with_twin(run, problem, choice)
    hashes = {arm.key: _explored(choice, arm) or _built(run, problem, arm) for _, _, arm in listed(choice)}
    measured = {trial.arm.key for trial in run.trials() if trial.median_us is not None}
    spaces = current_space_hash(problem, _device(run.info), run.info.plugin)
    protocol = draft(run.info, choice, hashes, measured, spaces, rule, design)
    if draft_file is not None:
        protocol = _edited(run, protocol, draft_file)
    return _write(run, protocol)


def verify(
    protocol: Protocol,
    device: Mapping[str, Any],
    versions: Mapping[str, str],
    code_hashes: Mapping[str, str],
    source_hashes: Mapping[str, str],
    replicate: bool = False,
    space: str | None = None,
) -> list[str]:
    """Everything that is not as it was frozen, in words; empty if all is.

    Args:
        protocol: The frozen protocol.
        device: Fields of the device now.
        versions: Versions now, the device's among them.
        code_hashes: Hash of the compiled code now, by label; an arm that cannot be built is left out.
        source_hashes: Hash of the kernel source now, by label.
        replicate: Take another device of the same kind, architecture, unit count and last-level cache.
        space: Hash of the search space now; None where it is not known.
    """
    reasons = []
    same = (
        ("kind", "arch", "units", "llc_bytes") if replicate else ("kind", "name", "arch", "units", "uuid", "llc_bytes")
    )
    for name in same:
        was, now = protocol.device.get(name), device.get(name)
        if was != now:
            reasons.append(f"device {name} was {was}, is {now}")
    for name, was in sorted(protocol.versions.items()):
        if name not in _INDIFFERENT and versions.get(name) != was:
            reasons.append(f"{name} was {was}, is {versions.get(name, 'absent')}")
    for record in protocol.arms:
        if record.label not in code_hashes:
            reasons.append(f"arm {record.label} ({record}) cannot be built here")
            continue
        for what, was, now in (
            ("kernel source", record.source_hash, source_hashes.get(record.label, "")),
            ("compiled code", record.code_hash, code_hashes[record.label]),
        ):
            if was != now:
                reasons.append(f"{what} of arm {record.label} ({record.family}/{record.kernel}) was changed")
    if protocol.instrument.timer_version != TIMER_VERSION:
        reasons.append(f"timer version was {protocol.instrument.timer_version}, is {TIMER_VERSION}")
    if space is not None and space != protocol.exploration.space_hash:
        reasons.append("the search space was changed")
    return reasons


def space_hash(spaces: Iterable[Space]) -> str:
    """SHA-256 of what the spaces hold: parameters with values, the sentences of constraints, defaults."""
    told = [
        [
            *(space.family, space.kernel),
            [[parameter.name, list(parameter.values)] for parameter in space.parameters],
            [[constraint.name, constraint.sentence] for constraint in space.constraints],
            sorted(space.default.items()),
        ]
        for space in spaces
    ]
    text = json.dumps(sorted(told, key=lambda entry: entry[:2]), separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def current_space_hash(problem: Problem, device: DeviceInfo, plugin: str | None) -> str:
    """The hash of the spaces that this installation has for a problem on a device."""
    target = target_of(device)
    usable, _ = registry.available(target, plugin)
    return space_hash(space for family in usable.values() for space in family.spaces(problem, target))


def _write(run: Run, protocol: Protocol) -> Protocol:
    path = run.file("protocol.json")
    if path.exists():
        frozen = load(path)
        replaceable = not protocol.drafted_by_tool and frozen.drafted_by_tool and not run.confirmations()
        if frozen.sha256 != protocol.sha256 and not replaceable:
            raise RefusedError(
                f"run {run.name} has another protocol frozen already (sha256 {frozen.sha256[:16]}, this one is "
                f"{protocol.sha256[:16]}), and a frozen protocol is never replaced, but for the tool's own draft "
                f"before any confirmation. To ask another question start a new run: "
                f"tune --shape {run.info.shape} --no-confirm"
            )
    # The page first: a protocol counts as frozen once the JSON is there.
    atomic_write(run.file("protocol.md"), render_markdown(protocol).encode())
    save(protocol, path)
    return protocol


def _edited(run: Run, drafted: Protocol, path: Path) -> Protocol:
    data = read_json(path)
    if isinstance(data, dict) and set(data) == {"protocol", "sha256"}:
        data = data["protocol"]
    edited = parse(data, str(path))
    if edited.shape != drafted.shape or edited.device != drafted.device:
        raise RefusedError(
            f"{path} is about {edited.shape} on {edited.device.get('name')}, run {run.name} about {drafted.shape} on "
            f"{drafted.device.get('name')}; take the draft of this run"
        )
    for record in edited.arms:
        built = _built(run, Problem.of(Shape.parse(record.shape), record.weights), arm_of(record.model_dump()))
        if (built.code_hash, built.source_hash) != (record.code_hash, record.source_hash):
            raise RefusedError(
                f"{path}: the hashes of arm {record.label} are not those of {record}, which has code_hash "
                f"{built.code_hash} and source_hash {built.source_hash}; write these"
            )
    unedited = edited.model_copy(update={"drafted_by_tool": True}).sha256 == drafted.sha256
    return edited.model_copy(update={"drafted_by_tool": unedited})


def _choice(run: Run) -> dict[str, Any]:
    if not run.has("choice.json"):
        raise RefusedError(
            f"run {run.name} is not explored to its end, so nothing is chosen; write tune --resume {run.path}"
        )
    choice = run.read_json("choice.json")
    needed = ("chosen", "default", "estimates", "optimism", "space", "tie_set", "vendors")
    absent = [name for name in needed if not isinstance(choice, dict) or name not in choice]
    if absent:
        raise RefusedError(f"{run.file('choice.json')} lacks {', '.join(absent)}; it is damaged")
    return cast(dict[str, Any], choice)


def _with_twin(run: Run, problem: Problem, choice: dict[str, Any]) -> dict[str, Any]:
    """The choice; without its twin, which nobody has measured, where that does not compile."""
    twin = choice.get("twin")
    if twin is None or _explored(choice, arm_of(twin)) is not None:
        return choice
    try:
        registry.build(problem, arm_of(twin), target_of(_device(run.info)), run.info.plugin)
    except ArmError as error:
        entry = {**twin, "status": error.status, "reason": f"m_spec twin of the chosen arm: {error}"}
        return {**choice, "twin": None, "dropped": [*choice.get("dropped", ()), entry]}
    return choice


def _explored(choice: Mapping[str, Any], arm: Arm) -> Built | None:
    """The hashes of what exploration compiled for an arm, or None if it notes none."""
    code, source = (choice.get(name, {}).get(arm.key) for name in ("code_hashes", "source_hashes"))
    return None if code is None or source is None else Built(code, source)


def _built(run: Run, problem: Problem, arm: Arm) -> Built:
    try:
        artifact = registry.build(problem, arm, target_of(_device(run.info)), run.info.plugin)
    except ColdtuneError as error:
        raise RefusedError(f"{arm} cannot be frozen, as it cannot be built here: {error}") from error
    return Built(artifact.code_hash, artifact.source_hash)


def _device(info: RunInfo) -> DeviceInfo:
    try:
        return DeviceInfo(**info.device)
    except TypeError as error:
        raise RefusedError(f"run.json: the device has other fields than this version knows: {error}") from error
