"""From the samples of a confirmation to its verdict. Pure: the same samples give the same digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from tuner import stats
from tuner.comparison import Comparison, decide, unstable
from tuner.protocol import (
    Claim,
    Falsifier,
    FalsifierResult,
    Gate,
    Prediction,
    PredictionResult,
    Protocol,
    Verdict,
    Word,
)
from tuner.samples import gather

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["decide", "judge"]
_SEVERITY: tuple[Word, ...] = ("SLOWER", "AMBIGUOUS", "SAME", "FASTER")


def judge(
    protocol: Protocol,
    samples: pd.DataFrame,
    integrity: Sequence[Gate],
    attempt: int = 1,
    attempts: int = 1,
    disclosures: Sequence[str] = (),
    replicates: int = stats.REPLICATES,
) -> Verdict:
    """Judge one confirmation.

    A vendor baseline stands for all vendor arms. The primary claim is made against each of them, and the strictest is
    its row: the worst verdict (SLOWER, AMBIGUOUS, SAME, FASTER), then the lowest ratio. So FASTER means faster than
    every vendor arm, without a correction, as all must hold. The others are secondary rows.

    Args:
        protocol: The frozen protocol.
        samples: One row a repeat, columns as in `tuner.samples.COLUMNS`.
        integrity: Gates that the confirmation step has held.
        attempt: Number of this confirmation.
        attempts: How many there were so far.
        disclosures: What the confirmation step has to say; those of the protocol stand there.
        replicates: Replicates of the bootstrap.
    """
    gathered, problems = gather(protocol, samples)
    complete = "; ".join(problems[:5]) + (f" (+{len(problems) - 5} more)" if len(problems) > 5 else "")
    gates = [
        *integrity,
        Gate(
            name="complete data",
            status="void" if problems else "pass",
            detail=complete or "every repeat of the design is there, in the frozen order",
        ),
    ]
    view = None
    if gathered is not None:
        outliers = gathered.outliers(protocol.design.blocks)
        clean = Comparison(protocol, gathered.without_outliers(), replicates, "") if outliers else None
        view = Comparison(protocol, gathered, replicates, unstable(len(outliers), gathered.repeats), clean)
        gates += [view.over_peak(), *view.precision()]
    broken = [gate.name for gate in gates if gate.status == "void"]
    primary, secondary = _claims(protocol, view, broken)
    return Verdict(
        protocol_sha256=protocol.sha256,
        attempt=attempt,
        attempts=attempts,
        outcome="VOID" if broken else "VALID",
        primary=primary,
        secondary=tuple(secondary),
        predictions=tuple(_prediction(view, p, bool(broken)) for p in protocol.predictions),
        falsifiers=tuple(_falsifier(view, f, bool(broken)) for f in protocol.falsifiers),
        gates=tuple(gates),
        arms=view.arms() if view else (),
        outliers=tuple(outliers) if view else (),
        disclosures=tuple(disclosures),
    )


def _claims(protocol: Protocol, view: Comparison | None, broken: Sequence[str]) -> tuple[Claim, list[Claim]]:
    """The primary claim and the secondary ones, corrected, and voided if a gate is broken."""
    primary, neighbour = protocol.primary, protocol.instrument.neighbour
    rivals = [primary.baseline]
    if protocol.arm(primary.baseline).role == "vendor":
        vendors = [record.label for record in protocol.of_role("vendor") if record.label != primary.chosen]
        rivals += [label for label in vendors if label != primary.baseline]
    others = [
        (record.label, name)
        for name in protocol.neighbours
        for record in protocol.arms
        if record.role in ("vendor", "default", "twin", "other") and record.label != primary.chosen
    ]
    if view is None:
        nothing = [
            _no_claim(label, primary.chosen, name) for label, name in others if (label, name) != (rivals[0], neighbour)
        ]
        return _void(_no_claim(rivals[0], primary.chosen, neighbour), broken), [_void(c, broken) for c in nothing]
    against = {label: view.claim(label, primary.chosen, neighbour) for label in rivals}
    first = _strictest(protocol, against)
    secondary = [
        against[label] if name == neighbour and label in against else view.claim(label, primary.chosen, name)
        for label, name in others
        if (label, name) != (first.baseline, neighbour)
    ]
    secondary = _corrected(secondary, protocol.claim_rule.confidence)
    if broken:
        return _void(first, broken), [_void(claim, broken) for claim in secondary]
    return first, secondary


def _strictest(protocol: Protocol, against: dict[str, Claim]) -> Claim:
    """The claim against the rival that leaves least, with a word on the others."""
    first = min(against.values(), key=lambda claim: (_SEVERITY.index(claim.verdict), claim.ratio))
    without = min((claim.without_outliers for claim in against.values()), key=_SEVERITY.index)
    frozen = against[protocol.primary.baseline]
    notes = []
    if first is not frozen:
        notes.append(
            f"{first.baseline} left less than the frozen baseline {frozen.baseline} ({frozen.interval_text}); "
            "the claim must hold against every vendor arm"
        )
    return first.model_copy(update={"reasons": (*first.reasons, *notes), "without_outliers": without})


def _corrected(claims: Sequence[Claim], confidence: float) -> list[Claim]:
    """Holm's correction: FASTER and SLOWER need a corrected p below 1 - confidence."""
    tested = [claim for claim in claims if claim.p_value is not None]
    corrected = iter(stats.holm([claim.p_value for claim in tested if claim.p_value is not None]))
    result = []
    for claim in claims:
        if claim.p_value is None:
            result.append(claim)
            continue
        p = next(corrected)
        update: dict[str, object] = {"p_holm": p}
        if p >= 1 - confidence:
            if claim.verdict in ("FASTER", "SLOWER"):
                text = f"p {p:.3f} after Holm's correction for {len(tested)} secondary claims"
                update |= {"verdict": "AMBIGUOUS", "reasons": (*claim.reasons, text)}
            if claim.without_outliers in ("FASTER", "SLOWER"):
                update["without_outliers"] = "AMBIGUOUS"
        result.append(claim.model_copy(update=update))
    return result


