"""One function per model family, over the builder of `plan`.

`build` finds the family by the file's `general.architecture` and returns its plan. Its module is imported only when
a file asks for it.
"""

from importlib import import_module

from reflex_ipc.errors import UnsupportedModelError
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import Builder, Plan

FAMILIES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3moe",
    "qwen35": "qwen35",
    "qwen35moe": "qwen35",
    "qwen3next": "qwen35",
    "deepseek2": "deepseek2",
}
"""`general.architecture` -> module of this package."""


def build(gguf: GGUF) -> Plan:
    """The plan of a model file; UnsupportedModelError names the architecture or the key that is not known here."""
    arch = gguf.str("general.architecture")
    if arch not in FAMILIES:
        raise UnsupportedModelError(
            f"{gguf.path}: general.architecture is {arch!r}; supported are {', '.join(sorted(FAMILIES))}"
        )
    family = import_module(f"{__name__}.{FAMILIES[arch]}")
    plan: Plan = family.build(Builder(gguf, arch))
    return plan
