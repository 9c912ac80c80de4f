"""Token ids in, token ids out: one model, one sequence, one request at a time.

`Engine` opens a model on a backend; `Generation` is one answer under way. Text meets ids only at their borders, by the
file's own tokenizer. What an executor runs on is chosen in `_executor` and nowhere known after it.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reflex_ipc import archs
from reflex_ipc.environment import complete_site, model_path
from reflex_ipc.errors import (
    CancelledError,
    ContextOverflowError,
    DeadlineError,
    InvalidRequestError,
    ModelFileError,
    UnsupportedModelError,
    go_on,
)
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import PREFILL_CHUNK, Plan, Step
from reflex_ipc.sampler import Sampled, Sampler, Sampling
from reflex_ipc.stamps import lasted, stamp
from reflex_ipc.stops import DEFAULT_MAX_TOKENS, StopStrings
from reflex_ipc.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from reflex_ipc.chat import ChatTemplate
    from reflex_ipc.cuda.device import Opening
    from reflex_ipc.scoring import Scores, Scoring
    from reflex_ipc.trace import Trace


DEVICE_NODES = ("/dev/nvidiactl", "/dev/dxg")
"""Where there is an NVIDIA device, one of these is there, too."""

Progress = Callable[[str, int, int], None]
"""Called while a model opens with a phase, what is done of it, and the total."""
Poll = Callable[[], str | None]
"""Asked whether to go on, between tokens and inside whatever takes long: "cancelled" or "deadline" ends the answer."""
PROMPT_ROWS = 64
"""Tokens of a prompt whose logits are on the host at once, where each one's log-probability is wanted."""


class Executor(Protocol):
    """What a backend does with a plan. It holds one sequence, `n_past` tokens long.

    Whatever takes a `poll` asks it where that costs nothing. Where it says to stop, CancelledError or DeadlineError is
    raised; a step that was under way has then forgotten the sequence, as `reset` does.
    """

    n_ctx: int

    @property
    def n_past(self) -> int: ...

    def reset(self) -> None:
        """Forget the sequence."""

    def reserve(self, n_tokens: int) -> None:
        """Make room for a sequence of `n_tokens`, at most `n_ctx`. Raises OutOfMemoryError with the sum."""

    def forward(self, step: Step, poll: Poll | None = None) -> None:
        """Run a step. The logits of its rows stay with the executor until the next one."""

    def logits(self) -> "npt.NDArray[np.float32]":
        """(rows of the last step, n_vocab), on the host."""

    def score(self, step: Step, targets: Sequence[Sequence[int]], poll: Poll | None = None) -> list[list[float]]:
        """Run a step; for each of its rows, the log-probabilities of the row's target tokens."""

    def step_limit(self, n_past: int) -> int:
        """How many tokens one step behind `n_past` others may have, by the memory there is."""

    def decode(self, sampler: Sampler, poll: Poll | None = None) -> Iterator[Sampled]:
        """Sample from the last row, yield, ask, feed back, for ever; never more than one token ahead of the caller."""

    def close(self) -> None: ...


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


