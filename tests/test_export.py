"""What leaves a run: only confirmed configs, each with its evidence; and what is shown of a run."""

from __future__ import annotations

import ast
import html
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from run_double import CONFIG, VENDOR, begin, confirm, explored, finish, freeze, protocol

import tuner
from tuner.errors import RefusedError, UsageError
from tuner.store import Run
from tuner.workflow import report
from tuner.workflow.export import build, export, route_of, triton_source


def shown(run: Run) -> str:
    console = Console(width=400, record=True, file=open("/dev/null", "w"))
    console.print(*report.show(run), sep="\n")
    return console.export_text()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_a_faster_arm_leaves_with_its_evidence(root: Path) -> None:
    run = finish(root)
    path = export(run)
    assert path == run.path / "best.json"
    data = json.loads(path.read_text())
    assert (data["schema"], data["route"], data["shape"], data["weights"]) == (1, "arm", "1x64x48", "bf16")
    assert (data["family"], data["kernel"], data["config"]) == ("mine", "toy", CONFIG)
    assert (data["source_hash"], data["code_hash"]) == ("5" * 64, "c" * 64)
    assert data["packing"] == {
        "layout": "nk",
        "operands": [{"name": "weight", "dtype": "bfloat16", "shape": [48, 64]}],
        "workspaces": [{"name": "partials", "nbytes": 512, "zeroed": True}],
    }
    evidence = data["evidence"]
    assert (evidence["verdict"], evidence["ratio"], evidence["interval"]) == ("FASTER", 1.178, [1.177, 1.180])
    assert (evidence["median_us"], evidence["baseline_median_us"]) == (10.0, 11.78)
    assert (evidence["baseline"], evidence["neighbour"]) == (f"vendor/{VENDOR}", "plain")
    assert (evidence["attempt"], evidence["attempts"], evidence["rehearsal"]) == (1, 1, True)
    assert len(evidence["protocol_sha256"]) == 64
    assert data["versions"]["torch"] and data["device"]["kind"] == "host"
    assert data["plugin"] == "mine.py"


