"""The CUDA code against a stand-in driver: the real cuda.bindings call a small library built here, so no GPU is needed.

What the stand-in cannot show (that a card runs it) is in test_gpu_devices.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.devices import nvml

SCRIPT = r"""
import ctypes, json, sys, types
import torch
from tuner import devices
from tuner.arms import Arm, Artifact, Scalar, Step
from tuner.devices import cuda, cuda_driver, cuda_graph
from tuner.errors import ArmError
from tuner.problem import Problem, Shape

fake = ctypes.CDLL("libcuda.so.1")
seen = (ctypes.c_uint64 * 16).in_dll(fake, "seen")
out = {}
(info,), skipped = cuda_driver.discover()
target = devices.target_of(info)
out["info"] = [info.name, info.arch, info.uuid, info.pci, info.units, info.warp, info.llc_bytes, info.memory_bytes,
               info.peak_bytes_per_s, info.integrated, info.versions["cuda_driver_api"], skipped]

streams = iter([0xABC, 0xABC, 0xDEF])
torch.cuda.current_stream = lambda index=None: types.SimpleNamespace(cuda_stream=next(streams, 0))
def artifact(code, *steps):
    return Artifact(Arm.of("hip", "x"), Problem(Shape(1, 1, 1), "bf16"), target, code, "", "", steps)
two = (Scalar("ptr", 0), Scalar("ptr", 0))
step = Step("work", (3, 2, 1), (64, 4, 1), two, shared_bytes=100_000, dependent=True)
plain = Step("work", (1, 1, 1), (32, 1, 1), two)
module = cuda.CudaModule(artifact(b"good cubin", step, plain), 0)
module.launch(step, [("ptr", 0x7F0000001234), ("f32", 1.0)])
out["first"] = list(seen)[:13]
module.launch(step, [("i64", -1), ("i32", -1)])
out["second"] = list(seen)[7:13]
module.launch(plain, [("ptr", 1), ("ptr", 2)])
out["third"] = list(seen)[:13]
out["dynamic_shared"] = ctypes.c_int.in_dll(fake, "dynamic_shared").value
out["attributes"] = module.attributes("work")

def error(call):
    try:
        call()
    except ArmError as e:
        return [str(e), type(e).status, getattr(e, "sticky", None)]
