"""One answer under way: a prompt goes in, tokens come out, until something ends it."""

from collections.abc import Generator, Iterator, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, NamedTuple

from reflex_ipc.errors import CancelledError, DeadlineError, go_on
from reflex_ipc.plan import PREFILL_CHUNK, Step
from reflex_ipc.sampler import Sampler
from reflex_ipc.stamps import ms, stamp
from reflex_ipc.stops import StopStrings

if TYPE_CHECKING:
    from reflex_ipc.engine import Engine
    from reflex_ipc.errors import Poll

PROMPT_ROWS = 64
"""Tokens of a prompt whose logits are on the host at once, where each one's log-probability is wanted."""


class Token(NamedTuple):
    """A piece of an answer.

    `text` has whole characters only and nothing that may yet turn out to be a stop string; it can be empty, or begin
    with what was held back before. `raw` is the token's own bytes wherever `text` is not just them. What is still held
    back at the end comes last, with `id` None.

    Tokens `of_prompt` come first, if they were asked for: the prompt's own, control tokens as the file writes them,
    each with what the model thought of it after those before it. The first has no `logprob`.
    """

    id: int | None
    text: str
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    raw: bytes | None = None
    of_prompt: bool = False


class Generation:
    """One answer under way: an iterator over its tokens, with what is known of it so far."""

    def __init__(
        self,
        engine: "Engine",
        ids: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        stops: StopStrings,
        ignore_eos: bool,
        prompt_logprobs: bool,
        poll: "Poll | None",
    ) -> None:
        self.prompt_tokens = len(ids)
        self.reused_tokens = 0
        self.completion_tokens = 0
        self.finish_reason: str | None = None
        self.timings: dict[str, float] = {}
        self.seed = sampler.sampling.seed
        self._engine = engine
        self._executor = engine._executor
        self._max_tokens = max_tokens
        self._sampler = sampler
        self._stops = stops
        self._ignore_eos = ignore_eos
        self._poll = poll
        self._text = engine.tokenizer.decoder()
        self._tokens = self._run(ids, prompt_logprobs)

    def __iter__(self) -> "Generation":
        return self

    def __next__(self) -> Token:
        return next(self._tokens)

    def close(self) -> None:
        """Stop here. The engine is ready for the next request."""
        self._tokens.close()

    def _run(self, ids: Sequence[int], prompt_logprobs: bool) -> Generator[Token, None, None]:
        began = monotonic_ns()
        try:
            try:
                if prompt_logprobs:
                    yield from self._prefill_rated(ids)
                else:
                    self._prefill(ids)
                self.timings["prompt_ms"] = ms(began, stamp("prompt"))
                go_on(self._poll)
                yield from self._decode(began)
            except (CancelledError, DeadlineError) as told:
                self.finish_reason = told.code
            if self.finish_reason != "stop_string":
                piece, _ = self._stops.push(self._text.finish())
                rest = piece + self._stops.flush()
                if rest:
                    yield Token(None, rest, None)
        finally:
            if self.finish_reason is None:
                self.finish_reason = CancelledError.code
            self.timings["total_ms"] = ms(began, stamp("answer"))

    def _prefill(self, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            last = start + len(chunk) == len(ids)
            self._executor.forward(Step.text(chunk, start, [len(chunk) - 1] if last else []), self._poll)

    def _prefill_rated(self, ids: Sequence[int]) -> Iterator[Token]:
        """The prompt's tokens with their log-probabilities: each position says what it thinks of the next."""
        text = self._engine.tokenizer.decoder(special=True)

        def token(at: int, logprob: float | None, top: tuple[tuple[int, float], ...]) -> Token:
            raw = self._engine._bytes(ids[at], special=True)
            piece = text.push(ids[at]) if ids[at] < self._engine.tokenizer.n_vocab else ""
            if at == len(ids) - 1:
                piece += text.finish()
            return Token(ids[at], piece, logprob, top, None if piece.encode() == raw else raw, True)

        yield token(0, None, ())
        for start in range(0, len(ids), PROMPT_ROWS):
            chunk = ids[start : start + PROMPT_ROWS]
            self._executor.forward(Step.text(chunk, start, range(len(chunk))), self._poll)
            for at, logits in enumerate(self._executor.logits(), start + 1):
                if at < len(ids):
                    sampled = self._sampler.rate(logits, ids[at])
                    yield token(at, sampled.logprob, sampled.top)

    def _decode(self, began: int) -> Iterator[Token]:
        tokenizer = self._engine.tokenizer
        room = self._engine.n_ctx - self.prompt_tokens
        if self._max_tokens == 0 or room == 0:
            self.finish_reason = "length" if self._max_tokens == 0 else "context"
            return
        for sampled in self._executor.decode(self._sampler, self._poll):
            if "first_token_ms" not in self.timings:
                self.timings["first_token_ms"] = ms(began, stamp("first token"))
            if sampled.id in tokenizer.eog and not self._ignore_eos:
                self.finish_reason = "stop"
                return
            # The padding rows of an output matrix are beyond the vocabulary and spell nothing.
            pushed = self._text.push(sampled.id) if sampled.id < tokenizer.n_vocab else ""
            piece, stopped = self._stops.push(pushed)
            raw = self._engine._bytes(sampled.id)
            self.completion_tokens += 1
            if stopped:
                self.finish_reason = "stop_string"
            elif self.completion_tokens == self._max_tokens:
                self.finish_reason = "length"
            elif self.completion_tokens == room:
                self.finish_reason = "context"
            own = None if piece.encode() == raw else raw
            yield Token(sampled.id, piece, sampled.logprob, sampled.top, own)
            if self.finish_reason is not None:
                return
