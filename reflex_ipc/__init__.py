"""Reflex: a cold process, a GGUF file and a prompt become a first token, and then it stops.

`Engine` and the typed errors are the public Python interface. Importing this package imports nothing else:
names are resolved when they are first used, because the start-up path cannot afford what it does not need.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from reflex_ipc.engine import Engine as Engine
    from reflex_ipc.errors import ReflexError as ReflexError
    from reflex_ipc.tokenizer import Tokenizer as Tokenizer

_HOMES = {"Engine": "engine", "Token": "engine", "Tokenizer": "tokenizer", "ReflexError": "errors"}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{home}"), name)
