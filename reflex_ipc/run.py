"""`reflex run`: one prompt, its continuation on stdout, and the end."""

import os
import sys
import time
from argparse import Namespace

from reflex_ipc.engine import Engine, Generation
from reflex_ipc.environment import model_path
from reflex_ipc.errors import InputOutputError, InvalidRequestError


def run(arguments: Namespace) -> int:
    """Returns the exit code."""
    began = time.perf_counter()
    prompt = read_prompt(arguments.prompt, arguments.prompt_option, arguments.file, "prompt")
    path = model_path(arguments.model)
    with Engine.open(path, backend=arguments.backend, context=arguments.context, threads=arguments.threads) as engine:
        if arguments.verbose:
            _say(f"{path}: {engine.plan.arch}, {engine.plan.n_layer} layers, backend {engine.backend}")
        generation = engine.generate(prompt, max_tokens=arguments.max_tokens)
        last = ""
        for token in generation:
            write(token.text)
            last = token.text or last
        if os.isatty(1) and not last.endswith("\n"):
            write("\n")
        if generation.finish_reason == "context":
            _say(f"the context of {engine.n_ctx} tokens is full")
        if arguments.verbose:
            _say(
                f"{generation.prompt_tokens} tokens of prompt, {generation.completion_tokens} of answer, "
                f"ended by {generation.finish_reason}"
            )
        if arguments.timings:
            _timings(engine, generation, time.perf_counter() - began)
    return 0


def read_prompt(argument: str | None, option: str | None, file: str | None, what: str) -> str:
    """The prompt from where it was given; standard input only when nothing else was, or `-` asks for it."""
    given = [source for source in (argument, option, file) if source is not None]
    if len(given) > 1:
        raise InvalidRequestError(f"the {what} was given more than once")
    text = argument if option is None else option
    if text is not None and text != "-":
        return _valid(os.fsencode(text), f"the {what}")
    if file is not None and file != "-":
        try:
            with open(file, "rb") as stream:
                raw = stream.read()
        except OSError as error:
            raise InputOutputError(f"{file}: {error.strerror}") from error
        return _one_newline_less(_valid(raw, file))
    if not given and os.isatty(0):
        raise InvalidRequestError(f"no {what}: give it as an argument, with -f FILE, or through a pipe")
    return _one_newline_less(_valid(sys.stdin.buffer.read(), "standard input"))


def _valid(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{source} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}") from None


def _one_newline_less(text: str) -> str:
    return text.removesuffix("\n")


def write(text: str) -> None:
    """All of a text to stdout, at once: no buffer holds back what is there."""
    view = memoryview(text.encode())
    while view:
        try:
            view = view[os.write(1, view) :]
        except BlockingIOError:
            import select

            select.select([], [1], [])
        except OSError as error:
            raise InputOutputError(f"writing to standard output failed: {error.strerror}") from error


def _say(text: str) -> None:
    sys.stderr.write(f"reflex: {text}\n")


def _timings(engine: Engine, generation: Generation, total_s: float) -> None:
    for name, ms in {**engine.timings, **generation.timings, "run_ms": total_s * 1e3}.items():
        sys.stderr.write(f"{name:<16}{ms:10.1f}\n")
