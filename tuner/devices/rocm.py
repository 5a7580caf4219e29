"""AMD GPUs, found in the kernel's KFD topology. This version compiles for them and does not time on them."""

from __future__ import annotations

from pathlib import Path

from tuner.devices import llc
from tuner.devices.base import DeviceInfo

TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")
CANNOT_TIME = (
    "this version cannot time on AMD GPUs yet: it compiles and checks code for them only; "
    "use --device host for a rehearsal, or an NVIDIA GPU"
)

# Product names by PCI device id and compute units; None stands for any count. KFD itself gives code names only.
_NAMES: dict[int, dict[int | None, str]] = {
    0x744C: {96: "AMD Radeon RX 7900 XTX", 84: "AMD Radeon RX 7900 XT", 80: "AMD Radeon RX 7900 GRE"},
    0x7448: {None: "AMD Radeon PRO W7900"},
    0x74A1: {None: "AMD Instinct MI300X"},
    0x74A0: {None: "AMD Instinct MI300A"},
    0x74A5: {None: "AMD Instinct MI325X"},
    0x75A0: {None: "AMD Instinct MI350X"},
    0x7550: {64: "AMD Radeon RX 9070 XT", 56: "AMD Radeon RX 9070"},
    0x73BF: {80: "AMD Radeon RX 6900 XT", 72: "AMD Radeon RX 6800 XT", 60: "AMD Radeon RX 6800"},
}


def discover(nodes: Path = TOPOLOGY) -> list[DeviceInfo]:
    """AMD GPUs in the order in which KFD lists them, which is the order of an unrestricted HIP runtime.

    Args:
        nodes: The folder of topology nodes, or a recorded tree of it.
    """
    if not nodes.is_dir():
        return []
    numbered = sorted((int(node.name), node) for node in nodes.iterdir() if node.name.isdecimal())
    gpus = [(node, facts) for _, node in numbered if (facts := properties(node / "properties")).get("simd_count")]
    return [_info(node, facts, index) for index, (node, facts) in enumerate(gpus)]


def properties(path: Path) -> dict[str, int]:
    """The `name value` lines of a properties file. Empty where it may not be read: such a GPU is not ours to use."""
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def arch_of(gfx_target_version: int) -> str:
    """`gfx1100` of 110000, `gfx90a` of 90010: major, minor and stepping have two decimal digits each."""
    major, rest = divmod(gfx_target_version, 10000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def _info(node: Path, facts: dict[str, int], index: int) -> DeviceInfo:
    arch = arch_of(facts.get("gfx_target_version", 0))
    units = facts["simd_count"] // max(1, facts.get("simd_per_cu", 1))
    llc_bytes, llc_source = _llc(node, arch, units)
    unique = facts.get("unique_id", 0)
    return DeviceInfo(
        kind="rocm",
        index=index,
        name=_name(node, facts, arch, units),
        arch=arch,
        uuid=f"GPU-{unique:016x}" if unique else "",
        pci=_pci(facts),
        units=units,
        warp=facts.get("wave_front_size", 32),
        llc_bytes=llc_bytes,
        llc_source=llc_source,
        memory_bytes=_memory(node),
        # A node that also has CPU cores is an APU.
        integrated=facts.get("cpu_cores_count", 0) > 0 or _memory(node) == 0,
    )


def _llc(node: Path, arch: str, units: int) -> tuple[int, str]:
    """Level 3 is the Infinity Cache. Its entries repeat one cache for each die, so they do not add up."""
    sizes: dict[int, int] = {}
    for path in sorted((node / "caches").glob("*/properties")):
        cache = properties(path)
        level = cache.get("level", 0)
        sizes[level] = max(sizes.get(level, 0), cache.get("size", 0) << 10)
    if sizes.get(3):
        return sizes[3], f"KFD topology: level 3 cache of {sizes[3] / llc.MIB:g} MiB"
    known = llc.amd_table(arch, units)
    if known is not None:
        return known
    level = max(sizes, default=0)
    return sizes.get(level, 0), f"KFD topology: level {level} cache, no level 3 listed; check it and give --llc"


def _memory(node: Path) -> int:
    """Bytes of the device's own memory: the public and private frame buffer heaps."""
    banks = (properties(path) for path in (node / "mem_banks").glob("*/properties"))
    return sum(bank.get("size_in_bytes", 0) for bank in banks if bank.get("heap_type") in (1, 2))


def _pci(facts: dict[str, int]) -> str:
    location = facts.get("location_id", 0)
    bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
    return f"{facts.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"


def _name(node: Path, facts: dict[str, int], arch: str, units: int) -> str:
    names = _NAMES.get(facts.get("device_id", 0), {})
    known = names.get(units) or names.get(None)
    if known is not None:
        return known
    file = node / "name"
    code_name = file.read_text(encoding="ascii", errors="replace").strip() if file.is_file() else ""
    return f"AMD {code_name} {arch}" if code_name and code_name != arch else f"AMD {arch}"
