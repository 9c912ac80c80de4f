"""The command line: subcommands, exit codes, and how errors reach a person.

stdout carries only what was asked for; everything else goes to stderr. Nothing heavy is imported here.
"""

import os
import signal
import sys
from argparse import Action, ArgumentParser, Namespace, RawDescriptionHelpFormatter
from typing import Any, NoReturn

from reflex_ipc import __version__
from reflex_ipc.errors import InputOutputError, InvalidRequestError, OutOfMemoryError, ReflexError

_HINTS = {
    "-m": "the model is the first argument: reflex run MODEL PROMPT",
    "--model": "the model is the first argument: reflex run MODEL PROMPT",
    "-ngl": "all layers go to one device; --backend chooses which",
    "--n-gpu-layers": "all layers go to one device; --backend chooses which",
}
_EXIT_CODES = """\
exit codes: 0 done, 1 internal error or failed check, 2 usage, 3 model file, 4 unsupported model, 5 device,
6 out of memory, 7 context overflow, 11 input or output, 124 deadline; 130, 141, 143 by signal"""


def main(argv: list[str]) -> int:
    """Run one command and return its exit code; a signal ends the process by that signal."""
    # A closed pipe ends the process quietly, as it does any Unix filter.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        _check_descriptors()
        arguments = _parser().parse_args(argv)
        code: int = arguments.command(arguments)
        return code
    except ReflexError as error:
        return _fail(str(error), error.exit_code)
    except MemoryError:
        return _fail("memory ran out", OutOfMemoryError.exit_code)
    except OSError as error:
        return _fail(str(error), InputOutputError.exit_code)
    except KeyboardInterrupt:
        return _end_by(signal.SIGINT)
    except Exception as error:
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
    sys.stderr.write(f"reflex: {message}\n")
    return code


def _end_by(number: signal.Signals) -> NoReturn:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)


