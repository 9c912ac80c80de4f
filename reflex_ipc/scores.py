"""The numbers of docs/scoring.md: normalisation, softmax over the candidates, entropy, margin."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from reflex_ipc.healing import Tail

NORMALISATIONS = ("sum", "mean", "byte", "pmi")


class Scored(NamedTuple):
    """What the passes found of one candidate."""

    tail: "Tail"
    logprobs: list[float]
    neutral: list[float] | None


class Candidate(NamedTuple):
    """One continuation and what the model thinks of it. Log-probabilities are natural logarithms."""

    text: str
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    n_bytes: int
    logprob: float
    neutral_logprob: float | None
    score: float
    probability: float


class Scores(NamedTuple):
    """All candidates, in the order they were given."""

    candidates: tuple[Candidate, ...]
    normalize: str
    temperature: float
    entropy_bits: float
    margin: float
    prompt_tokens: int
    healed: int
    passes: int

    @property
    def best(self) -> Candidate:
        return max(self.candidates, key=lambda candidate: candidate.score)


def scores(
    found: Sequence[Scored], normalize: str, temperature: float, *, prompt_tokens: int, healed: int, passes: int
) -> Scores:
    """The numbers of docs/scoring.md."""
    sums = [math.fsum(item.logprobs) for item in found]
    neutral = [None if item.neutral is None else math.fsum(item.neutral) for item in found]
    values = [
        _normalised(normalize, total, item, before) for total, item, before in zip(sums, found, neutral, strict=True)
    ]
    peak = max(values)
    weights = [math.exp((value - peak) / temperature) for value in values]
    total = math.fsum(weights)
    probabilities = [weight / total for weight in weights]
    ranked = sorted(probabilities, reverse=True)
    return Scores(
        candidates=tuple(
            Candidate(*item.tail[:2], tuple(item.logprobs), item.tail.n_bytes, sum_, before, value, probability)
            for item, sum_, before, value, probability in zip(found, sums, neutral, values, probabilities, strict=True)
        ),
        normalize=normalize,
        temperature=temperature,
        entropy_bits=-math.fsum(p * math.log2(p) for p in probabilities if p > 0.0) + 0.0,
        margin=ranked[0] - (ranked[1] if len(ranked) > 1 else 0.0),
        prompt_tokens=prompt_tokens,
        healed=healed,
        passes=passes,
    )


def _normalised(normalize: str, total: float, item: Scored, neutral: float | None) -> float:
    if normalize == "mean":
        return total / len(item.tail.tokens)
    if normalize == "byte":
        return total / max(1, item.tail.n_bytes)
    if normalize == "pmi" and neutral is not None:
        return total - neutral
    return total