class Engine:
    """A model that answers. Use as a context manager, or call `close`."""

    _executor: Executor
    backend: str

    def __init__(self, gguf: GGUF, tokenizer: Tokenizer, plan: Plan, n_ctx: int) -> None:
        """A model that can tokenise; `open` gives it its executor."""
        self.gguf = gguf
        self.tokenizer = tokenizer
        self.plan = plan
        self.n_ctx = n_ctx
        self.timings: dict[str, float] = {}
        self._running: Generation | None = None
        self._template: ChatTemplate | None = None
        self._closed = False
        self.why_cpu: str | None = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        backend: str = "auto",
        device: int = 0,
        context: int | None = None,
        threads: int | None = None,
        progress: Progress | None = None,
        meanwhile: Callable[["Engine"], object] | None = None,
        trace: "Trace | None" = None,
    ) -> "Engine":
        """Open a model: the path of a GGUF file, or the name of an installed demo model.

        `backend` is "auto", "cuda" or "cpu", `device` the number of a CUDA device; "auto" uses the CPU where there is
        no usable device, and `why_cpu` says why. `context` is the tokens that prompt and answer may have together, the
        model's own maximum by default. `meanwhile` is called once the file's header is read, with an engine that can
        tokenise and nothing else yet, while the device still starts. `trace` takes what runs when.

        Raises ModelFileError, UnsupportedModelError, OutOfMemoryError, DeviceError, ContextOverflowError, and what
        `meanwhile` raises.
        """
        began = time.perf_counter()
        stamp("imports")
        opening = _start_driver(backend, device)
        stamp("driver start")
        gguf: GGUF | None = None
        try:
            native = opening.header_reader() if opening is not None else None
            gguf = GGUF.open(model_path(path) if isinstance(path, str) else path, native)
            stamp("header")
            tokenizer = Tokenizer.from_gguf(gguf)
            stamp("vocabulary")
            header = time.perf_counter()
            plan = archs.build(gguf)
            _check_vocabulary(gguf, tokenizer, plan)
            n_ctx = _context(gguf, plan, context)
            engine = cls(gguf, tokenizer, plan, n_ctx)
            stamp("plan")
            planned = time.perf_counter()
            if meanwhile is not None:
                meanwhile(engine)
            executor, engine.backend, engine.why_cpu = _executor(
                gguf, plan, n_ctx, opening, backend, threads, progress, trace
            )
            stamp("executor")
            if trace is not None:
                trace.about |= {"model": os.path.basename(gguf.path), "backend": engine.backend}
        except BaseException:
            if opening is not None:
                opening.close()
            if gguf is not None:
                gguf.close()
            raise
        engine._executor = executor
        engine.timings = {
            "header_ms": (header - began) * 1e3,
            "plan_ms": (planned - header) * 1e3,
            "executor_ms": (time.perf_counter() - planned) * 1e3,
            **lasted("driver", "context"),
        }
        if context is not None:
            try:
                executor.reserve(n_ctx)
            except BaseException:
                engine.close()
                raise
        return engine

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of memory, device and file. Closing twice is no error."""
        self._running = None
        self._closed = True
        self._executor.close()
        self.gguf.close()

    @property
    def n_vocab(self) -> int:
        return self.plan.n_vocab

    def tokenize(self, text: str, *, special: bool = True, poll: Poll | None = None) -> list[int]:
        """Ids of a text, with the begin-of-sequence token where the file asks for one.

        Raises CancelledError or DeadlineError where `poll` says so.
        """
        return self.tokenizer.encode(text, special=special, poll=poll)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def chat(
        self, messages: Sequence[dict[str, Any]], arguments: dict[str, Any] | None = None, *, poll: Poll | None = None
    ) -> list[int]:
        """Ids of a conversation, rendered by the file's own template up to where the answer begins.

        `arguments` reach the template as they are (`enable_thinking`, `tools`). Control tokens are recognised in the
        template's own text only. Raises InvalidRequestError and TemplateError.
        """
        ids = self.tokenizer.encode_parts(self.template.render(list(messages), arguments=arguments).parts, poll)
        stamp("tokens")
        return ids

    @property
    def template(self) -> "ChatTemplate":
        """The file's chat template, compiled when first used."""
        if self._template is None:
            from reflex_ipc.chat import ChatTemplate

            self._template = ChatTemplate.from_gguf(self.gguf, self.tokenizer)
        return self._template

    def info(self) -> dict[str, Any]:
        """What there is to know about the model, in JSON's types."""
        per_token, fixed = self.plan.state_elements()
        return {
            "name": self.gguf.str("general.name", ""),
            "architecture": self.plan.arch,
            "backend": self.backend,
            "n_ctx": self.n_ctx,
            "n_ctx_train": self.plan.n_ctx_train,
            "n_vocab": self.n_vocab,
            "n_embd": self.plan.n_embd,
            "n_layer": self.plan.n_layer,
            "n_parameters": self.plan.n_elements,
            "state_elements_per_token": per_token,
            "state_elements_fixed": fixed,
            "file": os.path.basename(self.gguf.path),
            "bytes": sum(shard.size for shard in self.gguf.shards),
            "eog": sorted(self.tokenizer.eog),
        }

    def logits(self, ids: Sequence[int]) -> "npt.NDArray[np.float32]":
        """(len(ids), n_vocab) float32: at every position, the unnormalised log-probabilities of the next token."""
        import numpy as np

        self._check(ids)
        self._begin(len(ids))
        chunks = []
        for start in range(0, len(ids), PREFILL_CHUNK):
            chunk = ids[start : start + PREFILL_CHUNK]
            self._executor.forward(Step.text(chunk, start, range(len(chunk))))
            chunks.append(self._executor.logits())
        return np.concatenate(chunks)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = DEFAULT_MAX_TOKENS,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
        prompt_logprobs: bool = False,
        poll: Poll | None = None,
        **fields: Any,
    ) -> "Generation":
        """An iterator over the tokens that follow `prompt`, a text or ids; `prompt_logprobs`: over the prompt's, too.

        How tokens are chosen is said by `sampling`, or by its fields (`temperature=0.8, seed=7`); greedily without.
        Raises InvalidRequestError and ContextOverflowError here, before anything is computed. An answer that would
        outgrow the context ends there, with finish_reason "context". A new call ends the answer under way.
        """
        if sampling is not None and fields:
            raise InvalidRequestError(f"sampling was given, and {', '.join(fields)} besides; one or the other")
        sampling = sampling or Sampling(**fields)
        ids = self.prompt(prompt, poll) if isinstance(prompt, str) else list(prompt)
        self._check(ids)
        if max_tokens < 0:
            raise InvalidRequestError(f"max_tokens is {max_tokens}; it cannot be negative", "max_tokens")
        stops = StopStrings(stop)
        sampler = Sampler(sampling, self.n_vocab, ids)
        self._begin(min(self.n_ctx, len(ids) + max_tokens))
        stamp("reserve")
        self._running = Generation(self, ids, max_tokens, sampler, stops, ignore_eos, prompt_logprobs, poll)
        return self._running

    def score(self, prompt: str | Sequence[dict[str, Any]], candidates: Sequence[str], **options: Any) -> "Scores":
        """How likely each candidate is as the continuation of `prompt`, a text or the messages of a chat.

        The options are the fields of `scoring.Options`; docs/scoring.md defines the numbers. Raises
        InvalidRequestError, TemplateError and ContextOverflowError.
        """
        return self.scoring(prompt, candidates, **options).run()

    def scoring(
        self,
        prompt: str | Sequence[dict[str, Any]],
        candidates: Sequence[str],
        *,
        poll: Poll | None = None,
        **options: Any,
    ) -> "Scoring":
        """What `score` runs, checked and tokenised but not run yet."""
        from reflex_ipc import scoring

        chosen = scoring.Options(**options)
        scoring.check(candidates, chosen)
        if isinstance(prompt, str):
            texts = scoring.of_text(self.tokenizer, prompt, candidates, chosen.join, poll)
        else:
            parts = self.template.render(list(prompt), arguments=chosen.arguments).parts
            texts = scoring.of_parts(self.tokenizer, parts, candidates, chosen.join, poll)
        split = scoring.split(self.tokenizer, *texts, end=chosen.end)
        stamp("tokens")
        longest = len(split.context) + max(len(tail.tokens) for tail in split.tails) - 1
        if longest > self.n_ctx:
            raise ContextOverflowError(
                f"prompt and longest candidate have {longest} tokens, the context holds {self.n_ctx}"
            )
        self._begin(len(split.context))
        stamp("reserve")
        return scoring.Scoring(self._executor, split, chosen, poll)

    def prompt(self, text: str, poll: Poll | None = None) -> list[int]:
        """The ids of a prompt; one that no tokens could make fit is refused before it is taken apart."""
        self.tokenizer.check_length(text, self.n_ctx)
        ids = self.tokenize(text, poll=poll)
        stamp("tokens")
        return ids

    def _bytes(self, token: int, special: bool = False) -> bytes:
        """What a token adds to the text; a padding row of the output matrix, beyond the vocabulary, adds nothing."""
        return self.tokenizer.token_bytes(token, special) if token < self.tokenizer.n_vocab else b""

    def _begin(self, n_tokens: int) -> None:
        """End the answer under way, forget its sequence, make room for one of `n_tokens`."""
        if self._closed:
            raise InvalidRequestError("the engine is closed")
        if self._running is not None:
            self._running.close()
            self._running = None
        self._executor.reset()
        self._executor.reserve(n_tokens)

    def _check(self, ids: Sequence[int]) -> None:
        if not ids:
            raise InvalidRequestError("the prompt is empty: it has no token to continue", "prompt")
        if len(ids) > self.n_ctx:
            raise ContextOverflowError(f"the prompt has {len(ids)} tokens, the context holds {self.n_ctx}")
        for i, token in enumerate(ids):
            if not 0 <= token < self.n_vocab:
                raise InvalidRequestError(
                    f"token {i} of the prompt is {token}; ids go from 0 to {self.n_vocab - 1}", f"prompt[{i}]"
                )


