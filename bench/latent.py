"""What latent attention costs a layer of DeepSeek-V2-Lite, from absorbed matrices and from one `attn_kv_b`.

    python bench/latent.py OUT                      OUT/latent.json, a short table last

One launch of a graph runs all layers, each with weights and a cache of its own, as a step does; the time is a layer's.
A step of each size is run in both forms, `absorbed` and `expanded`, whichever the executor would take, behind each of
the pasts; `absorb` and `expand` are what comes before attention alone. Where expanded begins to be faster is what
`ABSORBED` of reflex_ipc/cuda/families.py should be. The types are those of a Q4_K_M file. Whether it is right is for
tests/gpu to say.
"""

import argparse
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
D_NOPE, D_ROPE, D_V, RANK = 128, 64, 128, 512
COUNTS = (1, 8, 32, 64, 96, 128, 512, 2048)
PASTS = (0, 4096)
WHATS = ("absorb", "absorbed", "expand", "expanded")
BYTE = 0x22  # of weights: halves of it are small numbers


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Time latent attention.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the result")
    parser.add_argument("--counts", nargs="+", type=int, default=list(COUNTS), metavar="N", help="tokens of a step")
    parser.add_argument("--pasts", nargs="+", type=int, default=list(PASTS), metavar="N", help="tokens before it")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--library", default="libcuda.so.1", help="the driver")
    parser.add_argument("--kernels", help="directory of the kernels, where it is another")
    return parser.parse_args()


given = options()
N_HEAD = given.heads
FORMS = {
    "new": {"k_b": ("Q5_0", (D_NOPE, RANK, N_HEAD)), "v_b": ("Q4_K", (RANK, D_V, N_HEAD))},
    "legacy": {"kv_b": ("Q4_K", (RANK, N_HEAD * (D_NOPE + D_V)))},
}
sys.path[:0] = [str(ROOT)]

import ending  # noqa: E402
import layers  # noqa: E402
import measure  # noqa: E402

from reflex_ipc.cuda import latent, launch  # noqa: E402
from reflex_ipc.cuda.device import Device, start_driver  # noqa: E402
from reflex_ipc.cuda.launch import Kernels, Launch  # noqa: E402
from reflex_ipc.cuda.places import Shape  # noqa: E402
from reflex_ipc.gguf import TYPES, Tensor  # noqa: E402
from reflex_ipc.ops import LatentAttention, Value  # noqa: E402
from reflex_ipc.plan import Plan  # noqa: E402


class Latent(layers.Layers):
    """Latent attention of one kind of file, with room for `n_most` tokens behind `n_past`; all layers have the same
    inputs."""

    def __init__(self, device: Device, kernels: Kernels, form: str, n_most: int, n_past: int) -> None:
        out, q, row = (
            Value(*pair)
            for pair in (("out", N_HEAD * D_V), ("q", N_HEAD * (D_NOPE + D_ROPE)), ("latent", RANK + D_ROPE))
        )
        types = {kind.name: kind for kind in TYPES.values()}
        tensors: dict[str, Tensor] = {}
        made = []
        for i in range(given.layers):
            for name, (kind, ne) in FORMS[form].items():
                n = -(-ne[0] // types[kind].block) * types[kind].size
                for length in ne[1:]:
                    n *= length
                tensors[f"{i}.{name}"] = Tensor(f"{i}.{name}", types[kind], ne, 0, 0, n)
            names = tuple(f"{i}.{name}" for name in FORMS[form])
            scale = (D_NOPE + D_ROPE) ** -0.5
            made.append(LatentAttention("out", out, q, row, f"{i}.state", names, N_HEAD, RANK, scale))
        super().__init__(device, kernels, Plan("bench", tuple(made), (), tensors, out, 1, 1, 1, 1, ()))
        for value in (out, q, row):
            self.take(value.name, 4 * value.width * n_most, BYTE)
        for name, tensor in tensors.items():
            self.take(name, tensor.nbytes + 16, BYTE)
        p = self.places
        p.control = self.take("control", 64)
        n_expanded = latent.n_expanded(n_past + n_most)
        sizes = [latent.scratch_bytes(self.plan, op, n_most, n_expanded, absorbed=n_most) for op in made]
        p.scratch = self.take("scratch", max(sizes))
        p.cache = self.take("cache", self.layout.page_bytes * self.layout.pages(n_past + n_most))
        p.partial, p.tickets = self.take("partial", self.partial_bytes()), self.take("tickets", self.ticket_bytes())
        p.heads = self.take("heads", 4 * N_HEAD)
        self.stream.to_device(p.heads, struct.pack(f"<{N_HEAD}f", *range(N_HEAD)))

    def launches_as(self, what: str, n: int, n_past: int) -> "Iterator[Launch]":
        self.stream.to_device(self.places.control, struct.pack("<i", n_past))
        n_splits = self.n_splits(n_past + 1) if n == 1 else 0
        shape = Shape(n, 0, False, n_splits, latent.n_expanded(n_past + n) if what.startswith("expand") else 0)
        for op in self.plan.ops:
            for each in latent.latent_attention(self, op, shape):
                if each.function.name.startswith("attention_") and what in ("absorb", "expand"):
                    if what == "absorb":
                        break
                    continue
                yield each


def main() -> int:
    device = start_driver(0, given.library).wait()
    kernels = Kernels(device, given.kernels or launch.LIB)
    rows: list[dict[str, Any]] = []
    for form in FORMS:
        layers_of_form = Latent(device, kernels, form, max(given.counts), max(given.pasts))
        for n_past in given.pasts:
            for n in given.counts:
                for what in WHATS:
                    launches = layers_of_form.launches_as(what, n, n_past)
                    us = layers_of_form.microseconds(launches, given.layers, given.rounds)
                    rows.append({"form": form, "past": n_past, "n": n, "what": what, "us": us})
        layers_of_form.close()
    given.out.mkdir(parents=True, exist_ok=True)
    measure.save(given.out / "latent.json", measure.document("latent", {"rows": rows}))
    print(f"{'µs a layer':<16}" + "".join(f"{form + ' ' + what:>17}" for form in FORMS for what in WHATS))
    for n_past in given.pasts:
        for n in given.counts:
            of_step = [row["us"] for row in rows if (row["past"], row["n"]) == (n_past, n)]
            print(f"{f'{n} behind {n_past}':<16}" + "".join(f"{us:17.1f}" for us in of_step))
    device.close()
    return 0


if __name__ == "__main__":
    ending.run(main)
