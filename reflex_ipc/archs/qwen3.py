"""qwen3, dense: every head of q and k is normalised before its rotation, and heads * head_dim need not be n_embd."""

from reflex_ipc.archs import dense
from reflex_ipc.plan import Builder, Plan


def build(b: Builder) -> Plan:
    # Rerankers carry a classifier beside the output matrix.
    return dense.model(b, "neox", qk_norm=True, ignore=("cls.output.",))
