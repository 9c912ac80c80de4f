"""The ops a plan is a list of: what each computes, and which values, weights and states it names.

Shapes are (rows, width): every activation is a matrix with one row a token, and heads lie side by side in the width.
A weight of `ne` {n_in, n_out} is a NumPy (n_out, n_in) matrix W, and `Linear` is x W^T. A step has T tokens.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast


class Value(NamedTuple):
    """An activation: (T, width) float32, or (rows that want logits, width) where `selected`."""

    name: str
    width: int
    selected: bool = False


class State(NamedTuple):
    """Something a sequence keeps between steps.

    `per_token`: one row of `shape` a token, and a prefix of it can be reused (keys, values, latents). Otherwise `shape`
    is all of it, it holds the whole past, and only an equal past can reuse it (convolution tails, delta-rule states).
    """

    name: str
    shape: tuple[int, ...]
    per_token: bool


class Rope(NamedTuple):
    """Rotary positions: how pairs are formed and what angle a pair turns per position.

    `style` is "norm" for pairs (2i, 2i+1) and "neox" for (i, i + n_rot/2). `freq_scale` is 1/factor of linear or YaRN
    scaling. `n_ctx_orig` > 0 says YaRN. `magnitude` multiplies cosine and sine.
    """

    style: str
    n_rot: int
    freq_base: float
    freq_scale: float = 1.0
    n_ctx_orig: int = 0
    magnitude: float = 1.0

    def frequencies(self) -> list[float]:
        """Radians a position for each of the n_rot/2 pairs: freq_base^(-2i/n_rot), scaled.

        YaRN (arXiv 2309.00071, "NTK-by-parts"): pairs that turn more than 32 times within the original context keep
        their angle, pairs that turn less than once are interpolated, a linear ramp joins the two.
        """
        freqs = [self.freq_base ** (-2.0 * i / self.n_rot) for i in range(self.n_rot // 2)]
        if not self.n_ctx_orig:
            return [f * self.freq_scale for f in freqs]

        def pair_of(turns: float) -> float:
            return self.n_rot * math.log(self.n_ctx_orig / (turns * 2.0 * math.pi)) / (2.0 * math.log(self.freq_base))

        low = max(0, math.floor(pair_of(32.0)))
        high = min(self.n_rot - 1, math.ceil(pair_of(1.0)))
        ramp = [min(1.0, max(0.0, (i - low) / max(0.001, high - low))) for i in range(self.n_rot // 2)]
        return [f * (self.freq_scale * r + (1.0 - r)) for f, r in zip(freqs, ramp, strict=True)]


class Embed(NamedTuple):
    """out[i] = weight[tokens[i]]."""

    name: str
    out: Value
    weight: str


class RmsNorm(NamedTuple):
    """Each of `n_group` equal parts of a row: out = x / sqrt(mean(x^2) + eps) * weight, weight shared by the parts."""

    name: str
    out: Value
    x: Value
    weight: str
    n_group: int
    eps: float


class Linear(NamedTuple):
    """out = x W^T (+ bias)."""

    name: str
    out: Value
    x: Value
    weight: str
    bias: str | None = None


class Rotate(NamedTuple):
    """RoPE on dims [offset, offset + n_rot) of each of `n_head` heads; the others pass. `factors` divide the angles."""

    name: str
    out: Value
    x: Value
    n_head: int
    offset: int
    rope: Rope
    factors: str | None = None


class Attention(NamedTuple):
    """Softmax attention over the state and the step's ancestors, query head h reading head h // (n_head/n_head_kv).

    q (T, n_head * d), k (T, n_head_kv * d), v (T, n_head_kv * d_v), out (T, n_head * d_v). k and v of the tokens that
    are kept are appended to the states `k_state` and `v_state`.
    """

    name: str
    out: Value
    q: Value
    k: Value
    v: Value
    k_state: str
    v_state: str
    n_head: int
    n_head_kv: int
    scale: float


class SwiGlu(NamedTuple):
    """out = silu(gate) * up, with silu(y) = y * sigmoid(y)."""

    name: str
    out: Value
    gate: Value
    up: Value


class Add(NamedTuple):
    """out = a + b."""

    name: str
    out: Value
    a: Value
    b: Value


class Slice(NamedTuple):
    """Columns [start, start + length) of each of `n_group` equal parts of a row, side by side."""

    name: str
    out: Value
    x: Value
    n_group: int
    start: int
    length: int


class Concat(NamedTuple):
    """a and b side by side."""

    name: str
    out: Value
    a: Value
    b: Value


class Gate(NamedTuple):
    """out = x * sigmoid(gate); gate is as wide as x, or one number a row."""

    name: str
    out: Value
    x: Value
    gate: Value


class LatentAttention(NamedTuple):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) over one latent row a token, in absorbed form.

    q (T, n_head * (d_nope + d_rope)), latent (T, rank + d_rope): a token's normalised latent c, then its rotated key
    part, which all heads share. Head h scores position s with scale * ((k_b[h] q_nope) . c_s + q_rope . k_rope_s) and
    mixes v_b[h] (sum of p_s c_s); out (T, n_head * d_v). The latent rows are what the state keeps. `weights` are k_b
    {d_nope, rank, n_head} and v_b {rank, d_v, n_head}, or one kv_b {rank, n_head * (d_nope + d_v)} of older files,
    whose rows are, head by head, k_b's columns and then v_b's rows.
    """

    name: str
    out: Value
    q: Value
    latent: Value
    state: str
    weights: tuple[str, ...]
    n_head: int
    rank: int
    scale: float


