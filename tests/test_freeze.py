"""Drafting, freezing and checking again: what is written, and everything that is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.arms import Arm, Artifact, Target
from tuner.devices.base import DeviceInfo
from tuner.errors import ArmConstraintError, RefusedError, UsageError
from tuner.problem import Problem, Shape
from tuner.protocol import Design, Protocol, load
from tuner.space import Constraint, Parameter, Space
from tuner.store import Run, RunInfo, Trial
from tuner.workflow import freeze as step
from tuner.workflow.draft import Built, default_design, draft, seed_of

SHAPE = "1x4096x12288"
INFO = DeviceInfo("cuda", 0, "NVIDIA H200", "sm_90", "GPU-1", "", 132, 32, 60_000_000, "driver", 140 * 10**9, 4.8e12)
CONFIG = {"rows": 4, "m_spec": True, "pdl": True}


def entry(family: str, **config: Any) -> dict[str, Any]:
    return {"family": family, "kernel": "k", "config": config}


def key(data: Mapping[str, Any]) -> str:
    return Arm.of(data["family"], data["kernel"], data["config"]).key


CHOSEN = entry("triton", **CONFIG)
DEFAULT = entry("triton", rows=1, m_spec=True, pdl=False)
TWIN = entry("triton", **{**CONFIG, "m_spec": False})
OTHER = entry("hip", rows=1, m_spec=True)
VENDORS = [entry("vendor", n=1), entry("vendor", n=2)]
CEILING = entry("ceiling", n=1)


def choice(**changes: Any) -> dict[str, Any]:
    times_us = [(CHOSEN, 25.0), (DEFAULT, 26.0), (OTHER, 25.5), (VENDORS[0], 30.0), (VENDORS[1], 31.0), (CEILING, 24.0)]
    data = {
        "schema": 1,
        "problem": {"shape": SHAPE, "weights": "bf16"},
        **{"chosen": CHOSEN, "tie_set": [CHOSEN], "default": DEFAULT, "twin": TWIN, "other": OTHER},
        **{"vendors": VENDORS, "ceiling": CEILING, "ceilings": [], "asymptotic": {"bytes_per_us": 4.5e6}},
        "estimates": {key(arm): us for arm, us in times_us},
        "optimism": 0.01,
        "space": {"size": 100, "pruned": {"cpt divides K": 3}},
        "dropped": [{**OTHER, "status": "compile", "reason": "no"}] * 2,
        "compile_wait": {"wait_s": 1.0, "measure_s": 2.0},
        "replay": False,
    }
    return {**data, **changes}


def info(device: DeviceInfo = INFO, **changes: Any) -> RunInfo:
    data = {
        **{"created": "2026-01-02T03:04:05+00:00", "shape": SHAPE, "weights": ["bf16"], "device": asdict(device)},
        **{"settings": {"seed": 1, "neighbour": "plain", "quick": False}, "versions": {"torch": "2.13.0"}},
    }
    return RunInfo.model_validate({**data, **changes})


def drafted(run_info: RunInfo | None = None, chosen: dict[str, Any] | None = None, **changes: Any) -> Protocol:
    found = chosen or choice()
    listed = [found[name] for name in ("chosen", "default", "twin", "other", "ceiling")] + found["vendors"]
    hashes = {key(arm): Built(f"code {key(arm)}", "source") for arm in listed if arm is not None}
    return draft(run_info or info(), found, hashes, {key(CHOSEN)}, "space", **changes)


def test_the_draft_holds_every_arm_once_and_the_chosen_twice() -> None:
    protocol = drafted()
    assert protocol.labels == ("chosen", "again", "default", "twin", "other", "vendor-1", "vendor-2", "ceiling")
    assert protocol.arm("chosen").config == protocol.arm("again").config == CONFIG
    assert protocol.arm("twin").code_hash == f"code {key(TWIN)}"
    assert (protocol.primary.baseline, protocol.primary.chosen) == ("vendor-1", "chosen")
    assert protocol.drafted_by_tool and protocol.data_seen == "none" and protocol.neighbours == ("plain", "self")
    assert protocol.instrument.weight_bytes == {"bf16": 4096 * 12288 * 2}
    assert protocol.instrument.slots == {"bf16": 5}  # ceil(8 x 60 MB / 100.66 MB)
    assert "triton/k faster than the best vendor form (vendor/k)" in protocol.question
    assert "arms dropped in exploration: 2 x compile: no" in protocol.disclosures


def test_the_same_choice_gives_the_same_protocol_whenever_it_is_frozen() -> None:
    later = info(created="2027-01-02T03:04:05+00:00", argv=["tune", "--resume"])
    slower = choice(compile_wait={"wait_s": 9.0, "measure_s": 9.0})
    assert drafted(later, slower).sha256 == drafted().sha256
    assert drafted(info(settings={"seed": 2, "neighbour": "plain"})).sha256 != drafted().sha256


def test_predictions_are_ranges_about_shrunk_estimates_with_reasons() -> None:
    protocol = drafted()
    by_pair = {(p.baseline, p.neighbour): p for p in protocol.predictions}
    vendor = by_pair["vendor-1", "plain"]
    # 30 / 25 = 1.2, less 1 % of optimism, and 2 % to both sides.
    assert (vendor.low, vendor.high) == pytest.approx((1.2 / 1.01 * 0.98, 1.2 / 1.01 * 1.02), abs=1e-4)
    assert vendor.explored and "1.0%" in vendor.reason and "1.200x" in vendor.reason
    assert not by_pair["vendor-1", "self"].explored and "dependent launch gains" in by_pair["vendor-1", "self"].reason
    assert not by_pair["twin", "plain"].explored and by_pair["twin", "plain"].low < 1 < by_pair["twin", "plain"].high
    assert by_pair["ceiling", "plain"].low < 24 / 25 < by_pair["ceiling", "plain"].high
    assert [p.id for p in protocol.predictions] == ["P1", "P2", "P3", "P4", "P5"]
    assert [(f.id, f.baseline, f.below) for f in protocol.falsifiers] == [
        ("F1", "vendor-1", pytest.approx(1 / 1.005)),
        ("F2", "default", pytest.approx(1 / 1.005)),
    ]


def test_a_bare_choice_still_has_an_unmeasured_prediction_and_a_falsifier() -> None:
    bare = choice(default=CHOSEN, twin=None, other=None, vendors=[], ceiling=None, asymptotic=None)
    protocol = drafted(chosen=bare)
    assert protocol.labels == ("chosen", "again") and protocol.primary.baseline == "again"
    assert [(p.baseline, p.explored) for p in protocol.predictions] == [("again", False)]
    told = " ".join(protocol.disclosures)
    assert "default is the same arm as chosen" in told and "no vendor form" in told and "no ceiling" in told
    assert len(protocol.falsifiers) == 1


def test_a_twin_that_is_the_default_is_measured_once_and_still_predicted() -> None:
    protocol = drafted(chosen=choice(default=TWIN))
    assert "twin" not in protocol.labels and any(p.baseline == "default" for p in protocol.predictions)


def test_a_chosen_vendor_is_compared_with_the_default() -> None:
    protocol = drafted(chosen=choice(chosen=VENDORS[0], twin=None))
    assert protocol.primary.baseline == "default" and "vendor-1" not in protocol.labels
    assert protocol.arm("vendor-2").role == "vendor"


def test_host_has_one_neighbour_and_says_what_it_is() -> None:
    host = replace(INFO, kind="host", arch="x86_64", uuid="", peak_bytes_per_s=None)
    protocol = drafted(info(host))
    assert protocol.neighbours == ("self",) and protocol.instrument.min_launches == 2
    assert any("rehearsal on host" in text for text in protocol.disclosures)
    assert any(not p.explored for p in protocol.predictions)
    assert drafted(info(settings={"neighbour": "self"})).neighbours == ("self", "plain")


def test_the_limits_that_will_decide_are_written_down() -> None:
    told = " ".join(drafted().exclusions)
    for text in (
        "over 2% (5% under 5 us)",
        "over 1% between the halves",
        "1.3 times",
        "over 2% faster than the fastest",
    ):
        assert text in told
    host = " ".join(drafted(info(replace(INFO, kind="host"))).exclusions)
    assert "over 30% (30% under" in host and "fastest ceiling" not in host


def test_the_default_designs() -> None:
    def counts(design: Design) -> tuple[int, int, int, int]:
        return design.processes, design.cycles, design.blocks, design.repeats

    assert counts(default_design("cuda", False, 1)) == counts(default_design("rocm", False, 1)) == (10, 3, 2, 3)
    assert counts(default_design("host", False, 1)) == (5, 1, 2, 3)
    assert counts(default_design("cuda", True, 1)) == (3, 1, 2, 3)
    quick = drafted(info(settings={"seed": 1, "quick": True}))
    assert quick.design.processes == 3 and any(text.startswith("quick: 3 processes") for text in quick.disclosures)


def test_seeds_differ_by_purpose_and_follow_the_runs_seed() -> None:
    assert len({seed_of(info(), purpose) for purpose in ("order", "bootstrap", "data")}) == 3
    assert seed_of(info(), "order") == seed_of(info(), "order") != seed_of(info(settings={"seed": 2}), "order")


def fake_registry(twin_fails: bool = False) -> SimpleNamespace:
    def build(problem: Problem, arm: Arm, target: Target, plugin: str | None = None) -> Artifact:
        if twin_fails and arm.config.get("m_spec") is False:
            raise ArmConstraintError("needs 300 KB of 227 KB")
        return Artifact(arm, problem, target, b"", f"code {arm.key}", "source")

    return SimpleNamespace(build=build, available=lambda target, plugin: ({}, {}))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(step, "registry", fake_registry())
    made = Run.create(tmp_path / "runs", info())
    made.write_json("choice.json", choice())
    trial = {"trial": 0, "stage": "explore", "problem": SHAPE, "weights": "bf16", "status": "correct", **CHOSEN}
    made.append(Trial.model_validate({**trial, "samples_us": [25.0], "median_us": 25.0}))
    return made


def test_freezing_writes_the_protocol_and_its_page(run: Run) -> None:
    protocol = step.freeze(run)
    assert load(run.file("protocol.json")) == protocol
    assert protocol.sha256 in run.file("protocol.md").read_text()
    assert protocol.exploration.trials == 1 and protocol.claim_rule.name == "default"


def test_freezing_again_is_fine_if_it_is_the_same_and_refused_if_not(run: Run) -> None:
    first = step.freeze(run)
    run.file("protocol.md").unlink()
    assert step.freeze(run).sha256 == first.sha256 and run.has("protocol.md")
    with pytest.raises(RefusedError, match=r"another protocol frozen already.*never replaced.*new run"):
        step.freeze(run, claim_rule="published")
    assert load(run.file("protocol.json")) == first and first.sha256 in run.file("protocol.md").read_text()


def test_an_unknown_rule_and_an_unexplored_run_are_refused(run: Run) -> None:
    with pytest.raises(UsageError, match="default or published"):
        step.freeze(run, claim_rule="mine")
    run.write_json("choice.json", {"chosen": CHOSEN})
    with pytest.raises(RefusedError, match="lacks default"):
        step.freeze(run)
    run.file("choice.json").unlink()
    with pytest.raises(RefusedError, match=r"not explored to its end.*tune --resume"):
        step.freeze(run)


def test_a_twin_that_does_not_compile_is_left_out_and_disclosed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "registry", fake_registry(twin_fails=True))
    protocol = step.freeze(run)
    assert "twin" not in protocol.labels and "needs 300 KB of 227 KB" in protocol.disclosures[0]


def test_hashes_of_what_exploration_compiled_are_taken_where_it_noted_them(run: Run) -> None:
    noted = {"code_hashes": {key(CHOSEN): "measured"}, "source_hashes": {key(CHOSEN): "then"}, "slots": 3}
    run.write_json("choice.json", choice(**noted))
    protocol = step.freeze(run)
    assert (protocol.arm("chosen").code_hash, protocol.arm("again").source_hash) == ("measured", "then")
    assert protocol.arm("default").code_hash == f"code {key(DEFAULT)}" and protocol.instrument.slots == {"bf16": 3}


def edited_file(run: Run, tmp_path: Path, **changes: Any) -> Path:
    data = json.loads(drafted().canonical())
    data["exploration"]["space_hash"] = step.space_hash([])
    path = tmp_path / "draft.json"
    path.write_text(json.dumps({**data, **changes}))
    return path


def test_an_edited_draft_is_frozen_as_edited(run: Run, tmp_path: Path) -> None:
    protocol = step.freeze(run, draft_file=edited_file(run, tmp_path, question="Mine?"))
    assert protocol.question == "Mine?" and not protocol.drafted_by_tool
    assert load(run.file("protocol.json")) == protocol
    assert "edited by a person" in run.file("protocol.md").read_text()


def test_an_edited_draft_takes_the_place_of_the_tools_until_a_confirmation_begins(run: Run, tmp_path: Path) -> None:
    step.freeze(run)
    mine = step.freeze(run, draft_file=edited_file(run, tmp_path, question="Mine?"))
    assert load(run.file("protocol.json")) == mine and mine.question == "Mine?"
    with pytest.raises(RefusedError, match="never replaced"):
        step.freeze(run, draft_file=edited_file(run, tmp_path, question="Another?"))
    assert load(run.file("protocol.json")) == mine


def test_no_draft_is_taken_once_a_confirmation_has_begun(run: Run, tmp_path: Path) -> None:
    first = step.freeze(run)
    run.next_confirm()
    with pytest.raises(RefusedError, match="never replaced"):
        step.freeze(run, draft_file=edited_file(run, tmp_path, question="Mine?"))
    assert load(run.file("protocol.json")) == first


def test_an_unedited_draft_stays_the_tools_whatever_it_says_of_itself(run: Run, tmp_path: Path) -> None:
    path = edited_file(run, tmp_path, drafted_by_tool=False)
    data = {"protocol": json.loads(path.read_text()), "sha256": "of no interest"}
    path.write_text(json.dumps(data))
    assert step.freeze(run, draft_file=path).drafted_by_tool


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"shape": "1x64x64"}, "is about 1x64x64"),
        ({"device": {"kind": "host"}}, "is about"),
        ({"surprise": 1}, "surprise"),
        ({"falsifiers": []}, "at least one falsifier"),
    ],
)
def test_a_draft_of_another_run_or_against_the_rules_is_refused(
    run: Run, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(RefusedError, match=named):
        step.freeze(run, draft_file=edited_file(run, tmp_path, **changes))
    assert not run.has("protocol.json")


def test_a_draft_whose_arm_is_not_what_its_hash_says_is_refused(run: Run, tmp_path: Path) -> None:
    arms = json.loads(drafted().canonical())["arms"]
    arms[2]["config"]["rows"] = 2
    with pytest.raises(RefusedError, match=r"hashes of arm default.*code_hash code"):
        step.freeze(run, draft_file=edited_file(run, tmp_path, arms=arms))


def reasons(protocol: Protocol, replicate: bool = False, drop: str = "", **changes: Any) -> list[str]:
    found: dict[str, Any] = {
        "device": asdict(INFO),
        "versions": {"torch": "2.13.0", "optuna": "9"},
        "code_hashes": {arm.label: arm.code_hash for arm in protocol.arms if arm.label != drop},
        "source_hashes": {arm.label: arm.source_hash for arm in protocol.arms},
    }
    return step.verify(protocol, **{**found, **changes}, replicate=replicate)


def test_nothing_is_refused_where_all_is_as_it_was_frozen() -> None:
    assert reasons(drafted(info(versions={"torch": "2.13.0", "optuna": "5"}))) == []
    assert reasons(drafted(), space="space") == []


def test_everything_that_was_changed_is_listed() -> None:
    protocol = drafted()
    codes = {arm.label: arm.code_hash for arm in protocol.arms}
    sources = {arm.label: arm.source_hash for arm in protocol.arms}
    found = reasons(
        protocol,
        device=asdict(replace(INFO, name="H100", uuid="GPU-2")),
        versions={},
        code_hashes={**codes, "twin": "x"},
        source_hashes={**sources, "chosen": "x"},
        space="other",
    )
    assert found == [
        "device name was NVIDIA H200, is H100",
        "device uuid was GPU-1, is GPU-2",
        "torch was 2.13.0, is absent",
        "kernel source of arm chosen (triton/k) was changed",
        "compiled code of arm twin (triton/k) was changed",
        "the search space was changed",
    ]
    assert reasons(protocol, drop="other")[0].startswith("arm other (hip/k")


def test_an_older_timer_is_refused() -> None:
    protocol = drafted()
    old = protocol.model_copy(update={"instrument": protocol.instrument.model_copy(update={"timer_version": 0})})
    assert reasons(old)[0].startswith("timer version was 0")


def test_a_replication_takes_another_card_of_the_same_kind_and_no_other() -> None:
    sister = asdict(replace(INFO, uuid="GPU-2", name="NVIDIA H200 NVL"))
    assert reasons(drafted(), replicate=True, device=sister) == []
    smaller = asdict(replace(INFO, uuid="GPU-2", units=114))
    assert reasons(drafted(), replicate=True, device=smaller) == ["device units was 132, is 114"]
    assert reasons(drafted(), replicate=True, versions={"torch": "2.14.0"}) == ["torch was 2.13.0, is 2.14.0"]


def test_the_space_hash_sees_values_sentences_and_defaults_and_no_order_of_spaces() -> None:
    problem, target = Problem.of(Shape.parse(SHAPE), "bf16"), Target("cuda", "sm_90", 32, 132)

    def space(family: str, values: tuple[int, ...] = (1, 2), sentence: str = "rule", default: int = 1) -> Space:
        rule = Constraint("rule", sentence, lambda c, p, t: True)
        return Space(family, "k", problem, target, (Parameter("rows", values, "rows"),), (rule,), {"rows": default})

    first = step.space_hash([space("hip"), space("triton")])
    assert first == step.space_hash([space("triton"), space("hip")])
    others = [[space("hip")], [space("hip"), space("triton", (1, 2, 4))], [space("hip"), space("triton", default=2)]]
    others.append([space("hip"), space("triton", sentence="another")])
    assert len({first, *(step.space_hash(spaces) for spaces in others)}) == 5
