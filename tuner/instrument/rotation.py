"""The rotation: a ring of slots, each a full set of read operands, together larger than the last-level cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.errors import MemoryPlanError
from tuner.formats import Operand
from tuner.problem import Problem

if TYPE_CHECKING:
    from torch import Generator, Tensor

FACTOR = 8
LEAST_FACTOR = 2
MAX_SLOTS = 4096
ALIGN = 256


@dataclass(frozen=True)
class RotationPlan:
    """How many slots, and why.

    Attributes:
        slots: Slots in the ring.
        wanted: Slots that 8 times the last-level cache asks for.
        slot_bytes: Bytes of one slot's operands.
        stride_bytes: Distance between slots, padded to 256 bytes.
        llc_bytes: Last-level cache that the plan is made for.
        note: What was reduced and why, or empty.
    """

    slots: int
    wanted: int
    slot_bytes: int
    stride_bytes: int
    llc_bytes: int
    note: str = ""

    @property
    def distinct_bytes(self) -> int:
        """Distinct bytes read between two reads of the same byte."""
        return self.slots * self.slot_bytes


def plan(operands: Sequence[Operand], llc_bytes: int, free_bytes: int, reserve_bytes: int = 0) -> RotationPlan:
    """Plan the ring for one set of operands.

    Args:
        operands: The tensors of one slot.
        llc_bytes: Last-level cache of the device.
        free_bytes: Memory that can be allocated now.
        reserve_bytes: Memory that must stay free for tape, workspaces and checks.

    Raises:
        MemoryPlanError: Not even twice the last-level cache fits.
    """
    slot_bytes = sum(operand.nbytes for operand in operands)
    stride = sum(_padded(operand.nbytes) for operand in operands)
    wanted = min(MAX_SLOTS, max(2, math.ceil(FACTOR * llc_bytes / slot_bytes)))
    least = min(MAX_SLOTS, max(2, math.ceil(LEAST_FACTOR * llc_bytes / slot_bytes)))
    fitting = max(0, free_bytes - reserve_bytes) // stride
    if fitting < least:
        raise MemoryPlanError(
            f"the rotation does not fit: {least} slots of {stride / 1e6:,.1f} MB (twice the {llc_bytes / 1e6:,.1f} MB "
            f"last-level cache, and at least two) and {reserve_bytes / 1e6:,.0f} MB for tape and checks need "
            f"{(least * stride + reserve_bytes) / 1e9:.2f} GB; {free_bytes / 1e9:.2f} GB are free. Free memory on the "
            f"device, or take a shape with at most {max(0, free_bytes - reserve_bytes) // 4:,} weights (K x N)"
        )
    slots = min(wanted, fitting)
    note = ""
    if slots < wanted:
        factor = slots * slot_bytes / llc_bytes
        note = f"memory is short: {slots} slots instead of {wanted}, {factor:.1f} times the last-level cache"
    elif slots == MAX_SLOTS and slots * slot_bytes < FACTOR * llc_bytes:
        note = f"{MAX_SLOTS} slots are the most: {slots * slot_bytes / llc_bytes:.2f} times the last-level cache"
    return RotationPlan(slots, wanted, slot_bytes, stride, llc_bytes, note)


class Rotation:
    """The ring in memory: one arena, each slot's operands at their own addresses, filled with random weights."""

    def __init__(self, problem: Problem, layout: str, ring: RotationPlan, device: str, generator: Generator) -> None:
        """Allocate and fill."""
        import torch

        self.plan = ring
        self._operands = problem.format.operands(problem.shape, layout)
        self._arena = torch.empty(ring.slots * ring.stride_bytes + ALIGN, dtype=torch.int8, device=device)
        self._base = -self._arena.data_ptr() % ALIGN
        self._arena.zero_()  # the padding between slots counts in the fingerprint
        self._slots = [self._views(slot) for slot in range(ring.slots)]
        problem.format.fill(self._slots[0], problem.shape, generator)
        self._fill_others(generator)

    def _views(self, slot: int) -> dict[str, Tensor]:
        import torch

        views = {}
        start = self._base + slot * self.plan.stride_bytes
        for operand in self._operands:
            flat = self._arena[start : start + operand.nbytes]
            views[operand.name] = flat.view(getattr(torch, operand.dtype)).view(operand.shape)
            start += _padded(operand.nbytes)
        return views

    def _fill_others(self, generator: Generator) -> None:
        """Give every other slot the first one's values, moved round by a random distance.

        The values stay independent draws as a matrix, every slot differs, and filling costs one copy a slot.
        """
        import torch

        for slot in self._slots[1:]:
            for name, tensor in slot.items():
                source, target = self._slots[0][name].view(-1), tensor.view(-1)
                move = int(torch.randint(0, source.numel(), (1,), generator=generator, device=generator.device))
                target[: source.numel() - move] = source[move:]
                target[source.numel() - move :] = source[:move]

    @property
    def count(self) -> int:
        """Number of slots."""
        return len(self._slots)

    def operand(self, i: int, name: str) -> Tensor:
        """The operand that launch i reads."""
        return self._slots[i % len(self._slots)][name]

    def operands(self, i: int) -> dict[str, Tensor]:
        """All operands that launch i reads."""
        return self._slots[i % len(self._slots)]

    def fingerprint(self) -> int:
        """A sum over the bytes of all slots: the same as long as nothing wrote to them."""
        import torch

        whole = self._arena[self._base : self._base + self.count * self.plan.stride_bytes]
        return int(whole.view(torch.int64).sum())

    def slot_of(self, address: int) -> int | None:
        """The slot that an address lies in, or None."""
        offset = address - self._arena.data_ptr() - self._base
        if 0 <= offset < self.count * self.plan.stride_bytes:
            return offset // self.plan.stride_bytes
        return None


class SlotSubset:
    """A ring of fewer slots of the same memory, for the check that S and S/2 slots agree."""

    def __init__(self, rotation: Rotation, count: int) -> None:
        """Take the first `count` slots."""
        self._rotation = rotation
        self._count = count

    @property
    def count(self) -> int:
        """Number of slots in the subset."""
        return self._count

    def operand(self, i: int, name: str) -> Tensor:
        """The operand that launch i reads."""
        return self._rotation.operand(i % self._count, name)


def reuse_distance(touched: Sequence[int | None], slot_bytes: int) -> int | None:
    """Least distinct bytes read from one read of a slot to the next, itself included, over replays of a sequence.

    Args:
        touched: The slot that each launch reads, in order; the sequence repeats for ever.
        slot_bytes: Bytes of a slot.

    Returns:
        Bytes, or None if some launch's slot is not known.
    """
    known = [slot for slot in touched if slot is not None]
    if not known or len(known) != len(touched):
        return None
    # The window with the fewest distinct slots repeats none inside, or a shorter one would lie in it:
    # so the least count of distinct slots is the least distance between two reads of one slot.
    last: dict[int, int] = {}
    least = len(known)
    for place, slot in enumerate(known + known):
        least = min(least, place - last.get(slot, place - len(known)))
        last[slot] = place
    return least * slot_bytes


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
