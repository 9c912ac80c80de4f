"""What the families of `reflex smoke` run on: buffers of a device, launches, numbers to compute with."""

import math
from array import array
from collections.abc import Sequence

from reflex_ipc.cuda import products
from reflex_ipc.cuda.launch import Kernels
from reflex_ipc.errors import CheckFailedError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reflex_ipc.cuda.device import Device
    from reflex_ipc.cuda.launch import Shape

Outcome = tuple[Sequence[float], Sequence[float], float]
"""What the device left, what is right, and how far apart the two may be: norm of the difference over norm."""

_GUARD = 256  # bytes behind every buffer that nothing may touch


class Bench:
    """A device with buffers that are watched for writes behind their end, and full of NaN at first. Without `poison`
    they are as they come, for who looks for reads of what was never written."""

    def __init__(self, device: "Device", *, poison: bool = True) -> None:
        self.device = device
        self.kernels = Kernels(device)
        self.stream = device.stream()
        self.poison = poison
        self.guards: list[int] = []
        self.limits = products.limits_of(device, self.kernels)

    def room(self, size: int) -> int:
        """A buffer whose content nobody knows."""
        memory = self.device.allocate(size + _GUARD, "a test")
        begin = 0 if self.poison else size
        self.stream.fill(memory.address + begin, 0xFF, size + _GUARD - begin)
        self.guards.append(memory.address + size)
        return memory.address

    def put(self, data: bytes) -> int:
        """A buffer with these bytes."""
        address = self.room(len(data))
        self.stream.to_device(address, data)
        return address

    def floats(self, numbers: Sequence[float]) -> int:
        return self.put(array("f", numbers).tobytes())

    def integers(self, numbers: Sequence[int]) -> int:
        return self.put(array("i", numbers).tobytes())

    def get(self, address: int, n: int) -> "array[float]":
        """n float32 of a buffer, when everything queued is done."""
        return array("f", self.stream.read(address, 4 * n))

    def run(self, kernel: str, grid: "Shape", block: int, *arguments: "int | float | bytes") -> None:
        self.kernels.function(kernel).prepare(grid, (block, 1, 1), arguments, self.stream)()

    def check_guards(self, family: str) -> None:
        for address in self.guards:
            if self.stream.read(address, _GUARD) != b"\xff" * _GUARD:
                raise CheckFailedError(f"{family}: a kernel wrote behind the end of its output")
        self.guards.clear()


def relative(got: Sequence[float], wanted: Sequence[float]) -> float:
    """How far apart they are; infinite where something is no number."""
    norm = math.sqrt(sum(w * w for w in wanted)) or 1.0
    error = math.sqrt(sum((g - w) ** 2 for g, w in zip(got, wanted, strict=True))) / norm
    return error if error == error else math.inf
