"""The CUDA driver through cuda.bindings: checked calls, and discovery without a context and without torch."""

from __future__ import annotations

import functools
import uuid
from types import ModuleType
from typing import Any

from tuner.devices.base import DeviceInfo
from tuner.devices.faults import driver_fault
from tuner.errors import CaptureError, ToolchainError

INSTALL = "pip install 'cuda-core[cu13]>=0.4' nvidia-ml-py"
_CAPTURE_ERRORS = range(900, 910)


@functools.cache
def driver() -> ModuleType:
    """The module `cuda.bindings.driver`.

    Raises:
        ToolchainError: The package is missing.
    """
    try:
        from cuda.bindings import driver as module
    except ImportError:
        raise ToolchainError(f"the Python package cuda-bindings is missing; install it: {INSTALL}") from None
    assert isinstance(module, ModuleType)
    return module


def check(result: tuple[Any, ...], doing: str) -> Any:
    """Unpack what a driver call returned.

    Args:
        result: The tuple that cuda.bindings returns: the status, then the values.
        doing: What was going on, for the message, as in `while waiting for the device`.

    Returns:
        None, the one value, or the tuple of values.

    Raises:
        CaptureError: The call is not allowed while a stream is captured.
        DeviceFaultError: The driver reported any other error.
    """
    code = int(result[0])
    if code:
        name = error_name(code)
        if code in _CAPTURE_ERRORS:
            raise CaptureError(f"{name} {doing}")
        raise driver_fault(code, name, doing)
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


def error_name(code: int) -> str:
    """The driver's name of a result number; the number itself for one that the bindings do not know."""
    try:
        return str(driver().CUresult(code).name)
    except ValueError:
        return f"CUDA_ERROR_{code}"


def discover() -> tuple[list[DeviceInfo], list[str]]:
    """CUDA GPUs as the driver counts them, and one line for each reason why there are none.

    The driver honours CUDA_VISIBLE_DEVICES and orders devices as torch does, so `index` is torch's ordinal. No context
    is created.
    """
    try:
        api = driver()
    except ToolchainError as error:
        return [], [f"cuda: {error}"]
    try:
        (status,) = api.cuInit(0)
    except RuntimeError:
        # cuda.bindings raises this where there is no driver library; its exact class differs by version.
        return [], ["cuda: no NVIDIA driver library on this machine"]
    if int(status):
        return [], [f"cuda: the driver does not start ({error_name(int(status))})"]
    found = check(api.cuDeviceGetCount(), "while counting devices")
    devices = [_info(api, index) for index in range(found)]
    return devices, [] if devices else ["cuda: the driver shows no device; see CUDA_VISIBLE_DEVICES"]


def _info(api: ModuleType, index: int) -> DeviceInfo:
    doing = f"while reading device {index}"
    handle = check(api.cuDeviceGet(index), doing)

    def attribute(name: str) -> int:
        which = getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(api.cuDeviceGetAttribute(which, handle), doing))

    major, minor = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    llc_bytes = attribute("L2_CACHE_SIZE")
    version = check(api.cuDriverGetVersion(), doing)
    versions = {"cuda_driver_api": f"{version // 1000}.{version % 1000 // 10}"}
    from tuner.devices import nvml

    kernel_driver = nvml.driver_version()
    if kernel_driver is not None:
        versions["nvidia_driver"] = kernel_driver
    return DeviceInfo(
        kind="cuda",
        index=index,
        name=_text(check(api.cuDeviceGetName(128, handle), doing)),
        arch=f"sm_{major}{minor}",
        uuid=f"GPU-{uuid.UUID(bytes=bytes(check(api.cuDeviceGetUuid(handle), doing).bytes))}",
        pci=_text(check(api.cuDeviceGetPCIBusId(32, handle), doing)).lower(),
        units=attribute("MULTIPROCESSOR_COUNT"),
        warp=attribute("WARP_SIZE"),
        llc_bytes=llc_bytes,
        llc_source=f"CUDA driver: L2 of {llc_bytes:,} bytes",
        memory_bytes=int(check(api.cuDeviceTotalMem(handle), doing)),
        peak_bytes_per_s=peak_bytes_per_s(attribute("MEMORY_CLOCK_RATE"), attribute("GLOBAL_MEMORY_BUS_WIDTH")),
        integrated=bool(attribute("INTEGRATED")),
        versions=versions,
    )


def peak_bytes_per_s(clock_khz: int, bus_bits: int) -> float | None:
    """The specified memory peak: two transfers a clock; None where the driver's figures cannot be meant."""
    peak = 2.0 * clock_khz * 1e3 * bus_bits / 8
    return peak if 1e10 <= peak <= 3e13 else None


def _text(raw: bytes | str) -> str:
    text = raw.decode("utf-8", errors="replace") if isinstance(raw, bytes) else raw
    return text.split("\0", 1)[0].strip()
