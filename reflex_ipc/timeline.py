"""`reflex bench timeline`: one start, or a trace of one, as a waterfall."""

import json
import os
import sys
import time
from argparse import Namespace
from typing import Any

from reflex_ipc.environment import complete_site, model_path
from reflex_ipc.errors import InputOutputError, InvalidRequestError, ReflexError
from reflex_ipc.launched import LAUNCHED
from reflex_ipc.terminal import read_prompt, visible, write
from reflex_ipc.timings import OUT
from reflex_ipc.trace import label

LARGEST_TRACE = 1 << 30


def run(arguments: Namespace) -> int:
    """Returns the exit code."""
    from reflex_ipc import waterfall

    sources = (arguments.prompt, arguments.prompt_option, arguments.file)
    if arguments.model.endswith(".json"):
        if any(source is not None for source in sources):
            raise InvalidRequestError(f"{arguments.model} is a trace: it takes no prompt")
        trace = _read(arguments.model)
    else:
        trace = _record(arguments, read_prompt(*sources, "prompt"))
    about = trace.get("otherData", {})
    if not isinstance(about, dict):
        raise InvalidRequestError("otherData of the trace is no object")
    named = [visible(str(about[key]))[:200] for key in ("model", "backend") if key in about]
    picture = waterfall.draw(trace, ", ".join(["From launch to first output", *named]))
    try:
        with open(arguments.output, "w", encoding="utf-8", errors="replace") as file:
            file.write(picture)
    except OSError as error:
        raise InputOutputError(f"writing {arguments.output!r} failed: {error.strerror}") from error
    found, out = waterfall.bars(trace)
    write(_table([bar for bar in found if bar.track in waterfall.PHASES], out))
    return 0


def _read(path: str) -> dict[str, Any]:
    try:
        if os.path.getsize(path) > LARGEST_TRACE:
            raise InvalidRequestError(f"{path} is larger than any trace")
        with open(path, "rb") as file:
            trace = json.load(file)
    except OSError as error:
        raise InputOutputError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is no trace: {error}") from None
    if not isinstance(trace, dict):
        raise InvalidRequestError(f"{path} is no trace as --trace writes it: it holds no object")
    return trace


def _record(arguments: Namespace, prompt: str) -> dict[str, Any]:
    """The trace of a run in a process of its own, whose launch is known to the microsecond."""
    import signal
    import subprocess
    import tempfile

    complete_site()

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    # So that the folder and the child do not outlive this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    with tempfile.TemporaryDirectory(prefix="reflex-") as folder:
        file, text = f"{folder}/trace.json", f"{folder}/prompt"
        with open(text, "w", encoding="utf-8", newline="") as out:
            out.write(prompt)  # an argument can be neither so long nor hold a NUL
        command = [*_command(), "run", model_path(arguments.model), "--file", text, "--trace", file]
        command += ["--max-tokens", str(arguments.max_tokens), "--backend", arguments.backend]
        command += ["--device", str(arguments.device)]
        for option, value in (("--context", arguments.context), ("--threads", arguments.threads)):
            command += [] if value is None else [option, str(value)]
        # The launcher of a source tree takes the interpreter from the PATH: it shall be this one.
        path = f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"
        environment = {**os.environ, "PATH": path, LAUNCHED: str(time.monotonic_ns())}
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            words = done.stderr.decode("utf-8", "replace").strip().removeprefix("reflex: ")
            error = ReflexError(f"the run ended with exit code {done.returncode}: {words}")
            error.exit_code = done.returncode if done.returncode > 0 else 128 - done.returncode
            raise error
        return _read(file)


def _command() -> list[str]:
    """How this package is started: by the launcher of the source tree or the installation it is in, or by its name."""
    package = os.path.dirname(os.path.abspath(__file__))
    for folder in (os.path.join(os.path.dirname(package), "bin"), os.path.dirname(sys.executable)):
        launcher = os.path.join(folder, "reflex")
        if os.access(launcher, os.X_OK):
            return [launcher]
    return [sys.executable, "-P", "-m", "reflex_ipc"]


def _table(phases: list[Any], out: float | None) -> str:
    lines = [f"{'phase':<28}{'from':>10}{'ms':>10}\n"]
    for bar in phases:
        lines.append(f"{label(bar.track, bar.name):<28}{bar.start:10.2f}{bar.end - bar.start:10.2f}\n")
    return "".join(lines) + (f"{OUT:<28}{out:10.2f}\n" if out is not None else "")
