"""The latency of a loaded model behind a pipe, through a real process on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from fakecuda import ROOT

sys.path.append(str(ROOT / "bench"))  # behind tests/, which has a wire.py of its own

import stdio
from measure import MeasurementError

from reflex_ipc.tokenizer import Tokenizer


def test_prompts_are_fresh_and_as_long_as_asked(fixtures: Path):
    tokenizer = Tokenizer.from_gguf(fixtures / "exact" / "qwen3-f16.gguf")
    prompts, again = (stdio.Prompts(tokenizer, 30) for _ in range(2))
    texts = [prompts.next() for _ in range(100)]
    assert len({*texts}) == 100 and texts == [again.next() for _ in range(100)]
    assert {len(tokenizer.encode(text)) for text in texts} == {30}
    one = stdio.Prompts(tokenizer, 1)
    with pytest.raises(MeasurementError, match="no text of common words has 1 tokens"):
        for _ in range(tokenizer.n_vocab):
            one.next()


def test_a_run(fixtures: Path, tmp_path: Path):
    out = tmp_path / "out.json"
    command = [sys.executable, ROOT / "bench" / "stdio.py", fixtures / "exact" / "qwen3-f16.gguf", "--out", out]
    command += ["--backend", "cpu", "-n", "8", "--tokens", "6", "--prompt-tokens", "12"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["what"], len(row["seconds"])) for row in rows] == [
        ("score", 8),
        ("first token", 2),
        ("each later token", 2),
        ("6 tokens, of it in the process", 2),
    ]
    assert all(0 < inside < whole for inside, whole in zip(rows[0]["inside_s"], rows[0]["seconds"], strict=True))
    assert result.stdout.count("\n") == 6  # a head, four rows, and one for what is inside of a decision


def test_a_process_that_fails_is_no_figure(tmp_path: Path):
    absent = tmp_path / "absent.gguf"
    with pytest.raises(MeasurementError, match="stdio"), stdio.serving(str(absent), "cpu", 64):
        pass
