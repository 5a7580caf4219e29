"""The user's ledger of attempts: one appended line for every confirmation, by device and shape, across all runs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.errors import RefusedError
from tuner.files import append_line, loads, read_bytes, state_dir

LIMIT_BYTES = 256 * 2**20
_log = logging.getLogger("coldtune")


def ledger_path() -> Path:
    """The file, in the user's state folder."""
    return state_dir() / "attempts.jsonl"


def append(device: str, shape: str, entry: Mapping[str, Any]) -> None:
    """Add one attempt; nothing in the ledger is ever changed or taken away.

    Args:
        device: UUID of the device, or its name where it has none.
        shape: `MxKxN`.
        entry: What to keep of the attempt: run, number, protocol hash, outcome, ….

    Raises:
        MachineError: The ledger cannot be written.
    """
    path = ledger_path()
    line = json.dumps({"schema": 1, "device": device, "shape": shape, "entry": dict(entry)}, allow_nan=False)
    # A line cut off by a crash must not swallow this one.
    cut = path.exists() and read_bytes(path, LIMIT_BYTES)[-1:] not in (b"", b"\n")
    append_line(path, ("\n" if cut else "") + line + "\n")


def attempts(device: str, shape: str) -> list[dict[str, Any]]:
    """Entries of all attempts on a device and shape, oldest first. Damaged lines are skipped and said."""
    path = ledger_path()
    if not path.exists():
        return []
    found: list[dict[str, Any]] = []
    for number, line in enumerate(read_bytes(path, LIMIT_BYTES).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            record = loads(line, f"{path} line {number}")
        except RefusedError as error:
            _log.warning("%s; it is skipped, so the count of attempts may be one too low", error)
            continue
        if isinstance(record, dict) and record.get("device") == device and record.get("shape") == shape:
            found.append(dict(record.get("entry") or {}))
    return found
