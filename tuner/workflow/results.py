"""What a run has come to: its frozen protocol and its newest verdict, as other steps read them."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from tuner.devices.base import DeviceInfo
from tuner.errors import RefusedError
from tuner.protocol import Protocol, Verdict, load
from tuner.store import Run, read_json, validate


def frozen(run: Run) -> Protocol:
    """The protocol of a run.

    Raises:
        RefusedError: It was edited after it was frozen, or is damaged.
    """
    return load(run.file("protocol.json"))


def latest_verdict(run: Run) -> Verdict | None:
    """The verdict of the newest confirmation that came to one, or None.

    Raises:
        RefusedError: It is damaged or of a newer version.
    """
    found = next((path for path in reversed(run.confirmations()) if (path / "verdict.json").exists()), None)
    return None if found is None else read_verdict(found)


def read_verdict(confirmation: Path) -> Verdict:
    """The verdict of one confirmation; errors as in `latest_verdict`."""
    file = confirmation / "verdict.json"
    return validate(Verdict, read_json(file), str(file))


def attempts(run: Run) -> list[tuple[str, str]]:
    """Every confirmation of a run, finished or not: its name and what came of it."""
    found: list[tuple[str, str]] = []
    for path in run.confirmations():
        if (path / "verdict.json").exists():
            verdict = read_verdict(path)
            found.append((path.name, verdict.primary.verdict if verdict.outcome == "VALID" else verdict.outcome))
        else:
            found.append((path.name, "not finished"))
    return found


def recorded_device(run: Run) -> DeviceInfo:
    """The device of a run, as `run.json` has it.

    Raises:
        RefusedError: The record has other fields than a device has.
    """
    known = {field.name for field in fields(DeviceInfo)}
    odd = sorted(set(run.info.device) ^ known)
    if odd:
        raise RefusedError(f"{run.file('run.json')}: the device has other fields than this version knows: {odd[0]}")
    return DeviceInfo(**run.info.device)
