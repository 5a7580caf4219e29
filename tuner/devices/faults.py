"""Device faults in few words, and whether the context survives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tuner.errors import ArmError

# Driver result numbers. The runtime uses the same numbers, so torch's `error_code` reads the same way.
_WORDS = {
    1: ("invalid launch", False),
    2: ("out of device memory", False),
    214: ("uncorrectable memory error (ECC)", True),
    220: ("NVLink error, uncorrectable", True),
    700: ("illegal access", True),
    701: ("launch out of resources", False),
    702: ("launch timed out", True),
    710: ("device assertion", True),
    714: ("hardware stack error", True),
    715: ("illegal instruction", True),
    716: ("misaligned access", True),
    717: ("invalid address space", True),
    718: ("invalid program counter", True),
    719: ("launch failed", True),
    720: ("cooperative launch too large", False),
}
# The texts that torch puts into its messages where it gives no number.
_TEXTS = {
    "out of memory": 2,
    "uncorrectable ECC": 214,
    "illegal memory access": 700,
    "too many resources requested": 701,
    "launch timed out": 702,
    "device-side assert": 710,
    "hardware stack": 714,
    "illegal instruction": 715,
    "misaligned address": 716,
    "unspecified launch failure": 719,
}


class DeviceFaultError(ArmError):
    """A launch failed on the device.

    Attributes:
        sticky: The context is lost: every later call fails, and the process must be started anew.
        driver: The driver's name of the error.
    """

    def __init__(self, message: str, *, sticky: bool, driver: str) -> None:
        """Keep what the worker needs to decide whether to restart."""
        super().__init__(message)
        self.sticky = sticky
        self.driver = driver

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the keyword arguments, so that it survives the way between processes."""
        return (_restore, (str(self), self.sticky, self.driver))


def _restore(message: str, sticky: bool, driver: str) -> DeviceFaultError:
    return DeviceFaultError(message, sticky=sticky, driver=driver)


def driver_fault(code: int, driver: str, doing: str) -> DeviceFaultError:
    """The error for a driver result: `illegal access (CUDA_ERROR_ILLEGAL_ADDRESS) while waiting for the device`."""
    words, sticky = _WORDS.get(code, ("driver error", False))
    return DeviceFaultError(f"{words} ({driver}) {doing}", sticky=sticky, driver=driver)


def torch_fault(error: RuntimeError, doing: str) -> DeviceFaultError | None:
    """The same for an error that torch raised; None if it does not speak of the device."""
    text = str(error)
    code = getattr(error, "error_code", None)
    if not isinstance(code, int) or code not in _WORDS:
        # Only the first line says what happened: below it torch advises on device-side assertions in any case.
        code = next((number for words, number in _TEXTS.items() if words in text.strip().partition("\n")[0]), None)
    if code is None and not any(mark in text for mark in ("CUDA error", "CUDA driver error", "CUBLAS_STATUS")):
        return None
    first_line = text.strip().splitlines()[0][:160] if text.strip() else type(error).__name__
    if code is None:
        return DeviceFaultError(f"driver error ({first_line}) {doing}", sticky=False, driver=type(error).__name__)
    return driver_fault(code, first_line, doing)


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    """Turn what torch raises for the device inside the block into a `DeviceFaultError`.

    Raises:
        DeviceFaultError: torch reported a device error.
    """
    try:
        yield
    except RuntimeError as error:
        fault = torch_fault(error, doing)
        if fault is None:
            raise
        raise fault from error
