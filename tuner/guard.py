"""What stands between a command and the shell: exit codes, one-line errors, interrupts.

| code | meaning                                                                                              |
| ---- | ---------------------------------------------------------------------------------------------------- |
| 0    | done, whatever the verdict says                                                                      |
| 1    | the confirmation is VOID, or `--require faster` was not met                                          |
| 2    | bad usage                                                                                            |
| 3    | refused: not what was frozen, or damaged                                                             |
| 4    | the machine cannot: memory, disk, permission, no such device; also a fault of Coldtune itself         |
| 130  | interrupted by Ctrl-C, SIGTERM or SIGHUP; the message says what was kept                             |
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from tuner.errors import ColdtuneError, ToolchainError

if TYPE_CHECKING:
    from types import FrameType

    from tuner.store import Run

INTERRUPTED = 130
NOTHING_BEGUN = "interrupted: nothing was begun that could be kept"
TORCH_LINE = (
    "torch is not installed, and nothing can be measured without it; install it with: pip install 'coldtune[cpu]' "
    "(for an NVIDIA GPU: pip install 'coldtune[cuda]'; on AMD: a ROCm build of torch from its own index)"
)


class InterruptedRunError(ColdtuneError):
    """A signal ended the work; the message says what was kept and how to go on."""

    exit_code = INTERRUPTED


def run_command(command: Callable[[], object], debug: bool, as_json: bool) -> int:
    """Run a command and give its exit code; errors become one line on standard error.

    Args:
        command: Parses and does the work. It returns an exit code or None, and may raise anything.
        debug: Let the traceback be seen.
        as_json: Put the error on standard output too, as one JSON object.
    """
    try:
        with signals_interrupt():
            code = command()
        if code == INTERRUPTED:
            # The parser turns an interrupt that nobody caught into this code, without a word.
            return _failed(NOTHING_BEGUN, INTERRUPTED, debug, as_json)
        return code if isinstance(code, int) else 0
    except ColdtuneError as error:
        return _failed(str(error), error.exit_code, debug, as_json)
    except KeyboardInterrupt:
        return _failed(NOTHING_BEGUN, INTERRUPTED, debug, as_json)
    except Exception as error:
        if type(error).__name__ == "Abort":
            # Older versions of the parser say an interrupt this way.
            return _failed(NOTHING_BEGUN, INTERRUPTED, debug, as_json)
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            # The parser's own errors: wrong options, missing values. They know how to print themselves.
            if as_json:
                _print_json(str(error), int(error.exit_code))
            error.show()
            return int(error.exit_code)
        return _failed(_unexpected(error), 4, debug, as_json)


def need_torch() -> None:
    """Say which line installs torch, before anything is begun that needs it.

    Raises:
        ToolchainError: torch is not installed.
    """
    from importlib.util import find_spec

    try:
        found = find_spec("torch")
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ToolchainError(TORCH_LINE)


@contextmanager
def signals_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end the work as Ctrl-C does; what was ignored before (nohup) stays ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def keeping(run: Run) -> Iterator[None]:
    """Turn an interrupt into a message that says what the run folder holds and how to go on.

    Raises:
        InterruptedRunError: The work was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        kill_children()
        kept = [f"{len(run.trials())} trials"]
        if run.has("protocol.json"):
            kept.append("the frozen protocol")
        open_attempts = [path.name for path in run.confirmations() if not (path / "verdict.json").exists()]
        if open_attempts:
            kept.append(f"{open_attempts[-1]}, which was not finished and counts as an attempt")
        how = f"go on with: tune --resume {shlex.quote(str(run.path))}"
        raise InterruptedRunError(f"interrupted: {' and '.join(kept)} are kept in {run.path}; {how}") from None


def kill_children() -> None:
    """End every process that this one started, and theirs."""
    import psutil

    children = psutil.Process(os.getpid()).children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=5)


def _unexpected(error: Exception) -> str:
    if isinstance(error, ImportError) and error.name:
        package = error.name.partition(".")[0]
        if package == "torch":
            return TORCH_LINE
        if isinstance(error, ModuleNotFoundError):
            return f"the package {package!r} is not installed; install what is needed with: pip install coldtune"
    text = str(error).strip().splitlines()
    return (
        f"a fault of coldtune itself, {type(error).__name__}: {text[0][:300] if text else 'no message'}; "
        "what was measured is kept. Run again with --debug to see where, and report it"
    )


def _failed(message: str, code: int, debug: bool, as_json: bool) -> int:
    if debug:
        traceback.print_exc()
    if as_json:
        _print_json(message, code)
    print(f"tune: {message}", file=sys.stderr)
    return code


def _print_json(message: str, code: int) -> None:
    print(json.dumps({"schema": 1, "error": message, "exit_code": code}))
