"""What the routed experts of a layer cost a prompt, from the router's choice to the weighted sum.

    python bench/experts.py OUT                     all shapes: OUT/experts.json, a short table last
    python bench/experts.py OUT --sweep             also the grouped products alone, in every shape of their launch

One launch of a graph runs all layers, each with weights of its own, as a step does; the time is a layer's. `whole` is
what the executor launches, `apart` the same op by op, `products` the matrix products of `whole` alone. Every token goes
to experts drawn at random. `bytes` are those of the experts that are reached. Whether it is right is for tests/gpu to
say.
"""

import argparse
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BYTE = 0x22  # of weights and of x: small numbers
DOWN = ("Q4_K", "Q6_K")  # of a Q4_K_M file; gate and up are Q4_K
SHAPES = ("qwen3-30b-a3b", "qwen3.5-35b-a3b", "deepseek-v2-lite")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Time the experts of a layer.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the result")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 64, 512, 2048], metavar="N", help="tokens")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts")
    parser.add_argument("--sweep", action="store_true", help="also in every shape of a launch")
    parser.add_argument("--library", default="libcuda.so.1", help="the driver")
    parser.add_argument("--kernels", help="directory of the kernels, where it is another")
    return parser.parse_args()


given = options()
sys.path[:0] = [str(ROOT)]

import ending  # noqa: E402
import layers  # noqa: E402
import measure  # noqa: E402
import models  # noqa: E402

from reflex_ipc.cuda import experts, families, launch, moe  # noqa: E402
from reflex_ipc.cuda.device import Device, start_driver  # noqa: E402
from reflex_ipc.cuda.fuse import Group  # noqa: E402
from reflex_ipc.cuda.launch import Kernels, Launch  # noqa: E402
from reflex_ipc.cuda.places import Shape  # noqa: E402
from reflex_ipc.cuda.products import Call, Input  # noqa: E402
from reflex_ipc.gguf import TYPES, Tensor  # noqa: E402
from reflex_ipc.ops import ExpertLinear, ExpertSum, SwiGlu, Value  # noqa: E402
from reflex_ipc.plan import Plan  # noqa: E402

PRODUCTS = ("grouped_", "matvec_")


