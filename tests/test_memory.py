"""What a run needs in memory: said before it is taken, refused with the sum where it is not there."""

from pathlib import Path

import pytest

from reflex_ipc import inspect
from reflex_ipc.engine import Engine
from reflex_ipc.errors import OutOfMemoryError, UnsupportedModelError
from reflex_ipc.gguf import GGUF
from reflex_ipc.reference import memory

MIB = 1 << 20


def needs(path: Path, context: int) -> dict[str, dict[str, int]]:
    with GGUF.open(path) as gguf:
        description = inspect.describe(gguf)
        inspect.add_plan(description, gguf, context)
    return {entry["backend"]: entry for entry in description["memory"]}


@pytest.mark.model
def test_inspect_says_what_the_demo_model_needs(smollm2: Path) -> None:
    """30 layers of 3 key and value heads of 64: 11,520 elements a token, 23,040 bytes in half precision."""
    entry = needs(smollm2, 1024)
    assert entry["cpu"]["bytes_per_token"] == 4 * 2 * 30 * 3 * 64
    assert entry["cpu"]["weights"] == 4 * 134_515_008
    assert entry["cpu"]["cache"] == 1024 * entry["cpu"]["bytes_per_token"]
    # The device keeps the file's own bytes, and a scale beside each row of the cache.
    assert 0 <= entry["cuda"]["weights"] - 96_576_768 < 64 * 272
    assert 23_040 <= entry["cuda"]["bytes_per_token"] <= 23_040 + 30 * 3 * 2 * 4
    for each in entry.values():
        assert each["total"] == each["weights"] + each["cache"] + each["scratch"]


def test_models_for_the_cpu_only_say_nothing_of_a_device(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(plan: object) -> None:
        raise UnsupportedModelError("no kernel for one of its ops")

    assert set(needs(fixtures / "exact" / "deepseek3-f16.gguf", 256)) == {"cpu", "cuda"}
    monkeypatch.setattr("reflex_ipc.cuda.families.check", refuse)
    assert set(needs(fixtures / "exact" / "deepseek3-f16.gguf", 256)) == {"cpu"}


def test_a_model_that_does_not_fit_is_refused_with_the_sum(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available", lambda: 100 * MIB)
    loaded = []
    monkeypatch.setattr("reflex_ipc.reference.executor.Weights", lambda *a: loaded.append(a))
    with pytest.raises(OutOfMemoryError, match=r"needs \d+ MiB of memory .*weights.*cache.*; 100 MiB are free"):
        Engine.open(fixtures / "exact" / "llama-f16.gguf", backend="cpu")
    assert not loaded


def test_a_context_that_does_not_fit_is_refused(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.open(fixtures / "exact" / "llama-f16.gguf", backend="cpu") as engine:
        first = [token.id for token in engine.generate([5, 6, 7], max_tokens=4, ignore_eos=True)]
        monkeypatch.setattr(memory, "available", lambda: 100 * MIB)
        with pytest.raises(OutOfMemoryError, match="100 MiB are free"):
            engine.generate([5, 6, 7], max_tokens=2000)
        # What was reserved before still serves.
        assert [token.id for token in engine.generate([5, 6, 7], max_tokens=4, ignore_eos=True)] == first
