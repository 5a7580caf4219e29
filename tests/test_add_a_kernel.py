"""The page docs/add-a-kernel.md, done as it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "add-a-kernel.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), flags=re.S)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert "Save it as `einsum_family.py`" in PAGE.read_text()
    (tmp_path / "einsum_family.py").write_text(blocks("python")[0])
    return tmp_path


def run(code: str, folder: Path, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_family_of_the_page_conforms(folder: Path) -> None:
    _, proof = blocks("python")
    assert run(proof, folder) == "7 arms are right\n"


def test_an_installed_package_is_found_by_its_entry_point(folder: Path) -> None:
    (text,) = blocks("toml")
    (group,) = tomllib.loads(text)["project"]["entry-points"].items()
    # What an installer leaves of a package: its modules, and beside them what it announces.
    about = folder / "einsum_family-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: einsum-family\nVersion: 1.0\n")
    lines = [f"[{group[0]}]", *(f"{name} = {value}" for name, value in group[1].items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    code = "from tuner.registry import builtin_families as f; print(*sorted(f()), f()['einsum'].role)"
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    assert run(code, folder, PYTHONPATH=path) == "ceiling einsum hip triton vendor candidate\n"
