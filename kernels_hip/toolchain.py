"""Compilers: finding them, running them, and the line of their output that says what is wrong."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tuner.errors import ArmCompileError, ToolchainError

MIN_CLANG = 19
NEWEST_CLANG = 25
ROCM = Path("/opt/rocm/llvm/bin/clang++")
AMD_INSTALL = "install clang and lld of version 19 or later: apt-get install clang-19 lld-19"
HOST_INSTALL = "install one: apt-get install g++"


@cache
def clang_for_amd() -> Path | None:
    """A clang++ that compiles for AMD GPUs and has its linker: ROCm's own, else version 19 or later."""
    versioned = [f"clang++-{number}" for number in range(NEWEST_CLANG, MIN_CLANG - 1, -1)]
    for name in (str(ROCM), "clang++", *versioned):
        found = shutil.which(name)
        if found and (clang_version(found) or 0) >= MIN_CLANG and linker_beside(Path(found)):
            return Path(found)
    return None


def linker_beside(clang: Path) -> Path | None:
    """The ld.lld that this clang++ would call: in its own folder (its link's target), or on the path."""
    beside = clang.resolve().with_name("ld.lld")
    if beside.is_file():
        return beside
    found = shutil.which(f"ld.lld-{clang_version(str(clang))}") or shutil.which("ld.lld")
    return Path(found) if found else None


@cache
def host_compiler() -> Path | None:
    """g++ if there is one, else a clang++."""
    names = ("g++", "c++", "clang++", *(f"clang++-{number}" for number in range(NEWEST_CLANG, 13, -1)))
    return next((Path(found) for found in map(shutil.which, names) if found), None)


@cache
def clang_version(clang: str) -> int | None:
    """Major version of a clang, or None if it does not say."""
    match = re.search(r"clang version (\d+)", version_line(clang))
    return int(match.group(1)) if match else None


@cache
def version_line(compiler: str) -> str:
    """The first line of `--version`; empty if the compiler cannot be run."""
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        # A compiler that cannot be run is no compiler; the caller looks for another.
        return ""
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines else ""


def run(command: Sequence[str], folder: Path) -> str:
    """Run a compiler in a folder; what it said on its error stream.

    Raises:
        ArmCompileError: It refused; the message is its first error line.
        ToolchainError: It could not be run.
    """
    # Messages in English, to be read by `first_error`; temporary files where they are cleared away.
    environment = {**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)}
    try:
        done = subprocess.run(
            list(command), cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
    except OSError as error:
        raise ToolchainError(f"cannot run the compiler {command[0]}: {error.strerror}") from error
    if done.returncode:
        raise ArmCompileError(first_error(done.stderr, done.returncode))
    return done.stderr


def first_error(text: str, code: int) -> str:
    """The first line that holds an error, else the last line of all."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        if re.search(r"\b(error|undefined reference|fatal)\b", line, flags=re.IGNORECASE):
            return line
    return lines[-1] if lines else f"the compiler ended with code {code} and said nothing"