def test_what_was_exported_loads_and_computes(root: Path) -> None:
    run = finish(root)
    loaded = tuner.load(export(run), plugin=str(run.info.plugin))
    weight = torch.randn(48, 64).bfloat16()
    packed = loaded.pack(weight)
    assert str(packed.answer) == "HIT"
    x = torch.randn(64).bfloat16()
    y = packed(x)
    assert y.shape == (48,)
    assert torch.allclose(y.double(), weight.double() @ x.double(), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("verdict", ["SAME", "SLOWER", "AMBIGUOUS"])
def test_an_arm_that_does_not_beat_the_vendor_is_routed_to_it(root: Path, verdict: str) -> None:
    run = finish(root, verdict)
    data = json.loads(export(run).read_text())
    assert (data["route"], data["family"], data["kernel"], data["config"]) == ("vendor", "vendor", VENDOR, {})
    assert verdict in data["reason"] and "the interval holds 1" in data["reason"] and VENDOR in data["reason"]
    assert str(tuner.load(run.file("best.json")).ask(torch.zeros(48, 64).bfloat16())) == "HIT"
    with pytest.raises(RefusedError, match="--format json routes to the vendor"):
        export(run, "triton")


def test_without_a_verdict_nothing_leaves(root: Path) -> None:
    run = begin(root)
    for step in (explored, freeze):
        step(run)
        with pytest.raises(RefusedError, match=r"no verdict.*estimate.*tune confirm"):
            export(run)
    run.next_confirm()
    with pytest.raises(RefusedError, match="no verdict"):
        export(run)
    assert not run.has("best.json")


def test_a_void_verdict_does_not_leave_and_names_the_gate(root: Path) -> None:
    run = finish(root, outcome="VOID")
    with pytest.raises(RefusedError, match=r"VOID.*receipts: chosen has none.*tune confirm"):
        export(run)


def test_the_newest_verdict_decides(root: Path) -> None:
    run = finish(root, outcome="VOID")
    confirm(run, "FASTER")
    assert json.loads(export(run).read_text())["evidence"]["attempts"] == 2
    confirm(run, outcome="VOID")
    with pytest.raises(RefusedError, match="VOID"):
        export(run)


def test_an_edited_protocol_is_refused(root: Path) -> None:
    run = finish(root)
    text = run.file("protocol.json").read_text()
    run.file("protocol.json").write_text(text.replace('"processes": 5', '"processes": 6'))
    with pytest.raises(RefusedError, match="edited after it was frozen"):
        export(run)


def test_a_verdict_of_another_protocol_is_refused(root: Path) -> None:
    run = begin(root)
    explored(run)
    freeze(run, question="Another question?")
    confirm(run)
    with pytest.raises(RefusedError, match="another protocol"):
        export(run)


def test_code_that_is_not_what_was_confirmed_is_refused(root: Path, tmp_path: Path) -> None:
    from tuner import registry

    run = finish(root)
    plugin = tmp_path / "mine.py"
    plugin.write_text(plugin.read_text().replace('"c" * 64', '"e" * 64'))
    registry.plugin_families.cache_clear()
    with pytest.raises(RefusedError, match="compiled code of mine/toy is not what was confirmed"):
        export(run)


def test_an_unknown_format_and_a_folder_are_usage_errors(root: Path, tmp_path: Path) -> None:
    run = finish(root)
    with pytest.raises(UsageError, match=r"'csv'.*json, triton"):
        export(run, "csv")
    with pytest.raises(UsageError, match="is a folder"):
        export(run, "json", tmp_path)


def test_triton_source_is_python_with_the_evidence_in_comments(root: Path) -> None:
    best = build(finish(root))
    with pytest.raises(RefusedError, match=r"mine/toy.*--format json"):
        triton_source(best)
    source = triton_source(best.model_copy(update={"family": "triton"}))
    tree = ast.parse(source)
    call = next(node for node in ast.walk(tree) if isinstance(node, ast.Call))
    assert ast.unparse(call.func) == "triton.Config"
    assert ast.literal_eval(call.args[0]) == {"layout": "nk", "rows": 2}
    assert {word.arg: ast.literal_eval(word.value) for word in call.keywords} == {"num_warps": 4, "num_stages": 2}
    for words in (
        "1x64x48 bf16",
        "10.00 us",
        "ratio 1.178,",
        "1.1770 to 1.1800",
        "attempt 1 of 1",
        best.source_hash,
        "no GPU",
    ):
        assert words in source


def test_text_from_a_file_cannot_leave_its_comment(root: Path) -> None:
    best = build(finish(root))
    device = best.device.model_copy(update={"name": "x\nimport os\u2028os.abort()"})
    source = triton_source(best.model_copy(update={"family": "triton", "device": device}))
    assert len(ast.parse(source).body) == 3


def test_show_and_page_say_the_same_and_escape(root: Path) -> None:
    run = finish(root)
    text, page = shown(run), report.write(run).read_text()
    for words in (
        *(
            "REHEARSAL ON HOST",
            "FASTER: 1.178x, interval 1.177 to 1.180 against vendor-1",
            "1 of chosen (plain)",
            "98.0 %",
            "HELD",
        ),
        *("not met", "tenants: none", "confirm-001", "needs 72 KB of 64 KB", "latency-bound", "<why>", "10.00"),
        "drafted by the tool",
    ):
        assert words in text
        assert html.escape(words) in page
    assert "<why>" not in page and "<script" not in page


def test_show_of_an_unconfirmed_run_calls_every_number_an_estimate(root: Path) -> None:
    run = begin(root)
    assert "none yet" in shown(run)
    explored(run)
    text = shown(run)
    assert "not confirmed: every number below is an estimate" in text and "2.1 %" in text
    # 64 x 48 weights of 2 bytes in 10 us are 614.4 MB/s.
    assert "10.00" in text and "0.614 GB/s" in text
    assert "no confirmation was begun" in text


def test_show_of_a_void_run_says_that_it_proves_nothing(root: Path) -> None:
    text = shown(finish(root, outcome="VOID"))
    assert "VOID: this confirmation proves nothing" in text and "chosen has none" in text


def test_the_list_says_where_each_run_stands(root: Path) -> None:
    runs = [begin(root) for _ in range(4)]
    for run in runs[1:]:
        explored(run)
    for run in runs[2:]:
        freeze(run)
    confirm(runs[3])
    broken = begin(root)
    broken.file("run.json").write_text("{")
    console = Console(width=300, record=True, file=open("/dev/null", "w"))
    console.print(*report.listing(root))
    lines = [line for line in console.export_text().splitlines() if "1x64x48" in line]
    for line, words in zip(
        lines, ("begun", "not frozen", "not confirmed", "FASTER: 1.178x", "cannot be read"), strict=True
    ):
        assert words in line


@pytest.mark.parametrize(
    ("verdict", "outcome", "wanted", "again", "code"),
    [
        ("FASTER", "VALID", False, False, 0),
        ("FASTER", "VALID", True, False, 0),
        ("SLOWER", "VALID", False, False, 0),
        ("SLOWER", "VALID", True, False, 1),
        ("AMBIGUOUS", "VALID", True, False, 1),
        ("FASTER", "VOID", False, False, 1),
        ("FASTER", "VOID", True, False, 1),
        ("FASTER", "VOID", False, True, 0),
        ("FASTER", "VOID", True, True, 1),
    ],
)
def test_exit_codes(root: Path, verdict: str, outcome: str, wanted: bool, again: bool, code: int) -> None:
    run = begin(root)
    judged = confirm(run, verdict, outcome)
    assert report.exit_code(judged, wanted, again)[0] == code


def test_exit_code_without_a_verdict() -> None:
    assert report.exit_code(None, False, False) == (0, "done")
    assert report.exit_code(None, True, False)[0] == 1


def test_the_fastest_vendor_form_of_the_confirmation_is_taken(root: Path) -> None:
    run = begin(root)
    explored(run)
    plain = protocol(run)
    other = plain.arm("vendor-1").model_copy(update={"label": "vendor-2", "kernel": "linear.cpu.nk"})
    frozen = freeze(run, arms=[*plain.arms, other])
    found = confirm(run, "AMBIGUOUS", protocol_sha256=frozen.sha256)
    second = found.arms[1].model_copy(update={"label": "vendor-2", "median_us": 11.0})
    record, route, reason = route_of(frozen, found.model_copy(update={"arms": (*found.arms, second)}))
    assert (record.label, route) == ("vendor-2", "vendor") and VENDOR in reason
    assert route_of(frozen, found)[0].label == "vendor-1"
