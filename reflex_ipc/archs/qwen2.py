"""qwen2 (Qwen2, Qwen2.5): biases on q, k and v, which the builder finds by name."""

from reflex_ipc.archs import dense, hparams
from reflex_ipc.plan import Builder, Plan


def build(b: Builder) -> Plan:
    h = hparams.read(b.gguf, b.arch, rope_style="neox")
    x = b.embed(h.n_embd, h.n_vocab)
    for _ in b.layers(h.n_layer):
        x = dense.attention(b, h, x)
        x = dense.ffn(b, h, x)
    logits = b.head(x, h.n_vocab, h.eps)
    return b.plan(logits, n_layer=h.n_layer, n_ctx_train=h.n_ctx_train)
