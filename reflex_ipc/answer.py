"""One request -> its events: the engine's work in the words of the wire, with no I/O.

`answer` never raises for what a request asks: every failure becomes the request's last event.
"""

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from reflex_ipc.errors import ContextOverflowError, DeviceError, OutOfMemoryError, ReflexError
from reflex_ipc.messages import (
    Detokenize,
    Done,
    Error,
    Event,
    Generate,
    Info,
    Limits,
    Request,
    Result,
    Score,
    Started,
    Token,
    Tokenize,
)

if TYPE_CHECKING:
    from reflex_ipc.engine import Engine
    from reflex_ipc.engine import Token as EngineToken

Poll = Callable[[], str | None]
"""Called between tokens and between pieces of the prompt; "cancelled" or "deadline" ends the generation."""


def answer(engine: "Engine", request: Request, limits: Limits, queued_ms: float, poll: Poll) -> Iterator[Event]:
    """The request's events in order; the last one is its Done, Result or Error."""
    try:
        if isinstance(request, Generate):
            yield from _generate(engine, request, limits, queued_ms, poll)
        elif isinstance(request, Score):
            yield from _score(engine, request, limits, queued_ms, poll)
        elif isinstance(request, Tokenize):
            yield Result(request.id, {"tokens": engine.tokenize(request.text, special=request.special)})
        elif isinstance(request, Detokenize):
            yield Result(request.id, {"text": engine.detokenize(request.tokens)})
        elif isinstance(request, Info):
            yield Result(request.id, {"model": engine.info(), "limits": limits.to_wire()})
        else:
            raise AssertionError(f"{type(request).__name__} needs no engine")
    except Exception as error:
        known = typed(error)
        if isinstance(known, DeviceError):  # nothing this process does will work again
            yield Error(request.id, known.code, str(known), fatal=True, exit_code=known.exit_code)
        else:
            yield Error(request.id, known.code, str(known), getattr(known, "field", None))


def typed(error: Exception) -> ReflexError:
    """The error as one that has a code. What nobody foresaw leaves its trace on stderr."""
    if isinstance(error, ReflexError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemoryError("the host's memory does not hold what was asked for")
    import traceback

    traceback.print_exception(error, file=sys.stderr)
    return ReflexError(f"{type(error).__name__}: {error}")


def _generate(
    engine: "Engine", request: Generate, limits: Limits, queued_ms: float, poll: Poll
) -> Iterator[Started | Token | Done]:
    from reflex_ipc.sampler import Sampling

    prompt: Any = request.prompt if request.tokens is None else request.tokens
    if request.messages is not None:
        prompt = engine.chat(request.messages, request.template_arguments)
    elif request.prompt is not None:
        engine.tokenizer.check_length(request.prompt, engine.n_ctx)
        prompt = engine.tokenize(request.prompt)
    _check_prompt(len(prompt), limits)
    generation = engine.generate(
        prompt,
        max_tokens=request.max_tokens,
        sampling=Sampling(**request.sampling),
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        poll=poll,
    )
    try:
        yield Started(request.id, generation.prompt_tokens)
        texts = []
        for index, token in enumerate(generation):
            texts.append(token.text)
            yield _token(engine, request, index, token)
        usage = {
            "prompt_tokens": generation.prompt_tokens,
            "reused_tokens": generation.reused_tokens,
            "completion_tokens": generation.completion_tokens,
        }
        reason = generation.finish_reason
        assert reason is not None, "a generation that ended has a reason"
        timings = {"queued_ms": queued_ms, **generation.timings}
        yield Done(request.id, reason, "".join(texts), usage, timings)
    finally:
        generation.close()


def _score(engine: "Engine", request: Score, limits: Limits, queued_ms: float, poll: Poll) -> Iterator[Result]:
    prompt: Any = request.prompt if request.messages is None else request.messages
    scoring = engine.scoring(
        prompt,
        request.candidates,
        normalize=request.normalize,
        temperature=request.temperature,
        join=request.join,
        end=request.end,
        arguments=request.template_arguments,
        poll=poll,
    )
    _check_prompt(scoring.prompt_tokens, limits)
    scores = scoring.run()
    candidates = [
        {
            "text": each.text,
            "tokens": each.tokens,
            "token_logprobs": each.token_logprobs,
            "bytes": each.n_bytes,
            "logprob": each.logprob,
            **({} if each.neutral_logprob is None else {"neutral_logprob": each.neutral_logprob}),
            "score": each.score,
            "probability": each.probability,
        }
        for each in scores.candidates
    ]
    fields = {
        "candidates": candidates,
        "best": scores.candidates.index(scores.best),
        "normalize": scores.normalize,
        "temperature": scores.temperature,
        "entropy_bits": scores.entropy_bits,
        "margin": scores.margin,
        "healed": scores.healed,
        "passes": scores.passes,
        "usage": {"prompt_tokens": scores.prompt_tokens, "reused_tokens": 0},
        "timings": {"queued_ms": round(queued_ms, 3), "total_ms": round(scoring.total_ms, 3)},
    }
    yield Result(request.id, fields)


def _check_prompt(n_tokens: int, limits: Limits) -> None:
    most = limits.prompt_tokens
    if most is not None and n_tokens > most:
        raise ContextOverflowError(f"the prompt has {n_tokens} tokens; this engine was told to take at most {most}")


def _token(engine: "Engine", request: Generate, index: int, token: "EngineToken") -> Token:
    top = None
    if token.id is not None and request.sampling.get("top_logprobs"):
        top = [_alternative(engine, *each) for each in token.top]
    raw = None if token.raw is None else tuple(token.raw)
    return Token(request.id, index, token.id, token.text, token.logprob, raw, top)


def _alternative(engine: "Engine", id: int, logprob: float) -> dict[str, Any]:
    """One entry of top_logprobs. A control token, which adds nothing to a text, shows as the file writes it."""
    # The padding rows of an output matrix are beyond the vocabulary and spell nothing.
    raw = engine.tokenizer.token_bytes(id, special=True) if id < engine.tokenizer.n_vocab else b""
    text = raw.decode("utf-8", "replace")
    alternative = {"token": id, "text": text, "logprob": logprob}
    if text.encode() != raw:
        alternative["bytes"] = list(raw)
    return alternative
