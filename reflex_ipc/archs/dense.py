"""The dense transformer that llama, qwen2 and qwen3 are, and its two halves, which other families share."""

from reflex_ipc.archs import hparams
from reflex_ipc.archs.hparams import Hparams
from reflex_ipc.ops import Value
from reflex_ipc.plan import Builder, Plan


def model(
    b: Builder, rope_style: str, *, qk_norm: bool = False, factors: str | None = None, ignore: tuple[str, ...] = ()
) -> Plan:
    """`factors` names a weight of divisors of the rotation's angles, where the file has it."""
    h = hparams.read(b.gguf, b.arch, rope_style)
    divisors = b.weight(factors, h.rope.n_rot // 2) if factors is not None and b.has(factors) else None
    x = b.embed(h.n_embd, h.n_vocab)
    for _ in b.layers(h.n_layer):
        x = attention(b, h, x, qk_norm=qk_norm, factors=divisors)
        x = ffn(b, h, x)
    logits = b.head(x, h.n_vocab, h.eps)
    return b.plan(logits, n_layer=h.n_layer, n_ctx_train=h.n_ctx_train, ignore=ignore)


def attention(b: Builder, h: Hparams, x: Value, *, qk_norm: bool = False, factors: str | None = None) -> Value:
    """x + attn_output(rotated_attention(q, k, v)) of the normalised x."""
    a = b.rms_norm(x, "attn_norm", h.eps)
    o = rotated_attention(b, h, *qkv(b, h, a), qk_norm=qk_norm, factors=factors)
    return b.add(x, b.linear(o, "attn_output", h.n_embd), "attn_residual")


def rotated_attention(
    b: Builder, h: Hparams, q: Value, k: Value, v: Value, *, qk_norm: bool = False, factors: str | None = None
) -> Value:
    """attention(rope(q), rope(k), v); QK-norm comes before the rotation."""
    if qk_norm:
        q = b.rms_norm(q, "attn_q_norm", h.eps, h.n_head)
        k = b.rms_norm(k, "attn_k_norm", h.eps, h.n_head_kv)
    q = b.rotate(q, "attn_q", h.n_head, h.rope, factors=factors)
    k = b.rotate(k, "attn_k", h.n_head_kv, h.rope, factors=factors)
    return b.attention(q, k, v, h.n_head, h.n_head_kv, h.attention_scale)


def qkv(b: Builder, h: Hparams, a: Value) -> tuple[Value, Value, Value]:
    """The three projections, from their own tensors or from the fused `attn_qkv` some files carry."""
    n_q, n_k, n_v = h.n_head * h.head_dim, h.n_head_kv * h.head_dim, h.n_head_kv * h.head_dim_v
    if b.has("attn_qkv.weight"):
        fused = b.linear(a, "attn_qkv", n_q + n_k + n_v)
        return (
            b.slice(fused, "attn_q", 0, n_q),
            b.slice(fused, "attn_k", n_q, n_k),
            b.slice(fused, "attn_v", n_q + n_k, n_v),
        )
    return b.linear(a, "attn_q", n_q), b.linear(a, "attn_k", n_k), b.linear(a, "attn_v", n_v)


def ffn(b: Builder, h: Hparams, x: Value) -> Value:
    """x + swiglu_ffn of the normalised x."""
    return b.add(x, swiglu_ffn(b, h, b.rms_norm(x, "ffn_norm", h.eps)), "ffn_residual")


def swiglu_ffn(b: Builder, h: Hparams, a: Value) -> Value:
    """ffn_down(silu(ffn_gate a) * ffn_up a)."""
    act = b.swiglu(b.linear(a, "ffn_gate", h.n_ff), b.linear(a, "ffn_up", h.n_ff))
    return b.linear(act, "ffn_down", h.n_embd)
