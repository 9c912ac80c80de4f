"""`reflex system1`: which of some continuations the model holds likeliest, in one forward pass."""

import os
from argparse import Namespace
from time import monotonic_ns
from typing import TYPE_CHECKING

from reflex_ipc import scoring
from reflex_ipc.engine import Engine
from reflex_ipc.errors import EXIT_BELOW_CONFIDENCE, InvalidRequestError
from reflex_ipc.stamps import ms, stamp
from reflex_ipc.terminal import (
    prompt_or_messages,
    read_prompt,
    say,
    say_why_cpu,
    template_arguments,
    valid_text,
    visible,
    warn,
    write,
)

if TYPE_CHECKING:
    from reflex_ipc.scores import Scores
    from reflex_ipc.trace import Trace

_BAR = 24


def run(arguments: Namespace, trace: "Trace | None" = None) -> int:
    """Returns the exit code: 10 where the best candidate's probability is below `--min-confidence`."""
    least = arguments.min_confidence
    if least is not None and not 0.0 <= least <= 1.0:
        raise InvalidRequestError(f"--min-confidence is {least}; a probability is between 0 and 1")
    if arguments.best and arguments.json:
        raise InvalidRequestError("--best prints one text and --json everything; one or the other")
    candidates = _candidates(arguments)
    prompt = prompt_or_messages(arguments)
    scoring.check(candidates, scoring.Options(arguments.normalize, arguments.temperature))
    with Engine.open(
        arguments.model,
        backend=arguments.backend,
        device=arguments.device,
        context=arguments.context,
        threads=arguments.threads,
        meanwhile=lambda engine: isinstance(prompt, str) and engine.prompt(prompt),  # so that its pieces are known
        trace=trace,
        leave_driver=True,
    ) as engine:
        say_why_cpu(engine)
        if isinstance(prompt, str):
            _warn_of_glued(prompt + arguments.join, candidates)
        elif engine.template.is_fallback:
            say("the file has no chat template; ChatML is used")
        began = monotonic_ns()
        scores = engine.score(
            prompt,
            candidates,
            normalize=arguments.normalize,
            temperature=arguments.temperature,
            join=arguments.join,
            end=arguments.end,
            arguments=template_arguments(arguments),
        )
        timings = {**engine.timings, "score_ms": ms(began, stamp("scores"))}
        warn(engine.tokenizer)
        backend = engine.backend
    if scores.healed and arguments.verbose:
        say(f"the last {scores.healed} tokens of the prompt merge with a candidate and are scored with it")
    if scores.passes > 1:
        say(f"memory allowed no single pass; {scores.passes} were needed")
    if arguments.best:
        text = scores.best.text
        write(text + "\n" if os.isatty(1) else text)
    elif arguments.json:
        write(_json(scores))
    else:
        write(_table(scores) if os.isatty(1) else _tsv(scores))
    stamp("flush")
    if arguments.timings:
        from reflex_ipc.timings import report

        report(arguments.timings, timings, backend=backend, usage={"prompt_tokens": scores.prompt_tokens})
    return EXIT_BELOW_CONFIDENCE if least is not None and scores.best.probability < least else 0


def _candidates(arguments: Namespace) -> list[str]:
    candidates = [valid_text(text, f"candidate {i}") for i, text in enumerate(arguments.candidate)]
    if arguments.candidates_file is not None:
        file = arguments.candidates_file
        if file == "-" and (arguments.prompt == "-" or arguments.messages == "-"):
            raise InvalidRequestError("standard input can hold the prompt or the candidates, not both")
        text = read_prompt("-" if file == "-" else None, None, None if file == "-" else file, "candidates")
        candidates += _parsed(text, "standard input" if file == "-" else file)
    return candidates


def _parsed(text: str, source: str) -> list[str]:
    """A JSON array of strings, or one candidate a line."""
    text = text.removeprefix("\ufeff")
    if not text.lstrip().startswith("["):
        return [line for line in f"{text}\n".replace("\r\n", "\n").split("\n") if line]  # the last newline is gone
    import json

    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{source} begins like JSON and is not: {error}") from None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidRequestError(f"{source} must hold a JSON array of strings")
    return values


def _warn_of_glued(prompt: str, candidates: list[str]) -> None:
    """Candidates are literal. One that runs into the prompt's last word is rarely meant."""
    glued = [text for text in candidates if text and not text[0].isspace()]
    if glued and prompt and not prompt[-1].isspace():
        say(f"no space between the prompt and {glued[0][:40]!r}; --join ' ' puts one there")


def _json(scores: "Scores") -> str:
    import json

    plain = {**scores._asdict(), "candidates": [candidate._asdict() for candidate in scores.candidates]}
    return json.dumps({**plain, "best": scores.candidates.index(scores.best)}) + "\n"


def _tsv(scores: "Scores") -> str:
    """Likeliest first: probability, score, logprob, tokens, text with tabs, newlines and backslashes escaped."""
    return "".join(
        f"{c.probability:.6f}\t{c.score:.6f}\t{c.logprob:.6f}\t{len(c.tokens)}\t{_escaped(c.text)}\n"
        for c in sorted(scores.candidates, key=lambda c: -c.score)
    )


def _table(scores: "Scores") -> str:
    colour = "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
    ranked = sorted(scores.candidates, key=lambda c: -c.score)
    width = max(len(_escaped(c.text)) for c in ranked)
    lines = []
    for i, c in enumerate(ranked):
        eighths = round(c.probability * _BAR * 8)
        bar = "█" * (eighths // 8) + ("" if eighths % 8 == 0 else "▏▎▍▌▋▊▉"[eighths % 8 - 1])
        line = f"{_escaped(c.text):<{width}}  {c.probability:7.2%}  {bar:<{_BAR}}  {c.score:10.4f}"
        lines.append(f"\x1b[1m{line}\x1b[0m" if colour and i == 0 else line)
    lines.append(f"entropy {scores.entropy_bits:.3f} bits, margin {scores.margin:.2%}, score: {scores.normalize}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return visible(text.replace("\\", "\\\\"))
