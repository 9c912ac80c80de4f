"""qwen3moe: the attention of qwen3, and experts in every layer, chosen by softmax and as a rule renormalised."""

from reflex_ipc.archs import dense, hparams, moe
from reflex_ipc.plan import Builder, Plan


def build(b: Builder) -> Plan:
    h = hparams.read(b.gguf, b.arch, rope_style="neox")
    n_expert, n_used = moe.counts(b)
    n_ff = moe.width(b, "expert_feed_forward_length", h.n_ff // n_used)
    router = moe.softmax_router(b, n_expert, n_used)
    x = b.embed(h.n_embd, h.n_vocab)
    for _ in b.layers(h.n_layer):
        x = dense.attention(b, h, x, qk_norm=True)
        a = b.rms_norm(x, "ffn_norm", h.eps)
        x = b.add(x, moe.experts(b, a, router(a), n_ff, n_expert), "ffn_residual")
    logits = b.head(x, h.n_vocab, h.eps)
    return b.plan(logits, n_layer=h.n_layer, n_ctx_train=h.n_ctx_train)
