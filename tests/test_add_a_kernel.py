"""The page docs/add-a-kernel.md, done as it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "add-a-kernel.md"


def test_the_family_of_the_page_conforms(tmp_path: Path) -> None:
    family, proof = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    assert "Save it as `einsum_family.py`" in PAGE.read_text()
    (tmp_path / "einsum_family.py").write_text(family)
    done = subprocess.run(
        [sys.executable, "-c", proof], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ arms are right\n", done.stdout)
