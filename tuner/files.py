"""Files that are whole or not there: atomic replacement, appended lines, limited reading; and the state folder."""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tuner.errors import MachineError, RefusedError, UsageError

JSON_LIMIT_BYTES = 64 * 2**20

_CANNOT_WRITE = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def state_dir() -> Path:
    """The user's state folder, made if it is missing: `$COLDTUNE_STATE`, else below `$XDG_STATE_HOME`.

    Raises:
        MachineError: It cannot be made.
    """
    own, xdg = os.environ.get("COLDTUNE_STATE"), os.environ.get("XDG_STATE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".local" / "state"
    path = Path(own).absolute() if own else base / "coldtune"
    with writing(path, "set COLDTUNE_STATE to a folder that you can write"):
        path.mkdir(parents=True, exist_ok=True)
    return path


@contextmanager
def writing(path: Path, advice: str = "choose another folder with --runs, or make room") -> Iterator[None]:
    """Turn a failure to write into a `MachineError` that says what and why."""
    try:
        yield
    except OSError as error:
        if error.errno in _CANNOT_WRITE:
            why = "it is read-only for you"
        elif error.errno in _NO_SPACE:
            why = "the disk is full"
        else:
            why = error.strerror or str(error)
        raise MachineError(f"cannot write {path}: {why}; what was there before is kept; {advice}") from error


def atomic_write(path: Path, data: bytes) -> None:
    """Replace a file as a whole: a reader sees the old content or the new, also after a power cut.

    Raises:
        MachineError: It cannot be written; the old content is kept.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with writing(path):
        try:
            with open(temporary, "xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def append_line(path: Path, line: str) -> None:
    """Append one line with one write and wait until it is on the disk.

    Raises:
        MachineError: It cannot be written; all lines before it are kept.
    """
    with writing(path):
        new = not path.exists()
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            rest = line.encode()
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        if new:
            sync_folder(path.parent)


def read_bytes(path: Path, limit_bytes: int) -> bytes:
    """Read a regular file of at most so many bytes.

    Raises:
        UsageError: There is no such file.
        RefusedError: It is no regular file, or too large.
        MachineError: The system does not let it be read.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            os.close(handle)
            raise RefusedError(f"{path} is not a regular file")
        with os.fdopen(handle, "rb") as stream:
            if facts.st_size > limit_bytes:
                raise RefusedError(
                    f"{path} has {facts.st_size / 1e6:,.0f} MB, more than the {limit_bytes / 1e6:,.0f} MB that are read"
                )
            return stream.read(limit_bytes)
    except (FileNotFoundError, NotADirectoryError):
        raise UsageError(f"{path} does not exist; give the path of an existing file") from None
    except OSError as error:
        raise MachineError(f"cannot read {path}: {error.strerror or error}") from error


def read_json(path: Path, limit_bytes: int = JSON_LIMIT_BYTES) -> Any:
    """Read a JSON file of limited size.

    Raises:
        RefusedError: It is damaged or too large; `read_bytes` says the rest.
    """
    return loads(read_bytes(path, limit_bytes), str(path))


def write_json(path: Path, data: object) -> None:
    """Write JSON as a whole; pydantic models may be in it."""
    atomic_write(path, (json.dumps(data, indent=1, allow_nan=False, default=_plain) + "\n").encode())


def loads(data: str | bytes, what: str) -> Any:
    """Read JSON text; NaN and infinities are no JSON.

    Raises:
        RefusedError: It is damaged; the message starts with `what`.
    """
    try:
        return json.loads(data, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(f"{what} is damaged: {error}") from error


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _plain(value: object) -> Any:
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json", by_alias=True)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def sync_folder(path: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
