"""The host device with a small library built here that keeps the ABI of the HIP host executor."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from devices_rig import Rig

from kernels_vendor import Vendor
from tuner import devices
from tuner.arms import Arm, Artifact, CodeLaunch, Pointer, Scalar, Step, Target, Workspace
from tuner.devices import host
from tuner.devices.host_tenants import Tenants
from tuner.devices.lock import device_lock, lock_path
from tuner.errors import ArmError, MachineError, MemoryPlanError
from tuner.problem import Problem, Shape

SOURCE = r"""
#include <cstdint>
static const char* words = "";
extern "C" const char* coldtune_error() { return words; }
// out[m] = scale * sum of (int32) counts + big, and remembers the launch in the workspace.
extern "C" int coldtune_launch_note(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                    unsigned shared, void** args, int threads) {
  double* work = *static_cast<double**>(args[0]);
  int32_t small = *static_cast<int32_t*>(args[1]);
  int64_t big = *static_cast<int64_t*>(args[2]);
  float real = *static_cast<float*>(args[3]);
  void* null = *static_cast<void**>(args[4]);
  double facts[] = {double(gx), double(gy), double(gz), double(bx), double(by), double(bz), double(shared),
                    double(threads), double(small), double(big), double(real), null ? 1.0 : 0.0};
  for (int i = 0; i < 12; i++) work[i] = facts[i];
  return 0;
}
extern "C" int coldtune_launch_fail(unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void**, int) {
  words = "divergent barrier in block 3";
  return 1;
}
"""
TARGET = Target("host", "x86_64", 32, 2)
PROBLEM = Problem.of(Shape(1, 16, 4), "bf16")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs g++ or clang++")
    folder = tmp_path_factory.mktemp("library")
    (folder / "k.cpp").write_text(SOURCE)
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", folder / "k.so", folder / "k.cpp"], check=True)
    return (folder / "k.so").read_bytes()


@pytest.fixture
def device() -> host.HostDevice:
    info = host.discover()
    return host.HostDevice(info, devices.target_of(info))


def artifact(code: bytes, *steps: Step, workspaces: tuple[Workspace, ...] = ()) -> Artifact:
    return Artifact(Arm.of("hip", "note"), PROBLEM, TARGET, code, "c" * 64, "s" * 64, steps, workspaces)


NOTE = Step(
    "note", (7, 2, 1), (32, 4, 1),
    (Pointer("work"), Scalar("i32", -5), Scalar("i64", -(2**40)), Scalar("f32", 0.25), Scalar("ptr", 0)),
    shared_bytes=96,
)  # fmt: skip


def test_arguments_reach_the_kernel(library: bytes, device: host.HostDevice) -> None:
    rig = Rig.of(PROBLEM.shape, seed=1)
    launch = CodeLaunch(artifact(library, NOTE, workspaces=(Workspace("work", 96),)), rig, rig, device)
    launch(0)
    seen = launch._memory["work"].view(torch.float64)[:12].tolist()
    assert seen == [7, 2, 1, 32, 4, 1, 96, device.info.units, -5, -(2**40), 0.25, 0]
    assert launch.receipt()["threads"] == device.info.units


def test_nodes_hold_the_addresses(library: bytes, device: host.HostDevice) -> None:
    rig = Rig.of(PROBLEM.shape, seed=1)
    launch = CodeLaunch(artifact(library, NOTE, workspaces=(Workspace("work", 96),)), rig, rig, device)
    calls: list[int] = []

    def enqueue() -> None:
        calls.append(1)
        launch(0)
        launch(1)

    replay = device.capture(enqueue)
    assert not device.graphs and calls == []
    replay.replay()
    assert calls == [1]
    first, second = replay.nodes()
    base = launch._memory["work"].data_ptr()
    assert first.words[0] == base and second.words[0] == base + 256
    assert (first.kernel, first.grid, first.block) == ("note", (7, 2, 1), (32, 4, 1))
    assert len(replay.nodes()) == 2 and calls == [1, 1], "the recording was made twice"


def test_torch_operators_are_recorded(device: host.HostDevice) -> None:
    rig = Rig.of(PROBLEM.shape, seed=1)
    family = Vendor()
    for form, addresses in (("mm_out.cpu.nk", 1), ("mm.cpu.nk", 2)):
        built = family.build(PROBLEM, Arm.of("vendor", form), TARGET)
        launch = family.bind(built, rig, rig, device)
        nodes = device.capture(lambda launch=launch: [launch(0), launch(1)] and None).nodes()
        assert len(nodes) == 2 * addresses
        assert rig.weights[0].data_ptr() in nodes[0].words
        assert rig.weights[1].data_ptr() in nodes[addresses].words
        assert rig.output(1).data_ptr() in nodes[-1].words


def test_failures_cost_the_arm_only(
    library: bytes, device: host.HostDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    module = device.load(artifact(library, Step("fail", (1, 1, 1), (1, 1, 1), ())))
    with pytest.raises(ArmError, match="fail: divergent barrier in block 3"):
        module.launch(Step("fail", (1, 1, 1), (1, 1, 1), ()), [])
    with pytest.raises(ArmError, match="no entry coldtune_launch_missing"):
        device.load(artifact(library, Step("missing", (1, 1, 1), (1, 1, 1), ())))
    with pytest.raises(ArmError, match="does not load") as caught:
        device.load(artifact(b"not a library", NOTE))
    assert str(tmp_path) not in str(caught.value)
    assert not list(tmp_path.iterdir()), "a library file was left behind"


def test_memory_is_zeroed_aligned_and_bounded(device: host.HostDevice) -> None:
    for nbytes in (1, 255, 4096):
        block = device.zeros(nbytes)
        assert block.numel() == nbytes and block.data_ptr() % 256 == 0 and not block.any()
    assert 0 < device.free_bytes() <= device.info.memory_bytes
    with pytest.raises(MemoryPlanError, match="are needed and"):
        device.zeros(device.info.memory_bytes * 2)


def test_the_clock(device: host.HostDevice) -> None:
    assert 20_000 <= device.time_us(lambda: time.sleep(0.02)) < 500_000
    device.synchronize()


def test_telemetry_has_the_keys_of_a_gpu(device: host.HostDevice) -> None:
    reading = device.telemetry()
    assert reading["power_w"] is None and reading["slowdown"] is None
    load = reading["load_1m"]
    assert isinstance(load, float) and load >= 0


def test_a_busy_stranger_is_a_tenant_and_a_child_is_not() -> None:
    # A grandchild whose parent has ended belongs to nobody here.
    spin = "import time\nend = time.time() + 20\nwhile time.time() < end: pass"
    orphan = (
        "import subprocess, sys\n"
        f"spinner = subprocess.Popen([sys.executable, '-c', {spin!r}], stdout=subprocess.DEVNULL)\n"
        "print(spinner.pid, flush=True)"
    )
    pid = int(subprocess.run([sys.executable, "-c", orphan], stdout=subprocess.PIPE, check=True).stdout)
    child = subprocess.Popen([sys.executable, "-c", spin])
    try:
        tenants = Tenants(cores=1)
        assert tenants.look() == []
        time.sleep(0.5)
        found = {entry["pid"]: entry for entry in tenants.look()}
        assert pid in found and found[pid]["busy_percent"] > 3
        assert child.pid not in found and os.getpid() not in found
    finally:
        os.kill(pid, 9)
        child.kill()
        child.wait()


def test_the_lock_is_exclusive_and_names_its_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLDTUNE_STATE", str(tmp_path))
    info = host.discover()
    code = (
        "import sys; from tuner.devices import device_lock; from tuner.devices.host import discover\n"
        "with device_lock(discover()): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(MachineError, match=f"in use by process {other.pid}"), device_lock(info, wait_s=0.1):
            pass
    finally:
        other.kill()
        other.wait()
    with device_lock(info, wait_s=1):
        assert lock_path(tmp_path, info).with_suffix(".pid").read_text() == str(os.getpid())
    with device_lock(info, wait_s=0):
        pass