def _no_claim(baseline: str, chosen: str, neighbour: str) -> Claim:
    return Claim(
        baseline=baseline,
        chosen=chosen,
        neighbour=neighbour,
        ratio=None,
        low=None,
        high=None,
        bootstrap_low=None,
        bootstrap_high=None,
        ranges_overlap=None,
        process_ratios=(),
        p_value=None,
        p_holm=None,
        verdict="VOID",
        reasons=(),
        without_outliers="VOID",
    )


def _void(claim: Claim, broken: Sequence[str]) -> Claim:
    reasons = (f"VOID by {', '.join(broken)}", *claim.reasons)
    return claim.model_copy(update={"verdict": "VOID", "without_outliers": "VOID", "reasons": reasons})


def _prediction(view: Comparison | None, prediction: Prediction, void: bool) -> PredictionResult:
    """Held or missed by the point estimate."""
    found = view.interval(prediction.baseline, prediction.chosen, prediction.neighbour) if view else None
    result: Literal["HELD", "MISSED HIGH", "MISSED LOW", "VOID"] = "VOID"
    if found is not None and not void:
        result = (
            "MISSED LOW" if found.ratio < prediction.low else "MISSED HIGH" if found.ratio > prediction.high else "HELD"
        )
    low, high = (found.low, found.high) if found else (None, None)
    straddles = low is not None and high is not None and any(low < b < high for b in (prediction.low, prediction.high))
    return PredictionResult(
        **prediction.model_dump(exclude={"explored"}),
        found=found.ratio if found else None,
        found_low=low,
        found_high=high,
        straddles=straddles,
        result=result,
    )


def _falsifier(view: Comparison | None, falsifier: Falsifier, void: bool) -> FalsifierResult:
    """Met only if the whole interval lies beyond the bound."""
    found = view.interval(falsifier.baseline, falsifier.chosen, falsifier.neighbour) if view else None
    low, high = (found.low, found.high) if found else (None, None)
    met = falsifier.below is not None and high is not None and high < falsifier.below
    met = met or (falsifier.above is not None and low is not None and low > falsifier.above)
    return FalsifierResult(
        id=falsifier.id,
        reason=falsifier.reason,
        condition=falsifier.condition,
        found=found.ratio if found else None,
        found_low=low,
        found_high=high,
        result="VOID" if void or found is None else "FALSIFIED" if met else "not met",
    )
