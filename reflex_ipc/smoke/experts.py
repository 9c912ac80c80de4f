"""Experts: whole layers with their routers, and products of every type, of few tokens and of many."""

from collections.abc import Iterator

import numpy as np

from reflex_ipc import ops
from reflex_ipc.cuda.experts import UNGROUPED
from reflex_ipc.ops import Value
from reflex_ipc.smoke.bench import Bench, Outcome
from reflex_ipc.smoke.layer import Array, Layer, Weight, float_weight, numbers, outcome, sigmoid, softmax, weight
from reflex_ipc.smoke.matrices import KINDS, ONE_ROW

TWO_HALVES = 1e-5
"""Grouped products take x and quantised weights as two halves, 22 bits; tensor cores cut sums off at about as many."""
N_EXPERT, N_USED, WIDTH, N_FF = 8, 2, 256, 256


def layers(bench: Bench) -> Iterator[Outcome]:
    """route, group_experts, grouped_TYPE, matvec_TYPE, swiglu, expert_sum: few tokens, and so many that an expert has
    several; router by softmax, by softmax with groups, and by sigmoid with a bias and groups that count by two"""
    rows = 4 * numbers(20, N_EXPERT, seed=1) + np.arange(N_EXPERT) / 512  # no two alike
    bias = float_weight(numbers(N_EXPERT, seed=2) / 4)
    logits, routes = Value("logits", N_EXPERT), Value("routes", 2 * N_USED)
    for gating, groups, top2, normalise in (
        ("softmax", (1, 1), False, True),
        ("softmax", (4, 2), False, False),
        ("sigmoid", (2, 1), True, True),
    ):
        name = "bias" if top2 else None
        op = ops.Route("routes", routes, logits, name, N_USED, gating, *groups, top2, normalise, 2.5)
        wanted = _routed(op, rows, bias.values if top2 else np.zeros(N_EXPERT))
        yield outcome(Layer(bench, [op], {"bias": bias}).run({"logits": rows}), wanted, 1e-6)
        if normalise:
            yield from _layer(bench, op, wanted, rows, bias)


def _layer(bench: Bench, route: ops.Route, routes: Array, logits: Array, bias: Weight) -> Iterator[Outcome]:
    kind, down_kind = ("Q4_K", "Q6_K") if route.bias else ("F16", "Q8_0")
    weights = {
        "bias": bias,
        "gate": weight(kind, WIDTH, N_FF, N_EXPERT, seed=3),
        "up": weight(kind, WIDTH, N_FF, N_EXPERT, seed=4),
        "down": weight(down_kind, N_FF, WIDTH, N_EXPERT, seed=5),
    }
    x, many = Value("x", WIDTH), N_USED * N_FF
    gate, up = (ops.ExpertLinear(name, Value(name, many), x, route.out, name) for name in ("gate", "up"))
    act = ops.SwiGlu("act", Value("act", many), gate.out, up.out)
    down = ops.ExpertLinear("down", Value("down", N_USED * WIDTH), act.out, route.out, "down")
    op_list: list[ops.Op] = [route, gate, up, act, down, ops.ExpertSum("out", Value("out", WIDTH), down.out, route.out)]
    rows = numbers(len(logits), WIDTH, seed=6) / 8
    ids, parts = np.split(routes, 2, axis=1)
    chosen = ids.astype(int)
    wide, over = (np.einsum("tkoi,ti->tko", weights[name].values[chosen], rows) for name in ("gate", "up"))
    wanted = np.einsum("tk,tkoi,tki->to", parts, weights["down"].values[chosen], wide * sigmoid(wide) * over)
    for n, bound in ((3, 4 * ONE_ROW), (len(rows), 4 * TWO_HALVES)):  # three products of which two are multiplied
        for fused in ("experts", ""):
            layer = Layer(bench, op_list, weights, fused=fused)
            yield outcome(layer.run({"logits": logits[:n], "x": rows[:n]}), wanted[:n], bound)


def _routed(op: ops.Route, logits: Array, bias: Array) -> Array:
    """Ids and weights, token by token, as `ops.Route` has it."""
    found = []
    for row in sigmoid(logits) if op.gating == "sigmoid" else softmax(logits):
        choice = (row + bias).reshape(op.n_group, -1)
        by_group = np.sort(choice, axis=1)[:, -2 if op.top2 else -1 :].sum(axis=1)
        choice[np.argsort(-by_group)[op.n_group_used :]] = -np.inf
        ids = np.argsort(-choice.reshape(-1))[: op.n_used]
        found.append([*ids, *(op.scale * row[ids] / (row[ids].sum() if op.normalise else 1.0))])
    return np.array(found, np.float64)


def types(bench: Bench) -> Iterator[Outcome]:
    """matvec_TYPE and grouped_TYPE, by themselves"""
    rng = np.random.default_rng(7)
    n, n_out = 20, 24
    ids = np.stack([rng.permutation(4)[:N_USED] for _ in range(n)])
    routes = np.concatenate([ids, np.ones((n, N_USED))], axis=1)
    x = numbers(n, WIDTH, seed=8)
    for kind in KINDS:
        w = weight(kind, WIDTH, n_out, 4, seed=9)
        op = ops.ExpertLinear(
            "out", Value("out", N_USED * n_out), Value("x", WIDTH), Value("routes", routes.shape[1]), "w"
        )
        wanted = np.einsum("tkoi,ti->tko", w.values[ids], x)
        for count, bound in ((2, ONE_ROW), (n, ONE_ROW if kind in UNGROUPED else TWO_HALVES)):
            layer = Layer(bench, [op], {"w": w})
            yield outcome(layer.run({"x": x[:count], "routes": routes[:count]}), wanted[:count], bound)
