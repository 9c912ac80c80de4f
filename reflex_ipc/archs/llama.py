"""llama (SmolLM2, Llama 2 and 3): rotation over interleaved pairs, optional biases, optional rope_freqs of Llama 3."""

from reflex_ipc.archs import dense, hparams
from reflex_ipc.errors import UnsupportedModelError
from reflex_ipc.plan import Builder, Plan


def build(b: Builder) -> Plan:
    # The converter permutes the rows of q and k so that pairs are adjacent; we rotate them where they are.
    h = hparams.read(b.gguf, b.arch, rope_style="norm")
    if b.gguf.int(f"{b.arch}.expert_count", 0) > 0:
        raise UnsupportedModelError(f"{b.gguf.path}: {b.arch}.expert_count: llama files with experts are not supported")
    factors = b.weight("rope_freqs.weight", h.rope.n_rot // 2) if b.has("rope_freqs.weight") else None
    x = b.embed(h.n_embd, h.n_vocab)
    for _ in b.layers(h.n_layer):
        x = dense.attention(b, h, x, factors=factors)
        x = dense.ffn(b, h, x)
    logits = b.head(x, h.n_vocab, h.eps)
    return b.plan(logits, n_layer=h.n_layer, n_ctx_train=h.n_ctx_train)
