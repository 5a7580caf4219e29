"""`tune doctor` against a machine whose parts are known."""

from __future__ import annotations

import shutil
from collections.abc import Sequence

import pytest
from rich.console import Console

from tuner.devices import discover
from tuner.devices.base import DeviceInfo
from tuner.errors import MachineError, UsageError
from tuner.instrument.selfcheck import Check
from tuner.problem import Problem
from tuner.workflow.doctor import compilers, doctor


def cold(info: DeviceInfo, problem: Problem) -> Sequence[Check]:
    return [Check("reuse distance", "failed", f"1 MB of {problem.weight_bytes} B", "what it means")]


def locked(info: DeviceInfo, problem: Problem) -> Sequence[Check]:
    raise MachineError("in use by process 7")


def text(shape: str, checks: object = cold) -> str:
    console = Console(width=300, record=True, file=open("/dev/null", "w"))
    console.print(*doctor("host", shape, checks), sep="\n")  # type: ignore[arg-type]
    return console.export_text()


def test_device_cache_rotation_and_checks_are_shown() -> None:
    info = discover()[-1]
    found = text("1x4096x12288")
    for words in (info.name, info.llc_source, f"{info.llc_bytes / 1e6:,.1f} MB", "rehearsal on host"):
        assert words in found
    assert "slots of 100.66 MB" in found
    # ceil(8 x LLC / bytes), at least 2, as long as memory allows it.
    wanted = max(2, -(-8 * info.llc_bytes // 100_663_296))
    if wanted * 100_663_296 < info.memory_bytes:
        assert f"{wanted} slots" in found
    assert "left out: triton: Triton arms cannot be timed on host" in found
    assert "reuse distance" in found and "failed" in found and "what it means" in found


def test_a_check_that_cannot_be_made_is_said() -> None:
    assert "self-check: could not be made: in use by process 7" in text("1x64x48", locked)


def test_a_rotation_that_does_not_fit_is_said_with_numbers() -> None:
    found = text("1x262144x262144")
    # 2^36 weights of 2 bytes.
    assert "the rotation does not fit" in found and "137,439.0 MB" in found


def test_what_is_missing_comes_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compilers()["clang"] == compilers()["g++"] == ""
    found = text("1x64x48")
    assert "apt install clang-19" in found and "apt install g++" in found


def test_a_wrong_shape_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        text("1x2")
