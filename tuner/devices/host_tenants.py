"""Other processes that keep the processor busy."""

from __future__ import annotations

import os
import time

import psutil

from tuner.arms import Value

BUSY_PERCENT = 3.0


class Tenants:
    """Processor time of other processes between two looks."""

    def __init__(self, cores: int) -> None:
        """Nothing is read yet; the first look only notes where everyone stands."""
        self._cores = cores
        self._when: float | None = None
        self._seconds: dict[tuple[int, float], float] = {}

    def look(self) -> list[dict[str, Value]]:
        """Processes that used over 3 % of the usable cores since the last look.

        This process, its parent and its descendants do not count: they are this tool.
        """
        own = {os.getpid(), os.getppid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        now = time.time()
        seconds: dict[tuple[int, float], float] = {}
        busy: list[dict[str, Value]] = []
        for process in psutil.process_iter():
            if process.pid in own:
                continue
            try:
                used, started = process.cpu_times(), process.create_time()
                key = (process.pid, started)
                seconds[key] = used.user + used.system
                percent = self._percent(key, seconds[key], now)
                if percent > BUSY_PERCENT:
                    busy.append({"pid": process.pid, "name": process.name(), "busy_percent": round(percent)})
            except psutil.Error:
                # It ended while it was looked at, or may not be looked at.
                continue
        self._when, self._seconds = now, seconds
        return busy

    def _percent(self, key: tuple[int, float], seconds: float, now: float) -> float:
        if self._when is None or now <= self._when:
            return 0.0
        before = self._seconds.get(key)
        if before is None:
            # New since the last look: all of its time counts. Older but unseen: nothing is known of it yet.
            before = 0.0 if key[1] >= self._when else seconds
        return 100.0 * (seconds - before) / (now - self._when) / self._cores
