"""Latent attention: absorbed for a token and for a few, expanded for a long step; of new and of older files."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from reflex_ipc import ops
from reflex_ipc.cuda import families
from reflex_ipc.ops import Value
from reflex_ipc.plan import PARENT_NONE, PARENT_STATE
from reflex_ipc.smoke.bench import Bench, Outcome
from reflex_ipc.smoke.layer import Array, Layer, numbers, outcome, softmax, visible_to, weight

N_HEAD, D_NOPE, D_ROPE, D_V, RANK = 4, 32, 16, 32, 64
LARGE = 2.0**18
"""Halves end below 2^16: larger latents have a scale in the cache."""
EXACT = 3e-5
"""Latents here are exact as halves, and other factors two halves of 11 bits each; of three products one after the other
tensor cores cut sums off at 2^-17 or so."""


def latent(bench: Bench) -> Iterator[Outcome]:
    """store_latent, attention_latent_*, absorb, expand, halve, attention_prefill_exact; over two pages, and a tree"""
    tree = [PARENT_STATE, 0, 1, 0, PARENT_NONE, 4]
    steps = ((5, 0), (1, 3), (280, 0), (2, 0))
    past, scale = sum(size for size, _ in steps), (D_NOPE + D_ROPE) ** -0.5 / LARGE
    n = past + len(tree)
    visible = visible_to(past, tree)
    q, rows = numbers(n, N_HEAD * (D_NOPE + D_ROPE), seed=1), LARGE * numbers(n, RANK + D_ROPE, seed=2)
    out = Value("a", N_HEAD * D_V)
    for is_legacy in (False, True):
        if is_legacy:
            weights = {"kv_b": weight("F16", RANK, N_HEAD * (D_NOPE + D_V), seed=3)}
            both = weights["kv_b"].values.reshape(N_HEAD, D_NOPE + D_V, RANK)
            k_b, v_b = both[:, :D_NOPE].transpose(0, 2, 1), both[:, D_NOPE:]
        else:
            weights = {
                "k_b": weight("F16", D_NOPE, RANK, N_HEAD, seed=3),
                "v_b": weight("F16", RANK, D_V, N_HEAD, seed=4),
            }
            k_b, v_b = weights["k_b"].values, weights["v_b"].values
        op = ops.LatentAttention(
            "a", out, Value("q", q.shape[1]), Value("row", rows.shape[1]), "s", tuple(weights), N_HEAD, RANK, scale
        )
        wanted = _attended(q, rows, k_b, v_b, visible, scale)
        layer = Layer(bench, [op], weights, n_positions=n)
        at = 0
        for size, n_splits in steps:
            part = slice(at, at + size)
            got = layer.run({"q": q[part], "row": rows[part]}, n_splits, expand=size > families.ABSORBED)
            yield outcome(got, wanted[part], EXACT)
            at += size
        yield outcome(layer.run({"q": q[at:], "row": rows[at:]}, tree=tree), wanted[at:], EXACT)


def _attended(q: Array, rows: Array, k_b: Array, v_b: Array, visible: npt.NDArray[np.bool_], scale: float) -> Array:
    """By the definition: every head's keys and values, from the latents."""
    n, latents = len(q), rows[:, :RANK]
    heads = q.reshape(n, N_HEAD, -1)
    keys, values = np.einsum("sr,hrd->shd", latents, k_b), np.einsum("sr,hvr->shv", latents, v_b)
    scores = np.einsum("thd,shd->hts", heads[:, :, :D_NOPE], keys)
    scores += np.einsum("thd,sd->hts", heads[:, :, D_NOPE:], rows[:, RANK:])
    weights = softmax(np.where(visible, scores * scale, -np.inf))
    mixed: Array = np.einsum("hts,shv->thv", weights, values)
    return mixed
