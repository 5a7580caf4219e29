"""Weight formats: how weights are stored, packed and read back exactly. torch is imported when used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tuner.errors import UsageError
from tuner.problem import Shape

if TYPE_CHECKING:
    from torch import Generator, Tensor

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}


@dataclass(frozen=True)
class Operand:
    """One tensor of a packed weight: its name in kernels, its torch dtype name and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor without padding."""
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


class WeightFormat(Protocol):
    """What the framework needs to know of a weight format."""

    name: str
    activation_dtype: str
    layouts: tuple[str, ...]
    unit_roundoff: float

    def check(self, shape: Shape) -> None:
        """Raise UsageError, naming the dimension, if the format cannot hold this shape."""

    def operands(self, shape: Shape, layout: str) -> tuple[Operand, ...]:
        """The tensors of one packed weight of this shape."""

    def pack(self, weight: Tensor, layout: str) -> dict[str, Tensor]:
        """Pack a dense (N, K) weight, as `nn.Linear` holds it, into operand tensors on its device."""

    def fill(self, operands: Mapping[str, Tensor], shape: Shape, generator: Generator) -> None:
        """Write random weights drawn N(0, 1/K) into operand tensors of this format."""

    def dense64(self, operands: Mapping[str, Tensor], layout: str, start: int, stop: int) -> Tensor:
        """Rows `start:stop` of the dense weight, (stop - start, K) in float64, exactly as stored."""


class Bf16:
    """Plain bfloat16 weights: one operand, `weight`, (N, K) in layout `nk`."""

    name = "bf16"
    activation_dtype = "bfloat16"
    layouts: tuple[str, ...] = ("nk",)
    unit_roundoff = 2.0**-8

    def check(self, shape: Shape) -> None:
        """Any K and N of at least 1 are held."""

    def operands(self, shape: Shape, layout: str) -> tuple[Operand, ...]:
        """One (N, K) tensor."""
        return (Operand("weight", "bfloat16", (shape.n, shape.k)),)

    def pack(self, weight: Tensor, layout: str) -> dict[str, Tensor]:
        """Round to bfloat16; a contiguous bf16 weight is used as it is, without a copy."""
        import torch

        return {"weight": weight.detach().to(torch.bfloat16).contiguous()}

    def fill(self, operands: Mapping[str, Tensor], shape: Shape, generator: Generator) -> None:
        """Draw N(0, 1/K) in place."""
        operands["weight"].normal_(0.0, shape.k**-0.5, generator=generator)

    def dense64(self, operands: Mapping[str, Tensor], layout: str, start: int, stop: int) -> Tensor:
        """Widen; exact."""
        return operands["weight"][start:stop].double()


FORMATS: dict[str, WeightFormat] = {"bf16": Bf16()}


def weight_format(name: str) -> WeightFormat:
    """Look a format up by its name.

    Raises:
        UsageError: There is no such format.
    """
    try:
        return FORMATS[name]
    except KeyError:
        raise UsageError(f"unknown weight format {name!r}; this version has {', '.join(FORMATS)}") from None
