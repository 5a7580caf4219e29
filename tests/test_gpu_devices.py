"""The CUDA device on a real card: loading, launching, capturing, reading back, timing, faults, telemetry, tenants."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from devices_rig import Rig

from kernels_vendor import Vendor
from tuner import devices
from tuner.arms import Arm, Artifact, CodeLaunch, Pointer, Scalar, Step, Target
from tuner.devices.cuda import CudaDevice
from tuner.devices.cuda_driver import check, driver
from tuner.errors import ArmConstraintError, ArmError, CaptureError, MemoryPlanError
from tuner.problem import Problem, Shape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not any(d.kind == "cuda" for d in devices.discover()), reason="needs an NVIDIA GPU"),
]

SOURCE = r"""
extern "C" __global__ void axpb(const float* x, float* y, int n, float a, long long b) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i] + (float)b;
}
// One step of a chain: each launch reads what the launch before it wrote.
extern "C" __global__ void chain(const float* from, float* to) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  to[threadIdx.x] = from[threadIdx.x] + 1.0f;
}
extern "C" __global__ void shared_sum(const float* x, float* y, int n) {
  extern __shared__ float tile[];
  for (int i = threadIdx.x; i < n; i += blockDim.x) tile[n - 1 - i] = x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = tile[i];
}
extern "C" __global__ void spin(long long ns) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
  do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < ns);
}
extern "C" __global__ void stray(float* p) { p[threadIdx.x] = 1.0f; }
"""
PROBLEM = Problem.of(Shape(1, 512, 512), "bf16")


@cache
def cubin(arch: str) -> bytes:
    """Compile with NVRTC."""
    from cuda.bindings import nvrtc

    def done(result: tuple[object, ...]) -> object:
        assert int(result[0]) == 0, result  # type: ignore[call-overload]
        return result[1] if len(result) > 1 else None

    program = done(nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"k.cu", 0, [], []))
    options = [f"--gpu-architecture={arch}".encode()]
    done(nvrtc.nvrtcCompileProgram(program, len(options), options))
    size = done(nvrtc.nvrtcGetCUBINSize(program))
    code = b" " * int(size)  # type: ignore[call-overload]
    done(nvrtc.nvrtcGetCUBIN(program, code))
    return code


@pytest.fixture(scope="module")
def device() -> CudaDevice:
    opened = devices.open_device(devices.choose("cuda"))
    assert isinstance(opened, CudaDevice)
    return opened


def artifact(target: Target, *steps: Step, code: bytes | None = None) -> Artifact:
    code = cubin(target.arch) if code is None else code
    return Artifact(Arm.of("hip", "test"), PROBLEM, target, code, "c" * 64, "s" * 64, steps)


def scalars(count: int) -> tuple[Scalar, ...]:
    """Placeholders: `launch` gets the values, and of the step only their number counts."""
    return tuple(Scalar("ptr", 0) for _ in range(count))


AXPB = Step("axpb", (4, 1, 1), (256, 1, 1), scalars(5))
CHAIN = Step("chain", (1, 1, 1), (64, 1, 1), scalars(2), dependent=True)
SPIN = Step("spin", (1, 1, 1), (1, 1, 1), scalars(1))


def test_facts_agree_with_torch(device: CudaDevice) -> None:
    info, seen = device.info, torch.cuda.get_device_properties(device.info.index)
    assert info.name == seen.name and info.arch == f"sm_{seen.major}{seen.minor}"
    assert info.units == seen.multi_processor_count and info.llc_bytes == seen.L2_cache_size
    assert info.uuid.removeprefix("GPU-") == str(seen.uuid).removeprefix("GPU-")
    assert abs(info.memory_bytes - seen.total_memory) < 2**30
    assert info.warp == 32 and not info.integrated and info.pci.count(":") == 2
    which = driver().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    assert device.target.shared_bytes == check(driver().cuDeviceGetAttribute(which, info.index), "")
    assert devices.choose(info.uuid) == info == devices.choose(info.pci) == devices.choose(info.arch)
    print(info)


def test_arguments_of_every_kind_reach_the_kernel(device: CudaDevice) -> None:
    x = torch.randn(1000, device="cuda")
    y = torch.zeros(1000, device="cuda")
    module = device.load(artifact(device.target, AXPB))
    values = [("ptr", x.data_ptr()), ("ptr", y.data_ptr()), ("i32", 999), ("f32", -0.5), ("i64", -(2**33))]
    module.launch(AXPB, values)
    device.synchronize()
    expected = (-0.5 * x.double() - 2.0**33).float()
    assert torch.equal(y[:999], expected[:999]) and y[999] == 0
    facts = module.attributes("axpb")
    assert 0 < int(facts["registers"]) < 256 and facts["local_bytes"] == 0 and int(facts["max_threads"]) >= 256


def test_launches_go_to_the_current_stream(device: CudaDevice) -> None:
    x, y = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    module = device.load(artifact(device.target, SPIN, AXPB))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        module.launch(SPIN, [("i64", 20_000_000)])
        assert not side.query() and torch.cuda.default_stream().query()
    module.launch(AXPB, [("ptr", x.data_ptr()), ("ptr", y.data_ptr()), ("i32", 1000), ("f32", 1.0), ("i64", 1)])
    torch.cuda.default_stream().synchronize()
    assert not side.query(), "the second launch waited for the side stream"
    device.synchronize()
    assert side.query() and bool((y == 2).all())


def test_dependent_launches_run_in_order_plain_and_captured(device: CudaDevice) -> None:
    if device.target.arch < "sm_90":
        pytest.skip("needs sm_90")
    cells = torch.zeros(201, 64, device="cuda")
    module = device.load(artifact(device.target, CHAIN))

    def enqueue() -> None:
        for i in range(200):
            module.launch(CHAIN, [("ptr", cells[i].data_ptr()), ("ptr", cells[i + 1].data_ptr())])

    enqueue()
    device.synchronize()
    expected = torch.arange(201.0, device="cuda")[:, None].expand(201, 64)
    assert torch.equal(cells, expected)
    cells.zero_()
    replay = device.capture(enqueue)
    device.synchronize()
    assert not cells.any(), "capturing ran the kernels"
    replay.replay()
    device.synchronize()
    assert torch.equal(cells, expected)
    nodes = replay.nodes()
    assert [node.words for node in nodes] == [(cells[i].data_ptr(), cells[i + 1].data_ptr()) for i in range(200)]
    assert {(node.kernel, node.grid, node.block) for node in nodes} == {("chain", (1, 1, 1), (64, 1, 1))}


def test_copies_and_fills_stand_among_the_nodes(device: CudaDevice) -> None:
    source, sink = torch.ones(4096, device="cuda"), torch.zeros(4096, device="cuda")
    names = [node.kernel for node in device.capture(lambda: (sink.copy_(source), sink.zero_()) and None).nodes()]
    assert len(names) == 2 and names[0] == "memcpy", names


def test_every_vendor_form_is_right_and_its_weights_are_seen(device: CudaDevice) -> None:
    family = Vendor()
    for text in ("1x512x512", "1x360x333", "3x1024x256"):
        problem = Problem.of(Shape.parse(text), "bf16")
        for arm in family.fixed(problem, device.target):
            rig = Rig.of(problem.shape, seed=2, device="cuda")
            before = torch.backends.cuda.preferred_blas_library()
            launch = family.bind(family.build(problem, arm, device.target), rig, rig, device)  # type: ignore[arg-type]
            replay = device.capture(lambda launch=launch: (launch(0), launch(1)) and None)  # type: ignore[misc]
            assert torch.backends.cuda.preferred_blas_library() == before
            replay.replay()
            device.synchronize()
            x = rig.inputs.double()
            for i in (0, 1):
                w = rig.weights[i].double()
                ref, bound = x @ w.t(), x.abs() @ w.abs().t()
                limit = 2.0**-8 * ref.abs() + 4 * 2.0**-24 * bound
                assert bool(((rig.output(i).double() - ref).abs() <= limit).all()), f"{problem} {arm} {i}"
            nodes = replay.nodes()
            print(problem, arm.kernel, [node.kernel[:60] for node in nodes[: len(nodes) // 2]])
            halves = [{word for node in part for word in node.words} for part in
                      (nodes[: len(nodes) // 2], nodes[len(nodes) // 2 :])]  # fmt: skip
            for i in (0, 1):
                assert rig.weights[i].data_ptr() in halves[i], f"{problem} {arm}: weights of slot {i} not in the graph"
                assert rig.weights[1 - i].data_ptr() not in halves[i], f"{problem} {arm}: wrong slot"


def test_the_clock_agrees_with_the_cards_own_timer(device: CudaDevice) -> None:
    module = device.load(artifact(device.target, SPIN))
    module.launch(SPIN, [("i64", 1000)])
    device.synchronize()
    once = device.time_us(lambda: module.launch(SPIN, [("i64", 5_000_000)]))
    assert 4_990 < once < 5_300
    replay = device.capture(lambda: [module.launch(SPIN, [("i64", 100_000)]) for _ in range(50)] and None)
    replay.replay()
    assert 4_990 < device.time_us(replay.replay) < 5_600


def test_a_launch_costs_few_microseconds_of_python(device: CudaDevice) -> None:
    x = torch.ones(1000, device="cuda")
    module = device.load(artifact(device.target, AXPB))
    values = [("ptr", x.data_ptr()), ("ptr", x.data_ptr()), ("i32", 1000), ("f32", 1.0), ("i64", 0)]

    def enqueue() -> None:
        for _ in range(500):
            module.launch(AXPB, values)

    device.capture(enqueue)
    begin = time.perf_counter()
    replay = device.capture(enqueue)
    middle = time.perf_counter()
    nodes = replay.nodes()
    print(
        f"capture {(middle - begin) * 2e3:.1f} us a launch, nodes {(time.perf_counter() - middle) * 2e3:.1f} us a node"
    )
    assert len(nodes) == 500
    assert (middle - begin) / 500 < 200e-6


def test_large_shared_memory_and_its_limit(device: CudaDevice) -> None:
    n = 16 * 1024
    x, y = torch.randn(n, device="cuda"), torch.zeros(n, device="cuda")
    step = Step("shared_sum", (1, 1, 1), (256, 1, 1), scalars(3), shared_bytes=4 * n)
    module = device.load(artifact(device.target, step))
    module.launch(step, [("ptr", x.data_ptr()), ("ptr", y.data_ptr()), ("i32", n)])
    device.synchronize()
    assert torch.equal(y, x.flip(0))
    too_much = Step("shared_sum", (1, 1, 1), (256, 1, 1), scalars(3), shared_bytes=300 * 1024)
    with pytest.raises(ArmConstraintError, match="needs 300 KB of"):
        module.launch(too_much, [("ptr", 0), ("ptr", 0), ("i32", 0)])


def test_refused_code_and_launches_cost_the_arm_only(device: CudaDevice) -> None:
    with pytest.raises(ArmError) as caught:
        device.load(artifact(device.target, AXPB, code=b"\x7fELF no cubin at all" * 20))
    assert not getattr(caught.value, "sticky", False)
    with pytest.raises(ArmError, match="CUDA_ERROR_NOT_FOUND"):
        device.load(artifact(device.target, Step("missing", (1, 1, 1), (1, 1, 1), ())))
    wide = Step("spin", (1, 1, 1), (2048, 1, 1), scalars(1))
    module = device.load(artifact(device.target, SPIN))
    with pytest.raises(ArmError, match="CUDA_ERROR_INVALID") as refused:
        module.launch(wide, [("i64", 1)])
    assert not refused.value.sticky  # type: ignore[attr-defined]
    module.launch(SPIN, [("i64", 1)])
    device.synchronize()


def test_a_failed_capture_is_said_and_leaves_the_device_usable(device: CudaDevice) -> None:
    module = device.load(artifact(device.target, SPIN))
    before = torch.cuda.current_stream()
    with pytest.raises(CaptureError, match="capture failed"):
        device.capture(torch.cuda.synchronize)
    assert torch.cuda.current_stream() == before

    def broken() -> None:
        module.launch(SPIN, [("i64", 1)])
        raise ArmError("my own words")

    with pytest.raises(ArmError, match="my own words"):
        device.capture(broken)
    assert torch.cuda.current_stream() == before
    replay = device.capture(lambda: module.launch(SPIN, [("i64", 1)]))
    replay.replay()
    device.synchronize()
    assert len(replay.nodes()) == 1
    assert bool((torch.ones(8, device="cuda") + 1 == 2).all())


def test_modules_come_and_go_under_replays(device: CudaDevice) -> None:
    rig = Rig.of(PROBLEM.shape, seed=1, device="cuda")
    step = Step("spin", (1, 1, 1), (1, 1, 1), (Scalar("i64", 10),))
    replays = []
    for _ in range(30):
        launch = CodeLaunch(artifact(device.target, step), rig, rig, device)
        replays.append(device.capture(lambda launch=launch: launch(0)))  # type: ignore[misc]
        del launch
        replays = replays[-5:]
    for replay in replays:
        replay.replay()
    device.synchronize()


def test_memory(device: CudaDevice) -> None:
    block = device.zeros(1001)
    assert block.numel() == 1001 and block.data_ptr() % 256 == 0 and not block.any()
    free = device.free_bytes()
    assert 0 < free <= device.info.memory_bytes
    with pytest.raises(MemoryPlanError, match="are needed and"):
        device.zeros(device.info.memory_bytes * 2)
    device.trim()


def test_a_stray_write_is_sticky() -> None:
    """In a process of its own, since the context is lost."""
    code = (
        "from test_gpu_devices import artifact, scalars\n"
        "from tuner import devices\n"
        "from tuner.arms import Step\n"
        "from tuner.errors import ArmError\n"
        "d = devices.open_device(devices.choose('cuda'))\n"
        "s = Step('stray', (1, 1, 1), (32, 1, 1), scalars(1))\n"
        "m = d.load(artifact(d.target, s))\n"
        "try:\n"
        "    m.launch(s, [('ptr', 0x10000)]); d.synchronize()\n"
        "except ArmError as e: print(e.sticky, e)\n"
        "try: print(d.time_us(lambda: None))\n"
        "except ArmError as e: print(e.sticky, e)\n"
    )
    folder = os.path.dirname(__file__)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and all(line.startswith("True illegal access") for line in lines), done


def test_telemetry(device: CudaDevice) -> None:
    module = device.load(artifact(device.target, SPIN))
    module.launch(SPIN, [("i64", 50_000_000)])
    reading = device.telemetry()
    device.synchronize()
    print(reading)
    assert 100 < float(reading["sm_clock_mhz"] or 0) < 5000
    assert 5 < float(reading["temperature_c"] or 0) < 110
    assert 5 < float(reading["power_w"] or 0) < float(reading["power_cap_w"] or 0) * 1.5
    assert isinstance(reading["throttle"], str) and reading["slowdown"] == ""
    assert int(reading["memory_used_bytes"] or 0) > 0
    begin = time.perf_counter()
    device.telemetry()
    device.tenants()
    assert time.perf_counter() - begin < 0.5


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process on the card that is no descendant of ours: its parent has ended."""
    hold = "import torch, time; x = torch.zeros(1 << 28, device='cuda'); print('up', flush=True); time.sleep(60)"
    parent = (
        "import subprocess, sys\n"
        f"p = subprocess.Popen([sys.executable, '-c', {hold!r}], stdout=subprocess.PIPE)\n"
        "p.stdout.readline(); print(p.pid, flush=True)"
    )
    pid = int(subprocess.run([sys.executable, "-c", parent], stdout=subprocess.PIPE, check=True, timeout=120).stdout)
    yield pid
    os.kill(pid, signal.SIGKILL)


def test_tenants(device: CudaDevice, stranger: int) -> None:
    found = {entry["pid"]: entry for entry in device.tenants()}
    print(found)
    assert os.getpid() not in found
    assert stranger in found, "this container hides other processes from NVML" if not found else found
    assert int(found[stranger].get("memory_bytes", 1 << 28)) >= 1 << 28


def test_the_address_of_a_named_argument_is_in_the_graph(device: CudaDevice) -> None:
    rig = Rig.of(PROBLEM.shape, seed=1, device="cuda")
    step = Step(
        "axpb", (1, 1, 1), (32, 1, 1),
        (Pointer("weight"), Pointer("output"), Scalar("i32", 4), Scalar("f32", 1.0), Scalar("i64", 0)),
    )  # fmt: skip
    launch = CodeLaunch(artifact(device.target, step), rig, rig, device)
    nodes = device.capture(lambda: (launch(0), launch(1)) and None).nodes()
    assert [node.words[0] for node in nodes] == [rig.weights[0].data_ptr(), rig.weights[1].data_ptr()]
    assert [node.words[1] for node in nodes] == [rig.output(0).data_ptr(), rig.output(1).data_ptr()]
