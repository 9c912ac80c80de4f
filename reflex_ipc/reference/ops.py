"""What every op means, in NumPy: the oracle of the CUDA kernels and the arithmetic of the CPU backend.

One function an op, taking the op and the `Run` it is part of, returning its value: a float32 matrix with one row a
token. Naive on purpose; the formulas are in `reflex_ipc.ops`, next to the ops.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from reflex_ipc import ops
from reflex_ipc.errors import Watch
from reflex_ipc.plan import PARENT_NONE, Step
from reflex_ipc.reference.blocks import Block, blocks, by_rows, product
from reflex_ipc.reference.weights import Weights

Array = npt.NDArray[np.float32]


class States:
    """What a sequence keeps: one array a state, `n_past` rows of it in use where it grows by the token."""

    def __init__(self, states: tuple[ops.State, ...]) -> None:
        self.arrays = {s.name: np.zeros((0, *s.shape) if s.per_token else s.shape, np.float32) for s in states}
        self.n_past = 0
        self.n_reserved = 0
        self._states = states

    def reserve(self, n_tokens: int) -> None:
        """Room for `n_tokens`; what is there stays."""
        if n_tokens <= self.n_reserved:
            return
        for s in self._states:
            if s.per_token:
                grown = np.empty((n_tokens, *s.shape), np.float32)
                grown[: self.n_past] = self.arrays[s.name][: self.n_past]
                self.arrays[s.name] = grown
        self.n_reserved = n_tokens

    def reset(self) -> None:
        self.n_past = 0
        for s in self._states:
            if not s.per_token:
                self.arrays[s.name][:] = 0.0


class Run:
    """One step under way: the values computed so far, and what the step's shape says about who sees whom. `watch` is
    called inside whatever takes long."""

    def __init__(self, step: Step, weights: Weights, states: States, watch: Watch | None = None) -> None:
        self.step = step
        self.weights = weights
        self.states = states
        self.watch = watch or Watch(None)
        self.n_past = states.n_past
        self.values: dict[str, Array] = {}
        self._blocks: dict[int, list[Block]] = {}

    def __getitem__(self, value: ops.Value) -> Array:
        return self.values[value.name]

    def blocks(self, n_head: int) -> list[Block]:
        """The step's tokens with what they see, for attention by `n_head` heads at once."""
        if n_head not in self._blocks:
            self._blocks[n_head] = blocks(self.step, self.n_past, n_head)
        return self._blocks[n_head]

    def part(self, start: int, stop: int) -> "Part":
        return Part(self, start, stop)


class Part(Run):
    """Some rows of a run, for ops whose rows know nothing of each other."""

    def __init__(self, run: Run, start: int, stop: int) -> None:
        step = run.step
        few = step._replace(tokens=step.tokens[start:stop], positions=step.positions[start:stop])
        super().__init__(few, run.weights, run.states, run.watch)
        self._whole, self._rows = run, slice(start, stop)

    def __getitem__(self, value: ops.Value) -> Array:
        return self._whole[value][self._rows]


def embed(op: ops.Embed, run: Run) -> Array:
    return run.weights.rows(op.weight, run.step.tokens)


def rms_norm(op: ops.RmsNorm, run: Run) -> Array:
    x = run[op.x]
    x = x.reshape(len(x), op.n_group, -1)
    mean = np.mean(np.square(x), axis=-1, keepdims=True)
    out: Array = x / np.sqrt(mean + np.float32(op.eps)) * run.weights[op.weight]
    return out.reshape(len(x), -1)


def linear(op: ops.Linear, run: Run) -> Array:
    out = product(run[op.x], run.weights[op.weight], run.watch)
    if op.bias is not None:
        out += run.weights[op.bias]
    return out


