"""llama (SmolLM2, Llama 2 and 3): rotation over interleaved pairs, optional biases, optional rope_freqs of Llama 3."""

from reflex_ipc.archs import dense
from reflex_ipc.errors import UnsupportedModelError
from reflex_ipc.plan import Builder, Plan


def build(b: Builder) -> Plan:
    if b.gguf.int(f"{b.arch}.expert_count", 0) > 0:
        raise UnsupportedModelError(f"{b.gguf.path}: {b.arch}.expert_count: llama files with experts are not supported")
    # The converter permutes the rows of q and k so that pairs are adjacent; we rotate them where they are.
    return dense.model(b, "norm", factors="rope_freqs.weight")
