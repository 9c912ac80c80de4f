"""A client for tests: lines in and out of a process or a socket, with a time-out on everything."""

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PATIENCE = 30.0  # seconds; far more than anything takes, even on a busy machine


class Lines:
    """One side of a conversation: `send` lines, `event` by `event` come back."""

    def __init__(self, reads: int, writes: int):
        self.reads = reads
        self.writes = writes
        self._buffer = b""
        self.ended = False

    def send(self, *messages: Any) -> None:
        """Objects are written as JSON, bytes as they are, all in one write."""
        data = b"".join(each if isinstance(each, bytes) else json.dumps(each).encode() + b"\n" for each in messages)
        while data:
            data = data[os.write(self.writes, data) :]

    def line(self, patience: float = PATIENCE) -> bytes | None:
        """The next line with its newline; None at the end of the stream, which must not come within a line."""
        until = time.monotonic() + patience
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self.reads], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                raise TimeoutError(f"no line for {patience} seconds; so far {self._buffer!r}")
            data = os.read(self.reads, 1 << 16)
            if not data:
                self.ended = True
                assert not self._buffer, f"half a line at the end: {self._buffer!r}"
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line + b"\n"

    def event(self, patience: float = PATIENCE) -> dict[str, Any]:
        line = self.line(patience)
        assert line is not None, "the stream has ended"
        assert line.isascii()
        event: dict[str, Any] = json.loads(line)
        return event

    def until(self, *names: str, id: Any = ...) -> list[dict[str, Any]]:
        """The events up to the first with one of these names (and this id, if one is given)."""
        events = []
        while True:
            events.append(self.event())
            if events[-1]["event"] in names and (id is ... or events[-1]["id"] == id):
                return events

    def answer(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        """Send a request and read its events to the last."""
        self.send(request)
        return self.until("done", "result", "error", id=request["id"])

    def rest(self) -> list[dict[str, Any]]:
        """Everything up to the end of the stream."""
        events = []
        while (line := self.line()) is not None:
            events.append(json.loads(line))
        return events


ENGINE = ("-m", "reflex_ipc")
FAULTY = (str(ROOT / "tests" / "faulty.py"),)
"""An engine that misbehaves when it is asked to."""


def command(kind: str, model: object, *options: object, runs: Sequence[str] = ENGINE) -> list[str]:
    """The command line; `runs` is what Python runs."""
    return [sys.executable, *runs, kind, str(model), *map(str, options), "--backend", "cpu", "--threads", "1"]


class Stdio(Lines):
    """A `stdio` process. As a context manager it is killed at the end, if it has not ended by then."""

    def __init__(
        self,
        model: object,
        *options: object,
        stdin: Any = subprocess.PIPE,
        stdout: Any = subprocess.PIPE,
        runs: Sequence[str] = ENGINE,
    ):
        self.process = start(command("stdio", model, *options, runs=runs), stdin=stdin, stdout=stdout)
        super().__init__(
            self.process.stdout.fileno() if self.process.stdout else -1,
            self.process.stdin.fileno() if self.process.stdin else -1,
        )

    def __enter__(self) -> "Stdio":
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.process)

    def ready(self) -> "Stdio":
        self.until("ready")
        return self

    def end_input(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()

    def code(self) -> int:
        """The exit code; negative for a signal."""
        return self.process.wait(PATIENCE)

    def complaints(self) -> str:
        assert self.process.stderr
        return self.process.stderr.read().decode()


def start(arguments: list[str], **pipes: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **pipes.pop("environment", {})}
    pipes.setdefault("stderr", subprocess.PIPE)
    return subprocess.Popen(arguments, env=environment, bufsize=0, **pipes)


def stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE)
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


class Socket(Lines):
    """A connection to a socket path."""

    def __init__(self, path: object):
        self.socket = socket.socket(socket.AF_UNIX)
        until = time.monotonic() + PATIENCE
        while True:
            try:
                self.socket.connect(str(path))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.01)
        super().__init__(self.socket.fileno(), self.socket.fileno())

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ready(self) -> "Socket":
        self.until("ready")
        return self

    def end_input(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)


def resident_kilobytes(pid: int) -> int:
    """The memory of a process that is its own."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon")


def on_a_terminal(command: list[str], **env: str) -> bytes:
    """What a command shows on a terminal until it has ended well."""
    parent, child = pty.openpty()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=child, stderr=subprocess.DEVNULL, cwd=ROOT, env={**os.environ, **env}
    )
    os.close(child)
    shown = b""
    while True:
        try:
            shown += os.read(parent, 4096)
        except OSError:  # the terminal's other end is gone
            break
    assert process.wait(30) == 0
    os.close(parent)
    return shown
