"""qwen2 (Qwen2, Qwen2.5): biases on q, k and v, which the builder finds by name."""

from reflex_ipc.archs import dense
from reflex_ipc.plan import Builder, Plan


def build(b: Builder) -> Plan:
    return dense.model(b, "neox")
