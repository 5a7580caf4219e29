"""A protocol as a page that a person can read and sign."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tuner.protocol import Protocol


def render_markdown(protocol: Protocol) -> str:
    """The whole protocol in Markdown."""
    drafted = "drafted by the tool" if protocol.drafted_by_tool else "edited by a person before the freeze"
    parts = [
        f"# Protocol: {protocol.shape} {', '.join(protocol.weights)}",
        f"{protocol.question}\n\n{drafted}; sha256 `{protocol.sha256}`; confirmation data seen so far: "
        f"{protocol.data_seen}.",
        _section("Claim", _claim(protocol)),
        "## Arms\n\n" + _arms(protocol),
        "## Predictions\n\n" + _predictions(protocol),
        "## Falsifiers\n\n" + _falsifiers(protocol),
        _section("Design", _design(protocol)),
        _section("Instrument", _instrument(protocol)),
        _section("Exclusions", protocol.exclusions),
        _section("Disclosures", protocol.disclosures or ("none",)),
        _section("Exploration", _exploration(protocol)),
        _section("Device", [f"{name}: {_value(value)}" for name, value in sorted(protocol.device.items())]),
        _section("Software", [f"{name} {value}" for name, value in sorted(protocol.versions.items())]),
    ]
    return "\n\n".join(parts) + "\n"


def _claim(protocol: Protocol) -> list[str]:
    rule, primary = protocol.claim_rule, protocol.primary
    lines = [
        f"primary: `{primary.chosen}` against `{primary.baseline}`, neighbour {protocol.instrument.neighbour}; "
        "a ratio is baseline / chosen, above 1 the chosen arm is faster",
    ]
    if protocol.arm(primary.baseline).role == "vendor":
        lines.append("the claim must hold against every vendor arm; the strictest is its row")
    if rule.name == "default":
        lines.append(
            f"rule `default`: FASTER if the {rule.confidence:.0%} t interval over process means of the log ratio "
            f"clears 1 by {rule.margin:.2%} and every process lies above 1; SLOWER likewise"
        )
    else:
        lines.append(
            f"rule `published`: FASTER if the {rule.confidence:.0%} hierarchical bootstrap interval lies above 1 and "
            "the ranges of the process medians do not overlap; SLOWER likewise"
        )
    lines.append(f"SAME if the interval lies within the margin of {rule.margin:.2%}; else AMBIGUOUS")
    lines.append("all other comparisons with the chosen arm are secondary, Holm-corrected")
    return lines


def _arms(protocol: Protocol) -> str:
    rows = [
        (
            a.label,
            a.role,
            f"{a.family}/{a.kernel}",
            " ".join(f"{name}={value}" for name, value in sorted(a.config.items())),
            f"{a.shape} {a.weights}",
            a.source_hash[:12],
            a.code_hash[:12],
        )
        for a in protocol.arms
    ]
    return _table(("label", "role", "what", "config", "problem", "source", "code"), rows)


def _predictions(protocol: Protocol) -> str:
    rows = [
        (
            p.id,
            f"{p.baseline} / {p.chosen}",
            p.neighbour,
            f"{p.low:.4g} to {p.high:.4g}",
            "yes" if p.explored else "no",
            p.reason,
        )
        for p in protocol.predictions
    ]
    return _table(("id", "ratio", "neighbour", "range", "seen in exploration", "reason"), rows)


def _falsifiers(protocol: Protocol) -> str:
    return _table(("id", "met if", "reason"), [(f.id, f.condition, f.reason) for f in protocol.falsifiers])


def _design(protocol: Protocol) -> list[str]:
    d = protocol.design
    return [
        f"{d.processes} fresh processes x {d.cycles} cycles x {d.blocks} blocks x {d.repeats} repeats of every arm, "
        f"behind {' and '.join(protocol.neighbours)}",
        "the order of the arms is drawn for every cycle from the seed, then mirrored",
        f"seeds: order {d.seed}, " + ", ".join(f"{name} {value}" for name, value in sorted(protocol.seeds.items())),
    ]


def _instrument(protocol: Protocol) -> list[str]:
    i = protocol.instrument
    lines = [
        f"{weights}: rotation of {i.slots.get(weights, 0)} slots of {nbytes / 1e6:,.2f} MB"
        for weights, nbytes in sorted(i.weight_bytes.items())
    ]
    window = f" and {i.min_window_us / 1e3:g} ms" if i.min_window_us else ""
    lines += [
        f"last-level cache {i.llc_bytes / 1e6:,.1f} MB",
        f"at least {i.min_launches} launches{window} between two events; {i.max_nodes} kernels a graph at most",
        f"{i.untimed_us / 1e3:g} ms untimed in front of a block; {i.warmup_s:g} s warm-up a process",
        f"timer version {i.timer_version}",
    ]
    if i.asymptotic_bytes_per_us is not None:
        lines.append(f"fastest large read of the exploration {i.asymptotic_bytes_per_us / 1e6:.3f} TB/s")
    return lines


def _exploration(protocol: Protocol) -> list[str]:
    e = protocol.exploration
    return [
        f"{e.trials} arms measured of {e.size:,} configs{', from a recorded run' if e.replay else ''}",
        f"expected optimism of the best estimate {e.optimism:.1%}",
        *(f"pruned {count:,}: {why}" for why, count in sorted(e.pruned.items())),
        *(f"in the tie set: `{arm}`" for arm in e.tie_set),
    ]


def _section(title: str, lines: Iterable[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {_line(line)}" for line in lines)


def _table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(_line(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _line(text: str) -> str:
    return " ".join(text.split())


def _value(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in sorted(value.items())) or "none"
    return str(value) if value not in ("", None) else "none"
