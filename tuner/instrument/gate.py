"""The correctness gate: outputs against a float64 reference, element by element and as a whole, and stray writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.errors import ArmCorrectnessError
from tuner.problem import Problem

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from tuner.arms import Launch
    from tuner.devices.base import Device
    from tuner.instrument.rotation import Rotation
    from tuner.instrument.tape import OutputTape

ACCUMULATION = 4 * 2.0**-24
CHUNK_WEIGHTS = {"cpu": 1 << 18, "cuda": 1 << 25}


@dataclass(frozen=True)
class Reference:
    """The float64 product and, for each element, the error that rounding may leave."""

    value: Tensor
    bound: Tensor


def reference(problem: Problem, operands: Mapping[str, Tensor], layout: str, x: Tensor) -> Reference:
    """Compute y = x W^T in float64 from the weights as stored, (M, K) to (M, N).

    The bound of each element is `u*|ref| + 4*2^-24 * sum|x||w|`, u being the format's unit roundoff: the output is
    rounded once, and K products are accumulated in float32.
    """
    import torch

    shape = problem.shape
    x64 = x.double().t().contiguous()
    both = torch.cat([x64, x64.abs()], dim=1)
    rows = max(1, CHUNK_WEIGHTS[x.device.type] // shape.k)
    value = torch.empty(shape.n, both.shape[1], dtype=torch.float64, device=x.device)
    m = x64.shape[1]
    for start in range(0, shape.n, rows):
        stop = min(shape.n, start + rows)
        dense = problem.format.dense64(operands, layout, start, stop)
        value[start:stop, :m] = dense @ both[:, :m]
        value[start:stop, m:] = dense.abs_() @ both[:, m:]
    ref, magnitude = value[:, :m].t(), value[:, m:].t()
    return Reference(ref, problem.format.unit_roundoff * ref.abs() + ACCUMULATION * magnitude)


def compare(y: Tensor, ref: Reference, problem: Problem, where: str) -> float:
    """Hold an output (M, N) against its reference and return its norm error.

    Raises:
        ArmCorrectnessError: Elements are missing (NaN), one is outside its bound, or the norm error is too large.
    """
    y64 = y.double()
    total = y64.numel()
    missing = int(y64.isnan().sum())
    if missing:
        raise ArmCorrectnessError(f"{where}: {missing:,} of {total:,} outputs are NaN or were never written")
    error = (y64 - ref.value).abs()
    excess = error - ref.bound
    wrong = int((excess > 0).sum())
    if wrong:
        at = int(excess.argmax())
        m, n = divmod(at, problem.shape.n)
        raise ArmCorrectnessError(
            f"{where}: {wrong:,} of {total:,} outputs are wrong; worst at m={m}, n={n}: "
            f"{float(y64.view(-1)[at]):.6g} instead of {float(ref.value.reshape(-1)[at]):.6g}"
        )
    norm = float(ref.value.norm())
    norm_error = float(error.norm()) / norm if norm > 0 else float(error.norm())
    limit = norm_limit(problem)
    if not norm_error <= limit:
        raise ArmCorrectnessError(f"{where}: norm error {norm_error:.3g} is above {limit:.3g}")
    return norm_error


def norm_limit(problem: Problem) -> float:
    """Largest allowed ||y - ref|| / ||ref||: one output rounding, and float32 accumulation over K."""
    return float(problem.format.unit_roundoff + ACCUMULATION * problem.shape.k**0.5)


class Gate:
    """Two random inputs on two slots, their references computed once, for every arm of a session."""

    def __init__(self, problem: Problem, layout: str, rotation: Rotation, device: Device, generator: Generator) -> None:
        """Draw the inputs and compute their references."""
        import torch

        shape = problem.shape
        self._problem = problem
        self._device = device
        dtype = getattr(torch, problem.format.activation_dtype)
        inputs = torch.empty(2, shape.m, shape.k, dtype=dtype, device=device.torch_device)
        inputs.normal_(0.0, 1.0, generator=generator)
        self._cases = [(i, inputs[i], reference(problem, rotation.operands(i), layout, inputs[i])) for i in range(2)]

    def check(self, launch: Launch, tape: OutputTape) -> float:
        """Run an arm once on each input; it must fill its output rightly and write nowhere else.

        Returns:
            The larger norm error.

        Raises:
            ArmCorrectnessError: See `compare`; also for writes outside the output.
        """
        import torch

        worst = 0.0
        for i, x, ref in self._cases:
            tape.poison()
            tape.activation(i).copy_(x)
            tape.output(i).fill_(float("nan"))
            before = [part.view(torch.int16).clone() for part in tape.outside(i)]
            launch(i)
            self._device.synchronize()
            for side, was, now in zip(("in front of", "behind"), before, tape.outside(i), strict=True):
                if not torch.equal(was, now.view(torch.int16)):
                    count = int((was != now.view(torch.int16)).sum())
                    raise ArmCorrectnessError(f"gate, input {i + 1}: {count:,} elements {side} the output were written")
            worst = max(worst, compare(tape.output(i), ref, self._problem, f"gate, input {i + 1}"))
        return worst
