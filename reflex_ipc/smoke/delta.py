"""Delta nets: a token, a text by chunks and by tokens, a tree; as one group and op by op."""

from collections.abc import Iterator, Sequence

import numpy as np

from reflex_ipc import ops
from reflex_ipc.ops import Value
from reflex_ipc.plan import PARENT_NONE, PARENT_STATE
from reflex_ipc.smoke.bench import Bench, Outcome
from reflex_ipc.smoke.layer import Array, Layer, float_weight, numbers, outcome, rms, sigmoid, weight

SUMS = 1e-5
"""Float32 sums of up to 128 products, through as many steps as there are tokens."""
KERNEL = 4
EPS = 0.01
"""Large, so that it counts."""
N_KEY, N_VALUE = 2, 4
"""Heads."""


def delta(bench: Bench) -> Iterator[Outcome]:
    """conv, conv_heads, l2_norm, delta_token, delta_rule_*, delta_prepare, delta_chunks, delta_tree_*, norm_gate"""
    for d in (32, 64, 128):
        for fused in ("delta", ""):
            yield from _net(bench, d, fused, tiled=d != 64)


def _net(bench: Bench, d: int, fused: str, *, tiled: bool) -> Iterator[Outcome]:
    steps, tree = (35, 5, 1), [PARENT_STATE, 0, 1, 1, PARENT_NONE, 4]
    n = sum(steps) + len(tree)
    n_key, n_value = N_KEY * d, N_VALUE * d
    width = 2 * n_key + n_value
    widths = {"x": width, "z": n_value, "alpha": N_VALUE, "beta": N_VALUE}
    inputs = {name: numbers(n, each, seed=i) for i, (name, each) in enumerate(widths.items())}
    weights = {
        "taps": weight("F32", KERNEL, width, seed=5),
        "norm": weight("F32", d, seed=6),
        "dt": weight("F32", N_VALUE, seed=7),
        "decay": weight("F32", N_VALUE, seed=8),
    }
    weights["decay"] = float_weight(-np.abs(weights["decay"].values))
    x, z, alpha, beta = (Value(name, each) for name, each in widths.items())
    conv = ops.Conv("conv", Value("conv", width), x, "taps", "tail")
    q, k, v = (
        ops.Slice(name, Value(name, size), conv.out, 1, start, size)
        for name, start, size in (("q", 0, n_key), ("k", n_key, n_key), ("v", 2 * n_key, n_value))
    )
    unit_q, unit_k = (
        ops.L2Norm(f"{part.name}_norm", Value(f"{part.name}_norm", n_key), part.out, N_KEY, EPS) for part in (q, k)
    )
    rule = ops.DeltaRule(
        *("rule", Value("rule", n_value), unit_q.out, unit_k.out, v.out, alpha, beta),
        *("dt", "decay", "matrices", N_KEY, N_VALUE, tiled),
    )
    norm = ops.RmsNorm("rule_norm", Value("rule_norm", n_value), rule.out, "norm", N_VALUE, EPS)
    gate = ops.SwiGlu("out", Value("out", n_value), z, norm.out)
    op_list: list[ops.Op] = [conv, q, k, unit_q, unit_k, v, rule, norm, gate]
    states = {"tail": (KERNEL - 1) * width, "matrices": N_VALUE * d * d}
    layer = Layer(bench, op_list, weights, fused=fused, states=states)
    past = n - len(tree)
    parents = [*range(-1, past - 1), *(past + p if p >= 0 else past - 1 if p == PARENT_STATE else p for p in tree)]
    wanted = _expected(inputs, {name: each.values for name, each in weights.items()}, parents, d, tiled)
    at = 0
    for size in steps:
        yield outcome(layer.run({i: rows[at : at + size] for i, rows in inputs.items()}), wanted[at : at + size], SUMS)
        at += size
    yield outcome(layer.run({i: rows[at:] for i, rows in inputs.items()}, tree=tree), wanted[at:], SUMS)


def _expected(inputs: dict[str, Array], w: dict[str, Array], parents: Sequence[int], d: int, tiled: bool) -> Array:
    """Token by token: the convolution over a token and its ancestors, the state behind its parent, the rule."""
    out, n_key = np.empty_like(inputs["z"]), N_KEY * d
    behind: dict[int, Array] = {}
    for i, parent in enumerate(parents):
        mixed, at = np.zeros(inputs["x"].shape[1]), i
        for tap in range(KERNEL - 1, -1, -1):
            if at >= 0:
                mixed += inputs["x"][at] * w["taps"][:, tap]
                at = parents[at]
        mixed *= sigmoid(mixed)
        q, k = (part.reshape(N_KEY, d) for part in (mixed[:n_key], mixed[n_key : 2 * n_key]))
        q, k = (part / np.sqrt((part**2).sum(axis=1, keepdims=True) + EPS) for part in (q, k))
        heads = [h % N_KEY if tiled else h // (N_VALUE // N_KEY) for h in range(N_VALUE)]
        q, k, v = q[heads] / np.sqrt(d), k[heads], mixed[2 * n_key :].reshape(N_VALUE, d)
        state = behind[parent] if parent >= 0 else np.zeros((N_VALUE, d, d))
        state = state * np.exp(np.log1p(np.exp(inputs["alpha"][i] + w["dt"])) * w["decay"])[:, None, None]
        change = sigmoid(inputs["beta"][i])[:, None] * (v - np.einsum("hkv,hk->hv", state, k))
        behind[i] = state = state + k[:, :, None] * change[:, None, :]
        normed = rms(np.einsum("hkv,hk->hv", state, q), EPS) * w["norm"]
        out[i] = inputs["z"][i] * sigmoid(inputs["z"][i]) * normed.reshape(-1)
    return out
