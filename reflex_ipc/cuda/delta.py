"""Launches of delta nets: convolution, norms of queries and keys, delta rule. See `families`."""

import math
from struct import Struct

from reflex_ipc import ops

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reflex_ipc.cuda.fuse import Group
    from reflex_ipc.cuda.launch import Launch
    from reflex_ipc.cuda.lower import Lowering
    from reflex_ipc.cuda.places import Shape

LARGEST_KEY = 128  # of the delta rule: kernels/delta.cuh
CHUNK, CHUNK_KEYS, CHUNK_GATES = 16, 16384, 2192  # tokens, bytes of ChunkKeys and ChunkGates: kernels/delta_chunks.cuh
CHUNK_COLUMNS, CHUNK_SHARED = 32, 60192  # of a block, bytes of ChunkMemory
LEAST_CHUNKED = 16
"""Tokens from which on the delta rule of a text goes by chunks."""

_STEP = Struct("<4Q2i")
_DELTA = Struct("<10Q7if")
_DELTA_TOKEN = Struct("<9Q5i3f")


def refusal(op: ops.DeltaRule) -> str | None:
    """Why the kernels cannot run this op, or None."""
    d_k, d_v = _head_widths(op)
    if d_k > LARGEST_KEY or d_k % 4 or d_v % 4:
        return (
            f"has keys of {d_k} and values of {d_v} numbers; the CUDA kernels take multiples of 4, and keys of up "
            f"to {LARGEST_KEY}"
        )
    return None


def scratch_bytes(op: ops.DeltaRule, n_tokens: int) -> int:
    """Room between launches in steps of up to so many tokens."""
    return 4 * n_tokens * 2 * (op.q.width + op.v.width) + _chunk_bytes(op, n_tokens)


def state_bytes(op: ops.DeltaRule) -> int:
    """Of the recurrent state of one layer."""
    return 4 * op.n_head_v * math.prod(_head_widths(op))


def _step(low: "Lowering", state: str, shape: "Shape") -> bytes:
    at, distance = low.places.states[state]
    p = low.places
    return _STEP.pack(p.control, p.parents if shape.is_tree else 0, at, at + distance, shape.n_tokens, 0)


def _conv(low: "Lowering", op: ops.Conv, shape: "Shape") -> "Iterator[Launch]":
    width, kernel = op.x.width, low.plan.weights[op.weight].ne[0]
    arguments = [_step(low, op.state, shape), low.at(op.out), low.at(op.x), low.weight(op.weight), width, kernel]
    yield low.launch("conv", (-(-width // 128), shape.n_tokens, 1), 128, arguments)


def _l2_norm(low: "Lowering", op: ops.L2Norm, shape: "Shape") -> "Iterator[Launch]":
    width = op.x.width // op.n_group
    grid = (shape.n_tokens * op.n_group, 1, 1)
    yield low.launch("l2_norm", grid, low.row_block(width), [low.at(op.out), low.at(op.x), width, op.eps])


def _rule(low: "Lowering", op: ops.DeltaRule, shape: "Shape") -> "Iterator[Launch]":
    q, k, v = (low.at(value) for value in (op.q, op.k, op.v))
    yield from _rule_of(low, op, shape, low.at(op.out), (q, k, v), (op.q.width, op.v.width), low.places.scratch)


def _head_widths(op: ops.DeltaRule) -> tuple[int, int]:
    """Numbers of a key and of a value."""
    return op.q.width // op.n_head_k, op.v.width // op.n_head_v


def _chunk_bytes(op: ops.DeltaRule, n_tokens: int) -> int:
    """What the delta rule of a text needs of scratch."""
    return -(-n_tokens // CHUNK) * (op.n_head_k * CHUNK_KEYS + op.n_head_v * CHUNK_GATES)


def _rule_of(
    low: "Lowering",
    op: ops.DeltaRule,
    shape: "Shape",
    out: int,
    qkv: tuple[int, int, int],
    strides: tuple[int, int],
    scratch: int,
) -> "Iterator[Launch]":
    d_k, d_v = _head_widths(op)
    arguments = _step(low, op.state, shape) + _DELTA.pack(
        out,
        *qkv,
        low.at(op.alpha),
        low.at(op.beta),
        low.weight(op.dt),
        low.weight(op.decay),
        low.places.branches,
        scratch,
        op.n_head_k,
        op.n_head_v,
        d_k,
        d_v,
        op.tiled,
        *strides,
        d_k**-0.5,
    )
    if shape.n_tokens >= LEAST_CHUNKED and not shape.is_tree:
        chunks = -(-shape.n_tokens // CHUNK)
        yield low.launch("delta_prepare", (chunks, op.n_head_v, 1), 128, [arguments])
        grid = (op.n_head_v, -(-d_v // CHUNK_COLUMNS), 1)
        yield low.launch("delta_chunks", grid, 8 * CHUNK_COLUMNS, [arguments], CHUNK_SHARED)
        return
    compiled = next(n for n in (32, 64, 128) if n >= d_k)
    kernel = f"delta_{'tree' if shape.is_tree else 'rule'}_{compiled}"
    columns = 2048 // compiled  # of a block
    yield low.launch(kernel, (op.n_head_v, -(-d_v // columns), 1), 128, [arguments])


def _group(low: "Lowering", group: "Group", shape: "Shape") -> "Iterator[Launch]":
    """The whole of a delta net between its products: one launch for a token, three or four for more."""
    conv, _, _, l2, _, _, rule, norm, gate = group.parts
    d, _ = _head_widths(rule)
    taps, kernel = low.weight(conv.weight), low.plan.weights[conv.weight].ne[0]
    if shape.n_tokens == 1 and not shape.is_tree:
        data = _step(low, conv.state, shape) + _step(low, rule.state, shape)
        data += _DELTA_TOKEN.pack(
            low.at(gate.out),
            low.at(conv.x),
            taps,
            low.at(rule.alpha),
            low.at(rule.beta),
            low.weight(rule.dt),
            low.weight(rule.decay),
            low.weight(norm.weight),
            low.at(gate.gate),
            rule.n_head_k,
            rule.n_head_v,
            d,
            kernel,
            rule.tiled,
            l2.eps,
            norm.eps,
            d**-0.5,
        )
        yield low.launch("delta_token", (rule.n_head_v, 1, 1), 512, [data])
        return
    n, n_key, width = shape.n_tokens, rule.q.width, conv.x.width
    qkv = low.places.scratch
    mixed = qkv + 4 * n * width
    step, heads = _step(low, conv.state, shape), 2 * rule.n_head_k
    arguments = [step, qkv, low.at(conv.x), taps, width, kernel, d, heads, l2.eps]
    yield low.launch("conv_heads", (-(-n // 8), heads + rule.n_head_v, 1), 256, arguments)
    q, k, v = (qkv + 4 * start for start in (0, n_key, 2 * n_key))
    chunks = mixed + 4 * n * rule.v.width
    yield from _rule_of(low, rule, shape, mixed, (q, k, v), (width, width), chunks)
    rows = n * rule.n_head_v
    arguments = [low.at(gate.out), mixed, low.at(gate.gate), low.weight(norm.weight), rows, d, norm.eps]
    yield low.launch("norm_gate", (-(-rows // 8), 1, 1), 256, arguments)


METHODS: "dict[type | str, Callable[..., Iterator[Launch]]]" = {
    ops.Conv: _conv,
    ops.L2Norm: _l2_norm,
    ops.DeltaRule: _rule,
    "delta": _group,
}
