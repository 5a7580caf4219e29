"""The host as a device: compiled kernels from shared libraries, a monotonic clock, no graphs."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from tuner.arms import Artifact, Module, Step, Target, Value
from tuner.devices import cgroup, host_tenants, host_trace, llc
from tuner.devices.base import DeviceInfo, Node, Replay
from tuner.devices.packing import ArgumentBlock
from tuner.errors import ArmError, MachineError, MemoryPlanError

if TYPE_CHECKING:
    from torch import Tensor

WARP = 32
_ASSUMED_LLC_BYTES = 32 * llc.MIB
_ALIGNMENT = 256


def discover(root: Path = Path("/")) -> DeviceInfo:
    """Facts of this machine.

    Args:
        root: Where `/sys`, `/proc` and `/etc` are looked for, so that recorded trees can be read.
    """
    cpus = usable_cpus()
    groups = cgroup.folders(root)
    cache = llc.host_cache(cpus, root / "sys/devices/system/cpu")
    llc_bytes, llc_source = cache or (_ASSUMED_LLC_BYTES, "assumed 32 MiB: the system does not say; give it by --llc")
    model = cpu_model(root / "proc/cpuinfo")
    return DeviceInfo(
        kind="host",
        index=0,
        name=model,
        arch=platform.machine(),
        uuid=_identity(model, root / "etc/machine-id"),
        pci="",
        units=units(cpus, groups),
        warp=WARP,
        llc_bytes=llc_bytes,
        llc_source=llc_source,
        memory_bytes=_least(psutil.virtual_memory().total, cgroup.memory_total(groups)),
        versions={"kernel": platform.release()},
    )


def usable_cpus() -> tuple[int, ...]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def units(cpus: Sequence[int], groups: list[Path]) -> int:
    """Usable cores: the affinity, or the quota of the control groups where that is less."""
    limit = cgroup.cores(groups)
    return len(cpus) if limit is None else max(1, min(len(cpus), int(limit)))


def cpu_model(cpuinfo: Path) -> str:
    """The processor's product name, else the machine's."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


class HostDevice:
    """This machine's processor."""

    graphs = False
    torch_device = "cpu"

    def __init__(self, info: DeviceInfo, target: Target) -> None:
        """Nothing is started; the first call of `tenants` sets its clock."""
        self.info = info
        self.target = target
        self._recorder = host_trace.Recorder()
        self._tenants = host_tenants.Tenants(info.units)

    def load(self, artifact: Artifact) -> Module:
        """Load a shared library.

        Raises:
            ArmError: It is no library, or lacks an entry.
        """
        return HostModule(artifact, self.info.units, self._recorder)

    def zeros(self, nbytes: int) -> Tensor:
        """Zeroed memory as an int8 tensor, aligned to 256 bytes.

        Raises:
            MemoryPlanError: There is not so much free memory.
        """
        import torch

        # Linux grants more than there is and then ends the process, so ask before.
        free = self.free_bytes()
        if nbytes > free:
            raise MemoryPlanError(f"{self.info.name}: {nbytes:,} bytes are needed and {free:,} are free")
        block = torch.zeros(nbytes + _ALIGNMENT, dtype=torch.int8)
        start = -block.data_ptr() % _ALIGNMENT
        return block[start : start + nbytes]

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        """Keep `enqueue` to be called again; nothing is captured and nothing runs yet."""
        return HostReplay(enqueue, self._recorder)

    def time_us(self, run: Callable[[], None]) -> float:
        """Microseconds on the monotonic clock; launches on the host end before they return."""
        begin = time.perf_counter_ns()
        run()
        return (time.perf_counter_ns() - begin) / 1e3

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back on the host."""

    def free_bytes(self) -> int:
        """Memory that can be allocated now, within the control group's limit."""
        return _least(int(psutil.virtual_memory().available), cgroup.memory_free(cgroup.folders()))

    def trim(self) -> None:
        """Nothing is cached on the host."""

    def telemetry(self) -> dict[str, Value | float | None]:
        """`load_1m`, `cpu_clock_mhz`, `temperature_c`, `memory_used_bytes`, and the keys that GPUs have, as None."""
        return {
            "load_1m": os.getloadavg()[0],
            "cpu_clock_mhz": _clock_mhz(),
            "temperature_c": _temperature(),
            "memory_used_bytes": int(psutil.virtual_memory().used),
            "power_w": None,
            "power_cap_w": None,
            "throttle": None,
            "slowdown": None,
            "fan_percent": None,
        }

    def tenants(self) -> list[dict[str, Value]]:
        """Other processes that used over 3 % of the usable cores since the last call; the first call finds none."""
        return self._tenants.look()


