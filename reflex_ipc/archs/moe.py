"""Feed-forward layers of experts: a router, the experts' slabs, and what every token passes besides."""

from collections.abc import Callable

from reflex_ipc.errors import ModelFileError, UnsupportedModelError
from reflex_ipc.ops import Value
from reflex_ipc.plan import Builder


def experts(b: Builder, a: Value, routes: Value, n_ff: int, n_expert: int) -> Value:
    """sum over a token's experts of weight * down(silu(gate a) * up a)."""
    if b.has("ffn_gate_up_exps.weight"):
        n_used = routes.width // 2
        fused = b.expert_linear(a, routes, "ffn_gate_up_exps", a.width, 2 * n_ff, n_expert)
        gate = b.slice(fused, "ffn_gate_exps", 0, n_ff, n_used)
        up = b.slice(fused, "ffn_up_exps", n_ff, n_ff, n_used)
    else:
        gate = b.expert_linear(a, routes, "ffn_gate_exps", a.width, n_ff, n_expert)
        up = b.expert_linear(a, routes, "ffn_up_exps", a.width, n_ff, n_expert)
    act = b.swiglu(gate, up, "ffn_act_exps")
    return b.expert_sum(b.expert_linear(act, routes, "ffn_down_exps", n_ff, a.width, n_expert), routes)


def shared_expert(b: Builder, a: Value, n_ff: int) -> Value:
    act = b.swiglu(b.linear(a, "ffn_gate_shexp", n_ff), b.linear(a, "ffn_up_shexp", n_ff), "ffn_act_shexp")
    return b.linear(act, "ffn_down_shexp", a.width)


def gated_shared_expert(b: Builder, a: Value, n_ff: int) -> Value:
    """The shared expert of the Qwen families, scaled by one sigmoid a token."""
    shared = shared_expert(b, a, n_ff)
    return b.gate(shared, b.linear(a, "ffn_gate_inp_shexp", 1), "ffn_shexp_gated")


def counts(b: Builder) -> tuple[int, int]:
    """(expert_count, expert_used_count)."""
    n_expert = b.gguf.int(f"{b.arch}.expert_count")
    n_used = b.gguf.int(f"{b.arch}.expert_used_count")
    if not 1 <= n_used <= n_expert <= 1 << 16:
        raise ModelFileError(
            f"{b.gguf.path}: {b.arch}.expert_used_count is {n_used} of {b.arch}.expert_count {n_expert}"
        )
    return n_expert, n_used


def softmax_router(b: Builder, n_expert: int, n_used: int) -> Callable[[Value], Value]:
    """The router of the Qwen families: softmax, and weights of a token's experts that add up to 1 unless the file says
    otherwise. Keys of what only other families' routers do are refused."""
    for name in ("expert_gating_func", "expert_group_count", "expert_weights_scale"):
        key = f"{b.arch}.{name}"
        value = b.gguf.float(key, 0.0)
        if value not in (0.0, 1.0):  # softmax is function 1, one group is no group, and neither scale does anything
            raise UnsupportedModelError(f"{b.gguf.path}: {key} is {value:g}, which is not supported in {b.arch}")
    normalise = _is_normalised(b)
    return lambda a: b.route(b.linear(a, "ffn_gate_inp", n_expert), n_used, normalise=normalise)


def _is_normalised(b: Builder) -> bool:
    """The one key is what ollama writes, the other what converters write for other families."""
    keys = f"{b.arch}.norm_top_k_prob", f"{b.arch}.expert_weights_norm"
    said = {b.gguf.bool(key) for key in keys if key in b.gguf.metadata}
    if len(said) > 1:
        raise ModelFileError(f"{b.gguf.path}: {keys[0]} and {keys[1]} contradict each other")
    return said.pop() if said else True


def width(b: Builder, key: str, default: int | None = None) -> int:
    """A feed-forward width of the experts."""
    full = f"{b.arch}.{key}"
    n = b.gguf.int(full) if default is None else b.gguf.int(full, default)
    if not 1 <= n <= 1 << 24:
        raise ModelFileError(f"{b.gguf.path}: {full} is {n}, which is no width")
    return n
