"""AMD: clang makes a code object without any ROCm file."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from kernels_hip import source, toolchain
from kernels_hip.source import Compiled, Kernel
from tuner.arms import Target, Value
from tuner.errors import ToolchainError

_REMARKS = {
    "registers": r"VGPRs: (\d+)",
    "scalar_registers": r"(?:Total)?SGPRs: (\d+)",
    "accumulation_registers": r"AGPRs: (\d+)",
    "spill_bytes": r"ScratchSize \[bytes/lane\]: (\d+)",
    "spilled_registers": r"VGPRs Spill: (\d+)",
    "spilled_scalar_registers": r"SGPRs Spill: (\d+)",
    "occupancy": r"Occupancy \[waves/SIMD\]: (\d+)",
    "shared_bytes": r"LDS Size \[bytes/block\]: (\d+)",
}
_LOAD_BYTES = {
    "u8": 1, "i8": 1, "ubyte": 1, "sbyte": 1, "u16": 2, "i16": 2, "d16": 2, "ushort": 2, "sshort": 2, "short": 2,
    "b32": 4, "dword": 4, "b64": 8, "dwordx2": 8, "b96": 12, "dwordx3": 12, "b128": 16, "dwordx4": 16,
}  # fmt: skip


def compile_kernel(kernel: Kernel, target: Target) -> Compiled:
    """Compile and link for one architecture.

    Raises:
        ToolchainError: There is no clang that can.
        ArmCompileError: clang refused the kernel.
    """
    clang = toolchain.clang_for_amd()
    if clang is None:
        raise ToolchainError(f"no clang for AMD GPUs; {toolchain.AMD_INSTALL}")
    with tempfile.TemporaryDirectory(prefix="coldtune-") as name:
        folder = Path(name)
        (folder / "kernel.hip").write_text(source.unit(kernel, "hip"), encoding="utf-8")
        said = toolchain.run([str(clang), *_options(target), "-o", "kernel.co", "kernel.hip"], folder)
        assembly = "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.s")))
        code = (folder / "kernel.co").read_bytes()
    resources = remarks(said, kernel.entry)
    resources["load_bytes"] = widest_load_bytes(assembly, kernel.entry)
    resources["compiler"] = f"clang {toolchain.clang_version(str(clang))}"
    return Compiled(code, resources)


def _options(target: Target) -> list[str]:
    options = [
        "-x", "hip", f"--offload-arch={target.arch}", "--cuda-device-only", "-nogpuinc", "-nogpulib",
        "-O3", "-std=c++17", "-Rpass-analysis=kernel-resource-usage",
        # The plain code object, and the assembly that it was made from.
        "--no-gpu-bundle-output", "--save-temps=obj",
    ]  # fmt: skip
    if target.warp == 64 and re.match(r"gfx1", target.arch):
        options.append("-mwavefrontsize64")
    return options


def remarks(text: str, entry: str) -> dict[str, Value]:
    """Figures that clang gives for one kernel (its kernel-resource-usage remarks)."""
    _, _, behind = text.partition(f"Function Name: {entry} ")
    own = behind.split("Function Name:")[0]
    found: dict[str, Value] = {}
    for name, pattern in _REMARKS.items():
        match = re.search(rf"(?<!\w){pattern}", own)
        if match is not None:
            found[name] = int(match.group(1))
    return found


def widest_load_bytes(assembly: str, entry: str) -> int:
    """Bytes of the widest load from global memory in one kernel; 0 if there is none."""
    body = assembly.partition(f"\n{entry}:")[2].partition("\ts_endpgm")[0]
    widths = re.findall(r"^\s*(?:global|flat|buffer)_load_([a-z0-9]+)", body, flags=re.MULTILINE)
    return max((_LOAD_BYTES.get(width, 0) for width in widths), default=0)
