"""The search space against a brute-force count and the rules of DESIGN 4.1."""

from __future__ import annotations

import itertools

import pytest

from search_spaces import skinny_gemm
from tuner.arms import Arm, Config, Target
from tuner.errors import UsageError
from tuner.problem import Problem, Shape
from tuner.space import Constraint, Parameter, Space
from tuner.workflow.spaces import target_of_arch

H200 = Target("cuda", "sm_90", 32, 132)
RDNA3 = Target("hip", "gfx1100", 32, 96)
CDNA3 = Target("hip", "gfx942", 64, 304)
HOST = Target("host", "x86_64", 32, 2)
HEADLINE = Problem(Shape(1, 4096, 12288), "bf16")


def tiny(default: Config) -> Space:
    even = Constraint("even", "a + b is even", lambda c, p, t: (int(c["a"]) + int(c["b"])) % 2 == 0)
    small = Constraint("small", "a is at most 2", lambda c, p, t: int(c["a"]) <= 2)
    parameters = (Parameter("a", (1, 2, 3), "first"), Parameter("b", (0, 1), "second"))
    return Space("f", "k", HEADLINE, HOST, parameters, (even, small), default)


def test_counts_by_hand() -> None:
    space = tiny({"a": 1, "b": 1})
    # a+b odd: (1,0) (2,1) (3,0); of the rest, a > 2: (3,1); left: (1,1) (2,0).
    assert space.size == 6
    assert dict(space.pruned()) == {"a + b is even": 3, "a is at most 2": 1}
    assert list(space.valid()) == [{"a": 1, "b": 1}, {"a": 2, "b": 0}]
    assert space.arm({"b": 0, "a": 2}) == Arm.of("f", "k", {"a": 2, "b": 0})


def test_a_default_outside_its_space_is_an_error_that_says_why() -> None:
    with pytest.raises(UsageError, match="a is at most 2"):
        tiny({"a": 3, "b": 1})
    with pytest.raises(UsageError, match="keys are not the parameters"):
        tiny({"a": 1, "b": 1, "c": 1})


@pytest.mark.parametrize("target", [H200, RDNA3, CDNA3])
@pytest.mark.parametrize("family", ["triton", "hip"])
@pytest.mark.parametrize("shape", [Shape(1, 4096, 12288), Shape(8, 4096, 4096), Shape(1, 360, 7), Shape(1, 1, 1)])
def test_the_default_is_in_the_space_of_awkward_shapes_too(family: str, target: Target, shape: Shape) -> None:
    space = skinny_gemm.space(family, Problem(shape, "bf16"), target)
    assert space.violated(space.default) is None
    assert all(space.default[p.name] in p.values for p in space.parameters)
    assert space.default["m_spec"] is (shape.m == 1)


def test_shared_parameters_mean_the_same_in_both_families() -> None:
    both = [skinny_gemm.space(family, HEADLINE, H200).parameters for family in ("triton", "hip")]
    shared = [{p.name: p for p in parameters} for parameters in both]
    for name in ("layout", "cpt", "rows", "warps", "split_k", "unroll", "m_spec", "pdl", "cache"):
        assert shared[0][name] == shared[1][name]


@pytest.mark.parametrize(
    ("target", "has", "lacks"),
    [(H200, {"pdl"}, {"waves_per_eu"}), (RDNA3, {"waves_per_eu"}, {"pdl"}), (HOST, set(), {"pdl", "cache"})],
)
def test_parameters_of_one_architecture(target: Target, has: set[str], lacks: set[str]) -> None:
    names = {p.name for p in skinny_gemm.space("hip", HEADLINE, target).parameters}
    assert has <= names and not lacks & names


def test_pruned_and_valid_make_up_the_whole_space() -> None:
    space = skinny_gemm.space("hip", Problem(Shape(2, 360, 64), "bf16"), CDNA3)
    assert space.pruned().total() + sum(1 for _ in space.valid()) == space.size
    # K=360 = 8 * 45 is not divisible by 16: every config with cpt=16 goes, and none else for that reason.
    values = [p.values for p in space.parameters]
    names = [p.name for p in space.parameters]
    wide = sum(1 for c in itertools.product(*values) if c[names.index("cpt")] == 16)
    assert space.pruned()["cpt divides K, else the rows are not aligned for loads of cpt weights"] == wide


def test_block_k_is_the_product_written_beside_it() -> None:
    assert skinny_gemm.block_k({"cpt": 8, "warps": 4, "unroll": 2}, 64) == 8 * 64 * 4 * 2


@pytest.mark.parametrize(
    ("arch", "backend", "warp"), [("sm_90", "cuda", 32), ("gfx1100", "hip", 32), ("gfx942", "hip", 64)]
)
def test_an_architecture_needs_no_device(arch: str, backend: str, warp: int) -> None:
    target = target_of_arch(arch)
    assert (target.backend, target.arch, target.warp) == (backend, arch, warp)


@pytest.mark.parametrize("arch", ["", "h200", "sm_", "sm90", "gfx", "gfx1100; rm", "cuda"])
def test_an_unknown_architecture_is_a_usage_error(arch: str) -> None:
    with pytest.raises(UsageError, match=r"--arch.*gfx1100"):
        target_of_arch(arch)
