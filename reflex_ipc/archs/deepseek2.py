"""deepseek2 (DeepSeek-V2, V2-Lite, V3, R1): latent attention, a few dense layers, then experts beside a shared one."""

from collections.abc import Callable

from reflex_ipc.archs import dense, hparams, moe
from reflex_ipc.archs.hparams import Hparams, yarn_magnitude
from reflex_ipc.errors import ModelFileError, UnsupportedModelError
from reflex_ipc.ops import Rope, Value
from reflex_ipc.plan import Builder, Plan

_GATING = {0: "softmax", 1: "softmax", 2: "sigmoid"}


def build(b: Builder) -> Plan:
    h = hparams.read(b.gguf, b.arch, rope_style="norm")
    if f"{b.arch}.attention.temperature_scale" in b.gguf.metadata:
        raise UnsupportedModelError(f"{b.gguf.path}: {b.arch}.attention.temperature_scale is not supported")
    n_layer = h.n_layer - hparams.n_nextn(b.gguf, b.arch, h.n_layer)
    n_dense = b.gguf.int(f"{b.arch}.leading_dense_block_count", 0)
    rope, scale = _rope(b, h)
    expert_ffn = _expert_ffn(b) if n_dense < n_layer else None  # whose keys a file of dense layers may lack
    x = b.embed(h.n_embd, h.n_vocab)
    for i in b.layers(n_layer):
        x = _attention(b, h, rope, scale, x)
        a = b.rms_norm(x, "ffn_norm", h.eps)
        x = b.add(x, expert_ffn(a) if expert_ffn and i >= n_dense else dense.swiglu_ffn(b, h, a), "ffn_residual")
    logits = b.head(x, h.n_vocab, h.eps)
    # Experimental files keep keys' matrices both ways: the whole is used, and its parts are not.
    parts = [f"blk.{i}.attn_{part}_b." for i in range(n_layer) if _is_whole(b, i) for part in "kv"]
    ignore = (*(f"blk.{i}." for i in range(n_layer, h.n_layer)), *parts)
    return b.plan(logits, n_layer=n_layer, n_ctx_train=h.n_ctx_train, ignore=ignore)


def _is_whole(b: Builder, layer: int) -> bool:
    return f"blk.{layer}.attn_kv_b.weight" in b.gguf.tensors


def _head_dims(b: Builder, h: Hparams) -> tuple[int, int]:
    """(key, value) of one head, expanded: the `_mla` keys where the file has them, as absorbed files do."""
    d_k = b.gguf.int(f"{b.arch}.attention.key_length_mla", h.head_dim)
    d_v = b.gguf.int(f"{b.arch}.attention.value_length_mla", h.head_dim_v)
    if not h.rope.n_rot < d_k <= 1 << 16 or not 1 <= d_v <= 1 << 16:
        raise ModelFileError(
            f"{b.gguf.path}: {b.arch}.attention.key_length_mla is {d_k} and value_length_mla {d_v}, with "
            f"rope.dimension_count {h.rope.n_rot}"
        )
    return d_k, d_v


def _rope(b: Builder, h: Hparams) -> tuple[Rope, float]:
    """Rotation and score scale. The growth YaRN undoes goes into the scale here, twice as it is on q and on k, and
    not into cosine and sine. A file that says yarn without `yarn_log_multiplier` is read as its own library reads a
    configuration without mscale: magnitude on the rotation, plain scale."""
    scale = _head_dims(b, h)[0] ** -0.5
    if not h.rope.n_ctx_orig:
        return h.rope, scale
    multiplier = b.gguf.float(f"{b.arch}.rope.scaling.yarn_log_multiplier", 0.0)
    if multiplier < 0.0:
        raise ModelFileError(f"{b.gguf.path}: {b.arch}.rope.scaling.yarn_log_multiplier is {multiplier}")
    if multiplier == 0.0:
        return h.rope, scale
    factor = 1.0 / h.rope.freq_scale
    growth = yarn_magnitude(factor, multiplier / 0.1)
    # What remains of the magnitude is the file's own attn_factor.
    return h.rope._replace(magnitude=h.rope.magnitude / yarn_magnitude(factor)), scale * growth * growth


