"""Arms of one confirmation compared: limits of precision, the rule of a claim, the table of arms."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tuner import stats
from tuner.protocol import ArmRecord, ArmResult, Claim, ClaimRule, Gate, Protocol, Word
from tuner.samples import Samples
from tuner.stats import Array, Interval

UNSTABLE_SHARE = 0.01
FAST_US = 5.0
_TWINS: tuple[Literal["chosen"], Literal["again"]] = ("chosen", "again")


@dataclass(frozen=True)
class Limits:
    """Limits of precision and of plausibility, as shares.

    Attributes:
        spread: p95 - p5 of repeats.
        spread_fast: The same for arms under 5 us.
        drift: Second half of a process against the first.
        over_peak: An arm's bytes a second over those of the fastest ceiling; None where none is known.
    """

    spread: float = 0.02
    spread_fast: float = 0.05
    drift: float = 0.01
    over_peak: float | None = 0.02

    @classmethod
    def of(cls, kind: str) -> Limits:
        """Limits of a kind of device.

        On `host` clocks and other processes move every figure, and the read kernel of its executor bounds no CPU.
        """
        return cls(spread=0.30, spread_fast=0.30, drift=0.10, over_peak=None) if kind == "host" else cls()


def decide(
    rule: ClaimRule, logs: Array, interval: Interval, bootstrap: Interval | None, overlap: bool
) -> tuple[Word, list[str]]:
    """What a claim comes to by its rule alone, and why it is not clearer.

    `default`: the t interval clears 1 by the margin and all process ratios lie on one side of 1. `published`, as in the
    two published studies: the bootstrap interval excludes 1 and the ranges of the process medians do not overlap. Under
    both, SAME is an interval inside the margin on both sides of 1, and one process decides nothing. The margin lies on
    the log scale (above 1.005, below 1 / 1.005), so that exchanging the two arms exchanges FASTER and SLOWER exactly.

    Args:
        rule: The frozen rule.
        logs: One log ratio a process.
        interval: The t interval.
        bootstrap: The bootstrap interval; needed by `published`.
        overlap: Whether the ranges of the process medians overlap.
    """
    used = bootstrap if rule.name == "published" else interval
    if interval.low is None or used is None or used.low is None or used.high is None:
        return "AMBIGUOUS", ["one process gives no interval; the design needs at least two"]
    edge = 1 + rule.margin
    least = 1.0 if rule.name == "published" else edge
    beyond: Word | None = "FASTER" if used.low > least else "SLOWER" if used.high < 1 / least else None
    apart = not overlap if rule.name == "published" else bool((logs > 0).all() or (logs < 0).all())
    if beyond and apart:
        return beyond, []
    if 1 / edge <= used.low and used.high <= edge:
        return "SAME", []
    if beyond and rule.name == "published":
        return "AMBIGUOUS", ["the ranges of the process medians overlap"]
    if beyond:
        minority = min(int((logs > 0).sum()), int((logs <= 0).sum()))
        return "AMBIGUOUS", [f"{minority} of {logs.size} processes lie on the other side of 1"]
    against = "1" if rule.name == "published" else f"1 by the margin of {rule.margin:.2%}"
    return "AMBIGUOUS", [f"the interval {used.low:.4f} to {used.high:.4f} neither clears {against} nor lies within it"]


@dataclass(frozen=True)
class Comparison:
    """Samples with the questions that are put to them; `clean` is the view without outliers, if there are any."""

    protocol: Protocol
    samples: Samples
    replicates: int
    unstable: str
    clean: Comparison | None = None

    @cached_property
    def limits(self) -> Limits:
        """Limits of the protocol's device."""
        return Limits.of(str(self.protocol.device.get("kind")))

    @property
    def confidence(self) -> float:
        """Confidence of every interval."""
        return self.protocol.claim_rule.confidence

    def interval(self, baseline: str, chosen: str, neighbour: str) -> Interval:
        """The t interval of a pair."""
        return stats.t_interval(self.samples.log_ratios(baseline, chosen, neighbour), self.confidence)

    def bootstrap(self, baseline: str, chosen: str, neighbour: str) -> Interval:
        """The bootstrap interval of a pair."""
        first, second = (self.samples.times[label, neighbour] for label in (baseline, chosen))
        seed = self.protocol.seeds["bootstrap"]
        return stats.bootstrap_interval(first, second, seed, self.confidence, self.replicates)

    def overlap(self, baseline: str, chosen: str, neighbour: str) -> bool:
        """Whether the ranges of the process medians of a pair overlap."""
        first, second = (self.samples.process_medians(label, neighbour) for label in (baseline, chosen))
        return stats.ranges_overlap(first, second)

    def word(self, baseline: str, chosen: str, neighbour: str, bootstrap: Interval | None) -> tuple[Word, list[str]]:
        """Verdict of a pair behind the precision gates, and the reasons."""
        pair = (baseline, chosen, neighbour)
        logs = self.samples.log_ratios(*pair)
        rule = self.protocol.claim_rule
        word, reasons = decide(rule, logs, self.interval(*pair), bootstrap, self.overlap(*pair))
        barred = self.imprecise(*pair)
        return ("AMBIGUOUS" if barred else word), [*reasons, *barred]

    def claim(self, baseline: str, chosen: str, neighbour: str) -> Claim:
        """The claim of a pair, before corrections that need other claims."""
        pair = (baseline, chosen, neighbour)
        logs, interval, bootstrap = self.samples.log_ratios(*pair), self.interval(*pair), self.bootstrap(*pair)
        word, reasons = self.word(*pair, bootstrap)
        without = word
        if self.clean is not None:
            published = self.protocol.claim_rule.name == "published"
            without = self.clean.word(*pair, self.clean.bootstrap(*pair) if published else None)[0]
        return Claim(
            baseline=baseline,
            chosen=chosen,
            neighbour=neighbour,
            ratio=interval.ratio,
            low=interval.low,
            high=interval.high,
            bootstrap_low=bootstrap.low,
            bootstrap_high=bootstrap.high,
            ranges_overlap=self.overlap(*pair),
            process_ratios=tuple(math.exp(value) for value in logs.tolist()),
            p_value=stats.p_value(logs),
            p_holm=None,
            verdict=word,
            reasons=tuple(reasons),
            without_outliers=without,
        )

    def imprecise(self, baseline: str, chosen: str, neighbour: str) -> list[str]:
        """Why no claim about a pair can be made, if so."""
        found = [text for label in (baseline, chosen) for text in (self.spread(label, neighbour),) if text]
        found += [text for label in (baseline, chosen) for text in (self.drift(label, neighbour),) if text]
        return [*found, *(text for text in (self.twins(neighbour), self.unstable) if text)]

    def spread(self, label: str, neighbour: str) -> str:
        """What is wrong with the spread of an arm's repeats, or nothing."""
        found = stats.spread(self.samples.times[label, neighbour])
        fast = self.samples.median_us(label, neighbour) < FAST_US
        limit = self.limits.spread_fast if fast else self.limits.spread
        return f"{label} behind {neighbour}: repeats spread {found:.1%}, over {limit:.0%}" if found > limit else ""

    def drift(self, label: str, neighbour: str) -> str:
        """What is wrong with the drift of an arm, or nothing."""
        found = stats.halves_drift(self.samples.medians(label, neighbour))
        if abs(found) <= self.limits.drift:
            return ""
        return f"{label} behind {neighbour}: drift of the halves {found:+.1%}, over {self.limits.drift:.0%}"

    def twins(self, neighbour: str) -> str:
        """What is wrong with the chosen arm against itself, or nothing."""
        chosen, again = (self.protocol.of_role(role)[0].label for role in _TWINS)
        found = self.interval(chosen, again, neighbour)
        if found.low is None or found.high is None or found.low <= 1 <= found.high:
            return ""
        if abs(found.ratio - 1) <= self.protocol.claim_rule.margin / 2:
            return ""
        found_text = f"{found.ratio:.4f} ({found.low:.4f} to {found.high:.4f})"
        return f"A/A behind {neighbour}: one arm differs from itself, {found_text}"

    def precision(self) -> list[Gate]:
        """The precision gates over all arms."""
        neighbours, labels = self.protocol.neighbours, self.protocol.labels
        every = [(label, neighbour) for neighbour in neighbours for label in labels]
        return [
            _precision("repeat spread", [self.spread(*key) for key in every], "repeats of every arm lie close"),
            _precision("A/A", [self.twins(name) for name in neighbours], "the chosen arm agrees with itself"),
            _precision("drift", [self.drift(*key) for key in every], "halves of every process agree"),
            _precision("outliers", [self.unstable], f"at most {UNSTABLE_SHARE:.0%} of repeats are outliers"),
        ]

    def rate(self, record: ArmRecord, neighbour: str) -> float:
        """Bytes of weights a microsecond."""
        nbytes = self.protocol.instrument.weight_bytes[record.weights]
        return nbytes / self.samples.median_us(record.label, neighbour)

    def over_peak(self) -> Gate:
        """No arm may read faster than the fastest read-only kernel of all, but for a tolerance."""
        ceilings = self.protocol.of_role("ceiling")
        asymptotic = self.protocol.instrument.asymptotic_bytes_per_us
        limit = self.limits.over_peak
        if limit is None:
            return Gate(name="over-peak", status="pass", detail="not held on host: its read kernel bounds no CPU")
        found = []
        for neighbour in self.protocol.neighbours:
            rates = [self.rate(record, neighbour) for record in ceilings] + ([asymptotic] if asymptotic else [])
            if not rates:
                return Gate(name="over-peak", status="pass", detail="not held: there is no ceiling to hold arms to")
            for record in self.protocol.arms:
                share = self.rate(record, neighbour) / max(rates)
                if record.role != "ceiling" and share > 1 + limit:
                    found.append(f"{record.label} behind {neighbour}: {share:.1%} of the fastest ceiling")
        if found:
            return Gate(name="over-peak", status="void", detail="INVALID_OVERPEAK: " + "; ".join(found))
        fine = f"no arm is more than {limit:.0%} above the fastest ceiling"
        return Gate(name="over-peak", status="pass", detail=fine)

    def arms(self) -> tuple[ArmResult, ...]:
        """The table of arms."""
        return tuple(self._arm(record) for record in self.protocol.arms)

    def _arm(self, record: ArmRecord) -> ArmResult:
        neighbour, other = self.protocol.instrument.neighbour, self.protocol.instrument.other_neighbour
        rate = self.rate(record, neighbour)
        peak = self.protocol.device.get("peak_bytes_per_s")
        asymptotic = self.protocol.instrument.asymptotic_bytes_per_us
        share, notes = self._share(record)
        return ArmResult(
            label=record.label,
            median_us=self.samples.median_us(record.label, neighbour),
            tb_per_s=rate / 1e6,
            share_of_ceiling=share,
            share_of_asymptotic=rate / asymptotic if asymptotic else None,
            share_of_peak=rate * 1e6 / float(peak) if peak else None,
            other_neighbour_us=self.samples.median_us(record.label, other) if other else None,
            spread=stats.spread(self.samples.times[record.label, neighbour]),
            notes=notes,
        )

    def _share(self, record: ArmRecord) -> tuple[float | None, tuple[str, ...]]:
        matched = [
            c for c in self.protocol.of_role("ceiling") if (c.shape, c.weights) == (record.shape, record.weights)
        ]
        if not matched or record.role == "ceiling":
            return None, ()
        neighbour = self.protocol.instrument.neighbour
        best = min(matched, key=lambda ceiling: self.samples.median_us(ceiling.label, neighbour))
        share = self.interval(best.label, record.label, neighbour).ratio
        if share > 1:
            return None, (f"faster than its matched ceiling ({share:.3f}x): the ceiling sweep is too weak",)
        return share, ()


def unstable(outliers: int, repeats: int) -> str:
    """What is wrong with the number of outliers, or nothing."""
    if outliers <= UNSTABLE_SHARE * repeats:
        return ""
    return f"UNSTABLE: {outliers} of {repeats} repeats are over {stats.OUTLIER} times their block's median"


def _precision(name: str, found: Sequence[str], fine: str) -> Gate:
    wrong = [text for text in found if text]
    return Gate(name=name, status="ambiguous" if wrong else "pass", detail="; ".join(wrong) or fine)
