"""`reflex run`: one prompt, its continuation on stdout, and the end."""

import os
import sys
import time
from argparse import Namespace
from typing import Any

from reflex_ipc.engine import Engine, Generation
from reflex_ipc.environment import model_path
from reflex_ipc.errors import DeadlineError, InputOutputError, InvalidRequestError
from reflex_ipc.sampler import Sampling

SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)


def run(arguments: Namespace) -> int:
    """Returns the exit code."""
    began = time.monotonic()
    # Whatever the arguments themselves get wrong is said before a model is opened.
    sampling = _sampling(arguments)
    prompt = prompt_or_messages(arguments)
    path = model_path(arguments.model)
    deadline = began + arguments.deadline / 1e3 if arguments.deadline is not None else None

    def poll() -> str | None:
        return "deadline" if deadline is not None and time.monotonic() >= deadline else None

    with Engine.open(path, backend=arguments.backend, context=arguments.context, threads=arguments.threads) as engine:
        for warning in engine.tokenizer.warnings:
            say(warning)
        if arguments.verbose:
            say(f"{path}: {engine.plan.arch}, {engine.plan.n_layer} layers, backend {engine.backend}")
        generation = engine.generate(
            prompt if isinstance(prompt, str) else _chat(engine, prompt, template_arguments(arguments)),
            max_tokens=arguments.max_tokens,
            sampling=sampling,
            stop=arguments.stop,
            ignore_eos=arguments.ignore_eos,
            poll=poll,
        )
        last = ""
        for token in generation:
            write(token.text)
            last = token.text or last
        if os.isatty(1) and not last.endswith("\n"):
            write("\n")
        if generation.finish_reason == "context":
            say(f"the context of {engine.n_ctx} tokens is full")
        if arguments.verbose:
            seed = "" if generation.seed is None else f", seed {generation.seed}"
            say(
                f"{generation.prompt_tokens} tokens of prompt, {generation.completion_tokens} of answer, "
                f"ended by {generation.finish_reason}{seed}"
            )
        if arguments.timings:
            _timings(engine, generation, time.monotonic() - began)
        if generation.finish_reason == "deadline":
            raise DeadlineError(f"the deadline of {arguments.deadline} ms passed")
    return 0


def _chat(engine: Engine, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> list[int]:
    if engine.template.is_fallback:
        say("the file has no chat template; ChatML is used")
    return engine.chat(messages, arguments)


def template_arguments(arguments: Namespace) -> dict[str, Any]:
    return {"enable_thinking": False} if arguments.no_thinking else {}


def _sampling(arguments: Namespace) -> Sampling:
    given = {name: value for name in SAMPLING if (value := getattr(arguments, name)) is not None}
    if arguments.logit_bias is not None:
        given["logit_bias"] = dict(arguments.logit_bias)
    return Sampling(**given)


def prompt_or_messages(arguments: Namespace) -> str | list[dict[str, Any]]:
    """A text to continue, or the messages of a chat."""
    text = (arguments.prompt, arguments.prompt_option, arguments.file)
    chat = arguments.chat or arguments.system is not None or arguments.messages is not None
    if arguments.no_thinking and not chat:
        raise InvalidRequestError("--no-thinking is an argument of the chat template: it needs --chat")
    if not chat:
        return read_prompt(*text, "prompt")
    if arguments.messages is None:
        messages = [{"role": "user", "content": read_prompt(*text, "prompt")}]
    elif any(source is not None for source in text):
        raise InvalidRequestError("--messages stands in place of a prompt; both were given")
    else:
        messages = _messages(arguments.messages)
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return messages


def _messages(file: str) -> list[dict[str, Any]]:
    import json

    source = "standard input" if file == "-" else file
    try:
        messages = json.loads(
            read_prompt("-" if file == "-" else None, None, None if file == "-" else file, "messages")
        )
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{source} is not JSON: {error}") from None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise InvalidRequestError(f"{source} must hold a JSON array of messages, each an object")
    return messages


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


def say(text: str) -> None:
    """A remark for a person, on stderr."""
    sys.stderr.write(f"reflex: {text}\n")


def _timings(engine: Engine, generation: Generation, total_s: float) -> None:
    for name, ms in {**engine.timings, **generation.timings, "run_ms": total_s * 1e3}.items():
        sys.stderr.write(f"{name:<16}{ms:10.1f}\n")
