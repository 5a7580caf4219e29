"""The predictions and falsifiers that the tool drafts: ranges from what exploration estimates, each with its reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tuner.arms import Arm
from tuner.protocol import ArmRecord, ClaimRule, Falsifier, Instrument, Prediction, Primary


@dataclass(frozen=True)
class Known:
    """What predictions are drafted from.

    Attributes:
        arms: The arms of the protocol, by label.
        primary: The primary claim.
        instrument: The instrument.
        rule: The claim rule.
        estimates: Estimated medians in microseconds by arm key.
        measured: Keys of all arms that exploration timed.
        optimism: Expected flattery of the best estimate, as a share.
        twin: Label of the arm that differs from the chosen one in `m_spec` only, or None.
        host: True on a host, where ranges are wider.
    """

    arms: Mapping[str, ArmRecord]
    primary: Primary
    instrument: Instrument
    rule: ClaimRule
    estimates: Mapping[str, float]
    measured: Collection[str]
    optimism: float
    twin: str | None
    host: bool

    @property
    def half(self) -> float:
        """Half of the width of a range about an estimate, as a share."""
        return max(0.25 if self.host else 0.02, self.optimism)

    def ratio(self, baseline: str, chosen: str) -> float | None:
        """Estimated ratio, less the expected optimism of the chosen arm; None if one has no estimate."""
        first, second = (self.estimates.get(key_of(self.arms[label])) for label in (baseline, chosen))
        return first / second / (1 + self.optimism) if first and second else None


def key_of(record: ArmRecord) -> str:
    """The key of a record's arm."""
    return Arm.of(record.family, record.kernel, record.config).key


def predictions(known: Known) -> tuple[Prediction, ...]:
    """Every prediction that the arms allow; the one of the arm against itself is always there."""
    drafted = [_baseline(known), _other_neighbour(known), _twin(known), _ceiling(known), _again(known)]
    kept = [prediction for prediction in drafted if prediction is not None]
    return tuple(p.model_copy(update={"id": f"P{number}"}) for number, p in enumerate(kept, 1))


def falsifiers(known: Known) -> tuple[Falsifier, ...]:
    """When the idea behind the chosen arm is given up."""
    chosen, neighbour = known.primary.chosen, known.instrument.neighbour
    below = 1 / (1 + known.rule.margin)
    against = [
        (
            known.primary.baseline,
            f"if the chosen arm is slower than {_named(known, known.primary.baseline)} beyond the margin, the idea "
            "behind the arm is given up for this shape on this device",
        )
    ]
    if "default" in known.arms and known.primary.baseline != "default":
        against.append(
            ("default", "if the chosen arm is slower than the default beyond the margin, tuning it has failed")
        )
    return tuple(
        Falsifier(id=f"F{n}", reason=why, baseline=label, chosen=chosen, neighbour=neighbour, below=below)
        for n, (label, why) in enumerate(against, 1)
    )


def _baseline(known: Known) -> Prediction | None:
    ratio = known.ratio(known.primary.baseline, known.primary.chosen)
    if ratio is None or known.primary.baseline == "again":
        return None
    reason = (
        f"exploration estimates {ratio * (1 + known.optimism):.3f}x; the best of its estimates flatters its arm by "
        f"{known.optimism:.1%} on average, which is taken off; the range is {known.half:.0%} to both sides"
    )
    return _about(
        known, known.primary.baseline, known.instrument.neighbour, ratio, (known.half, known.half), reason, True
    )


def _other_neighbour(known: Known) -> Prediction | None:
    other = known.instrument.other_neighbour
    ratio = known.ratio(known.primary.baseline, known.primary.chosen)
    if other is None or ratio is None or known.primary.baseline == "again":
        return None
    if not known.arms[known.primary.chosen].config.get("pdl", False):
        reason = (
            "neither arm is known to start before the kernel in front of it has ended, so its neighbour changes little"
        )
        return _about(known, known.primary.baseline, other, ratio, (0.08, 0.08), reason, False)
    if other == "self":
        reason = "dependent launch gains where the kernel in front takes part in it, as the arm itself does"
        return _about(known, known.primary.baseline, other, ratio, (0.03, 0.25), reason, False)
    reason = "dependent launch loses where the kernel in front takes no part in it"
    return _about(known, known.primary.baseline, other, ratio, (0.20, 0.03), reason, False)


def _twin(known: Known) -> Prediction | None:
    if known.twin is None:
        return None
    slower = 4.0 if known.host else 1.15
    level = 0.75 if known.host else 0.98
    if known.arms[known.primary.chosen].config.get("m_spec", False):
        low, high = level, slower
        reason = (
            "the general kernel reads the same weights and only computes more, so while it waits for memory it is level"
        )
    else:
        low, high = 1 / slower, 1 / level
        reason = "the kernel specialised to M=1 reads the same weights and only computes less, so it is level or faster"
    explored = key_of(known.arms[known.twin]) in known.measured
    return Prediction(
        id="P",
        reason=reason,
        baseline=known.twin,
        chosen=known.primary.chosen,
        neighbour=known.instrument.neighbour,
        low=low,
        high=high,
        explored=explored,
    )


def _ceiling(known: Known) -> Prediction | None:
    if "ceiling" not in known.arms:
        return None
    ratio = known.ratio("ceiling", known.primary.chosen)
    if ratio is None:
        return None
    reason = "the share of the matched ceiling that exploration estimates, less the expected optimism"
    return _about(known, "ceiling", known.instrument.neighbour, ratio, (known.half, known.half), reason, True)


def _again(known: Known) -> Prediction:
    half = 0.10 if known.host else known.rule.margin
    return Prediction(
        id="P",
        reason="the chosen arm stands in twice; it agrees with itself in fresh processes, which exploration had not",
        baseline="again",
        chosen=known.primary.chosen,
        neighbour=known.instrument.neighbour,
        low=1 - half,
        high=1 + half,
        explored=False,
    )


def _about(
    known: Known, baseline: str, neighbour: str, ratio: float, widths: tuple[float, float], reason: str, explored: bool
) -> Prediction:
    """A range about a ratio: `widths` below and above it, as shares."""
    return Prediction.model_validate(
        {
            "id": "P",
            "reason": reason,
            "baseline": baseline,
            "chosen": known.primary.chosen,
            "neighbour": neighbour,
            "low": round(ratio * max(1 - widths[0], 0.05), 4),
            "high": round(ratio * (1 + widths[1]), 4),
            "explored": explored,
        }
    )


def _named(known: Known, label: str) -> str:
    return "the best vendor form" if known.arms[label].role == "vendor" else f"the arm {label}"
