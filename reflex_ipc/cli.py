"""The command line: subcommands, exit codes, and how errors reach a person.

stdout carries only what was asked for; everything else goes to stderr. Nothing heavy is imported here.
"""

import os
import signal
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from reflex_ipc import __version__, options
from reflex_ipc.environment import complete_site, model_path
from reflex_ipc.errors import InputOutputError, InvalidRequestError, ReflexError, ran_out
from reflex_ipc.stamps import stamp
from reflex_ipc.terminal import read_prompt, say, say_why_cpu, warn, write

if TYPE_CHECKING:
    from reflex_ipc.backends import Progress
    from reflex_ipc.engine import Engine
    from reflex_ipc.messages import Limits
    from reflex_ipc.trace import Trace

_HINTS = {
    "-m": "the model is the first argument: reflex run MODEL PROMPT",
    "--model": "the model is the first argument: reflex run MODEL PROMPT",
    "-ngl": "all layers go to one device; --backend chooses which",
    "--n-gpu-layers": "all layers go to one device; --backend chooses which",
}
_EXIT_CODES = """\
exit codes: 0 done, 1 internal error or failed check, 2 usage, 3 model file, 4 unsupported model, 5 device,
6 out of memory, 7 context overflow, 10 below the asked confidence, 11 input or output, 124 deadline;
130, 141, 143 by signal"""


def main(argv: list[str]) -> int:
    """Run one command and return its exit code; a signal ends the process by that signal."""
    # A closed pipe ends the process quietly, as it does any Unix filter.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        _check_descriptors()
        arguments = _parse(argv)
        stamp("arguments")
        code: int = arguments.command(arguments)
        return code
    except ReflexError as error:
        return _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        return _end_by(signal.SIGINT)
    except Exception as error:
        if (known := ran_out(error)) is not None:
            return _fail(str(known), known.exit_code)
        if isinstance(error, OSError):
            return _fail(str(error), InputOutputError.exit_code)
        if os.environ.get("REFLEX_TRACEBACK"):
            raise
        return _fail(
            f"internal error: {type(error).__name__}: {error} (REFLEX_TRACEBACK=1 shows where)", ReflexError.exit_code
        )


def _check_descriptors() -> None:
    """A descriptor that is closed would be given to the next file opened, and output would go there."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            if fd == 1:
                raise InputOutputError("standard output is closed") from None
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one


def _fail(message: str, code: int) -> int:
    say(message)
    return code


def _end_by(number: signal.Signals) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)  # to this thread: it does not return
    raise SystemExit(128 + number)


class _Help(RawDescriptionHelpFormatter):
    """Asking the terminal for its width imports half of the compression modules, and is done for every parser."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=110, max_help_position=28)


class _Parser(ArgumentParser):
    """No abbreviations, errors with hints for what hands type by habit."""

    def __init__(self, words: list[str], **options: Any) -> None:
        self.words = words
        super().__init__(allow_abbrev=False, formatter_class=_Help, **options)

    def _print_message(self, message: str, file: object = None) -> None:
        write(message)  # help and version, on the way that notices a full disk

    def error(self, message: str) -> NoReturn:
        for word in self.words:
            if word in _HINTS:
                message = f"{word}: {_HINTS[word]}"
        raise InvalidRequestError(f"{message}; {self.prog} --help has the options")


def _parse(argv: list[str]) -> Namespace:
    """The options of one command. Only its own parser is built, and options may stand between its arguments."""
    if argv and argv[0] in COMMANDS:
        name, rest = argv[0], argv[1:]
        about, add_arguments, command = COMMANDS[name]
        parser = _Parser(rest, prog=f"reflex {name}", description=about, epilog=_EXIT_CODES)
        add_arguments(parser)
        arguments = parser.parse_intermixed_args(_joined(rest))
        arguments.command = command
        return arguments
    parser = _Parser(argv, prog="reflex", usage="reflex COMMAND ...", description=_ABOUT, epilog=_overview())
    parser.add_argument("--version", action="version", version=f"reflex {__version__}", help="print the version")
    parser.add_argument("name", metavar="COMMAND", nargs="?", help="one of those below")
    name = parser.parse_args(argv[:1]).name
    raise InvalidRequestError(
        f"no command is called {name!r}" if name else f"which command? {', '.join(COMMANDS)}; reflex --help says more"
    )


_TEXTS = {
    "-p": "--prompt",
    "--prompt": "--prompt",
    "-a": "--candidate",
    "--candidate": "--candidate",
    "--stop": "--stop",
    "--system": "--system",
    "--join": "--join",
    "--neutral": "--neutral",
}
"""Options that take a text, and their long form."""


def _joined(argv: list[str]) -> list[str]:
    """Join each option that takes a text with its text: the parser would take one that begins with a dash for an
    option."""
    joined: list[str] = []
    rest = iter(argv)
    for word in rest:
        if word == "--":
            return [*joined, word, *rest]
        if word == "--timings":  # a prompt may follow it
            following = next(rest, None)
            is_kind = following in ("text", "json")
            joined.append(f"--timings={following if is_kind else 'text'}")
            if is_kind or following is None:
                continue
            word = following
        value = next(rest, None) if word in _TEXTS else None
        joined.append(word if value is None else f"{_TEXTS[word]}={value}")
    return joined


_ABOUT = "A cold process, a GGUF file and a prompt become a first token; then it stops."


def _overview() -> str:
    lines = "\n".join(f"  {name:<10}{about}" for name, (about, _, _) in COMMANDS.items())
    return f"commands (reflex COMMAND --help has the options):\n{lines}\n\n{_EXIT_CODES}"


