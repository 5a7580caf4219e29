"""A whole run: explore, freeze, confirm, export, report. It goes on at the first step that the run folder lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.devices.base import DeviceInfo
from tuner.errors import RefusedError, UsageError
from tuner.problem import Problem, Shape
from tuner.store import RUNS, Run, RunInfo, read_json, validate, versions
from tuner.workflow.results import latest_verdict, recorded_device

if TYPE_CHECKING:
    from tuner.protocol import Verdict
    from tuner.workflow.explore import ExploreSettings
    from tuner.workflow.progress import Progress


@dataclass(frozen=True)
class Order:
    """What a person asked for, checked.

    Attributes:
        shape: The shape.
        weights: Weight formats.
        device: What `--device` said, or None.
        settings: How to explore.
        confirm: False stops behind the freeze.
        llc_bytes: Last-level cache given by hand, or None.
        runs: The folder that the run folder is made in.
        argv: The command line, for the record.
    """

    shape: Shape
    weights: tuple[str, ...]
    device: str | None
    settings: ExploreSettings
    confirm: bool = True
    llc_bytes: int | None = None
    runs: Path = RUNS
    argv: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """Where a run stands when the walk ends.

    Attributes:
        choice: The chosen arm: family, kernel, config.
        verdict: The newest verdict, or None.
        exported: `best.json`, or None where no verdict allows an export.
        finished_before: True if there was nothing left to do.
    """

    choice: dict[str, Any]
    verdict: Verdict | None
    exported: Path | None
    finished_before: bool = False


def begin(order: Order, progress: Progress) -> tuple[Run, DeviceInfo]:
    """Check what was asked, choose the device, and make the run folder.

    Raises:
        UsageError: A format cannot hold the shape, the device is unknown, the plugin is none.
        MachineError: The device cannot be used, or the folder cannot be written.
    """
    for name in order.weights:
        Problem.of(order.shape, name)
    settings = order.settings
    if settings.plugin is not None:
        from tuner.registry import plugin_families

        plugin_families(str(settings.plugin))
    info = _device(order)
    progress.say(device_line(info, asked=order.device is not None, replay=settings.record is not None))
    kept = {field.name: getattr(settings, field.name) for field in fields(settings)}
    kept.update(record=_text(settings.record), plugin=_text(settings.plugin))
    kept.update(confirm=order.confirm, llc_bytes=order.llc_bytes)
    run = Run.create(
        order.runs,
        RunInfo(
            created=datetime.now().astimezone().isoformat(timespec="seconds"),
            argv=list(order.argv),
            shape=str(order.shape),
            weights=list(order.weights),
            device=asdict(info),
            settings=kept,
            versions=versions(),
            plugin=_text(settings.plugin),
        ),
    )
    return run, info


def reopen(run: Run, progress: Progress) -> DeviceInfo:
    """Find the device of a run again.

    Raises:
        RefusedError: The device is not the one that the run began on, or the record of it is damaged.
    """
    recorded = recorded_device(run)
    if run.info.settings.get("record") is not None:
        progress.say(device_line(recorded, asked=True, replay=True))
        return recorded
    from tuner import devices

    where = "host" if recorded.kind == "host" else recorded.uuid or f"{recorded.kind}:{recorded.index}"
    info = devices.choose(where, run.info.settings.get("llc_bytes"))
    for name in ("kind", "name", "arch", "units", "uuid"):
        was, now = getattr(recorded, name), getattr(info, name)
        if was != now:
            raise RefusedError(
                f"run {run.name} began on {recorded.name} with {name} {was}; this device has {name} {now}. "
                f"Go on with it where it began, or start again here: tune --shape {run.info.shape}"
            )
    progress.say(device_line(info, asked=True, replay=False))
    return info


def settings_of(run: Run) -> ExploreSettings:
    """The settings that a run began with.

    Raises:
        RefusedError: The record has other settings than this version knows.
    """
    from tuner.workflow.explore import ExploreSettings

    kept = dict(run.info.settings)
    for name in ("confirm", "llc_bytes"):
        kept.pop(name, None)
    for name in ("record", "plugin"):
        kept[name] = Path(kept[name]) if kept.get(name) else None
    try:
        return ExploreSettings(**kept)
    except TypeError as error:
        raise RefusedError(f"{run.file('run.json')}: the settings are not those of this version: {error}") from error


def walk(run: Run, info: DeviceInfo, progress: Progress) -> Outcome:
    """Do every step of a run that is not done yet, holding the run alone."""
    with run.lock():
        ended = finished(run)
        if ended is not None:
            return ended
        settings = settings_of(run)
        if not run.has("choice.json"):
            from tuner.workflow import explore

            explore.explore(run, info, settings, progress)
        if not run.has("protocol.json") and not replays(run):
            from tuner.workflow import freeze

            frozen = freeze.freeze(run)
            progress.say(f"frozen: {run.file('protocol.md')} (sha256 {frozen.sha256[:16]})")
        if wants_confirmation(run) and latest_verdict(run) is None:
            from tuner.workflow import confirm

            confirm.confirm(run, progress)
        return complete(run)


def complete(run: Run) -> Outcome:
    """Write what follows from the verdict: the export, where the verdict allows one, and the report."""
    from tuner.workflow import export, report

    verdict = latest_verdict(run)
    exported = export.export(run, "json") if verdict is not None and verdict.outcome == "VALID" else None
    report.write(run)
    return Outcome(chosen(run), verdict, exported)


def finished(run: Run) -> Outcome | None:
    """How a run ended, or None while a step is left."""
    if not run.has("choice.json"):
        return None
    if replays(run):
        return Outcome(chosen(run), None, None, finished_before=True)
    if not run.has("protocol.json"):
        return None
    verdict = latest_verdict(run)
    best = run.file("best.json")
    if verdict is None:
        return None if wants_confirmation(run) else Outcome(chosen(run), None, None, finished_before=True)
    if verdict.outcome == "VALID" and not best.exists():
        return None
    return Outcome(chosen(run), verdict, best if best.exists() else None, finished_before=True)


def wants_confirmation(run: Run) -> bool:
    """True unless the run was asked to stop at the freeze, or replays a record."""
    return bool(run.info.settings.get("confirm", True)) and not replays(run)


def replays(run: Run) -> bool:
    """True for a replay. It ends with the choice: a record holds no fresh data to confirm on, so nothing is frozen."""
    return run.info.settings.get("record") is not None


def chosen(run: Run) -> dict[str, Any]:
    """The chosen arm: family, kernel, config."""
    choice = run.read_json("choice.json")
    if not isinstance(choice, dict) or not isinstance(choice.get("chosen"), dict):
        raise RefusedError(f"{run.file('choice.json')} names no chosen arm; it is damaged")
    return dict(choice["chosen"])


def device_line(info: DeviceInfo, asked: bool, replay: bool) -> str:
    """The first line of a run: what it runs on, and what that is worth."""
    what = f"{info.name} ({info.arch}, {info.units} {'cores' if info.kind == 'host' else 'units'})"
    if replay:
        return f"replay of a recorded run on {what}: nothing is measured now"
    if info.kind != "host":
        return f"device: {what}, last-level cache {info.llc_bytes / 1e6:,.1f} MB ({info.llc_source})"
    why = "rehearsal on host" if asked else "no GPU found: rehearsal on host"
    return f"{why} {what}: the whole path on real measurements, but nothing here is a GPU result"


def _device(order: Order) -> DeviceInfo:
    record = order.settings.record
    if record is not None:
        if order.device is not None:
            raise UsageError("--device and --simulate exclude each other: the record says its device; leave one out")
        return _device_of_record(record)
    from tuner import devices

    return devices.choose(order.device, order.llc_bytes)


def _device_of_record(record: Path) -> DeviceInfo:
    folder = record if record.is_dir() else record.parent
    if not (record / "trials.jsonl" if record.is_dir() else record).is_file():
        raise UsageError(f"record {str(record)!r} does not exist or has no trials; give a run folder with trials.jsonl")
    if not (folder / "run.json").is_file():
        raise RefusedError(f"{folder} has no run.json beside the trials, so the device is unknown; give a run folder")
    info = validate(RunInfo, read_json(folder / "run.json"), str(folder / "run.json"))
    return recorded_device(Run(folder, info))


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def parse_weights(text: str) -> tuple[str, ...]:
    """Read `--weights`, a list with commas.

    Raises:
        UsageError: One is unknown, named twice, or none is named.
    """
    from tuner.formats import weight_format

    names = _split(text)
    for name in names:
        weight_format(name)
    if len(set(names)) != len(names):
        raise UsageError(f"--weights {text!r} names a format twice; name each once")
    return tuple(names)


def _split(text: str) -> Sequence[str]:
    return [name.strip() for name in text.split(",")]