class _Parser(ArgumentParser):
    """No abbreviations, errors with hints for what hands type by habit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        for word in sys.argv[1:]:
            if word in _HINTS:
                message = f"{word}: {_HINTS[word]}"
        raise InvalidRequestError(f"{message}\n{self.format_usage().rstrip()}")


class _Version(Action):
    def __call__(self, parser: ArgumentParser, *_: object) -> None:
        sys.stdout.write(f"reflex {__version__}\n")
        parser.exit()


def _parser() -> ArgumentParser:
    parser = _Parser(
        prog="reflex", description="A GGUF model and a prompt to the first token, fast.", epilog=_EXIT_CODES
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser(
        "run", help="continue a prompt", description="Continue a prompt; the text goes to stdout."
    )
    _model(run)
    run.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - reads standard input")
    run.add_argument("-p", "--prompt", dest="prompt_option", metavar="TEXT", help="the prompt, as an option")
    run.add_argument("-f", "--file", metavar="FILE", help="read the prompt from a file")
    run.add_argument("-n", "--max-tokens", type=int, default=128, metavar="N", help="tokens at most (128)")
    _backend(run)
    _sampling(run)
    _chat(run)
    run.add_argument("--deadline", type=int, metavar="MS", help="stop after so many milliseconds, with exit code 124")
    run.add_argument("--timings", action="store_true", help="print the phases and their milliseconds to stderr")
    run.add_argument("-v", "--verbose", action="store_true", help="say on stderr what is done")
    run.set_defaults(command=_run)

    tokenize = commands.add_parser("tokenize", help="show the tokens of a text")
    _model(tokenize)
    tokenize.add_argument("text", nargs="?", metavar="TEXT", help="the text; - or nothing reads standard input")
    tokenize.add_argument("-f", "--file", metavar="FILE", help="read the text from a file")
    tokenize.add_argument("--no-special", action="store_true", help="take control tokens in the text as plain text")
    tokenize.add_argument("--json", action="store_true", help="a JSON array of {id, text}")
    tokenize.set_defaults(command=_tokenize)

    inspect = commands.add_parser("inspect", help="show what is in a model file")
    _model(inspect)
    inspect.add_argument("-c", "--context", type=int, metavar="N", help="context for the memory a run needs")
    inspect.add_argument("--json", action="store_true", help="as JSON")
    inspect.set_defaults(command=_inspect)
    return parser


def _model(parser: ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a .gguf file, or smollm2 for the installed demo model")


def _backend(parser: ArgumentParser) -> None:
    parser.add_argument(
        "-c", "--context", type=int, metavar="N", help="tokens that prompt and answer may have (model's)"
    )
    parser.add_argument("--backend", choices=("auto", "cuda", "cpu"), default="auto", help="where to run (auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (all)")


def _sampling(parser: ArgumentParser) -> None:
    """Options whose `dest` is a field of `sampler.Sampling`; what is not given keeps that class's default."""
    group = parser.add_argument_group("sampling (docs/sampling.md has the formulas; without these the best token wins)")
    for flags, kind, text in (
        (("--temp", "--temperature"), float, "temperature; 0 is greedy"),
        (("--top-k",), int, "only the k likeliest"),
        (("--top-p",), float, "only the likeliest that together have this probability"),
        (("--min-p",), float, "only those with at least this share of the likeliest one's probability"),
        (("--repeat-penalty",), float, "divide (or multiply) the logits of recent tokens"),
        (("--repeat-last-n",), int, "how many tokens are recent; -1 is all"),
        (("--presence-penalty",), float, "subtract from every token that occurred"),
        (("--frequency-penalty",), float, "subtract for each time it occurred"),
        (("-s", "--seed"), int, "seed of the random numbers; random by default"),
    ):
        name = flags[-1].lstrip("-").replace("-", "_")
        group.add_argument(*flags, dest=name, type=kind, metavar="N" if kind is int else "X", help=text)
    group.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=X", help="add X to a token's logit (repeatable)"
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text (repeatable)")
    group.add_argument("--ignore-eos", action="store_true", help="go on past end-of-generation tokens")


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    return int(token), float(bias)


def _chat(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("chat, by the file's own template")
    group.add_argument("--chat", action="store_true", help="take the prompt as what a user says")
    group.add_argument("--system", metavar="TEXT", help="a system message before it (implies --chat)")
    group.add_argument("--messages", metavar="FILE", help="a JSON array of messages in place of a prompt; - is stdin")
    group.add_argument("--no-thinking", action="store_true", help="set the template's enable_thinking to false")


def _run(arguments: Namespace) -> int:
    from reflex_ipc import run

    return run.run(arguments)


def _tokenize(arguments: Namespace) -> int:
    from reflex_ipc.environment import model_path
    from reflex_ipc.run import read_prompt
    from reflex_ipc.tokenizer import Tokenizer

    text = read_prompt(arguments.text, None, arguments.file, "text")
    tokenizer = Tokenizer.from_gguf(model_path(arguments.model))
    ids = tokenizer.encode(text, special=not arguments.no_special)
    if arguments.json:
        import json

        pieces = [
            {"id": i, "text": tokenizer.token_bytes(i, special=True).decode("utf-8", "backslashreplace")} for i in ids
        ]
        sys.stdout.write(json.dumps(pieces) + "\n")
    else:
        sys.stdout.write(" ".join(map(str, ids)) + "\n")
    return 0


def _inspect(arguments: Namespace) -> int:
    from reflex_ipc import inspect
    from reflex_ipc.environment import model_path
    from reflex_ipc.gguf import GGUF

    with GGUF.open(model_path(arguments.model)) as gguf:
        description = inspect.describe(gguf)
        if gguf.tensors:
            inspect.add_memory(description, gguf, arguments.context)
    if arguments.json:
        import json

        sys.stdout.write(json.dumps(description, indent=1) + "\n")
    else:
        sys.stdout.write(inspect.render(description))
    return 0
