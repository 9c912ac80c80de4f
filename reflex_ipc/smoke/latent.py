"""Latent attention: absorbed for a token and for a few, expanded for a long step; of new and of older files."""

from collections.abc import Iterator

import numpy as np

from reflex_ipc import ops
from reflex_ipc.ops import Value
from reflex_ipc.smoke.bench import Bench, Outcome
from reflex_ipc.smoke.layer import Array, Layer, numbers, outcome, softmax, weight

N_HEAD, D_NOPE, D_ROPE, D_V, RANK = 4, 32, 16, 32, 64
EXACT = 3e-5
"""Latents here are exact as halves, and other factors two halves of 11 bits each; of three products one after the other
tensor cores cut sums off at 2^-17 or so."""


def latent(bench: Bench) -> Iterator[Outcome]:
    """store_latent, attention_latent_*, absorb, expand, halve, attention_prefill_exact"""
    n, scale = 80, (D_NOPE + D_ROPE) ** -0.5
    q, rows = numbers(n, N_HEAD * (D_NOPE + D_ROPE), seed=1), numbers(n, RANK + D_ROPE, seed=2)
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
        wanted = _attended(q, rows, k_b, v_b, scale)
        layer = Layer(bench, [op], weights, n_positions=n)
        at = 0
        for size, n_splits, expand in ((5, 0, False), (1, 3, False), (72, 0, True), (2, 0, False)):
            part = slice(at, at + size)
            got = layer.run({"q": q[part], "row": rows[part]}, n_splits, expand=expand)
            yield outcome(got, wanted[part], EXACT)
            at += size


def _attended(q: Array, rows: Array, k_b: Array, v_b: Array, scale: float) -> Array:
    """By the definition: every head's keys and values, from the latents."""
    n, latents = len(q), rows[:, :RANK]
    heads = q.reshape(n, N_HEAD, -1)
    keys, values = np.einsum("sr,hrd->shd", latents, k_b), np.einsum("sr,hvr->shv", latents, v_b)
    scores = np.einsum("thd,shd->hts", heads[:, :, :D_NOPE], keys)
    scores += np.einsum("thd,sd->hts", heads[:, :, D_NOPE:], rows[:, RANK:])
    weights = softmax(np.where(np.tril(np.ones((n, n))) > 0, scores * scale, -np.inf))
    mixed: Array = np.einsum("hts,shv->thv", weights, values)
    return mixed