def _run(arguments: Namespace) -> int:
    from reflex_ipc import run

    return _traced(arguments, lambda trace: run.run(arguments, trace))


def _traced(arguments: Namespace, command: "Callable[[Trace | None], int]") -> int:
    """Run a command with the trace it was asked for, which is written whatever becomes of the command."""
    if arguments.trace is None:
        return command(None)
    from reflex_ipc.timings import write_trace
    from reflex_ipc.trace import Trace

    trace = Trace()
    try:
        code = command(trace)
    except BaseException:
        try:
            write_trace(trace, arguments.trace)
        except ReflexError as error:  # what ended the command says more
            say(str(error))
        raise
    write_trace(trace, arguments.trace)
    return code


def _stdio(arguments: Namespace) -> int:
    complete_site()  # orjson
    from reflex_ipc.loop import serve_stdio

    limits = _given_limits(arguments)
    return _served(
        _traced(arguments, lambda trace: serve_stdio(arguments.model, _opener(arguments, trace), limits)),
    )


def _uds(arguments: Namespace) -> int:
    complete_site()  # orjson
    from reflex_ipc.loop import serve_uds

    limits = _given_limits(arguments)._replace(connections=arguments.connections)
    return _served(
        _traced(
            arguments,
            lambda trace: serve_uds(
                arguments.model,
                arguments.socket,
                _opener(arguments, trace),
                limits,
                mode=arguments.mode,
                exit_after_idle=arguments.exit_after_idle,
            ),
        )
    )


def _opener(arguments: Namespace, trace: "Trace | None") -> "Callable[..., Engine]":
    """How the loop opens the model, once it has said hello."""

    def open_engine(model: str, progress: "Progress") -> "Engine":
        from reflex_ipc.engine import Engine
        from reflex_ipc.launched import since_launch

        engine = Engine.open(
            model,
            backend=arguments.backend,
            device=arguments.device,
            context=arguments.context,
            threads=arguments.threads,
            progress=progress,
            trace=trace,
            leave_driver=True,
        )
        engine.timings |= since_launch()
        say_why_cpu(engine)
        warn(engine.tokenizer)
        return engine

    return open_engine


def _given_limits(arguments: Namespace) -> "Limits":
    from reflex_ipc.messages import Limits

    fields = ("line_bytes", "prompt_tokens", "max_tokens", "write_timeout_ms")
    given = {name: value for name in fields if (value := getattr(arguments, name)) is not None}
    return Limits(**given)


def _served(code: int) -> int:
    """What the loop returned: an exit code, or 128 and the signal to end by."""
    if code > 128:
        _end_by(signal.Signals(code - 128))
    return code


def _system1(arguments: Namespace) -> int:
    from reflex_ipc import system1

    return _traced(arguments, lambda trace: system1.run(arguments, trace))


def _tokenize(arguments: Namespace) -> int:
    from reflex_ipc.tokenizer import Tokenizer

    text = read_prompt(arguments.text, None, arguments.file, "text")
    tokenizer = Tokenizer.from_gguf(model_path(arguments.model))
    ids = tokenizer.encode(text, special=not arguments.no_special)
    warn(tokenizer)
    if arguments.json:
        import json

        pieces = [
            {"id": i, "text": tokenizer.token_bytes(i, special=True).decode("utf-8", "backslashreplace")} for i in ids
        ]
        write(json.dumps(pieces) + "\n")
    else:
        write(" ".join(map(str, ids)) + "\n")
    return 0


def _smoke(arguments: Namespace) -> int:
    from reflex_ipc.smoke import smoke

    return smoke(arguments)


def _check(arguments: Namespace) -> int:
    from reflex_ipc.check import check

    complete_site()
    return check(arguments)


def _bench(arguments: Namespace) -> int:
    from reflex_ipc import timeline

    return timeline.run(arguments)


def _doctor(arguments: Namespace) -> int:
    from reflex_ipc import doctor

    return doctor.run(arguments.json, arguments.device)


def _inspect(arguments: Namespace) -> int:
    from reflex_ipc import inspect
    from reflex_ipc.gguf import GGUF

    with GGUF.open(model_path(arguments.model)) as gguf:
        description = inspect.describe(gguf)
        if gguf.tensors:
            inspect.add_plan(description, gguf, arguments.context)
    if arguments.json:
        import json

        write(json.dumps(description, indent=1) + "\n")
    else:
        write(inspect.render(description))
    return 0


Command: TypeAlias = tuple[str, Callable[[ArgumentParser], None], Callable[[Namespace], int]]
COMMANDS: dict[str, Command] = {
    "run": ("continue a prompt; the text goes to stdout", options.run, _run),
    "system1": ("score candidate continuations in one pass", options.system1, _system1),
    "stdio": ("keep the model loaded and speak JSON lines on stdin and stdout", options.stdio, _stdio),
    "uds": ("the same on a Unix socket", options.uds, _uds),
    "tokenize": ("show the tokens of a text", options.tokenize, _tokenize),
    "doctor": ("say what this machine and this package offer, and what to do about it", options.doctor, _doctor),
    "smoke": ("run every kernel family of the device on small inputs", options.smoke, _smoke),
    "check": ("compare the device with the reference, for one model", options.check, _check),
    "bench": ("measure: timeline draws a start as a waterfall", options.bench, _bench),
    "inspect": ("show what is in a model file and what a run needs", options.inspect, _inspect),
}
"""Name -> what it does, its options, the function that does it and returns the exit code."""
