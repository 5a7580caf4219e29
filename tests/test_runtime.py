"""A loaded config: HIT, MISS, STALE, and products that equal torch's. The vendor family runs for real on the host."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tuner
from kernels_vendor import Vendor
from tuner import runtime
from tuner.arms import Arm
from tuner.devices import discover, target_of
from tuner.errors import RefusedError, UsageError
from tuner.problem import Problem, Shape
from tuner.store import versions

M, K, N = 2, 40, 24
Make = Callable[..., Path]


def content() -> dict[str, Any]:
    """A config of a real vendor form on this host, as the export would write it."""
    info = discover()[-1]
    problem = Problem.of(Shape(M, K, N), "bf16")
    arm = Arm.of("vendor", "mm_out.cpu.nk")
    artifact = Vendor().build(problem, arm, target_of(info))
    return {
        "schema": 1,
        "route": "vendor",
        "reason": "the chosen arm does not beat it",
        "shape": f"{M}x{K}x{N}",
        "weights": "bf16",
        "device": {"kind": info.kind, "name": info.name, "arch": info.arch, "units": info.units},
        "versions": {**versions(), **info.versions},
        "family": arm.family,
        "kernel": arm.kernel,
        "config": {},
        "source_hash": artifact.source_hash,
        "code_hash": artifact.code_hash,
        "packing": {"layout": "nk", "operands": [], "workspaces": []},
        "evidence": {
            "verdict": "SAME",
            "baseline": "vendor/mm_out.cpu.nk",
            "neighbour": "plain",
            "ratio": 1.0,
            "interval": [0.99, 1.01],
            "median_us": 1.0,
            "baseline_median_us": 1.0,
            "protocol_sha256": "0" * 64,
            "attempt": 1,
            "attempts": 1,
            "rehearsal": True,
        },
        "plugin": None,
    }


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def write(**changes: Any) -> Path:
        path = tmp_path / "best.json"
        path.write_text(json.dumps({**content(), **changes}))
        return path

    return write


def weight(seed: int = 1) -> torch.Tensor:
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).bfloat16()


def close(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> bool:
    """Within one rounding to bf16 of the float64 product."""
    want = x.double() @ w.double().t()
    bound = 2.0**-8 * want.abs() + 2.0**-20 * (x.double().abs() @ w.double().abs().t())
    return bool(((y.double() - want).abs() <= bound).all())


@pytest.mark.parametrize("lead", [(M,), (1, M), (M, 1), (1, 2, 1)])
def test_a_hit_computes_the_product_for_any_leading_shape(make: Make, lead: tuple[int, ...]) -> None:
    loaded = tuner.load(make())
    w = weight()
    packed = loaded.pack(w)
    assert str(packed.answer) == "HIT" == str(loaded.ask(w))
    x = torch.randn(*lead, K).bfloat16()
    y = packed(x)
    assert y.shape == (*lead, N) and y.dtype == torch.bfloat16
    assert close(y.reshape(M, N), x.reshape(M, K), w)
    assert torch.equal(loaded(x), y)


def test_each_packed_weight_is_its_own_and_outputs_do_not_overlap(make: Make) -> None:
    loaded = tuner.load(make())
    first, second = weight(1), weight(2)
    one, two = loaded.pack(first), loaded.pack(second)
    x = torch.randn(M, K).bfloat16()
    a, b = one(x), two(x)
    assert close(a, x, first) and close(b, x, second)
    assert torch.equal(loaded(x), b)


def test_an_unaligned_or_strided_x_is_copied_not_misread(make: Make) -> None:
    packed = tuner.load(make()).pack(weight())
    buffer = torch.randn(M * K + 1).bfloat16()
    odd = buffer[1:].view(M, K)
    assert odd.data_ptr() % 16 != 0
    strided = torch.randn(K, M).bfloat16().t()
    for x in (odd, strided):
        assert close(packed(x), x, weight())


def test_other_rows_and_gradients_go_to_torch(make: Make) -> None:
    packed = tuner.load(make()).pack(weight())
    x = torch.randn(5, K).bfloat16()
    assert torch.equal(packed(x), torch.nn.functional.linear(x, weight()))
    needs = torch.randn(M, K).bfloat16().requires_grad_()
    assert packed(needs).requires_grad


def test_the_arm_really_runs(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tuner.load(make()).pack(weight())

    def never(*_: object) -> None:
        raise AssertionError("torch was used")

    monkeypatch.setattr(torch.nn.functional, "linear", never)
    packed(torch.randn(M, K).bfloat16())
    with pytest.raises(AssertionError):
        packed(torch.randn(M + 1, K).bfloat16())


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(M, K + 1, dtype=torch.bfloat16), f"K={K}"),
        (torch.zeros(M, K), "float32"),
        (torch.zeros((), dtype=torch.bfloat16), f"K={K}"),
    ],
)
def test_a_wrong_x_is_named(make: Make, x: torch.Tensor, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        tuner.load(make()).pack(weight())(x)


def test_a_compiled_arm_is_built_once_and_computes_the_product(make: Make) -> None:
    from kernels_hip import Hip

    info = discover()[-1]
    target = target_of(info)
    if reason := Hip().missing(target):
        pytest.skip(reason)
    problem = Problem.of(Shape(M, K, N), "bf16")
    arm = Hip().fixed(problem, target)[0]
    artifact = Hip().build(problem, arm, target)
    hashes = {"source_hash": artifact.source_hash, "code_hash": artifact.code_hash}
    packed = tuner.load(make(family="hip", kernel=arm.kernel, config=arm.config, route="arm", **hashes)).pack(weight())
    assert str(packed.answer) == "HIT"
    for seed in range(3):
        x = torch.randn(M, K, generator=torch.Generator().manual_seed(seed)).bfloat16()
        assert close(packed(x), x, weight())


def test_calling_before_packing_says_so(make: Make) -> None:
    with pytest.raises(UsageError, match=r"pack\(weight\)"):
        tuner.load(make())(torch.zeros(M, K))


def device(**changes: Any) -> dict[str, Any]:
    return {"device": {**content()["device"], **changes}}


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        (device(name="Other CPU"), "MISS", "name Other CPU"),
        (device(units=999), "MISS", "units 999"),
        (device(kind="cuda", arch="sm_90"), "MISS", "kind cuda"),
        ({"shape": f"{M}x{K}x{N + 8}"}, "MISS", f"{N}x{K}"),
        ({"versions": {**versions(), "torch": "1.0"}}, "STALE", "torch was 1.0"),
        ({"source_hash": "0" * 64}, "STALE", "source"),
        ({"code_hash": "0" * 64}, "STALE", "compiler"),
        ({"family": "none"}, "STALE", "'none'"),
        ({"family": "none", "plugin": "mine.py"}, "STALE", "plugin="),
        ({"kernel": "rm.cpu.nk"}, "STALE", "not in the space"),
        ({"config": {"x": 1}}, "STALE", "not in the space"),
    ],
)
def test_what_does_not_fit_is_computed_by_torch_and_said_once(
    make: Make, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], status: str, words: str
) -> None:
    runtime._said.clear()
    with caplog.at_level(logging.INFO, logger="coldtune"):
        loaded = tuner.load(make(**changes))
        packed = loaded.pack(weight())
        loaded.pack(weight())
    assert packed.answer.status == status and words in packed.answer.reason
    assert len(caplog.records) == 1 and "torch computes" in caplog.records[0].getMessage()
    x = torch.randn(M, K).bfloat16()
    assert torch.equal(packed(x), torch.nn.functional.linear(x, weight()))


def test_versions_that_change_nothing_do_not_make_a_config_stale(make: Make) -> None:
    loaded = tuner.load(make(versions={**versions(), "numpy": "0.1", "optuna": "0.1"}))
    assert str(loaded.ask(weight())) == "HIT"


PLUGIN = """
from kernels_vendor import Vendor
from tuner.arms import Arm, Artifact


