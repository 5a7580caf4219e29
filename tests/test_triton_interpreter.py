"""The Triton kernels against float64, run by Triton's interpreter: every size, tail and form, no GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from triton_interpreter import Run, round_to_bf16

from search_spaces.skinny_gemm import block_k
from tuner.arms import Target, Value

CUDA = Target("cuda", "sm_90", 32, 132)
AMD = Target("hip", "gfx942", 64, 304)


def config(**changes: Value) -> dict[str, Value]:
    base: dict[str, Value] = {
        "layout": "nk", "cpt": 2, "rows": 1, "warps": 1, "split_k": 1, "unroll": 1, "m_spec": True,
        "num_stages": 1, "cache": "default", "pdl": False,
    }  # fmt: skip
    return {**base, **changes}


def check(run: Run) -> None:
    run.launch()
    assert run.worst_error() <= 1.0
    assert run.guards_hold()


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ("1x128x4", {}),  # whole blocks, whole rows
        ("1x64x1", {}),  # one block
        ("1x1x1", {"cpt": 1}),  # one weight
        ("1x33x3", {"cpt": 1}),  # odd K: one weight behind the first block
        ("1x127x5", {"cpt": 1, "rows": 4}),  # odd K and an odd number of rows
        ("1x200x7", {"rows": 2, "cpt": 8}),  # K shorter than one block
        ("1x192x5", {"rows": 4, "num_stages": 3}),  # the pipelined loop
        ("1x202x5", {"rows": 4, "num_stages": 2}),  # the pipelined loop with a tail
        ("1x704x2", {"unroll": 1}),  # 11 blocks: the loop that is not unrolled
        ("1x706x3", {"rows": 2}),  # the same with a tail
        ("1x2576x3", {"rows": 16, "cpt": 16}),  # 256 weights a thread and block: no block ahead
        ("1x202x5", {"rows": 2, "pdl": True}),  # dependent launch: one block before the wait
        ("1x202x5", {"rows": 2, "pdl": True, "num_stages": 3}),  # three of four blocks before the wait
        ("1x706x2", {"pdl": True, "num_stages": 3}),  # the first of many
        ("1x256x17", {"rows": 16, "warps": 2, "cache": "stream"}),
    ],
)
def test_m1(shape: str, changes: dict[str, Value]) -> None:
    check(Run(shape, config(**changes), CUDA))


@pytest.mark.parametrize("m", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("k", "rows", "stages"), [(128, 2, 1), (98, 4, 2), (706, 2, 1)])
def test_general_by_multiply_and_add(m: int, k: int, rows: int, stages: int) -> None:
    check(Run(f"{m}x{k}x5", config(m_spec=False, rows=rows, num_stages=stages), CUDA, seed=m))


@pytest.mark.parametrize("target", [CUDA, AMD], ids=lambda t: t.arch)
@pytest.mark.parametrize(
    ("shape", "warps", "pdl"), [("1x128x16", 1, True), ("3x202x21", 2, False), ("8x96x5", 2, True)]
)
def test_general_by_matrix_unit(target: Target, shape: str, warps: int, pdl: bool) -> None:
    run = Run(shape, config(m_spec=False, rows=16, warps=warps, num_stages=2, pdl=pdl), target)
    assert run.plan.constants["MATRIX_UNIT"]
    check(run)


@pytest.mark.parametrize("target", [CUDA, AMD], ids=lambda t: t.arch)
@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ("1x256x3", {"split_k": 2}),  # even parts
        ("1x202x5", {"split_k": 2, "rows": 4}),  # the last part has a tail
        ("1x66x3", {"split_k": 8}),  # two blocks for eight parts: six are empty
        ("1x33x2", {"split_k": 4, "cpt": 1, "num_stages": 3}),
        ("3x202x5", {"split_k": 4, "m_spec": False, "rows": 2}),
        ("8x202x17", {"split_k": 2, "m_spec": False, "rows": 16, "warps": 2}),
        ("1x330x3", {"split_k": 2, "pdl": True, "num_stages": 2}),
        ("1x202x5", {"split_k": 2, "m_spec": False, "rows": 2}),  # the general kernel as twin
    ],
)
def test_split_k(shape: str, changes: dict[str, Value], target: Target) -> None:
    run = Run(shape, config(**changes), target)
    check(run)
    first = run.output.clone()
    assert run.counters is not None and not run.counters.any(), "the last program leaves the counters at zero"
    run.output.fill_(float("nan"))
    check(run)
    assert torch.equal(first, run.output), "a second launch on the same workspace gives the same bits"


def test_split_k_does_not_depend_on_who_is_last() -> None:
    """Parts are added in order of K: the result is that of the first launch, whatever lay in `partials` before."""
    run = Run("1x512x2", config(split_k=8), CUDA)
    run.launch()
    assert run.partials is not None
    parts = run.partials.view(8, 2)
    total = torch.zeros(2)
    for part in parts:
        total = total + part
    assert torch.equal(run.output.view(2), total.bfloat16())


def test_a_wrong_kernel_is_seen() -> None:
    """The bound is tight: one missing block of products breaks it."""
    run = Run("1x256x4", config(), CUDA)
    run.launch()
    run.w[:, :2] = 0.0
    assert run.worst_error() > 1.0


def test_block_k_is_the_one_of_the_space() -> None:
    run = Run("1x4096x2", config(cpt=8, warps=4, unroll=2), AMD)
    assert run.plan.constants["BLOCK_K"] == block_k(config(cpt=8, warps=4, unroll=2), 64) == 4096


def test_rounding_of_the_repaired_interpreter() -> None:
    """Against torch, on ties, a carry into the exponent, infinity and NaN."""
    values = np.array([1.0, 1.00390625, 1.01171875, -3.7e-41, 3.3961775e38, np.inf, np.nan, 0.1], np.float32)
    expected = torch.from_numpy(values.copy()).bfloat16()
    got = torch.from_numpy(round_to_bf16(values).view(np.int16).copy()).view(torch.bfloat16)
    assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
