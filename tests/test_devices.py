"""Finding and choosing devices, cache sizes from recorded trees, and the pure parts of the CUDA and NVML code."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from tuner import devices
from tuner.devices import cgroup, cuda_driver, host, llc, nvml, rocm
from tuner.devices.base import DeviceInfo
from tuner.devices.cuda_graph import aligned_words, execution_order
from tuner.devices.faults import DeviceFaultError, device_errors, driver_fault
from tuner.errors import ArmError, CaptureError, MachineError, UsageError

MIB = 1 << 20
H200 = DeviceInfo(
    "cuda", 0, "NVIDIA H200", "sm_90", "GPU-aaaaaaaa-0000-0000-0000-000000000001", "0000:01:00.0",
    132, 32, 60 * MIB, "driver", 150_000_000_000,
)  # fmt: skip
SECOND = dataclasses.replace(
    H200, index=1, name="NVIDIA A100", arch="sm_80", uuid="GPU-bbbbbbbb-0000-0000-0000-000000000002", pci="0000:41:00.0"
)
IGPU = dataclasses.replace(H200, index=0, name="NVIDIA Thor", arch="sm_110", uuid="GPU-cc", integrated=True)
XTX = DeviceInfo("rocm", 0, "AMD Radeon RX 7900 XTX", "gfx1100", "GPU-00000000000000aa", "0000:03:00.0",
                 96, 32, 96 * MIB, "KFD", 24 << 30)  # fmt: skip
HOST = DeviceInfo("host", 0, "Some CPU", "x86_64", "host-0123456789abcdef", "", 4, 32, 32 * MIB, "sysfs", 1 << 34)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[DeviceInfo]:
    """A machine whose devices the test gives; torch there is a CUDA build."""
    found: list[DeviceInfo] = []
    monkeypatch.setattr(cuda_driver, "discover", lambda: ([d for d in found if d.kind == "cuda"], []))
    monkeypatch.setattr(rocm, "discover", lambda: [d for d in found if d.kind == "rocm"])
    monkeypatch.setattr(host, "discover", lambda: HOST)
    monkeypatch.setattr(devices, "torch_build", lambda: "cuda")
    return found


def test_the_first_discrete_gpu_is_chosen(machine: list[DeviceInfo]) -> None:
    assert devices.choose(None) == HOST
    machine[:] = [XTX]
    assert devices.choose(None) == HOST, "a GPU that cannot be timed was chosen"
    assert any("cannot time on AMD" in line and "7900 XTX" in line for line in devices.survey().skipped)
    machine[:] = [IGPU]
    assert devices.choose(None) == HOST, "an integrated GPU was chosen unasked"
    assert devices.choose("cuda") == IGPU
    machine[:] = [XTX, H200, SECOND]
    assert devices.choose(None) == H200


@pytest.mark.parametrize(
    "spec",
    ["cuda:1", "CUDA:1", SECOND.uuid, SECOND.uuid.upper(), "0000:41:00.0", "00000000:41:00.0", "41:00.0", "sm_80"],
)
def test_every_name_of_a_device_finds_it(machine: list[DeviceInfo], spec: str) -> None:
    machine[:] = [H200, SECOND, XTX]
    assert devices.choose(spec) == SECOND


def test_unknown_and_absent_devices_list_what_exists(machine: list[DeviceInfo]) -> None:
    machine[:] = [H200]
    for nonsense in ("gpu", "", "cuda:", "nvidia", "cuda:99999999", "0000:41"):
        with pytest.raises(UsageError, match=r"--device host, cuda.*NVIDIA H200.*Some CPU"):
            devices.choose(nonsense)
    for absent in ("cuda:3", "sm_75", "rocm", "gfx942", "0000:99:00.0", "host:1"):
        with pytest.raises(MachineError, match=r"no device.*NVIDIA H200"):
            devices.choose(absent)
    machine[:] = [XTX]
    with pytest.raises(MachineError, match="--device host"):
        devices.choose("gfx1100")
    with pytest.raises(MachineError, match="--device host"):
        devices.open_device(XTX)


def test_torch_without_cuda_names_the_install_line(machine: list[DeviceInfo], monkeypatch: pytest.MonkeyPatch) -> None:
    machine[:] = [H200]
    monkeypatch.setattr(devices, "torch_build", lambda: "cpu")
    assert devices.choose(None) == HOST
    assert any("pip install 'coldtune[cuda]'" in line for line in devices.survey().skipped)
    with pytest.raises(MachineError, match="built without CUDA"):
        devices.choose("cuda")


def test_the_cache_size_can_be_given(machine: list[DeviceInfo]) -> None:
    chosen = devices.choose("host", llc_bytes=12345)
    assert (chosen.llc_bytes, chosen.llc_source) == (12345, "given by --llc")
    with pytest.raises(UsageError, match="--llc"):
        devices.choose("host", llc_bytes=0)


def test_targets() -> None:
    target = devices.target_of(H200)
    assert (target.backend, target.arch, target.warp, target.units) == ("cuda", "sm_90", 32, 132)
    assert target.shared_bytes == 232448, "Hopper's limit of a block, from the CUDA programming guide"
    assert devices.target_of(XTX).backend == "hip"
    assert devices.target_of(XTX).shared_bytes == 65536
    assert devices.target_of(HOST).backend == "host"


def test_listing_this_machine_imports_no_torch() -> None:
    code = "import sys; from tuner import devices; d = devices.discover(); print(d[-1].kind, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["host", "False"]


def test_this_machine() -> None:
    info = host.discover()
    assert info.units >= 1 and info.llc_bytes >= 1 << 20 and info.memory_bytes > 1 << 28
    machine_id = Path("/etc/machine-id")
    if machine_id.is_file() and machine_id.read_text().strip():
        assert machine_id.read_text().strip() not in info.uuid
    assert info.uuid == host.discover().uuid


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cache(root: Path, cpu: int, index: int, level: int, kind: str, size: str, shared: str) -> None:
    folder = root / f"cpu{cpu}/cache/index{index}"
    for name, text in (("level", str(level)), ("type", kind), ("size", size), ("shared_cpu_list", shared)):
        write(folder / name, text + "\n")


def test_host_cache_adds_the_caches_of_core_groups(tmp_path: Path) -> None:
    for cpu in range(8):
        group = "0-3" if cpu < 4 else "4-7"
        cache(tmp_path, cpu, 0, 1, "Data", "32K", str(cpu))
        cache(tmp_path, cpu, 1, 1, "Instruction", "64M", str(cpu))
        cache(tmp_path, cpu, 2, 2, "Unified", "1024K", str(cpu))
        cache(tmp_path, cpu, 3, 3, "Unified", "32768K", group)
    assert llc.host_cache(range(8), tmp_path) == (64 * MIB, f"{tmp_path}: 2 x level 3, 64 MiB in all")
    one_group = llc.host_cache(range(3), tmp_path)
    assert one_group is not None and one_group[0] == 32 * MIB
    assert llc.host_cache([99], tmp_path) is None


@pytest.mark.parametrize(("text", "size"), [("32768K", 32 * MIB), ("96M\n", 96 * MIB), ("512", 512), ("x", 0), ("", 0)])
def test_sizes(text: str, size: int) -> None:
    assert llc.parse_size(text) == size


def test_host_without_cache_files_says_that_it_assumes(tmp_path: Path) -> None:
    write(tmp_path / "proc/cpuinfo", "processor : 0\nmodel name : Test CPU 9000\n")
    info = host.discover(tmp_path)
    assert info.name == "Test CPU 9000"
    assert info.llc_bytes == 32 * MIB and "assumed" in info.llc_source and "--llc" in info.llc_source


def test_control_group_limits_on_the_way_up(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/slice/job\n")
    top = tmp_path / "sys/fs/cgroup"
    write(top / "slice/job/cpu.max", "max 100000\n")
    write(top / "slice/cpu.max", "250000 100000\n")
    write(top / "slice/job/memory.max", "max\n")
    write(top / "slice/memory.max", "1000000\n")
    write(top / "slice/memory.current", "400000\n")
    groups = cgroup.folders(tmp_path)
    assert groups == [top / "slice/job", top / "slice", top]
    assert cgroup.cores(groups) == 2.5
    assert (cgroup.memory_total(groups), cgroup.memory_free(groups)) == (1000000, 600000)
    assert host.units(range(64), groups) == 2
    assert host.units(range(1), groups) == 1
    assert cgroup.cores(cgroup.folders(tmp_path / "nowhere")) is None


def kfd_node(root: Path, number: int, facts: str, caches: tuple[str, ...] = (), banks: tuple[str, ...] = ()) -> None:
    write(root / str(number) / "properties", facts)
    for i, text in enumerate(caches):
        write(root / str(number) / f"caches/{i}/properties", text)
    for i, text in enumerate(banks):
        write(root / str(number) / f"mem_banks/{i}/properties", text)


def amd_facts(gfx: int, simds: int, per_cu: int, device: int, wave: int = 32, cores: int = 0) -> str:
    return (
        f"cpu_cores_count {cores}\nsimd_count {simds}\nsimd_per_cu {per_cu}\nwave_front_size {wave}\n"
        f"gfx_target_version {gfx}\ndevice_id {device}\nlocation_id 768\ndomain 0\nunique_id 4660\n"
    )


def test_amd_gpus_from_kfd(tmp_path: Path) -> None:
    kfd_node(tmp_path, 0, "cpu_cores_count 16\nsimd_count 0\n")
    kfd_node(
        tmp_path, 1, amd_facts(110000, 192, 2, 0x744C),
        ("level 1\nsize 16\n", "level 2\nsize 6144\n", "level 3\nsize 98304\n", "level 3\nsize 98304\n"),
        ("heap_type 1\nsize_in_bytes 25753026560\n", "heap_type 0\nsize_in_bytes 7\n"),
    )  # fmt: skip
    kfd_node(
        tmp_path,
        2,
        amd_facts(90402, 1216, 4, 0x74A1, wave=64),
        ("level 2\nsize 4096\n",),
        ("heap_type 1\nsize_in_bytes 9\n",),
    )
    kfd_node(tmp_path, 10, amd_facts(100306, 4, 2, 0x164E, cores=16), ("level 2\nsize 256\n",))
    xtx, mi300, apu = rocm.discover(tmp_path)
    assert (xtx.name, xtx.arch, xtx.units, xtx.warp) == ("AMD Radeon RX 7900 XTX", "gfx1100", 96, 32)
    assert (xtx.llc_bytes, xtx.memory_bytes, xtx.pci) == (96 * MIB, 25753026560, "0000:03:00.0")
    assert "level 3" in xtx.llc_source and xtx.uuid == "GPU-0000000000001234" and not xtx.integrated
    assert (mi300.arch, mi300.units, mi300.warp, mi300.llc_bytes) == ("gfx942", 304, 64, 256 * MIB)
    assert mi300.llc_source.startswith("table")
    assert apu.integrated and apu.arch == "gfx1036" and "--llc" in apu.llc_source and apu.llc_bytes == 256 << 10
    assert [d.index for d in (xtx, mi300, apu)] == [0, 1, 2]
    assert rocm.discover(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("arch", "units", "mib"), [("gfx1100", 96, 96), ("gfx1100", 84, 80), ("gfx1100", 80, 64), ("gfx942", 304, 256)]
)
def test_amd_table(arch: str, units: int, mib: int) -> None:
    known = llc.amd_table(arch, units)
    assert known is not None and known[0] == mib * MIB
    assert llc.amd_table("gfx9999", 1) is None


def test_gfx_names() -> None:
    assert [rocm.arch_of(v) for v in (110000, 90010, 90402, 120001, 100300)] == [
        "gfx1100", "gfx90a", "gfx942", "gfx1201", "gfx1030",
    ]  # fmt: skip


def test_specified_peak() -> None:
    h200 = cuda_driver.peak_bytes_per_s(3_201_000, 6144)
    assert h200 == pytest.approx(4.917e12, rel=1e-3)
    assert cuda_driver.peak_bytes_per_s(0, 6144) is None


def test_throttle_words_tell_heat_from_a_cap() -> None:
    assert nvml.throttle_words(0x4 | 0x1) == ("idle,power_cap", "")
    every, slow = nvml.throttle_words(0x8 | 0x20 | 0x40 | 0x4)
    assert slow == "hw_slowdown,sw_thermal_slowdown,hw_thermal_slowdown" and "power_cap" in every
    assert nvml.throttle_words(0) == ("", "")
    assert nvml.throttle_words(1 << 40)[0] == "bit_40"


def test_telemetry_without_a_card_is_all_none() -> None:
    reading = nvml.telemetry(None)
    assert set(reading.values()) == {None} and {"slowdown", "power_cap_w", "fan_percent"} <= set(reading)
    assert nvml.tenants(None, 0) == []
    assert os.getpid() in nvml.own_pids()


def test_faults_say_whether_the_context_is_lost() -> None:
    lost = driver_fault(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "while waiting")
    assert isinstance(lost, ArmError) and lost.status == "runtime"
    assert lost.sticky and str(lost) == "illegal access (CUDA_ERROR_ILLEGAL_ADDRESS) while waiting"
    again = pickle.loads(pickle.dumps(lost))
    assert (again.sticky, again.driver, str(again)) == (True, lost.driver, str(lost))
    assert not driver_fault(701, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "").sticky
    with pytest.raises(DeviceFaultError, match="illegal access") as caught, device_errors("while timing"):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be")
    assert caught.value.sticky
    with pytest.raises(DeviceFaultError, match="out of device memory"), device_errors(""):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")
    with pytest.raises(RuntimeError, match="size mismatch"), device_errors(""):
        raise RuntimeError("size mismatch, got 3")


def test_driver_results_become_errors() -> None:
    assert cuda_driver.check((0,), "") is None
    assert cuda_driver.check((0, 7), "") == 7
    assert cuda_driver.check((0, 7, 8), "") == (7, 8)
    with pytest.raises(DeviceFaultError, match=r"misaligned access .*CUDA_ERROR_MISALIGNED_ADDRESS"):
        cuda_driver.check((716,), "while x")
    with pytest.raises(CaptureError, match="CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"):
        cuda_driver.check((900,), "while x")


def test_nodes_are_put_in_execution_order() -> None:
    assert execution_order(4, [(2, 0), (0, 3), (3, 1)]) == [2, 0, 3, 1]
    assert execution_order(3, []) == [0, 1, 2]
    with pytest.raises(CaptureError, match="circle"):
        execution_order(2, [(0, 1), (1, 0)])


def test_words_of_an_argument() -> None:
    packed = (0x1122334455667788).to_bytes(8, "little") + (5).to_bytes(8, "little") + b"\1\2\3\4"
    assert aligned_words(packed) == (0x1122334455667788, 5)
    assert aligned_words(b"\0" * 7) == ()
