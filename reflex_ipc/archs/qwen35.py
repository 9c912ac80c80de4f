"""qwen35, qwen35moe and qwen3next: delta-net layers with an attention layer every few, dense or with experts.

qwen3next came first and differs in how its file lays things out: one matrix for alpha and beta, value heads grouped by
key head (the later converter tiles them), experts always. Imports of ollama differ in details, which are looked for.
"""

from collections.abc import Callable
from typing import NamedTuple

from reflex_ipc.archs import dense, hparams, moe
from reflex_ipc.archs.hparams import Hparams
from reflex_ipc.errors import ModelFileError, UnsupportedModelError
from reflex_ipc.ops import Value
from reflex_ipc.plan import Builder, Plan


class DeltaNet(NamedTuple):
    kernel: int  # ssm.conv_kernel
    n_head_k: int  # ssm.group_count
    n_head_v: int  # ssm.time_step_rank
    d: int  # ssm.state_size, of keys and of values
    tiled: bool  # ssm.v_head_reordered: value heads of a key head lie n_head_k apart, not side by side


def build(b: Builder) -> Plan:
    # Full-width rotation is no default here: a quarter is the models' own, and what converters write.
    h = hparams.read(b.gguf, b.arch, rope_style="neox", rotated=0.25)
    n_nextn = hparams.n_nextn(b.gguf, b.arch, h.n_layer)
    n_layer = h.n_layer - n_nextn
    net = _delta_net(b)
    recurrent = _recurrent_layers(b, h.n_layer)
    ffn = _dense_ffn(b, h) if b.arch == "qwen35" else _expert_ffn(b, h)
    x = b.embed(h.n_embd, h.n_vocab)
    for i in b.layers(n_layer):
        a = b.rms_norm(x, "attn_norm", h.eps)
        mixed = _linear_attention(b, h, net, a) if recurrent[i] else _gated_attention(b, h, a)
        x = b.add(x, mixed, "attn_residual")
        # This norm comes before the feed-forward part, whatever its name says.
        x = b.add(x, ffn(b.rms_norm(x, "post_attention_norm", h.eps)), "ffn_residual")
    logits = b.head(x, h.n_vocab, h.eps)
    # Prediction blocks lie behind the main stack; vision and their foreign twins belong to other programs.
    ignore = (*(f"blk.{i}." for i in range(n_layer, h.n_layer)), "v.", "mm.", "mtp.")
    return b.plan(logits, n_layer=n_layer, n_ctx_train=h.n_ctx_train, ignore=ignore)


def _delta_net(b: Builder) -> DeltaNet:
    def count(key: str) -> int:
        n = b.gguf.int(f"{b.arch}.ssm.{key}")
        if not 1 <= n <= 1 << 16:
            raise ModelFileError(f"{b.gguf.path}: {b.arch}.ssm.{key} is {n}")
        return n

    tiled = b.gguf.bool(f"{b.arch}.ssm.v_head_reordered", b.arch != "qwen3next")
    net = DeltaNet(count("conv_kernel"), count("group_count"), count("time_step_rank"), count("state_size"), tiled)
    if net.kernel < 2:
        raise ModelFileError(f"{b.gguf.path}: {b.arch}.ssm.conv_kernel is {net.kernel}")
    if net.n_head_v % net.n_head_k:
        raise ModelFileError(f"{b.gguf.path}: {b.arch}.ssm.time_step_rank is no multiple of ssm.group_count")
    inner = b.gguf.int(f"{b.arch}.ssm.inner_size", net.n_head_v * net.d)
    if inner != net.n_head_v * net.d:
        raise ModelFileError(f"{b.gguf.path}: {b.arch}.ssm.inner_size is {inner}, not time_step_rank * state_size")
    return net


def _recurrent_layers(b: Builder, n_block: int) -> list[bool]:
    key = f"{b.arch}.attention.recurrent_layers"
    if key in b.gguf.metadata:
        return [bool(flag) for flag in b.gguf.ints(key, n_block)]
    interval = b.gguf.int(f"{b.arch}.full_attention_interval", 4)
    if interval < 1:
        raise ModelFileError(f"{b.gguf.path}: {b.arch}.full_attention_interval is {interval}")
    return [(i + 1) % interval != 0 for i in range(n_block)]


