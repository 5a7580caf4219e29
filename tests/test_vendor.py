"""The vendor family on the host: every form against float64, with the gate's bound on each element."""

from __future__ import annotations

import pytest
import torch
from devices_rig import Rig
from torch import Tensor

from kernels_vendor import Vendor
from tuner.arms import Arm, Family, Target
from tuner.errors import ArmError
from tuner.problem import Problem, Shape

HOST = Target("host", "x86_64", 32, 2)
CUDA = Target("cuda", "sm_90", 32, 132)
SHAPES = ["1x360x33", "1x4096x40", "3x2880x17", "8x512x64", "1x1x1", "2x7x5"]


@pytest.fixture(params=SHAPES)
def problem(request: pytest.FixtureRequest) -> Problem:
    return Problem.of(Shape.parse(request.param), "bf16")


def test_is_a_family() -> None:
    family: Family = Vendor()
    assert (family.name, family.role) == ("vendor", "baseline")
    assert family.missing(HOST) is None


def test_every_form_is_right_and_writes_only_its_place(problem: Problem) -> None:
    family, shape = Vendor(), problem.shape
    arms = family.fixed(problem, HOST)
    for arm in arms:
        rig = Rig.of(shape, seed=5)
        launch = family.bind(family.build(problem, arm, HOST), rig, rig, rig)  # type: ignore[arg-type]
        assert rig.flat.isnan().all(), f"{arm}: binding wrote to the tape"
        launch(1)
        x, w = rig.inputs.double(), rig.weights[1].double()
        ref, bound = x @ w.t(), x.abs() @ w.abs().t()
        limit = 2.0**-8 * ref.abs() + 4 * 2.0**-24 * bound
        assert bool(((rig.output(1).double() - ref).abs() <= limit).all()), str(arm)
        assert rig.output(0).isnan().all() and rig.output(2).isnan().all(), f"{arm}: wrote beside its place"
        assert rig.flat[0].isnan() and rig.flat[-1].isnan()


def test_arms_cover_forms_and_libraries() -> None:
    one = Problem.of(Shape.parse("1x64x32"), "bf16")
    kernels = {arm.kernel for arm in Vendor().fixed(one, CUDA)}
    assert len(kernels) == 20
    assert {"mv_out.cublas.nk", "mm.cublaslt.nk", "addmm_out.cublas.nk", "linear.cublaslt.nk"} <= kernels
    eight = Problem.of(Shape.parse("8x64x32"), "bf16")
    assert not any(arm.kernel.startswith("mv") for arm in Vendor().fixed(eight, CUDA))
    assert {arm.kernel.split(".")[1] for arm in Vendor().fixed(eight, HOST)} == {"cpu"}
    hip = Target("hip", "gfx1100", 32, 96)
    assert {arm.kernel.split(".")[1] for arm in Vendor().fixed(eight, hip)} == {"rocblas", "hipblaslt"}


def test_no_arms_for_a_format_that_torch_cannot_multiply() -> None:
    assert Vendor().fixed(Problem(Shape(1, 64, 32), "q8"), CUDA) == ()


def test_artifacts_differ_by_arm_and_receipts_name_copies(problem: Problem) -> None:
    family = Vendor()
    arms = family.fixed(problem, HOST)
    artifacts = [family.build(problem, arm, HOST) for arm in arms]
    assert len({artifact.code_hash for artifact in artifacts}) == len(arms)
    rig = Rig.of(problem.shape, seed=1)
    for arm, artifact in zip(arms, artifacts, strict=True):
        receipt = family.bind(artifact, rig, rig, rig).receipt()  # type: ignore[arg-type]
        assert receipt["copies"] is ("_out." not in arm.kernel)
        assert receipt["reduced_precision"] is False
        assert receipt["torch"] == torch.__version__


def test_foreign_arm_is_refused() -> None:
    problem = Problem.of(Shape.parse("8x64x32"), "bf16")
    for kernel in ("mv.cpu.nk", "mm.cublas.nk", "conv.cpu.nk"):
        with pytest.raises(ArmError, match="no vendor form"):
            Vendor().build(problem, Arm.of("vendor", kernel), HOST)


@pytest.mark.parametrize(("library", "wanted"), [("cublas", "cublas"), ("cublaslt", "cublaslt")])
def test_the_library_is_preferred_for_the_call_only(monkeypatch: pytest.MonkeyPatch, library: str, wanted: str) -> None:
    state = ["mine"]
    during: list[str] = []

    def prefer(name: str | None = None) -> str:
        if name is not None:
            state[0] = name
        return state[0]

    def spy(self: object, source: Tensor) -> Tensor:
        during.append(state[0])
        raise RuntimeError("a launch that fails")

    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", prefer)
    problem = Problem.of(Shape.parse("1x64x32"), "bf16")
    rig = Rig.of(problem.shape, seed=1)
    family = Vendor()
    built = family.build(problem, Arm.of("vendor", f"mm.{library}.nk"), CUDA)
    launch = family.bind(built, rig, rig, rig)  # type: ignore[arg-type]
    assert state == ["mine"]
    monkeypatch.setattr(torch.Tensor, "copy_", spy)
    with pytest.raises(RuntimeError, match="a launch that fails"):
        launch(0)
    assert during == [wanted] and state == ["mine"]
