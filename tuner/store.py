"""The run folder: the only record of a run. Lines are appended and fsynced, other files are replaced as a whole.

Everything read here may come from somebody else, so it is limited in size and checked against its schema.
"""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tuner.arms import Arm
from tuner.errors import MachineError, RefusedError
from tuner.files import (
    append_line,
    atomic_write,
    loads,
    read_bytes,
    read_json,
    state_dir,
    sync_folder,
    write_json,
    writing,
)
from tuner.folders import RUNS, find, list_runs, make_folder, point_latest, slug

if TYPE_CHECKING:
    from filelock import BaseFileLock

SCHEMA = 1
STATUSES = ("correct", "compile", "runtime", "timeout", "correctness", "constraints", "invalid")
TRIALS_LIMIT_BYTES = 512 * 2**20
__all__ = [
    "RUNS",
    "SCHEMA",
    "STATUSES",
    "Best",
    "Evidence",
    "Packing",
    "Run",
    "RunInfo",
    "Trial",
    "TrialLines",
    "Workspace",
    "list_runs",
    "read_json",
    "read_trials",
    "slug",
    "state_dir",
    "validate",
    "versions",
    "write_json",
]
Status = Literal["correct", "compile", "runtime", "timeout", "correctness", "constraints", "invalid"]

_PACKAGES = {
    "coldtune": ("coldtune",),
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton-rocm", "triton-rocm"),
    "numpy": ("numpy",),
    "optuna": ("optuna",),
    "scipy": ("scipy",),
    "cuda-core": ("cuda-core",),
}
_log = logging.getLogger("coldtune")
_Model = TypeVar("_Model", bound=BaseModel)


