"""The frozen document and the verdict: what they hold, their canonical form and hash, and the order of blocks.

A protocol lies in `protocol.json` as `{"protocol": {...}, "sha256": "..."}`. The hash is over the canonical JSON of the
protocol (sorted keys, no spaces, ASCII, floats as Python writes them), so an edit after the freeze cannot go unseen.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from tuner.errors import RefusedError, UsageError
from tuner.files import read_json, write_json
from tuner.problem import Shape
from tuner.store import SCHEMA, validate

ROLES = ("chosen", "again", "default", "twin", "other", "vendor", "ceiling")
Role = Literal["chosen", "again", "default", "twin", "other", "vendor", "ceiling"]
Neighbour = Literal["plain", "self"]
Word = Literal["FASTER", "SLOWER", "SAME", "AMBIGUOUS", "VOID"]
_Positive = Annotated[float, Field(gt=0)]
_Count = Annotated[int, Field(ge=1)]


class _Model(BaseModel):
    """Base: unknown fields and infinities are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


class ArmRecord(_Model):
    """One arm of a confirmation under its label."""

    label: str = Field(min_length=1)
    role: Role
    family: str
    kernel: str
    config: dict[str, int | str | bool]
    code_hash: str
    source_hash: str
    shape: str
    weights: str

    def __str__(self) -> str:
        return " ".join([f"{self.family}/{self.kernel}", *(f"{k}={v}" for k, v in sorted(self.config.items()))])


class Primary(_Model):
    """The two arms of the primary claim. A vendor baseline stands for all vendor arms; see `tuner.verdict.judge`."""

    baseline: str
    chosen: str


class Instrument(_Model):
    """How a time is taken.

    Attributes:
        neighbour: The neighbour of the primary claim.
        other_neighbour: The neighbour of the secondary rows; None where the device has none.
        slots: Slots of the rotation, by weight format.
        weight_bytes: Bytes that one launch reads, by weight format.
        llc_bytes: Last-level cache that the rotation is made for.
        min_launches: Launches between two events at least.
        min_window_us: Time between two events at least.
        untimed_us: Untimed launches in front of a block.
        warmup_s: Launches once a process, before anything is timed.
        max_nodes: Kernels in one graph at most.
        timer_version: Version of the timer's rules.
        asymptotic_bytes_per_us: The fastest read of at least 800 MB that exploration measured, or None.
    """

    neighbour: Neighbour
    other_neighbour: Neighbour | None
    slots: dict[str, int]
    weight_bytes: dict[str, _Count]
    llc_bytes: int
    min_launches: int
    min_window_us: float
    untimed_us: float
    warmup_s: float
    max_nodes: int
    timer_version: int
    asymptotic_bytes_per_us: _Positive | None = None


class Design(_Model):
    """How much is measured: processes x cycles x blocks x repeats. `seed` draws the order of the arms."""

    processes: _Count
    cycles: _Count
    blocks: Annotated[int, Field(ge=2, multiple_of=2)]
    repeats: _Count
    seed: int


class ClaimRule(_Model):
    """What decides a claim; see `tuner.verdict.decide`."""

    name: Literal["default", "published"] = "default"
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.005
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95


class Prediction(_Model):
    """A range for baseline / chosen, written down before it is measured; `explored` if exploration saw the quantity."""

    id: str
    reason: str = Field(min_length=1)
    baseline: str
    chosen: str
    neighbour: Neighbour
    low: _Positive
    high: _Positive
    explored: bool

    @model_validator(mode="after")
    def _ordered(self) -> Prediction:
        if self.low >= self.high:
            raise ValueError(f"prediction {self.id}: low {self.low} must be below high {self.high}")
        return self


class Falsifier(_Model):
    """What ends the idea behind the arm: the interval of baseline / chosen lies wholly below, or above, a bound."""

    id: str
    reason: str = Field(min_length=1)
    baseline: str
    chosen: str
    neighbour: Neighbour
    below: _Positive | None = None
    above: _Positive | None = None

    @model_validator(mode="after")
    def _one_bound(self) -> Falsifier:
        if (self.below is None) == (self.above is None):
            raise ValueError(f"falsifier {self.id}: give one of below and above")
        return self

    @property
    def condition(self) -> str:
        """The condition in words."""
        side, bound = ("below", self.below) if self.below is not None else ("above", self.above)
        return f"{self.baseline} / {self.chosen} ({self.neighbour}) lies wholly {side} {bound:.4g}"


class Exploration(_Model):
    """Where the choice came from.

    Attributes:
        trials: Arms measured.
        size: Configs of the spaces before constraints.
        pruned: Configs that each constraint removed.
        space_hash: See `tuner.workflow.freeze.space_hash`.
        tie_set: Arms within the noise of the best, in the fixed order that picked the first.
        optimism: Expected flattery of the best estimate, as a share.
        replay: True if the times came from a recorded run.
    """

    trials: int
    size: int
    pruned: dict[str, int]
    space_hash: str
    tie_set: tuple[str, ...]
    optimism: float
    replay: bool


