"""The whole path on host, by the command line: shape to verdict, confirmed again, refused when touched, loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

import tuner
from tuner.protocol import Gate, load
from tuner.store import Run
from tuner.verdict import judge
from tuner.workflow.results import read_verdict

SHAPE = "1x96x40"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("path")
    done = run(folder, "--shape", SHAPE, "--device", "host", "--quick", "--trials", "1", "--json")
    assert done.returncode == 0, done.stderr
    (folder / "out.json").write_text(done.stdout)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLDTUNE_STATE": str(folder / "state")}
    command = [sys.executable, "-m", "tuner", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def opened(place: Path) -> Run:
    return Run.open("latest", place / "runs")


def test_it_comes_to_a_verdict_with_everything_kept(place: Path) -> None:
    told = json.loads((place / "out.json").read_text())
    found = opened(place)
    verdict = read_verdict(found.confirmations()[0])
    assert verdict.outcome == "VALID" and told["verdict"] == verdict.primary.verdict
    assert {gate.name: gate.status for gate in verdict.gates}["results"] == "pass"
    receipts = found.read_json("confirm-001/receipts.json")
    protocol = load(found.file("protocol.json"))
    assert set(receipts["arms"]) == set(protocol.labels)
    assert len(receipts["processes"]) == protocol.design.processes == 3
    assert len({process["pid"] for process in receipts["processes"]}) == 3, "each process is a fresh one"
    chosen = receipts["arms"]["chosen"]
    assert chosen["compiles_in_worker"] == 0 and protocol.arm("chosen").code_hash.startswith(chosen["code_hash"])


def test_the_same_samples_give_the_same_verdict_to_the_last_digit(place: Path) -> None:
    found = opened(place)
    frame = pd.read_parquet(found.file("confirm-001/samples.parquet"))
    written = read_verdict(found.confirmations()[0])
    protocol = load(found.file("protocol.json"))
    passed = [Gate(name="x", status="pass", detail="")]
    again = judge(protocol, frame, passed, written.attempt, written.attempts)
    assert again.primary == written.primary and again.secondary == written.secondary
    assert again.arms == written.arms and again.predictions == written.predictions


def test_the_export_loads_packs_and_multiplies(place: Path) -> None:
    mm = tuner.load(opened(place).file("best.json"))
    weight = (torch.randn(40, 96) / 96**0.5).bfloat16()
    x = torch.randn(1, 96).bfloat16()
    assert mm.ask(weight).status == "HIT", mm.ask(weight)
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(mm.pack(weight)(x).double(), expected, rtol=2**-8, atol=1e-4)
    assert mm.ask(weight[:10]).status == "MISS"
    torch.testing.assert_close(mm.pack(weight[:10])(x).double(), expected[:, :10], rtol=2**-7, atol=1e-3)


def test_a_second_confirmation_is_numbered_and_counted(place: Path) -> None:
    done = run(place, "confirm", "latest", "--json")
    assert done.returncode == 0, done.stderr
    second = read_verdict(opened(place).confirmations()[1])
    assert (second.attempt, second.attempts) == (2, 2)
    first = read_verdict(opened(place).confirmations()[0])
    assert second.protocol_sha256 == first.protocol_sha256
    assert second.primary.process_ratios != first.primary.process_ratios
    lines = (place / "state" / "attempts.jsonl").read_text().splitlines()
    assert [json.loads(line)["entry"]["event"] for line in lines] == ["started", "VALID", "started", "VALID"]


def test_an_edited_protocol_is_refused_and_nothing_is_measured(place: Path) -> None:
    path = opened(place).file("protocol.json")
    kept = path.read_text()
    path.write_text(kept.replace('"margin": 0.005', '"margin": 0.0005'))
    try:
        before = len(opened(place).confirmations())
        done = run(place, "confirm", "latest")
        assert done.returncode == 3 and "was edited after it was frozen" in done.stderr
        assert len(opened(place).confirmations()) == before
    finally:
        path.write_text(kept)


def test_a_finished_run_that_is_resumed_says_so(place: Path) -> None:
    done = run(place, "--resume", "latest")
    assert done.returncode == 0 and "is finished; nothing is left to do" in done.stdout + done.stderr
