"""What a run has found, in words and tables: in the terminal, as a page, as one JSON object, as a line of a list.

Everything is first put into plain `Block`s; terminal and page only draw them, so that they cannot say different things.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import ColdtuneError
from tuner.files import atomic_write
from tuner.problem import Problem, Shape
from tuner.store import Run, list_runs
from tuner.workflow.results import attempts, frozen, latest_verdict

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tuner.protocol import ArmResult, Claim, FalsifierResult, PredictionResult, Protocol, Verdict
    from tuner.store import Trial
    from tuner.workflow.tune import Outcome

RECORD = "bench/results/h200/1x4096x12288"
BEST_SHOWN = 10
REHEARSAL = "REHEARSAL ON HOST: real measurements of this CPU, but nothing here is a GPU result"


@dataclass(frozen=True)
class Block:
    """A title, some lines, and perhaps a table."""

    title: str
    lines: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def blocks(run: Run) -> list[Block]:
    """Everything that is known of a run."""
    trials = run.trials()
    found = [_head(run)]
    protocol = frozen(run) if run.has("protocol.json") else None
    verdict = latest_verdict(run)
    if protocol is not None and verdict is not None:
        found += _verdict(protocol, verdict)
    else:
        found.append(_estimates(run, trials, protocol is not None))
    found.append(_attempts(run))
    found.append(_trials(trials))
    return [block for block in found if block.lines or block.rows]


def show(run: Run) -> list[RenderableType]:
    """Blocks for the terminal."""
    from rich.table import Table
    from rich.text import Text

    shown: list[RenderableType] = []
    for block in blocks(run):
        shown.append(Text(block.title, style="bold"))
        shown += [Text("  " + line) for line in block.lines]
        if block.rows:
            table = Table(*block.headers)
            for row in block.rows:
                table.add_row(*(Text(cell) for cell in row))
            shown.append(table)
        shown.append(Text(""))
    return shown


def write(run: Run) -> Path:
    """Write the blocks as `report.html`: one page without scripts, everything escaped."""
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>Coldtune: {html.escape(run.name)}</title>',
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse;margin:.5rem 0}td,th{border:1px solid #bbb;padding:.2rem .6rem;text-align:left}"
        "th{background:#eee}</style></head><body>",
        f"<h1>{html.escape(run.name)}</h1>",
    ]
    for block in blocks(run):
        parts.append(f"<h2>{html.escape(block.title)}</h2>")
        parts += [f"<p>{html.escape(line)}</p>" for line in block.lines]
        if block.rows:
            parts.append(f"<table><tr>{_cells(block.headers, 'th')}</tr>")
            parts += [f"<tr>{_cells(row, 'td')}</tr>" for row in block.rows]
            parts.append("</table>")
    parts.append("</body></html>")
    path = run.file("report.html")
    atomic_write(path, ("\n".join(parts) + "\n").encode())
    return path


def listing(root: Path) -> list[RenderableType]:
    """A table of all runs below a folder; one that cannot be read says so in its line."""
    from rich.table import Column, Table
    from rich.text import Text

    paths = list_runs(root)
    if not paths:
        return [f"there is no run in {root} yet; start one with: tune --shape 1x4096x12288"]
    table = Table(Column("run", no_wrap=True), "shape", "weights", "device", "state")
    for path in paths:
        table.add_row(*(Text(cell) for cell in _line(path)))
    return [table]


def state(run: Run) -> str:
    """Where a run stands, in a few words."""
    verdict = latest_verdict(run)
    if verdict is not None:
        return verdict.outcome if verdict.outcome != "VALID" else _claim_text(verdict.primary)
    if run.has("protocol.json"):
        return "frozen, not confirmed"
    return "explored, not frozen" if run.has("choice.json") else "begun"


def summary(run: Run, outcome: Outcome, code: int, reason: str) -> dict[str, Any]:
    """The one JSON object of `--json`."""
    verdict = outcome.verdict
    claim = verdict.primary if verdict is not None else None
    return {
        "schema": 1,
        "run": str(run.path),
        "shape": run.info.shape,
        "weights": run.info.weights,
        "device": {name: run.info.device.get(name) for name in ("kind", "name", "arch", "units")},
        "rehearsal": _rehearsal(run),
        "choice": outcome.choice,
        "outcome": verdict.outcome if verdict is not None else None,
        "verdict": claim.verdict if claim is not None else None,
        "ratio": claim.ratio if claim is not None else None,
        "interval": [claim.low, claim.high] if claim is not None and claim.low is not None else None,
        "baseline": claim.baseline if claim is not None else None,
        "neighbour": claim.neighbour if claim is not None else None,
        "attempts": verdict.attempts if verdict is not None else 0,
        "export": str(outcome.exported) if outcome.exported is not None else None,
        "finished_before": outcome.finished_before,
        "exit_code": code,
        "exit_reason": reason,
    }


def exit_code(verdict: Verdict | None, wanted_faster: bool, again: bool) -> tuple[int, str]:
    """The exit code of a run that came to its end, and why.

    Args:
        verdict: The newest verdict, or None.
        wanted_faster: `--require faster` was given.
        again: A finished run was resumed; that is no failure, whatever its verdict says.
    """
    if wanted_faster and (verdict is None or verdict.outcome != "VALID" or verdict.primary.verdict != "FASTER"):
        found = "there is none" if verdict is None else f"it is {_word(verdict)}"
        return 1, f"--require faster is not met: the verdict must be FASTER, {found}"
    if verdict is not None and verdict.outcome != "VALID" and not again:
        return 1, f"the confirmation is {verdict.outcome}"
    return 0, "done"


def next_step(run: Run, outcome: Outcome) -> str:
    """What a person can do now."""
    lines = []
    if outcome.exported is not None:
        lines.append(f'exported: {outcome.exported}; use it with tuner.load("{outcome.exported}")')
    elif outcome.verdict is None and run.info.settings.get("record") is None:
        lines.append(f"not confirmed yet, so nothing is exported; next: tune confirm {run.path}")
    elif outcome.verdict is None:
        lines.append("a replay holds no fresh data, so it is neither confirmed nor exported")
    else:
        lines.append(
            f"nothing is exported on a VOID confirmation; put right what the gates say, then tune confirm {run.path}"
        )
    if _rehearsal(run) and run.info.settings.get("record") is None:
        lines.append(f"to walk a recorded GPU run instead, from a clone: tune --shape 1x4096x12288 --simulate {RECORD}")
    return "\n".join(lines)


def _head(run: Run) -> Block:
    info, problem = run.info, Problem.of(Shape.parse(run.info.shape), run.info.weights[0])
    device = info.device
    units = "cores" if _rehearsal(run) else "units"
    lines = [REHEARSAL] if _rehearsal(run) else []
    if info.settings.get("record") is not None:
        lines.append(f"REPLAY of {info.settings['record']}: nothing was measured in this run")
    lines.append(f"shape {info.shape}, weights {', '.join(info.weights)}, {problem.weight_bytes / 1e6:,.2f} MB")
    if problem.latency_bound:
        lines.append("latency-bound: under 2 MB of weights, launch cost decides more than memory")
    lines.append(
        f"device {device.get('name')} ({device.get('arch')}, {device.get('units')} {units}), begun {info.created}"
    )
    lines += run.notes
    return Block(f"run {run.name}", tuple(lines))


def _verdict(protocol: Protocol, verdict: Verdict) -> list[Block]:
    names = {record.label: f"{record.family}/{record.kernel}" for record in protocol.arms}
    configs = {record.label: " ".join(f"{k}={v}" for k, v in record.config.items()) for record in protocol.arms}
    claim = verdict.primary
    answer = [protocol.question]
    if verdict.outcome != "VALID":
        answer.append(f"{verdict.outcome}: this confirmation proves nothing; see the gates")
    answer.append(f"{_claim_text(claim)} ({names.get(claim.chosen, '?')} against {names.get(claim.baseline, '?')})")
    answer += claim.reasons
    if claim.without_outliers != claim.verdict:
        answer.append(f"without outliers it would be {claim.without_outliers}")
    answer.append(f"protocol sha256 {verdict.protocol_sha256}, attempt {verdict.attempt} of {verdict.attempts}")
    if protocol.drafted_by_tool:
        answer.append("the protocol was drafted by the tool and not edited")
    return [
        Block("verdict", tuple(answer)),
        Block(
            "arms: time with the neighbour's in it, rate, shares of the matched ceiling, best ceiling, peak",
            (),
            (
                *("arm", "what", f"us ({claim.neighbour})", "us (other)", "rate", "of matched", "of best", "of peak"),
                *("spread", "config, notes"),
            ),
            tuple(_arm_row(arm, names, configs) for arm in verdict.arms),
        ),
        Block(
            "claims: the primary one first, the others Holm-corrected; ratio = baseline / chosen",
            tuple(_reasons(one) for one in verdict.secondary if one.reasons),
            (
                *("chosen", "baseline", "neighbour", "ratio", "t interval", "bootstrap", "p", "verdict"),
                "without outliers",
            ),
            tuple(_claim_row(one) for one in (claim, *verdict.secondary)),
        ),
        Block(
            "predictions",
            (),
            ("id", "ratio", "reason", "predicted", "found", "result"),
            tuple(_prediction_row(prediction) for prediction in verdict.predictions),
        ),
        Block(
            "falsifiers",
            (),
            ("id", "reason", "condition", "found", "result"),
            tuple(_falsifier_row(falsifier) for falsifier in verdict.falsifiers),
        ),
        Block("gates", (), ("gate", "status", "detail"), tuple((g.name, g.status, g.detail) for g in verdict.gates)),
        Block("outliers, kept in every number", _outliers(verdict)),
        Block("disclosures", (*protocol.disclosures, *verdict.disclosures) or ("none",)),
    ]


def _outliers(verdict: Verdict) -> tuple[str, ...]:
    counts = Counter(f"{one.arm} ({one.neighbour})" for one in verdict.outliers)
    return tuple(f"{count} of {arm}" for arm, count in counts.most_common()) or ("none",)


def _estimates(run: Run, trials: Sequence[Trial], is_frozen: bool) -> Block:
    stage = "frozen, not confirmed" if is_frozen else "not confirmed"
    lines = [f"{stage}: every number below is an estimate of a search, which flatters the winner; it is no result"]
    if run.has("choice.json"):
        choice = run.read_json("choice.json")
        chosen = choice["chosen"]
        lines.append(
            f"chosen: {chosen['family']}/{chosen['kernel']} "
            + " ".join(f"{name}={value}" for name, value in sorted(chosen["config"].items()))
        )
        lines.append(
            f"arms in the tie set: {len(choice['tie_set'])}; expected optimism {100 * choice['optimism']:.1f} %"
        )
    timed = [trial for trial in trials if trial.median_us is not None and trial.problem == run.info.shape]
    timed = [trial for trial in timed if trial.stage == "finalist"] or timed
    timed.sort(key=lambda trial: (trial.median_us or 0.0, trial.arm.key))
    size = Problem.of(Shape.parse(run.info.shape), run.info.weights[0]).weight_bytes
    rows = tuple(
        (str(trial.arm), f"{trial.median_us:,.2f}", _rate(size / trial.median_us / 1e6))
        for trial in timed[:BEST_SHOWN]
        if trial.median_us
    )
    return Block("estimates", tuple(lines), ("arm", "us", "rate"), rows)


def _attempts(run: Run) -> Block:
    rows = tuple(attempts(run))
    return Block("attempts", () if rows else ("no confirmation was begun",), ("confirmation", "outcome"), rows)


def _trials(trials: Sequence[Trial]) -> Block:
    explored = Counter(trial.status for trial in trials if trial.stage == "explore")
    if not explored:
        return Block("trials", ("none yet",))
    lines = [", ".join(f"{count} {status}" for status, count in explored.most_common())]
    reasons = Counter(f"{trial.status}: {trial.reason}" for trial in trials if trial.status != "correct")
    return Block(
        "trials", tuple(lines), ("count", "failure"), tuple((str(n), why) for why, n in reasons.most_common(8))
    )


def _arm_row(arm: ArmResult, names: Mapping[str, str], configs: Mapping[str, str]) -> tuple[str, ...]:
    return (
        arm.label,
        names.get(arm.label, "?"),
        f"{arm.median_us:,.2f}",
        "" if arm.other_neighbour_us is None else f"{arm.other_neighbour_us:,.2f}",
        _rate(arm.tb_per_s),
        _percent(arm.share_of_ceiling),
        _percent(arm.share_of_asymptotic),
        _percent(arm.share_of_peak),
        f"{100 * arm.spread:.2f} %",
        "; ".join(part for part in (configs.get(arm.label, ""), *arm.notes) if part),
    )


def _claim_row(claim: Claim) -> tuple[str, ...]:
    p_value = claim.p_value if claim.p_holm is None else claim.p_holm
    return (
        *(claim.chosen, claim.baseline, claim.neighbour),
        "no ratio" if claim.ratio is None else f"{claim.ratio:.4f}",
        _interval(claim.low, claim.high),
        _interval(claim.bootstrap_low, claim.bootstrap_high),
        "" if p_value is None else f"{p_value:.2g}",
        claim.verdict,
        claim.without_outliers,
    )


def _reasons(claim: Claim) -> str:
    return f"{claim.baseline} / {claim.chosen} ({claim.neighbour}), {claim.verdict}: {'; '.join(claim.reasons)}"


def _prediction_row(found: PredictionResult) -> tuple[str, ...]:
    what = f"{found.baseline} / {found.chosen} ({found.neighbour})"
    straddles = ", the interval holds an end of the range" if found.straddles else ""
    predicted, measured = _interval(found.low, found.high), _found(found.found, found.found_low, found.found_high)
    return found.id, what, found.reason, predicted, measured, found.result + straddles


def _falsifier_row(found: FalsifierResult) -> tuple[str, ...]:
    measured = _found(found.found, found.found_low, found.found_high)
    return found.id, found.reason, found.condition, measured, found.result


def _found(value: float | None, low: float | None, high: float | None) -> str:
    return "none" if value is None else f"{value:.4f} ({_interval(low, high)})"


def _interval(low: float | None, high: float | None) -> str:
    return "none" if low is None or high is None else f"{low:.4f} to {high:.4f}"


def _rate(tb_per_s: float) -> str:
    """TB/s; GB/s where that would be all zeros."""
    return f"{tb_per_s:.3f} TB/s" if tb_per_s >= 0.1 else f"{1e3 * tb_per_s:.3g} GB/s"


def _percent(share: float | None) -> str:
    return "not known" if share is None else f"{100 * share:.1f} %"


def _claim_text(claim: Claim) -> str:
    return f"{claim.verdict}: {claim.interval_text} against {claim.baseline}, neighbour {claim.neighbour}"


def _line(path: Path) -> tuple[str, ...]:
    try:
        run = Run.open(path)
        info = run.info
        device = str(info.device.get("name", "?"))
        mark = " (rehearsal)" if _rehearsal(run) else ""
        return path.name, info.shape, ",".join(info.weights), device + mark, state(run)
    except ColdtuneError as error:
        return path.name, "", "", "", f"cannot be read: {error}"


def _rehearsal(run: Run) -> bool:
    return run.info.device.get("kind") == "host"


def _word(verdict: Verdict) -> str:
    return verdict.primary.verdict if verdict.outcome == "VALID" else verdict.outcome


def _cells(texts: Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts)
