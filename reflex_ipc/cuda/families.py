"""Which ops and groups there are kernels for, and which module here makes their launches; what those need that only
some models have.

`lower` has what every model has. The others are imported inside functions because only some models need them: by
`check`, while the device still starts. None of them imports this or `lower`.
"""

from importlib import import_module

from reflex_ipc import ops
from reflex_ipc.cuda.formats import FORMATS
from reflex_ipc.errors import UnsupportedModelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reflex_ipc.cuda.launch import Launch
    from reflex_ipc.plan import Plan

MODULES: "dict[type | str, str]" = {
    ops.Embed: "lower",
    ops.RmsNorm: "lower",
    ops.Linear: "lower",
    ops.Rotate: "lower",
    ops.Attention: "lower",
    ops.SwiGlu: "lower",
    ops.Add: "lower",
    ops.Slice: "lower",
    ops.Concat: "lower",
    ops.Gate: "lower",
    ops.SelectRows: "lower",
    "linears": "lower",
    "swiglu": "lower",
    "linear_add": "lower",
    "attention": "lower",
    ops.Route: "moe",
    ops.ExpertLinear: "moe",
    ops.ExpertSum: "moe",
    "experts": "moe",
    ops.Conv: "delta",
    ops.L2Norm: "delta",
    ops.DeltaRule: "delta",
    "delta": "delta",
    ops.LatentAttention: "latent",
}
"""Type of an op, or kind of a group -> the module whose METHODS has it."""
LARGEST_HEAD = 256
ABSORBED = 64
"""Tokens up to which latent attention of a step is absorbed: cuda/latent.py says why. Every model's steps are compared
with it, so it is here."""

_imported: "dict[type | str, Callable[..., Iterator[Launch]]]" = {}  # METHODS of the modules that are there


def method(of: "type | str") -> "Callable[..., Iterator[Launch]]":
    """What makes the launches of an op of this type, or of a group of this kind: a function of the lowering, the op or
    group, and the step's shape. Imports its module where that is not there yet."""
    if of not in _imported:
        _imported.update(import_module(f"reflex_ipc.cuda.{MODULES[of]}").METHODS)
    return _imported[of]


def check(plan: "Plan") -> None:
    """Import what a model needs, and raise UnsupportedModelError for one that the kernels cannot run, naming the remedy
    where there is one."""
    for op in plan.ops:
        if why := _refusal(op):
            raise UnsupportedModelError(f"op {op.name} {why}; --backend cpu runs it")
        for name in ops.weights(op):
            kind = plan.weights[name].type.name
            if kind not in FORMATS:
                raise UnsupportedModelError(f"tensor {name} is {kind}, which nothing here computes with")
            if kind != "F32" and name not in _matrices(op):
                raise UnsupportedModelError(
                    f"tensor {name} is {kind}; the CUDA kernels take F32 there, --backend cpu any type"
                )


def _refusal(op: "ops.Op") -> str | None:
    """Why the kernels cannot run this op, or None; the module that makes its launches is imported."""
    if type(op) not in MODULES:
        return f"({type(op).__name__}) has no CUDA kernel yet"
    if MODULES[type(op)] != "lower":
        method(type(op))
    if isinstance(op, ops.Attention):
        for width, what in ((op.k.width, "keys"), (op.v.width, "values")):
            d = width // op.n_head_kv
            if d % 8 or d > LARGEST_HEAD:
                return f"has {what} of {d} numbers; CUDA kernels take multiples of 8 up to {LARGEST_HEAD}"
    if isinstance(op, ops.DeltaRule):
        from reflex_ipc.cuda import delta

        return delta.refusal(op)
    if isinstance(op, ops.LatentAttention):
        from reflex_ipc.cuda import latent

        return latent.refusal(op)
    return None


def _matrices(op: "ops.Op") -> "tuple[str, ...]":
    """The weights of an op that may have any type."""
    if isinstance(op, ops.Linear | ops.Embed | ops.ExpertLinear):
        return (op.weight,)
    return op.weights if isinstance(op, ops.LatentAttention) else ()


def before_routers(plan: "Plan") -> frozenset[str]:
    """The values that a router may still depend on: all before the last one. Half-precision products would tip close
    decisions between experts, and a whole model then computes something else."""
    routers = [i for i, op in enumerate(plan.ops) if isinstance(op, ops.Route)]
    return frozenset(op.out.name for op in plan.ops[: routers[-1]]) if routers else frozenset()


def scratch_bytes(plan: "Plan", n_tokens: int, n_expanded: int = 0) -> int:
    """Room that products of experts need, latent attention and delta nets between their launches; `n_expanded` as in
    `places.Shape`."""
    need, products = 0, []
    for op in plan.ops:
        if isinstance(op, ops.ExpertLinear):
            products.append(op)
        elif isinstance(op, ops.LatentAttention):
            from reflex_ipc.cuda import latent

            need = max(need, latent.scratch_bytes(plan, op, n_tokens, n_expanded, ABSORBED))
        elif isinstance(op, ops.DeltaRule):
            from reflex_ipc.cuda import delta

            need = max(need, delta.scratch_bytes(op, n_tokens))
    if products:
        from reflex_ipc.cuda import moe

        need = max(need, moe.scratch_bytes(plan, products, n_tokens))
    return need


def branch_bytes(plan: "Plan", n_tokens: int) -> int:
    """Room for the recurrent states behind every token of a tree, of one layer at a time."""
    rules = [op for op in plan.ops if isinstance(op, ops.DeltaRule)]
    if not rules:
        return 0
    from reflex_ipc.cuda import delta

    return n_tokens * max(map(delta.state_bytes, rules))


def latents(plan: "Plan") -> list[ops.LatentAttention]:
    return [op for op in plan.ops if isinstance(op, ops.LatentAttention)]


def can_expand(plan: "Plan") -> bool:
    """Whether there are latents, and kernels that expand them."""
    found = latents(plan)
    if not found:
        return False
    from reflex_ipc.cuda import latent

    return any(map(latent.can_expand, found))
