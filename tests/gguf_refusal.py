"""What every refusal of a model file has in common."""

import os
from pathlib import Path

import pytest

from reflex_ipc.errors import ModelFileError, ReflexError
from reflex_ipc.gguf import GGUF


def open_files() -> set[str]:
    """The descriptors this process has open."""
    return set(os.listdir("/proc/self/fd"))


def refused(path: Path, *words: str, kind: type[ReflexError] = ModelFileError) -> None:
    """Opening ends in the typed error, naming the file and these words, and leaves no file open."""
    before = open_files()
    with pytest.raises(ReflexError) as caught:
        GGUF.open(path)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    for word in (str(path.parent), *words):
        assert word in message
    del caught
    assert open_files() <= before  # fewer: the collector may have closed another test's
