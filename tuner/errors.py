"""The one exception tree. Every error a user can meet says what, which rule, and what to type instead."""

from __future__ import annotations


class ColdtuneError(Exception):
    """Base of all errors that Coldtune raises on purpose.

    Attributes:
        exit_code: What the command line exits with when this error ends it.
    """

    exit_code = 4


class UsageError(ColdtuneError):
    """What was typed cannot be meant; the message names the value, the rule and a correct form."""

    exit_code = 2


class RefusedError(ColdtuneError):
    """A file or a state is not what was frozen, or is damaged; nothing was changed."""

    exit_code = 3


class MachineError(ColdtuneError):
    """The machine cannot do what was asked: memory, disk, permission, no such device, no tool."""

    exit_code = 4


class MemoryPlanError(MachineError):
    """The rotation does not fit; the message holds the needed and the free bytes."""


class ToolchainError(MachineError):
    """A compiler, a driver library or a Python package is missing; the message holds the line that installs it."""


class ArmError(ColdtuneError):
    """One arm failed. It costs its trial and nothing else.

    Attributes:
        status: The trial status that this failure has (see `tuner.store.STATUSES`).
    """

    status = "runtime"


class ArmCompileError(ArmError):
    """An arm did not compile; the message is the compiler's first error line."""

    status = "compile"


class ArmConstraintError(ArmError):
    """An arm breaks a limit of the target, such as shared memory; the message has both numbers."""

    status = "constraints"


class ArmCorrectnessError(ArmError):
    """An arm's output is wrong; the message says where and by how much."""

    status = "correctness"


class ArmInvalidError(ArmError):
    """A measurement cannot be true (`INVALID_WARM`, `INVALID_OVERPEAK`)."""

    status = "invalid"


class CaptureError(ColdtuneError):
    """A graph capture failed; the caller falls back to stream launches and records that it did."""
