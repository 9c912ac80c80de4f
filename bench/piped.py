"""How every tool here ends, whoever reads what it prints."""

import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

READER_GONE = 141
"""As a shell shows what ended by SIGPIPE."""


def run(main: Callable[[], Any]) -> NoReturn:
    """Exit with what `main` returns. Where the reader of stdout has gone, as behind `| head`, nobody wants the rest:
    then without a word, with READER_GONE."""
    try:
        try:
            code = main()
        except SystemExit as end:  # argparse
            code = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where the interpreter then puts what is still in the buffer
        code = READER_GONE
    sys.exit(code)
