"""A delta net as the plans have it, its inputs, and what comes of them in float64."""

import math
from typing import NamedTuple

import numpy as np

from reflex_ipc import ops
from reflex_ipc.cuda.fuse import Group
from reflex_ipc.gguf import TYPES, Tensor
from reflex_ipc.ops import Value
from reflex_ipc.plan import PARENT_NONE, Plan

L2_EPS, NORM_EPS, KERNEL = 1e-6, 1e-5, 4


class Net(NamedTuple):
    n_head_k: int
    n_head_v: int
    d: int
    tiled: bool = True

    @property
    def width(self) -> int:
        return (2 * self.n_head_k + self.n_head_v) * self.d

    def group(self) -> Group:
        n_key, n_value = self.n_head_k * self.d, self.n_head_v * self.d
        x, z = Value("x", self.width), Value("z", n_value)
        alpha, beta = Value("alpha", self.n_head_v), Value("beta", self.n_head_v)
        conv = ops.Conv("conv", Value("conv", self.width), x, "taps", "tail")
        starts = (("q", 0, n_key), ("k", n_key, n_key), ("v", 2 * n_key, n_value))
        q, k, v = (ops.Slice(name, Value(name, n), conv.out, 1, start, n) for name, start, n in starts)
        nq, nk = (
            ops.L2Norm(f"n{part.name}", Value(f"n{part.name}", n_key), part.out, self.n_head_k, L2_EPS)
            for part in (q, k)
        )
        rule = ops.DeltaRule(
            "rule", Value("rule", n_value), nq.out, nk.out, v.out, alpha, beta, "dt", "decay", "matrices",
            self.n_head_k, self.n_head_v, self.tiled,
        )  # fmt: skip
        norm = ops.RmsNorm("norm", Value("norm", n_value), rule.out, "weight", self.n_head_v, NORM_EPS)
        gate = ops.SwiGlu("gate", Value("gate", n_value), z, norm.out)
        return Group("delta", [conv, q, k, nq, nk, v, rule, norm, gate], [gate.out])

    def plan(self) -> Plan:
        parts = self.group().parts
        kind = next(t for t in TYPES.values() if t.name == "F32")
        taps = Tensor("taps", kind, (KERNEL, self.width), 0, 0, 4 * KERNEL * self.width)
        return Plan("delta", parts, (), {"taps": taps}, parts[-1].out, 1, 1, 1, 1, ())


class Data:
    """Inputs, weights and the state before. `hard`: decays of everything, of nothing, and in between."""

    def __init__(self, net: Net, n: int, *, hard: bool = False) -> None:
        rng = np.random.default_rng(n + net.d)

        def normal(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape).astype(np.float32)

        spread = 60 if hard else 1
        self.x, self.z = normal(n, net.width), normal(n, net.n_head_v * net.d)
        self.alpha, self.beta = spread * normal(n, net.n_head_v), spread * normal(n, net.n_head_v)
        self.taps, self.weight = normal(net.width, KERNEL), normal(net.d)
        self.dt, self.decay = normal(net.n_head_v), -np.abs((20 if hard else 0.1) * normal(net.n_head_v))
        self.tail, self.matrices = normal(KERNEL - 1, net.width), normal(net.n_head_v, net.d, net.d)


def expected(net: Net, data: Data, parents: list[int], kept: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outputs, and tail and matrices after the step, in float64."""
    d, n_key = net.d, net.n_head_k * net.d
    x, z, taps, tail = (a.astype(np.float64) for a in (data.x, data.z, data.taps, data.tail))
    out, behind = np.empty_like(z), {-1: data.matrices.astype(np.float64), PARENT_NONE: np.zeros(data.matrices.shape)}
    per_key = net.n_head_v // net.n_head_k
    heads = [h % net.n_head_k if net.tiled else h // per_key for h in range(net.n_head_v)]
    for i, parent in enumerate(parents):
        line, at = [], i
        while len(line) < KERNEL and at >= 0:
            line.append(x[at])
            at = parents[at]
        before = [np.zeros(net.width)] * KERNEL if at == PARENT_NONE else list(tail[::-1])
        c = sum(row * taps[:, KERNEL - 1 - j] for j, row in enumerate((line + before)[:KERNEL]))
        c = c * logistic(c)
        q, k = (c[start : start + n_key].reshape(net.n_head_k, d) for start in (0, n_key))
        q, k = (p / np.sqrt((p**2).sum(axis=1, keepdims=True) + L2_EPS) for p in (q, k))
        q, k, v = q[heads] / math.sqrt(d), k[heads], c[2 * n_key :].reshape(net.n_head_v, d)
        step = np.logaddexp(0, data.alpha[i].astype(np.float64) + data.dt) * data.decay
        s = behind[parent] * np.exp(step)[:, None, None]
        change = logistic(data.beta[i].astype(np.float64))[:, None] * (v - np.einsum("hkv,hk->hv", s, k))
        behind[i] = s = s + k[:, :, None] * change[:, None, :]
        o = np.einsum("hkv,hk->hv", s, q)
        o = o / np.sqrt((o**2).mean(axis=1, keepdims=True) + NORM_EPS) * data.weight
        out[i] = z[i] * logistic(z[i]) * o.reshape(-1)
    return out, np.concatenate([tail, x[:kept]])[-(KERNEL - 1) :], behind[kept - 1]


def logistic(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))
