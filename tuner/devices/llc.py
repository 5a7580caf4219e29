"""The last-level cache in front of DRAM: parsing, and what is known where a system does not say. Pure but for reads.

On AMD this is the Infinity Cache (MALL), which KFD lists as level 3; the L2 that torch reports is a small part of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

MIB = 1 << 20

# MiB by architecture, then by compute units where cards of one architecture differ. Key 0 is any other count.
# Sources: vendors' product pages (Infinity Cache; for gfx908 and gfx90a, which have none, the L2 of one die).
_AMD_MIB: dict[str, dict[int, int]] = {
    "gfx908": {0: 8},
    "gfx90a": {0: 8},
    "gfx942": {0: 256},
    "gfx950": {0: 256},
    "gfx1030": {0: 128},
    "gfx1031": {0: 96, 36: 80},
    "gfx1032": {0: 32},
    "gfx1034": {0: 16},
    "gfx1100": {0: 96, 84: 80, 80: 64, 70: 64},
    "gfx1101": {0: 64, 54: 48},
    "gfx1102": {0: 32},
    "gfx1151": {0: 32},
    "gfx1200": {0: 32},
    "gfx1201": {0: 64, 48: 48},
}


def amd_table(arch: str, units: int) -> tuple[int, str] | None:
    """Bytes and source by architecture and compute units; None for an architecture that the table lacks."""
    sizes = _AMD_MIB.get(arch)
    if sizes is None:
        return None
    mib = sizes.get(units, sizes[0])
    return mib * MIB, f"table: {arch} with {units} CUs has {mib} MiB"


def parse_size(text: str) -> int:
    """Bytes of a size as sysfs writes it: `32768K`, `96M` or a plain number; 0 if it is none of these."""
    match = re.fullmatch(r"\s*(\d+)\s*([KMG]?)\s*", text)
    if match is None:
        return 0
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def host_cache(cpus: Iterable[int], root: Path) -> tuple[int, str] | None:
    """The largest cache level of the usable CPUs, all instances together.

    A processor can have one last-level cache for each group of cores. Work that is spread over all cores then finds its
    data in any of them, so their sizes add up.

    Args:
        cpus: CPUs that this process may run on.
        root: `/sys/devices/system/cpu`, or a recorded tree of it.

    Returns:
        Bytes and source, or None where the tree says nothing.
    """
    instances: dict[int, dict[str, int]] = {}
    for cpu in cpus:
        for index in sorted((root / f"cpu{cpu}" / "cache").glob("index*")):
            number, size = _read(index / "level"), parse_size(_read(index / "size"))
            if number.isdecimal() and size and _read(index / "type") != "Instruction":
                shared = _read(index / "shared_cpu_list") or str(cpu)
                instances.setdefault(int(number), {})[shared] = size
    if not instances:
        return None
    level = max(instances)
    sizes = instances[level]
    total = sum(sizes.values())
    return total, f"{root}: {len(sizes)} x level {level}, {total / MIB:g} MiB in all"


def _read(path: Path) -> str:
    """The stripped text of a sysfs file; empty where it is missing, as virtual machines leave some out."""
    return path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""
