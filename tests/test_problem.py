"""Shapes, problems and the bf16 format against hand-computed values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tuner.errors import UsageError
from tuner.formats import weight_format
from tuner.problem import MAX_WEIGHTS, Problem, Shape

BAD_SHAPES = {
    "4096": "three whole numbers",
    "1x4096": "three whole numbers",
    "": "three whole numbers",
    "axbxc": "three whole numbers",
    "1x4096x12288x2": "three whole numbers",
    "1x-3x5": "three whole numbers",
    "1x2.5x3": "three whole numbers",
    "1 x 2 x 3": "three whole numbers",
    "1×2×3": "three whole numbers",
    "١x٢x٣": "three whole numbers",
    "0x4096x12288": "M=0",
    "9x4096x12288": "M=9",
    "1x0x5": "K=0",
    "1x5x0": "N=0",
    "1x4096x99999999999999999999": "too large",
    "1x262144x262145": "more than",
    f"1x1x{2**31}": "more than",
}


@pytest.mark.parametrize(("text", "rule"), BAD_SHAPES.items())
def test_a_bad_shape_names_the_value_the_rule_and_a_correct_form(text: str, rule: str) -> None:
    with pytest.raises(UsageError) as caught:
        Shape.parse(text)
    message = str(caught.value)
    assert rule in message
    assert repr(text[:60]) in message
    assert "--shape 1x4096x12288" in message


@given(st.integers(1, 8), st.integers(1, 2**16), st.integers(1, 2**16))
def test_a_shape_comes_back_from_its_text(m: int, k: int, n: int) -> None:
    assert Shape.parse(str(Shape(m, k, n))) == Shape(m, k, n)
    assert Shape.parse(f" {m}X{k}x{n} ") == Shape(m, k, n)


def test_the_largest_shape_is_taken() -> None:
    assert Shape.parse("1x262144x262144").k ** 2 == MAX_WEIGHTS


def test_weight_bytes_of_the_headline_shape() -> None:
    # 4096 x 12288 x 2 bytes = 96 MiB, as DESIGN says.
    problem = Problem.of(Shape.parse("1x4096x12288"), "bf16")
    assert problem.weight_bytes == 100_663_296 == 96 * 2**20
    assert not problem.latency_bound
    assert str(problem) == "1x4096x12288 bf16"


def test_latency_bound_under_2_mb() -> None:
    assert Problem.of(Shape(1, 1000, 999), "bf16").latency_bound
    assert not Problem.of(Shape(1, 1000, 1000), "bf16").latency_bound


def test_an_unknown_format_lists_what_exists() -> None:
    with pytest.raises(UsageError, match=r"'int4'.*bf16"):
        Problem.of(Shape(1, 2, 3), "int4")


def test_bf16_packs_and_reads_back_exactly() -> None:
    weight = torch.tensor([[1.0, 1.00390625, -3.140625], [0.0, 2.0**-30, 65280.0]])
    form = weight_format("bf16")
    operands = form.pack(weight, "nk")
    # 1.00390625 = 1 + 2^-8 lies halfway and rounds to even, 1.0; the others are bf16 values.
    want = torch.tensor([[1.0, 1.0, -3.140625], [0.0, 2.0**-30, 65280.0]], dtype=torch.float64)
    assert torch.equal(form.dense64(operands, "nk", 0, 2), want)
    assert torch.equal(form.dense64(operands, "nk", 1, 2), want[1:])


def test_bf16_packs_a_bf16_weight_without_a_copy() -> None:
    weight = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert weight_format("bf16").pack(weight, "nk")["weight"].data_ptr() == weight.data_ptr()
    packed = weight_format("bf16").pack(weight.t(), "nk")["weight"]
    assert packed.is_contiguous() and packed.shape == (8, 4)


def test_filled_weights_have_variance_one_over_k() -> None:
    shape = Shape(1, 256, 400)
    operands = {"weight": torch.empty(400, 256, dtype=torch.bfloat16)}
    weight_format("bf16").fill(operands, shape, torch.Generator().manual_seed(3))
    values = operands["weight"].double()
    # 102,400 draws: the standard error of the variance is 0.44 %, of the mean 0.2 % of sigma.
    assert abs(float(values.var()) * 256 - 1) < 0.02
    assert abs(float(values.mean())) * 16 < 0.015
