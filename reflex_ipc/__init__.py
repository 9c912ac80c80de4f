"""Reflex: a cold process, a GGUF file and a prompt become a first token, and then it stops.

What stands in `__all__` is the public Python interface. Importing this package imports nothing else: names are resolved
when they are first used, because the start-up path cannot afford what it does not need.
"""

TYPE_CHECKING = False  # as `typing` has it, whose import would be the first thing a start waits for

if TYPE_CHECKING:
    from reflex_ipc.engine import Engine
    from reflex_ipc.errors import (
        CancelledError,
        CheckFailedError,
        ContextOverflowError,
        DeadlineError,
        DeviceError,
        InputOutputError,
        InvalidRequestError,
        ModelFileError,
        OutOfMemoryError,
        ReflexError,
        TemplateError,
        UnsupportedModelError,
    )
    from reflex_ipc.generation import Generation, Token
    from reflex_ipc.sampler import Sampling
    from reflex_ipc.scores import Candidate, Scores
    from reflex_ipc.tokenizer import Tokenizer

__version__ = "0.1.0"
__all__ = [
    "CancelledError",
    "Candidate",
    "CheckFailedError",
    "ContextOverflowError",
    "DeadlineError",
    "DeviceError",
    "Engine",
    "Generation",
    "InputOutputError",
    "InvalidRequestError",
    "ModelFileError",
    "OutOfMemoryError",
    "ReflexError",
    "Sampling",
    "Scores",
    "TemplateError",
    "Token",
    "Tokenizer",
    "UnsupportedModelError",
]

_HOMES = {
    "Candidate": "scores",
    "Engine": "engine",
    "Generation": "generation",
    "Sampling": "sampler",
    "Scores": "scores",
    "Token": "generation",
    "Tokenizer": "tokenizer",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
