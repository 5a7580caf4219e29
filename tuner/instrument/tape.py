"""The activation tape: each launch reads what launches before it wrote, as in decoding.

The tape is a row of segments. A segment starts with fresh random activations (its head), and its launches write their
outputs one behind the other. Launch i reads the last M*K elements in front of its output, with the start rounded down
to 16 bytes. Segments are at most 256 launches long, so that values neither grow nor die out over thousands of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.problem import Problem

if TYPE_CHECKING:
    from torch import Generator, Tensor

SEGMENT_LAUNCHES = 256
ALIGN_ELEMENTS = 8
TAIL_ELEMENTS = 4096


class OutputTape:
    """One buffer with places for a number of launches."""

    def __init__(self, problem: Problem, launches: int, device: str, generator: Generator) -> None:
        """Allocate the tape, draw the heads N(0, 1), poison the outputs."""
        import torch

        shape = problem.shape
        self.launches = launches
        self._m, self._k, self._n = shape.m, shape.k, shape.n
        self._segment = max(1, min(SEGMENT_LAUNCHES, 16 * min(shape.k, shape.n), launches))
        self._head = _aligned(shape.m * shape.k)
        self._stride = _aligned(self._head + self._segment * shape.m * shape.n)
        segments = -(-launches // self._segment)
        dtype = getattr(torch, problem.format.activation_dtype)
        self.buffer = torch.empty(segments * self._stride + TAIL_ELEMENTS, dtype=dtype, device=device)
        self._generator = generator
        self.poison()
        for segment in range(segments):
            start = segment * self._stride
            self.buffer[start : start + self._head].normal_(0.0, 1.0, generator=generator)

    @staticmethod
    def nbytes(problem: Problem, launches: int) -> int:
        """Bytes that a tape of so many launches takes, about."""
        shape = problem.shape
        segment = max(1, min(SEGMENT_LAUNCHES, 16 * min(shape.k, shape.n), launches))
        stride = _aligned(_aligned(shape.m * shape.k) + segment * shape.m * shape.n)
        return 2 * (-(-launches // segment) * stride + TAIL_ELEMENTS)

    def _output_start(self, i: int) -> int:
        segment, place = divmod(i % self.launches, self._segment)
        return segment * self._stride + self._head + place * self._m * self._n

    def activation(self, i: int) -> Tensor:
        """Activations of launch i, (M, K), 16-byte aligned."""
        start = (self._output_start(i) - self._m * self._k) // ALIGN_ELEMENTS * ALIGN_ELEMENTS
        return self.buffer[start : start + self._m * self._k].view(self._m, self._k)

    def output(self, i: int) -> Tensor:
        """Output of launch i, (M, N); only 2-byte aligned where N is odd."""
        start = self._output_start(i)
        return self.buffer[start : start + self._m * self._n].view(self._m, self._n)

    def outside(self, i: int) -> tuple[Tensor, Tensor]:
        """All of the tape in front of and behind the output of launch i: a launch must leave it as it was."""
        start = self._output_start(i)
        return self.buffer[:start], self.buffer[start + self._m * self._n :]

    def poison(self, first: int = 0, count: int | None = None) -> None:
        """Fill the outputs of launches `first` to `first + count` with NaN; heads are kept."""
        last = first + (self.launches if count is None else count)
        i = first
        while i < last:
            stop = min(last, (i // self._segment + 1) * self._segment)
            start = self._output_start(i)
            self.buffer[start : start + (stop - i) * self._m * self._n].fill_(float("nan"))
            i = stop


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