class _Record(BaseModel):
    """Base of records: unknown fields and infinities are refused, values do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)

    schema_: int = Field(default=SCHEMA, alias="schema", ge=1)


class Trial(_Record):
    """One measurement of one arm: a line of `trials.jsonl`.

    Attributes:
        trial: Number in the run, from 0.
        stage: `explore`, or `finalist` for the interleaved re-timing.
        problem: The shape, `MxKxN`.
        weights: The weight format.
        status: One of `STATUSES`.
        reason: Why it is not `correct`.
        samples_us: Every repeat, in the order measured.
        median_us: Their median; None where nothing was timed.
        receipt: What really ran.
        cost: Seconds spent: `compile_s`, `wait_s`, `measure_s`.
    """

    trial: int = Field(ge=0)
    stage: Literal["explore", "finalist"]
    family: str
    kernel: str
    config: dict[str, int | str | bool]
    problem: str
    weights: str
    status: Status
    reason: str | None = None
    samples_us: list[float] = Field(default_factory=list)
    median_us: float | None = None
    receipt: dict[str, Any] = Field(default_factory=dict)
    cost: dict[str, float] = Field(default_factory=dict)

    @property
    def arm(self) -> Arm:
        """The arm that was measured."""
        return Arm.of(self.family, self.kernel, self.config)

    def to_line(self) -> str:
        """One line of JSON, with its line end."""
        return self.model_dump_json(by_alias=True) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> Trial:
        """Read one line.

        Raises:
            RefusedError: It is not JSON, not a trial, or of a newer version.
        """
        return validate(cls, loads(line, "the trial"), "the trial")


class RunInfo(_Record):
    """What a run is about and where it runs: `run.json`, written once.

    Attributes:
        created: ISO 8601 with time zone.
        argv: The command line, for the reader.
        shape: `MxKxN`.
        weights: Weight formats.
        device: The fields of `DeviceInfo`.
        settings: Sampler, seed, trials, neighbour, quick, ….
        versions: See `versions()`.
        plugin: The plugin file, if any.
    """

    created: str
    argv: list[str] = Field(default_factory=list)
    shape: str
    weights: list[str]
    device: dict[str, Any]
    settings: dict[str, Any] = Field(default_factory=dict)
    versions: dict[str, str] = Field(default_factory=dict)
    plugin: str | None = None


class Device(BaseModel):
    """What a device must be for a config to fit it."""

    model_config = _Record.model_config

    kind: str
    name: str
    arch: str
    units: int


class Workspace(BaseModel):
    """Memory that the arm needs beside its operands; `zeroed` once before the first launch if so."""

    model_config = _Record.model_config

    name: str
    nbytes: int = Field(ge=0)
    zeroed: bool


class Packing(BaseModel):
    """How weights must lie for the arm.

    Attributes:
        layout: `nk`: N rows of K.
        operands: Tensors of the packed weight: name, dtype, shape.
        workspaces: See `Workspace`.
    """

    model_config = _Record.model_config

    layout: str
    operands: list[dict[str, Any]]
    workspaces: list[Workspace]


class Evidence(BaseModel):
    """Why the config may be believed: the primary claim. A ratio is baseline / chosen.

    Attributes:
        median_us: Of the claim's chosen arm, also on route `vendor`.
        baseline_median_us: Of the frozen baseline.
        attempt: Number of the confirmation in its run.
        attempts: Confirmations begun for this device and shape by then.
        rehearsal: Measured on host, so no GPU result.
    """

    model_config = _Record.model_config

    verdict: str
    baseline: str
    neighbour: str
    ratio: float | None
    interval: tuple[float, float] | None
    median_us: float
    baseline_median_us: float
    protocol_sha256: str
    attempt: int
    attempts: int
    rehearsal: bool


class Best(_Record):
    """An exported config with its evidence: `best.json`.

    Attributes:
        route: `arm`, or `vendor` where the chosen arm does not beat the best vendor form.
        reason: Why this route.
        family: Of the arm to use; on route `vendor`, that of the vendor form.
        kernel: Its kernel.
        config: Its full config.
        plugin: Name of the plugin file that the family came from, if any.
    """

    route: Literal["arm", "vendor"]
    reason: str
    shape: str
    weights: str
    device: Device
    versions: dict[str, str]
    family: str
    kernel: str
    config: dict[str, int | str | bool]
    source_hash: str
    code_hash: str
    packing: Packing
    evidence: Evidence
    plugin: str | None = None

    @property
    def arm(self) -> Arm:
        """The arm to use."""
        return Arm.of(self.family, self.kernel, self.config)


def validate(model: type[_Model], data: object, what: str) -> _Model:
    """Check data against a model.

    Raises:
        RefusedError: It is of a newer schema, or a field is missing, unknown or of a wrong type; the field is named.
    """
    if not isinstance(data, dict):
        raise RefusedError(f"{what} is not a JSON object but {type(data).__name__}")
    found = data.get("schema")
    if isinstance(found, int) and found > SCHEMA:
        raise RefusedError(
            f"{what} has schema {found}; this version of coldtune reads up to {SCHEMA}. Update coldtune to read it"
        )
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the object"
        raise RefusedError(f"{what} is not as it should be: {where}: {first['msg']}") from error


def versions() -> dict[str, str]:
    """Versions of coldtune, Python and the packages that matter; what is not installed is absent. Imports none."""
    found = {"python": platform.python_version()}
    for name, packages in _PACKAGES.items():
        for package in packages:
            try:
                found[name] = version(package)
                break
            except PackageNotFoundError:
                continue
    return found


@dataclass(frozen=True)
class TrialLines:
    """What a file of trials holds: the trials, the bytes of its whole lines, and what was left out."""

    trials: tuple[Trial, ...]
    good_bytes: int
    note: str = ""


def read_trials(path: Path) -> TrialLines:
    """Read a file of trial lines. A half-written last line is left out, which `note` says.

    Raises:
        UsageError: There is no such file.
        RefusedError: A line before the last is damaged, or one is not a trial or of a newer version.
    """
    data = read_bytes(path, TRIALS_LIMIT_BYTES)
    *whole, rest = data.split(b"\n")
    trials: list[Trial] = []
    good_bytes = 0
    for number, line in enumerate(whole, 1):
        what = f"{path} line {number}"
        try:
            value = loads(line, what)
        except RefusedError as error:
            if number < len(whole) or rest:
                raise RefusedError(f"{error}; the file is left as it is") from error
            rest = line
            break
        trials.append(validate(Trial, value, what))
        good_bytes += len(line) + 1
    note = f"{path.name} ends in a half-written line, which is left out; {len(trials)} trials are kept" if rest else ""
    return TrialLines(tuple(trials), good_bytes, note)


class Run:
    """One run folder. Reading takes no lock; who adds to a run holds `lock()`."""

    def __init__(self, path: Path, info: RunInfo) -> None:
        """Wrap a folder; use `create` or `open`."""
        self.path = path
        self.info = info
        self.notes: list[str] = []
        self._checked_tail = False
        self._file_lock: BaseFileLock | None = None

    @classmethod
    def create(cls, root: Path, info: RunInfo) -> Run:
        """Make a new folder below `root`, write `run.json`, and point `latest` at it.

        Raises:
            MachineError: The folder cannot be written.
        """
        name = f"{date.today().isoformat()}-{info.shape}-{slug(str(info.device.get('name', 'device')))}"
        with writing(root, "choose another folder with --runs"):
            root.mkdir(parents=True, exist_ok=True)
            path = make_folder(root, name)
        run = cls(path, info)
        atomic_write(path / "run.json", (info.model_dump_json(by_alias=True, indent=1) + "\n").encode())
        point_latest(root, path.name)
        return run

    @classmethod
    def open(cls, run: str | Path, root: Path = RUNS) -> Run:
        """Open a run by its path, by its name below `root`, or by `latest`.

        Raises:
            UsageError: There is no such run; the message lists some that exist.
            RefusedError: `run.json` is missing, damaged or of a newer version.
        """
        path = find(run, root)
        if not (path / "run.json").exists():
            raise RefusedError(
                f"{path} has no run.json: it is no run folder, or the start of the run was cut off. "
                "Nothing was measured in it; start again with tune --shape MxKxN"
            )
        info = validate(RunInfo, read_json(path / "run.json"), str(path / "run.json"))
        return cls(path, info)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    def trials(self) -> list[Trial]:
        """All trials in order; empty before the first. A half-written last line is left out and said once.

        Raises:
            RefusedError: The file is damaged before its last line.
        """
        if not self.file("trials.jsonl").exists():
            return []
        found = read_trials(self.file("trials.jsonl"))
        if found.note and found.note not in self.notes:
            self.notes.append(found.note)
            _log.warning("%s", found.note)
        return list(found.trials)

    def append(self, trial: Trial) -> None:
        """Add one trial, on the disk when this returns.

        Raises:
            MachineError: It cannot be written; earlier trials are kept.
        """
        path = self.file("trials.jsonl")
        if not self._checked_tail and path.exists():
            good_bytes = read_trials(path).good_bytes
            if good_bytes < path.stat().st_size:
                with writing(path):
                    os.truncate(path, good_bytes)
        # A failed append may leave half a line, which the next one must take away again.
        self._checked_tail = False
        append_line(path, trial.to_line())
        self._checked_tail = True

    def file(self, name: str) -> Path:
        """The path of a file of the run, such as `choice.json` or `confirm-001/verdict.json`."""
        return self.path / name

    def write_json(self, name: str, data: object) -> None:
        """Write a JSON file of the run as a whole."""
        write_json(self.file(name), data)

    def read_json(self, name: str) -> Any:
        """Read a JSON file of the run; see the module's `read_json`."""
        return read_json(self.file(name))

    def has(self, name: str) -> bool:
        """True if the run has this file."""
        return self.file(name).exists()

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run alone; the same object may hold it several times over.

        Raises:
            MachineError: Another process holds it, or the folder is read-only.
        """
        from filelock import FileLock, Timeout

        if self._file_lock is None:
            self._file_lock = FileLock(self.path / ".lock")
        holder = self.path / ".lock.pid"
        with writing(self.path, "copy the run folder to one that you can write"):
            try:
                self._file_lock.acquire(timeout=0.2)
            except Timeout:
                pid = holder.read_text().strip()[:20] if holder.exists() else "unknown"
                raise MachineError(
                    f"run {self.name} is in use by process {pid}; wait until it ends, or stop it first"
                ) from None
        try:
            with writing(holder):
                holder.write_text(f"{os.getpid()}\n")
            yield
        finally:
            self._file_lock.release()

    def confirmations(self) -> list[Path]:
        """Folders of all confirmations, finished or not, in order."""
        found = [(int(match[1]), path) for path in self.path.iterdir() if (match := _confirm(path)) and path.is_dir()]
        return [path for _, path in sorted(found)]

    def next_confirm(self) -> tuple[int, Path]:
        """Make the folder of the next confirmation; numbers are never used twice.

        Raises:
            MachineError: It cannot be made.
        """
        last = self.confirmations()[-1:]
        number = 1 + max((int(cast("re.Match[str]", _confirm(path))[1]) for path in last), default=0)
        path = self.file(f"confirm-{number:03d}")
        with writing(path):
            path.mkdir()
            sync_folder(self.path)
        return number, path


def _confirm(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"confirm-(\d{3,9})", path.name)
