"""Facts read from compiled code: registers, spills, width of weight loads, hash. Needs no GPU and no Triton."""

from __future__ import annotations

import hashlib
import io
import re
import struct
from collections.abc import Iterator

from tuner.arms import Step, Value
from tuner.errors import ArmCompileError

# Attributes in a cubin's .nv.info section: a (symbol, value) pair each. Names as in NVIDIA's cuobjdump.
_EIATTR_FRAME_SIZE = 0x11
_EIATTR_REGCOUNT = 0x2F
_EIFMT_SVAL = 4
_SHF_ALLOC = 2
_AMD_LOAD_BYTES = {
    "u8": 1, "i8": 1, "ubyte": 1, "sbyte": 1, "u16": 2, "i16": 2, "ushort": 2, "sshort": 2, "d16": 2, "short": 2,
    "b32": 4, "dword": 4, "b64": 8, "dwordx2": 8, "b96": 12, "dwordx3": 12, "b128": 16, "dwordx4": 16,
}  # fmt: skip


def code_hash(code: bytes, step: Step) -> str:
    """SHA-256 of what runs: loaded program sections of the ELF file, and how they are launched.

    Debug sections hold paths and line numbers and are left out. The geometry is in, since the same instructions on
    another grid are another operation.
    """
    from elftools.elf.elffile import ELFFile

    digest = hashlib.sha256(repr((step.grid, step.block, step.shared_bytes, step.dependent)).encode())
    for section in ELFFile(io.BytesIO(code)).iter_sections():
        if section["sh_type"] == "SHT_PROGBITS" and section["sh_flags"] & _SHF_ALLOC:
            digest.update(section.name.encode() + b"\0" + section.data())
    return digest.hexdigest()


def parameters(text: str, entry: str, backend: str) -> list[int]:
    """Bytes of each argument of the compiled kernel, in order, as its PTX or its AMD metadata declares them.

    Raises:
        ArmCompileError: The declaration is not found.
    """
    if backend == "cuda":
        head = re.search(rf"\.entry\s+{re.escape(entry)}\s*\((.*?)\)", text, flags=re.DOTALL)
        if head is not None:
            return [int(bits) // 8 for bits in re.findall(r"\.param\s+\.[a-z](\d+)", head.group(1))]
    else:
        notes = re.search(r"^\s*-?\s+\.args:(.*?)\.group_segment_fixed_size", text, flags=re.DOTALL | re.MULTILINE)
        if notes is not None:
            kinds = re.findall(r"\.size:\s+(\d+)\s+\.value_kind:\s+(\w+)", notes.group(1))
            return [int(size) for size, kind in kinds if not kind.startswith("hidden")]
    raise ArmCompileError(f"cannot find the arguments of {entry} in the compiled code")


def cubin_resources(code: bytes, entry: str) -> dict[str, Value]:
    """Registers a thread and bytes of its stack. These kernels have no arrays of their own: a stack is spills."""
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(code))
    info, symbols = elf.get_section_by_name(".nv.info"), elf.get_section_by_name(".symtab")
    if info is None or symbols is None:
        return {}
    names = {_EIATTR_REGCOUNT: "registers", _EIATTR_FRAME_SIZE: "spill_bytes"}
    return {
        names[attribute]: value
        for attribute, symbol, value in _nv_info(info.data())
        if attribute in names and symbols.get_symbol(symbol).name == entry
    }


def _nv_info(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(attribute, symbol index, value) of each pair in a .nv.info section."""
    at = 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form == _EIFMT_SVAL:
            if size == 8:
                symbol, value = struct.unpack_from("<II", data, at)
                yield attribute, symbol, value
            at += size


def amdgcn_resources(text: str) -> dict[str, Value]:
    """Registers and scratch bytes a thread, from the kernel's metadata in AMD assembly."""
    keys = {
        "registers": "vgpr_count",
        "scalar_registers": "sgpr_count",
        "spill_bytes": "private_segment_fixed_size",
        "spilled_registers": "vgpr_spill_count",
    }
    found: dict[str, Value] = {}
    for name, key in keys.items():
        match = re.search(rf"^\s+\.{key}:\s+(\d+)", text, flags=re.MULTILINE)
        if match is not None:
            found[name] = int(match.group(1))
    return found


def ptx_load_bytes(text: str, entry: str, argument: int) -> int:
    """Bytes of the widest global load whose address comes from one argument of the kernel; 0 if there is none.

    Addresses are followed through the registers that are computed from the argument. A load ends the trail: what it
    brings is data.
    """
    derived: set[str] = set()
    lines = [line.split("//")[0].strip() for line in text.splitlines()]
    start = f"[{entry}_param_{argument}]"
    grown = True
    while grown:
        before = len(derived)
        for line in lines:
            if "ld.global" in line or "cp.async" in line:
                continue
            registers = re.findall(r"%\w+", line)
            if registers and (start in line or derived.intersection(registers[1:])):
                derived.add(registers[0])
        grown = len(derived) > before
    widest = 0
    for line in lines:
        load = re.search(r"ld\.global\S*?(?:\.v(\d))?\.[busf](\d+)\s.*\[\s*(%\w+)", line)
        if load is not None and load.group(3) in derived:
            widest = max(widest, int(load.group(1) or 1) * int(load.group(2)) // 8)
        copy = re.search(r"cp\.async\.c\S+\s+\[.*?\],\s*\[\s*(%\w+)[^\]]*\],\s*(0x[0-9a-f]+|\d+)", line)
        if copy is not None and copy.group(1) in derived:
            widest = max(widest, int(copy.group(2), 0))
    return widest


def amdgcn_load_bytes(text: str, file: str, lines: range) -> int:
    """Bytes of the widest load that AMD assembly attributes to these lines of a source file; 0 if there is none."""
    numbers = set(re.findall(rf'^\s*\.file\s+(\d+)\s.*"{re.escape(file)}"', text, flags=re.MULTILINE))
    widest = 0
    inside = False
    for line in text.splitlines():
        place = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line)
        if place is not None:
            inside = place.group(1) in numbers and int(place.group(2)) in lines
            continue
        load = re.match(r"\s*(?:global|buffer|flat)_load_([a-z0-9]+)", line)
        if load is not None and inside:
            widest = max(widest, _AMD_LOAD_BYTES.get(load.group(1), 0))
    return widest
