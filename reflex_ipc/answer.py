"""One request -> its events: the engine's work in the words of the wire, with no I/O.

`answer` never raises for what a request asks: every failure becomes the request's last event.
"""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from reflex_ipc.errors import (
    CancelledError,
    ContextOverflowError,
    DeadlineError,
    DeviceError,
    InvalidRequestError,
    ReflexError,
    TemplateError,
    ran_out,
)
from reflex_ipc.messages import (
    Detokenize,
    Done,
    Error,
    Event,
    Generate,
    Info,
    Limits,
    Prompt,
    Request,
    Result,
    Score,
    Started,
    Token,
    Tokenize,
)

if TYPE_CHECKING:
    from reflex_ipc.engine import Engine
    from reflex_ipc.errors import Poll
    from reflex_ipc.generation import Token as EngineToken


def answer(engine: "Engine", request: Request, limits: Limits, queued_ms: float, poll: "Poll") -> Iterator[Event]:
    """The request's events in order; the last one is its Done, Result or Error."""
    try:
        if isinstance(request, Generate):
            yield from _generate(engine, request, limits, queued_ms, poll)
        elif isinstance(request, Score):
            yield from _score(engine, request, limits, queued_ms, poll)
        elif isinstance(request, Tokenize):
            yield Result(request.id, {"tokens": engine.tokenize(request.text, special=request.special, poll=poll)})
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
            yield Error(request.id, known.code, str(known), _field(request, known))


def _field(request: Request, error: ReflexError) -> str | None:
    """The request's field that an error is about. The engine calls `prompt` what came as `tokens` or `messages`."""
    field: str | None = getattr(error, "field", None)
    if isinstance(error, DeadlineError):
        return "deadline_ms"
    if field is None and isinstance(error, ContextOverflowError | TemplateError):
        field = "prompt"
    if field is None and isinstance(request, Detokenize) and isinstance(error, InvalidRequestError):
        return "tokens"
    if field is not None and (field == "prompt" or field.startswith("prompt[")):
        given = (name for name in ("tokens", "messages") if getattr(request, name, None) is not None)
        return next(given, "prompt") + field.removeprefix("prompt")
    return field


def typed(error: Exception) -> ReflexError:
    """The error as one that has a code. What nobody foresaw leaves its trace on stderr."""
    if isinstance(error, ReflexError):
        return error
    if (known := ran_out(error)) is not None:
        return known
    import traceback

    traceback.print_exception(error, file=sys.stderr)
    return ReflexError(f"{type(error).__name__}: {error}")


def _generate(
    engine: "Engine", request: Generate, limits: Limits, queued_ms: float, poll: "Poll"
) -> Iterator[Started | Prompt | Token | Done]:
    from reflex_ipc.sampler import Sampling

    try:
        prompt: Any = request.prompt if request.tokens is None else request.tokens
        if request.messages is not None:
            prompt = engine.chat(request.messages, request.template_arguments, poll=poll)
        elif request.prompt is not None:
            engine.tokenizer.check_length(request.prompt, engine.n_ctx)
            prompt = engine.tokenize(request.prompt, poll=poll)
    except (CancelledError, DeadlineError) as told:
        usage = {"prompt_tokens": 0, "reused_tokens": 0, "completion_tokens": 0}
        yield Done(request.id, told.code, "", usage, {"queued_ms": queued_ms})
        return
    _check_prompt(len(prompt), limits)
    generation = engine.generate(
        prompt,
        max_tokens=request.max_tokens,
        sampling=Sampling(**request.sampling),
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        prompt_logprobs=request.prompt_logprobs,
        poll=poll,
    )
    try:
        yield Started(request.id, generation.prompt_tokens)
        texts: list[str] = []
        for index, token in enumerate(generation):
            if token.of_prompt:
                yield _prompt_token(engine, request, index, len(prompt), token)
            else:
                yield _token(engine, request, len(texts), token)
                texts.append(token.text)
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


def _score(engine: "Engine", request: Score, limits: Limits, queued_ms: float, poll: "Poll") -> Iterator[Result]:
    prompt: Any = request.prompt if request.messages is None else request.messages
    scoring = engine.scoring(
        prompt,
        request.candidates,
        normalize=request.normalize,
        temperature=request.temperature,
        join=request.join,
        end=request.end,
        neutral=request.neutral,
        arguments=request.template_arguments,
        poll=poll,
    )
    _check_prompt(scoring.prompt_tokens, limits)
    _check_prompt(scoring.neutral_tokens, limits, "neutral", "the neutral context")
    scores = scoring.run()
    timings = {"queued_ms": round(queued_ms, 3), "total_ms": round(scoring.total_ms, 3)}
    yield Result(request.id, {**scores.to_wire(), "timings": timings})


def _check_prompt(n_tokens: int, limits: Limits, field: str = "prompt", what: str = "the prompt") -> None:
    most = limits.prompt_tokens
    if most is not None and n_tokens > most:
        raise ContextOverflowError(f"{what} has {n_tokens} tokens; this engine was told to take at most {most}", field)


def _token(engine: "Engine", request: Generate, index: int, token: "EngineToken") -> Token:
    raw = None if token.raw is None else tuple(token.raw)
    return Token(request.id, index, token.id, token.text, token.logprob, raw, _top(engine, request, token))


def _prompt_token(engine: "Engine", request: Generate, index: int, n: int, token: "EngineToken") -> Prompt:
    assert token.id is not None
    text, raw = token.text, token.raw
    tokenizer = engine.tokenizer
    added = (index == 0 and tokenizer.add_bos) or (index == n - 1 and tokenizer.add_eos)
    if request.prompt is not None and added:  # it stands in no text
        text, raw = "", raw or text.encode()
    bytes_ = None if raw is None else tuple(raw)
    return Prompt(request.id, index, token.id, text, token.logprob, bytes_, _top(engine, request, token))


def _top(engine: "Engine", request: Generate, token: "EngineToken") -> list[dict[str, Any]] | None:
    if token.id is None or token.logprob is None or not request.sampling.get("top_logprobs"):
        return None
    return [_alternative(engine, *each) for each in token.top]


def _alternative(engine: "Engine", id: int, logprob: float) -> dict[str, Any]:
    """One entry of top_logprobs. A control token, which adds nothing to a text, shows as the file writes it."""
    # The padding rows of an output matrix are beyond the vocabulary and spell nothing.
    raw = engine.tokenizer.token_bytes(id, special=True) if id < engine.tokenizer.n_vocab else b""
    text = raw.decode("utf-8", "replace")
    alternative = {"token": id, "text": text, "logprob": logprob}
    if text.encode() != raw:
        alternative["bytes"] = list(raw)
    return alternative
