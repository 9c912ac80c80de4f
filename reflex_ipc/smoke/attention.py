"""Attention: every size of heads that kernels are compiled for, every number of query heads a key head."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from reflex_ipc import ops
from reflex_ipc.ops import Rope, Value
from reflex_ipc.plan import PARENT_NONE, PARENT_STATE
from reflex_ipc.smoke.bench import Bench, Outcome
from reflex_ipc.smoke.layer import (
    Array,
    Layer,
    Weight,
    float_weight,
    numbers,
    outcome,
    rms,
    softmax,
    visible_to,
    weight,
)
from reflex_ipc.smoke.rows import rotated

HALVES = 2**-10
"""Keys and values are halves, and so are probabilities of a prompt: each is off by 2^-11 at most."""
EPS = 0.25
"""Large, so that it counts."""
LARGE = 2.0**18
"""Halves end below 2^16: larger keys and values have a scale in the cache."""

SHAPES = [
    *((1, 1, 64, 64), (2, 1, 40, 40), (8, 2, 64, 64), (10, 1, 32, 32)),
    *((2, 2, 80, 80), (4, 2, 96, 64), (4, 1, 128, 128), (8, 1, 128, 128)),
    *((1, 1, 192, 128), (2, 1, 256, 256), (3, 1, 144, 144), (16, 2, 256, 256)),
]
"""n_head, n_head_kv, numbers of a key and of a value."""


def attention(bench: Bench) -> Iterator[Outcome]:
    """finish_heads, attention_prefill_WIDTH, attention_decode_LANES_HEADS"""
    for shape in SHAPES:
        yield from _text(bench, shape, [35, 6], [3])
    # Three pages of the cache, by many blocks for a token, and by one; more blocks than a warp has lanes.
    yield from _text(bench, (2, 1, 32, 32), [520], [20, 1])
    yield from _text(bench, (1, 1, 256, 32), [280], [40])
    yield from _tree(bench, (2, 1, 64, 64))


def attended(q: Array, k: Array, v: Array, visible: npt.NDArray[np.bool_], scale: float) -> Array:
    """q (n, heads, d) of the last n tokens, k and v (tokens, key heads, d), visible (n, tokens)."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat(group, axis=1) for x in (k, v))
    scores = np.where(visible, np.einsum("nhd,mhd->hnm", q, k) * scale, -np.inf)
    mixed: Array = np.einsum("hnm,mhd->nhd", softmax(scores), v)
    return mixed


def _text(
    bench: Bench, shape: tuple[int, int, int, int], steps: Sequence[int], splits: Sequence[int]
) -> Iterator[Outcome]:
    """Steps of a prompt, then tokens as decoding has them, by so many blocks; with norms and rotations, as one group
    and op by op. Where there are several key heads, with large keys and values."""
    n_head, n_head_kv, d, d_v = shape
    large = LARGE if n_head_kv > 1 else 1.0
    n = sum(steps) + len(splits)
    rope = Rope("neox" if n_head % 4 else "norm", d // 8 * 4, 1e4)
    offset = d - rope.n_rot if n_head_kv > 1 else 0
    names = {"q": (n_head, d), "k": (n_head_kv, d), "v": (n_head_kv, d_v)}
    plain = {name: numbers(n, heads * width, seed=width) for name, (heads, width) in names.items()}
    plain["v"] *= large
    norms = {"q_norm": weight("F32", d, seed=n_head), "k_norm": float_weight(large * numbers(d, seed=n_head + 1))}
    parts: list[ops.Op] = []
    for name in "qk":
        heads, _ = names[name]
        x, normed, turned = (Value(each, heads * d) for each in (name, f"{name}_norm", f"{name}_rope"))
        parts.append(ops.RmsNorm(normed.name, normed, x, f"{name}_norm", heads, EPS))
        parts.append(ops.Rotate(turned.name, turned, normed, heads, offset, rope))
    q, k, v = Value("q_rope", n_head * d), Value("k_rope", n_head_kv * d), Value("v", n_head_kv * d_v)
    scale = d**-0.5 / large
    op = ops.Attention("a", Value("a", n_head * d_v), q, k, v, "ks", "vs", n_head, n_head_kv, scale)

    def heads_of(name: str) -> Array:
        x = plain[name].reshape(n, names[name][0], -1)
        return x if name == "v" else rotated(rms(x, EPS) * norms[f"{name}_norm"].values, rope, offset)

    wanted = attended(heads_of("q"), heads_of("k"), heads_of("v"), visible_to(n), scale)
    for fused in ("attention", ""):
        layer = Layer(bench, [*parts, op], norms, fused=fused, n_positions=n)
        at = 0
        for size, n_splits in [*((size, 0) for size in steps), *((1, n_splits) for n_splits in splits)]:
            rows = {name: x[at : at + size] for name, x in plain.items()}
            yield outcome(layer.run(rows, n_splits), wanted[at : at + size], HALVES)
            at += size


def _tree(bench: Bench, shape: tuple[int, int, int, int]) -> Iterator[Outcome]:
    """Behind 20 tokens: two branches of a root, and a root of its own with so many that a tile touches three words of
    their masks."""
    n_head, n_head_kv, d, d_v = shape
    parents, past = [PARENT_STATE, 0, 1, 0, 3, PARENT_NONE, 5], 20
    parents += [i - 1 if i % 5 else i // 2 for i in range(len(parents), 110)]
    n = past + len(parents)
    visible = visible_to(past, parents)
    q, k, v = Value("q", n_head * d), Value("k", n_head_kv * d), Value("v", n_head_kv * d_v)
    op = ops.Attention("a", Value("a", n_head * d_v), q, k, v, "ks", "vs", n_head, n_head_kv, d**-0.5)
    rows = {value.name: numbers(n, value.width, seed=i) for i, value in enumerate((q, k, v))}
    no_weights: dict[str, Weight] = {}
    layer = Layer(bench, [op], no_weights)
    keys, values = (rows[name].reshape(n, n_head_kv, -1) for name in "kv")
    wanted = attended(rows["q"].reshape(n, n_head, -1), keys, values, visible, d**-0.5)
    yield outcome(layer.run({name: x[:past] for name, x in rows.items()}), wanted[:past], HALVES)
    yield outcome(layer.run({name: x[past:] for name, x in rows.items()}, tree=parents), wanted[past:], HALVES)
