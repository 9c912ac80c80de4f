"""A model with experts through the command: the same answer whether routed experts or whole layers come first."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakecuda import ROOT

sys.path.append(str(ROOT / "bench"))  # behind tests/, which has a wire.py of its own

import models
from experts_starts import EARLY, PROGRAM

from reflex_ipc.cuda.upload import FEW_CORES
from reflex_ipc.environment import usable_cpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(usable_cpus() <= FEW_CORES, reason="without reader threads nothing comes first"),
]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three layers of 128 experts, 1.5 GB: enough to be still on its way when the first step is queued."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    models.make(path, "qwen3-30b-a3b", layers=3)
    yield path
    path.unlink()


def answer(kind: str, path: Path, prompt: str, *, early: bool) -> tuple[str, bool]:
    """17 tokens, and whether experts came first."""
    command = ["run", str(path), "-p", prompt, "-n", "17", "--ignore-eos", "--backend", "cuda", "--timings", "json"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("REFLEX_EARLY")}
    if early:
        env |= {"LD_PRELOAD": str(EARLY), "REFLEX_EARLY": "0", "REFLEX_MODEL": str(path)}
    program = [sys.executable, "-I", "-S", "-c", PROGRAM, kind, *command]
    done = subprocess.run(program, env=env, capture_output=True, text=True, errors="backslashreplace", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, "experts first" in done.stderr


@pytest.mark.parametrize("early", [True, False], ids=["early", "native"])
@pytest.mark.parametrize("prompt", ["Hello", "one two three four five six"])
def test_answers_are_those_of_a_whole_upload(large: Path, prompt: str, early: bool) -> None:
    whole = answer("whole", large, prompt, early=early)
    assert len(whole[0]) > 17 and whole[1] is False
    for _ in range(4):
        assert answer("first", large, prompt, early=early) == (whole[0], True)


@pytest.mark.parametrize("name", ["qwen3moe-w256-Q4_K_M", "qwen35moe-w256-Q4_K_M", "deepseek3-w256-Q4_K_M"])
def test_families(fixtures: Path, name: str) -> None:
    path = fixtures / "quantised" / f"{name}.gguf"
    whole, first = (answer(kind, path, "a", early=True) for kind in ("whole", "first"))
    assert first[0] == whole[0] != ""


def test_a_long_prompt_takes_everything_in_its_order(large: Path) -> None:
    assert answer("first", large, "one two three four five six seven eight nine ten " * 4, early=True)[1] is False
