"""One user of a device at a time, across processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

from tuner.devices.base import DeviceInfo
from tuner.errors import MachineError

WAIT_S = 3.0


@contextmanager
def device_lock(info: DeviceInfo, wait_s: float = WAIT_S) -> Iterator[None]:
    """Hold the device until the block ends. The system frees the lock of a process that dies.

    Args:
        info: The device; it is known by its UUID, so that it is the same device under every ordinal.
        wait_s: How long to wait for another holder to end.

    Raises:
        MachineError: Another process holds it (the message names its pid), or the state folder cannot be written.
    """
    from tuner.store import state_dir

    path = lock_path(state_dir(), info)
    holder = path.with_suffix(".pid")
    lock = filelock.FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=wait_s)
    except filelock.Timeout:
        raise MachineError(
            f"{info.name} is in use by {_holder(holder)}, and two runs on one device spoil each other's times; "
            "wait for it to end, or choose another device with --device"
        ) from None
    except OSError as error:
        raise MachineError(
            f"cannot lock {info.name}: {path} is not writable ({error.strerror}); "
            "set COLDTUNE_STATE to a folder that is"
        ) from error
    try:
        holder.write_text(str(os.getpid()), encoding="ascii")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def lock_path(state: Path, info: DeviceInfo) -> Path:
    """The lock file of a device."""
    identity = info.uuid or info.pci or str(info.index)
    return state / "locks" / (re.sub(r"[^A-Za-z0-9]+", "-", f"{info.kind}-{identity}").strip("-") + ".lock")


def _holder(path: Path) -> str:
    text = path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
    return f"process {text}" if text else "another process"
