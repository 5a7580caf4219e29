"""The samples of a confirmation: checked against the design, then held as one array for each arm and neighbour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tuner import stats
from tuner.protocol import Outlier, Protocol, order
from tuner.stats import Array

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("process", "cycle", "block", "position", "arm", "neighbour", "repeat", "us", "launches")
Key = tuple[str, str]


@dataclass(frozen=True)
class Samples:
    """Times by (label, neighbour), each (processes, blocks of all cycles in order, repeats); NaN is left out."""

    times: Mapping[Key, Array]

    def medians(self, label: str, neighbour: str) -> Array:
        """Block medians, (processes, blocks)."""
        result: Array = np.nanmedian(self.times[label, neighbour], axis=-1)
        return result

    def process_medians(self, label: str, neighbour: str) -> Array:
        """Medians over the blocks of each process, (processes,)."""
        result: Array = np.median(self.medians(label, neighbour), axis=1)
        return result

    def median_us(self, label: str, neighbour: str) -> float:
        """The time of an arm: median of its process medians."""
        return float(np.median(self.process_medians(label, neighbour)))

    def log_ratios(self, baseline: str, chosen: str, neighbour: str) -> Array:
        """One log ratio a process, paired by block."""
        return stats.log_ratios(self.medians(baseline, neighbour), self.medians(chosen, neighbour))

    @property
    def repeats(self) -> int:
        """Number of all repeats."""
        return sum(values.size for values in self.times.values())

    def outliers(self, blocks: int) -> list[Outlier]:
        """Repeats over 1.3 times their block's median; `blocks` is the number of blocks in a cycle."""
        found = []
        for (label, neighbour), values in sorted(self.times.items()):
            medians = self.medians(label, neighbour)
            for process, place, repeat in np.argwhere(stats.outliers(values)).tolist():
                us = float(values[process, place, repeat])
                found.append(
                    Outlier(
                        arm=label,
                        neighbour=neighbour,
                        process=process,
                        cycle=place // blocks,
                        block=place % blocks,
                        repeat=repeat,
                        us=us,
                        times_median=us / float(medians[process, place]),
                    )
                )
        return found

    def without_outliers(self) -> Samples:
        """The same with outliers left out."""
        return Samples({key: np.where(stats.outliers(values), np.nan, values) for key, values in self.times.items()})


def gather(protocol: Protocol, frame: pd.DataFrame) -> tuple[Samples | None, list[str]]:
    """Check samples against the design and put them into arrays.

    Every arm must have every repeat of every block behind every neighbour of the protocol, in the frozen order, once,
    with a positive finite time. Processes, cycles, blocks and repeats count from 0.

    Returns:
        The samples, or None if something is wrong; and everything that is wrong, in words.
    """
    absent = [name for name in COLUMNS if name not in frame.columns]
    if absent:
        return None, [f"samples have no column {', '.join(absent)}"]
    places = _places(protocol, frame)
    known = (places >= 0).all(axis=1)
    problems = (
        [f"{int((~known).sum())} rows are of no arm, neighbour or block of the protocol"] if not known.all() else []
    )
    design = protocol.design
    shape = (len(protocol.labels), len(protocol.neighbours), *_counts(protocol))
    count = np.zeros(shape, dtype=np.int64)
    times = np.full(shape, np.nan)
    at = tuple(places[known].T)
    np.add.at(count, at, 1)
    times[at] = frame["us"].to_numpy(dtype=np.float64, na_value=np.nan)[known]
    problems += _missing(protocol, count)
    for i, label in enumerate(protocol.labels):
        for j, neighbour in enumerate(protocol.neighbours):
            here = f"{label} behind {neighbour}"
            twice = int((count[i, j] > 1).sum())
            bad = int(((count[i, j] > 0) & ~((times[i, j] > 0) & np.isfinite(times[i, j]))).sum())
            problems += [f"{here}: {twice} repeats are there twice"] if twice else []
            problems += [f"{here}: {bad} times are not positive numbers"] if bad else []
    if not problems:
        problems += _disorder(protocol, frame)
    if problems:
        return None, problems
    blocks = design.cycles * design.blocks
    keys: dict[Key, Array] = {
        (label, neighbour): times[i, j].reshape(design.processes, blocks, design.repeats)
        for i, label in enumerate(protocol.labels)
        for j, neighbour in enumerate(protocol.neighbours)
    }
    return Samples(keys), []


def _counts(protocol: Protocol) -> tuple[int, int, int, int]:
    design = protocol.design
    return design.processes, design.cycles, design.blocks, design.repeats


def _places(protocol: Protocol, frame: pd.DataFrame) -> NDArray[np.int64]:
    """Each row's index into (arm, neighbour, process, cycle, block, repeat); -1 where it has none."""
    columns = []
    for name, values in (("arm", protocol.labels), ("neighbour", protocol.neighbours)):
        numbers = {value: number for number, value in enumerate(values)}
        columns.append(np.array([numbers.get(value, -1) for value in frame[name]], dtype=np.int64))
    for name, limit in zip(("process", "cycle", "block", "repeat"), _counts(protocol), strict=True):
        numbers_of = frame[name].to_numpy(dtype=np.float64, na_value=np.nan)
        fits = (numbers_of >= 0) & (numbers_of < limit) & (numbers_of == np.floor(numbers_of))
        columns.append(np.where(fits, numbers_of, -1).astype(np.int64))
    return np.stack(columns, axis=1)


def _missing(protocol: Protocol, count: NDArray[np.int64]) -> list[str]:
    """What has no sample: whole processes and whole arms by name, the rest by number."""
    found = []
    there = count > 0
    processes = there.any(axis=(0, 1, 3, 4, 5))
    found += [f"process {number} is missing" for number in np.flatnonzero(~processes).tolist()]
    for i, label in enumerate(protocol.labels):
        for j, neighbour in enumerate(protocol.neighbours):
            here = there[i, j]
            if not here.any():
                found.append(f"{label} behind {neighbour} has no samples")
                continue
            absent = ~here[processes]
            if absent.any():
                first = int(np.flatnonzero(processes)[np.argwhere(absent)[0][0]])
                found.append(
                    f"{label} behind {neighbour}: {int(absent.sum())} repeats are missing, the first in process {first}"
                )
    return found


def _disorder(protocol: Protocol, frame: pd.DataFrame) -> list[str]:
    """Cycles whose arms were not taken in the frozen order."""
    blocks = frame.sort_values(["process", "cycle", "block", "position"], kind="stable")
    blocks = blocks.drop_duplicates(["process", "cycle", "block", "neighbour", "arm"])
    found = []
    for process in range(protocol.design.processes):
        for cycle in range(protocol.design.cycles):
            rows = blocks[(blocks["process"] == process) & (blocks["cycle"] == cycle)]
            for neighbour in protocol.neighbours:
                if rows["arm"][rows["neighbour"] == neighbour].tolist() != order(protocol, process, cycle):
                    found.append(f"process {process}, cycle {cycle}, {neighbour}: the arms are not in the frozen order")
    return found