def rotate(op: ops.Rotate, run: Run) -> Array:
    rope = op.rope
    frequencies = np.array(rope.frequencies())
    if op.factors is not None:
        frequencies = frequencies / run.weights[op.factors]
    # Angles grow with the position; float32 would lose their fraction in long contexts.
    angles = np.array(run.step.positions, np.float64)[:, None] * frequencies
    cos = (np.cos(angles) * rope.magnitude).astype(np.float32)[:, None, :]
    sin = (np.sin(angles) * rope.magnitude).astype(np.float32)[:, None, :]
    x = run[op.x]
    out = x.reshape(len(x), op.n_head, -1).copy()
    part = out[:, :, op.offset : op.offset + rope.n_rot]
    if rope.style == "norm":
        first, second = part[:, :, 0::2], part[:, :, 1::2]
    else:
        first, second = part[:, :, : rope.n_rot // 2], part[:, :, rope.n_rot // 2 :]
    a, b = first.copy(), second.copy()
    first[:] = a * cos - b * sin
    second[:] = a * sin + b * cos
    return out.reshape(x.shape)


def attention(op: ops.Attention, run: Run) -> Array:
    n_tokens, past = len(run.step.tokens), run.n_past
    group = op.n_head // op.n_head_kv
    q = run[op.q].reshape(n_tokens, op.n_head_kv, group, -1)
    keys = _extend(run, op.k_state, run[op.k]).reshape(past + n_tokens, op.n_head_kv, -1)
    values = _extend(run, op.v_state, run[op.v]).reshape(past + n_tokens, op.n_head_kv, -1)
    out = np.empty((n_tokens, op.n_head_kv, group, values.shape[-1]), np.float32)
    for block in run.blocks(group):
        rows = slice(block.start, block.stop)
        for h in range(op.n_head_kv):
            # (rows, heads of this group, columns)
            scores = q[rows, h] @ keys[block.columns, h].T * np.float32(op.scale)
            block.hide(scores)
            out[rows, h] = softmax(scores) @ values[block.columns, h]
            run.watch()
    return out.reshape(n_tokens, -1)


def _extend(run: Run, name: str, rows: Array) -> Array:
    """The state's rows with this step's behind them; those of the tokens that are kept are stored in passing."""
    array, past, n_keep = run.states.arrays[name], run.n_past, run.step.n_keep
    array[past : past + n_keep] = rows[:n_keep]
    if n_keep == len(rows):
        return array[: past + n_keep]
    return np.concatenate([array[:past], rows])


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    out: Array = e / e.sum(axis=-1, keepdims=True)
    return out


def sigmoid(x: Array) -> Array:
    # exp only of what is not positive, so that nothing overflows.
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1 / (1 + e), e / (1 + e)).astype(np.float32)


def swiglu(op: ops.SwiGlu, run: Run) -> Array:
    gate = run[op.gate]
    return gate * sigmoid(gate) * run[op.up]


def add(op: ops.Add, run: Run) -> Array:
    return run[op.a] + run[op.b]


def slice_(op: ops.Slice, run: Run) -> Array:
    x = run[op.x]
    x = x.reshape(len(x), op.n_group, -1)
    return x[:, :, op.start : op.start + op.length].reshape(len(x), -1)


def concat(op: ops.Concat, run: Run) -> Array:
    return np.concatenate([run[op.a], run[op.b]], axis=1)


def gate(op: ops.Gate, run: Run) -> Array:
    return run[op.x] * sigmoid(run[op.gate])


def latent_attention(op: ops.LatentAttention, run: Run) -> Array:
    q = run[op.q].reshape(len(run.step.tokens), op.n_head, -1)
    rows = _extend(run, op.state, run[op.latent])
    d_nope = q.shape[2] - (op.latent.width - op.rank)
    if len(op.weights) == 2:
        k_b, v_b = (run.weights[name] for name in op.weights)  # (n_head, rank, d_nope), (n_head, d_v, rank)
    else:
        kv_b = run.weights[op.weights[0]].reshape(op.n_head, -1, op.rank)
        k_b, v_b = kv_b[:, :d_nope].transpose(0, 2, 1), kv_b[:, d_nope:]
    out = np.empty((len(q), op.n_head, v_b.shape[1]), np.float32)
    for block in run.blocks(1):
        some, seen = slice(block.start, block.stop), rows[block.columns]
        for h in range(op.n_head):
            absorbed = np.concatenate([q[some, h, :d_nope] @ k_b[h].T, q[some, h, d_nope:]], axis=1)
            scores = absorbed @ seen.T * np.float32(op.scale)
            block.hide(scores)
            out[some, h] = softmax(scores) @ seen[:, : op.rank] @ v_b[h].T
            run.watch()
    return out.reshape(len(q), -1)


def route(op: ops.Route, run: Run) -> Array:
    logits = run[op.logits]
    p = softmax(logits) if op.gating == "softmax" else sigmoid(logits)
    selection = p if op.bias is None else p + run.weights[op.bias]
    # Else an expert that can never be chosen, or always is, would go unseen.
    is_whole = (np.isfinite(logits) & np.isfinite(selection)).all(axis=-1, keepdims=True)
    p = np.where(is_whole, p, np.float32(np.nan))
    if op.n_group > 1:
        groups = selection.reshape(len(p), op.n_group, -1)
        best = -np.sort(-groups, axis=-1)
        score = best[:, :, :2].sum(axis=-1) if op.top2 else best[:, :, 0]
        used = np.argsort(-score, axis=-1, kind="stable")[:, : op.n_group_used]
        masked = np.full_like(groups, -np.inf)
        np.put_along_axis(masked, used[:, :, None], np.take_along_axis(groups, used[:, :, None], axis=1), axis=1)
        selection = masked.reshape(p.shape)
    ids = np.argsort(-selection, axis=-1, kind="stable")[:, : op.n_used]
    weights = np.take_along_axis(p, ids, axis=-1)
    if op.normalise:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + np.float32(1e-20))
    return np.concatenate([ids.astype(np.float32), weights * np.float32(op.scale)], axis=1)


