"""What is read from compiled files, all of which are ELF: the hash of the code that runs, and a cubin's figures."""

from __future__ import annotations

import hashlib
import io
import struct

from tuner.arms import Value

SHF_WRITE = 1
SHF_ALLOC = 2
SHF_EXECINSTR = 4
# Attributes in a cubin's .nv.info section, as NVIDIA's cuobjdump names them: a symbol and a value each.
EIFMT_SVAL = 4
EIATTR_FRAME_SIZE = 0x11
EIATTR_REGCOUNT = 0x2F


def code_hash(code: bytes) -> str:
    """SHA-256 of the instructions and the constants of an ELF file: cubin, code object or shared library.

    Debug sections hold paths, notes hold build numbers, and both are left out.
    """
    from elftools.elf.elffile import ELFFile

    digest = hashlib.sha256()
    for section in ELFFile(io.BytesIO(code)).iter_sections():
        flags = section["sh_flags"]
        loaded = section["sh_type"] == "SHT_PROGBITS" and flags & SHF_ALLOC and not flags & SHF_WRITE
        constant = section.name.startswith((".rodata", ".nv.constant"))
        if loaded and (flags & SHF_EXECINSTR or constant):
            digest.update(section.name.encode() + b"\0" + section.data())
    return digest.hexdigest()


def cubin_resources(code: bytes, entry: str) -> dict[str, Value]:
    """Registers of a kernel and bytes of its stack, which holds nothing but spills: no kernel here has arrays on it."""
    from elftools.elf.elffile import ELFFile

    elf = ELFFile(io.BytesIO(code))
    info, symbols = elf.get_section_by_name(".nv.info"), elf.get_section_by_name(".symtab")
    found: dict[str, Value] = {}
    if info is None or symbols is None:
        return found
    names = {EIATTR_REGCOUNT: "registers", EIATTR_FRAME_SIZE: "spill_bytes"}
    data, at = info.data(), 0
    while at + 4 <= len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, at)
        at += 4
        if form != EIFMT_SVAL:
            continue
        if size == 8 and attribute in names:
            symbol, value = struct.unpack_from("<II", data, at)
            if symbols.get_symbol(symbol).name == entry:
                found[names[attribute]] = value
        at += size
    return found
