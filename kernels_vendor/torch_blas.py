"""The baseline: each way to write this product in torch, in each BLAS library that torch can be told to prefer.

Which library kernel runs differs between call forms, shapes, versions and libraries, so "the vendor" is the best of
them, found by measuring all. An arm's kernel name is `<form>.<library>.<layout>`, such as `mm_out.cublaslt.nk`; it has
no parameters.

The forms with `_out` write to their place on the tape. The others return a new tensor, as most model code does, and the
tape needs a copy of it: the receipt says `copies`, and the copy is in the time. Where both call the same kernel, the
`_out` form is the vendor's real time.

Places on the tape are aligned to 2 bytes only where N is odd. torch takes such an `out`; a library may choose another
kernel for it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.arms import Arm, Artifact, Launch, Loader, Role, Slots, Tape, Target, Value
from tuner.errors import ArmError
from tuner.problem import Problem
from tuner.space import Space

if TYPE_CHECKING:
    from torch import Tensor

# (x, weight, zero bias, out) -> result; `out` is None for the forms that return a new tensor.
Call = Callable[["Tensor", "Tensor", "Tensor", "Tensor | None"], "Tensor"]

# Libraries by backend: the name in the arm, and what `preferred_blas_library` takes. The host has no choice.
_LIBRARIES: dict[str, dict[str, str | None]] = {
    "cuda": {"cublas": "cublas", "cublaslt": "cublaslt"},
    "hip": {"rocblas": "cublas", "hipblaslt": "cublaslt"},
    "host": {"cpu": None},
}
_DENSE = ("bf16", "f16")
_INSTALL = {
    "cuda": "pip install 'coldtune[cuda]'",
    "hip": "install a ROCm build of torch from its own index, as its website says",
    "host": "pip install 'coldtune[cpu]'",
}


@dataclass(frozen=True)
class Form:
    """One call form.

    Attributes:
        name: As in the arm's kernel name, without `_out`.
        call: The call on (x, W, zero bias, out) for W of layout `nk`.
        vector: True for the form that takes vectors, which needs M=1.
    """

    name: str
    call: Call
    vector: bool = False


def _mv(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None) -> Tensor:
    import torch

    return torch.mv(weight, x[0], out=None if out is None else out[0]).unsqueeze(0)


def _mm(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None) -> Tensor:
    import torch

    return torch.mm(x, weight.t(), out=out)


def _addmm(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None) -> Tensor:
    # With a bias vector torch takes another way into the library (an epilogue) than mm, which is addmm with beta=0.
    import torch

    return torch.addmm(bias, x, weight.t(), out=out)


def _matmul(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None) -> Tensor:
    import torch

    return torch.matmul(x, weight.t(), out=out)


def _linear(x: Tensor, weight: Tensor, bias: Tensor, out: Tensor | None) -> Tensor:
    import torch

    if out is None:
        return torch.nn.functional.linear(x, weight)
    # torch.nn.functional.linear has no `out`; the operator behind it has.
    result: Tensor = torch.ops.aten.linear.out(x, weight, None, out=out)
    return result


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form("mv", _mv, vector=True),
        Form("mm", _mm),
        Form("addmm", _addmm),
        Form("matmul", _matmul),
        Form("linear", _linear),
    )
}


class Vendor:
    """Every call form of torch, in every BLAS library it can prefer."""

    name = "vendor"
    role: Role = "baseline"

    def missing(self, target: Target) -> str | None:
        """The line that installs torch, where it is missing."""
        if importlib.util.find_spec("torch") is None:
            return f"torch is missing; {_INSTALL[target.backend]}"
        return None

    def spaces(self, problem: Problem, target: Target) -> tuple[Space, ...]:
        """None: all arms are fixed."""
        return ()

    def fixed(self, problem: Problem, target: Target) -> tuple[Arm, ...]:
        """All forms in all libraries; none for a weight format that torch has no product for."""
        if problem.weights not in _DENSE:
            return ()
        forms = [form.name for form in FORMS.values() if problem.shape.m == 1 or not form.vector]
        return tuple(
            Arm.of(self.name, f"{form}{suffix}.{library}.nk")
            for library in _LIBRARIES[target.backend]
            for form in forms
            for suffix in ("_out", "")
        )

    def build(self, problem: Problem, arm: Arm, target: Target) -> Artifact:
        """Nothing is compiled. The hashes stand for the call form and for torch's version, which is what would change.

        Raises:
            ArmError: The arm is none of this family's.
        """
        if arm not in self.fixed(problem, target):
            raise ArmError(f"{arm} is no vendor form of {problem} on {target.backend}")
        version = importlib.metadata.version("torch")
        code_hash = hashlib.sha256(f"{arm.kernel} torch {version}".encode()).hexdigest()
        source_hash = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
        return Artifact(arm, problem, target, b"", code_hash, source_hash)

    def bind(self, artifact: Artifact, slots: Slots, tape: Tape, loader: Loader) -> Launch:
        """Bind one form, and call it once so that library handles and workspaces exist before a capture."""
        form, library, _ = artifact.arm.kernel.split(".")
        return VendorLaunch(FORMS[form.removesuffix("_out")], form.endswith("_out"), library, artifact, slots, tape)


class VendorLaunch:
    """One bound call form."""

    def __init__(self, form: Form, has_out: bool, library: str, artifact: Artifact, slots: Slots, tape: Tape) -> None:
        """Fix the numeric contract, and warm up into memory beside the tape."""
        import torch

        self._form, self._has_out, self._library = form, has_out, library
        self._preferred = _LIBRARIES[artifact.target.backend][library]
        self._slots, self._tape = slots, tape
        self._torch: Any = torch
        # One contract for all: sums in float32. The setting is the process's, and workers are ours.
        matmul: Any = torch.backends.cuda.matmul
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False
        weight = slots.operand(0, "weight")
        shape = artifact.problem.shape
        self._bias = weight.new_zeros(shape.n)
        x = weight.new_zeros((shape.m, shape.k))
        self._run(x, weight, weight.new_empty((shape.m, shape.n)))

    def __call__(self, i: int) -> None:
        """Enqueue operation i."""
        self._run(self._tape.activation(i), self._slots.operand(i, "weight"), self._tape.output(i))

    def receipt(self) -> dict[str, Value]:
        """The form, the library asked for, and whether a copy is in the time. Kernel names come from the graph."""
        return {
            "form": self._form.name + ("_out" if self._has_out else ""),
            "library": self._library,
            "copies": not self._has_out,
            "reduced_precision": False,
            "torch": str(self._torch.__version__),
            "compiles_in_worker": 0,
        }

    def _run(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        prefer = self._torch.backends.cuda.preferred_blas_library
        before = None if self._preferred is None else prefer()
        if self._preferred is not None:
            prefer(self._preferred)
        try:
            if self._has_out:
                self._form.call(x, weight, self._bias, out)
            else:
                out.copy_(self._form.call(x, weight, self._bias, None))
        finally:
            if before is not None:
                prefer(before)