class Mine(Vendor):
    name = "mine"

    def fixed(self, problem, target):
        return (Arm.of("mine", "mm_out.cpu.nk"),)

    def build(self, problem, arm, target):
        return Artifact(arm, problem, target, b"", "c" * 64, "d" * 64)


FAMILIES = [Mine()]
"""


def test_a_plugin_runs_only_if_the_caller_gives_it(make: Make, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    path = make(family="mine", plugin=str(tmp_path / "mine.py"), source_hash="d" * 64, code_hash="c" * 64)
    assert tuner.load(path).ask(weight()).status == "STALE"
    packed = tuner.load(path, plugin=tmp_path / "mine.py").pack(weight())
    assert packed.answer.status == "HIT"
    x = torch.randn(M, K).bfloat16()
    assert close(packed(x), x, weight())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": 2}, "Update"),
        ({"extra": 1}, "extra"),
        ({"route": "anywhere"}, "route"),
        ({"config": {"cpt": {"a": 1}}}, "config"),
        ({"evidence": {}}, "evidence"),
    ],
)
def test_a_wrong_file_is_refused(make: Make, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RefusedError, match=words):
        tuner.load(make(**changes))


def test_damaged_large_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_text('{"schema": 1')
    with pytest.raises(RefusedError, match="damaged"):
        tuner.load(path)
    path.write_text(" " * (runtime.LIMIT_BYTES + 1))
    with pytest.raises(RefusedError, match="more than"):
        tuner.load(path)
    with pytest.raises(UsageError, match="does not exist"):
        tuner.load(tmp_path / "none.json")


def test_an_arm_outside_the_space_is_never_built() -> None:
    from search_spaces import skinny_gemm
    from tuner.arms import Target

    target = Target("host", "x86_64", 32, 2)
    problem = Problem.of(Shape(1, 64, 48), "bf16")
    space = skinny_gemm.space("hip", problem, target)

    class Hip:
        name = "hip"

        def fixed(self, *_: object) -> tuple[Arm, ...]:
            return ()

        def spaces(self, *_: object) -> tuple[object, ...]:
            return (space,)

    def known(**changes: Any) -> bool:
        return runtime.in_space(Hip(), Arm.of("hip", "skinny_gemm", {**space.default, **changes}), problem, target)

    assert known()
    assert not known(rows='1; __import__("os")')
    assert not known(rows=True)
    assert not known(m_spec=1)
    assert not known(rows=3)
    assert not known(cpt=16, split_k=8)
    assert not known(other=1)


def test_the_version_is_known_and_import_is_lazy() -> None:
    assert tuner.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        tuner.nothing_of_the_kind  # noqa: B018
