"""`reflex system1`: which of some continuations the model holds likeliest, in one forward pass."""

import os
import re
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
    from reflex_ipc.healing import Split
    from reflex_ipc.scores import Scores
    from reflex_ipc.trace import Trace

_BAR = 24
_KINDS = {
    dict: "an object",
    list: "an array",
    str: "a string",
    int: "a number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def run(arguments: Namespace, trace: "Trace | None" = None) -> int:
    """Returns the exit code: 10 where the best candidate's probability is below `--min-confidence`."""
    least = arguments.min_confidence
    if least is not None and not 0.0 <= least <= 1.0:
        raise InvalidRequestError(f"--min-confidence is {least}; a probability is between 0 and 1")
    if arguments.best and arguments.json:
        raise InvalidRequestError("--best prints one text and --json everything; one or the other")
    candidates = _candidates(arguments)
    prompt = prompt_or_messages(arguments)
    neutral = None if arguments.neutral is None else valid_text(arguments.neutral, "the neutral context")
    options = scoring.Options(
        arguments.normalize,
        arguments.temperature,
        valid_text(arguments.join, "the text between prompt and candidate"),
        arguments.end,
        neutral,
        template_arguments(arguments),
    )
    scoring.check(candidates, options)  # as `split` does, but before anything is opened
    splits: list[Split] = []
    with Engine.open(
        arguments.model,
        backend=arguments.backend,
        device=arguments.device,
        context=arguments.context,
        threads=arguments.threads,
        meanwhile=lambda engine: splits.append(engine.split(prompt, candidates, options)),
        trace=trace,
        leave_driver=True,
    ) as engine:
        say_why_cpu(engine)
        if arguments.verbose:
            say(f"{engine.gguf.path}: {engine.plan.arch}, {engine.plan.n_layer} layers, backend {engine.backend}")
        if prompt == "":
            say("the prompt is empty: the candidates are scored after the token that begins or ends a text")
        elif isinstance(prompt, str):
            _warn_of_glued(prompt + options.join, candidates)
        elif engine.template.is_fallback:
            say("the file has no chat template; ChatML is used")
        began = monotonic_ns()
        scores = engine.scoring_of(splits[0], options).run()
        timings = {**engine.timings, "score_ms": ms(began, stamp("scores"))}
        warn(engine.tokenizer)
        write(_answer(scores, arguments))
        stamp("flush")
        _comment(scores, arguments.verbose)
        if arguments.timings:
            from reflex_ipc.timings import report

            report(arguments.timings, timings, backend=engine.backend, usage={"prompt_tokens": scores.prompt_tokens})
    return EXIT_BELOW_CONFIDENCE if least is not None and scores.best.probability < least else 0


def _answer(scores: "Scores", arguments: Namespace) -> str:
    if arguments.best:
        return scores.best.text + ("\n" if os.isatty(1) else "")
    if arguments.json:
        return _json(scores)
    return _table(scores) if os.isatty(1) else _tsv(scores)


def _comment(scores: "Scores", is_verbose: bool) -> None:
    if scores.healed:
        last = "token merges" if scores.healed == 1 else f"{scores.healed} tokens merge"
        say(f"the prompt's last {last} with a candidate, and each is scored with that (healed)")
    if is_verbose:
        n = sum(candidate.n_tokens for candidate in scores.candidates)
        say(f"{scores.prompt_tokens} tokens of prompt, {n} of candidates behind it")
    if scores.passes > 1:
        say(f"memory allowed no single pass; {scores.passes} were needed")


def _candidates(arguments: Namespace) -> list[str]:
    candidates = [valid_text(text, f"candidate {i}") for i, text in enumerate(arguments.candidate)]
    if arguments.candidates_file is not None:
        file = arguments.candidates_file
        prompts = (arguments.prompt, arguments.prompt_option, arguments.file, arguments.messages)
        if file == "-" and ("-" in prompts or not any(prompt is not None for prompt in prompts)):
            raise InvalidRequestError(
                "standard input can hold the prompt or the candidates, not both; give the prompt as text or by -f FILE"
            )
        text = read_prompt("-" if file == "-" else None, None, None if file == "-" else file, "candidates")
        candidates += _parsed(text, "standard input" if file == "-" else file, arguments.candidates_format)
    elif arguments.candidates_format is not None:
        raise InvalidRequestError("--candidates-format says what --candidates-file holds, and there is none")
    return candidates


def _parsed(text: str, source: str, kind: str | None) -> list[str]:
    """One candidate a line, or a JSON array of strings. What begins like an array or an object is never taken for lines
    unless `kind` says so: half an array would be scored as it stands."""
    text = text.removeprefix("\ufeff")
    if kind == "lines" or (kind is None and not text.lstrip().startswith(("[", "{"))):
        return _lines(text)
    # Strings have two quotes each, besides what is escaped: millions of them are not taken apart to be refused.
    if text.lstrip().startswith("["):
        scoring.check_count((text.count('"') - text.count('\\"')) // 2)
    import json

    remedy = "" if kind == "json" else "; --candidates-format lines takes it as it stands, one a line"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        begins = "is not JSON" if kind == "json" else "begins like JSON and is not"
        raise InvalidRequestError(f"{source} {begins}: {error}{remedy}") from None
    if not isinstance(values, list):
        raise InvalidRequestError(f"{source} holds {_KINDS[type(values)]}, not a JSON array of strings{remedy}")
    for i, value in enumerate(values):
        if not isinstance(value, str):
            raise InvalidRequestError(
                f"{source} must hold an array of strings; element {i} is {_KINDS[type(value)]}{remedy}"
            )
        try:
            value.encode()
        except UnicodeEncodeError:
            raise InvalidRequestError(f"{source}: element {i} has half a surrogate pair, which is no text") from None
    return values


def _lines(text: str) -> list[str]:
    candidates: list[str] = []
    for found in re.finditer(r"(?!\r?\n)[^\n]+", text):
        if line := found[0].removesuffix("\r"):
            candidates.append(line)
        scoring.check_count(len(candidates))
    return candidates


def _warn_of_glued(prompt: str, candidates: list[str]) -> None:
    """Candidates are literal. One that runs into the prompt's last word is rarely meant."""
    glued = [text for text in candidates if text and not text[0].isspace()]
    if glued and prompt and not prompt[-1].isspace():
        say(f"no space between the prompt and {glued[0][:40]!r}; --join ' ' puts one there")


def _json(scores: "Scores") -> str:
    import json

    return json.dumps(scores.to_wire()) + "\n"


def _tsv(scores: "Scores") -> str:
    """Likeliest first. Columns, which docs/scoring.md lists: probability, score, logprob, n_tokens, text with
    backslashes and what is not printable escaped, n_bytes, neutral_logprob (empty without a neutral context), index as
    given."""
    lines = []
    for i, c in sorted(enumerate(scores.candidates), key=lambda each: -each[1].score):
        neutral = "" if c.neutral_logprob is None else f"{c.neutral_logprob:.6f}"
        numbers = f"{c.probability:.6f}\t{c.score:.6f}\t{c.logprob:.6f}\t{c.n_tokens}"
        lines.append(f"{numbers}\t{_escaped(c.text)}\t{c.n_bytes}\t{neutral}\t{i}\n")
    return "".join(lines)


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
