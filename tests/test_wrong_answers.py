"""Where other tools answer wrongly, on real weights: `fixtures/make_wrong_answers.py` has the right numbers, by tokens
of llama.cpp and float64 arithmetic, and what each mistake makes of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_ipc.engine import Engine
from reflex_ipc.scores import Candidate, Scores

ITEMS = json.loads((Path(__file__).parent / "fixtures" / "smollm2_wrong_answers.json").read_text())

pytestmark = pytest.mark.model


def of(*mistakes: str) -> pytest.MarkDecorator:
    """A test's items: those of some mistakes, of all without."""
    some = [item for item in ITEMS if not mistakes or item["mistake"] in mistakes]
    assert some
    return pytest.mark.parametrize("item", some, ids=[f"{each['mistake']}: {each['right']}" for each in some])


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with Engine.open(smollm2, backend="cpu") as engine:
        yield engine


def scored(engine: Engine, item: dict[str, Any], **options: Any) -> Scores:
    return engine.score(item["prompt"], [choice["text"] for choice in item["choices"]], **options)


def raw(candidate: Candidate) -> list[float]:
    """The logits of a candidate's tokens."""
    return [a + b for a, b in zip(candidate.token_logprobs, candidate.token_logsumexps, strict=True)]


@of()
def test_every_number_is_the_independent_one(engine: Engine, item: dict[str, Any]) -> None:
    result = scored(engine, item)
    assert (result.prompt_tokens, result.healed, result.passes) == (item["n_context"], item["healed"], 1)
    for candidate, choice in zip(result.candidates, item["choices"], strict=True):
        assert list(candidate.tokens) == choice["tokens"]
        assert np.abs(np.subtract(candidate.token_logprobs, choice["logprobs"])).max() <= 1e-4
        assert np.abs(np.subtract(raw(candidate), choice["logits"])).max() <= 1e-3
        assert candidate.logprob == pytest.approx(sum(choice["logprobs"]), abs=2e-4)
    assert result.best.text == item["right"]


@of("none")
def test_what_a_neutral_context_takes_off(engine: Engine, item: dict[str, Any]) -> None:
    """The header of an answer without a chat, whose control token is one."""
    result = scored(engine, item, normalize="pmi", neutral=item["neutral"])
    for candidate, choice in zip(result.candidates, item["choices"], strict=True):
        assert candidate.neutral_logprob == pytest.approx(sum(choice["neutral"]), abs=2e-4)
        expected = sum(choice["logprobs"]) - sum(choice["neutral"])
        assert candidate.score == pytest.approx(expected, abs=4e-4)


def test_every_mistake_is_known() -> None:
    wrong = [item for item in ITEMS if item["mistake"] != "none"]
    kinds = {"raw logits", "greedy", "mean", "tokens apart", "no tokens", "a row early", "a space between"}
    assert {item["mistake"] for item in wrong} == kinds
    for item in wrong:
        assert max(item["choices"], key=lambda choice: choice["mistaken"])["text"] == item["wrong"] != item["right"]


@of("raw logits")
def test_sums_of_raw_logits_pick_what_is_long(engine: Engine, item: dict[str, Any]) -> None:
    """Ours do not; and who wants them has what it takes."""
    candidates = scored(engine, item).candidates
    assert max(candidates, key=lambda candidate: sum(raw(candidate))).text == item["wrong"]
    sums = [choice["mistaken"] for choice in item["choices"]]
    assert [sum(raw(candidate)) for candidate in candidates] == pytest.approx(sums, abs=5e-3)


@of("greedy")
def test_greedy_token_by_token_picks_a_dead_end(engine: Engine, item: dict[str, Any]) -> None:
    left, depth = list(scored(engine, item).candidates), 0
    while len(left) > 1:
        best = max(left, key=lambda candidate: candidate.token_logprobs[depth])
        left = [candidate for candidate in left if candidate.tokens[depth] == best.tokens[depth]]
        depth += 1
    assert left[0].text == item["wrong"]


@of("mean")
def test_the_mean_favours_a_predictable_tail(engine: Engine, item: dict[str, Any]) -> None:
    """Who asks for it gets it; the default is the probability."""
    result = scored(engine, item, normalize="mean")
    assert result.best.text == item["wrong"]
    means = [choice["mistaken"] for choice in item["choices"]]
    assert [candidate.score for candidate in result.candidates] == pytest.approx(means, abs=1e-4)


@of("tokens apart")
def test_a_candidate_is_not_made_into_tokens_alone(engine: Engine, item: dict[str, Any]) -> None:
    """`"is " + "Paris"` holds the token " Paris", which nothing that keeps the prompt's last space can reach."""
    apart = [choice["mistaken"] for choice in item["choices"]]
    ids = engine.tokenize(item["prompt"])
    for candidate, value in zip(scored(engine, item).candidates, apart, strict=True):
        (token,) = engine.tokenize(candidate.text)
        logits = engine.logits(ids)[-1].astype(np.float64)
        assert logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()) == pytest.approx(
            value, abs=1e-4
        )
        assert abs(candidate.logprob - value) > 1


@of("no tokens")
def test_no_candidate_is_scored_by_no_token(engine: Engine, item: dict[str, Any]) -> None:
    """`"un" + "able"` is one token, as many as the prompt's last word has: nothing would lie behind the prompt."""
    ids = engine.tokenize(item["prompt"])
    result = scored(engine, item)
    wrong = next(candidate for candidate in result.candidates if candidate.text == item["wrong"])
    assert len(engine.tokenize(item["prompt"] + wrong.text)) == len(ids)
    assert all(candidate.n_tokens > 0 and candidate.logprob < -1 for candidate in result.candidates)


@of("a row early")
def test_the_prompts_last_token_predicts_the_first(engine: Engine, item: dict[str, Any]) -> None:
    """Not the one before it."""
    logits = engine.logits(engine.tokenize(item["prompt"])).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for candidate, choice in zip(scored(engine, item).candidates, item["choices"], strict=True):
        assert candidate.token_logprobs[0] == pytest.approx(logprobs[-1, candidate.tokens[0]], abs=1e-4)
        assert choice["mistaken"] == pytest.approx(logprobs[-2, candidate.tokens[0]], abs=1e-4)


@of("a space between")
def test_candidates_are_literal(engine: Engine, item: dict[str, Any]) -> None:
    """A space that nobody asked for picks the wrong one, above all behind the header of an answer; `join` puts it there
    for who asks."""
    result = scored(engine, item, join=" ")
    assert result.best.text == item["wrong"]
    spaced = [choice["mistaken"] for choice in item["choices"]]
    assert [candidate.logprob for candidate in result.candidates] == pytest.approx(spaced, abs=2e-4)
