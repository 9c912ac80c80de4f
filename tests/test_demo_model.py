"""The demo model, real weights: what it says is what another engine says with the same numbers.

`fixtures/make_smollm2_greedy.py` made the stored texts with llama.cpp on the exactly dequantised weights, in float32.
One of the ten differs at its 57th token, where the best two are 1.3e-4 apart; the first 32 tokens leave no doubt.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from reflex_ipc.engine import Engine

STORED = json.loads((Path(__file__).parent / "fixtures" / "smollm2_greedy.json").read_text())

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with Engine.open(smollm2, backend="cpu") as engine:
        yield engine


@pytest.mark.parametrize("item", STORED, ids=lambda item: item["prompt"])
def test_greedy_text(engine: Engine, item: dict[str, str]) -> None:
    text = "".join(token.text for token in engine.generate(item["prompt"], max_tokens=32))
    assert len(text) >= 6
    assert item["text"].startswith(text)
    if item["text"] != text:
        assert len(text) > 60


def test_end_of_generation(engine: Engine) -> None:
    generation = engine.generate("Two plus two equals", max_tokens=32)
    tokens = list(generation)
    assert "".join(token.text for token in tokens) == " five."
    assert generation.finish_reason == "stop"
    assert (generation.prompt_tokens, generation.completion_tokens) == (4, len(tokens))


def test_past_the_end_when_asked(engine: Engine) -> None:
    generation = engine.generate("Two plus two equals", max_tokens=8, ignore_eos=True)
    assert sum(token.id is not None for token in generation) == 8
    assert generation.finish_reason == "length"


def test_stop_string_across_tokens(engine: Engine) -> None:
    generation = engine.generate("The capital of France is", max_tokens=32, stop=["is: 2", "\n\nThe answer"])
    assert "".join(token.text for token in generation) == " Paris."
    assert generation.finish_reason == "stop_string"


def test_withheld_text_comes_last(engine: Engine) -> None:
    """The answer ends in what could have become the stop string: it is text after all."""
    generation = engine.generate("The capital of France is", max_tokens=3, stop=[".\n\nNever"])
    tokens = list(generation)
    assert "".join(token.text for token in tokens).startswith(" Paris.")
    assert tokens[-1].id is None and tokens[-1].logprob is None


def test_a_new_answer_ends_the_one_under_way(engine: Engine) -> None:
    first = engine.generate("Once upon a time", max_tokens=50)
    next(first)
    second = engine.generate("The capital of France is", max_tokens=1)
    assert [token.text for token in second] == [" Paris"]
    assert first.finish_reason == "cancelled"
    assert list(first) == []


def test_poll_ends_an_answer(engine: Engine) -> None:
    tokens = []
    generation = engine.generate(
        "Once upon a time", max_tokens=50, poll=lambda: "deadline" if len(tokens) >= 3 else None
    )
    for token in generation:
        tokens.append(token)
    assert len(tokens) == 3
    assert generation.finish_reason == "deadline"


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    """Against a softmax of the logits in float64, whatever temperature and penalties do to the choice."""
    import numpy as np

    from reflex_ipc.sampler import Sampling

    ids = engine.tokenize("The capital of France is")
    logits = engine.logits(ids)[-1].astype(np.float64)
    expected = logits - logits.max()
    expected -= np.log(np.exp(expected).sum())
    sampling = Sampling(temperature=1.5, presence_penalty=1.0, seed=3, top_logprobs=5)
    token = next(engine.generate(ids, max_tokens=1, sampling=sampling))
    assert token.id is not None and token.logprob is not None
    assert abs(token.logprob - expected[token.id]) < 1e-5
    best = np.argsort(-expected)[:5]
    assert [i for i, _ in token.top] == best.tolist()
    assert np.allclose([p for _, p in token.top], expected[best], atol=1e-5)
