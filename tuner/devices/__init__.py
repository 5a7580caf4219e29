"""Devices: finding them, choosing one, opening it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from tuner.arms import Target
from tuner.devices import cuda_driver, host, rocm
from tuner.devices.base import Device, DeviceInfo
from tuner.devices.lock import device_lock
from tuner.errors import MachineError, ToolchainError, UsageError

__all__ = [
    "Device",
    "DeviceInfo",
    "Survey",
    "choose",
    "device_lock",
    "discover",
    "open_device",
    "survey",
    "target_of",
    "unusable",
]

INSTALL_CPU = "pip install 'coldtune[cpu]'"
INSTALL_CUDA = "pip install 'coldtune[cuda]'"
_FORMS = "write --device host, cuda, cuda:0, rocm, a UUID, a PCI address such as 0000:01:00.0, or an architecture"

# Shared memory that a block can have, by compute capability, from the CUDA programming guide's table.
_CUDA_SHARED_KB = {"sm_75": 64, "sm_80": 163, "sm_87": 163, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_110": 227}
_CUDA_SHARED_KB_OTHER = 99
_LDS_KB = {"gfx950": 160}
_LDS_KB_OTHER = 64


@dataclass(frozen=True)
class Survey:
    """What this machine has.

    Attributes:
        devices: Every device, the host last.
        skipped: One line for each device or kind of device that cannot be used, with the reason.
    """

    devices: tuple[DeviceInfo, ...]
    skipped: tuple[str, ...]


def survey() -> Survey:
    """Find all devices. Creates no context and imports no torch."""
    gpus, skipped = cuda_driver.discover()
    gpus += rocm.discover()
    devices = (*gpus, host.discover())
    for info in devices:
        reason = unusable(info)
        if reason is not None:
            skipped.append(f"{describe(info)}: {reason}")
    return Survey(devices, tuple(skipped))


def discover() -> list[DeviceInfo]:
    """CUDA GPUs, then AMD GPUs, then the host."""
    return list(survey().devices)


def choose(spec: str | None, llc_bytes: int | None = None) -> DeviceInfo:
    """Pick a device. Prints nothing; `survey().skipped` says what was passed over.

    Args:
        spec: None for the first discrete GPU that can be timed, else the host. Or `host`, `cuda`, `cuda:0`, `rocm`,
            a UUID, a PCI address, or an architecture such as `sm_90`.
        llc_bytes: Size of the last-level cache, in place of the one that was read.

    Raises:
        UsageError: The text is no form of naming a device, or the cache size is not positive.
        MachineError: There is no such device, or it cannot be timed.
    """
    if llc_bytes is not None and llc_bytes <= 0:
        raise UsageError(f"--llc {llc_bytes} is no cache size; write bytes above 0, for example --llc 100663296")
    found = survey()
    if spec is None:
        usable = (d for d in found.devices if d.kind != "host" and not d.integrated and unusable(d) is None)
        info = next(usable, found.devices[-1])
    else:
        info = _named(spec.strip(), found)
    _hold_usable(info)
    if llc_bytes is not None:
        info = dataclasses.replace(info, llc_bytes=llc_bytes, llc_source="given by --llc")
    return info


def open_device(info: DeviceInfo) -> Device:
    """Open a device; imports torch and, on a GPU, creates the context.

    Raises:
        MachineError: It cannot be opened; the message says why and what to do.
    """
    _hold_usable(info)
    if info.kind == "cuda":
        from tuner.devices.cuda import CudaDevice

        return CudaDevice(info, target_of(info))
    return host.HostDevice(info, target_of(info))


def target_of(info: DeviceInfo) -> Target:
    """What code for this device is compiled for. Pure; needs neither torch nor the device."""
    if info.kind == "cuda":
        kilobytes = _CUDA_SHARED_KB.get(info.arch, _CUDA_SHARED_KB_OTHER)
        return Target("cuda", info.arch, info.warp, info.units, shared_bytes=kilobytes << 10)
    if info.kind == "rocm":
        kilobytes = _LDS_KB.get(info.arch, _LDS_KB_OTHER)
        return Target("hip", info.arch, info.warp, info.units, shared_bytes=kilobytes << 10)
    return Target("host", info.arch, info.warp, info.units)


def unusable(info: DeviceInfo) -> str | None:
    """Why a device cannot be timed here, with the line that helps; None if it can."""
    if info.kind == "rocm":
        return rocm.CANNOT_TIME
    build = torch_build()
    if build is None:
        return f"torch is missing; {INSTALL_CUDA if info.kind == 'cuda' else INSTALL_CPU}"
    if info.kind == "cuda" and build != "cuda":
        return f"torch {importlib.metadata.version('torch')} is built without CUDA; {INSTALL_CUDA}"
    return None


def torch_build() -> str | None:
    """`cuda`, `rocm` or `cpu`, read from torch's version file without importing torch; None if torch is missing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    for name in ("cuda", "hip"):
        if re.search(rf"^{name}\b[^=\n]*=\s*['\"]", text, flags=re.MULTILINE):
            return "rocm" if name == "hip" else name
    return "cpu"


def describe(info: DeviceInfo) -> str:
    """`cuda:0 (NVIDIA H200, sm_90, 0000:01:00.0)`."""
    label = info.kind if info.kind == "host" else f"{info.kind}:{info.index}"
    return f"{label} ({', '.join(part for part in (info.name, info.arch, info.pci) if part)})"


def _hold_usable(info: DeviceInfo) -> None:
    reason = unusable(info)
    if reason is not None:
        error = MachineError if info.kind == "rocm" else ToolchainError
        raise error(f"{describe(info)} cannot be used: {reason}")


def _named(spec: str, found: Survey) -> DeviceInfo:
    text = spec.lower()
    listing = "; ".join(describe(info) for info in found.devices)
    kind = re.fullmatch(r"(host|cuda|rocm)(?::(\d{1,4}))?", text)
    if kind is not None:
        matches = [d for d in found.devices if d.kind == kind[1] and d.index == int(kind[2] or 0)]
    elif re.fullmatch(r"(sm_\d+[af]?|gfx[0-9a-f]+)", text):
        matches = [d for d in found.devices if d.arch == text.rstrip("af" if text.startswith("sm_") else "")]
    elif re.fullmatch(r"(gpu|mig|host)-[0-9a-f-]+", text):
        matches = [d for d in found.devices if d.uuid.lower() == text]
    elif _pci(text) is not None:
        matches = [d for d in found.devices if _pci(d.pci) == _pci(text)]
    else:
        raise UsageError(f"{spec!r} names no device; {_FORMS}. This machine has: {listing}")
    if not matches:
        reasons = "".join(f" ({line})" for line in found.skipped if line.startswith(text.split(":")[0].split("_")[0]))
        raise MachineError(f"there is no device {spec!r} here{reasons}. This machine has: {listing}")
    return matches[0]


def _pci(text: str) -> tuple[int, int, int, int] | None:
    """Domain, bus, device, function; the domain may be left out or have eight digits, as vendors' tools differ."""
    match = re.fullmatch(r"(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])", text.lower())
    if match is None:
        return None
    return int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16), int(match[4])
