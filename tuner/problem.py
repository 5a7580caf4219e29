"""Shapes and problems: what is multiplied, and in which weight format. Pure values, no torch at import."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.errors import UsageError

if TYPE_CHECKING:
    from tuner.formats import WeightFormat

MAX_M = 8
MAX_WEIGHTS = 2**36
LATENCY_BOUND_BYTES = 2_000_000
_EXAMPLE = "write MxKxN, for example --shape 1x4096x12288 (M activation rows, K inputs, N outputs)"


@dataclass(frozen=True, order=True)
class Shape:
    """A skinny product: activations (M, K) times weights (K, N) gives outputs (M, N)."""

    m: int
    k: int
    n: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read `MxKxN`.

        Raises:
            UsageError: The text is not three whole numbers, or one is out of range.
        """
        match = re.fullmatch(r"\s*(\d+)[xX](\d+)[xX](\d+)\s*", text, flags=re.ASCII)
        if match is None:
            raise UsageError(f"shape {text!r} is not three whole numbers joined by 'x'; {_EXAMPLE}")
        if max(len(part) for part in match.groups()) > 12:
            raise UsageError(f"shape {text[:60]!r} is too large; {_EXAMPLE}")
        m, k, n = (int(part) for part in match.groups())
        if not 1 <= m <= MAX_M:
            raise UsageError(f"shape {text!r} has M={m}; decode kernels take 1 <= M <= {MAX_M}; {_EXAMPLE}")
        if k < 1 or n < 1:
            raise UsageError(f"shape {text!r} has K={k}, N={n}; both must be at least 1; {_EXAMPLE}")
        if k * n > MAX_WEIGHTS or max(k, n) >= 2**31:
            raise UsageError(
                f"shape {text!r} has K*N={k * n:,} weights, more than the {MAX_WEIGHTS:,} that one card can hold; "
                f"{_EXAMPLE}"
            )
        return cls(m, k, n)

    def __str__(self) -> str:
        return f"{self.m}x{self.k}x{self.n}"


@dataclass(frozen=True, order=True)
class Problem:
    """One shape in one weight format, such as `1x4096x12288` in `bf16`."""

    shape: Shape
    weights: str

    @classmethod
    def of(cls, shape: Shape, weights: str) -> Problem:
        """Make a problem, checking that the format exists and can hold the shape.

        Raises:
            UsageError: No such weight format, or the shape breaks a rule of the format.
        """
        problem = cls(shape, weights)
        problem.format.check(shape)
        return problem

    @property
    def format(self) -> WeightFormat:
        """The weight format that `weights` names."""
        from tuner.formats import weight_format

        return weight_format(self.weights)

    @property
    def weight_bytes(self) -> int:
        """Bytes of one full set of read operands (weights and their scales), without padding."""
        return sum(operand.nbytes for operand in self.format.operands(self.shape, self.format.layouts[0]))

    @property
    def latency_bound(self) -> bool:
        """True under 2 MB of weights, where launch cost and not memory decides."""
        return self.weight_bytes < LATENCY_BOUND_BYTES

    def __str__(self) -> str:
        return f"{self.shape} {self.weights}"
