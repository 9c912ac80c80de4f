"""Launches of experts: the router, products (`experts`) of those that it chose, their weighted sum. See `families`."""

from struct import Struct

from reflex_ipc import ops
from reflex_ipc.cuda import experts
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.products import Experts, Input, Matrix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from reflex_ipc.cuda.fuse import Group
    from reflex_ipc.cuda.launch import Launch
    from reflex_ipc.cuda.lower import Lowering
    from reflex_ipc.cuda.places import Shape
    from reflex_ipc.plan import Plan

_ROUTE = Struct("<3Q7if")


def scratch_bytes(plan: "Plan", products: "Sequence[ops.ExpertLinear]", n_tokens: int) -> int:
    """Room that these products need, and what goes from one to the next, in steps of up to so many tokens."""
    between = within = 0
    for op in products:
        tensor = plan.weights[op.weight]
        per_expert, kind = op.x.width != tensor.ne[0], tensor.type.name
        size = experts.expert_scratch_bytes(n_tokens, tensor.ne[0], kind, experts_of(plan, op), per_expert=per_expert)
        within = max(within, size)
        between = max(between, sum(_between(op, n_tokens)))
    return between + within


def _between(down: ops.ExpertLinear, n_tokens: int) -> tuple[int, int]:
    """Bytes of what goes into experts' last product, and of what comes out of it."""
    return aligned(4 * n_tokens * down.x.width), aligned(4 * n_tokens * down.out.width)


def experts_of(plan: "Plan", op: ops.ExpertLinear, ids: int = 0) -> Experts:
    tensor = plan.weights[op.weight]
    n_expert = tensor.ne[2]
    return Experts(ids, op.routes.width, op.routes.width // 2, tensor.nbytes // n_expert, n_expert)


def _route(low: "Lowering", op: ops.Route, shape: "Shape") -> "Iterator[Launch]":
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


def _linear(low: "Lowering", op: ops.ExpertLinear, shape: "Shape") -> "Iterator[Launch]":
    matrix, chosen = matrix_of(low, op, low.at(op.out)), experts_of(low.plan, op, low.at(op.routes))
    n_in = low.plan.weights[op.weight].ne[0]
    entry = Input(low.at(op.x), shape.n_tokens, n_in, op.x.width)
    scratch, per_expert = low.places.scratch, op.x.width != n_in
    yield from map(low.call, experts.expert_linear(low.limits, entry, [matrix], chosen, scratch, per_expert=per_expert))


def matrix_of(low: "Lowering", op: ops.ExpertLinear, out: int) -> Matrix:
    """Of its first expert."""
    tensor = low.plan.weights[op.weight]
    return Matrix(tensor.type.name, low.weight(op.weight), tensor.ne[1], out, tensor.ne[1])


def _group(low: "Lowering", group: "Group", shape: "Shape") -> "Iterator[Launch]":
    """All that a layer's experts do: gate and up in one product, where many tokens share experts put in order once."""
    *firsts, _, down, addition = group.parts
    gate, n, weights = firsts[0], shape.n_tokens, low.plan.weights
    n_used, n_ff = gate.routes.width // 2, weights[down.weight].ne[0]
    act_bytes, mixed_bytes = _between(down, n)
    act = low.places.scratch
    mixed = act + act_bytes
    scratch = mixed + mixed_bytes
    matrix = matrix_of(low, gate, act)._replace(n_out=n_ff, out_stride=n_ff)
    if isinstance(firsts[1], ops.Slice):  # one tensor has both: behind an expert's gate rows come its up rows
        matrices = [matrix, matrix._replace(weight=matrix.weight + n_ff * weights[gate.weight].row_bytes)]
    else:
        matrices = [matrix, matrix_of(low, firsts[1], act)]
    chosen = experts_of(low.plan, gate, low.at(gate.routes))
    entry = Input(low.at(gate.x), n, gate.x.width, gate.x.width)
    yield from map(low.call, experts.expert_linear(low.limits, entry, matrices, chosen, scratch, per_expert=False))
    is_grouped = experts.are_grouped(n, chosen, matrix.type)
    chosen = chosen._replace(bytes=weights[down.weight].nbytes // chosen.n_expert)
    entry = Input(act, n, n_ff, down.x.width)
    matrices = [matrix_of(low, down, mixed)]
    calls = experts.expert_linear(low.limits, entry, matrices, chosen, scratch, per_expert=True, is_grouped=is_grouped)
    yield from map(low.call, calls)
    width = addition.out.width
    arguments = [low.at(addition.out), mixed, low.at(addition.routes), width * n, width, n_used]
    yield low.launch("expert_sum", low.wide(width * n), 256, arguments)


def _sum(low: "Lowering", op: ops.ExpertSum, shape: "Shape") -> "Iterator[Launch]":
    yield low.each("expert_sum", op.out, shape, [low.at(op.x), low.at(op.routes)], op.out.width, op.routes.width // 2)


METHODS: "dict[type | str, Callable[..., Iterator[Launch]]]" = {
    ops.Route: _route,
    ops.ExpertLinear: _linear,
    ops.ExpertSum: _sum,
    "experts": _group,
}
