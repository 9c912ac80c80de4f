"""CUDA graphs: record launches once, replay them with one call.

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
    from types import TracebackType

    from reflex_ipc.cuda.device import Device, Stream


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