class Generation:
    """One answer under way: an iterator over its tokens, with what is known of it so far."""

    def __init__(
        self,
        engine: Engine,
        ids: Sequence[int],
        max_tokens: int,
        sampler: Sampler,
        stops: StopStrings,
        ignore_eos: bool,
        prompt_logprobs: bool,
        poll: Poll | None,
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
        began = time.perf_counter()
        try:
            try:
                if prompt_logprobs:
                    yield from self._prefill_rated(ids)
                else:
                    self._prefill(ids)
                stamp("prompt")
                self.timings["prompt_ms"] = (time.perf_counter() - began) * 1e3
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
            stamp("answer")
            self.timings["total_ms"] = (time.perf_counter() - began) * 1e3

    def _prefill(self, ids: Sequence[int]) -> None:
        for start in range(0, len(ids), PREFILL_CHUNK):
            go_on(self._poll)
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
            go_on(self._poll)
            chunk = ids[start : start + PROMPT_ROWS]
            self._executor.forward(Step.text(chunk, start, range(len(chunk))), self._poll)
            for at, logits in enumerate(self._executor.logits(), start + 1):
                if at < len(ids):
                    sampled = self._sampler.rate(logits, ids[at])
                    yield token(at, sampled.logprob, sampled.top)

    def _decode(self, began: float) -> Iterator[Token]:
        tokenizer = self._engine.tokenizer
        room = self._engine.n_ctx - self.prompt_tokens
        if self._max_tokens == 0 or room == 0:
            self.finish_reason = "length" if self._max_tokens == 0 else "context"
            return
        for sampled in self._executor.decode(self._sampler, self._poll):
            if "first_token_ms" not in self.timings:
                stamp("first token")
                self.timings["first_token_ms"] = (time.perf_counter() - began) * 1e3
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


def _check_vocabulary(gguf: GGUF, tokenizer: Tokenizer, plan: Plan) -> None:
    # More rows than tokens is usual (padding); more tokens than rows means ids that no row answers to.
    if tokenizer.n_vocab > plan.n_vocab:
        raise ModelFileError(
            f"{gguf.path}: tokenizer.ggml.tokens has {tokenizer.n_vocab} tokens, token_embd.weight {plan.n_vocab} rows"
        )


def _context(gguf: GGUF, plan: Plan, context: int | None) -> int:
    if context is None:
        return plan.n_ctx_train
    if context < 1:
        raise InvalidRequestError(f"the context is {context} tokens; it must be at least 1")
    if context > plan.n_ctx_train:
        raise ContextOverflowError(
            f"{gguf.path}: a context of {context} was asked for, the model was trained for {plan.n_ctx_train} "
            f"({plan.arch}.context_length)"
        )
    return context


def _start_driver(backend: str, device: int) -> "Opening | None":
    """The driver's start in a thread, before anything else is done; None where no device can be used."""
    if backend not in ("auto", "cuda", "cpu"):
        raise InvalidRequestError(f"the backend is {backend!r}; known are auto, cuda and cpu", "backend")
    if backend == "cpu" or (backend == "auto" and not any(os.path.exists(node) for node in DEVICE_NODES)):
        return None
    from reflex_ipc.cuda import device as cuda
    from reflex_ipc.cuda.launch import shipped

    if backend == "auto" and not shipped():
        return None
    return cuda.start_driver(device)


def _executor(
    gguf: GGUF,
    plan: Plan,
    n_ctx: int,
    opening: "Opening | None",
    backend: str,
    threads: int | None,
    progress: Progress | None,
    trace: "Trace | None",
) -> tuple[Executor, str, str | None]:
    """The executor that `backend` names, the name of what was chosen, and why, where that is not the device."""
    why: str | None = None
    if opening is not None:
        from reflex_ipc.cuda.driver import NoDeviceError
        from reflex_ipc.cuda.executor import CudaExecutor

        try:
            return CudaExecutor(gguf, plan, n_ctx, progress=progress, opening=opening, trace=trace), "cuda", None
        except (NoDeviceError, UnsupportedModelError) as error:
            opening.close()
            if backend == "cuda":
                raise
            why = str(error)
    elif backend == "auto":
        why = "no NVIDIA device" if not any(map(os.path.exists, DEVICE_NODES)) else "this package has no kernels"
    complete_site()
    from reflex_ipc.reference.executor import ReferenceExecutor

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("weights", done, total)

    return ReferenceExecutor(gguf, plan, n_ctx, threads, report, trace), "cpu", why
