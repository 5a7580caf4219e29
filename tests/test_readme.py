"""The README's figures are those of the committed receipts."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def tables():
    spec = importlib.util.spec_from_file_location("bench_table", ROOT / "bench" / "table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_table"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["headline", "shapes"])
def test_the_tables_follow_from_the_receipts(name: str) -> None:
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"<!-- results: {name} -->\n(.*?)\n<!-- /results -->", text, flags=re.S)
    assert found is not None, f"README.md has no table {name}"
    assert found.group(1) == getattr(tables(), name)()


def test_every_page_that_the_readme_names_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target


def test_the_readme_runs_what_ci_runs() -> None:
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    for line in ("pip install -c constraints.txt -e '.[test]'", "pytest -m 'not gpu and not slow'"):
        assert line in readme
    assert "pip install -q -c constraints.txt -e '.[test]'" in ci and "pytest -m 'not gpu and not slow'" in ci
