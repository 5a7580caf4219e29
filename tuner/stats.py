"""Spread, intervals and tie-breaking: pure functions on arrays.

Times are positive. A ratio is baseline / chosen. Work on ratios is done on their logarithms, so that exchanging the two
arms turns a result round exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

Array = NDArray[np.float64]
_Key = TypeVar("_Key", bound=Hashable)

OUTLIER = 1.3
REPLICATES = 100_000
_CHUNK_BYTES = 4 << 20
_MOST_ENUMERATED = 5
_DRAWN_RESAMPLES = 4096
# Standard error of a median over that of a mean, for normal noise: sqrt(pi / 2).
_MEDIAN_ERROR = math.sqrt(math.pi / 2)


@dataclass(frozen=True)
class Interval:
    """A ratio with its interval; `low` and `high` are None where one process gives none."""

    ratio: float
    low: float | None
    high: float | None


def log_ratios(baseline: Array, chosen: Array) -> Array:
    """One log ratio a process: the mean over its blocks of the paired log ratio of block medians.

    Args:
        baseline: Block medians, (processes, blocks).
        chosen: The same of the other arm, measured in the same blocks.
    """
    result: Array = np.log(baseline / chosen).mean(axis=1)
    return result


def t_interval(values: Array, confidence: float = 0.95) -> Interval:
    """Interval of a ratio from one log ratio a process, by Student's t with P - 1 degrees of freedom.

    Blocks of one process share its memory placement and clocks, so processes, not blocks, are the independent units
    (Kalibera and Jones, "Rigorous benchmarking in reasonable time", ISMM 2013; Student, Biometrika 6, 1908).
    """
    centre = float(values.mean())
    if values.size < 2:
        return Interval(math.exp(centre), None, None)
    half = float(stats.t.ppf(0.5 + confidence / 2, values.size - 1)) * _standard_error(values)
    return Interval(math.exp(centre), math.exp(centre - half), math.exp(centre + half))


def p_value(values: Array, side: Literal["two", "above", "below"] = "two") -> float | None:
    """Test of "the ratio is 1": the p value by the t test that belongs to `t_interval`; None for one process.

    Args:
        values: One log ratio a process.
        side: `two`; `above` for the alternative that the ratio is above 1; `below` for the opposite.
    """
    if values.size < 2:
        return None
    error, centre = _standard_error(values), float(values.mean())
    if error == 0.0:
        t = math.copysign(math.inf, centre) if centre else 0.0
    else:
        t = centre / error
    if side == "two":
        return float(2 * stats.t.sf(abs(t), values.size - 1))
    return float(stats.t.sf(t if side == "above" else -t, values.size - 1))


def _standard_error(values: Array) -> float:
    return float(values.std(ddof=1)) / math.sqrt(values.size)


def bootstrap_interval(
    baseline: Array, chosen: Array, seed: int, confidence: float = 0.95, replicates: int = REPLICATES
) -> Interval:
    """Hierarchical bootstrap of the ratio: resample processes, in them blocks, in them the repeats of each arm.

    A replicate takes processes with replacement, in each of them blocks with replacement (both arms of a block stay
    together), and in each block the repeats of each arm with replacement; its value is the mean over processes and
    blocks of the log ratio of block medians. The interval lies between percentiles (Efron and Tibshirani, "An
    Introduction to the Bootstrap", 1993; Davison and Hinkley, "Bootstrap Methods and their Application", 1997, 3.8).

    The same samples and seed give the same digits.

    Args:
        baseline: Times, (processes, blocks, repeats); NaN marks a repeat that is left out.
        chosen: The same of the other arm.
        seed: Seed of the draws.
        confidence: Share of replicates between the ends.
        replicates: Number of replicates.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    tables = [_resampled_medians(times, rng) for times in (baseline, chosen)]
    processes, blocks = baseline.shape[:2]
    found = np.empty(replicates)
    chunk = max(1, _CHUNK_BYTES // (8 * processes * blocks))
    for start in range(0, replicates, chunk):
        size = min(chunk, replicates - start)
        process = rng.integers(processes, size=(size, processes, 1), dtype=np.int32)
        block = rng.integers(blocks, size=(size, processes, blocks), dtype=np.int32)
        cell = process * np.int32(blocks) + block
        first, second = (table.draw(cell, rng) for table in tables)
        found[start : start + size] = (first - second).mean(axis=(1, 2))
    tail = (1 - confidence) / 2
    low, high = np.quantile(found, [tail, 1 - tail])
    centre = log_ratios(np.nanmedian(baseline, axis=-1), np.nanmedian(chosen, axis=-1)).mean()
    return Interval(math.exp(centre), math.exp(low), math.exp(high))


@dataclass(frozen=True)
class _Resamples:
    """Log medians of the resamples of every block, one block behind the other; those of a block are equally likely."""

    values: Array
    start: NDArray[np.int32]
    count: NDArray[np.float64]

    def draw(self, cell: NDArray[np.int32], rng: np.random.Generator) -> Array:
        """One resampled log median for each block number in `cell`."""
        place = rng.random(cell.shape)
        place *= self.count[cell]
        at: NDArray[np.int32] = place.astype(np.int32)
        at += self.start[cell]
        return self.values[at]


def _resampled_medians(times: Array, rng: np.random.Generator) -> _Resamples:
    """Tabulate the resamples of each block: all of them up to five repeats, else 4,096 drawn ones."""
    rows = []
    for block in times.reshape(-1, times.shape[-1]):
        kept = block[~np.isnan(block)]
        rows.append(np.log(np.median(kept[_picks(kept.size, rng)], axis=1)))
    counts = np.array([row.size for row in rows])
    start = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
    return _Resamples(np.concatenate(rows), start, counts.astype(np.float64))


def _picks(repeats: int, rng: np.random.Generator) -> NDArray[np.int64]:
    if repeats <= _MOST_ENUMERATED:
        return np.array(list(itertools.product(range(repeats), repeat=repeats)), dtype=np.int64)
    return rng.integers(repeats, size=(_DRAWN_RESAMPLES, repeats))


def ranges_overlap(first: Array, second: Array) -> bool:
    """Whether the closed ranges of two sets of values have a point in common."""
    return bool(first.min() <= second.max() and second.min() <= first.max())


def spread(times: Array) -> float:
    """p95 - p5 of repeats, each over its block's median, so as a share of it.

    Args:
        times: Times, (..., repeats); NaN marks a repeat that is left out.
    """
    relative = times / np.nanmedian(times, axis=-1, keepdims=True)
    low, high = np.nanquantile(relative, [0.05, 0.95])
    return float(high - low)


def outliers(times: Array) -> NDArray[np.bool_]:
    """True for repeats over 1.3 times the median of their block; times are (..., repeats)."""
    result: NDArray[np.bool_] = times > OUTLIER * np.nanmedian(times, axis=-1, keepdims=True)
    return result


def halves_drift(medians: Array) -> float:
    """How much slower the second half of a process is than the first, as a share; the mean over processes.

    Args:
        medians: Block medians in the order measured, (processes, blocks), at least two blocks.
    """
    half = medians.shape[1] // 2
    first, second = np.median(medians[:, :half], axis=1), np.median(medians[:, -half:], axis=1)
    return float(np.expm1(np.log(second / first).mean()))


def holm(p_values: Sequence[float]) -> list[float]:
    """Step-down corrected p values in the given order (Holm, Scandinavian Journal of Statistics 6, 1979)."""
    corrected = [0.0] * len(p_values)
    worst = 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[place]))
        corrected[place] = worst
    return corrected


