"""Coldtune: an autotuner for decode kernels that refuses to fool itself.

`tuner.load("best.json")` gives the tuned product that a run exported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.runtime import load as load

__all__ = ["__version__", "load"]


def __getattr__(name: str) -> object:
    """Import on first use, so that `import tuner` costs nothing."""
    if name == "__version__":
        from importlib.metadata import version

        return version("coldtune")
    if name == "load":
        from tuner.runtime import load

        return load
    raise AttributeError(f"module 'tuner' has no attribute {name!r}")
