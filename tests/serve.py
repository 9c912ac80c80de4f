"""The process that the wire tests talk to: `serve.py stdio|uds MODEL [JSON of keyword arguments]`.

What the command line does around the loop, without the command line: a real engine on the CPU, the exit code or signal.
"""

import json
import os
import signal
import sys
from functools import partial
from typing import Any

from reflex_ipc.engine import Engine
from reflex_ipc.errors import ReflexError
from reflex_ipc.loop import serve_stdio, serve_uds
from reflex_ipc.messages import Limits


def noisy(model: str, **options: Any) -> Engine:
    """Whatever an import or a library prints, from wherever it does."""
    print("stray print", flush=True)
    os.write(1, b"stray write\n")
    os.system("echo stray child")
    return Engine.open(model, **options)


def main(kind: str, model: str, text: str) -> int:
    options = json.loads(text)
    limits = Limits(**({"connections": 8} if kind == "uds" else {}) | options.pop("limits", {}))
    opener = noisy if options.pop("noise", False) else Engine.open
    open_engine = partial(opener, backend="cpu", threads=1, context=options.pop("context", None))
    if kind == "stdio":
        return serve_stdio(model, open_engine, limits)
    try:
        return serve_uds(model, options.pop("path", None), open_engine, limits, **options)
    except ReflexError as error:
        print(f"reflex: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    if code > 128:
        signal.signal(code - 128, signal.SIG_DFL)
        os.kill(os.getpid(), code - 128)
    sys.exit(code)
