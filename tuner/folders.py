"""Where run folders lie and what they are called."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from tuner.errors import MachineError, UsageError
from tuner.files import atomic_write, read_bytes, sync_folder

RUNS = Path("runs")
_log = logging.getLogger("coldtune")


def list_runs(root: Path = RUNS) -> list[Path]:
    """Folders below `root` that hold a run, oldest first."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if not path.is_symlink() and (path / "run.json").is_file()]
    return sorted(folders, key=lambda path: ((path / "run.json").stat().st_mtime_ns, path.name))


def slug(text: str) -> str:
    """Lower case letters, digits and single hyphens, for a folder name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].rstrip("-") or "device"


def find(run: str | Path, root: Path) -> Path:
    """The folder of a run, given by its path, by its name below `root`, or as `latest`.

    Raises:
        UsageError: There is no such run; the message lists some that exist.
    """
    named = Path(run)
    if str(run) == "latest":
        named = root / "latest"
        if named.is_file():
            # Where links cannot be made, `latest` is a text file with the name in it.
            named = root / _plain_name(read_bytes(named, 4096))
        if not named.is_dir():
            raise UsageError(f"there is no run in {root} yet; start one with tune --shape MxKxN, or give --runs DIR")
    for path in (named, root / named):
        if path.is_dir():
            return path.resolve()
    known = [path.name for path in list_runs(root)][-5:]
    have = f"the newest in {root} are {', '.join(known)}" if known else f"there is none in {root}"
    raise UsageError(f"no run {str(run)!r}; {have}; give a folder, a name that tune ls shows, or latest")


def _plain_name(data: bytes) -> str:
    """The folder name in the text form of `latest`; nothing that leads out of the folder is taken."""
    name = data.decode("utf-8", "replace").strip()
    return name if name == Path(name).name else ""


def make_folder(root: Path, name: str) -> Path:
    """Make a new folder; `-2`, `-3`, … is added to a name that is taken."""
    for number in range(1, 10_000):
        path = root / (name if number == 1 else f"{name}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        sync_folder(root)
        return path
    raise MachineError(f"{root} has 9,999 runs named {name}; choose another folder with --runs")


def point_latest(root: Path, name: str) -> None:
    """Let `latest` name the newest run: a link, or a text file where links cannot be made."""
    latest, temporary = root / "latest", root / f".latest.{os.getpid()}"
    if latest.is_dir() and not latest.is_symlink():
        _log.warning("%s is a folder, so it does not name the newest run", latest)
        return
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(name)
        os.replace(temporary, latest)
    except OSError:
        # A file system without links.
        atomic_write(latest, f"{name}\n".encode())
