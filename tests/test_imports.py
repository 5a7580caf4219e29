"""The direction of imports: cli, workflow, then instrument and protocol, then arms, problem and devices."""

from __future__ import annotations

import ast
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


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[name] = path
    return found


def imports(path: Path, top_level: bool = False) -> set[str]:
    """Modules of this project that a file imports; for annotations only does not count."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
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
        wrong = [t for t in imports(path) & set(modules()) if t.startswith("tuner.") and t not in KERNELS_MAY]
        assert not wrong, f"{name} imports {wrong}"


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
