"""How progress looks in a terminal: a live line with best so far, time left and failures; quiet elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


class Terminal:
    """The `Progress` of the command line.

    Lines worth keeping go to standard output, or to standard error where standard output holds JSON. The live line goes
    to standard error, and only if that is a terminal.
    """

    def __init__(self, json: bool = False) -> None:
        """Choose the stream for lines."""
        self._stream = sys.stderr if json else sys.stdout
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def say(self, text: str) -> None:
        """Print one line above the live line."""
        if self._bar is not None and self._stream.isatty():
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def begin(self, stage: str, total: int | None) -> None:
        """Say the stage, and start its live line."""
        self.end()
        if not sys.stderr.isatty():
            self.say(f"{stage}: {total} steps" if total else stage)
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[state]}", markup=False),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(stage, total=total, state="")

    def advance(self, text: str, best_us: float | None, failed: Mapping[str, int]) -> None:
        """Move the live line by one step."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=1, state=state_text(text, best_us, failed))

    def end(self) -> None:
        """Take the live line away."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None


def state_text(text: str, best_us: float | None, failed: Mapping[str, int]) -> str:
    """Best so far, failures by kind, and what was done last."""
    parts = [] if best_us is None else [f"best {best_us:,.2f} us (estimate)"]
    parts += [f"{count} {kind}" for kind, count in sorted(failed.items()) if count]
    return " · ".join([*parts, text[:60]])


def show(renderables: Iterable[RenderableType]) -> None:
    """Print tables and texts on standard output; texts are not broken, and tables are wide where nobody looks."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    for renderable in renderables:
        console.print(renderable, soft_wrap=not isinstance(renderable, Table), markup=False)
