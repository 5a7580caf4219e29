"""Print the tables of README.md from the receipts under bench/results/h200: python bench/table.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "h200"
HEADLINE = "1x4096x12288"
NAMES = {
    "chosen": "chosen",
    "default": "its family's default",
    "twin": "the same config, general kernel (M <= 8)",
    "other": "best of the other family",
    "vendor-1": "best library form",
    "ceiling": "read-only kernel: the matched ceiling",
}


def headline() -> str:
    """The arms of the headline run, behind both neighbours."""
    protocol, verdict = _read(HEADLINE)
    arms = {arm["label"]: arm for arm in protocol["arms"]}
    claims = {(c["baseline"], c["neighbour"]): c for c in [verdict["primary"], *verdict["secondary"]]}
    lines = [
        "| arm | what | µs, plain | µs, self | TB/s | of matched ceiling | time / chosen (95 % interval) |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in verdict["arms"]:
        label = row["label"]
        if label not in NAMES:
            continue
        claim = claims.get((label, "plain"))
        ratio = f"{claim['ratio']:.3f} ({claim['low']:.3f} to {claim['high']:.3f})" if claim else ""
        share = f"{100 * row['share_of_ceiling']:.1f} %" if row["share_of_ceiling"] else ""
        what = f"`{arms[label]['family']}/{arms[label]['kernel']}`"
        lines.append(
            f"| {NAMES[label]} | {what} | {row['median_us']:.2f} | {row['other_neighbour_us']:.2f} | "
            f"{row['tb_per_s']:.2f} | {share} | {ratio} |"
        )
    return "\n".join(lines)


def shapes() -> str:
    """One line a shape: the primary claim of each run."""
    lines = [
        "| shape | chosen | µs | best library form, µs | library / chosen (95 % interval) | of matched ceiling "
        "| verdict |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for folder in sorted(RESULTS.iterdir(), key=lambda path: (path.name != HEADLINE, path.name)):
        if not folder.is_dir():
            continue
        protocol, verdict = _read(folder.name)
        claim, rows = verdict["primary"], {row["label"]: row for row in verdict["arms"]}
        chosen = next(arm for arm in protocol["arms"] if arm["label"] == "chosen")
        share = rows["chosen"]["share_of_ceiling"]
        word = claim["verdict"] if verdict["outcome"] == "VALID" else verdict["outcome"]
        processes = protocol["design"]["processes"]
        of_ceiling = f"{100 * share:.1f} %" if share else "above it: the sweep is too weak"
        lines.append(
            f"| {folder.name} | `{chosen['family']}` | {rows['chosen']['median_us']:.2f} | "
            f"{rows[claim['baseline']]['median_us']:.2f} | {claim['ratio']:.3f} ({claim['low']:.3f} to "
            f"{claim['high']:.3f}) | {of_ceiling} | {word}, {processes} processes |"
        )
    return "\n".join(lines)


def _read(shape: str) -> tuple[dict[str, Any], dict[str, Any]]:
    protocol = json.loads((RESULTS / shape / "protocol.json").read_text())["protocol"]
    newest = sorted((RESULTS / shape).glob("confirm-*/verdict.json"))[-1]
    return protocol, json.loads(newest.read_text())


if __name__ == "__main__":
    print(headline(), end="\n\n")
    print(shapes())
