"""Limits of this process's control group (version 2): cores and memory, the tightest on the way up to the root."""

from __future__ import annotations

from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")


def folders(root: Path = Path("/")) -> list[Path]:
    """The control group of this process and all above it, innermost first; at least the mount itself.

    Args:
        root: Where `/proc` and `/sys` are looked for, so that recorded trees can be read.
    """
    mount = root / MOUNT.relative_to("/")
    membership = root / "proc/self/cgroup"
    lines = membership.read_text(encoding="utf-8", errors="replace").splitlines() if membership.is_file() else []
    inner = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    path = mount / inner
    chain = [path, *path.parents] if ".." not in Path(inner).parts else [mount]
    return [folder for folder in chain if folder == mount or mount in folder.parents]


def cores(groups: list[Path]) -> float | None:
    """Cores that the quota allows, or None where there is no quota."""
    limits: list[float] = []
    for group in groups:
        parts = _text(group / "cpu.max").split()
        if len(parts) == 2 and all(part.isdecimal() for part in parts) and int(parts[1]):
            limits.append(int(parts[0]) / int(parts[1]))
    return min(limits, default=None)


def memory_total(groups: list[Path]) -> int | None:
    """Bytes that the group may use at most, or None where there is no limit."""
    limits = [int(text) for text in (_text(group / "memory.max") for group in groups) if text.isdecimal()]
    return min(limits, default=None)


def memory_free(groups: list[Path]) -> int | None:
    """Bytes that the group may still allocate, or None where there is no limit."""
    left: list[int] = []
    for group in groups:
        limit, used = _text(group / "memory.max"), _text(group / "memory.current")
        if limit.isdecimal() and used.isdecimal():
            left.append(max(0, int(limit) - int(used)))
    return min(left, default=None)


def _text(path: Path) -> str:
    return path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
