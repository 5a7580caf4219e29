"""Capturing launches into a CUDA graph, and reading back from the graph what was really captured."""

from __future__ import annotations

import ctypes
import gc
import heapq
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from tuner.devices.base import Node
from tuner.devices.cuda_driver import check, driver, error_name
from tuner.devices.faults import device_errors, torch_fault
from tuner.errors import CaptureError, ColdtuneError

if TYPE_CHECKING:
    import torch

# No kernel that torch or a library launches comes near so many arguments; a guard against reading on for ever.
# CU_LAUNCH_PARAM_BUFFER_POINTER and CU_LAUNCH_PARAM_BUFFER_SIZE: how a list of tags names a buffer of arguments.
_BUFFER_POINTER, _BUFFER_SIZE, _MAX_TAGS = 1, 2, 4
_MAX_ARGUMENTS = 4096


def capture(enqueue: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """Capture what `enqueue` launches on `stream`, ready to be replayed and to be read.

    Raises:
        CaptureError: The runtime cannot capture it.
        ColdtuneError: What `enqueue` itself raised.
    """
    import torch

    graph = torch.cuda.CUDAGraph(keep_graph=True)
    before = torch.cuda.current_stream()
    failure: ColdtuneError | RuntimeError | None = None
    # A collection during capture could unload a module or free memory, and either ends the capture.
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            try:
                enqueue()
            except (ColdtuneError, RuntimeError) as error:
                failure = error
        if failure is None:
            graph.instantiate()
    except RuntimeError as error:
        # Ending a capture that an error has broken raises once more; the first error is the one to tell.
        failure = failure or error
    finally:
        # torch leaves the side stream current when it cannot end a capture.
        torch.cuda.set_stream(before)
        if collecting:
            gc.enable()
    if isinstance(failure, ColdtuneError):
        raise failure
    if failure is not None:
        fault = torch_fault(failure, "while capturing")
        if fault is not None and fault.sticky:
            raise fault from failure
        raise CaptureError(f"capture failed: {_first_line(failure)}") from failure
    return graph


class CudaReplay:
    """A captured graph. It keeps `enqueue`, and so the loaded code and the memory that the graph uses."""

    def __init__(self, graph: torch.cuda.CUDAGraph, enqueue: Callable[[], None]) -> None:
        """Hold both for as long as the graph may be replayed."""
        self._graph = graph
        self._keep = enqueue

    def replay(self) -> None:
        """Enqueue all captured launches once more, on the current stream."""
        with device_errors("while replaying a graph"):
            self._graph.replay()

    def nodes(self) -> list[Node]:
        """The captured kernels, in the order in which the graph runs them.

        Copies and fills stand in the list too, as `memcpy` and `memset` without words.
        """
        api = driver()
        graph = api.CUgraph(self._graph.raw_cuda_graph())
        handles = _handles(graph)
        kinds = api.CUgraphNodeType
        plain = {kinds.CU_GRAPH_NODE_TYPE_MEMCPY: "memcpy", kinds.CU_GRAPH_NODE_TYPE_MEMSET: "memset"}
        found: list[Node] = []
        sizes: dict[int, tuple[int, ...]] = {}
        for handle in handles:
            kind = check(api.cuGraphNodeGetType(handle), "while reading a graph")
            if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
                found.append(_kernel(handle, sizes))
            elif kind in plain:
                found.append(Node(plain[kind], ()))
        return found


def execution_order(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Node numbers so that every edge (from, to) leads forward; equals keep the order of their numbers.

    Raises:
        CaptureError: The edges go round in a circle, so this is no graph that a capture makes.
    """
    after: list[list[int]] = [[] for _ in range(count)]
    waits = [0] * count
    for source, sink in edges:
        after[source].append(sink)
        waits[sink] += 1
    ready = [number for number in range(count) if waits[number] == 0]
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)
        order.append(number)
        for sink in after[number]:
            waits[sink] -= 1
            if waits[sink] == 0:
                heapq.heappush(ready, sink)
    if len(order) != count:
        raise CaptureError(f"the captured graph has a circle: {count - len(order)} of {count} nodes never start")
    return order


def aligned_words(data: bytes) -> tuple[int, ...]:
    """Every aligned 8-byte word of one argument; addresses inside structures are among them."""
    return tuple(int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) - 7, 8))


def _handles(graph: Any) -> list[Any]:
    api = driver()
    doing = "while reading a graph"
    _, count = check(api.cuGraphGetNodes(graph, 0), doing)
    if count == 0:
        return []
    nodes, count = check(api.cuGraphGetNodes(graph, count), doing)
    nodes = list(nodes)[:count]
    number = {int(node): i for i, node in enumerate(nodes)}
    *_, edge_count = check(api.cuGraphGetEdges(graph, 0), doing)
    edges: list[tuple[int, int]] = []
    if edge_count:
        sources, sinks, *_ = check(api.cuGraphGetEdges(graph, edge_count), doing)
        edges = [(number[int(a)], number[int(b)]) for a, b in zip(sources, sinks, strict=True)]
    return [nodes[i] for i in execution_order(count, edges)]


def _kernel(handle: Any, sizes: dict[int, tuple[int, ...]]) -> Node:
    """One kernel node; `sizes` remembers the argument sizes of a function between nodes."""
    api = driver()
    status, params = api.cuGraphKernelNodeGetParams(handle)
    if int(status):
        return Node(f"unreadable ({error_name(int(status))})", ())
    # A kernel of a library that was not bound to one context has `kern` in place of `func`.
    function, is_kernel = (params.func, False) if int(params.func) else (params.kern, True)
    name = _name(function, is_kernel)
    key = int(function)
    if key not in sizes:
        sizes[key] = _argument_sizes(function, is_kernel)
    grid = (int(params.gridDimX), int(params.gridDimY), int(params.gridDimZ))
    block = (int(params.blockDimX), int(params.blockDimY), int(params.blockDimZ))
    words = _words(int(params.kernelParams or 0), sizes[key]) or _buffer_words(int(params.extra or 0))
    return Node(name, words, grid, block)


def _name(function: Any, is_kernel: bool) -> str:
    api = driver()
    status, name = (api.cuKernelGetName if is_kernel else api.cuFuncGetName)(function)
    if int(status):
        return f"unnamed ({error_name(int(status))})"
    return name.decode("utf-8", errors="replace") if isinstance(name, bytes) else str(name)


def _argument_sizes(function: Any, is_kernel: bool) -> tuple[int, ...]:
    """Bytes of each argument. The driver answers with an error behind the last one."""
    api = driver()
    query = api.cuKernelGetParamInfo if is_kernel else api.cuFuncGetParamInfo
    sizes: list[int] = []
    while len(sizes) < _MAX_ARGUMENTS:
        status, _, size = query(function, len(sizes))
        if int(status):
            break
        sizes.append(int(size))
    return tuple(sizes)


def _words(address: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Words of all arguments; `address` is the node's own `void**`, 0 where it keeps its arguments otherwise."""
    if address == 0:
        return ()
    pointers = (ctypes.c_void_p * len(sizes)).from_address(address)
    words: list[int] = []
    for pointer, size in zip(pointers, sizes, strict=True):
        if pointer:
            words.extend(aligned_words(ctypes.string_at(pointer, size)))
    return tuple(words)


def _buffer_words(address: int) -> tuple[int, ...]:
    """Words of arguments that were given as one buffer: `address` is the node's own list of tags and pointers."""
    if address == 0:
        return ()
    found: dict[int, int] = {}
    for place in range(_MAX_TAGS):
        tag, value = (ctypes.c_void_p * 2).from_address(address + 16 * place)
        if not tag or not value:
            break
        found[tag] = value
    if _BUFFER_POINTER not in found or _BUFFER_SIZE not in found:
        return ()
    size = ctypes.c_size_t.from_address(found[_BUFFER_SIZE]).value
    return aligned_words(ctypes.string_at(found[_BUFFER_POINTER], size))


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:160] if text else type(error).__name__
