"""What ran on the host: launches of loaded code and torch operators, noted while a recording is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tuner.devices.base import Node


class Recorder:
    """A list of nodes that is filled while `record` runs."""

    def __init__(self) -> None:
        """Start switched off."""
        self.on = False
        self._nodes: list[Node] = []

    def add(self, node: Node) -> None:
        """Note one launch."""
        self._nodes.append(node)

    def record(self, enqueue: Callable[[], None]) -> list[Node]:
        """Run `enqueue` and give what it launched, in order."""
        self._nodes, self.on = [], True
        try:
            with _operators(self):
                enqueue()
        finally:
            self.on = False
        return self._nodes


def _operators(recorder: Recorder) -> Any:
    """A context in which torch operators are noted with the addresses of their tensors."""
    import torch
    from torch.utils import _python_dispatch

    # This class of torch carries no annotations.
    base: Any = _python_dispatch.TorchDispatchMode

    class Operators(base):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            # Views move no data.
            if not func.is_view:
                inputs = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
                recorder.add(Node(str(func), tuple(tensor.data_ptr() for tensor in inputs)))
            return result

    return Operators()
