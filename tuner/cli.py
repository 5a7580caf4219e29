"""The command line: parses, calls one workflow step, prints; no logic.

Only typer and the errors are imported here. Everything else is imported in the command that needs it, so that help,
`ls` and `show` answer at once and without torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuner.errors import UsageError
from tuner.guard import keeping, need_torch, run_command

if TYPE_CHECKING:
    from tuner.store import Run
    from tuner.workflow.tune import Order, Outcome


def _examples(*lines: str) -> str:
    """An epilog that is not wrapped."""
    return "\n  ".join(["\b\nExamples:", *lines])


app = typer.Typer(
    name="tune", add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=False
)

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Folder or name of a run (see tune ls), or latest.")]
RunsOption = Annotated[
    Path | None, typer.Option("--runs", metavar="DIR", help="Folder that holds the runs; default: runs.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")]
RequireOption = Annotated[
    str | None, typer.Option("--require", metavar="faster", help="Exit with 1 unless the verdict is FASTER.")
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", metavar="DEVICE", help="host, cuda, cuda:0, rocm, a UUID, PCI address or architecture."),
]
PluginOption = Annotated[
    Path | None,
    typer.Option("--plugin", metavar="FILE", help="A Python file with a FAMILIES list: your own kernels."),
]
WeightsOption = Annotated[str, typer.Option("--weights", metavar="FORMATS", help="Weight formats, joined by commas.")]


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"coldtune {version('coldtune')}")
        raise typer.Exit


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # --debug may stand behind any command, so it is taken out before the parser looks.
    debug = "--debug" in arguments
    rest = [argument for argument in arguments if argument != "--debug"]
    sys.exit(run_command(lambda: app(rest, prog_name="tune", standalone_mode=False), debug, "--json" in rest))


@app.callback(
    invoke_without_command=True,
    epilog=_examples(
        "tune --shape 1x4096x12288              explore, freeze, confirm, export",
        "tune --shape 1x4096x12288 --quick      the same, short",
        "tune --resume latest                   go on after an interrupt",
        "tune show                              the verdict of the newest run",
        "tune export --format triton            triton.Config source with its evidence",
    )
    + "\n\n\b\nExit codes:\n  0 done, whatever the verdict says; 1 VOID, or --require faster not met;\n"
    "  2 usage; 3 refused: changed or damaged; 4 the machine cannot; 130 interrupted",
)
def tune(
    ctx: typer.Context,
    shape: Annotated[
        str | None,
        typer.Option("--shape", metavar="MxKxN", help="M activation rows, K inputs, N outputs."),
    ] = None,
    weights: WeightsOption = "bf16",
    device: DeviceOption = None,
    trials: Annotated[
        str | None,
        typer.Option("--trials", metavar="N", help="Arms that the sampler proposes; default by device."),
    ] = None,
    sampler: Annotated[str, typer.Option("--sampler", metavar="NAME", help="tpe, random or grid.")] = "tpe",
    seed: Annotated[str, typer.Option("--seed", metavar="N", help="Seed of sampler and data.")] = "1",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials and a shorter confirmation.")] = False,
    neighbour: Annotated[
        str, typer.Option("--neighbour", metavar="KIND", help="What runs between two launches: plain or self.")
    ] = "plain",
    plugin: PluginOption = None,
    simulate: Annotated[
        Path | None, typer.Option("--simulate", metavar="RECORD", help="Replay a recorded run instead of a device.")
    ] = None,
    no_confirm: Annotated[bool, typer.Option("--no-confirm", help="Stop when the protocol is frozen.")] = False,
    require: RequireOption = None,
    llc: Annotated[
        str | None, typer.Option("--llc", metavar="BYTES", help="Last-level cache, where the system tells it wrong.")
    ] = None,
    runs: RunsOption = None,
    as_json: JsonOption = False,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on with a run where it stopped.")
    ] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Say which version this is.", callback=_version, is_eager=True)
    ] = False,
) -> int:
    """Tune a decode kernel for one shape, and confirm the result on data that the search never saw."""
    given = _given(ctx)
    if ctx.invoked_subcommand is not None:
        ctx.obj = runs
        if stray := given - {"runs"}:
            raise UsageError(
                f"{_flag(stray)} goes with tune --shape, not with tune {ctx.invoked_subcommand}; "
                f"see tune {ctx.invoked_subcommand} --help"
            )
        return 0
    wanted = _require(require)
    if resume is not None:
        if stray := given - {"resume", "runs", "as_json", "require"}:
            raise UsageError(f"--resume goes on with the settings that the run began with; leave out {_flag(stray)}")
        return _resume(resume, _runs(ctx, runs), wanted, as_json)
    if shape is None:
        raise UsageError("nothing to tune: give a shape, for example tune --shape 1x4096x12288; tune --help says more")
    if wanted and (no_confirm or simulate is not None):
        raise UsageError("--require faster needs a confirmation; leave out --no-confirm and --simulate, or --require")
    if neighbour not in ("plain", "self"):
        raise UsageError(f"--neighbour {neighbour!r} is unknown; write plain (another kernel between launches) or self")
    from tuner.problem import Shape
    from tuner.workflow.search import check_sampler

    parsed = Shape.parse(shape)
    check_sampler(sampler)
    trial_count = None if trials is None else _whole("--trials", trials, 0, "200")
    seed_number, llc_bytes = (
        _whole("--seed", seed, 0, "1"),
        None if llc is None else _whole("--llc", llc, 1, "100663296"),
    )
    need_torch()
    from tuner.workflow.explore import ExploreSettings
    from tuner.workflow.tune import Order, parse_weights

    settings = ExploreSettings(
        trials=trial_count,
        sampler=sampler,
        seed=seed_number,
        neighbour=neighbour,
        quick=quick,
        record=None if simulate is None else simulate.resolve(),
        plugin=None if plugin is None else plugin.resolve(),
    )
    order = Order(
        parsed,
        parse_weights(weights),
        device,
        settings,
        confirm=not no_confirm,
        llc_bytes=llc_bytes,
        runs=_runs(ctx, runs),
        argv=("tune", *sys.argv[1:]),
    )
    return _begin(order, wanted, as_json)


@app.command(epilog=_examples("tune freeze latest"))
def freeze(
    ctx: typer.Context,
    run: RunArgument = "latest",
    claim_rule: Annotated[
        str, typer.Option("--claim-rule", metavar="RULE", help="default, or published: the two studies' rule.")
    ] = "default",
    draft: Annotated[
        Path | None, typer.Option("--draft", metavar="FILE", help="A protocol of this choice that you have edited.")
    ] = None,
    runs: RunsOption = None,
) -> int:
    """Freeze the choice of a run into a hashed protocol."""
    opened = _open(ctx, run, runs)
    from tuner.workflow import freeze as step

    with keeping(opened), opened.lock():
        protocol = step.freeze(opened, claim_rule=claim_rule, draft_file=draft)
    print(f"frozen: {opened.file('protocol.md')} (sha256 {protocol.sha256})")
    print(f"next: tune confirm {opened.path}")
    return 0


@app.command(epilog=_examples("tune confirm latest --require faster"))
def confirm(
    ctx: typer.Context,
    run: RunArgument = "latest",
    replicate: Annotated[
        bool, typer.Option("--replicate", help="Take the protocol to another card of the same architecture and units.")
    ] = False,
    require: RequireOption = None,
    runs: RunsOption = None,
    as_json: JsonOption = False,
) -> int:
    """Measure a frozen protocol in fresh processes; every attempt is numbered and kept."""
    wanted = _require(require)
    opened = _open(ctx, run, runs)
    need_torch()
    from tuner.terminal import Terminal
    from tuner.workflow import confirm as step
    from tuner.workflow.tune import complete

    with keeping(opened), opened.lock():
        step.confirm(opened, Terminal(as_json), replicate=replicate)
        outcome = complete(opened)
    return _end(opened, outcome, wanted, as_json)


@app.command(epilog=_examples("tune export latest --format triton --out config.py"))
def export(
    ctx: typer.Context,
    run: RunArgument = "latest",
    form: Annotated[str, typer.Option("--format", metavar="FORMAT", help="json (for tuner.load) or triton.")] = "json",
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Default: in the run folder.")] = None,
    runs: RunsOption = None,
) -> int:
    """Write the tuned config with its evidence."""
    from tuner.workflow import export as step

    print(step.export(_open(ctx, run, runs), form, out))
    return 0


@app.command(epilog=_examples("tune report latest"))
def report(ctx: typer.Context, run: RunArgument = "latest", runs: RunsOption = None) -> int:
    """Write report.html into the run folder."""
    from tuner.workflow import report as step

    print(step.write(_open(ctx, run, runs)))
    return 0


@app.command(epilog=_examples("tune show"))
def show(ctx: typer.Context, run: RunArgument = "latest", runs: RunsOption = None) -> int:
    """Show what a run has found: verdict, tables, gates, disclosures."""
    from tuner.terminal import show as show_all
    from tuner.workflow import report as step

    show_all(step.show(_open(ctx, run, runs)))
    return 0


@app.command("ls", epilog=_examples("tune ls"))
def list_all(ctx: typer.Context, runs: RunsOption = None) -> int:
    """List the runs, newest last."""
    from tuner.terminal import show as show_all
    from tuner.workflow import report as step

    show_all(step.listing(_runs(ctx, runs)))
    return 0


@app.command(epilog=_examples("tune doctor --device cuda:0"))
def doctor(
    device: DeviceOption = None,
    shape: Annotated[str, typer.Option("--shape", metavar="MxKxN", help="Shape to plan for.")] = "1x4096x12288",
) -> int:
    """Say what this machine has, what is missing and which line installs it, and whether its timer can be trusted."""
    from tuner.terminal import show as show_all
    from tuner.workflow import doctor as step

    show_all(step.doctor(device, shape))
    return 0


@app.command(epilog=_examples("tune space --shape 1x4096x12288 --arch gfx1100"))
def space(
    shape: Annotated[str, typer.Option("--shape", metavar="MxKxN", help="The shape.")],
    weights: WeightsOption = "bf16",
    arch: Annotated[
        str, typer.Option("--arch", metavar="ARCH", help="sm_90, gfx1100, … or host; needs no such device.")
    ] = "sm_90",
    plugin: PluginOption = None,
) -> int:
    """Show the search space of a shape: parameters, meaning, size, and what is pruned and why."""
    from tuner.terminal import show as show_all
    from tuner.workflow import spaces as step
    from tuner.workflow.tune import parse_weights

    show_all(step.show(shape, parse_weights(weights), arch, plugin))
    return 0


def _begin(order: Order, wanted: bool, as_json: bool) -> int:
    from tuner.terminal import Terminal
    from tuner.workflow.tune import begin, walk

    terminal = Terminal(as_json)
    run, info = begin(order, terminal)
    terminal.say(f"run: {run.path}")
    with keeping(run):
        outcome = walk(run, info, terminal)
    return _end(run, outcome, wanted, as_json)


def _resume(name: str, root: Path, wanted: bool, as_json: bool) -> int:
    from tuner.store import Run
    from tuner.terminal import Terminal
    from tuner.workflow.tune import finished, reopen, walk

    run = Run.open(name, root)
    terminal = Terminal(as_json)
    if ended := finished(run):
        terminal.say(f"run {run.name} is finished; nothing is left to do. To measure again: tune confirm {run.path}")
        return _end(run, ended, wanted, as_json, again=True)
    need_torch()
    info = reopen(run, terminal)
    with keeping(run):
        outcome = walk(run, info, terminal)
    return _end(run, outcome, wanted, as_json)


def _end(run: Run, outcome: Outcome, wanted: bool, as_json: bool, again: bool = False) -> int:
    """Print how it ended; `again` is a finished run that was resumed, which is no failure whatever it says."""
    from tuner.terminal import show as show_all
    from tuner.workflow import report

    code, reason = report.exit_code(outcome.verdict, wanted, again)
    if as_json:
        print(json.dumps(report.summary(run, outcome, code, reason)))
    else:
        show_all(report.show(run))
        print(report.next_step(run, outcome))
        if code:
            print(f"tune: {reason}", file=sys.stderr)
    return code


def _open(ctx: typer.Context, run: str, runs: Path | None) -> Run:
    from tuner.store import Run

    return Run.open(run, _runs(ctx, runs))


def _runs(ctx: typer.Context, runs: Path | None) -> Path:
    return runs or ctx.obj or Path("runs")


def _given(ctx: typer.Context) -> set[str]:
    sources = {name: ctx.get_parameter_source(name) for name in ctx.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def _flag(names: set[str]) -> str:
    return "--" + min(names).removeprefix("as_").replace("_", "-")


def _require(text: str | None) -> bool:
    if text not in (None, "faster"):
        raise UsageError(f"--require {text!r} is unknown; the only one is: --require faster")
    return text is not None


def _whole(option: str, text: str, least: int, example: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18) or int(text) < least:
        raise UsageError(f"{option} {text!r} is not a whole number of at least {least}; write {option} {example}")
    return int(text)
