"""Scoring: how likely a model holds each of some continuations, in one forward pass. docs/scoring.md defines it.

In order, as `Engine.scoring` has it: `check` looks at the request, `healing` makes tokens of the texts and says from
where on they are scored, `Scoring` runs the steps that `tree` makes of them, `scores` makes the numbers.
"""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reflex_ipc.errors import InvalidRequestError, ReflexError, Watch
from reflex_ipc.healing import NO_NEUTRAL, Split, check_scored
from reflex_ipc.plan import PREFILL_CHUNK, Step
from reflex_ipc.scores import NORMALISATIONS, Scored, ScoredRows, Scores, scores
from reflex_ipc.tree import passes, tree, tree_tokens

if TYPE_CHECKING:
    from reflex_ipc.errors import Poll

MAX_CANDIDATES = 4096
MAX_TREE = 32768
"""Tokens of all candidates together, what they share counted once."""
LONGEST_TOGETHER = 4096
"""Tokens of a context that go through the model together with the tree; of a longer one, the beginning goes ahead."""


class Options(NamedTuple):
    """How candidates are scored."""

    normalize: str = "sum"  # what is compared: one of NORMALISATIONS
    temperature: float = 1.0  # of the softmax over the candidates
    join: str = ""  # stands between prompt and candidate
    end: bool = False  # the token that ends a turn is scored behind every candidate, too
    neutral: str | None = None  # the context that pmi compares with; None is the file's own token for no context
    arguments: dict[str, Any] | None = None  # for the chat template


def check(candidates: Sequence[str], options: Options) -> None:
    """Raises InvalidRequestError naming what is wrong with a request."""
    normalize, temperature = options.normalize, options.temperature
    if normalize not in NORMALISATIONS:
        raise InvalidRequestError(f"normalize is {normalize!r}; known are {', '.join(NORMALISATIONS)}", "normalize")
    if not 0.0 < temperature < math.inf:
        raise InvalidRequestError(
            f"temperature is {temperature}; scores are divided by it, so it must be finite and above 0", "temperature"
        )
    if options.neutral == "":
        raise InvalidRequestError(
            "the neutral context is empty; leave it out for the token that begins or ends a text", "neutral"
        )
    if isinstance(candidates, str):  # a sequence of texts, too: of its characters
        raise InvalidRequestError("the candidates are one text; they are a list of texts", "candidates")
    if not candidates:
        raise InvalidRequestError("there are no candidates to score", "candidates")
    check_count(len(candidates))
    for i, text in enumerate(candidates):
        if not isinstance(text, str):
            raise InvalidRequestError(f"candidate {i} is of type {type(text).__name__}, not a text", f"candidates[{i}]")
        if not text:
            raise InvalidRequestError(f"candidate {i} is empty: it has nothing to score", f"candidates[{i}]")


def check_count(n: int) -> None:
    """Refuses what has `n` candidates, or at least so many as far as it was read."""
    if n > MAX_CANDIDATES:
        raise InvalidRequestError(f"there are too many candidates: {MAX_CANDIDATES} are scored at most", "candidates")


class Executor(Protocol):
    """What of `backends.Executor` scoring needs."""

    @property
    def n_past(self) -> int: ...
    def forward(self, step: Step, poll: "Poll | None" = None) -> None: ...
    def score(self, step: Step, targets: Sequence[Sequence[int]], poll: "Poll | None" = None) -> ScoredRows: ...
    def step_limit(self, n_past: int, n_tokens: int) -> int: ...


class Scoring:
    """Candidates about to be scored after a context of `prompt_tokens`."""

    def __init__(self, executor: Executor, split: Split, options: Options, poll: "Poll | None" = None) -> None:
        tokens = [tail.tokens for tail in split.tails]
        check_scored(sum(map(len, tokens)))
        nodes = tree(tokens, poll)
        if len(nodes.tokens) > MAX_TREE:
            raise InvalidRequestError(
                f"the candidates have {len(nodes.tokens)} tokens together; at most {MAX_TREE} are scored", "candidates"
            )
        is_compared = options.normalize == "pmi" or options.neutral is not None
        if is_compared and not split.neutral:
            raise InvalidRequestError(NO_NEUTRAL, "normalize")
        self.prompt_tokens = len(split.context)
        self.neutral_tokens = len(split.neutral) if is_compared else 0
        self.total_ms = 0.0
        self._executor = executor
        self._split = split
        self._tree = nodes
        self._options = options
        self._neutral = split.neutral if is_compared else ()
        if len(self._neutral) > LONGEST_TOGETHER:
            raise InvalidRequestError(
                f"the neutral context has {len(self._neutral)} tokens; at most {LONGEST_TOGETHER} are taken", "neutral"
            )
        self._poll = poll

    def run(self) -> Scores:
        """Raises CancelledError or DeadlineError where `poll` says so, and ReflexError (internal) where a
        log-probability is not finite: what would be made of it means nothing."""
        began = time.perf_counter()
        executor, context, tails = self._executor, self._split.context, self._split.tails
        n_step = min(len(context), LONGEST_TOGETHER) + tree_tokens(self._tree, self._neutral)
        limit = executor.step_limit(len(context), n_step)
        # The end of the context and the candidates are one step. What goes ahead is no pass of its own: none of its
        # tokens is computed twice.
        longest = min(max(1, limit - len(self._neutral)), LONGEST_TOGETHER)
        while len(context) - executor.n_past > longest:
            n = min(PREFILL_CHUNK, len(context) - executor.n_past - 1)
            chunk = context[executor.n_past : executor.n_past + n]
            executor.forward(Step.text(chunk, executor.n_past, []), self._poll)
        n_passes = 0
        watch = Watch(self._poll)
        found = [
            Scored(
                tail,
                [0.0] * len(tail.tokens),
                [0.0] * len(tail.tokens),
                [0.0] * len(tail.tokens) if self._neutral else None,
            )
            for tail in tails
        ]
        tokens = [tail.tokens for tail in tails]
        steps = passes(context, tokens, self._tree, self._neutral, executor.n_past, limit, self._poll)
        for step, targets, places in steps:
            logprobs, logsumexps = executor.score(step, targets, self._poll)
            for row, logsumexp, row_places in zip(logprobs, logsumexps, places, strict=True):
                watch()
                for value, wanted in zip(row, row_places, strict=True):
                    if not math.isfinite(value):
                        raise ReflexError(
                            f"the model produced a log-probability of {value}: broken weights or an overflow"
                        )
                    for candidate, at, is_neutral in wanted:
                        item = found[candidate]
                        if not is_neutral:
                            item.logprobs[at] = value
                            item.logsumexps[at] = logsumexp
                        elif item.neutral is not None:
                            item.neutral[at] = value
            n_passes += 1
        self.total_ms = (time.perf_counter() - began) * 1e3
        return scores(
            found,
            self._options.normalize,
            self._options.temperature,
            prompt_tokens=len(context),
            healed=self._split.healed,
            passes=n_passes,
        )
