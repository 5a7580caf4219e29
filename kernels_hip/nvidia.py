"""NVIDIA: NVRTC makes a cubin. It needs neither a GPU nor a driver."""

from __future__ import annotations

import re
from typing import Any

from kernels_hip import elf, source
from kernels_hip.source import Compiled, Kernel
from tuner.arms import Target, Value
from tuner.errors import ArmCompileError, ToolchainError

_OPTIONS = (b"--std=c++17", b"--ptxas-options=-v", b"-default-device")
_FIRST_WITH_CACHE = (12, 9)
INSTALL = "pip install 'cuda-core[cu13]'"


def compile_kernel(kernel: Kernel, target: Target) -> Compiled:
    """Compile for one architecture; one program gives cubin, PTX and log.

    Raises:
        ToolchainError: NVRTC is missing.
        ArmCompileError: NVRTC or ptxas refused the kernel.
    """
    nvrtc = _nvrtc()
    text = source.unit(kernel, "cuda").encode()
    program = _take(nvrtc, nvrtc.nvrtcCreateProgram(text, b"kernel.cu", 0, [], []))
    try:
        options = [f"--gpu-architecture={target.arch}".encode(), *_OPTIONS]
        if _version(nvrtc) >= _FIRST_WITH_CACHE:
            # What comes from the driver's cache comes without a log.
            options.append(b"--no-cache")
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _text(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode(errors="replace")
        if int(status):
            raise ArmCompileError(first_error(log) or _name(nvrtc, status))
        code = _text(nvrtc, program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
        ptx = _text(nvrtc, program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode(errors="replace")
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    major, minor = _version(nvrtc)
    # The log also knows spills from a stack, and shared memory; not every version says it of every kernel.
    resources = {**elf.cubin_resources(code, kernel.entry), **log_resources(log, kernel.entry)}
    resources["load_bytes"] = widest_load_bytes(ptx, kernel.entry)
    resources["compiler"] = f"nvrtc {major}.{minor}"
    return Compiled(code, resources)


def _nvrtc() -> Any:
    """NVRTC's functions, from the same package in cuda-bindings 12 and 13; its library is loaded by the first call."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(f"cuda-bindings are not installed; {INSTALL}") from error
    try:
        _version(nvrtc)
    except (RuntimeError, OSError) as error:
        raise ToolchainError(f"the NVRTC library is not found; {INSTALL}") from error
    return nvrtc


def _version(nvrtc: Any) -> tuple[int, int]:
    _, major, minor = nvrtc.nvrtcVersion()
    return int(major), int(minor)


def _take(nvrtc: Any, answer: tuple[Any, Any]) -> Any:
    status, value = answer
    if int(status):
        raise ArmCompileError(_name(nvrtc, status))
    return value


def _name(nvrtc: Any, status: Any) -> str:
    _, name = nvrtc.nvrtcGetErrorString(status)
    return name.decode() if isinstance(name, bytes) else str(name)


def _text(nvrtc: Any, program: Any, size_of: Any, get: Any) -> bytes:
    buffer: bytes = b" " * int(_take(nvrtc, size_of(program)))
    (status,) = get(program, buffer)
    if int(status):
        raise ArmCompileError(_name(nvrtc, status))
    return buffer


def first_error(log: str) -> str:
    """The first line of a log that holds an error; empty if there is none."""
    return next((line.strip() for line in log.splitlines() if re.search(r"\berror\b", line)), "")


def log_resources(log: str, entry: str) -> dict[str, Value]:
    """Registers, spills and shared memory of one kernel, from what ptxas says with `-v`."""
    own = re.split(r"Compiling entry function '", log)
    text = next((part for part in own[1:] if part.startswith(f"{entry}'")), "")
    found: dict[str, Value] = {}
    registers = re.search(r"Used (\d+) registers", text)
    if registers:
        found["registers"] = int(registers.group(1))
        shared = re.search(r"(\d+) bytes smem", text)
        found["shared_bytes"] = int(shared.group(1)) if shared else 0
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if spills:
        found["spill_bytes"] = max(map(int, spills.groups()))
    return found


def widest_load_bytes(ptx: str, entry: str) -> int:
    """Bytes of the widest load from global memory in one kernel; 0 if there is none."""
    body = ptx.partition(f".entry {entry}(")[2].partition("\n}")[0]
    loads = re.findall(r"\bld(?:\.volatile)?\.global\S*?(?:\.v(\d))?\.[busf](\d+)\s", body)
    return max((int(count or 1) * int(bits) // 8 for count, bits in loads), default=0)