class Protocol(_Model):
    """Everything that is fixed before confirmation data exist."""

    schema_: Annotated[int, Field(alias="schema", ge=1)] = SCHEMA
    question: str
    shape: str
    weights: tuple[str, ...]
    device: dict[str, Any]
    versions: dict[str, str]
    arms: tuple[ArmRecord, ...]
    primary: Primary
    instrument: Instrument
    design: Design
    predictions: tuple[Prediction, ...]
    falsifiers: tuple[Falsifier, ...]
    claim_rule: ClaimRule
    exclusions: tuple[str, ...]
    seeds: dict[str, int]
    drafted_by_tool: bool
    data_seen: Literal["none"] = "none"
    disclosures: tuple[str, ...]
    exploration: Exploration

    @model_validator(mode="after")
    def _whole(self) -> Protocol:
        labels = self.labels
        if len(set(labels)) != len(labels):
            raise ValueError("two arms have the same label; give each its own")
        pairs: list[tuple[str, Primary | Prediction | Falsifier, Neighbour]]
        pairs = [("the primary claim", self.primary, self.instrument.neighbour)]
        pairs += [(f"prediction {p.id}", p, p.neighbour) for p in self.predictions]
        pairs += [(f"falsifier {f.id}", f, f.neighbour) for f in self.falsifiers]
        for what, pair, neighbour in pairs:
            for label in (pair.baseline, pair.chosen):
                if label not in labels:
                    raise ValueError(f"{what} names {label!r}, which is no arm; the arms are {', '.join(labels)}")
            if neighbour not in self.neighbours:
                raise ValueError(f"{what} names neighbour {neighbour!r}; measured are {', '.join(self.neighbours)}")
        for record in self.arms:
            if record.weights not in self.instrument.weight_bytes:
                raise ValueError(f"arm {record.label}: instrument.weight_bytes has no {record.weights}")
        if {"chosen", "again"} - {record.role for record in self.arms}:
            raise ValueError("the chosen arm must stand in twice, in the roles chosen and again")
        if all(prediction.explored for prediction in self.predictions):
            raise ValueError("at least one prediction must be about a quantity that exploration did not measure")
        if not self.falsifiers:
            raise ValueError("at least one falsifier is needed: when is the idea behind the arm given up?")
        if "bootstrap" not in self.seeds or "data" not in self.seeds:
            raise ValueError("seeds needs bootstrap and data")
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of all arms."""
        return tuple(record.label for record in self.arms)

    @property
    def neighbours(self) -> tuple[Neighbour, ...]:
        """Neighbours that every arm is measured under: the primary one first."""
        other = self.instrument.other_neighbour
        return (self.instrument.neighbour, *((other,) if other is not None else ()))

    def arm(self, label: str) -> ArmRecord:
        """The arm of a label."""
        return next(record for record in self.arms if record.label == label)

    def of_role(self, role: Role) -> tuple[ArmRecord, ...]:
        """All arms in a role."""
        return tuple(record for record in self.arms if record.role == role)

    def canonical(self) -> bytes:
        """The bytes that are hashed."""
        data = self.model_dump(mode="json", by_alias=True)
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical form."""
        return hashlib.sha256(self.canonical()).hexdigest()


class Gate(_Model):
    """A check of the whole confirmation: `void` ends it, `ambiguous` bars every claim that it concerns."""

    name: str
    status: Literal["pass", "void", "ambiguous"]
    detail: str


class Claim(_Model):
    """One comparison. A number is None where the data do not give it.

    Attributes:
        ratio: baseline / chosen; above 1 the chosen arm is faster.
        low: Lower end of the t interval over processes.
        high: Upper end.
        bootstrap_low: Lower end of the hierarchical bootstrap interval.
        bootstrap_high: Upper end.
        ranges_overlap: Whether the ranges of the process medians overlap.
        process_ratios: One ratio a process.
        p_value: Two-sided p of "the ratio is 1".
        p_holm: The same, corrected for all secondary claims; None for the primary.
        verdict: What it comes to.
        reasons: Why it is not clearer, or what to know beside it.
        without_outliers: What it would come to without repeats over 1.3 times their block's median.
    """

    baseline: str
    chosen: str
    neighbour: str
    ratio: float | None
    low: float | None
    high: float | None
    bootstrap_low: float | None
    bootstrap_high: float | None
    ranges_overlap: bool | None
    process_ratios: tuple[float, ...]
    p_value: float | None
    p_holm: float | None
    verdict: Word
    reasons: tuple[str, ...]
    without_outliers: Word

    @property
    def interval_text(self) -> str:
        """Ratio and interval in words, also where there is none."""
        if self.ratio is None:
            return "no ratio"
        if self.low is None or self.high is None:
            return f"{self.ratio:.3f}x, no interval"
        return f"{self.ratio:.3f}x, interval {self.low:.3f} to {self.high:.3f}"


