"""Signals at any moment of a process's life: it ends by them, or with 0 when nothing was cut; never with an error."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.wire import PATIENCE, ROOT, Socket, Stdio, command, start, stop

STARTS = int(os.environ.get("REFLEX_SIGNAL_STARTS", "24"))
"""Processes a kind; set it to hundreds to look for what happens once in a thousand."""


@pytest.fixture
def private() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="r") as path:
        yield Path(path)


def end_somewhere(arguments: list[str], delay: float) -> tuple[int, str]:
    """Exit code and stderr of a process that gets SIGTERM after `delay` seconds."""
    process = start(arguments, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        time.sleep(delay)
        process.terminate()
        code = process.wait(PATIENCE)
        assert process.stderr
        return code, process.stderr.read().decode()
    finally:
        stop(process)


def long_enough(arguments: list[str], ready: bytes) -> float:
    """How long a start takes until it writes `ready`."""
    began = time.monotonic()
    process = start(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout
        seen = b""
        while ready not in seen:
            data = os.read(process.stdout.fileno(), 4096)
            assert data
            seen += data
        return time.monotonic() - began
    finally:
        stop(process)


@pytest.mark.parametrize("kind", ["stdio", "uds", "run"])
def test_sigterm_at_any_moment(tiny: Path, private: Path, kind: str) -> None:
    """From before the interpreter runs, where a Ctrl-C may be lost or printed: that is not ours."""
    rng = random.Random(f"{kind} {STARTS}")
    whole = long_enough(command("stdio", tiny), b'"ready"')

    def one(i: int) -> tuple[float, int, str]:
        delay = rng.uniform(0.0, 1.3 * whole)
        if kind == "run":
            arguments = command("run", tiny, "-p", "Hello", "-n", 4000, "--ignore-eos")
        else:
            arguments = command(kind, tiny, *([private / f"s{i}"] if kind == "uds" else []))
        code, complaint = end_somewhere(arguments, delay)
        return delay, code, "\n".join(each for each in complaint.splitlines() if "listening on" not in each)

    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(one, range(STARTS)))
    for delay, code, complaint in ends:
        assert complaint == "", (delay, code, complaint)
        assert code == -signal.SIGTERM or (code == 0 and kind != "run"), (delay, code, complaint)
    if kind == "uds":  # whatever they left, none is in the way of the next
        for i, (_, code, _) in enumerate(ends):
            path = private / f"s{i}"
            if code == 0:
                assert not path.exists()
            if path.exists() and i % 4 == 0:
                end_by_idleness(tiny, path)


def end_by_idleness(model: Path, path: Path) -> None:
    process = start(command("uds", model, path, "--exit-after-idle", "0.1"), stdin=subprocess.DEVNULL)
    try:
        assert process.wait(PATIENCE) == 0
        assert not path.exists() and not Path(f"{path}.lock").exists()
    finally:
        stop(process)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_at_any_call_of_a_start(tiny: Path, private: Path, number: signal.Signals) -> None:
    """The signal comes at the n-th call or return of the loading of a model, imports and destructors included: an
    exception out of a handler was turned into another one there, or left a lock taken for ever."""
    script = (
        "import os, signal, sys\n"
        "at, number = int(sys.argv[1]), int(sys.argv[2])\n"
        "import reflex_ipc.cli, reflex_ipc.loop\n"
        "seen = 0\n"
        "def profile(*_):\n"
        "    global seen\n"
        "    seen += 1\n"
        "    if seen == at:\n"
        "        sys.setprofile(None)\n"
        "        os.kill(os.getpid(), number)\n"
        "serve = reflex_ipc.loop.Loop.serve\n"
        "def profiled(*arguments):\n"
        "    sys.setprofile(profile)\n"
        "    return serve(*arguments)\n"
        "reflex_ipc.loop.Loop.serve = profiled\n"
        "code = reflex_ipc.cli.main(sys.argv[3:])\n"
        "print(seen, file=sys.stderr)\n"
        "sys.exit(code)\n"
    )

    def one(at: int) -> tuple[int, list[str]]:
        path = private / f"s{at}"
        arguments = [sys.executable, "-c", script, str(at), str(int(number)), *command("uds", tiny, path)[3:]]
        process = start([*arguments, "--exit-after-idle", "0.1"], stdin=subprocess.DEVNULL)
        try:
            code = process.wait(PATIENCE)
            assert process.stderr and not path.exists()
            return code, process.stderr.read().decode().splitlines()
        finally:
            stop(process)

    code, (_, seen) = one(0)
    assert code == 0
    rng = random.Random(f"{number} {STARTS}")
    points = [rng.randrange(1, int(seen)) for _ in range(STARTS // 2)]
    with ThreadPoolExecutor(3) as pool:
        for at, (code, complaints) in zip(points, pool.map(one, points), strict=True):
            assert code in (-number, 0), (at, code, complaints)
            assert len([each for each in complaints if not each.isdigit()]) == 1, (at, complaints)  # listening on


def test_more_than_one(tiny: Path) -> None:
    """An impatient hand: whatever the first one has begun, the next does not turn it into an error."""
    for i in range(12):
        with Stdio(tiny) as engine:
            engine.until("hello")
            time.sleep(0.02 * i)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                engine.process.send_signal(number)
                time.sleep(0.001)
            engine.rest()
            code, complaint = engine.code(), engine.complaints()
            assert code in (0, -signal.SIGTERM, -signal.SIGINT) and complaint == "", (i, code, complaint)


def test_what_a_shell_has_ignored_stays_ignored(tiny: Path) -> None:
    """A background job of a script is not for the script's Ctrl-C."""
    process = start(
        command("stdio", tiny),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        engine = Stdio.__new__(Stdio)
        assert process.stdout and process.stdin
        super(Stdio, engine).__init__(process.stdout.fileno(), process.stdin.fileno())
        engine.until("hello")
        process.send_signal(signal.SIGINT)
        engine.until("ready")
        process.send_signal(signal.SIGINT)
        assert engine.answer({"id": 1, "op": "info"})[-1]["event"] == "result"
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
    finally:
        stop(process)


@pytest.mark.parametrize("where", ["socket.socket.bind", "os.pwrite", "socket.socket.listen"])
@pytest.mark.parametrize("after", [False, True])
def test_while_the_socket_is_made(tiny: Path, private: Path, where: str, after: bool) -> None:
    """Between the socket and the lock that speaks of it no signal is taken: the next engine always knows it."""
    path = private / "s"
    module, _, name = where.rpartition(".")
    script = (
        "import os, signal, socket, sys\n"
        "from reflex_ipc import cli, listener\n"
        f"plain = {where}\n"
        "def interrupted(*arguments):\n"
        f"    if not {after}: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    result = plain(*arguments)\n"
        f"    if {after}: os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return result\n"
        f"{module}.{name} = interrupted\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    process = start([sys.executable, "-c", script, *command("uds", tiny, path)[3:]], stdin=subprocess.DEVNULL)
    try:
        assert process.wait(PATIENCE) == -signal.SIGTERM
    finally:
        stop(process)
    again = start(command("uds", tiny, path), stdin=subprocess.DEVNULL, cwd=ROOT)
    try:
        with Socket(path) as client:
            client.ready()
        again.terminate()
        assert again.wait(PATIENCE) == 0 and not path.exists()
    finally:
        stop(again)
