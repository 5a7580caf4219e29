"""A confirmed config leaves with its evidence, or not at all; what does not beat the vendor is routed to the vendor."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tuner import registry
from tuner.arms import Arm
from tuner.devices import target_of
from tuner.errors import RefusedError, UsageError
from tuner.files import atomic_write, write_json
from tuner.problem import Problem, Shape
from tuner.store import Best, Run, validate
from tuner.workflow.results import frozen, latest_verdict, recorded_device

if TYPE_CHECKING:
    from tuner.protocol import ArmRecord, Protocol, Verdict

FORMATS = {"json": "best.json", "triton": "best_triton.py"}


def export(run: Run, form: str = "json", path: Path | None = None) -> Path:
    """Write the config that the newest verdict stands for.

    Args:
        run: A confirmed run.
        form: `json` for `tuner.load`, or `triton` for `triton.Config` source.
        path: Where to; default in the run folder.

    Raises:
        UsageError: There is no such format.
        RefusedError: There is no valid verdict, the code is not what was confirmed, or the arm has no such form.
    """
    if form not in FORMATS:
        raise UsageError(f"unknown export format {form!r}; this version has {', '.join(FORMATS)}")
    best = build(run)
    target = path or run.file(FORMATS[form])
    if target.is_dir():
        raise UsageError(f"--out {str(target)!r} is a folder; name a file, for example --out {target / FORMATS[form]}")
    if form == "json":
        write_json(target, best)
    else:
        atomic_write(target, triton_source(best).encode())
    return target


def build(run: Run) -> Best:
    """Put the config and its evidence together; see `export` for errors."""
    protocol, verdict = _confirmed(run)
    record, route, reason = route_of(protocol, verdict)
    info = recorded_device(run)
    problem = Problem.of(Shape.parse(record.shape), record.weights)
    artifact = registry.build(problem, _arm(record), target_of(info), run.info.plugin)
    for what, was, now in (
        ("the kernel source", record.source_hash, artifact.source_hash),
        ("the compiled code", record.code_hash, artifact.code_hash),
    ):
        if was != now:
            raise RefusedError(
                f"{what} of {record.family}/{record.kernel} is not what was confirmed ({now[:12]}, not {was[:12]}); "
                f"tune again, or go back to the sources and versions of {run.name}"
            )
    claim = verdict.primary
    medians = {arm.label: arm.median_us for arm in verdict.arms}
    layout = str(record.config.get("layout", problem.format.layouts[0]))
    return validate(
        Best,
        {
            "route": route,
            "reason": reason,
            "shape": record.shape,
            "weights": record.weights,
            "device": {"kind": info.kind, "name": info.name, "arch": info.arch, "units": info.units},
            "versions": {**run.info.versions, **info.versions},
            "family": record.family,
            "kernel": record.kernel,
            "config": dict(record.config),
            "plugin": Path(run.info.plugin).name if run.info.plugin else None,
            "source_hash": record.source_hash,
            "code_hash": record.code_hash,
            "packing": {
                "layout": layout,
                "operands": [asdict(operand) for operand in problem.format.operands(problem.shape, layout)],
                "workspaces": [asdict(workspace) for workspace in artifact.workspaces],
            },
            "evidence": {
                "verdict": claim.verdict,
                "baseline": str(_arm(_record(protocol, claim.baseline))),
                "neighbour": claim.neighbour,
                "ratio": claim.ratio,
                "interval": None if claim.low is None or claim.high is None else (claim.low, claim.high),
                "median_us": medians[claim.chosen],
                "baseline_median_us": medians[claim.baseline],
                "protocol_sha256": verdict.protocol_sha256,
                "attempt": verdict.attempt,
                "attempts": verdict.attempts,
                "rehearsal": info.kind == "host",
            },
        },
        "the export",
    )


def route_of(protocol: Protocol, verdict: Verdict) -> tuple[ArmRecord, str, str]:
    """The arm to use, `arm` or `vendor`, and why."""
    claim = verdict.primary
    chosen, baseline = _record(protocol, claim.chosen), _record(protocol, claim.baseline)
    found = claim.interval_text
    if claim.verdict == "FASTER":
        return chosen, "arm", f"FASTER than {_arm(baseline)}: {found}"
    why = f"; {'; '.join(claim.reasons)}" if claim.reasons else ""
    reason = f"the chosen arm does not beat {_arm(baseline)}: {claim.verdict}, {found}{why}"
    if baseline.role != "vendor":
        return baseline, "arm", reason
    # A claim must hold against every vendor form, so the frozen baseline need not be the fastest of them.
    medians = {arm.label: arm.median_us for arm in verdict.arms}
    vendors = [record for record in protocol.arms if record.role == "vendor" and record.label in medians]
    return min(vendors, key=lambda record: medians[record.label]), "vendor", reason


def triton_source(best: Best) -> str:
    """Python source of a `triton.Config`, its evidence in comments.

    Raises:
        RefusedError: The arm is no Triton arm.
    """
    if best.route == "vendor":
        raise RefusedError(
            f"there is no triton.Config to export: {best.reason}. tune export --format json routes to the vendor"
        )
    if best.family != "triton":
        raise RefusedError(
            f"the chosen arm is {best.family}/{best.kernel}, which has no triton.Config; write --format json"
        )
    config = dict(best.config)
    options = {"num_warps": config.pop("warps", 4), "num_stages": config.pop("num_stages", 1)}
    evidence, device = best.evidence, best.device
    interval = "none" if evidence.interval is None else f"{evidence.interval[0]:.4f} to {evidence.interval[1]:.4f}"
    rehearsal = ["A rehearsal on host: no GPU result."] if evidence.rehearsal else []
    comment = [
        f"{best.shape} {best.weights} on {device.name} ({device.arch}, {device.units} units), kernel {best.kernel}",
        *rehearsal,
        f"{evidence.verdict}: {evidence.median_us:.2f} us, {evidence.baseline}: {evidence.baseline_median_us:.2f} us",
        f"ratio {evidence.ratio}, interval {interval}, neighbour {evidence.neighbour}",
        f"protocol sha256 {evidence.protocol_sha256}, attempt {evidence.attempt} of {evidence.attempts}",
        "versions: " + ", ".join(f"{name} {value}" for name, value in sorted(best.versions.items())),
        f"kernel source sha256 {best.source_hash}",
        "weights lie as N rows of K, as nn.Linear holds them; in the kernel BLOCK_K = cpt * warp * warps * unroll",
    ]
    lines = ['"""Exported by Coldtune."""', "", *(f"# {_one_line(text)}" for text in comment), "", "import triton", ""]
    arguments = "".join(f"        {name!r}: {value!r},\n" for name, value in sorted(config.items()))
    values = ", ".join(f"{name}={value!r}" for name, value in options.items())
    return "\n".join(lines) + f"\nCONFIG = triton.Config(\n    {{\n{arguments}    }},\n    {values},\n)\n"


def _confirmed(run: Run) -> tuple[Protocol, Verdict]:
    verdict = latest_verdict(run)
    if verdict is None:
        raise RefusedError(
            f"run {run.name} has no verdict: what exploration found is an estimate and is not exported; "
            f"write tune confirm {run.path}"
        )
    if verdict.outcome != "VALID":
        broken = "; ".join(f"{gate.name}: {gate.detail}" for gate in verdict.gates if gate.status == "void")
        raise RefusedError(
            f"the newest confirmation of {run.name} is VOID ({broken or 'see tune show'}) and is not exported; "
            f"put that right, then tune confirm {run.path}"
        )
    protocol = frozen(run)
    if verdict.protocol_sha256 != protocol.sha256:
        raise RefusedError(
            f"the verdict of {run.name} is about another protocol ({verdict.protocol_sha256[:12]}, "
            f"not {protocol.sha256[:12]}); write tune confirm {run.path}"
        )
    return protocol, verdict


def _record(protocol: Protocol, label: str) -> ArmRecord:
    for record in protocol.arms:
        if record.label == label:
            return record
    raise RefusedError(f"the verdict names the arm {label!r}, which the protocol lacks; one of them is damaged")


def _arm(record: ArmRecord) -> Arm:
    return Arm.of(record.family, record.kernel, record.config)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)