def relative_spread(samples: Sequence[Sequence[float]]) -> float:
    """Relative noise of one repeat: the standard deviation of log times about their arm's mean, pooled over arms.

    Arms with one repeat say nothing of the noise and are left out; without any other it is 0.
    """
    logs = [np.log(np.asarray(values, dtype=np.float64)) for values in samples if len(values) > 1]
    freedom = sum(values.size - 1 for values in logs)
    squares = math.fsum(float(((values - values.mean()) ** 2).sum()) for values in logs)
    return math.sqrt(squares / freedom) if freedom else 0.0


def expected_optimism(count: int, noise: float) -> float:
    """How much the least of `count` noisy estimates flatters its arm, as a share, if all arms were equally fast.

    It is the noise times the mean of the largest of `count` standard normals, the integral of 1 - F^n above and of
    -F^n below zero (David and Nagaraja, "Order Statistics", 3rd ed., 2003, 3.1). Where arms differ it is less.

    Args:
        count: Estimates that the least was taken of.
        noise: Relative standard deviation of one estimate.
    """
    if count < 2:
        return 0.0
    x, step = np.linspace(0.0, 12.0, 24_001, retstep=True)
    tail = -np.expm1(count * special.log_ndtr(x)) - np.exp(count * special.log_ndtr(-x))
    return noise * float(step * (tail.sum() - (tail[0] + tail[-1]) / 2))


def tie_set(
    samples: Mapping[_Key, Sequence[float]], preference: Mapping[_Key, tuple[Any, ...]], least: float = 0.005
) -> list[_Key]:
    """Arms that the data cannot tell from the fastest, in the order of preference; the first is the choice.

    An arm ties if its median is over the least median by no more than 1.96 standard errors of the difference, or by no
    more than `least`, which no claim could tell apart either. The order of the mapping does not matter.

    Args:
        samples: Repeats of each arm, at least one.
        preference: A key of each arm to sort by, different for each: default first, fewer resources, config hash.
        least: Share below which arms always tie.
    """
    medians = {arm: float(np.median(values)) for arm, values in samples.items()}
    noise = relative_spread(list(samples.values()))
    best = min(medians, key=lambda arm: (medians[arm], preference[arm]))

    def variance(arm: _Key) -> float:
        values = samples[arm]
        deviation = noise if len(values) < 3 else relative_spread([values])
        return (_MEDIAN_ERROR * deviation) ** 2 / len(values)

    def ties(arm: _Key) -> bool:
        gap = math.log(medians[arm] / medians[best])
        return gap <= max(math.log1p(least), 1.96 * math.sqrt(variance(arm) + variance(best)))

    return sorted((arm for arm in samples if ties(arm)), key=lambda arm: preference[arm])