one = (1, 1, 1)
out["errors"] = [
    error(lambda: module.launch(Step("work", one, (2048, 1, 1), two), [("ptr", 1), ("ptr", 2)])),
    error(lambda: module.launch(Step("work", one, one, two, shared_bytes=300 * 1024), [])),
    error(lambda: module.launch(Step("other", one, one, two), [])),
    error(lambda: cuda.CudaModule(artifact(b"good", Step("missing", one, one, ())), 0)),
    error(lambda: cuda.CudaModule(artifact(b"bad"), 0)),
    error(lambda: cuda.CudaDevice.synchronize(None)),
]
del module
out["unloaded"] = ctypes.c_int.in_dll(fake, "unloaded").value
graph = types.SimpleNamespace(raw_cuda_graph=lambda: 0x555)
out["nodes"] = [[n.kernel, n.words, n.grid, n.block] for n in cuda_graph.CudaReplay(graph, lambda: None).nodes()]
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("cuda.bindings.driver")
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs Linux and g++ or clang++")
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("fake_libcuda.cpp")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source, "-ldl"], check=True)
    path = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
    root = str(source.parent.parent)
    environment = {**os.environ, "LD_LIBRARY_PATH": path, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def test_discovery(out: dict[str, Any]) -> None:
    assert out["info"] == [
        "NVIDIA H200", "sm_90", "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", "0000:1b:00.0", 132, 32, 62914560,
        150754820096, 2 * 3201e6 * 6144 / 8, False, "13.1", [],
    ]  # fmt: skip


def test_launch_configuration_and_arguments(out: dict[str, Any]) -> None:
    float_one = 0x3F800000
    # Attribute 6 is CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION in cuda.h.
    assert out["first"] == [3, 2, 1, 64, 4, 1, 100_000, 0xABC, 1, 6, 1, 0x7F0000001234, float_one]
    assert out["second"] == [0xABC, 1, 6, 1, 2**64 - 1, 2**32 - 1]
    assert out["third"] == [1, 1, 1, 32, 1, 1, 0, 0xDEF, 0, 0, 0, 1, 2]
    assert out["dynamic_shared"] == 100_000
    assert out["attributes"] == {
        "registers": 104, "local_bytes": 103, "static_shared_bytes": 101, "max_threads": 100,
    }  # fmt: skip


def test_errors_have_few_words_and_a_status(out: dict[str, Any]) -> None:
    wide, greedy, unknown, missing, bad, lost = out["errors"]
    assert wide == ["invalid launch (CUDA_ERROR_INVALID_VALUE) while launching work", "runtime", False]
    assert greedy == ["out of shared memory: needs 300 KB of 227 KB", "constraints", None]
    assert "'other'" in unknown[0] and "CUDA_ERROR_NOT_FOUND" in missing[0]
    assert "CUDA_ERROR_NO_BINARY_FOR_GPU" in bad[0] and bad[2] is False
    assert lost == ["illegal access (CUDA_ERROR_ILLEGAL_ADDRESS) while waiting for the device", "runtime", True]


def test_a_module_that_nobody_holds_is_unloaded(out: dict[str, Any]) -> None:
    # The second is the module whose entry was missing.
    assert out["unloaded"] == 2


def test_nodes_in_order_of_execution_with_their_words(out: dict[str, Any]) -> None:
    words = [0x7F0012345600, 0x7F00AABBCC00, 5]
    assert out["nodes"] == [
        ["of_a_module", words, [4, 2, 1], [64, 1, 1]],
        ["memcpy", [], [0, 0, 0], [0, 0, 0]],
        ["of_a_library", words, [4, 2, 1], [64, 1, 1]],
    ]


class Refused(Exception):
    """What this NVML raises for a reading that it does not give."""


def refuse(*_: object) -> None:
    raise Refused


def library(**changes: object) -> SimpleNamespace:
    """An NVML with one H200 that is power capped and hot."""
    process = lambda pid, used: SimpleNamespace(pid=pid, usedGpuMemory=used)  # noqa: E731
    calls: dict[str, object] = {
        "NVMLError": Refused, "NVML_CLOCK_SM": 1, "NVML_CLOCK_MEM": 2, "NVML_TEMPERATURE_GPU": 0,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid if uuid.startswith("MIG") else refuse(),
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda d: 0x4 | 0x40,
        "nvmlDeviceGetMemoryInfo": lambda d: SimpleNamespace(used=123),
        "nvmlDeviceGetUtilizationRates": lambda d: SimpleNamespace(gpu=97),
        "nvmlDeviceGetPowerUsage": lambda d: 699_500,
        "nvmlDeviceGetEnforcedPowerLimit": lambda d: 700_000,
        "nvmlDeviceGetClockInfo": lambda d, which: {1: 1980, 2: 3201}[which],
        "nvmlDeviceGetTemperature": lambda d, sensor: 88,
        "nvmlDeviceGetFanSpeed": refuse,
        "nvmlDeviceGetComputeRunningProcesses": lambda d: [
            process(os.getpid(), 1), process(2**22 + 1, None), process(2**22 + 2, 1 << 30)
        ],
        "nvmlDeviceGetGraphicsRunningProcesses": refuse,
        "nvmlDeviceGetProcessUtilization": lambda d, since: [
            SimpleNamespace(pid=2**22 + 2, smUtil=3), SimpleNamespace(pid=2**22 + 2, smUtil=41)
        ],
        "nvmlSystemGetProcessName": lambda pid: "/usr/bin/other" if pid % 2 else refuse(),
    }  # fmt: skip
    return SimpleNamespace(**{**calls, **changes})


def test_telemetry_gives_none_for_what_the_card_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "library", library)
    assert nvml.handle("GPU-1") == "MIG-1"
    assert nvml.telemetry("MIG-1") == {
        "sm_clock_mhz": 1980, "mem_clock_mhz": 3201, "temperature_c": 88, "power_w": 699.5, "power_cap_w": 700.0,
        "throttle": "power_cap,hw_thermal_slowdown", "slowdown": "hw_thermal_slowdown", "fan_percent": None,
        "memory_used_bytes": 123, "busy_percent": 97,
    }  # fmt: skip
    monkeypatch.setattr(nvml, "library", lambda: library(nvmlDeviceGetCurrentClocksThrottleReasons=refuse))
    reading = nvml.telemetry("MIG-1")
    assert reading["throttle"] is None and reading["slowdown"] is None and reading["power_w"] == 699.5


def test_tenants_are_others_with_what_is_known_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    # These process numbers lie above Linux's highest, so they are nobody here.
    monkeypatch.setattr(nvml, "library", library)
    assert nvml.tenants("MIG-1", 0) == [
        {"pid": 2**22 + 1, "name": "other"},
        {"pid": 2**22 + 2, "name": "unknown", "memory_bytes": 1 << 30, "busy_percent": 41},
    ]
