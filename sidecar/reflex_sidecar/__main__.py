"""`reflex-sidecar`: the command line."""

import argparse
import ipaddress
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence

KEY_VARIABLE = "REFLEX_API_KEY"

_EPILOG = f"""\
Give the engine either as a socket or, after --, as the command that runs it:
  reflex-sidecar --socket /run/user/1000/reflex.sock
  reflex-sidecar -- reflex stdio model.gguf

The key that clients must send (Authorization: Bearer KEY) comes from --key-file or {KEY_VARIABLE}."""


def main(argv: Sequence[str]) -> int:
    """Serve until told to end. Returns the exit code: 0, 1 when the address can't be had, 2 for bad usage."""
    own, command = _split(argv)
    parser = _parser()
    options = parser.parse_args(own)
    if (options.socket is None) == (not command):
        parser.error("give the engine either by --socket PATH or as a command after --")
    key = _key(parser, options.key_file)
    if key is None and not _is_loopback(options.host):
        parser.error(
            f"--host {options.host} listens beyond this machine: that takes a key ({KEY_VARIABLE}, --key-file)"
        )
    from reflex_sidecar.serve import serve

    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return serve(options, command, key, hidden=(KEY_VARIABLE,))


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    arguments = list(argv)
    if "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reflex-sidecar",
        usage="%(prog)s [options] (--socket PATH | -- COMMAND ...)",
        description="OpenAI-compatible HTTP in front of a Reflex engine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--socket", metavar="PATH", help="the Unix socket of a running engine (reflex uds)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8080, help="port to listen on (8080); 0 takes a free one")
    parser.add_argument("--key-file", metavar="FILE", help="file with the key that clients must send")
    parser.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="a further name in Host headers (repeatable)"
    )
    parser.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="a web origin whose pages may ask, such as https://example.org (repeatable)",
    )
    parser.add_argument(
        "--model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="what clients call the model (repeatable; its file's name)",
    )
    for flag, kind, bottom, default, name, text in (
        ("--queue", int, 0, 16, "N", "requests that may wait (16)"),
        ("--wait", float, 0, 30.0, "S", "seconds one may wait before 503 (30)"),
        ("--ping", float, 0.01, 15.0, "S", "seconds between pings in a stream (15)"),
        ("--body-bytes", int, 1, 4 << 20, "N", "longest request body (4 MiB)"),
    ):
        parser.add_argument(flag, type=_at_least(kind, bottom), default=default, metavar=name, help=text)
    return parser


def _at_least(kind: type[int] | type[float], bottom: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not bottom <= value < math.inf:
            raise argparse.ArgumentTypeError(f"has to be a number from {bottom:g}")
        return value

    return number


def _key(parser: argparse.ArgumentParser, path: str | None) -> str | None:
    """The key, None if there is to be none. An empty one is a mistake, not a wish."""
    if path is None:
        key = os.environ.get(KEY_VARIABLE)
    else:
        try:
            with open(path, encoding="ascii") as file:
                key = file.read(4097)
        except OSError as error:
            parser.error(f"--key-file {path}: {error.strerror}")
        except UnicodeDecodeError:
            parser.error(f"--key-file {path}: not ASCII")
    if key is None:
        return None
    key = key.strip()
    if not key or len(key) > 4096 or not key.isprintable() or not key.isascii() or " " in key:
        parser.error("the key has to be a word of at most 4096 printable ASCII characters")
    return key


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def run() -> None:
    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    run()
