"""Ops of some layers on a device, as the executor launches them, and how long a layer takes."""

from collections.abc import Iterable
from statistics import median
from typing import Any

from reflex_ipc.cuda.device import Device
from reflex_ipc.cuda.launch import Kernels, Launch
from reflex_ipc.cuda.lower import Lowering
from reflex_ipc.cuda.places import Places
from reflex_ipc.ops import Value
from reflex_ipc.plan import Plan

WARM = 2  # rounds


class Layers(Lowering):
    """Lowers ops of `plan`, of which values and weights lie at `address` by their names."""

    def __init__(self, device: Device, kernels: Kernels, plan: Plan) -> None:
        self.device = device
        self.address: dict[str, int] = {}
        self._memory: list[Any] = []
        super().__init__(device, kernels, device.stream(), plan, [], None, Places(), lambda name: self.address[name])
        self.is_dependent = self.can_depend

    def take(self, name: str, size: int, byte: int = 0) -> int:
        """Room for something, full of this byte."""
        memory = self.device.allocate(size, name)
        self._memory.append(memory)
        self.stream.fill(memory.address, byte, size)
        self.address[name] = memory.address
        return int(memory.address)

    def close(self) -> None:
        for memory in self._memory:
            memory.close()

    def at(self, value: Value) -> int:
        return self.address[value.name]

    def microseconds(self, launches: Iterable[Launch], n_layer: int, rounds: int) -> float:
        """Of a layer: the median of some launches of one graph of all."""
        ready = list(launches)
        with self.stream.capture() as capture:
            for each in ready:
                each()
        graph = capture.graph.instantiate()
        capture.graph.close()
        times = []
        for _ in range(WARM + rounds):
            before, after = (self.device.event(timing=True) for _ in range(2))
            before.record(self.stream)
            graph.launch(self.stream)
            after.record(self.stream)
            after.synchronize()
            times.append(after.milliseconds_since(before))
            before.close()
            after.close()
        graph.close()
        return 1e3 * median(times[WARM:]) / n_layer
