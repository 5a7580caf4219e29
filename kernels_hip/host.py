"""The host: a C++ compiler makes a shared library in which every thread of a workgroup is a fiber."""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path

from kernels_hip import source, toolchain
from kernels_hip.source import FOLDER, Compiled, Kernel
from tuner.errors import ToolchainError


def compile_kernel(kernel: Kernel) -> Compiled:
    """Compile for the processor of this machine.

    Raises:
        ToolchainError: There is no C++ compiler.
        ArmCompileError: It refused the kernel.
    """
    return Compiled(compile_text(source.unit(kernel, "host")), {"compiler": compiler_name()})


def compile_text(text: str) -> bytes:
    """Compile a translation unit to a shared library; it may include the headers of this package."""
    compiler = toolchain.host_compiler()
    if compiler is None:
        raise ToolchainError(f"no C++ compiler; {toolchain.HOST_INSTALL}")
    with tempfile.TemporaryDirectory(prefix="coldtune-") as name:
        folder = Path(name)
        (folder / "kernel.cpp").write_text(text, encoding="utf-8")
        toolchain.run([str(compiler), *options(), "-shared", "-o", "kernel.so", "kernel.cpp"], folder)
        return (folder / "kernel.so").read_bytes()


def options() -> list[str]:
    """Options of the compiler. No option lets it reorder additions; multiply and add may be fused, as on a GPU."""
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    return [
        "-std=c++17", "-O3", native, "-ffp-contract=fast", "-fPIC", "-pthread", "-fvisibility=hidden",
        # glibc's checked longjmp takes a switch of fibers for a mistake.
        "-U_FORTIFY_SOURCE", f"-I{FOLDER}",
    ]  # fmt: skip


def compiler_name() -> str:
    """The compiler's own name and version, as it prints them."""
    compiler = toolchain.host_compiler()
    return toolchain.version_line(str(compiler)) if compiler else ""
