"""What NVML knows of a GPU while it works: clocks, heat, power, throttle reasons, other processes.

Every reading can be missing on some card or in some container; a missing one is None and never an error.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import psutil

from tuner.arms import Value

# Bits of nvmlDeviceGetCurrentClocksEventReasons, in words. Only the second table slows a card against its will:
# a power cap is a condition of the run, and idle says nothing of it.
CONDITIONS = {0x1: "idle", 0x2: "clock_setting", 0x4: "power_cap", 0x10: "sync_boost", 0x100: "display_clock_setting"}
SLOWDOWNS = {
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


@functools.cache
def library() -> ModuleType | None:
    """The started `pynvml`, or None where the package or the library is missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    assert isinstance(pynvml, ModuleType)
    return pynvml


def driver_version() -> str | None:
    """The kernel driver's version, such as `580.159.04`."""
    nvml = library()
    text = None if nvml is None else _read(nvml, nvml.nvmlSystemGetDriverVersion)
    return None if text is None else str(text)


def handle(uuid: str) -> Any | None:
    """NVML's handle of the device, whole or a MIG part; None where NVML does not know it."""
    nvml = library()
    if nvml is None:
        return None
    whole = _read(nvml, lambda: nvml.nvmlDeviceGetHandleByUUID(uuid))
    if whole is not None:
        return whole
    return _read(nvml, lambda: nvml.nvmlDeviceGetHandleByUUID(uuid.replace("GPU-", "MIG-", 1)))


def throttle_words(bits: int) -> tuple[str, str]:
    """Reasons in words: all of them, and those that are a thermal or hardware slowdown, each joined by commas."""
    every = CONDITIONS | SLOWDOWNS
    words = [every.get(1 << i, f"bit_{i}") for i in range(64) if bits >> i & 1]
    return ",".join(words), ",".join(word for word in words if word in SLOWDOWNS.values())


def telemetry(device: Any | None) -> dict[str, Value | float | None]:
    """One reading of everything.

    Returns:
        `sm_clock_mhz`, `mem_clock_mhz`, `temperature_c`, `power_w`, `power_cap_w`, `throttle` (all reasons),
        `slowdown` (thermal and hardware ones only, empty when there is none), `fan_percent`, `memory_used_bytes`,
        `busy_percent`. None for what cannot be read.
    """
    nvml = library()

    def read(call: Callable[..., Any], *arguments: Any) -> Any | None:
        return None if nvml is None or device is None else _read(nvml, lambda: call(device, *arguments))

    if nvml is None or device is None:
        bits = memory = busy = power = cap = None
        clocks: list[int | None] = [None, None]
        temperature = fan = None
    else:
        bits = read(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        memory = read(nvml.nvmlDeviceGetMemoryInfo)
        busy = read(nvml.nvmlDeviceGetUtilizationRates)
        power, cap = read(nvml.nvmlDeviceGetPowerUsage), read(nvml.nvmlDeviceGetEnforcedPowerLimit)
        clocks = [read(nvml.nvmlDeviceGetClockInfo, c) for c in (nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM)]
        temperature = read(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        fan = read(nvml.nvmlDeviceGetFanSpeed)
    words = None if bits is None else throttle_words(int(bits))
    return {
        "sm_clock_mhz": clocks[0],
        "mem_clock_mhz": clocks[1],
        "temperature_c": temperature,
        "power_w": None if power is None else power / 1000.0,
        "power_cap_w": None if cap is None else cap / 1000.0,
        "throttle": None if words is None else words[0],
        "slowdown": None if words is None else words[1],
        "fan_percent": fan,
        "memory_used_bytes": None if memory is None else int(memory.used),
        "busy_percent": None if busy is None else int(busy.gpu),
    }


def tenants(device: Any | None, since_us: int) -> list[dict[str, Value]]:
    """Processes on the device but this one and its children.

    Args:
        device: NVML's handle.
        since_us: Count use from this time on, in microseconds since 1970.

    Returns:
        `pid` and `name`, and, where NVML tells, `memory_bytes` and `busy_percent` (the most since `since_us`).
    """
    nvml = library()
    if nvml is None or device is None:
        return []
    lists = [
        _read(nvml, lambda: nvml.nvmlDeviceGetComputeRunningProcesses(device)),
        _read(nvml, lambda: nvml.nvmlDeviceGetGraphicsRunningProcesses(device)),
    ]
    samples = _read(nvml, lambda: nvml.nvmlDeviceGetProcessUtilization(device, since_us))
    busy: dict[int, int] = {}
    for sample in samples or ():
        busy[int(sample.pid)] = max(busy.get(int(sample.pid), 0), int(sample.smUtil))
    memory = {int(p.pid): p.usedGpuMemory for processes in lists for p in processes or ()}
    found: list[dict[str, Value]] = []
    for pid in sorted(set(memory) - own_pids()):
        entry: dict[str, Value] = {"pid": pid, "name": _name(nvml, pid)}
        used = memory[pid]
        if used is not None:
            entry["memory_bytes"] = int(used)
        if pid in busy:
            entry["busy_percent"] = busy[pid]
        found.append(entry)
    return found


def own_pids() -> set[int]:
    """This process, its parent (the command that started the worker) and its descendants."""
    children: Iterable[psutil.Process] = psutil.Process().children(recursive=True)
    return {os.getpid(), os.getppid(), *(child.pid for child in children)}


def _name(nvml: ModuleType, pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        name = _read(nvml, lambda: nvml.nvmlSystemGetProcessName(pid))
        return os.path.basename(str(name)) if name else "unknown"


def _read(nvml: ModuleType, call: Callable[[], Any]) -> Any | None:
    """The reading, or None where this card, driver or container does not give it."""
    try:
        return call()
    except nvml.NVMLError:
        return None
