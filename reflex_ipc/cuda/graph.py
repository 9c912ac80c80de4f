"""CUDA graphs: record launches once, replay them with one call; and which of them are kept.

with stream.capture() as capture:
    for launch in launches: launch()
ready = capture.graph.instantiate()
ready.launch(stream)
"""

import ctypes

from reflex_ipc.cuda.memory import Resource
from reflex_ipc.errors import DeviceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import TypeVar

    from reflex_ipc.cuda.device import Device, Stream
    from reflex_ipc.cuda.launch import Launch

    ShapeKey = tuple[int, int, bool, int, int]
    Key = TypeVar("Key")
    Value = TypeVar("Value")

SHAPES = 16
"""Shapes of steps whose launches are kept, and decisions whose graphs are: those used last."""


class Capture:
    """Records what is queued on a stream; `graph` holds it after the `with` block, and is None if that failed.

    Other threads are not restrained meanwhile; this one must not wait for the device or allocate.
    """

    def __init__(self, stream: "Stream") -> None:
        self.stream = stream
        self._graph: Graph | None = None

    def __enter__(self) -> "Capture":
        cu, thread_local = self.stream.device.cu, 1
        cu.check(cu.cuStreamBeginCapture_v2(self.stream.handle, thread_local), "starting to record a graph")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        cu, handle = self.stream.device.cu, ctypes.c_void_p()
        code = cu.cuStreamEndCapture(self.stream.handle, ctypes.byref(handle))
        if error is not None:
            if handle.value:
                cu.cuGraphDestroy(handle.value)
            return
        cu.check(code, "recording a graph")
        self._graph = Graph(self.stream.device, handle.value or 0)

    @property
    def graph(self) -> "Graph":
        """What was recorded."""
        if self._graph is None:
            raise DeviceError("a graph was asked for before its recording ended")
        return self._graph


class Graph(Resource):
    """Recorded work."""

    __slots__ = ("handle",)

    def __init__(self, device: "Device", handle: int) -> None:
        self.handle = handle
        super().__init__(device)

    def instantiate(self) -> "GraphExec":
        """Make it ready to run. It takes milliseconds for hundreds of launches: not before the first token."""
        cu, handle = self.device.cu, ctypes.c_void_p()
        cu.check(cu.cuGraphInstantiateWithFlags(ctypes.byref(handle), self.handle, 0), "making a graph ready to run")
        return GraphExec(self.device, handle.value or 0)

    def _release(self) -> None:
        cu = self.device.cu
        cu.check(cu.cuGraphDestroy(self.handle), "destroying a graph")


class GraphExec(Resource):
    """Work ready to run."""

    __slots__ = ("handle",)

    def __init__(self, device: "Device", handle: int) -> None:
        self.handle = handle
        super().__init__(device)

    def launch(self, stream: "Stream") -> None:
        """Queue all of it."""
        cu = self.device.cu
        if code := cu.cuGraphLaunch(self.handle, stream.handle):
            cu.fail(code, "launching a graph")

    def _release(self) -> None:
        cu = self.device.cu
        cu.check(cu.cuGraphExecDestroy(self.handle), "destroying a graph")


class Kept:
    """What is kept of steps on a stream that may come again: their launches, and graphs that were recorded of them.

    `shapes`: launches by `places.Shape.key`, an empty list where the shape was met once. `step_graphs` have the same
    keys. `token_graphs`: of decoding, by how many blocks share positions and how the next token is chosen.
    """

    __slots__ = ("_stream", "shapes", "step_graphs", "token_graphs")

    def __init__(self, stream: "Stream") -> None:
        self._stream = stream
        self.shapes: dict[ShapeKey, list[Launch]] = {}
        self.step_graphs: dict[ShapeKey, GraphExec] = {}
        self.token_graphs: dict[tuple[int, str], GraphExec] = {}

    def forget(self) -> None:
        """An address that launches know became another."""
        self.shapes.clear()
        for graphs in (self.step_graphs, self.token_graphs):
            for graph in graphs.values():
                graph.close()
            graphs.clear()

    def launches(self, key: "ShapeKey") -> "list[Launch] | None":
        """Of a shape: an empty list where it was met once, None where it was not."""
        return _used(self.shapes, key)

    def keep(self, key: "ShapeKey", launches: "list[Launch]") -> None:
        _keep(self.shapes, key, launches)

    def replay(self, key: "ShapeKey") -> bool:
        """Queue a known shape's launches with one call; False where it is not known. Recording them takes some
        milliseconds."""
        graph = _used(self.step_graphs, key)
        if graph is None:
            launches = _used(self.shapes, key)
            if not launches:
                return False
            graph = self.recorded(launches)
            if (dropped := _keep(self.step_graphs, key, graph)) is not None:
                dropped.close()
        graph.launch(self._stream)
        return True

    def recorded(self, launches: "Iterable[Launch]") -> GraphExec:
        """Launches as a graph."""
        with self._stream.capture() as capture:
            for launch in launches:
                launch()
        try:
            return capture.graph.instantiate()
        finally:
            capture.graph.close()


def _used(kept: "dict[Key, Value]", key: "Key") -> "Value | None":
    """What is kept under a key, from now on as the last that was used; a dict's first is the one used longest ago."""
    found = kept.pop(key, None)
    if found is not None:
        kept[key] = found
    return found


def _keep(kept: "dict[Key, Value]", key: "Key", value: "Value") -> "Value | None":
    """Keep SHAPES at most; returns what had to go."""
    kept[key] = value
    return kept.pop(next(iter(kept))) if len(kept) > SHAPES else None
