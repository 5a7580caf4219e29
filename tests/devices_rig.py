"""Two slots of weights and a short tape, for tests that bind an arm by hand."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tuner.problem import Shape


@dataclass
class Rig:
    """Two slots of weights and a tape whose outputs lie one behind the other, aligned to 2 bytes only."""

    weights: list[Tensor]
    inputs: Tensor
    flat: Tensor
    n: int

    @classmethod
    def of(cls, shape: Shape, seed: int, device: str = "cpu") -> Rig:
        generator = torch.Generator().manual_seed(seed)
        weights = [(torch.randn(shape.n, shape.k, generator=generator) * shape.k**-0.5).bfloat16() for _ in range(2)]
        inputs = torch.randn(shape.m, shape.k, generator=generator).bfloat16()
        flat = torch.full((3 * shape.m * shape.n + 2,), float("nan")).bfloat16()
        return cls([w.to(device) for w in weights], inputs.to(device), flat.to(device), shape.n)

    @property
    def count(self) -> int:
        return len(self.weights)

    def operand(self, i: int, name: str) -> Tensor:
        assert name == "weight"
        return self.weights[i % 2]

    def activation(self, i: int) -> Tensor:
        return self.inputs

    def output(self, i: int) -> Tensor:
        m = self.inputs.shape[0]
        return self.flat[1 + i * m * self.n :][: m * self.n].view(m, self.n)

    def load(self, artifact: object) -> None:
        raise AssertionError("the vendor loads no code")

    def zeros(self, nbytes: int) -> Tensor:
        raise AssertionError("the vendor needs no workspace")
