"""Logits and greedy continuations against the reference files: see the README of the fixtures for where they came from.

The bound is the norm of the difference over the norm of the reference, over all positions.
"""

from pathlib import Path

import legacy_file
import numpy as np
import pytest

from reflex_ipc.engine import Engine

EXACT = {
    "llama": 2e-5,
    "qwen2": 2e-5,
    "qwen3": 2e-5,
    "qwen3-untied": 2e-5,
    "qwen3moe": 2e-5,
    "qwen35": 5e-5,
    "qwen35moe": 5e-5,
    "qwen3next": 5e-5,
    "deepseek2-lite": 2e-5,
    "deepseek3": 2e-5,
}
"""Fixture -> bound. The recurrent state of the hybrid families adds up rounding over the sequence."""
QUANTISED = [
    "deepseek3-w256-Q4_K_M",
    "llama-w256-Q4_K_M",
    "qwen3-w256-IQ3_S",
    "qwen3-w256-IQ4_XS",
    "qwen3-w256-Q2_K",
    "qwen3-w256-Q4_0",
    "qwen3-w256-Q4_K_M",
    "qwen3-w256-Q5_K_M",
    "qwen3-w256-Q8_0",
    "qwen35-w256-Q4_K_M",
    "qwen35moe-w256-Q4_K_M",
    "qwen3moe-w256-MXFP4_MOE",
    "qwen3moe-w256-Q4_K_M",
]


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    expected = expected.astype(np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize(("name", "bound"), EXACT.items())
def test_logits_of_exact_weights(fixtures: Path, name: str, bound: float) -> None:
    reference = np.load(fixtures / "exact" / f"{name}-f16.npz")
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        assert relative_error(engine.logits(reference["ids"].tolist()), reference["logits"]) <= bound
        long = engine.logits(reference["long_ids"].tolist())
        assert relative_error(long[reference["long_rows"]], reference["long_logits"]) <= bound


@pytest.mark.parametrize("name", ["deepseek2-lite", "deepseek3"])
def test_logits_of_legacy_files(fixtures: Path, tmp_path: Path, name: str) -> None:
    """Files with `attn_kv_b` in one piece have the logits of the files they are made from."""
    source = fixtures / "exact" / f"{name}-f16.gguf"
    reference = np.load(source.with_suffix(".npz"))
    with Engine.open(legacy_file.write(source, tmp_path / "legacy.gguf"), backend="cpu") as engine:
        assert relative_error(engine.logits(reference["ids"].tolist()), reference["logits"]) <= EXACT[name]


@pytest.mark.parametrize("name", [*(f"exact/{name}-f16" for name in EXACT), *(f"quantised/{q}" for q in QUANTISED)])
def test_greedy_continuation(fixtures: Path, name: str) -> None:
    reference = np.load(fixtures / f"{name}.npz")
    prompt = reference["ids"][: int(reference["prompt_len"])].tolist()
    expected = reference["greedy"].tolist()
    with Engine.open(fixtures / f"{name}.gguf", backend="cpu") as engine:
        tokens = [t.id for t in engine.generate(prompt, max_tokens=len(expected), ignore_eos=True) if t.id is not None]
    # Where the best two are closer than float32 can tell, either is right, and what follows differs.
    close = np.flatnonzero(reference["greedy_gap"] < 1e-3)
    n = int(close[0]) if len(close) else len(expected)
    assert n > 8
    assert tokens[:n] == expected[:n]


@pytest.mark.parametrize("name", QUANTISED)
def test_logits_of_quantised_weights(fixtures: Path, name: str) -> None:
    reference = np.load(fixtures / "quantised" / f"{name}.npz")
    with Engine.open(fixtures / "quantised" / f"{name}.gguf", backend="cpu") as engine:
        assert relative_error(engine.logits(reference["ids"].tolist()), reference["logits"]) <= 2e-5


@pytest.mark.parametrize("name", EXACT)
def test_prefill_in_pieces_is_prefill_in_one(fixtures: Path, name: str) -> None:
    from reflex_ipc.plan import Step

    reference = np.load(fixtures / "exact" / f"{name}-f16.npz")
    ids = reference["ids"].tolist()
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        whole = engine.logits(ids)
        executor = engine._executor
        for sizes in ([1] * len(ids), [7, 1, 20, 20], [47, 1]):
            executor.reset()
            rows = []
            start = 0
            for size in sizes:
                executor.forward(Step.text(ids[start : start + size], start, range(size)))
                rows.append(executor.logits())
                start += size
            assert relative_error(np.concatenate(rows), whole) <= 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen35", "deepseek3"])
def test_long_prompts_go_in_pieces(fixtures: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` and `logits` cut a prompt where the chunk ends; small chunks here, so that it does."""
    from reflex_ipc import engine as engine_module
    from reflex_ipc import generation

    reference = np.load(fixtures / "exact" / f"{name}-f16.npz")
    ids = reference["ids"].tolist()
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        whole = engine.logits(ids)
        answer = [token.id for token in engine.generate(ids, max_tokens=8, ignore_eos=True)]
        for module in (engine_module, generation):
            monkeypatch.setattr(module, "PREFILL_CHUNK", 7)
        assert relative_error(engine.logits(ids), whole) <= 1e-5
        assert [token.id for token in engine.generate(ids, max_tokens=8, ignore_eos=True)] == answer


@pytest.mark.parametrize("name", EXACT)
def test_tree_is_each_branch_alone(fixtures: Path, name: str) -> None:
    """A step with branches gives every branch the logits it has as a text of its own, and leaves the prompt's state."""
    from reflex_ipc.plan import PARENT_NONE, Step

    prompt, branches = [5, 6, 7, 8], [[9, 10, 11], [9, 12], [13]]
    alone = [3, 4]  # a root of its own, which sees neither prompt nor state
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        expected = [engine.logits(prompt + branch)[len(prompt) :] for branch in branches] + [engine.logits(alone)]
        after = engine.logits([*prompt, 20])[-1]
        executor = engine._executor
        executor.reset()
        executor.forward(Step.text(prompt[:2], 0, []))
        tokens = [*prompt[2:], 9, 10, 11, 12, 13, *alone]
        positions = [2, 3, 4, 5, 6, 5, 4, 0, 1]
        parents = [-1, 0, 1, 2, 3, 2, 1, PARENT_NONE, 7]
        executor.forward(Step(tokens, positions, parents, list(range(len(tokens))), 2))
        tree = executor.logits()
        rows = [tree[[2, 3, 4]], tree[[2, 5]], tree[[6]], tree[[7, 8]]]
        for actual, wanted in zip(rows, expected, strict=True):
            assert relative_error(actual, wanted) <= 1e-5
        executor.forward(Step.text([20], executor.n_past, [0]))
        assert relative_error(executor.logits()[0], after) <= 1e-5
