"""What a step has to move and to compute at least, counted from the plan."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from reflex_ipc import ops
from reflex_ipc.plan import Plan

CACHE_BYTES = 2  # of a cached element: half precision
STATE_BYTES = 4  # of an element of a recurrent state


class Work(NamedTuple):
    bytes: float
    flops: float

    def __add__(self, other: Any) -> "Work":
        return Work(self.bytes + other.bytes, self.flops + other.flops)


def step(plan: Plan, n_tokens: int, n_past: int, n_logits: int) -> Work:
    """A step of `n_tokens` behind `n_past` others, `n_logits` rows of logits.

    Every weight is read once, of experts those that so many tokens are expected to reach if all are equally likely; the
    cache is read once. A multiplication and an addition are two operations. What lies between the products (norms,
    rotations, activations) is left out: kernels may keep it on the chip.
    """
    total = Work(0, 0)
    for op in plan.ops:
        total += _op(op, plan.weights, n_tokens, n_past, n_logits)
    return total


def _op(op: ops.Op, weights: Mapping[str, Any], n_tokens: int, n_past: int, n_logits: int) -> Work:
    past = n_past + n_tokens
    pairs = n_tokens * n_past + n_tokens * (n_tokens + 1) / 2
    match op:
        case ops.Embed():
            tensor = weights[op.weight]
            return Work(tensor.nbytes / tensor.ne[1] * n_tokens, 0)
        case ops.Linear():
            tensor, rows = weights[op.weight], n_logits if op.x.selected else n_tokens
            return Work(tensor.nbytes if rows else 0, 2 * tensor.n_elements * rows)
        case ops.ExpertLinear():
            tensor, n_used = weights[op.weight], op.routes.width // 2
            n_in, n_out, n_expert = tensor.ne
            reached = 1 - (1 - n_used / n_expert) ** n_tokens
            return Work(tensor.nbytes * reached, 2 * n_in * n_out * n_used * n_tokens)
        case ops.Attention():
            cached = (op.k.width + op.v.width) * past * CACHE_BYTES
            return Work(cached, 2 * (op.q.width + op.out.width) * pairs)
        case ops.LatentAttention():
            tensors = [weights[name] for name in op.weights]
            absorbed = sum(2 * tensor.n_elements for tensor in tensors) * n_tokens
            scored = 2 * op.n_head * (op.latent.width + op.rank) * pairs
            return Work(sum(t.nbytes for t in tensors) + op.latent.width * past * CACHE_BYTES, absorbed + scored)
        case ops.DeltaRule():
            state = op.v.width * (op.k.width // op.n_head_k)
            return Work(2 * state * STATE_BYTES, 7 * state * n_tokens)
        case ops.Conv():
            tensor = weights[op.weight]
            return Work(tensor.nbytes, 2 * tensor.n_elements * n_tokens)
    return Work(0, 0)
