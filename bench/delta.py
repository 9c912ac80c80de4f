"""What a delta net costs a layer between its products, on this device, and whether it is right.

    python bench/delta.py OUT                       all shapes: OUT/delta.json, a short table last
    python bench/delta.py OUT --root OTHER          with the package and kernels of another checkout

One launch of a graph runs all layers of a model, each on a state of its own, as a step does; the time is a layer's.
`whole` is everything from the convolution to the gate as the executor launches it, `apart` the same op by op, `rule`
the delta rule alone. Errors are relative, against float64, of outputs and of the state afterwards.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHAPES = {"0.8B": (16, 16, 18), "9B": (16, 32, 24), "27B": (16, 48, 48)}  # key heads, value heads, layers; d is 128
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
CHECKED = (1, 2, 33, 300)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Time and check the kernels of delta nets.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the result")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose package and kernels are run")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--counts", nargs="+", type=int, default=list(COUNTS), metavar="N", help="tokens of a step")
    parser.add_argument("--checked", nargs="*", type=int, default=list(CHECKED), metavar="N", help="and of a check")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--library", default="libcuda.so.1", help="the driver")
    parser.add_argument("--kernels", help="directory of the kernels, where it is another")
    return parser.parse_args()


given = options()
sys.path[:0] = [str(given.root.resolve()), str(ROOT / "tests")]

import ending  # noqa: E402
import layers  # noqa: E402
import measure  # noqa: E402
import numpy as np  # noqa: E402
from delta_reference import KERNEL, Data, Net, expected  # noqa: E402

from reflex_ipc.cuda import families, launch  # noqa: E402
from reflex_ipc.cuda.device import Device, start_driver  # noqa: E402
from reflex_ipc.cuda.fuse import Group  # noqa: E402
from reflex_ipc.cuda.launch import Kernels, Launch  # noqa: E402
from reflex_ipc.cuda.places import Shape  # noqa: E402
from reflex_ipc.ops import DeltaRule, Value  # noqa: E402


class Delta(layers.Layers):
    """Delta nets of one shape, with room for `n_most` tokens; all have the same weights and inputs."""

    def __init__(self, device: Device, kernels: Kernels, net: Net, n_layer: int, n_most: int) -> None:
        self.net, self.group, self.n_layer = net, net.group(), n_layer
        super().__init__(device, kernels, net.plan())
        values = {value.name: value.width for op in self.group.parts for value in (op.out, *self._read(op))}
        for name, width in values.items():
            self.take(name, 4 * width * n_most)
        for name, size in (
            ("taps", KERNEL * net.width),
            ("weight", net.d),
            ("dt", net.n_head_v),
            ("decay", net.n_head_v),
        ):
            self.take(name, 4 * size)
        self.sizes = {"tail": 4 * (KERNEL - 1) * net.width, "matrices": 4 * net.n_head_v * net.d * net.d}
        for layer in range(n_layer):
            for name, size in self.sizes.items():
                self.take(f"{name} {layer}", 2 * size)
        self.places.control = self.take("control", 64)
        self.places.scratch = self.take("scratch", families.scratch_bytes(self.plan, n_most))

    @staticmethod
    def _read(op: Any) -> list[Value]:
        return [field for field in op if isinstance(field, Value)]

    def feed(self, data: Data) -> None:
        """Weights, inputs, and every layer's state before."""
        arrays = dict(vars(data))
        states = {name: arrays.pop(name) for name in self.sizes}
        for name, array in arrays.items():
            self.stream.to_device(self.address[name], array.tobytes())
        for layer in range(self.n_layer):
            for name, array in states.items():
                self.stream.to_device(self.address[f"{name} {layer}"], array.tobytes())

    def begin(self, n: int) -> None:
        """Steps to come have n tokens and keep all."""
        self.stream.to_device(self.places.control, np.array([0, n, 0, 0], np.int32).tobytes())

    def launches_as(self, how: str, n: int) -> "Iterator[Launch]":
        shape = Shape(n, 0)
        for layer in range(self.n_layer):
            self.places.states = {name: (self.address[f"{name} {layer}"], size) for name, size in self.sizes.items()}
            groups = [self.group]
            if how != "whole":
                groups = [Group("op", [op], [op.out]) for op in self.group.parts]
            if how == "rule":
                groups = [group for group in groups if isinstance(group.parts[0], DeltaRule)]
            for group in groups:
                yield from self.launches_of(group, shape)

    def errors(self, how: str, n: int, wanted: "tuple[np.ndarray, np.ndarray]") -> tuple[float, float]:
        """Of the outputs and of the matrices, of the last layer."""
        last = self.address[f"matrices {self.n_layer - 1}"] + self.sizes["matrices"]
        for at, x in zip((self.address["gate"], last), wanted, strict=True):
            self.stream.fill(at, 0xFF, 4 * x.size)  # NaN
        for each in self.launches_as(how, n):
            each()
        raw = [self.stream.read(at, 4 * x.size) for at, x in zip((self.address["gate"], last), wanted, strict=True)]
        out, matrices = (
            float(np.linalg.norm(np.frombuffer(got, np.float32) - x.reshape(-1)) / np.linalg.norm(x))
            for got, x in zip(raw, wanted, strict=True)
        )
        return out, matrices


def main() -> int:
    device = start_driver(0, given.library).wait()
    kernels = Kernels(device, given.kernels or launch.LIB)
    ways = ["whole", "apart", "rule"]
    rows: list[dict[str, Any]] = []
    for model in given.shapes:
        n_head_k, n_head_v, n_layer = SHAPES[model]
        net = Net(n_head_k, n_head_v, 128)
        delta = Delta(device, kernels, net, given.layers or n_layer, max(*given.counts, *given.checked, 1))
        for n in given.checked:
            data = Data(net, n)
            delta.feed(data)
            delta.begin(n)
            outputs, _, matrices = expected(net, data, list(range(-1, n - 1)), n)
            for how in ways[:-1]:
                out, state = delta.errors(how, n, (outputs, matrices))
                rows.append({"model": model, "n": n, "how": how, "error_out": out, "error_state": state})
        delta.feed(Data(net, max(given.counts)))
        for n in given.counts:
            delta.begin(n)
            for how in ways:
                us = delta.microseconds(delta.launches_as(how, n), delta.n_layer, given.rounds)
                rows.append({"model": model, "n": n, "how": how, "us": us})
        delta.close()
    given.out.mkdir(parents=True, exist_ok=True)
    measure.save(given.out / "delta.json", measure.document("delta", {"root": str(given.root), "rows": rows}))
    for row in rows:
        if "error_out" in row:
            print(f"{row['model']:<6}{row['n']:>5} {row['how']:<8} {row['error_out']:9.1e} {row['error_state']:9.1e}")
    print(f"{'µs a layer':<11}" + "".join(f"{how:>9}" for how in ways))
    for model in given.shapes:
        for n in given.counts:
            figures = [row["us"] for row in rows if "us" in row and (row["model"], row["n"]) == (model, n)]
            print(f"{model:<6}{n:>5}" + "".join(f"{us:9.1f}" for us in figures))
    checked = [row for row in rows if "error_out" in row]
    worst = float(np.max([row[what] for row in checked for what in ("error_out", "error_state")], initial=0.0))
    print(f"largest error {worst:.1e}")
    device.close()
    return int(not worst <= 1e-5)


if __name__ == "__main__":
    ending.run(main)
