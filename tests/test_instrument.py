"""The cold-cache timer on a double: rotation, tape, gate, timed unit, and the lies that it must catch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bench_double import LLC_BYTES, DoubleDevice, DoubleFamily, FreezingSlots, TorchLaunch, artifact
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import ArmCorrectnessError, MemoryPlanError
from tuner.formats import Operand
from tuner.instrument import rotation, selfcheck
from tuner.instrument.gate import reference
from tuner.instrument.session import Session
from tuner.instrument.tape import OutputTape
from tuner.instrument.timer import TimerSettings
from tuner.problem import Problem, Shape

MIB = 1 << 20
TIMER = TimerSettings(min_launches=20, min_window_us=0.0, untimed_us=0.0, warmup_us=0.0, max_nodes=8)


def problem(text: str) -> Problem:
    return Problem.of(Shape.parse(text), "bf16")


def session(text: str = "1x64x48", *, graphs: bool = True, seed: int = 1) -> Session:
    return Session(DoubleDevice(graphs), problem(text), "nk", seed, TIMER)  # type: ignore[arg-type]


def operands(text: str) -> tuple[Operand, ...]:
    p = problem(text)
    return p.format.operands(p.shape, "nk")


@pytest.mark.parametrize(
    ("shape", "llc_bytes", "slots"),
    [
        ("1x4096x12288", 96 * MIB, 8),  # RX 7900 XTX: the published study's number
        ("1x4096x12288", 60 * MIB, 5),  # H200
        ("1x4096x12288", 256 * MIB, 22),  # MI300X
        ("1x4096x128256", 60 * MIB, 2),  # a large vocabulary
        ("1x64x8", 60 * MIB, 4096),  # the most
    ],
)
def test_the_plan_has_the_slots_that_the_design_names(shape: str, llc_bytes: int, slots: int) -> None:
    assert rotation.plan(operands(shape), llc_bytes, 1 << 40).slots == slots


def test_short_memory_takes_fewer_slots_and_says_so() -> None:
    weights = 4096 * 12288 * 2
    plan = rotation.plan(operands("1x4096x12288"), 96 * MIB, free_bytes=3 * weights + 1000)
    assert plan.slots == 3
    assert "memory is short: 3 slots instead of 8" in plan.note


def test_no_memory_is_an_error_with_both_numbers() -> None:
    with pytest.raises(MemoryPlanError, match=r"2 slots of 100\.7 MB.*need 0\.20 GB; 0\.10 GB are free"):
        rotation.plan(operands("1x4096x12288"), 96 * MIB, free_bytes=100_000_000)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 4))
def test_reuse_distance_of_whole_rotations_is_the_ring(slots: int, rotations: int, tail: int) -> None:
    ring = [i % slots for i in range(slots * rotations)]
    assert rotation.reuse_distance(ring, 10) == slots * 10


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_reuse_distance_is_the_least_count_of_distinct_slots(touched: list[int]) -> None:
    twice = touched * 3
    least = min(
        len(set(twice[i:j])) for i in range(len(touched)) for j in range(i + 1, len(twice)) if twice[i] == twice[j]
    )
    assert rotation.reuse_distance(touched, 1) == least


def test_an_unknown_address_gives_no_reuse_distance() -> None:
    assert rotation.reuse_distance([0, None, 1], 1) is None


def test_slots_lie_apart_and_differ() -> None:
    ring = session().rotation
    assert ring.count >= 8 * LLC_BYTES / (64 * 48 * 2)
    addresses = [ring.operand(i, "weight").data_ptr() for i in range(ring.count)]
    assert len(set(addresses)) == ring.count
    assert all(address % 256 == 0 for address in addresses)
    assert not torch.equal(ring.operand(0, "weight"), ring.operand(1, "weight"))
    assert [ring.slot_of(address) for address in addresses] == list(range(ring.count))
    assert ring.slot_of(addresses[0] - 512) is None


def test_weights_are_random_with_variance_one_over_k() -> None:
    weight = session("1x256x64").rotation.operand(1, "weight").float()
    assert abs(float(weight.std()) * 16 - 1) < 0.05
    assert abs(float(weight.mean())) < 0.01


@pytest.mark.parametrize("shape", ["1x64x48", "3x17x5", "8x40x1", "1x7x33"])
def test_each_launch_reads_what_was_written_just_before(shape: str) -> None:
    p = problem(shape)
    tape = OutputTape(p, 600, "cpu", torch.Generator().manual_seed(1))
    base = tape.buffer.data_ptr()
    for i in range(1, 600):
        x, y = tape.activation(i), tape.output(i)
        assert x.shape == (p.shape.m, p.shape.k) and y.shape == (p.shape.m, p.shape.n)
        assert (x.data_ptr() - base) % 16 == 0
        gap = (y.data_ptr() - x.data_ptr()) // 2 - x.numel()
        assert 0 <= gap < 8


def test_poison_keeps_the_heads() -> None:
    tape = OutputTape(problem("1x64x48"), 300, "cpu", torch.Generator().manual_seed(1))
    tape.output(3).zero_()
    tape.poison(2, 3)
    assert bool(tape.output(3).isnan().all())
    assert not bool(tape.activation(0).isnan().any())
    assert not bool(tape.activation(256).isnan().any())


def test_the_reference_is_the_float64_product() -> None:
    p = problem("3x33x7")
    s = Session(DoubleDevice(), p, "nk", 3, TIMER)  # type: ignore[arg-type]
    x = torch.randn(3, 33, dtype=torch.bfloat16)
    weight = s.rotation.operand(0, "weight").double()
    ref = reference(p, s.rotation.operands(0), "nk", x)
    torch.testing.assert_close(ref.value, x.double() @ weight.t(), rtol=1e-13, atol=1e-13)
    bound = 2.0**-8 * ref.value.abs() + 4 * 2.0**-24 * (x.double().abs() @ weight.abs().t())
    torch.testing.assert_close(ref.bound, bound, rtol=1e-12, atol=0)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("shape", ["1x64x48", "3x17x5", "8x40x1", "1x1x1"])
def test_a_right_arm_passes_gate_blocks_and_tape(shape: str, graphs: bool) -> None:
    s = session(shape, graphs=graphs)
    arm = s.bind(DoubleFamily(), artifact(s.problem))
    unit = s.add_unit(arm, "self")
    assert unit.launches >= 20
    for _ in range(12):
        samples = s.block(arm, "self", 3)
        assert len(samples) == 3 and all(us > 0 for us in samples)
        assert s.check(arm, "self") < 2.0**-8


def test_graphs_hold_whole_rotations_in_few_nodes() -> None:
    s = session()
    arm = s.bind(DoubleFamily(), artifact(s.problem))
    unit = s.add_unit(arm, "self")
    assert unit.launches % s.rotation.count == 0
    assert len(unit.nodes()) == unit.launches


class Warm(TorchLaunch):
    """Reads one slot for ever."""

    def __call__(self, i: int) -> None:
        weight = self.slots.operand(0, "weight")
        self.device.log += [type(self.device.log[0])("product", (weight.data_ptr(),))] if self.device.log else []
        self.compute(i, weight)


class SkipsTail(TorchLaunch):
    """Leaves the last output unwritten."""

    def compute(self, i: int, weight: torch.Tensor) -> None:
        y = self.tape.activation(i).float() @ weight.float().t()
        self.tape.output(i)[:, :-1].copy_(y[:, :-1])


class Overruns(TorchLaunch):
    """Writes one element behind its output."""

    def compute(self, i: int, weight: torch.Tensor) -> None:
        super().compute(i, weight)
        out = self.tape.output(i)
        torch.as_strided(out, (1,), (1,), out.storage_offset() + out.numel()).fill_(0.0)


class Underruns(TorchLaunch):
    """Writes one element in front of its output."""

    def compute(self, i: int, weight: torch.Tensor) -> None:
        super().compute(i, weight)
        out = self.tape.output(i)
        torch.as_strided(out, (1,), (1,), out.storage_offset() - 1).fill_(0.0)


class RightAtFirst(TorchLaunch):
    """Right for its first ten calls."""

    def compute(self, i: int, weight: torch.Tensor) -> None:
        super().compute(i, weight)
        if self.calls > 10:
            self.tape.output(i).mul_(1.5)


class Cached(TorchLaunch):
    """Skips its work where an output is there already, and for every call after the first rotation."""

    def compute(self, i: int, weight: torch.Tensor) -> None:
        if self.calls < 300:
            super().compute(i, weight)


class SlightlyOff(TorchLaunch):
    """One element wrong by two units in the last place."""

    def compute(self, i: int, weight: torch.Tensor) -> None:
        super().compute(i, weight)
        out = self.tape.output(i).view(-1)
        at = int(out.abs().argmax())
        out[at] = out[at] * (1 + 2.0**-6)


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        (SkipsTail, r"1 of 48 outputs are NaN or were never written"),
        (Overruns, r"1 elements behind the output were written"),
        (Underruns, r"1 elements in front of the output were written"),
        (SlightlyOff, r"1 of 48 outputs are wrong; worst at m=0"),
    ],
)
def test_the_gate_refuses(lie: type[TorchLaunch], message: str) -> None:
    s = session()
    with pytest.raises(ArmCorrectnessError, match=message):
        s.bind(DoubleFamily(lie), artifact(s.problem))


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("lie", [RightAtFirst, Cached])
def test_the_tape_refuses(lie: type[TorchLaunch], graphs: bool) -> None:
    s = session(graphs=graphs)
    arm = s.bind(DoubleFamily(lie), artifact(s.problem))
    s.add_unit(arm, "self")
    with pytest.raises(ArmCorrectnessError, match="tape"):
        for _ in range(30):
            s.block(arm, "self", 2)
            s.check(arm, "self")


def test_a_warm_rotation_shows_in_the_addresses() -> None:
    s = session()
    slots = FreezingSlots(s)
    arm = s.bind(DoubleFamily(), artifact(s.problem), slots)
    slots.frozen = True
    s.add_unit(arm, "self")
    check = selfcheck.structural(s, arm, "self")
    assert check.verdict == "failed" and check.figure.startswith("0.0 MB of 0.1 MB planned")
    slots.frozen = False
    s.add_unit(arm, "self")
    assert selfcheck.structural(s, arm, "self").verdict == "ok"


def test_an_arm_that_reads_another_slot_is_wrong() -> None:
    s = session()
    with pytest.raises(ArmCorrectnessError, match="input 2"):
        s.bind(DoubleFamily(Warm), artifact(s.problem))


def test_the_same_seed_gives_the_same_data() -> None:
    first, again, other = session(seed=5), session(seed=5), session(seed=6)
    assert torch.equal(first.rotation.operand(3, "weight"), again.rotation.operand(3, "weight"))
    assert not torch.equal(first.rotation.operand(3, "weight"), other.rotation.operand(3, "weight"))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**30))
def test_long_tapes_stay_finite(m: int, k: int, n: int, seed: int) -> None:
    timer = replace(TIMER, min_launches=300)
    s = Session(DoubleDevice(), problem(f"{m}x{k}x{n}"), "nk", seed, timer)  # type: ignore[arg-type]
    arm = s.bind(DoubleFamily(), artifact(s.problem))
    s.add_unit(arm, "self")
    s.block(arm, "self", 1)
    assert s.check(arm, "self") < 0.01
