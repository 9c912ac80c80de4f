"""Real weights on the device: SmolLM2's greedy answers are the reference executor's, or differ where rounding decides.

The model is found as in every test (REFLEX_SMOLLM2, or its package). What the reference says, and how sure of it it is,
is in fixtures/smollm2_margins.npz.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from reflex_ipc.engine import Engine

pytestmark = pytest.mark.gpu

ONE, MANY = 3e-3, 1e-2
"""Relative error of logits, one token at a time and in a prompt. The second is the bound of quantised files, whose
weights a prompt's kernels round to half precision; a single token's products are of 16-bit integers."""


class Reference:
    def __init__(self, fixtures: Path) -> None:
        stored = json.loads((fixtures / "smollm2_greedy.json").read_text())
        self.prompts = [item["prompt"] for item in stored]
        arrays = np.load(fixtures / "smollm2_margins.npz")
        self.tokens, self.second = arrays["tokens"], arrays["second"]
        self.gap, self.std, self.logprob = arrays["gap"], arrays["std"], arrays["logprob"]

    def close(self, bound: float) -> np.ndarray:
        """Where two logits, each off by the bound in the other's direction, would be the other way round."""
        return self.gap <= 2 * bound * self.std

    def say(self, i: int, at: int, got: int) -> str:
        return (
            f"{self.prompts[i]!r}, token {at}: {got} for {self.tokens[i, at]}; the reference's second is "
            f"{self.second[i, at]}, {self.gap[i, at]:.5f} behind; two bounds are "
            f"{2 * ONE * self.std[i, at]:.5f} for one token, {2 * MANY * self.std[i, at]:.5f} in a prompt"
        )


@pytest.fixture(scope="module")
def reference(fixtures: Path) -> Reference:
    return Reference(fixtures)


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[Engine]:
    with Engine.open(smollm2, backend="cuda") as engine:
        yield engine


def test_the_margins_leave_little_open(reference: Reference) -> None:
    assert reference.tokens.shape == (10, 64)
    assert reference.close(ONE).sum() <= 10 and reference.close(MANY).sum() <= 25  # of 640


@pytest.mark.parametrize("i", range(10))
def test_greedy_answers(engine: Engine, reference: Reference, i: int, capsys: pytest.CaptureFixture[str]) -> None:
    """64 tokens as they are generated; behind a choice that rounding decides the answers are others."""
    answer = [t.id for t in engine.generate(reference.prompts[i], max_tokens=64, ignore_eos=True) if t.id is not None]
    assert len(answer) == 64
    for at, got in enumerate(answer):
        if got != reference.tokens[i, at]:
            with capsys.disabled():
                print(f"\n{reference.say(i, at, got)}")
            is_close = reference.close(ONE if at else MANY)[i, at]  # the first comes straight from the prompt
            assert is_close and got == reference.second[i, at], reference.say(i, at, got)
            break
    again = engine.generate(reference.prompts[i], max_tokens=64, ignore_eos=True)
    assert [t.id for t in again if t.id is not None] == answer


@pytest.mark.parametrize("i", range(10))
def test_every_position_of_the_references_answer(engine: Engine, reference: Reference, i: int) -> None:
    """The reference's answer as a prompt: its every token is the best, or as good; and as likely as it said."""
    ids = engine.tokenize(reference.prompts[i])
    expected = reference.tokens[i]
    logits = engine.logits(ids + expected[:-1].tolist())[len(ids) - 1 :].astype(np.float64)
    for at, got in enumerate(logits.argmax(axis=1).tolist()):
        if got != expected[at]:
            assert reference.close(MANY)[i, at] and got == reference.second[i, at], reference.say(i, at, got)
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprob = shifted[range(64), expected] - np.log(np.exp(shifted).sum(axis=1))
    # An error of a logit and one of its row's normaliser; four standard deviations of 64.
    error = np.abs(logprob - reference.logprob[i])
    assert (error <= 4 * MANY * reference.std[i]).all(), error.max()
    assert np.sqrt(np.square(error).mean()) <= np.sqrt(2) * MANY * reference.std[i].mean()