class Experts(layers.Layers):
    """Experts of one shape, with room for `n_most` tokens; all layers have the same inputs."""

    def __init__(self, device: Device, kernels: Kernels, shape: models.Shape, down: str, n_most: int) -> None:
        self.shape = shape
        n_embd, n_ff, n_used = shape.n_embd, shape.n_ff_exp, shape.n_used
        widths = {"x": n_embd, "routes": 2 * n_used, "out": n_embd, "down": n_used * n_embd}
        widths |= dict.fromkeys(("gate", "up", "act"), n_used * n_ff)
        values = {name: Value(name, width) for name, width in widths.items()}
        kinds = {kind.name: kind for kind in TYPES.values()}
        tensors: dict[str, Tensor] = {}
        self.layers: list[tuple[Any, ...]] = []
        for i in range(given.layers):
            parts = []
            for name, x, kind, ne in (
                ("gate", "x", "Q4_K", (n_embd, n_ff)),
                ("up", "x", "Q4_K", (n_embd, n_ff)),
                ("down", "act", down, (n_ff, n_embd)),
            ):
                size = ne[0] * ne[1] * shape.n_expert // kinds[kind].block * kinds[kind].size
                tensors[f"{i}.{name}"] = Tensor(f"{i}.{name}", kinds[kind], (*ne, shape.n_expert), 0, 0, size)
                parts.append(ExpertLinear(name, values[name], values[x], values["routes"], f"{i}.{name}"))
            act = SwiGlu("act", values["act"], values["gate"], values["up"])
            self.layers.append(
                (*parts[:2], act, parts[2], ExpertSum("out", values["out"], parts[2].out, parts[2].routes))
            )
        ops = tuple(op for layer in self.layers for op in layer)
        super().__init__(device, kernels, Plan("bench", ops, (), tensors, values["out"], 1, 1, 1, 1, ()))
        for value in values.values():
            self.take(value.name, 4 * value.width * n_most, BYTE)
        for name, tensor in tensors.items():
            self.take(name, tensor.nbytes + 16, BYTE)
        self.bytes = sum(tensors[f"0.{name}"].nbytes for name in ("gate", "up", "down"))
        self.places.scratch = self.take("scratch", families.scratch_bytes(self.plan, n_most))
        draw = random.Random(1)
        chosen = [draw.sample(range(shape.n_expert), n_used) for _ in range(n_most)]
        self.chosen = chosen
        rows = (struct.pack(f"<{2 * n_used}f", *ids, *[1 / n_used] * n_used) for ids in chosen)
        self.stream.to_device(self.address["routes"], b"".join(rows))

    def reached(self, n: int) -> float:
        """Share of the experts that the first n tokens go to."""
        return len({i for ids in self.chosen[:n] for i in ids}) / self.shape.n_expert

    def launches_as(self, how: str, n: int) -> "Iterator[Launch]":
        for parts in self.layers:
            groups = [Group("experts", parts, [parts[-1].out])]
            if how == "apart":
                groups = [Group("op", [op], [op.out]) for op in parts]
            for group in groups:
                for each in self.launches_of(group, Shape(n, 0)):
                    if how != "products" or each.function.name.startswith(PRODUCTS):
                        yield each

    def in_shape(self, what: str, n: int, warps: int, width: int) -> "Iterator[Launch]":
        """The grouped product of gate and up, or of down, alone; once behind what it needs."""
        for layer, parts in enumerate(self.layers):
            op = parts[0] if what == "gate, up" else parts[3]
            n_in = self.plan.weights[op.weight].ne[0]
            matrices = [moe.matrix_of(self, each, self.at(op.out)) for each in parts[:2]]
            if what == "down":
                matrices = [moe.matrix_of(self, op, self.at(op.out))]
            chosen = moe.experts_of(self.plan, op, self.at(op.routes))
            best = experts.grouped_shape(self.limits, matrices[0].type, width, warps)
            entry = Input(self.at(op.x), n, n_in, op.x.width)
            calls: list[Call] = experts.expert_linear(
                *(self.limits, entry, matrices, chosen, self.places.scratch),
                per_expert=op.x.width != n_in,
                shape=best._replace(warps=warps),
            )
            for call in calls:
                made = self.call(call)
                if call.kernel.startswith("grouped_"):
                    yield made
                elif layer == 0:
                    made()

    def sweep(self, what: str, n: int) -> "Iterator[dict[str, Any]]":
        op = self.layers[0][0 if what == "gate, up" else 3]
        kind = self.plan.weights[op.weight].type.name
        for width in experts.WIDTHS:
            for warps in (4, 6, 8, 10, 12):
                if warps <= experts.most_warps(self.limits, kind, width):
                    us = self.microseconds(self.in_shape(what, n, warps, width), given.layers, given.rounds)
                    yield {"what": what, "n": n, "type": kind, "warps": warps, "width": width, "us": us}


def main() -> int:
    device = start_driver(0, given.library).wait()
    kernels = Kernels(device, given.kernels or launch.LIB)
    rows: list[dict[str, Any]] = []
    swept: list[dict[str, Any]] = []
    ways = ("whole", "apart", "products")
    for model in given.shapes:
        for down in DOWN:
            made = Experts(device, kernels, models.SHAPES[model], down, max(given.counts))
            for n in given.counts:
                row: dict[str, Any] = {"model": model, "down": down, "n": n, "bytes": made.bytes * made.reached(n)}
                for how in ways:
                    row[how] = made.microseconds(made.launches_as(how, n), given.layers, given.rounds)
                rows.append(row)
            if given.sweep:
                for n in given.counts:
                    grouped = any(each.function.name == "group_experts" for each in made.launches_as("whole", n))
                    for what in ("gate, up", "down") if grouped else ():
                        swept += ({"model": model} | each for each in made.sweep(what, n))
            made.close()
    given.out.mkdir(parents=True, exist_ok=True)
    measure.save(given.out / "experts.json", measure.document("experts_layer", {"rows": rows, "shapes": swept}))
    for each in swept:
        print("{model:<17}{what:<9}{type:<5}{n:>5} tokens  {warps:>2} warps, {width} slots {us:9.1f}".format(**each))
    print(f"{'µs a layer':<29}" + "".join(f"{how:>10}" for how in ways) + f"{'GB/s':>8}")
    for row in rows:
        rate = row["bytes"] / row["whole"] / 1e3 if row["whole"] else 0
        print(
            "{model:<17}{down:<6}{n:>6}".format(**row) + "".join(f"{row[how]:10.1f}" for how in ways) + f"{rate:8.0f}"
        )
    device.close()
    return 0


if __name__ == "__main__":
    ending.run(main)