def _attention(b: Builder, h: Hparams, rope: Rope, scale: float, x: Value) -> Value:
    d_k, d_v = _head_dims(b, h)
    d_nope = d_k - rope.n_rot
    rank = b.gguf.int(f"{b.arch}.attention.kv_lora_rank")
    if not 1 <= rank <= 1 << 16:
        raise ModelFileError(f"{b.gguf.path}: {b.arch}.attention.kv_lora_rank is {rank}")
    a = b.rms_norm(x, "attn_norm", h.eps)
    if b.has("attn_q.weight"):
        q = b.linear(a, "attn_q", h.n_head * d_k)
    else:
        q_rank = b.gguf.int(f"{b.arch}.attention.q_lora_rank")
        q = b.rms_norm(b.linear(a, "attn_q_a", q_rank), "attn_q_a_norm", h.eps)
        q = b.linear(q, "attn_q_b", h.n_head * d_k)
    q = b.rotate(q, "attn_q", h.n_head, rope, offset=d_nope)
    kv = b.linear(a, "attn_kv_a_mqa", rank + rope.n_rot)
    c = b.rms_norm(b.slice(kv, "attn_kv_a_latent", 0, rank), "attn_kv_a_norm", h.eps)
    k_rope = b.rotate(b.slice(kv, "attn_kv_a_rope", rank, rope.n_rot), "attn_k", 1, rope)
    latent = b.concat(c, k_rope, "attn_latent")
    if b.has("attn_kv_b.weight"):
        weights: tuple[str, ...] = (b.weight("attn_kv_b.weight", rank, h.n_head * (d_nope + d_v)),)
    else:
        weights = (
            b.weight("attn_k_b.weight", d_nope, rank, h.n_head),
            b.weight("attn_v_b.weight", rank, d_v, h.n_head),
        )
    o = b.latent_attention(q, latent, weights, h.n_head, rank, d_v, scale)
    return b.add(x, b.linear(o, "attn_output", h.n_embd), "attn_residual")


def _expert_ffn(b: Builder) -> Callable[[Value], Value]:
    n_expert, n_used = moe.counts(b)
    n_ff = moe.width(b, "expert_feed_forward_length")
    n_shared = moe.width(b, "expert_shared_count")
    number = b.gguf.int(f"{b.arch}.expert_gating_func", 1)
    if number not in _GATING:
        raise UnsupportedModelError(f"{b.gguf.path}: {b.arch}.expert_gating_func is {number}; known are 1 and 2")
    gating = _GATING[number]
    groups = _groups(b, n_expert, n_used)
    normalise = b.gguf.bool(f"{b.arch}.expert_weights_norm", False)
    scale = b.gguf.float(f"{b.arch}.expert_weights_scale", 0.0) or 1.0

    def ffn(a: Value) -> Value:
        routes = b.route(
            b.linear(a, "ffn_gate_inp", n_expert),
            n_used,
            gating=gating,
            bias=b.weight("exp_probs_b.bias", n_expert) if b.has("exp_probs_b.bias") else None,
            groups=groups,
            top2=gating == "sigmoid",  # V2 scores a group by its best expert, V3 by its two best
            normalise=normalise,
            scale=scale,
        )
        return b.add(moe.experts(b, a, routes, n_ff, n_expert), moe.shared_expert(b, a, n_ff * n_shared), "ffn_out")

    return ffn


def _groups(b: Builder, n_expert: int, n_used: int) -> tuple[int, int]:
    n_group = b.gguf.int(f"{b.arch}.expert_group_count", 0) or 1
    n_group_used = b.gguf.int(f"{b.arch}.expert_group_used_count", 0)
    if n_group == 1:
        n_group_used = n_group_used or 1
    if not 1 <= n_group_used <= n_group <= n_expert or n_expert % n_group:
        raise ModelFileError(
            f"{b.gguf.path}: {b.arch}.expert_group_used_count is {n_group_used} of expert_group_count {n_group}, "
            f"for {n_expert} experts"
        )
    if n_used > n_group_used * (n_expert // n_group):
        raise ModelFileError(
            f"{b.gguf.path}: {b.arch}.expert_used_count is {n_used}, which expert_group_used_count {n_group_used} of "
            f"{n_group} groups with {n_expert // n_group} experts each do not have"
        )
    return n_group, n_group_used