class HostModule:
    """A loaded shared library. It stays mapped: code that has run may have left threads behind."""

    def __init__(self, artifact: Artifact, threads: int, recorder: host_trace.Recorder) -> None:
        """Map the library from a file that is deleted at once, and look up every entry."""
        self._library = _open_library(artifact.code)
        self._threads = threads
        self._recorder = recorder
        self._entries = {step.entry: self._entry(step.entry) for step in artifact.steps}
        self._blocks: dict[int, tuple[Step, ArgumentBlock]] = {}

    def launch(self, step: Step, values: Sequence[tuple[str, int | float]]) -> None:
        """Run one step to its end.

        Raises:
            ArmError: The kernel reported a failure, with its words.
        """
        held = self._blocks.get(id(step))
        if held is None:
            held = self._blocks[id(step)] = (step, ArgumentBlock(len(step.args)))
        block = held[1]
        block.write(values)
        if self._recorder.on:
            self._recorder.add(Node(step.entry, block.words(), step.grid, step.block))
        code = self._entries[step.entry](*step.grid, *step.block, step.shared_bytes, block.address, self._threads)
        if code:
            raise ArmError(f"{step.entry}: {self._error(code)}")

    def attributes(self, entry: str) -> dict[str, Value]:
        """Threads that a launch runs on; there are no registers to report."""
        return {"threads": self._threads}

    def _entry(self, name: str) -> Any:
        try:
            function = getattr(self._library, f"coldtune_launch_{name}")
        except AttributeError:
            raise ArmError(f"the compiled library has no entry coldtune_launch_{name}") from None
        function.argtypes = [ctypes.c_uint] * 7 + [ctypes.c_void_p, ctypes.c_int]
        function.restype = ctypes.c_int
        return function

    def _error(self, code: int) -> str:
        try:
            function = self._library.coldtune_error
        except AttributeError:
            return f"failed with code {code}"
        function.restype = ctypes.c_char_p
        text = function()
        return text.decode("utf-8", errors="replace") if text else f"failed with code {code}"


class HostReplay:
    """Launches that are simply made again."""

    def __init__(self, enqueue: Callable[[], None], recorder: host_trace.Recorder) -> None:
        """Hold what makes the launches."""
        self._enqueue = enqueue
        self._recorder = recorder
        self._nodes: list[Node] | None = None

    def replay(self) -> None:
        """Make the launches again."""
        self._enqueue()

    def nodes(self) -> list[Node]:
        """The kernels in order: launches of loaded code, and the torch operators that compute.

        The first call makes the launches once more to see them.
        """
        if self._nodes is None:
            self._nodes = self._recorder.record(self._enqueue)
        return list(self._nodes)


def _open_library(code: bytes) -> ctypes.CDLL:
    descriptor, name = tempfile.mkstemp(suffix=".so", prefix="coldtune-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(code)
        return ctypes.CDLL(name)
    except OSError as error:
        words = str(error).replace(name, "the library")
        if "failed to map segment" in words:
            raise MachineError(
                f"{tempfile.gettempdir()} does not allow code to run ({words}); set TMPDIR to a folder that does"
            ) from error
        raise ArmError(f"the compiled library does not load: {words}") from error
    finally:
        os.unlink(name)


def _clock_mhz() -> float | None:
    try:
        clock = psutil.cpu_freq()
    except (NotImplementedError, OSError):
        # psutil raises these where a virtual machine has no frequency files.
        return None
    return float(clock.current) if clock else None


def _temperature() -> float | None:
    read = getattr(psutil, "sensors_temperatures", None)
    readings = [entry.current for entries in (read() if read else {}).values() for entry in entries]
    return float(max(readings)) if readings else None


def _identity(model: str, machine_id: Path) -> str:
    """A stable name for this machine that gives nothing of it away."""
    secret = machine_id.read_text(encoding="ascii", errors="replace").strip() if machine_id.is_file() else ""
    return "host-" + hashlib.sha256(f"coldtune\n{model}\n{secret}".encode()).hexdigest()[:16]


def _least(value: int, limit: int | None) -> int:
    return value if limit is None else min(value, limit)
