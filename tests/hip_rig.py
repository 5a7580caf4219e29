"""Many configs of the HIP source in one shared library, and launches of them on torch tensors."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels_hip import host, toolchain
from kernels_hip.build import plan
from kernels_hip.source import FOLDER
from tuner.arms import Arm, Pointer, Scalar, Target, Value
from tuner.problem import Problem, Shape

DEFAULT: dict[str, Value] = {
    "layout": "nk", "cpt": 8, "rows": 1, "warps": 1, "split_k": 1, "unroll": 1, "m_spec": True,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One shape with one config."""

    shape: str
    config: Mapping[str, Value]

    @classmethod
    def of(cls, shape: str, **config: Value) -> Case:
        return cls(shape, {**DEFAULT, "m_spec": shape.startswith("1x"), **config})

    def plan(self, warp: int):  # type: ignore[no-untyped-def]
        problem = Problem(Shape.parse(self.shape), "bf16")
        return plan(problem, Arm.of("hip", "skinny_gemm", self.config), Target("host", "any", warp, 2))

    def __str__(self) -> str:
        return " ".join([self.shape, *(f"{k}={v}" for k, v in self.config.items() if v != DEFAULT[k])])


def unit_of(cases: Sequence[Case], warp: int) -> str:
    """All cases in one translation unit: each in its own namespace, as entries e0, e1, …"""
    parts = [f'#define WARP {warp}\n#include "host_prelude.h"\n']
    for i, case in enumerate(cases):
        macros = {**case.plan(warp).kernel.macros, "ENTRY": f"e{i}"}
        del macros["WARP"]
        parts += [f"#define {name} {value}\n" for name, value in macros.items()]
        parts.append(f'namespace c{i} {{\n#include "{FOLDER / "skinny_gemm.hip"}"\nCOLDTUNE_EXPORT(e{i})\n}}\n')
        parts += [f"#undef {name}\n" for name in macros]
    return "".join(parts)


def compile_library(text: str, folder: Path, *options: str) -> ctypes.CDLL:
    """A library from a translation unit, with light optimisation: many kernels, each run briefly."""
    (folder / "unit.cpp").write_text(text)
    command = [str(toolchain.host_compiler()), *host.options(), "-O1", "-Wall", "-Wextra", "-Werror", *options]
    done = subprocess.run(
        [*command, "-shared", "-o", "unit.so", "unit.cpp"], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    library = ctypes.CDLL(str(folder / "unit.so"))
    library.coldtune_error.restype = ctypes.c_char_p
    return library


def launch(
    library: ctypes.CDLL,
    entry: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: Sequence[Any],
    threads: int = 2,
    shared_bytes: int = 0,
) -> str:
    """Launch; the error text, or an empty one."""
    words = (ctypes.c_void_p * max(1, len(args)))(*[ctypes.addressof(arg) for arg in args])
    code = getattr(library, f"coldtune_launch_{entry}")(*grid, *block, shared_bytes, words, threads)
    return library.coldtune_error().decode() if code else ""


@dataclass
class Data:
    """Operands of one case, with canaries around the output and around each workspace."""

    x: Tensor
    w: Tensor
    out: Tensor
    memory: dict[str, Tensor]

    CANARY = 64

    @classmethod
    def of(cls, case: Case, warp: int, seed: int = 0) -> Data:
        generator = torch.Generator().manual_seed(seed)
        shape = Shape.parse(case.shape)
        x = torch.randn(shape.m, shape.k, generator=generator).bfloat16()
        w = (torch.randn(shape.n, shape.k, generator=generator) * shape.k**-0.5).bfloat16()
        out = torch.full((shape.m * shape.n + 2 * cls.CANARY + 1,), float("nan")).bfloat16()
        memory = {
            space.name: torch.zeros(space.nbytes + 2 * cls.CANARY, dtype=torch.uint8)
            for space in case.plan(warp).workspaces
        }
        return cls(x, w, out, memory)

    @property
    def y(self) -> Tensor:
        # One element behind a multiple of 16 bytes: the output may lie at any element.
        m, n = self.x.shape[0], self.w.shape[0]
        return self.out[self.CANARY + 1 :][: m * n].view(m, n)

    def untouched(self) -> bool:
        m, n = self.y.shape
        around = torch.cat([self.out[: self.CANARY + 1], self.out[self.CANARY + 1 + m * n :]])
        pads = [torch.cat([pad[: self.CANARY], pad[-self.CANARY :]]) for pad in self.memory.values()]
        return bool(around.isnan().all()) and all(not bool(pad.any()) for pad in pads)

    def run(self, library: ctypes.CDLL, entry: str, case: Case, warp: int, threads: int = 2) -> None:
        step = case.plan(warp).steps[0]
        where = {"activation": self.x.data_ptr(), "weight": self.w.data_ptr(), "output": self.y.data_ptr()}
        where |= {name: pad.data_ptr() + self.CANARY for name, pad in self.memory.items()}
        args: list[Any] = []
        for arg in step.args:
            if isinstance(arg, Pointer):
                args.append(ctypes.c_void_p(where[arg.name]))
            else:
                assert isinstance(arg, Scalar) and arg.ctype == "i32"
                args.append(ctypes.c_int32(int(arg.value)))
        error = launch(library, entry, step.grid, step.block, args, threads)
        assert not error, error

    def check(self) -> None:
        """Every element within the gate's bound of the float64 product."""
        x, w = self.x.double(), self.w.double()
        ref = x @ w.T
        bound = 2.0**-8 * ref.abs() + 4 * 2.0**-24 * (x.abs() @ w.abs().T)
        wrong = ~((self.y.double() - ref).abs() <= bound)
        assert not bool(wrong.any()), (
            f"{int(wrong.sum())} of {ref.numel()} wrong, first at {wrong.nonzero()[0].tolist()}"
        )