def expert_linear(op: ops.ExpertLinear, run: Run) -> Array:
    n_used = op.routes.width // 2
    ids = run[op.routes][:, :n_used].astype(np.int64)
    weight = run.weights[op.weight]  # (n_expert, n_out, n_in)
    x = run[op.x].reshape(len(ids), -1, weight.shape[2])
    x = np.broadcast_to(x, (len(ids), n_used, weight.shape[2]))
    out = np.empty((len(ids), n_used, weight.shape[1]), np.float32)
    for expert in np.unique(ids):
        chosen = ids == expert
        out[chosen] = product(x[chosen], weight[expert], run.watch)
        run.watch()
    return out.reshape(len(ids), -1)


def expert_sum(op: ops.ExpertSum, run: Run) -> Array:
    n_used = op.routes.width // 2
    x = run[op.x].reshape(len(run[op.x]), n_used, -1)
    out: Array = (x * run[op.routes][:, n_used:, None]).sum(axis=1)
    return out


def conv(op: ops.Conv, run: Run) -> Array:
    x, step = run[op.x], run.step
    taps = run.weights[op.weight]  # (width, kernel)
    kernel = taps.shape[1]
    tail = run.states.arrays[op.state]  # (kernel - 1, width), oldest first
    # Rows before the step: the state's tail for what continues it, zeros for what begins anew.
    zeros = np.zeros_like(tail)
    out = np.zeros_like(x)
    for i in range(len(x)):
        line: list[Array] = []
        at = i
        while len(line) < kernel and at >= 0:
            line.append(x[at])
            at = step.parents[at]
        missing = kernel - len(line)
        if missing:
            before = zeros if at == PARENT_NONE else tail
            line += list(before[::-1][:missing])
        out[i] = np.einsum("kc,ck->c", np.stack(line[::-1]), taps)
        run.watch()
    if step.n_keep:
        tail[:] = np.concatenate([tail, x[: step.n_keep]])[-(kernel - 1) :]
    return out * sigmoid(out)


def l2_norm(op: ops.L2Norm, run: Run) -> Array:
    x = run[op.x]
    x = x.reshape(len(x), op.n_group, -1)
    out: Array = x / np.sqrt(np.sum(np.square(x), axis=-1, keepdims=True) + np.float32(op.eps))
    return out.reshape(len(x), -1)


def delta_rule(op: ops.DeltaRule, run: Run) -> Array:
    step, n = run.step, len(run.step.tokens)
    q, k = (run[x].reshape(n, op.n_head_k, -1) for x in (op.q, op.k))
    v = run[op.v].reshape(n, op.n_head_v, -1)
    per_key = op.n_head_v // op.n_head_k
    head = [h % op.n_head_k if op.tiled else h // per_key for h in range(op.n_head_v)]
    q, k = q[:, head] / np.float32(np.sqrt(q.shape[2])), k[:, head]
    softplus = np.logaddexp(np.float32(0.0), run[op.alpha] + run.weights[op.dt])
    decay = np.exp(softplus * run.weights[op.decay])
    beta = sigmoid(run[op.beta])
    kept = run.states.arrays[op.state]  # (n_head_v, d_k, d_v)
    # The state behind each token that something still continues.
    last_child = {parent: i for i, parent in enumerate(step.parents) if parent >= 0}
    behind: dict[int, Array] = {}
    after = kept
    out = np.empty_like(v)
    for i, parent in enumerate(step.parents):
        if parent >= 0:
            s = behind[parent]
            if last_child[parent] == i:
                del behind[parent]
        else:
            s = np.zeros_like(kept) if parent == PARENT_NONE else kept
        s = s * decay[i][:, None, None]
        memory = np.einsum("hkv,hk->hv", s, k[i])
        s = s + k[i][:, :, None] * (beta[i][:, None] * (v[i] - memory))[:, None, :]
        out[i] = np.einsum("hkv,hk->hv", s, q[i])
        if i in last_child:
            behind[i] = s
        if i == step.n_keep - 1:
            after = s
        run.watch()
    if after is not kept:
        kept[:] = after
    return out.reshape(n, -1)


def select_rows(op: ops.SelectRows, run: Run) -> Array:
    return run[op.x][list(run.step.rows)]


FUNCTIONS: dict[type, Callable[[Any, Run], Array]] = {
    ops.Embed: by_rows(embed),
    ops.RmsNorm: by_rows(rms_norm),
    ops.Linear: linear,
    ops.Rotate: by_rows(rotate),
    ops.Attention: attention,
    ops.SwiGlu: by_rows(swiglu),
    ops.Add: by_rows(add),
    ops.Slice: by_rows(slice_),
    ops.Concat: by_rows(concat),
    ops.Gate: by_rows(gate),
    ops.LatentAttention: latent_attention,
    ops.Route: by_rows(route),
    ops.ExpertLinear: expert_linear,
    ops.ExpertSum: by_rows(expert_sum),
    ops.Conv: conv,
    ops.L2Norm: by_rows(l2_norm),
    ops.DeltaRule: delta_rule,
    ops.SelectRows: select_rows,
}
