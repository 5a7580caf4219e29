"""What only a real NVIDIA GPU can show: arms over odd shapes, lies that must be caught, and a loaded config."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import statistics
import sys
from pathlib import Path

import pytest
import torch
from bench_double import FreezingSlots

import tuner
from tuner.arms import Arm, Artifact, Value
from tuner.devices import choose, open_device
from tuner.errors import ArmCorrectnessError
from tuner.instrument import selfcheck
from tuner.instrument.session import Session
from tuner.instrument.timer import TimerSettings
from tuner.pool import CompilePool
from tuner.problem import Problem, Shape
from tuner.registry import available, builtin_families

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ODD = ("1x1x1", "1x17x33", "2x360x321", "3x2880x77", "5x4303x19", "8x1000x40", "1x4304x2001", "7x512x5")


@pytest.fixture(scope="module")
def device():
    return open_device(choose(None))


def session(device, text: str, seed: int = 1) -> Session:
    return Session(device, Problem.of(Shape.parse(text), "bf16"), "nk", seed, TimerSettings.of(device.info.kind))


def configs(space) -> list[dict[str, Value]]:
    """The default, and single changes of it that the space allows."""
    changes: list[dict[str, Value]] = [
        {},
        {"m_spec": False},
        {"rows": 16},
        {"rows": 4, "split_k": 4},
        {"pdl": True},
        {"pdl": True, "split_k": 2, "rows": 2},
        {"cache": "stream", "warps": 1, "unroll": 4},
        {"num_stages": 3, "rows": 2},
    ]
    found = []
    for change in changes:
        config = {**space.default, **{k: v for k, v in change.items() if k in space.default}}
        if space.violated(config) is None and config not in found:
            found.append(config)
    return found


def test_arms_of_every_family_are_right_over_odd_shapes(device, tmp_path: Path) -> None:
    usable, left_out = available(device.target)
    assert not left_out, "this machine should have every family"
    wanted = []
    for text in ODD:
        problem = Problem.of(Shape.parse(text), "bf16")
        for family in usable.values():
            spaces = family.spaces(problem, device.target)
            arms = (
                [s.arm(c) for s in spaces for c in configs(s)] if spaces else list(family.fixed(problem, device.target))
            )
            wanted += [(problem, arm) for arm in arms if family.role != "ceiling"]
    with CompilePool(12, device.target, None, tmp_path) as pool:
        for key in wanted:
            pool.submit(*key)
        built = {key: pool.result(*key) for key in wanted}
    failed = [
        f"{problem} {arm}: {built[problem, arm].reason}" for problem, arm in wanted if not built[problem, arm].artifact
    ]
    for problem, group in itertools.groupby(wanted, key=lambda key: key[0]):
        place = session(device, str(problem.shape))
        for key in group:
            artifact = built[key].artifact
            if artifact is None:
                continue
            try:
                arm = place.bind(usable[artifact.arm.family], artifact)
                place.add_unit(arm, "self")
                place.block(arm, "self", 1)
                place.check(arm, "self")
            except ArmCorrectnessError as error:
                failed.append(f"{problem} {artifact.arm}: {error}")
    assert not failed, "\n".join(failed[:20])


def warm_and_cold(device, text: str) -> tuple[selfcheck.Check, selfcheck.Check, float]:
    """Structural checks of a warm and of a true rotation, and how much faster the warm one seems."""
    place = session(device, text)
    family = builtin_families()["hip"]
    artifact = family.build(place.problem, family.fixed(place.problem, device.target)[0], device.target)
    slots = FreezingSlots(place)
    arm = place.bind(family, artifact, slots)
    place.add_unit(arm, "self")
    cold, cold_us = selfcheck.structural(place, arm, "self"), statistics.median(place.block(arm, "self", 5))
    slots.frozen = True
    place.add_unit(arm, "self")
    warm, warm_us = selfcheck.structural(place, arm, "self"), statistics.median(place.block(arm, "self", 5))
    print(f"{text}: cold {cold_us:.2f} us, warm {warm_us:.2f} us")
    return warm, cold, cold_us / warm_us


def test_a_warm_timer_shows_in_the_addresses_at_the_headline_shape(device) -> None:
    warm, cold, _ = warm_and_cold(device, "1x4096x12288")
    assert cold.verdict == "ok"
    assert warm.verdict == "failed" and warm.figure.startswith("100.7 MB of 503.3 MB planned")


def test_a_warm_timer_shows_in_the_times_at_4096x4096(device) -> None:
    warm, _, speedup = warm_and_cold(device, "1x4096x4096")
    assert warm.verdict == "failed"
    assert speedup > 1.05


def test_a_plain_read_is_faster_on_one_buffer_than_rotated(device) -> None:
    place = session(device, "1x4096x4096")
    family = builtin_families()["ceiling"]
    artifact = family.build(place.problem, family.probe(place.problem, device.target)["read"], device.target)
    check = selfcheck.warm_probe(device, place, family, artifact)
    assert check.verdict == "ok", check.figure


def without_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the wait for the launch in front out of the Triton kernels, and nothing else."""
    import kernels_triton
    from kernels_triton import skinny_gemm

    source = Path(str(skinny_gemm.__file__)).read_text()
    planted, count = re.subn(r"tl\.extra\.cuda\.gdc_wait\(\)", "pass", source)
    assert count >= 2
    path = tmp_path / "planted_skinny_gemm.py"
    path.write_text(planted)
    spec = importlib.util.spec_from_file_location("planted_skinny_gemm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "planted_skinny_gemm", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(kernels_triton, "skinny_gemm", module)


def dependent(device, place: Session) -> Artifact:
    space = builtin_families()["triton"].spaces(place.problem, device.target)[0]
    config = {**space.default, "pdl": True, "rows": 4, "warps": 8, "cpt": 8, "unroll": 1}
    return builtin_families()["triton"].build(place.problem, space.arm(config), device.target)


@pytest.mark.parametrize("shape", ["1x4096x12288", "1x4096x4096"])
def test_a_dependent_launch_that_does_not_wait_fails_on_the_tape(
    device, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = session(device, shape)
    family = builtin_families()["triton"]
    right = place.bind(family, dependent(device, place))
    place.add_unit(right, "self")
    place.block(right, "self", 2)
    place.check(right, "self")
    without_wait(tmp_path, monkeypatch)
    planted = dependent(device, place)
    assert planted.code_hash != right.artifact.code_hash
    lying = place.bind(family, planted)  # one launch on its own is right, so the gate passes it
    place.add_unit(lying, "self")
    place.block(lying, "self", 2)
    with pytest.raises(ArmCorrectnessError, match="tape"):
        place.check(lying, "self")


def test_a_loaded_config_multiplies_as_torch_does(device) -> None:
    """`COLDTUNE_BEST` names the best.json of a run on this machine."""
    best = os.environ.get("COLDTUNE_BEST")
    if best is None:
        pytest.skip("COLDTUNE_BEST names no best.json")
    tuned = tuner.load(best)
    m, k, n = (int(part) for part in json.loads(Path(best).read_text())["shape"].split("x"))
    weight = (torch.randn(n, k, device="cuda") / k**0.5).bfloat16()
    x = torch.randn(m, k, device="cuda").bfloat16()
    assert tuned.ask(weight).status == "HIT", tuned.ask(weight)
    torch.testing.assert_close(tuned.pack(weight)(x).double(), x.double() @ weight.double().t(), rtol=2**-8, atol=2e-4)
    other = (torch.randn(n, k // 2, device="cuda") / k**0.5).bfloat16()  # another shape: torch does it
    assert tuned.ask(other).status == "MISS"
    y = tuned.pack(other)(x[:, : k // 2].contiguous())
    torch.testing.assert_close(y.double(), x[:, : k // 2].double() @ other.double().t(), rtol=2**-7, atol=1e-2)


def test_an_arm_key_is_the_same_on_every_machine() -> None:
    assert (
        Arm.of("triton", "skinny_gemm", {"rows": 4, "pdl": True}).key
        == Arm.of("triton", "skinny_gemm", {"pdl": True, "rows": 4}).key
    )
