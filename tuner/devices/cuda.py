"""An NVIDIA GPU: loads cubins, launches on torch's current stream, times with events."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tuner.arms import Artifact, Module, Step, Target, Value
from tuner.devices import nvml
from tuner.devices.base import DeviceInfo, Replay
from tuner.devices.cuda_driver import check, driver
from tuner.devices.cuda_graph import CudaReplay, capture
from tuner.devices.faults import DeviceFaultError, device_errors
from tuner.devices.packing import ArgumentBlock
from tuner.errors import ArmConstraintError, ArmError, CaptureError, MachineError, MemoryPlanError

if TYPE_CHECKING:
    from torch import Tensor

# More dynamic shared memory than this has to be asked for, on every card.
_PLAIN_SHARED_BYTES = 48 * 1024


class CudaDevice:
    """One opened GPU. It uses the primary context, which is torch's."""

    graphs = True

    def __init__(self, info: DeviceInfo, target: Target) -> None:
        """Make the context.

        Raises:
            MachineError: torch cannot use the card.
        """
        import torch as torch_module

        # torch's CUDA functions carry no annotations.
        torch: Any = torch_module
        self.info = info
        self.target = target
        self.torch_device = f"cuda:{info.index}"
        self._torch = torch
        self._nvml = nvml.handle(info.uuid)
        self._last_look_us = int(time.time() * 1e6)
        try:
            torch.cuda.init()
            torch.cuda.set_device(info.index)
            torch.zeros(1, device=self.torch_device)
            self._side = torch.cuda.Stream(device=info.index)
        except (RuntimeError, AssertionError) as error:
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise MachineError(f"torch {torch.__version__} cannot use {info.name}: {first_line}") from error

    def load(self, artifact: Artifact) -> Module:
        """Load a cubin.

        Raises:
            ArmError: The driver does not take it.
        """
        return CudaModule(artifact, self.info.index)

    def zeros(self, nbytes: int) -> Tensor:
        """Zeroed device memory as an int8 tensor; torch's allocator aligns to 512 bytes.

        Raises:
            MemoryPlanError: There is not so much free memory.
        """
        torch = self._torch
        try:
            with device_errors("while allocating"):
                block: Tensor = torch.zeros(nbytes, dtype=torch.int8, device=self.torch_device)
                return block
        except DeviceFaultError as error:
            if error.sticky:
                raise
            raise MemoryPlanError(
                f"{self.info.name}: {nbytes:,} bytes are needed and {self.free_bytes():,} are free"
            ) from error

    def capture(self, enqueue: Callable[[], None]) -> Replay:
        """Capture what `enqueue` launches into a CUDA graph on a side stream.

        Raises:
            CaptureError: The runtime cannot capture it.
            ArmError: `enqueue` itself failed.
        """
        try:
            return CudaReplay(capture(enqueue, self._side), enqueue)
        except CaptureError:
            # A stream whose capture broke is not used again.
            self._side = self._torch.cuda.Stream(device=self.info.index)
            raise

    def time_us(self, run: Callable[[], None]) -> float:
        """Microseconds between an event before and an event behind the launches of `run`."""
        begin = self._torch.cuda.Event(enable_timing=True)
        end = self._torch.cuda.Event(enable_timing=True)
        with device_errors("while timing"):
            begin.record()
            run()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) * 1e3

    def synchronize(self) -> None:
        """Wait for the device; raises `ArmError` with the driver's words on a device fault."""
        check(driver().cuCtxSynchronize(), "while waiting for the device")

    def free_bytes(self) -> int:
        """Device memory that can be allocated now. Gives torch's cached blocks back first."""
        self.trim()
        with device_errors("while reading free memory"):
            return int(self._torch.cuda.mem_get_info(self.info.index)[0])

    def trim(self) -> None:
        """Give torch's cached but unused blocks back to the device."""
        with device_errors("while freeing memory"):
            self._torch.cuda.empty_cache()

    def telemetry(self) -> dict[str, Value | float | None]:
        """Clocks, temperature, power, throttle reasons: see `tuner.devices.nvml.telemetry`."""
        return nvml.telemetry(self._nvml)

    def tenants(self) -> list[dict[str, Value]]:
        """Other processes on the card; `busy_percent` is since the last call."""
        now_us = int(time.time() * 1e6)
        found = nvml.tenants(self._nvml, self._last_look_us)
        self._last_look_us = now_us
        return found


