"""The neighbour: what runs between two launches of an arm, the same for every arm, vendor and ceiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tuner.errors import UsageError

if TYPE_CHECKING:
    from tuner.devices.base import Device

NEIGHBOURS = ("plain", "self")
ELEMENTS = 256


def make_neighbour(name: str, device: Device) -> Callable[[], None] | None:
    """The launch of a neighbour, or None for `self`, and on `host`, which has none.

    `plain` adds one to 256 floats: an ordinary kernel of one block that takes no part in dependent launch.

    Raises:
        UsageError: No such neighbour.
    """
    if name not in NEIGHBOURS:
        raise UsageError(f"unknown neighbour {name!r}; choose one of {', '.join(NEIGHBOURS)}")
    if name == "self" or device.info.kind == "host":
        return None
    import torch

    buffer = torch.zeros(ELEMENTS, dtype=torch.float32, device=device.torch_device)

    def launch() -> None:
        torch.add(buffer, 1.0, out=buffer)

    return launch
