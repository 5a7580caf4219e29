"""How a step tells what it does; the command line decides how that looks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Progress(Protocol):
    """Receives what a step does while it does it."""

    def say(self, text: str) -> None:
        """One line worth keeping."""

    def begin(self, stage: str, total: int | None) -> None:
        """A stage with a known or unknown number of steps starts."""

    def advance(self, text: str, best_us: float | None, failed: Mapping[str, int]) -> None:
        """One step of the stage is done; `failed` counts failures by kind."""

    def end(self) -> None:
        """The stage is over."""


class Silent:
    """Says nothing."""

    def say(self, text: str) -> None:
        """Nothing."""

    def begin(self, stage: str, total: int | None) -> None:
        """Nothing."""

    def advance(self, text: str, best_us: float | None, failed: Mapping[str, int]) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""
