"""How every tool here ends: with a line that says why, whoever reads what it prints, and nothing left running."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from measure import MeasurementError
from nvml import NVMLError

from reflex_ipc.errors import ReflexError

READER_GONE = 141
"""As a shell shows what ended by SIGPIPE."""
ENDED_BY = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


def run(main: Callable[[], Any]) -> NoReturn:
    """Exit with what `main` returns.

    What was expected to be able to fail (a file, a device, a model, a measurement) is one line on stderr and exit code
    1. A signal unwinds, so that whatever was started is ended and scratch files go; the exit code is a shell's, 128 and
    its number. Where the reader of stdout has gone, as behind `| head`, nobody wants the rest: then without a word,
    with READER_GONE.
    """
    for number in ENDED_BY:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end)
    try:
        try:
            code = main()
        except SystemExit as end:  # argparse, a signal
            code = end.code
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # where the interpreter then puts what is still in the buffer
        code = READER_GONE
    except (MeasurementError, NVMLError, ReflexError, OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{Path(sys.argv[0]).stem}: {error}\n")
        code = 1
    sys.exit(code)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    for each in ENDED_BY:  # a second one must not cut the clearing up short
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)
