"""The Unix socket where something runs out: descriptors, a reader's patience."""

import os
import resource
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_uds import activated
from tests.wire import PATIENCE, Socket, command, start, stop

SHORT = {"op": "generate", "prompt": "Hello", "max_tokens": 3, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 4000, "top_logprobs": 20}  # seven megabytes of events


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="r") as directory:
        yield Path(directory) / "s"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_descriptors_run_out(tiny: Path, path: Path) -> None:
    """No connection more is accepted, those there are served, nothing is lost, and waiting costs nothing."""
    process = start(
        command("uds", tiny, path, "--connections", 1000),
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)),
    )
    clients: list[socket.socket] = []
    try:
        with Socket(path) as first:
            first.ready()
            for _ in range(60):  # those that are not accepted wait in the listening socket's queue
                clients.append(socket.socket(socket.AF_UNIX))
                clients[-1].connect(str(path))
            time.sleep(0.3)
            assert process.poll() is None
            before = cpu_seconds(process.pid)
            time.sleep(2.0)
            assert cpu_seconds(process.pid) - before < 0.2
            assert first.answer({"id": 1, **SHORT})[-1]["finish_reason"] == "length"
            last = clients[-1]
            last.settimeout(0.1)
            with pytest.raises(TimeoutError):
                last.recv(1)
            last.settimeout(PATIENCE)
            for each in clients[:-1]:
                each.close()
            began = time.monotonic()
            assert last.recv(9) == b'{"event":'  # hello
            assert time.monotonic() - began < 0.9  # at once, not after a pause
            assert first.answer({"id": 2, **SHORT})[-1]["finish_reason"] == "length"
            process.terminate()
            assert process.wait(PATIENCE) == 0
            assert process.stderr
            complaints = process.stderr.read().decode().splitlines()
            assert len(complaints) == 2 and "Too many open files" in complaints[1]  # said once
    finally:
        for each in clients:
            each.close()
        stop(process)


def test_a_reader_that_drips(tiny: Path, path: Path) -> None:
    """Each event is read in time: alone, it may go on like that; while others wait, for one time-out in all."""
    process = start(command("uds", tiny, path, "--write-timeout", 1500), stdin=subprocess.DEVNULL)
    try:
        with Socket(path) as drips, Socket(path) as waits:
            drips.ready()
            waits.ready()
            drips.send({"id": 1, **LONG})
            ended = threading.Event()

            def drip() -> None:
                while os.read(drips.reads, 16 << 10):
                    time.sleep(0.4)
                ended.set()

            thread = threading.Thread(target=drip)
            thread.start()
            assert not ended.wait(4.5)  # three time-outs
            began = time.monotonic()
            assert waits.answer({"id": 2, **SHORT})[-1]["finish_reason"] == "length"
            assert 0.5 < time.monotonic() - began < 4
            # What is in the socket still reaches it; then the connection has ended.
            assert ended.wait(PATIENCE)
            thread.join()
            assert waits.answer({"id": 3, **SHORT})[-1]["finish_reason"] == "length"
    finally:
        stop(process)


@pytest.mark.parametrize("patience", [0.05, 0.001])
def test_loading_is_not_idleness(tiny: Path, path: Path, patience: float) -> None:
    """Whoever connects while the model loads is told that it is there, however short the patience behind it: what is
    still to be said is no idleness either."""
    for _ in range(3):
        with socket.socket(socket.AF_UNIX) as given:
            given.bind(str(path))
            given.listen()
            with Socket(path) as client:  # before there is an engine, so that it cannot come too late
                process = activated(tiny, given, 3, "--exit-after-idle", patience, LISTEN_FDS="1", LISTEN_PID="OWN")
                try:
                    client.ready()
                    assert client.rest() == []
                    assert process.wait(PATIENCE) == 0
                finally:
                    stop(process)
        path.unlink()


def test_an_idle_engine_leaves_no_socket(tiny: Path, path: Path) -> None:
    process = start(command("uds", tiny, path, "--exit-after-idle", 0.05), stdin=subprocess.DEVNULL)
    try:
        assert process.wait(PATIENCE) == 0 and not path.exists()
    finally:
        stop(process)
