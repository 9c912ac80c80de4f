"""Launches of the ops that only some families have: experts, delta nets, latent attention. See `lower`.

Each function takes the lowering, an op and the step's shape, and yields the op's launches.
"""

import math
from struct import Struct

from reflex_ipc import ops
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.products import Experts, Input, Matrix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from reflex_ipc.cuda.fuse import Group
    from reflex_ipc.cuda.launch import Launch
    from reflex_ipc.cuda.lower import Lowering
    from reflex_ipc.cuda.places import Shape
    from reflex_ipc.gguf import Tensor
    from reflex_ipc.plan import Plan

LARGEST_KEY = 128  # of the delta rule: kernels/delta.cuh
CHUNK, CHUNK_KEYS, CHUNK_GATES = 16, 16384, 2192  # tokens, bytes of ChunkKeys and ChunkGates: kernels/delta_chunks.cuh
CHUNK_COLUMNS, CHUNK_SHARED = 32, 60192  # of a block, bytes of ChunkMemory
LEAST_CHUNKED = 16
"""Tokens from which on the delta rule of a text goes by chunks."""
ABSORBED = 64
"""Tokens up to which latent attention of a step is absorbed: cuda/latent.py says why."""
SHARING = 4
"""Heads of a block of absorbed attention where there are many: kernels/latent.cu."""

_ROUTE = Struct("<3Q7if")
_STEP = Struct("<4Q2i")
_DELTA = Struct("<10Q7if")
_DELTA_TOKEN = Struct("<9Q5i3f")


def refusal(plan: "Plan", op: "Any") -> str | None:
    """Why the kernels cannot run this op, or None."""
    if isinstance(op, ops.DeltaRule):
        d_k, d_v = _head_widths(op)
        if d_k > LARGEST_KEY or d_k % 4 or d_v % 4:
            return (
                f"has keys of {d_k} and values of {d_v} numbers; the CUDA kernels take multiples of 4, and keys of up "
                f"to {LARGEST_KEY}"
            )
    if isinstance(op, ops.LatentAttention):
        from reflex_ipc.cuda import latent

        return latent.refusal(op)
    return None


def before_routers(plan: "Plan") -> frozenset[str]:
    """The values that a router may still depend on: all before the last one. Half-precision products would tip close
    decisions between experts, and a whole model then computes something else."""
    routers = [i for i, op in enumerate(plan.ops) if isinstance(op, ops.Route)]
    return frozenset(op.out.name for op in plan.ops[: routers[-1]]) if routers else frozenset()


def scratch_bytes(plan: "Plan", n_tokens: int, n_expanded: int = 0) -> int:
    """Room that products of experts need, latent attention and delta nets between their launches; `n_expanded` as in
    `places.Shape`."""
    need = between_experts = for_experts = 0
    for op in plan.ops:
        if isinstance(op, ops.ExpertLinear):
            tensor = plan.weights[op.weight]
            per_expert = op.x.width != tensor.ne[0]
            size = expert_scratch(tensor, n_tokens, experts_of(plan, op), per_expert=per_expert)
            for_experts = max(for_experts, size)
            between_experts = max(between_experts, sum(_between_experts(op, n_tokens)))
        elif isinstance(op, ops.LatentAttention):
            from reflex_ipc.cuda import latent

            need = max(need, latent.scratch_bytes(plan, op, n_tokens, n_expanded))
        elif isinstance(op, ops.DeltaRule):
            need = max(need, 4 * n_tokens * 2 * (op.q.width + op.v.width) + _chunk_bytes(op, n_tokens))
    return max(need, between_experts + for_experts)


def expert_scratch(tensor: "Tensor", n_tokens: int, experts: Experts, *, per_expert: bool) -> int:
    from reflex_ipc.cuda.experts import expert_scratch_bytes

    return expert_scratch_bytes(n_tokens, tensor.ne[0], tensor.type.name, experts, per_expert=per_expert)


def _between_experts(down: ops.ExpertLinear, n_tokens: int) -> tuple[int, int]:
    """Bytes of what goes into experts' last product, and of what comes out of it."""
    return aligned(4 * n_tokens * down.x.width), aligned(4 * n_tokens * down.out.width)


