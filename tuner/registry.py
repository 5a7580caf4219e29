"""Where families are found: packages announce them as entry points, a user's own file through `--plugin`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import cast

from tuner.arms import Arm, Artifact, Family, Target
from tuner.errors import MachineError, UsageError
from tuner.problem import Problem

GROUP = "coldtune.families"


@cache
def builtin_families() -> Mapping[str, Family]:
    """The families of all installed packages, by name.

    Raises:
        MachineError: None is installed, so the installation is broken.
    """
    found = {}
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        family = point.load()()
        found[family.name] = family
    if not found:
        raise MachineError("no kernel families are installed; install coldtune again: pip install -e .")
    return found


def families(plugin: str | None = None) -> dict[str, Family]:
    """All families by name, with those of a plugin file behind the installed ones."""
    return {**builtin_families(), **(plugin_families(plugin) if plugin else {})}


@cache
def plugin_families(path: str) -> Mapping[str, Family]:
    """Run a plugin file and take its `FAMILIES`, a list of objects that keep the family contract.

    Raises:
        UsageError: The file cannot be run or has no such list.
    """
    module = _run_file(Path(path))
    listed = getattr(module, "FAMILIES", None)
    if not isinstance(listed, list | tuple) or not listed:
        raise UsageError(f"plugin {path} has no FAMILIES list; write FAMILIES = [MyFamily()]")
    for family in listed:
        absent = [name for name in ("name", "role", "fixed", "spaces", "build", "bind") if not hasattr(family, name)]
        if absent:
            raise UsageError(f"plugin {path}: {family!r} is no family; it lacks {', '.join(absent)}")
        if family.name in builtin_families():
            raise UsageError(f"plugin {path}: the family name {family.name!r} is taken; choose another")
    return {family.name: cast(Family, family) for family in listed}


def _run_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"plugin {str(path)!r} is not a file; give the path of a Python file")
    name = f"coldtune_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"plugin {str(path)!r} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UsageError(f"plugin {path} failed: {type(error).__name__}: {error}") from error
    return module


def available(target: Target, plugin: str | None = None) -> tuple[dict[str, Family], dict[str, str]]:
    """Families that have arms for a target, and for each of the others why not."""
    usable, left_out = {}, {}
    for name, family in families(plugin).items():
        reason = family.missing(target)
        if reason is None:
            usable[name] = family
        else:
            left_out[name] = reason
    return usable, left_out


def build(problem: Problem, arm: Arm, target: Target, plugin: str | None = None) -> Artifact:
    """Build one arm with the family that it names."""
    try:
        family = families(plugin)[arm.family]
    except KeyError:
        raise UsageError(f"no family {arm.family!r} for arm {arm}; is its --plugin missing?") from None
    return family.build(problem, arm, target)
