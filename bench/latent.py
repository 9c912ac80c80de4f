"""What latent attention costs a layer of DeepSeek-V2-Lite, from absorbed matrices and from one `attn_kv_b`.

    python bench/latent.py OUT                      OUT/latent.json, a short table last

One launch of a graph runs all layers, each with weights and a cache of its own, as a step does; the time is a layer's.
`keys` is what comes before the attention alone: absorbing the queries. The types are those of a Q4_K_M file. Whether it
is right is for tests/gpu to say.
"""

import argparse
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 5
N_HEAD, D_NOPE, D_ROPE, D_V, RANK = 16, 128, 64, 128, 512
FORMS = {
    "absorbed": {"k_b": ("Q5_0", (D_NOPE, RANK, N_HEAD)), "v_b": ("Q4_K", (RANK, D_V, N_HEAD))},
    "legacy": {"kv_b": ("Q4_K", (RANK, N_HEAD * (D_NOPE + D_V)))},
}
BYTE = 0x22  # of weights: halves of it are small numbers


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Time latent attention.")
    parser.add_argument("out", type=Path, metavar="OUT", help="directory of the result")
    parser.add_argument("--counts", nargs="+", type=int, default=[1, 8, 64, 512], metavar="N", help="tokens of a step")
    parser.add_argument("--layers", type=int, default=27)
    parser.add_argument("--library", default="libcuda.so.1", help="the driver")
    parser.add_argument("--kernels", help="directory of the kernels, where it is another")
    return parser.parse_args()


given = options()
sys.path[:0] = [str(ROOT)]

import layers  # noqa: E402
import measure  # noqa: E402

from reflex_ipc.cuda import families, launch  # noqa: E402
from reflex_ipc.cuda.device import Device, start_driver  # noqa: E402
from reflex_ipc.cuda.launch import Kernels, Launch  # noqa: E402
from reflex_ipc.cuda.places import Shape  # noqa: E402
from reflex_ipc.gguf import TYPES, Tensor  # noqa: E402
from reflex_ipc.ops import LatentAttention, Value  # noqa: E402
from reflex_ipc.plan import Plan  # noqa: E402


class Latent(layers.Layers):
    """Latent attention of one form, with room for `n_most` tokens; all layers have the same inputs."""

    def __init__(self, device: Device, kernels: Kernels, form: str, n_most: int) -> None:
        out, q, latent = (
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
            made.append(LatentAttention("out", out, q, latent, f"{i}.state", names, N_HEAD, RANK, scale))
        super().__init__(device, kernels, Plan("bench", tuple(made), (), tensors, out, 1, 1, 1, 1, ()))
        for value in (out, q, latent):
            self.take(value.name, 4 * value.width * n_most, BYTE)
        for name, tensor in tensors.items():
            self.take(name, tensor.nbytes + 16, BYTE)
        p = self.places
        p.control = self.take("control", 64)
        p.scratch = self.take("scratch", families.scratch_bytes(self.plan, n_most))
        p.cache = self.take("cache", self.layout.page_bytes * self.layout.pages(n_most))
        p.heads = self.take("heads", 4 * N_HEAD)
        self.stream.to_device(p.heads, struct.pack(f"<{N_HEAD}f", *range(N_HEAD)))

    def launches_as(self, what: str, n: int) -> "Iterator[Launch]":
        for op in self.plan.ops:
            for each in families.latent_attention(self, op, Shape(n, 0)):
                if what == "keys" and each.function.name == "attention_latent":
                    break
                yield each


def main() -> int:
    device = start_driver(0, given.library).wait()
    kernels = Kernels(device, given.kernels or launch.LIB)
    rows: list[dict[str, Any]] = []
    for form in FORMS:
        latent = Latent(device, kernels, form, max(given.counts))
        for n in given.counts:
            for what in ("keys", "whole"):
                us = latent.microseconds(latent.launches_as(what, n), given.layers, ROUNDS)
                rows.append({"form": form, "n": n, "what": what, "us": us})
        latent.close()
    given.out.mkdir(parents=True, exist_ok=True)
    measure.save(given.out / "latent.json", measure.document("latent", {"rows": rows}))
    print(f"{'µs a layer':<12}" + "".join(f"{form + ' ' + w:>16}" for form in FORMS for w in ("keys", "whole")))
    for n in given.counts:
        print(f"{n:<12}" + "".join(f"{row['us']:16.1f}" for row in rows if row["n"] == n))
    device.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
