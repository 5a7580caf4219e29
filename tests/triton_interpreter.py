"""Runs the Triton kernels of this project in Triton's CPU interpreter, beside the compiler in the same process.

The interpreter holds bf16 as 16-bit integers. It truncates fp32 to bf16, where every GPU rounds to nearest even, and it
multiplies those integers in `tl.dot`. Both are repaired here, for the kernels are right on the GPU as they are.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton import knobs

# Gluon copies tl.sum and its like when it is first loaded, so that must be before they are replaced.
from triton.experimental import gluon  # noqa: F401
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from kernels_triton.build import Plan, plan
from tuner.arms import Config, Target
from tuner.problem import Problem, Shape

NAN_BF16 = 0x7FC0


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bits, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), NAN_BF16, rounded).astype(np.uint16)


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bits to fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _repair(builder: Any) -> None:
    if getattr(builder, "coldtune_repaired", False):
        return
    cast, dot = builder.cast_impl, builder.create_dot

    def cast_impl(self: Any, source: Any, kind: Any) -> Any:
        if source.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            return interpreter.TensorHandle(round_to_bf16(source.data), tl.bfloat16)
        return cast(self, source, kind)

    def create_dot(self: Any, a: Any, b: Any, c: Any, *rest: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16 and b.dtype.scalar == tl.bfloat16:
            return interpreter.TensorHandle(widen(a.data) @ widen(b.data) + c.data, c.dtype.scalar)
        return dot(self, a, b, c, *rest)

    builder.cast_impl, builder.create_dot, builder.coldtune_repaired = cast_impl, create_dot, True
    builder.create_fp_trunc = cast_impl


def interpreted(module: str) -> ModuleType:
    """A second copy of a kernel module whose kernels are interpreted."""
    name = f"interpreted_{module.replace('.', '_')}"
    if name not in sys.modules:
        _repair(interpreter.InterpreterBuilder)
        found = importlib.util.find_spec(module)
        assert found is not None
        spec = importlib.util.spec_from_file_location(name, found.origin)
        assert spec is not None and spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        with knobs.runtime.scope():
            knobs.runtime.interpret = True
            spec.loader.exec_module(copy)
        sys.modules[name] = copy
    return sys.modules[name]


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    """Have `tl.sum`, `tl.zeros` and their like, which are compiled as kernels are, interpreted for a while.

    Dependent launch is left out: programs run one after another, and no launch is in front.
    """
    compiled: dict[tuple[ModuleType, str], Any] = {
        (module, name): member
        for module in (tl, tl.standard)
        for name, member in vars(module).items()
        if isinstance(member, JITFunction) and not name.startswith("_")
    }
    for name in ("gdc_wait", "gdc_launch_dependents"):
        compiled[tl.extra.cuda, name] = getattr(tl.extra.cuda, name)
    try:
        for (module, name), member in compiled.items():
            if module is tl.extra.cuda:
                setattr(module, name, lambda: None)
            else:
                setattr(module, name, interpreter.InterpretedFunction(member.fn))
        yield
    finally:
        for (module, name), member in compiled.items():
            setattr(module, name, member)


class Run:
    """One config of the skinny product on random data, its memory guarded on both sides by NaN.

    Attributes:
        plan: What the family would compile and launch.
        output: (M, N) bf16, NaN until a launch.
        counters: The counters of split_k, or None.
    """

    GUARD = 8

    def __init__(self, shape: str, config: Config, target: Target, seed: int = 0) -> None:
        problem = Problem.of(Shape.parse(shape), "bf16")
        self.plan: Plan = plan(problem, config, target)
        m, k, n = problem.shape.m, problem.shape.k, problem.shape.n
        draw = torch.Generator().manual_seed(seed)
        self.x = self._guarded(torch.randn(m, k, generator=draw).bfloat16())
        self.w = self._guarded((torch.randn(n, k, generator=draw) * k**-0.5).bfloat16())
        self._memory = torch.full((m * n + 2 * self.GUARD,), float("nan"), dtype=torch.bfloat16)
        self.output = self._memory[self.GUARD : self.GUARD + m * n].view(m, n)
        sizes = {w.name: w.nbytes for w in self.plan.workspaces}
        self.partials = torch.full((sizes["partials"] // 4,), float("nan")) if sizes else None
        self.counters = torch.zeros(sizes["counters"] // 4, dtype=torch.int32) if sizes else None

    def _guarded(self, values: torch.Tensor) -> torch.Tensor:
        memory = torch.full((values.numel() + 2 * self.GUARD,), float("nan"), dtype=values.dtype)
        inner = memory[self.GUARD : self.GUARD + values.numel()].view(values.shape)
        return inner.copy_(values)

    def launch(self) -> None:
        """Run the kernel once; programs run one after another."""
        kernel = getattr(interpreted("kernels_triton.skinny_gemm"), self.plan.kernel)
        scalars = {name: value for name, (_, value) in self.plan.scalars.items()}
        with _interpreted_language():
            kernel[self.plan.grid](
                activation=self.x,
                weight=self.w,
                output=self.output,
                partials=self.partials,
                counters=self.counters,
                **scalars,
                **self.plan.constants,
            )

    def worst_error(self) -> float:
        """Largest error over its bound, 2^-8 |ref| + 4 * 2^-24 * sum |x||w|; at most 1 when the kernel is right."""
        x, w = self.x.double(), self.w.double()
        reference = x @ w.T
        bound = 2.0**-8 * reference.abs() + 4 * 2.0**-24 * (x.abs() @ w.abs().T)
        worst = ((self.output.double() - reference).abs() / bound).max().item()
        return float("inf") if worst != worst else worst

    def guards_hold(self) -> bool:
        """True while nothing was written beside the output."""
        return bool(self._memory[: self.GUARD].isnan().all() and self._memory[-self.GUARD :].isnan().all())