class CudaModule:
    """A loaded cubin. Unloaded when nobody holds it any more."""

    def __init__(self, artifact: Artifact, index: int) -> None:
        """Load into the current context and look up every entry."""
        import torch

        api = driver()
        self._index = index
        self._current_stream = torch.cuda.current_stream
        self._launch = api.cuLaunchKernelEx
        self._stream_of = api.CUstream
        handle = check(api.cuModuleLoadData(artifact.code), f"while loading {artifact.arm}")
        weakref.finalize(self, _unload, handle).atexit = False
        self._functions = {
            step.entry: check(api.cuModuleGetFunction(handle, step.entry.encode()), f"while looking up {step.entry}")
            for step in artifact.steps
        }
        self._shared_limit = artifact.target.shared_bytes
        self._prepared: dict[int, _Prepared] = {}

    def launch(self, step: Step, values: Sequence[tuple[str, int | float]]) -> None:
        """Enqueue one step on the current stream.

        Raises:
            ArmConstraintError: The step asks for more shared memory than the card has.
            ArmError: The driver refuses the launch.
        """
        ready = self._prepared.get(id(step))
        if ready is None:
            ready = self._prepare(step)
        ready.arguments.write(values)
        stream = self._current_stream(self._index).cuda_stream
        if stream != ready.stream:
            ready.config.hStream = self._stream_of(stream)
            ready.stream = stream
        result = self._launch(ready.config, ready.function, ready.arguments.address, 0)
        if int(result[0]):
            check(result, f"while launching {step.entry}")

    def attributes(self, entry: str) -> dict[str, Value]:
        """`registers`, `local_bytes`, `static_shared_bytes`, `max_threads` of a loaded kernel, from the driver."""
        api = driver()
        which = api.CUfunction_attribute
        names = {
            "registers": which.CU_FUNC_ATTRIBUTE_NUM_REGS,
            "local_bytes": which.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
            "static_shared_bytes": which.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            "max_threads": which.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
        }
        function = self._function(entry)
        doing = f"while reading {entry}"
        return {name: int(check(api.cuFuncGetAttribute(code, function), doing)) for name, code in names.items()}

    def _function(self, entry: str) -> Any:
        try:
            return self._functions[entry]
        except KeyError:
            raise ArmError(f"the loaded code has no kernel {entry!r}; it has {', '.join(self._functions)}") from None

    def _prepare(self, step: Step) -> _Prepared:
        api = driver()
        function = self._function(step.entry)
        if step.shared_bytes > _PLAIN_SHARED_BYTES:
            if step.shared_bytes > self._shared_limit:
                raise ArmConstraintError(
                    f"out of shared memory: needs {step.shared_bytes / 1024:g} KB of {self._shared_limit / 1024:g} KB"
                )
            which = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            doing = f"while asking for {step.shared_bytes:,} bytes of shared memory for {step.entry}"
            check(api.cuFuncSetAttribute(function, which, step.shared_bytes), doing)
        ready = _Prepared(step, function, _config(step))
        self._prepared[id(step)] = ready
        return ready


class _Prepared:
    """All of a launch that stays the same; holding the step keeps its id from being given to another."""

    def __init__(self, step: Step, function: Any, config: Any) -> None:
        self.step = step
        self.function = function
        self.config = config
        self.arguments = ArgumentBlock(len(step.args))
        self.stream = -1


def _config(step: Step) -> Any:
    api = driver()
    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = step.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = step.block
    config.sharedMemBytes = step.shared_bytes
    config.numAttrs = 0
    if step.dependent:
        attribute = api.CUlaunchAttribute()
        attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [attribute]
        config.numAttrs = 1
    return config


def _unload(handle: Any) -> None:
    # The result is not looked at: after a fault the context is gone, and the module with it.
    driver().cuModuleUnload(handle)
