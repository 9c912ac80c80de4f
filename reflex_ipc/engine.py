"""Token ids in, token ids out: one model, one sequence, one request at a time.

`Engine` opens a model on a backend; `generation.Generation` is one answer under way. Text meets ids only at their
borders, by the file's own tokenizer. What an executor runs on is chosen in `backends.py` and nowhere known after it.
"""

import os
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from reflex_ipc import archs
from reflex_ipc.backends import make_executor, start_driver
from reflex_ipc.environment import model_path
from reflex_ipc.errors import ContextOverflowError, InvalidRequestError, ModelFileError
from reflex_ipc.generation import Generation
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import PREFILL_CHUNK, Plan, Step
from reflex_ipc.sampler import Sampler, Sampling
from reflex_ipc.stamps import lasted, ms, stamp
from reflex_ipc.stops import DEFAULT_MAX_TOKENS, StopStrings
from reflex_ipc.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from reflex_ipc.backends import Executor, Progress
    from reflex_ipc.chat import ChatTemplate
    from reflex_ipc.errors import Poll
    from reflex_ipc.healing import Split
    from reflex_ipc.scores import Scores
    from reflex_ipc.scoring import Options, Scoring
    from reflex_ipc.trace import Trace


class Engine:
    """A model that answers. Use as a context manager, or call `close`."""

    _executor: "Executor"
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
        progress: "Progress | None" = None,
        meanwhile: Callable[["Engine"], object] | None = None,
        trace: "Trace | None" = None,
        leave_driver: bool = False,
    ) -> "Engine":
        """Open a model: the path of a GGUF file, or the name of an installed demo model.

        `backend` is "auto", "cuda" or "cpu", `device` the number of a CUDA device; "auto" uses the CPU where there is
        no usable device, and `why_cpu` says why. `context` is the tokens that prompt and answer may have together, the
        model's own maximum by default. `meanwhile` is called once the file's header is read, with an engine that can
        tokenise and nothing else yet, while the device still starts. `trace` takes what runs when. `leave_driver` is
        for a process that ends where opening fails: a driver that is still starting is then not waited for.

        Raises ModelFileError, UnsupportedModelError, OutOfMemoryError, DeviceError, ContextOverflowError, and what
        `meanwhile` raises.
        """
        began = stamp("imports")
        opening = start_driver(backend, device)
        stamp("driver start")
        gguf: GGUF | None = None
        try:
            native = opening.header_reader() if opening is not None else None
            gguf = GGUF.open(model_path(path) if isinstance(path, str) else path, native)
            stamp("header")
            tokenizer = Tokenizer.from_gguf(gguf)
            header = stamp("vocabulary")
            plan = archs.build(gguf)
            _check_vocabulary(gguf, tokenizer, plan)
            n_ctx = _context(gguf, plan, context)
            engine = cls(gguf, tokenizer, plan, n_ctx)
            planned = stamp("plan")
            if meanwhile is not None:
                meanwhile(engine)
            begun = monotonic_ns()
            executor, engine.backend, engine.why_cpu = make_executor(
                gguf, plan, n_ctx, opening, backend, threads, progress, trace
            )
            ready = stamp("executor")
            if trace is not None:
                trace.about |= {"model": os.path.basename(gguf.path), "backend": engine.backend}
        except BaseException:
            if opening is not None and not leave_driver:
                opening.close()
            if gguf is not None:
                gguf.close()
            raise
        engine._executor = executor
        engine.timings = {
            "header_ms": ms(began, header),
            "plan_ms": ms(header, planned),
            "executor_ms": ms(begun, ready),
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

    def tokenize(self, text: str, *, special: bool = True, poll: "Poll | None" = None) -> list[int]:
        """Ids of a text, with the begin-of-sequence token where the file asks for one.

        Raises CancelledError or DeadlineError where `poll` says so.
        """
        return self.tokenizer.encode(text, special=special, poll=poll)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def chat(
        self, messages: Sequence[dict[str, Any]], arguments: dict[str, Any] | None = None, *, poll: "Poll | None" = None
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

        self.check_prompt(ids)
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
        poll: "Poll | None" = None,
        **fields: Any,
    ) -> Generation:
        """An iterator over the tokens that follow `prompt`, a text or ids; `prompt_logprobs`: over the prompt's, too.

        How tokens are chosen is said by `sampling`, or by its fields (`temperature=0.8, seed=7`); greedily without.
        Raises InvalidRequestError and ContextOverflowError here, before anything is computed. An answer that would
        outgrow the context ends there, with finish_reason "context". A new call ends the answer under way.
        """
        if sampling is not None and fields:
            raise InvalidRequestError(f"sampling was given, and {', '.join(fields)} besides; one or the other")
        sampling = sampling or Sampling(**fields)
        ids = self.prompt(prompt, poll) if isinstance(prompt, str) else list(prompt)
        self.check_prompt(ids)
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
        poll: "Poll | None" = None,
        **options: Any,
    ) -> "Scoring":
        """What `score` runs, checked and tokenised but not run yet."""
        from reflex_ipc import scoring

        chosen = scoring.Options(**options)
        return self.scoring_of(self.split(prompt, candidates, chosen, poll), chosen, poll)

    def split(
        self,
        prompt: str | Sequence[dict[str, Any]],
        candidates: Sequence[str],
        options: "Options",
        poll: "Poll | None" = None,
    ) -> "Split":
        """Prompt and candidates, checked, as tokens; it needs no device. Raises what `score` does."""
        from reflex_ipc import healing, scoring

        scoring.check(candidates, options)
        if isinstance(prompt, str):
            texts = healing.of_text(self.tokenizer, prompt, candidates, options.join, self.n_ctx, poll)
        else:
            parts = self.template.render(list(prompt), arguments=options.arguments).parts
            texts = healing.of_parts(self.tokenizer, parts, candidates, options.join, self.n_ctx, poll)
        split = healing.split(self.tokenizer, texts, end=options.end, neutral=options.neutral, poll=poll)
        stamp("tokens")
        longest = max(len(tail.tokens) for tail in split.tails) - 1
        for field, what, context in (
            ("prompt", "prompt", split.context),
            ("neutral", "neutral context", split.neutral),
        ):
            if (n := len(context) + longest) > self.n_ctx:
                raise ContextOverflowError(
                    f"{what} and longest candidate have {n} tokens, the context holds {self.n_ctx}", field
                )
        return split

    def scoring_of(self, split: "Split", options: "Options", poll: "Poll | None" = None) -> "Scoring":
        """What `score` runs, of what `split` made."""
        from reflex_ipc import scoring

        self._begin(len(split.context))
        stamp("reserve")
        return scoring.Scoring(self._executor, split, options, poll)

    def prompt(self, text: str, poll: "Poll | None" = None) -> list[int]:
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

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raises InvalidRequestError or ContextOverflowError where these ids can be no prompt."""
        if not ids:
            raise InvalidRequestError("the prompt is empty: it has no token to continue", "prompt")
        if len(ids) > self.n_ctx:
            raise ContextOverflowError(f"the prompt has {len(ids)} tokens, the context holds {self.n_ctx}")
        for i, token in enumerate(ids):
            if not 0 <= token < self.n_vocab:
                raise InvalidRequestError(
                    f"token {i} of the prompt is {token}; ids go from 0 to {self.n_vocab - 1}", f"prompt[{i}]"
                )


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
