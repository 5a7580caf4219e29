"""The direction of imports: cli, workflow, then instrument and protocol, then arms, problem and devices."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("tuner", "kernels_triton", "kernels_hip", "kernels_vendor", "search_spaces")
# Each layer may import its own and the ones below it.
LAYERS = (
    ("tuner.errors",),
    ("tuner.problem", "tuner.formats", "tuner.files", "tuner.folders"),
    ("tuner.arms", "tuner.space"),
    ("tuner.store", "tuner.ledger", "tuner.stats", "tuner.child", "tuner.registry"),
    ("tuner.devices", "tuner.pool"),
    ("tuner.instrument", "tuner.protocol", "tuner.protocol_markdown", "tuner.samples", "tuner.comparison"),
    ("tuner.verdict", "tuner.worker", "tuner.runtime", "tuner.testing"),
    ("tuner.workflow",),
    ("tuner.guard", "tuner.terminal", "tuner.cli"),
    ("tuner.__main__", "tuner"),
)
KERNELS_MAY = ("tuner.arms", "tuner.space", "tuner.problem", "tuner.formats", "tuner.errors")
HEAVY = {"torch", "triton", "pandas", "numpy", "scipy", "optuna", "plotly", "pyarrow"}
# What every command loads, and what a parent needs to list devices, compile and supervise.
LIGHT = (
    *("tuner", "tuner.__main__", "tuner.cli", "tuner.guard", "tuner.terminal", "tuner.store", "tuner.ledger"),
    *("tuner.files", "tuner.folders", "tuner.errors", "tuner.formats", "tuner.problem", "tuner.arms", "tuner.space"),
    *("tuner.registry", "tuner.child", "tuner.pool", "tuner.devices", "tuner.devices.base", "tuner.workflow.tune"),
    *("tuner.protocol", "tuner.workflow.progress", "tuner.workflow.results", "tuner.workflow.search"),
)


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = path
    return found


def imports(path: Path, top_level: bool = False) -> set[str]:
    """Modules that a file imports; for annotations only does not count, and at the top level only what runs there."""
    tree = ast.parse(path.read_text())
    found = set()
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path} imports by a relative name"
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (named & set(modules())) or {node.module}
    return found


def layer(name: str) -> int:
    best = [
        (len(prefix), number)
        for number, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if name == prefix or (name.startswith(prefix + ".") and prefix != "tuner")
    ]
    assert best, f"{name} belongs to no layer; put it into one"
    return max(best)[1]


def test_the_framework_imports_downward_only() -> None:
    known = modules()
    upward = []
    for name, path in known.items():
        if not name.startswith("tuner"):
            continue
        for target in imports(path) & set(known):
            if target.startswith("tuner.") and layer(target) > layer(name):
                upward.append(f"{name} imports {target}")
    assert not upward, "\n".join(upward)


def test_the_framework_names_no_kernel_package() -> None:
    for name, path in modules().items():
        if name.startswith("tuner"):
            assert not [t for t in imports(path) if t.split(".")[0] in PACKAGES[1:]], name


def test_kernel_packages_know_only_the_contract() -> None:
    for name, path in modules().items():
        if name.startswith("tuner"):
            continue
        known = imports(path) & set(modules())
        wrong = [t for t in known if t.split(".")[0] == "tuner" and t not in KERNELS_MAY]
        own = name.split(".")[0]
        wrong += [t for t in known if t.split(".")[0] in PACKAGES[1:] and t.split(".")[0] not in (own, "search_spaces")]
        assert not wrong, f"{name} imports {wrong}"


def test_search_spaces_know_only_the_contract() -> None:
    for name, path in modules().items():
        if name.startswith("search_spaces"):
            outside = {t for t in imports(path) if t.split(".")[0] in (*PACKAGES, *HEAVY)}
            assert outside <= {*KERNELS_MAY, *(m for m in modules() if m.startswith("search_spaces"))}, (name, outside)


def test_what_every_command_loads_is_light() -> None:
    """Nothing heavy at the top, in these files or in what they import there."""
    known = modules()
    top = {name: imports(path, top_level=True) for name, path in known.items()}
    assert set(LIGHT) <= set(known)

    def loads(name: str, seen: set[str]) -> set[str]:
        seen.add(name)
        heavy = {t.split(".")[0] for t in top[name]} & HEAVY
        # Importing a module imports the packages above it.
        inside = {t for t in top[name] if t in known} | {name.rsplit(".", 1)[0]} & set(known)
        return heavy.union(*(loads(t, seen) for t in inside - seen)) if inside - seen else heavy

    assert {name: found for name in LIGHT if (found := loads(name, set()))} == {}


def test_the_walk_that_finds_imports_finds_them(tmp_path: Path) -> None:
    """The tests above are void if it is blind."""
    path = tmp_path / "m.py"
    path.write_text(
        "import torch.nn\nfrom tuner import store\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import pandas\ndef f():\n    from tuner.workflow.explore import explore\n"
        "try:\n    import scipy\nexcept ImportError:\n    pass\n"
    )
    assert imports(path) == {"torch.nn", "tuner.store", "typing", "tuner.workflow.explore", "scipy"}
    assert imports(path, top_level=True) == {"torch.nn", "tuner.store", "typing", "scipy"}
    assert layer("tuner.workflow.explore") > layer("tuner.store") > layer("tuner.arms") > layer("tuner.errors")


def test_there_are_no_circles() -> None:
    known = modules()
    graph = {name: {t for t in imports(path, top_level=True) & set(known) if t != name} for name, path in known.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " -> ".join([*way, name])
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*way, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_only_files_are_read_with_pydantic() -> None:
    users = {name for name, path in modules().items() if any(t.split(".")[0] == "pydantic" for t in imports(path))}
    assert users <= {"tuner.store", "tuner.protocol"}