class Route(NamedTuple):
    """Which experts a token goes to. out (T, 2 * n_used): their ids, ascending ranks, then their weights.

    p = softmax or sigmoid of the logits; selection is by p + bias, within the `n_group_used` best of `n_group` groups
    of consecutive experts (a group counts by its best, or by the sum of its two best where `top2`); the weights are p
    itself, divided by their sum where `normalise`, times `scale`. Ids are whole numbers in float32.
    """

    name: str
    out: Value
    logits: Value
    bias: str | None
    n_used: int
    gating: str
    n_group: int
    n_group_used: int
    top2: bool
    normalise: bool
    scale: float


class ExpertLinear(NamedTuple):
    """out[:, k] = x_k W[id_k]^T for each of a token's experts; x is one row a token, or a part of it an expert.

    The weight has `ne` {n_in, n_out, n_expert}; out (T, n_used * n_out).
    """

    name: str
    out: Value
    x: Value
    routes: Value
    weight: str


class ExpertSum(NamedTuple):
    """out = sum over a token's experts of weight_k * x_k; x (T, n_used * width)."""

    name: str
    out: Value
    x: Value
    routes: Value


class Conv(NamedTuple):
    """silu of a causal depthwise convolution over a token and its `kernel - 1` ancestors.

    The weight has `ne` {kernel, width}, its last tap for the token itself; before a sequence lie zeros. The state
    keeps the last kernel - 1 inputs.
    """

    name: str
    out: Value
    x: Value
    weight: str
    state: str


class L2Norm(NamedTuple):
    """Each of `n_group` equal parts of a row: out = x / sqrt(sum(x^2) + eps)."""

    name: str
    out: Value
    x: Value
    n_group: int
    eps: float


class DeltaRule(NamedTuple):
    """The gated delta rule (arXiv 2412.06464), one state S (d_k, d_v) a value head, per token:

        S = exp(g) S,  g = softplus(alpha + dt) * decay
        S = S + k (sigmoid(beta) (v - S^T k))^T
        out = S^T q / sqrt(d_k)

    q, k (T, n_head_k * d_k), v, out (T, n_head_v * d_v), alpha, beta (T, n_head_v). Value head h belongs to key head
    h mod n_head_k where `tiled`, else to h // (n_head_v / n_head_k).
    """

    name: str
    out: Value
    q: Value
    k: Value
    v: Value
    alpha: Value
    beta: Value
    dt: str
    decay: str
    state: str
    n_head_k: int
    n_head_v: int
    tiled: bool


class SelectRows(NamedTuple):
    """The rows of the step that want logits."""

    name: str
    out: Value
    x: Value


Op: TypeAlias = (
    Embed
    | RmsNorm
    | L2Norm
    | Linear
    | Rotate
    | Attention
    | LatentAttention
    | Conv
    | DeltaRule
    | SwiGlu
    | Gate
    | Add
    | Slice
    | Concat
    | Route
    | ExpertLinear
    | ExpertSum
    | SelectRows
)


def inputs(op: Op) -> list[Value]:
    """The values an op reads."""
    return [field for key, field in zip(op._fields, op, strict=True) if isinstance(field, Value) and key != "out"]


def weights(op: Op) -> list[str]:
    """The tensors an op reads."""
    names: list[str] = []
    for key, field in zip(op._fields, op, strict=True):
        if key in _WEIGHT_FIELDS:
            if isinstance(field, str):
                names.append(field)
            elif key == "weights":
                names += cast("tuple[str, ...]", field)
    return names


_WEIGHT_FIELDS = frozenset(("weight", "weights", "bias", "factors", "dt", "decay"))


def scope(name: str) -> str:
    """`blk.7` of what belongs to a layer, an op or a tensor; its name of anything else."""
    return ".".join(name.split(".")[:2]) if name.startswith("blk.") else name


def last_uses(ops: Sequence[Op]) -> list[list[str]]:
    """For every op the values that nothing reads after it; the last op's own value stays."""
    last = {op.out.name: i for i, op in enumerate(ops)}
    for i, op in enumerate(ops):
        for value in inputs(op):
            last[value.name] = i
    dead: list[list[str]] = [[] for _ in ops]
    for name, i in last.items():
        if i + 1 < len(ops):
            dead[i].append(name)
    return dead