def experts_of(plan: "Plan", op: ops.ExpertLinear, ids: int = 0) -> Experts:
    tensor = plan.weights[op.weight]
    n_expert = tensor.ne[2]
    return Experts(ids, op.routes.width, op.routes.width // 2, tensor.nbytes // n_expert, n_expert)


def branch_bytes(plan: "Plan", n_tokens: int) -> int:
    """Room for the recurrent states behind every token of a tree, of one layer at a time."""
    sizes = (op.n_head_v * math.prod(_head_widths(op)) for op in plan.ops if isinstance(op, ops.DeltaRule))
    return 4 * n_tokens * max(sizes, default=0)


def latents(plan: "Plan") -> list[ops.LatentAttention]:
    return [op for op in plan.ops if isinstance(op, ops.LatentAttention)]


def can_expand(plan: "Plan") -> bool:
    """Whether there are latents, and kernels that expand them."""
    found = latents(plan)
    if not found:
        return False
    from reflex_ipc.cuda import latent

    return any(map(latent.can_expand, found))


# Experts


def route(low: "Lowering", op: ops.Route, shape: "Shape") -> "Iterator[Launch]":
    n_expert = op.logits.width
    arguments = _ROUTE.pack(
        low.at(op.out),
        low.at(op.logits),
        low.weight(op.bias) if op.bias else 0,
        n_expert,
        op.n_used,
        op.n_group,
        op.n_group_used,
        op.gating == "softmax",
        op.top2,
        op.normalise,
        op.scale,
    )
    shared = 4 * (2 * n_expert + op.n_group)
    yield low.launch("route", (shape.n_tokens, 1, 1), 32, [arguments], shared)


def expert_linear(low: "Lowering", op: ops.ExpertLinear, shape: "Shape") -> "Iterator[Launch]":
    matrix, experts = matrix_of(low, op, low.at(op.out)), experts_of(low.plan, op, low.at(op.routes))
    n_in = low.plan.weights[op.weight].ne[0]
    entry = Input(low.at(op.x), shape.n_tokens, n_in, op.x.width)
    yield from expert_launches(low, entry, [matrix], experts, low.places.scratch, per_expert=op.x.width != n_in)


def matrix_of(low: "Lowering", op: ops.ExpertLinear, out: int) -> Matrix:
    """Of its first expert."""
    tensor = low.plan.weights[op.weight]
    return Matrix(tensor.type.name, low.weight(op.weight), tensor.ne[1], out, tensor.ne[1])


def expert_launches(
    low: "Lowering",
    entry: Input,
    matrices: "Sequence[Matrix]",
    experts: Experts,
    scratch: int,
    *,
    per_expert: bool,
    is_grouped: bool = False,
) -> "Iterator[Launch]":
    """A row of `matrix.out` is what one expert computes for one token; rows lie `out_stride` apart."""
    from reflex_ipc.cuda.experts import expert_linear

    calls = expert_linear(low.limits, entry, matrices, experts, scratch, per_expert=per_expert, is_grouped=is_grouped)
    for call in calls:
        yield low.call(call)


def expert_group(low: "Lowering", group: "Group", shape: "Shape") -> "Iterator[Launch]":
    """All that a layer's experts do: gate and up in one product, where many tokens share experts put in order once."""
    from reflex_ipc.cuda.experts import are_grouped

    *firsts, _, down, addition = group.parts
    gate, n, weights = firsts[0], shape.n_tokens, low.plan.weights
    n_used, n_ff = gate.routes.width // 2, weights[down.weight].ne[0]
    act_bytes, mixed_bytes = _between_experts(down, n)
    act = low.places.scratch
    mixed = act + act_bytes
    scratch = mixed + mixed_bytes
    matrix = matrix_of(low, gate, act)._replace(n_out=n_ff, out_stride=n_ff)
    if isinstance(firsts[1], ops.Slice):  # one tensor has both: behind an expert's gate rows come its up rows
        matrices = [matrix, matrix._replace(weight=matrix.weight + n_ff * weights[gate.weight].row_bytes)]
    else:
        matrices = [matrix, matrix_of(low, firsts[1], act)]
    experts = experts_of(low.plan, gate, low.at(gate.routes))
    entry = Input(low.at(gate.x), n, gate.x.width, gate.x.width)
    yield from expert_launches(low, entry, matrices, experts, scratch, per_expert=False)
    is_grouped = are_grouped(n, experts, matrix.type)
    experts = experts._replace(bytes=weights[down.weight].nbytes // experts.n_expert)
    entry = Input(act, n, n_ff, down.x.width)
    yield from expert_launches(
        low, entry, [matrix_of(low, down, mixed)], experts, scratch, per_expert=True, is_grouped=is_grouped
    )
    width = addition.out.width
    arguments = [low.at(addition.out), mixed, low.at(addition.routes), width * n, width, n_used]
    yield low.launch("expert_sum", low.wide(width * n), 256, arguments)


def expert_sum(low: "Lowering", op: ops.ExpertSum, shape: "Shape") -> "Iterator[Launch]":
    yield low.each("expert_sum", op.out, shape, [low.at(op.x), low.at(op.routes)], op.out.width, op.routes.width // 2)


# Delta nets


def _step(low: "Lowering", state: str, shape: "Shape") -> bytes:
    at, distance = low.places.states[state]
    p = low.places
    return _STEP.pack(p.control, p.parents if shape.is_tree else 0, at, at + distance, shape.n_tokens, 0)


def conv(low: "Lowering", op: ops.Conv, shape: "Shape") -> "Iterator[Launch]":
    width, kernel = op.x.width, low.plan.weights[op.weight].ne[0]
    arguments = [_step(low, op.state, shape), low.at(op.out), low.at(op.x), low.weight(op.weight), width, kernel]
    yield low.launch("conv", (-(-width // 128), shape.n_tokens, 1), 128, arguments)


def l2_norm(low: "Lowering", op: ops.L2Norm, shape: "Shape") -> "Iterator[Launch]":
    width = op.x.width // op.n_group
    grid = (shape.n_tokens * op.n_group, 1, 1)
    yield low.launch("l2_norm", grid, low.row_block(width), [low.at(op.out), low.at(op.x), width, op.eps])


def delta_rule(low: "Lowering", op: ops.DeltaRule, shape: "Shape") -> "Iterator[Launch]":
    q, k, v = (low.at(value) for value in (op.q, op.k, op.v))
    yield from _delta_rule(low, op, shape, low.at(op.out), (q, k, v), (op.q.width, op.v.width), low.places.scratch)


def _head_widths(op: ops.DeltaRule) -> tuple[int, int]:
    """Numbers of a key and of a value."""
    return op.q.width // op.n_head_k, op.v.width // op.n_head_v


def _chunk_bytes(op: ops.DeltaRule, n_tokens: int) -> int:
    """What the delta rule of a text needs of scratch."""
    return -(-n_tokens // CHUNK) * (op.n_head_k * CHUNK_KEYS + op.n_head_v * CHUNK_GATES)


def _delta_rule(
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


def delta_group(low: "Lowering", group: "Group", shape: "Shape") -> "Iterator[Launch]":
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
    yield from _delta_rule(low, rule, shape, mixed, (q, k, v), (width, width), chunks)
    rows = n * rule.n_head_v
    arguments = [low.at(gate.out), mixed, low.at(gate.gate), low.weight(norm.weight), rows, d, norm.eps]
    yield low.launch("norm_gate", (-(-rows // 8), 1, 1), 256, arguments)


# Latent attention


def latent_attention(low: "Lowering", op: ops.LatentAttention, shape: "Shape") -> "Iterator[Launch]":
    from reflex_ipc.cuda import latent

    yield from latent.latent_attention(low, op, shape)


def heads_of(plan: "Plan", op: ops.LatentAttention, weight: str, ids: int = 0) -> Experts:
    """Every head has a matrix of its own: heads are experts, and all of them are used."""
    return Experts(ids, 0, op.n_head, plan.weights[weight].nbytes // op.n_head, op.n_head)


METHODS: "dict[type, Callable[..., Iterator[Launch]]]" = {
    ops.Route: route,
    ops.ExpertLinear: expert_linear,
    ops.ExpertSum: expert_sum,
    ops.Conv: conv,
    ops.L2Norm: l2_norm,
    ops.DeltaRule: delta_rule,
    ops.LatentAttention: latent_attention,
}