class PredictionResult(_Model):
    """A prediction beside what was found; `straddles` if the interval holds an end of the predicted range."""

    id: str
    reason: str
    baseline: str
    chosen: str
    neighbour: str
    low: float
    high: float
    found: float | None
    found_low: float | None
    found_high: float | None
    straddles: bool
    result: Literal["HELD", "MISSED HIGH", "MISSED LOW", "VOID"]


class FalsifierResult(_Model):
    """A falsifier beside what was found."""

    id: str
    reason: str
    condition: str
    found: float | None
    found_low: float | None
    found_high: float | None
    result: Literal["FALSIFIED", "not met", "VOID"]


class ArmResult(_Model):
    """One arm behind the primary neighbour.

    Attributes:
        median_us: Median over processes of the process medians of block medians.
        tb_per_s: Bytes of the weights over that time.
        share_of_ceiling: Paired ratio of the matched ceiling to the arm; None without one, or above it.
        share_of_asymptotic: Against the fastest large read of the exploration.
        share_of_peak: Against the specified peak.
        other_neighbour_us: Median behind the other neighbour.
        spread: p95 - p5 of the repeats about their block's median, as a share.
        notes: What to know of it.
    """

    label: str
    median_us: float
    tb_per_s: float
    share_of_ceiling: float | None
    share_of_asymptotic: float | None
    share_of_peak: float | None
    other_neighbour_us: float | None
    spread: float
    notes: tuple[str, ...]


class Outlier(_Model):
    """One repeat over 1.3 times its block's median. It is kept in every number but `without_outliers`."""

    arm: str
    neighbour: str
    process: int
    cycle: int
    block: int
    repeat: int
    us: float
    times_median: float


class Verdict(_Model):
    """What one confirmation says."""

    schema_: Annotated[int, Field(alias="schema", ge=1)] = SCHEMA
    protocol_sha256: str
    attempt: int
    attempts: int
    outcome: Literal["VALID", "VOID"]
    primary: Claim
    secondary: tuple[Claim, ...]
    predictions: tuple[PredictionResult, ...]
    falsifiers: tuple[FalsifierResult, ...]
    gates: tuple[Gate, ...]
    arms: tuple[ArmResult, ...]
    outliers: tuple[Outlier, ...]
    disclosures: tuple[str, ...]


def save(protocol: Protocol, path: Path) -> None:
    """Write a protocol with its hash, as a whole."""
    write_json(path, {"protocol": protocol, "sha256": protocol.sha256})


def load(path: Path) -> Protocol:
    """Read a frozen protocol.

    Raises:
        UsageError: There is no such file.
        RefusedError: It was edited after the freeze, is damaged, or is of a newer version.
    """
    data = read_json(path)
    if not isinstance(data, dict) or set(data) != {"protocol", "sha256"}:
        raise RefusedError(f"{path} is no frozen protocol: it must hold protocol and sha256, and nothing else")
    protocol = parse(data["protocol"], str(path))
    if protocol.sha256 != data["sha256"]:
        raise RefusedError(
            f"{path} was edited after it was frozen: its content has sha256 {protocol.sha256[:16]}, frozen was "
            f"{str(data['sha256'])[:16]}. Put the frozen file back, or freeze the edited protocol in a new run: "
            "tune freeze RUN --draft FILE"
        )
    return protocol


def parse(data: object, what: str) -> Protocol:
    """Check a protocol without its hash, as a draft is.

    Raises:
        RefusedError: A field is missing, unknown or breaks a rule, or the schema is newer.
    """
    protocol = validate(Protocol, data, what)
    try:
        Shape.parse(protocol.shape)
        for record in protocol.arms:
            Shape.parse(record.shape)
    except UsageError as error:
        raise RefusedError(f"{what} is not as it should be: {error}") from error
    return protocol


def order(protocol: Protocol, process: int, cycle: int) -> list[str]:
    """Labels in the order of one cycle: a drawn order, then the same mirrored, A B C C B A.

    Each arm stands once in each half; the place of an arm is `position`, and its half `position // number of arms` is
    `block`. With more than two blocks the pair of halves is repeated. The draw sorts by SHA-256, so it does not depend
    on the version of any random generator.

    Args:
        protocol: The frozen protocol.
        process: Number of the process, from 0.
        cycle: Number of the cycle in the process, from 0.
    """

    def draw(label: str) -> bytes:
        return hashlib.sha256(f"{protocol.design.seed}/{process}/{cycle}/{label}".encode()).digest()

    forward = sorted(protocol.labels, key=draw)
    return (forward + forward[::-1]) * (protocol.design.blocks // 2)


def data_seed(protocol: Protocol, attempt: int, process: int) -> int:
    """The seed of one process's random weights and activations: another one in every process of every attempt."""
    text = f"{protocol.seeds['data']}/{attempt}/{process}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
