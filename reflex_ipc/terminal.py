"""What every command does with a terminal or a pipe: where prompts come from, where text and remarks go."""

import os
from argparse import Namespace
from typing import TYPE_CHECKING, Any

from reflex_ipc.errors import InputOutputError, InvalidRequestError

if TYPE_CHECKING:
    from reflex_ipc.engine import Engine
    from reflex_ipc.tokenizer import Tokenizer

LONGEST_TEXT = 256 << 20
"""Bytes of a prompt from a file or a pipe."""


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
        system = valid_text(arguments.system, "the system message")
        messages.insert(0, {"role": "system", "content": system})
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
    """The prompt from where it was given; standard input only when nothing else was, or `-` asks for it. One newline at
    the end of a file or of standard input is dropped."""
    given = [source for source in (argument, option, file) if source is not None]
    if len(given) > 1:
        raise InvalidRequestError(f"the {what} was given more than once")
    text = argument if option is None else option
    if text is not None and text != "-":
        return valid_text(text, f"the {what}")
    if file is not None and file != "-":
        try:
            fd = os.open(file, os.O_RDONLY | os.O_NOCTTY)
            try:
                raw = _read_all(fd, file)
            finally:
                os.close(fd)
        except OSError as error:
            raise InputOutputError(f"{file or repr(file)}: {error.strerror}") from error
        return _decoded(raw, file).removesuffix("\n")
    if not given and os.isatty(0):
        raise InvalidRequestError(f"no {what}: give it as an argument, with -f FILE, or through a pipe")
    try:
        raw = _read_all(0, "standard input")
    except OSError as error:
        raise InputOutputError(f"reading standard input failed: {error.strerror}") from error
    return _decoded(raw, "standard input").removesuffix("\n")


def _read_all(fd: int, source: str) -> bytes:
    parts: list[bytes] = []
    n = 0
    while True:
        try:
            part = os.read(fd, 1 << 20)
        except BlockingIOError:
            import select

            select.select([fd], [], [])
            continue
        if not part:
            return b"".join(parts)
        parts.append(part)
        n += len(part)
        if n > LONGEST_TEXT:
            raise InvalidRequestError(f"{source} holds more than {LONGEST_TEXT >> 20} MiB, which no context can")


def valid_text(argument: str, source: str) -> str:
    """An argument of the command line, whose bytes may be no text."""
    return _decoded(os.fsencode(argument), source)


def _decoded(raw: bytes, source: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{source} is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}") from None


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
    """A remark for a person, on stderr. A stderr that takes none is no reason to fail."""
    try:
        os.write(2, f"reflex: {visible(text)}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        return


def visible(text: str) -> str:
    """The text with everything escaped that could move a terminal's cursor or break a line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def template_arguments(arguments: Namespace) -> dict[str, Any]:
    return {"enable_thinking": False} if arguments.no_thinking else {}


def say_why_cpu(engine: "Engine") -> None:
    """A run that was not asked to be on the CPU says that it is, and why."""
    if engine.why_cpu is not None:
        say(f"running on the CPU: {engine.why_cpu}")


def warn(tokenizer: "Tokenizer") -> None:
    """Say what is odd about a vocabulary, or was lost from a text."""
    for warning in tokenizer.warnings:
        say(warning)
