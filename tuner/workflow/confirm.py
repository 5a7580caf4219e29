"""Confirmation: a frozen protocol carried out in fresh processes on data that the exploration never saw."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import ledger
from tuner.arms import Arm, Artifact
from tuner.devices import choose, device_lock, target_of
from tuner.devices.base import DeviceInfo
from tuner.errors import ColdtuneError, MachineError, RefusedError, UsageError
from tuner.files import atomic_write
from tuner.pool import CompilePool, default_size
from tuner.problem import Problem, Shape
from tuner.protocol import Protocol, Verdict, data_seed, load, order
from tuner.store import Run, versions
from tuner.verdict import judge
from tuner.worker import TrialError, Worker
from tuner.workflow.checks import probes
from tuner.workflow.freeze import current_space_hash, verify
from tuner.workflow.integrity import Observed, disclosures, gates, hottest, receipt_fault
from tuner.workflow.progress import Progress

if TYPE_CHECKING:
    import pandas as pd

STEP_LIMIT_S = 120.0
HOTTEST_C = 95.0
_COLUMNS = ("process", "cycle", "block", "position", "arm", "neighbour", "repeat", "us", "launches")


@dataclass
class _Record:
    """What a confirmation has seen so far."""

    rows: list[tuple[int, int, int, int, str, str, int, float, int]] = field(default_factory=list)
    receipts: dict[str, Any] = field(default_factory=dict)
    observed: list[Observed] = field(default_factory=list)

    def frame(self) -> pd.DataFrame:
        """Samples, one row a timed run."""
        import pandas as pd

        return pd.DataFrame(self.rows, columns=list(_COLUMNS))


def confirm(run: Run, progress: Progress, replicate: bool = False) -> Verdict:
    """Carry out the run's protocol once and judge it. Every attempt is kept, numbered and written to the ledger.

    Args:
        run: A run with a frozen protocol.
        progress: Told of each process.
        replicate: Take the protocol to another device of the same architecture and unit count.

    Raises:
        RefusedError: Protocol, source, space, device or toolchain is not what was frozen; all reasons are listed.
        MachineError: The device or its memory cannot.
    """
    if run.info.settings.get("record") is not None:
        raise UsageError(
            f"run {run.name} replays a record, and a replay holds no fresh data to confirm on; "
            f"explore on a device: tune --shape {run.info.shape}"
        )
    protocol = load(run.file("protocol.json"))
    info = _device(protocol, replicate, run.info.settings.get("llc_bytes"))
    with CompilePool(default_size(target_of(info).backend), target_of(info), run.info.plugin, run.path) as pool:
        artifacts = _build(protocol, pool)
    _refuse_other(protocol, info, artifacts, replicate, run.info.plugin)
    number, folder = run.next_confirm()
    ledger_id = info.uuid or info.name
    entry = {"run": run.name, "attempt": number, "protocol": protocol.sha256, "replicate": replicate}
    ledger.append(ledger_id, protocol.shape, {**entry, "event": "started"})
    record = _Record()
    try:
        with device_lock(info), _kept(folder, record):
            _processes(run, protocol, info, artifacts, record, number, progress)
    except (ColdtuneError, KeyboardInterrupt) as error:
        event = "interrupted" if isinstance(error, KeyboardInterrupt) else f"stopped: {error}"
        ledger.append(ledger_id, protocol.shape, {**entry, "event": event})
        raise
    begun = sum(1 for attempt in ledger.attempts(ledger_id, protocol.shape) if attempt.get("event") == "started")
    slots = protocol.instrument.slots[protocol.weights[0]]
    judged_by = gates(info.kind, protocol.labels, slots, record.observed, record.receipts)
    told = disclosures(record.observed, replicate, info.name)
    verdict = judge(protocol, record.frame(), judged_by, number, begun, told)
    run.write_json(f"{folder.name}/verdict.json", verdict.model_dump(mode="json", by_alias=True))
    ledger.append(ledger_id, protocol.shape, {**entry, "event": verdict.outcome, "verdict": verdict.primary.verdict})
    return verdict


def _device(protocol: Protocol, replicate: bool, llc_bytes: int | None) -> DeviceInfo:
    """The frozen device, or with `replicate` any of its architecture; `llc_bytes` as it was given to exploration."""
    frozen = protocol.device
    if frozen["kind"] == "host":
        return choose("host", llc_bytes)
    where = frozen["arch"] if replicate else frozen["uuid"] or f"{frozen['kind']}:{frozen['index']}"
    return choose(where, llc_bytes)


def _build(protocol: Protocol, pool: CompilePool) -> dict[str, Artifact]:
    """Compile every arm again, ahead of the device."""
    wanted = {
        record.label: (
            Problem.of(Shape.parse(record.shape), record.weights),
            Arm.of(record.family, record.kernel, record.config),
        )
        for record in protocol.arms
    }
    for problem, arm in wanted.values():
        pool.submit(problem, arm)
    built = {key: pool.result(*key) for key in dict.fromkeys(wanted.values())}
    artifacts = {}
    for label, key in wanted.items():
        artifact = built[key].artifact
        if artifact is None:
            raise RefusedError(f"arm {label} ({key[1]}) does not compile any more: {built[key].reason}")
        artifacts[label] = artifact
    return artifacts


def _refuse_other(
    protocol: Protocol, info: DeviceInfo, artifacts: dict[str, Artifact], replicate: bool, plugin: str | None
) -> None:
    chosen = artifacts[protocol.primary.chosen]
    reasons = verify(
        protocol,
        device=asdict(info),
        versions={**versions(), **info.versions},
        code_hashes={label: artifact.code_hash for label, artifact in artifacts.items()},
        source_hashes={label: artifact.source_hash for label, artifact in artifacts.items()},
        replicate=replicate,
        space=current_space_hash(chosen.problem, info, plugin),
    )
    if reasons:
        raise RefusedError("this is not what was frozen: " + "; ".join(reasons) + ". Start a new run to ask it anew")


@contextmanager
def _kept(folder: Path, record: _Record) -> Iterator[None]:
    """Write what was seen, also when the confirmation is cut off."""
    try:
        yield
    finally:
        buffer = io.BytesIO()
        record.frame().to_parquet(buffer, index=False)
        atomic_write(folder / "samples.parquet", buffer.getvalue())
        receipts = {"schema": 1, "arms": record.receipts, "processes": [asdict(o) for o in record.observed]}
        atomic_write(folder / "receipts.json", (json.dumps(receipts, indent=1) + "\n").encode())


def _processes(
    run: Run,
    protocol: Protocol,
    info: DeviceInfo,
    artifacts: dict[str, Artifact],
    record: _Record,
    attempt: int,
    progress: Progress,
) -> None:
    """One fresh process behind the other; on a GPU the next one imports while this one measures."""
    count = protocol.design.processes
    progress.begin("confirm", count)
    log = run.path / "worker.log"

    def start() -> Worker:
        return Worker(info, run.info.plugin, log, STEP_LIMIT_S)

    waiting: list[Worker] = [start()]
    try:
        for process in range(count):
            worker = waiting.pop(0) if waiting else start()
            with worker:
                if info.kind != "host" and process + 1 < count:
                    waiting.append(start())
                _Process(protocol, info, artifacts, record, worker, attempt, process).run()
            done = [row for row in record.rows if row[4] == protocol.primary.chosen]
            progress.advance(f"process {process + 1} of {count}", min(row[7] for row in done) if done else None, {})
    finally:
        for worker in waiting:
            worker.abandon()
    progress.end()


class _Process:
    """One fresh process of a confirmation."""

    def __init__(
        self,
        protocol: Protocol,
        info: DeviceInfo,
        artifacts: dict[str, Artifact],
        record: _Record,
        worker: Worker,
        attempt: int,
        process: int,
    ) -> None:
        self._protocol, self._info, self._artifacts = protocol, info, artifacts
        self._record, self._worker, self._attempt, self._process = record, worker, attempt, process
        self._observed = Observed(process)
        self._launches: dict[tuple[str, str], int] = {}

    def run(self) -> None:
        """Fresh data, self-checks, then every block of the plan."""
        protocol, worker = self._protocol, self._worker
        self._record.observed.append(self._observed)
        self._observed.pid = worker.ready()
        problem = Problem.of(Shape.parse(protocol.shape), protocol.weights[0])
        layout = problem.format.layouts[0]
        seed = data_seed(protocol, self._attempt, self._process)
        self._observed.slots = worker.open(problem, layout, seed).plan.slots
        before = worker.fingerprint()
        for label in protocol.labels:
            self._prepare(label)
        if not self._observed.failures:
            self._self_check(problem, layout, seed)
            for neighbour in protocol.neighbours:
                for cycle in range(protocol.design.cycles):
                    self._cycle(cycle, neighbour)
        self._observed.changed = worker.fingerprint() != before

    def _prepare(self, label: str) -> None:
        neighbours = self._protocol.neighbours
        try:
            prepared = self._worker.prepare(self._artifacts[label], neighbours, label)
        except TrialError as error:
            self._observed.failures.append({"arm": label, "status": error.status, "reason": str(error)})
            return
        receipt = {**prepared.receipt, "notes": list(prepared.notes)}
        # The first process's receipt stands for all, but for one with a fault, whichever process it is of.
        if label not in self._record.receipts or receipt_fault(receipt):
            self._record.receipts[label] = receipt
        self._launches.update({(label, n): launches for n, launches in prepared.launches.items()})
        self._observed.checks.append({**asdict(prepared.reuse), "name": f"reuse distance of {label}"})

    def _self_check(self, problem: Problem, layout: str, seed: int) -> None:
        artifacts = probes(problem, self._info)
        if artifacts is None:
            return
        chosen = self._artifacts[self._protocol.primary.chosen]
        checks = self._worker.self_check(problem, layout, {**artifacts, "arm": chosen}, seed)
        self._observed.checks += [asdict(check) for check in checks]

    def _cycle(self, cycle: int, neighbour: str) -> None:
        """One palindrome. An arm's tape is checked behind its last block of the cycle, while its launches lie on it."""
        design = self._protocol.design
        labels = order(self._protocol, self._process, cycle)
        met: dict[str, int] = {}
        for position, label in enumerate(labels):
            block = met.get(label, 0)
            met[label] = block + 1
            if not self._worker.holds(label):  # lost with a worker that a failed arm ended; that failure is recorded
                continue
            try:
                samples = self._worker.block(label, neighbour, design.repeats)
                if met[label] == design.blocks:
                    error = self._worker.check(label, neighbour)
                    key = f"{label} behind {neighbour}"
                    self._observed.norm_errors[key] = max(error, self._observed.norm_errors.get(key, 0.0))
            except TrialError as error:
                self._observed.failures.append({"arm": label, "status": error.status, "reason": str(error)})
                continue
            launches = self._launches[label, neighbour]
            self._record.rows += [
                (self._process, cycle, block, position, label, neighbour, repeat, us, launches)
                for repeat, us in enumerate(samples)
            ]
            self._look(cycle, position, neighbour)

    def _look(self, cycle: int, position: int, neighbour: str) -> None:
        """Read the machine's state between blocks; stop before it comes to harm."""
        state = self._worker.state()
        self._observed.states.append({"cycle": cycle, "position": position, "neighbour": neighbour, **state})
        heat = hottest(state)
        if heat is not None and heat >= HOTTEST_C:
            raise MachineError(f"{self._info.name} is at {heat:.0f} C (limit {HOTTEST_C:.0f} C): stopped; let it cool")
