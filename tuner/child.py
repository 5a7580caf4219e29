"""A supervised child process: requests and answers over a pipe, a time limit, a kill that leaves nothing behind."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tuner.errors import ArmError, ColdtuneError

_CONTEXT = multiprocessing.get_context("spawn")
_PR_SET_PDEATHSIG = 1
Handler = Callable[[Any], Any]


@dataclass(frozen=True)
class Failure:
    """What a child answers when a request raised.

    Attributes:
        status: A trial status, or `machine`.
        message: One line.
        detail: The traceback, as it is in the log.
        fatal: True if the process is of no use any more.
        took_s: Seconds that the request ran in the child; None where the child could not say.
    """

    status: str
    message: str
    detail: str
    fatal: bool
    took_s: float | None = None


class ChildDiedError(ColdtuneError):
    """The child ended without an answer; the message says by which signal or exit code."""


class ChildTimeoutError(ColdtuneError):
    """The child did not answer within its limit and was killed."""


class Child:
    """One child process that serves requests with a handler made inside it.

    `make_handler(*args)` must be importable; it runs in the child and returns the function that answers requests.
    """

    def __init__(self, name: str, log: Path, make_handler: Callable[..., Handler], *args: object) -> None:
        """Start the process; its standard output and error go to the log file."""
        self._conn, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=_main, name=name, args=(theirs, str(log), make_handler, args), daemon=True
        )
        self._process.start()
        theirs.close()
        self.name = name
        self.busy = False

    @property
    def connection(self) -> Connection:
        """The pipe, for waiting on several children at once."""
        return self._conn

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid or 0

    def send(self, request: object) -> None:
        """Send one request; exactly one answer follows."""
        try:
            self._conn.send(request)
        except (BrokenPipeError, OSError) as error:
            raise ChildDiedError(self._obituary()) from error
        self.busy = True

    def receive(self, timeout_s: float) -> Any:
        """Wait for the answer.

        Raises:
            ChildDiedError: The process ended.
            ChildTimeoutError: The limit passed; the process was killed.
        """
        try:
            if not self._conn.poll(timeout_s):
                self.kill()
                raise ChildTimeoutError(f"no answer within {timeout_s:.0f} s")
            answer = self._conn.recv()
        except (EOFError, ConnectionError) as error:
            raise ChildDiedError(self._obituary()) from error
        self.busy = False
        return answer

    def call(self, request: object, timeout_s: float) -> Any:
        """Send and wait."""
        self.send(request)
        return self.receive(timeout_s)

    def kill(self) -> None:
        """End the process and all that it started at once, and collect it."""
        if self._process.is_alive():
            # While it lives, or is not collected, no other process can have its id.
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has not come so far as to lead a group
                self._process.kill()
        self._process.join()
        self._conn.close()

    def stop(self, grace_s: float = 5.0) -> None:
        """Let the process end by itself, then kill it."""
        try:
            self._conn.send(None)
        except OSError:
            self.kill()
            return
        self._process.join(grace_s)
        self.kill()

    def _obituary(self) -> str:
        self._process.join(5)
        code = self._process.exitcode
        self.kill()
        if code is not None and code < 0:
            return f"{self.name} was killed by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit code {code}"


def _main(conn: Connection, log: str, make_handler: Callable[..., Handler], args: tuple[object, ...]) -> None:
    _die_with_parent()
    # A group of its own: Ctrl-C reaches only the parent, which alone decides what becomes of its children, and a kill
    # takes along what the child has started, such as a compiler that hangs.
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(log, "a", buffering=1) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        sys.stdout = sys.stderr = stream
        handler = make_handler(*args)
        while True:
            try:
                request = conn.recv()
            except (EOFError, ConnectionError):
                return
            if request is None:
                return
            answer = _answer(handler, request)
            conn.send(answer)
            if isinstance(answer, Failure) and answer.fatal:
                return


def _answer(handler: Handler, request: object) -> Any:
    began = time.monotonic()
    try:
        return handler(request)
    except Exception as error:
        took_s = time.monotonic() - began
        detail = traceback.format_exc()
        print(detail)
        status, message, fatal = _failure(error)
        return Failure(status, message, detail, fatal, took_s)


def _failure(error: Exception) -> tuple[str, str, bool]:
    """Status, one line, and whether the process is of no use any more."""
    if isinstance(error, ArmError):
        return error.status, str(error), bool(getattr(error, "sticky", False))
    if isinstance(error, MemoryError):
        return "runtime", "out of host memory", True
    if isinstance(error, ColdtuneError):
        return "machine", str(error), False
    text = f"{type(error).__name__}: {error}"
    # torch reports device faults as plain RuntimeErrors, after which the context is of no use.
    return "runtime", text, any(word in text for word in ("CUDA error", "HIP error"))


def _die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # It may have died before that; to compare with 1 would not do, as in a container the parent may be that.
        parent = multiprocessing.parent_process()
        if parent is not None and os.getppid() != parent.pid:
            os._exit(1)