def _gated_attention(b: Builder, h: Hparams, a: Value) -> Value:
    """Attention whose output is gated, element by element, before its projection; the gate's rows lie behind the
    query's, head by head."""
    if h.head_dim_v != h.head_dim:
        raise ModelFileError(
            f"{b.gguf.path}: {b.arch}.attention.value_length is {h.head_dim_v}, but gates are as wide as key_length, "
            f"{h.head_dim}"
        )
    both = b.linear(a, "attn_q", 2 * h.n_head * h.head_dim)
    q = b.slice(both, "attn_q_query", 0, h.head_dim, h.n_head)
    gate = b.slice(both, "attn_q_gate", h.head_dim, h.head_dim, h.n_head)
    k = b.linear(a, "attn_k", h.n_head_kv * h.head_dim)
    v = b.linear(a, "attn_v", h.n_head_kv * h.head_dim_v)
    o = dense.rotated_attention(b, h, q, k, v, qk_norm=True)
    return b.linear(b.gate(o, gate, "attn_gated"), "attn_output", h.n_embd)


def _linear_attention(b: Builder, h: Hparams, net: DeltaNet, a: Value) -> Value:
    n_key, n_value, per_key = net.n_head_k * net.d, net.n_head_v * net.d, net.n_head_v // net.n_head_k
    for name in ("ssm_in", "ssm_ba"):
        if net.tiled and b.has(f"{name}.weight"):
            raise UnsupportedModelError(
                f"{b.gguf.path}: tensors {name}.weight keep value heads by key head; {b.arch}.ssm.v_head_reordered has "
                "to be false with them"
            )
    if b.has("ssm_in.weight"):
        # Files of qwen3next before 2026 keep q, k, v and z together, key head by key head.
        joint = b.linear(a, "ssm_in", 2 * n_key + 2 * n_value)
        q, k = (b.slice(joint, name, i * net.d, net.d, net.n_head_k) for i, name in enumerate(("ssm_q", "ssm_k")))
        v = b.slice(joint, "ssm_v", 2 * net.d, per_key * net.d, net.n_head_k)
        z = b.slice(joint, "attn_gate", (2 + per_key) * net.d, per_key * net.d, net.n_head_k)
        qkv = b.concat(b.concat(q, k, "ssm_qk"), v, "attn_qkv")
    else:
        qkv = b.linear(a, "attn_qkv", 2 * n_key + n_value)
        z = b.linear(a, "attn_gate", n_value)
    if b.has("ssm_ba.weight"):
        joint = b.linear(a, "ssm_ba", 2 * net.n_head_v)
        beta = b.slice(joint, "ssm_beta", 0, per_key, net.n_head_k)
        alpha = b.slice(joint, "ssm_alpha", per_key, per_key, net.n_head_k)
    else:
        beta, alpha = b.linear(a, "ssm_beta", net.n_head_v), b.linear(a, "ssm_alpha", net.n_head_v)
    c = b.conv(qkv, "ssm_conv1d", net.kernel)
    q = b.l2_norm(b.slice(c, "ssm_conv_q", 0, n_key), "ssm_q_norm", h.eps, net.n_head_k)
    k = b.l2_norm(b.slice(c, "ssm_conv_k", n_key, n_key), "ssm_k_norm", h.eps, net.n_head_k)
    v = b.slice(c, "ssm_conv_v", 2 * n_key, n_value)
    o = b.delta_rule(q, k, v, alpha, beta, net.n_head_k, net.n_head_v, tiled=net.tiled)
    y = b.swiglu(z, b.rms_norm(o, "ssm_norm", h.eps, net.n_head_v), "ssm_gated")
    return b.linear(y, "ssm_out", h.n_embd)


def _dense_ffn(b: Builder, h: Hparams) -> Callable[[Value], Value]:
    return lambda a: dense.swiglu_ffn(b, h, a)


def _expert_ffn(b: Builder, h: Hparams) -> Callable[[Value], Value]:
    n_expert, n_used = moe.counts(b)
    n_ff = moe.width(b, "expert_feed_forward_length", h.n_ff // n_used)
    n_ff_shared = moe.width(b, "expert_shared_feed_forward_length", h.n_ff or n_ff)
    router = moe.softmax_router(b, n_expert, n_used)

    def ffn(a: Value) -> Value:
        routed = moe.experts(b, a, router(a), n_ff, n_expert)
        return b.add(routed, moe.gated_shared_expert(b, a, n_ff_shared), "ffn_out")

    return ffn
