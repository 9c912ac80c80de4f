"""CUDA graphs: record launches once, replay them with one call.

with stream.capture() as capture:
    for launch in launches: launch()
ready = capture.graph.instantiate()
ready.launch(stream)
"""

import ctypes

from reflex_ipc.cuda.driver import GraphUpdateResult, KernelNodeParams
from reflex_ipc.cuda.memory import Resource
from reflex_ipc.errors import DeviceError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from reflex_ipc.cuda.device import Device, Stream
    from reflex_ipc.cuda.launch import Launch


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

    def node(self) -> int:
        """The node of the launch just recorded, for `GraphExec.set_launch`."""
        cu = self.stream.device.cu
        status, count = ctypes.c_int(), ctypes.c_size_t()
        nodes, edges = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_void_p()
        cu.check(
            cu.cuStreamGetCaptureInfo_v3(
                self.stream.handle,
                ctypes.byref(status),
                None,
                None,
                ctypes.byref(nodes),
                ctypes.byref(edges),
                ctypes.byref(count),
            ),
            "asking for the node just recorded",
        )
        if count.value != 1:
            raise DeviceError(f"the stream being recorded ends in {count.value} nodes, not in one launch")
        return nodes[0] or 0


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

    def update(self, graph: Graph) -> None:
        """Take over the arguments and shapes of another recording of the same launches in the same order."""
        cu, result = self.device.cu, GraphUpdateResult()
        code = cu.cuGraphExecUpdate_v2(self.handle, graph.handle, ctypes.byref(result))
        cu.check(code, "updating a graph (reason %d of CUgraphExecUpdateResult)", result.result)

    def set_launch(self, node: int, launch: "Launch") -> None:
        """Take over one launch's arguments and shape at the node `Capture.node` gave, which runs the same kernel."""
        cu = self.device.cu
        parameters = KernelNodeParams(
            function=launch.function.handle,
            grid=launch.grid,
            block=launch.block,
            shared=launch.shared,
            parameters=launch.pointers,
        )
        cu.check(
            cu.cuGraphExecKernelNodeSetParams_v2(self.handle, node, ctypes.byref(parameters)),
            "updating %s in a graph",
            launch.function.name,
        )

    def _release(self) -> None:
        cu = self.device.cu
        cu.check(cu.cuGraphExecDestroy(self.handle), "destroying a graph")
