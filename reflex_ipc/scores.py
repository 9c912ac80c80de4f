"""The numbers of docs/scoring.md: normalisation, softmax over the candidates, entropy, margin."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from reflex_ipc.healing import Tail

NORMALISATIONS = ("sum", "mean", "byte", "pmi")


class ScoredRows(NamedTuple):
    """What one pass found: of each of its rows, in their order. Natural logarithms.

    `logprobs[row]` are the log-probabilities of the row's targets; `logsumexps[row]` is ln of the sum of exp over the
    row's logits, so that a log-probability plus it is a logit.
    """

    logprobs: list[list[float]]
    logsumexps: list[float]


class Scored:
    """What the passes found of one candidate. No NamedTuple: one with a type in quotes takes 0.7 ms to make."""

    __slots__ = ("logprobs", "logsumexps", "neutral", "tail")

    def __init__(
        self, tail: "Tail", logprobs: list[float], logsumexps: list[float], neutral: list[float] | None
    ) -> None:
        self.tail = tail
        self.logprobs = logprobs
        self.logsumexps = logsumexps
        self.neutral = neutral


class Candidate(NamedTuple):
    """One continuation and what the model thinks of it. Log-probabilities are natural logarithms.

    `token_logsumexps[i]` is ln of the sum of exp over the logits that token i was one of.
    """

    text: str
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    token_logsumexps: tuple[float, ...]
    n_tokens: int
    n_bytes: int
    logprob: float
    neutral_logprob: float | None  # where there was a neutral context
    score: float
    probability: float

    def to_wire(self) -> dict[str, Any]:
        fields = self._asdict()
        if self.neutral_logprob is None:
            del fields["neutral_logprob"]
        return fields


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

    def to_wire(self) -> dict[str, Any]:
        """The fields of the protocol's result, which are those of `system1 --json`."""
        return {
            "candidates": [candidate.to_wire() for candidate in self.candidates],
            "best": self.candidates.index(self.best),
            "normalize": self.normalize,
            "temperature": self.temperature,
            "entropy_bits": self.entropy_bits,
            "margin": self.margin,
            "healed": self.healed,
            "passes": self.passes,
            "usage": {"prompt_tokens": self.prompt_tokens, "reused_tokens": 0},
        }


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
            Candidate(
                item.tail.text,
                item.tail.tokens,
                tuple(item.logprobs),
                tuple(item.logsumexps),
                len(item.tail.tokens),
                item.tail.n_bytes,
                sum_,
                before,
                value,
                probability,
            )
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
    if normalize == "pmi":
        assert neutral is not None, "pmi has a neutral context"
        return total - neutral
    return total
