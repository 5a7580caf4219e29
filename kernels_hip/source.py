"""From a kernel and its macros to the text that a compiler reads, and to the hash of the sources behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tuner.arms import Value

FOLDER = Path(__file__).parent
PRELUDES = {
    "hip": ("amd_prelude.h",),
    "cuda": ("nvrtc_prelude.h",),
    "host": ("host_prelude.h", "host_executor.hpp", "host_block.hpp", "host_fiber.hpp"),
}


@dataclass(frozen=True)
class Kernel:
    """What is compiled.

    Attributes:
        file: The source, such as `skinny_gemm.hip`.
        entry: Name of the kernel.
        macros: Its parameters; `WARP`, the threads of a warp, is one of them.
    """

    file: str
    entry: str
    macros: Mapping[str, int]


@dataclass(frozen=True)
class Compiled:
    """What a compiler gives: code, and figures found in it."""

    code: bytes
    resources: dict[str, Value] = field(default_factory=dict)


def unit(kernel: Kernel, backend: str) -> str:
    """The whole text to compile: warp size, prelude, macros, source.

    The macros stand behind the prelude, where names as short as `K` cannot meet those of other headers. On the host the
    prelude is included, not copied, and an export of the entry stands at the end.
    """
    warp = f"#define WARP {kernel.macros['WARP']}\n"
    macros = "".join(f"#define {name} {value}\n" for name, value in kernel.macros.items() if name != "WARP")
    source = f'#line 1 "{kernel.file}"\n' + _read(kernel.file)
    if backend == "host":
        return f'{warp}#include "{PRELUDES["host"][0]}"\n{macros}{source}\nCOLDTUNE_EXPORT({kernel.entry})\n'
    name = PRELUDES[backend][0]
    prelude = _read(name).replace("#pragma once\n", "\n")
    return f'{warp}#line 1 "{name}"\n{prelude}{macros}{source}'


def source_hash(file: str, backend: str) -> str:
    """SHA-256 of a source and of the preludes that it is compiled behind."""
    digest = hashlib.sha256()
    for name in (file, *PRELUDES[backend]):
        digest.update(name.encode() + b"\0" + _read(name).encode() + b"\0")
    return digest.hexdigest()


def _read(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")
