"""The frozen document: its hash, its refusals, its page, and the order that it fixes."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_rig import content, protocol, record
from pydantic import ValidationError

from tuner.errors import RefusedError, UsageError
from tuner.protocol import Protocol, data_seed, load, order, parse, save
from tuner.protocol_markdown import render_markdown


def test_the_hash_is_that_of_the_canonical_json() -> None:
    data = content()
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    frozen = protocol()
    assert frozen.canonical() == text.encode()
    assert frozen.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert protocol(question="fäster").canonical().isascii()


def test_the_order_of_keys_does_not_change_the_hash_and_every_value_does() -> None:
    data = content()
    assert Protocol.model_validate(dict(reversed(data.items()))).sha256 == protocol().sha256
    assert protocol(question="Is it fäster?").sha256 != protocol().sha256
    assert protocol(seeds={"bootstrap": 1, "data": 3}).sha256 != protocol().sha256


def test_it_comes_back_from_its_file(tmp_path: Path) -> None:
    frozen = protocol(question="Is it fäster?")
    save(frozen, tmp_path / "protocol.json")
    assert load(tmp_path / "protocol.json") == frozen
    assert load(tmp_path / "protocol.json").sha256 == frozen.sha256


@pytest.mark.parametrize("edit", ["1.05", "config", "hash"])
def test_an_edited_file_is_refused_and_the_message_says_what_to_do(tmp_path: Path, edit: str) -> None:
    path = tmp_path / "protocol.json"
    save(protocol(), path)
    data = json.loads(path.read_text())
    if edit == "config":
        data["protocol"]["arms"][0]["config"]["m_spec"] = 1  # equal to True, but another value
    elif edit == "hash":
        data["sha256"] = "0" * 64
    else:
        data["protocol"]["predictions"][0]["low"] = 1.04
    path.write_text(json.dumps(data))
    with pytest.raises(RefusedError, match=r"edited after it was frozen.*tune freeze RUN --draft"):
        load(path)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"protocol": {"schema": 2}, "sha256": ""}, "schema 2.*Update coldtune"),
        ({"protocol": {"schema": 1}, "sha256": ""}, "question"),
        ({"protocol": {}}, "must hold protocol and sha256"),
        ([], "no frozen protocol"),
    ],
)
def test_a_newer_or_damaged_file_is_refused(tmp_path: Path, data: object, named: str) -> None:
    path = tmp_path / "protocol.json"
    path.write_text(json.dumps(data))
    with pytest.raises(RefusedError, match=named):
        load(path)
    with pytest.raises(UsageError, match="does not exist"):
        load(tmp_path / "absent.json")


PAIR: dict[str, Any] = {"baseline": "vendor-1", "chosen": "chosen", "neighbour": "plain"}
PREDICTION: dict[str, Any] = {"id": "P1", "reason": "r", "low": 1.0, "high": 2.0, "explored": False, **PAIR}
FALSIFIER: dict[str, Any] = {"id": "F1", "reason": "r", "below": 1.0, **PAIR}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"surprise": 1}, "surprise"),
        ({"shape": "1x4096"}, "shape '1x4096'"),
        ({"data_seen": "some"}, "data_seen"),
        ({"primary": {"baseline": "vendor-9", "chosen": "chosen"}}, "'vendor-9', which is no arm"),
        ({"predictions": [{**PREDICTION, "explored": True}]}, "exploration did not measure"),
        ({"predictions": []}, "exploration did not measure"),
        ({"predictions": [{**PREDICTION, "low": 2.0}]}, "must be below high"),
        ({"predictions": [{**PREDICTION, "reason": ""}]}, "reason"),
        ({"predictions": [{**PREDICTION, "baseline": "x"}]}, "prediction P1 names 'x'"),
        ({"falsifiers": []}, "at least one falsifier"),
        ({"falsifiers": [{**FALSIFIER, "above": 2.0}]}, "one of below and above"),
        ({"design": {"processes": 3, "cycles": 1, "blocks": 3, "repeats": 3, "seed": 1}}, "design.blocks"),
        ({"arms": [record("chosen"), record("vendor-1")]}, "stand in twice"),
        ({"arms": [*(record(n) for n in ("chosen", "again", "vendor-1")), record("chosen")]}, "same label"),
        ({"seeds": {"data": 1}}, "seeds needs"),
        ({"claim_rule": {"name": "mine"}}, "claim_rule.name"),
    ],
)
def test_a_draft_that_breaks_a_rule_is_refused_and_the_rule_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(RefusedError, match=named):
        parse(content(**changes), "draft.json")


def test_it_does_not_change() -> None:
    with pytest.raises(ValidationError):
        protocol().shape = "1x1x1"  # type: ignore[misc]


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 20), st.integers(0, 5), st.sampled_from([2, 4]))
def test_every_cycle_is_a_palindrome_with_each_arm_once_in_each_half(
    seed: int, process: int, cycle: int, n: int
) -> None:
    frozen = protocol(design={"processes": 4, "cycles": 2, "blocks": n, "repeats": 3, "seed": seed})
    labels = order(frozen, process, cycle)
    assert labels == labels[::-1] == order(frozen, process, cycle)
    count = len(frozen.labels)
    for half in range(n):
        assert sorted(labels[half * count : (half + 1) * count]) == sorted(frozen.labels)


def test_the_order_is_drawn_anew_for_each_process_and_cycle_and_prefers_no_arm() -> None:
    frozen = protocol()
    drawn = [order(frozen, process, cycle) for process in range(40) for cycle in range(10)]
    firsts = Counter(labels[0] for labels in drawn)
    # 400 draws of 8 arms: 50 each, standard deviation 6.6.
    assert len(firsts) == 8 and max(firsts.values()) < 80 and min(firsts.values()) > 25
    assert len({tuple(labels) for labels in drawn}) > 390


def test_every_process_of_every_attempt_has_its_own_data() -> None:
    seeds = {data_seed(protocol(), attempt, process) for attempt in range(5) for process in range(10)}
    assert len(seeds) == 50
    assert data_seed(protocol(), 1, 2) == data_seed(protocol(), 1, 2)


def test_the_page_says_everything_that_a_reader_signs() -> None:
    frozen = protocol()
    page = render_markdown(frozen)
    for text in (
        *(frozen.question, frozen.sha256, "drafted by the tool", "data seen so far: none", "none is left out"),
        *("1.05 to 1.2", "guess", "lies wholly below 0.995", "no gain", "every vendor arm", "0.50%", "Holm"),
        *("4 fresh processes x 2 cycles x 2 blocks x 3 repeats", "order 7", "bootstrap 1", "data 2"),
        *("NVIDIA H200", "torch 2.13.0", "arms dropped: none", "5 slots of 100.00 MB", "4.500 TB/s", "too | large"),
    ):
        assert text in page, text
    for label in frozen.labels:
        assert f"| {label} |" in page
    assert "edited by a person" in render_markdown(protocol(drafted_by_tool=False))
    assert "bootstrap interval" in render_markdown(protocol(claim_rule={"name": "published"}))


def test_a_cell_of_the_page_cannot_break_its_table() -> None:
    page = render_markdown(protocol(predictions=[{**PREDICTION, "reason": "a | b\nc"}]))
    assert "a \\| b c |" in page
