"""The Unix socket, with a real engine in a real process, and real clients."""

import fcntl
import json
import os
import random
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from reflex_ipc import listener
from reflex_ipc.errors import InputOutputError
from tests.wire import ENGINE, FAULTY, PATIENCE, Socket, command, resident_kilobytes, start, stop

LONG = {"op": "generate", "prompt": "Hello", "max_tokens": 4000, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 3}


ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def private() -> Iterator[Path]:
    """A directory that is short enough for a socket's path, and nobody else's."""
    with tempfile.TemporaryDirectory(prefix="r") as path:
        yield Path(path)


class Server:
    """A `uds` process."""

    def __init__(self, model: object, path: Path, *options: object, runs: Sequence[str] = ENGINE):
        self.path = path
        self.process = start(command("uds", model, path, *options, runs=runs), stdin=subprocess.DEVNULL)

    def connect(self) -> Socket:
        return Socket(self.path)

    def code(self) -> int:
        return self.process.wait(PATIENCE)

    def complaints(self) -> list[str]:
        assert self.process.stderr
        return self.process.stderr.read().decode().splitlines()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        stop(self.process)


@pytest.fixture(scope="module")
def server(tiny: Path, private: Path) -> Iterator[Server]:
    """One process for the tests that leave it as they found it."""
    with Server(tiny, private / "shared") as server:
        with server.connect() as client:
            client.ready()
        yield server


def refused(model: Path, path: Path, *words: str) -> None:
    """It does not start, says why, and does not touch what is there."""

    def found() -> tuple[int, ...] | None:
        if not os.path.lexists(path):
            return None
        state = os.lstat(path)
        return state.st_dev, state.st_ino, state.st_mode, state.st_size, state.st_mtime_ns

    def lock() -> bytes | None:
        try:
            return Path(f"{path}.lock").read_bytes()
        except OSError:
            return None

    before, lock_before = found(), lock()
    with Server(model, path) as server:
        assert server.code() == 11
        (complaint,) = server.complaints()
        for word in (str(path.parent), *words):
            assert word in complaint
    assert found() == before
    if not words or "another engine" not in words[0]:
        assert lock() == lock_before  # none, or what a dead engine's lock says


# The socket in the file system


def test_mode_and_clean_exit(tiny: Path, private: Path) -> None:
    path = private / "clean"
    with Server(tiny, path) as server:
        with server.connect() as client:
            client.ready()
            assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_ISSOCK(path.stat().st_mode)
            assert stat.S_IMODE(Path(f"{path}.lock").stat().st_mode) == 0o600
            server.process.terminate()
            assert server.code() == 0
            assert client.rest() == []
        assert not path.exists() and not Path(f"{path}.lock").exists()
        assert server.complaints() == [f"reflex: listening on {path}"]


def test_the_mode_is_there_from_the_start(private: Path) -> None:
    """Whatever the umask says: `bind` itself makes the mode, so there is no moment with another one."""
    script = (
        "import os, socket, stat, sys; from reflex_ipc import listener\n"
        "path, seen = sys.argv[1], []\n"
        "sys.addaudithook(lambda name, _: seen.append(os.path.lexists(path)) if name == 'socket.bind' else None)\n"
        "plain = socket.socket.bind\n"
        "def bind(self, where):\n"
        "    plain(self, where); seen.append(oct(stat.S_IMODE(os.lstat(path).st_mode)))\n"
        "socket.socket.bind = bind\n"
        "os.umask(int(sys.argv[2], 8))\n"
        "with listener.listen(path, 0o660): pass\n"
        "print(seen, oct(os.umask(0)))\n"
    )
    for umask in ("0", "77", "777"):
        arguments = [sys.executable, "-c", script, str(private / "mode"), umask]
        output = subprocess.run(arguments, capture_output=True, text=True, timeout=30, check=True)
        assert output.stdout == f"[False, '0o660'] {oct(int(umask, 8))}\n"


def test_a_dead_engines_socket_is_replaced(tiny: Path, private: Path) -> None:
    path = private / "dead"
    with Server(tiny, path) as server, server.connect() as client:
        client.ready()
        server.process.kill()
        server.code()
        assert client.rest() == []
    assert path.exists()
    with Server(tiny, path) as server, server.connect() as client:
        client.ready()
        assert client.answer({"id": 1, "op": "info"})[0]["event"] == "result"
        server.process.terminate()
        assert server.code() == 0
    assert not path.exists()


def test_two_engines_on_one_path(tiny: Path, server: Server) -> None:
    refused(tiny, server.path, "another engine")
    with server.connect() as client:
        client.ready()


def test_a_race_for_one_path(tiny: Path, private: Path) -> None:
    """Of several that start at once, also over a dead one's socket, exactly one serves."""
    path = private / "race"
    for _ in range(2):
        servers = [Server(tiny, path) for _ in range(5)]
        try:
            with Socket(path) as client:
                client.ready()
                deadline = time.monotonic() + PATIENCE
                while sum(each.process.poll() is None for each in servers) > 1 and time.monotonic() < deadline:
                    time.sleep(0.02)
                codes = sorted(each.process.poll() or 0 for each in servers)
                assert codes == [0, 11, 11, 11, 11]
                assert client.answer({"id": 1, "op": "info"})[0]["event"] == "result"
        finally:
            for each in servers:
                stop(each.process)  # kills the one that serves: the next round finds a dead socket


def test_a_lock_file_that_is_removed_while_another_waits_for_it(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine ends between another's opening the lock file and locking it: that lock would be of no file."""
    path = str(private / "handover")
    first = listener.listen(path)
    plain = fcntl.flock

    def flock(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", plain)
        first.__exit__()
        plain(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with listener.listen(path), pytest.raises(InputOutputError, match="another engine"):
        listener.listen(path)
    assert not os.path.lexists(path) and not os.path.lexists(path + ".lock")


def test_whatever_else_is_at_the_path(tiny: Path, private: Path) -> None:
    file = private / "file"
    file.write_text("precious")
    refused(tiny, file, "remove it")
    (private / "folder").mkdir()
    refused(tiny, private / "folder", "remove it")
    (private / "link").symlink_to(private / "nowhere")
    refused(tiny, private / "link", "remove it")
    os.mkfifo(private / "fifo")
    refused(tiny, private / "fifo", "remove it")
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(private / "living"))
        living.listen()
        refused(tiny, private / "living", "remove it")
    refused(tiny, private / "living", "remove it")  # dead by now, but no engine's
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(private / "datagram"))
        refused(tiny, private / "datagram", "remove it")


def test_a_foreign_socket_in_a_dead_engines_place(tiny: Path, private: Path) -> None:
    """Even if it has got the inode that our lock remembers, a socket that somebody listens on is not dead."""
    path = private / "place"
    with Server(tiny, path) as server:
        with server.connect() as client:
            client.ready()
        server.process.kill()
        server.code()
    path.unlink()
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(path))
        foreign.listen()
        found = path.lstat()
        Path(f"{path}.lock").write_text(f"{(found.st_dev, found.st_ino)}\n")
        refused(tiny, path, "remove it")


def test_only_our_own_socket_is_removed(tiny: Path, private: Path) -> None:
    path = private / "own"
    with Server(tiny, path) as server, server.connect() as client:
        client.ready()
        path.unlink()
        path.write_text("somebody else's")
        server.process.terminate()
        assert server.code() == 0
    assert path.read_text() == "somebody else's"


def test_directories_that_others_can_write_to(tiny: Path, private: Path) -> None:
    for mode in (0o777, 0o1777, 0o770, 0o720):
        directory = private / f"d{mode:o}"
        directory.mkdir()
        directory.chmod(mode)
        refused(tiny, directory / "s", "others can write")
        below = directory / "below"
        below.mkdir(0o700)
        if mode & stat.S_ISVTX:  # what is ours in it, others can't replace
            with Server(tiny, below / "s") as server, server.connect() as client:
                client.ready()
        else:
            (private / "way").unlink(missing_ok=True)
            (private / "way").symlink_to(below)
            with Server(tiny, private / "way" / "s") as server:
                assert server.code() == 11 and "others can write" in server.complaints()[0]
    refused(tiny, private / "missing" / "s", "No such file")
    refused(tiny, private / ("x" * 110), "107 bytes")


def test_the_default_path(tiny: Path, private: Path) -> None:
    for environment, code in (({"XDG_RUNTIME_DIR": str(private)}, 0), ({"XDG_RUNTIME_DIR": ""}, 2)):
        process = start(command("uds", tiny), stdin=subprocess.DEVNULL, environment=environment)
        try:
            if code == 0:
                with Socket(private / "reflex.sock") as client:
                    client.ready()
                process.terminate()
            assert process.wait(PATIENCE) == code
        finally:
            stop(process)


# Connections


@pytest.mark.model
def test_hello_comes_while_the_model_loads(smollm2: Path, private: Path) -> None:
    with Server(smollm2, private / "slow") as server, server.connect() as client:
        events = [each["event"] for each in client.until("ready")]
        assert events[0] == "hello" and "loading" in events
        server.process.terminate()
        assert server.code() == 0


def test_a_model_that_cannot_be_opened(private: Path) -> None:
    with Server(private / "missing.gguf", private / "bad") as server:
        assert server.code() == 3
        _, message = server.complaints()
        assert "missing.gguf" in message
    assert not (private / "bad").exists() and not (private / "bad.lock").exists()


def test_a_lost_device_is_told_to_everyone(tiny: Path, private: Path) -> None:
    with Server(tiny, private / "lost", runs=FAULTY) as server, server.connect() as asker, server.connect() as other:
        asker.ready()
        other.ready()
        asker.send({"id": 1, "op": "detokenize", "tokens": [13]})
        errors = [asker.rest(), other.rest()]
        assert [[(each["id"], each["code"], each["fatal"]) for each in events] for events in errors] == [
            [(1, "device", True)],
            [(None, "device", True)],
        ]
        assert server.code() == 5
    assert not (private / "lost").exists()


def test_an_idle_connection_blocks_nobody(server: Server) -> None:
    with server.connect() as idle, server.connect() as half, server.connect() as busy:
        half.send(b'{"id": 1, "op": "gene')
        busy.ready()
        assert busy.answer({"id": 1, **SHORT})[-1]["event"] == "done"
        half.ready()
        half.send(b'rate", "prompt": "Hello", "max_tokens": 1}\n')
        assert half.until("done")[-1]["id"] == 1
        idle.ready()


def test_connections_take_turns(server: Server) -> None:
    """One that sends many requests at once lets another's single one in after the first of them."""
    with server.connect() as greedy, server.connect() as modest:
        greedy.ready()
        modest.ready()
        greedy.send(*({"id": i, **LONG, "max_tokens": 100} for i in range(5)))
        greedy.until("token")
        done: list[Any] = []

        def wait() -> None:
            modest.answer({"id": "m", **SHORT})
            done.append(time.monotonic())

        thread = threading.Thread(target=wait)
        thread.start()
        ends = []
        for _ in range(5):
            greedy.until("done")
            ends.append(time.monotonic())
        thread.join()
        assert done[0] < ends[1]


def test_a_cancel_reaches_its_own_connection_only(server: Server) -> None:
    with server.connect() as one, server.connect() as other:
        one.ready()
        other.ready()
        one.send({"id": 1, **LONG, "max_tokens": 300})
        one.until("token")
        other.send({"id": 1, **SHORT}, {"id": 9, "op": "cancel", "target": 1})
        assert other.event() == {"id": 9, "event": "result", "target": 1, "found": "waiting"}
        assert one.until("done")[-1]["finish_reason"] == "length"
        assert other.until("done")[-1]["finish_reason"] == "cancelled"


def test_a_cancel_is_heard_while_another_connection_runs(server: Server) -> None:
    with server.connect() as one, server.connect() as other:
        one.ready()
        other.ready()
        one.send({"id": 1, **LONG})
        one.until("token")
        began = time.monotonic()
        other.send({"id": 5, "op": "cancel", "target": 5})
        assert other.event()["found"] == "unknown"
        assert time.monotonic() - began < 1  # the other's request takes several seconds
        one.send({"id": 2, "op": "cancel", "target": 1})
        one.until("done")


def test_closing_cancels_and_half_closing_does_not(server: Server) -> None:
    with server.connect() as client:
        client.ready()
        client.send({"id": 1, **LONG, "max_tokens": 100}, {"id": 2, **SHORT})
        client.end_input()
        assert [each["id"] for each in client.rest() if each["event"] == "done"] == [1, 2]
    with server.connect() as client, server.connect() as next_one:
        client.ready()
        next_one.ready()
        client.send({"id": 1, **LONG}, {"id": 2, **LONG})
        client.until("token")
        client.socket.close()
        began = time.monotonic()
        assert next_one.answer({"id": 3, **SHORT})[-1]["event"] == "done"
        assert time.monotonic() - began < 2  # either of the two takes longer


def test_a_reader_that_reads_nothing(tiny: Path, private: Path) -> None:
    patience = ("--write-timeout", 700)
    with Server(tiny, private / "lazy", *patience) as server, server.connect() as lazy, server.connect() as other:
        lazy.ready()
        other.ready()
        lazy.send(*({"id": i, **LONG, "top_logprobs": 20, "max_tokens": 1000} for i in range(3)))
        lazy.until("token")
        other.send({"id": 1, **SHORT})
        assert other.until("done")[-1]["id"] == 1  # after the time-out, not after 3,000 tokens
        assert lazy.rest()[-1]["event"] == "token"


def test_the_ninth_connection(server: Server) -> None:
    clients = [server.connect().ready() for _ in range(8)]
    try:
        for _ in range(3):
            with server.connect() as ninth:
                hello, error = ninth.rest()
                assert hello["limits"]["connections"] == 8
                assert error["code"] == "busy" and error["fatal"] is True and error["id"] is None
                assert "exit_code" not in error
        clients.pop().socket.close()
        with server.connect() as ninth:
            ninth.ready()
        # Also while a request runs they are told at once, and not kept.
        clients.append(server.connect().ready())
        clients[0].send({"id": 1, **LONG})
        clients[0].until("token")
        refused = [server.connect() for _ in range(20)]
        for each in refused:
            assert each.rest()[-1]["code"] == "busy"
            each.socket.close()
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < 30
    finally:
        for each in clients:
            each.socket.close()


def test_nothing_is_reused_across_connections(server: Server) -> None:
    for _ in range(2):
        with server.connect() as client:
            client.ready()
            assert client.answer({"id": 1, **SHORT})[-1]["usage"]["reused_tokens"] == 0
    with server.connect() as one, server.connect() as other:
        one.ready()
        other.ready()
        for client in (one, other, one):
            assert client.answer({"id": 1, **SHORT})[-1]["usage"]["reused_tokens"] == 0


# Ends


def test_exit_after_idle(tiny: Path, private: Path) -> None:
    with Server(tiny, private / "idle", "--exit-after-idle", 1) as server, server.connect() as client:
        client.ready()
        for _ in range(4):
            time.sleep(0.5)
            client.answer({"id": 1, **SHORT})
        began = time.monotonic()
        assert client.rest() == [] and server.code() == 0
        assert 0.8 < time.monotonic() - began < 10
    assert not (private / "idle").exists()


def test_exit_after_idle_does_not_cut_a_request(tiny: Path, private: Path) -> None:
    with Server(tiny, private / "idle", "--exit-after-idle", 0.6) as server, server.connect() as client:
        client.ready()
        began = time.monotonic()
        events = client.answer({"id": 1, **LONG, "max_tokens": 3000})
        assert time.monotonic() - began > 0.6
        assert events[-1]["finish_reason"] == "length"
        assert server.code() == 0


def test_sigterm_during_a_request(tiny: Path, private: Path) -> None:
    with Server(tiny, private / "cut") as server, server.connect() as client, server.connect() as idle:
        client.ready()
        idle.ready()
        client.send({"id": 1, **LONG})
        client.until("token")
        server.process.terminate()
        assert {each["event"] for each in client.rest()} <= {"token"}
        assert idle.rest() == [] and server.code() == -signal.SIGTERM
    assert not (private / "cut").exists()


@pytest.mark.model
def test_sigterm_while_loading(smollm2: Path, private: Path) -> None:
    with Server(smollm2, private / "early") as server, server.connect() as client:
        client.until("hello")  # the model has hundreds of milliseconds to go
        server.process.terminate()
        client.rest()
        assert server.code() == -signal.SIGTERM
    assert not (private / "early").exists()


@pytest.mark.model
def test_one_connection_too_many_while_loading(smollm2: Path, private: Path) -> None:
    with Server(smollm2, private / "crowd") as server:
        clients = [server.connect() for _ in range(8)]
        with server.connect() as ninth:
            assert ninth.rest()[-1]["code"] == "busy"
        for client in clients:
            client.ready()
            client.socket.close()


# Socket activation


def activated(
    model: Path, handed: socket.socket, fd: int, *options: object, **variables: str
) -> subprocess.Popen[bytes]:
    """Start the process with this socket at descriptor `fd`, and LISTEN_PID as systemd would set it."""

    def hand_over() -> None:
        if fd == handed.fileno():
            os.set_inheritable(fd, True)
        else:
            os.dup2(handed.fileno(), fd)
        os.environ.update({name: value.replace("OWN", str(os.getpid())) for name, value in variables.items()})
        os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
        arguments = command("uds", model, *options)
        os.closerange(max(3, fd + 1), 200)
        os.execv(arguments[0], arguments)

    return subprocess.Popen(
        ["/bin/true"],
        preexec_fn=hand_over,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        close_fds=False,
    )


def test_a_listening_socket_is_handed_over(tiny: Path, private: Path) -> None:
    path = private / "given"
    with socket.socket(socket.AF_UNIX) as given:
        given.bind(str(path))
        given.listen()
        process = activated(tiny, given, 3, LISTEN_FDS="1", LISTEN_PID="OWN")
    try:
        for _ in range(2):
            with Socket(path) as client:
                client.ready()
                assert client.answer({"id": 1, **SHORT})[-1]["event"] == "done"
        process.terminate()
        assert process.wait(PATIENCE) == 0
        assert path.exists()  # whoever made it removes it
    finally:
        stop(process)


@pytest.mark.parametrize("fd", [3, 0])
def test_a_connection_is_handed_over(tiny: Path, private: Path, fd: int) -> None:
    """Accept=yes: each connection starts a cold process for itself."""
    ours, theirs = socket.socketpair()
    variables = {"LISTEN_FDS": "1", "LISTEN_PID": "OWN"} if fd == 3 else {}
    process = activated(tiny, theirs, fd, **variables)
    theirs.close()
    client = Socket.__new__(Socket)
    client.socket = ours
    super(Socket, client).__init__(ours.fileno(), ours.fileno())
    try:
        client.ready()
        assert client.answer({"id": 1, **SHORT})[-1]["event"] == "done"
        client.send({"id": 2, **SHORT})
        client.end_input()
        assert client.rest()[-1]["id"] == 2
        assert process.wait(PATIENCE) == 0
    finally:
        stop(process)
        ours.close()


def test_somebody_elses_activation(tiny: Path, private: Path) -> None:
    """LISTEN_PID names another process: the variables were inherited and mean nothing."""
    with socket.socket(socket.AF_UNIX) as given:
        given.bind(str(private / "other"))
        given.listen()
        process = activated(tiny, given, 3, LISTEN_FDS="1", LISTEN_PID="1", XDG_RUNTIME_DIR=str(private))
        try:
            with Socket(private / "reflex.sock") as client:
                client.ready()
        finally:
            stop(process)
            for leftover in private.glob("reflex.sock*"):
                leftover.unlink()


def test_activation_with_what_is_no_stream_socket(tiny: Path, private: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as given:
        for count, word in (("1", "stream"), ("2", "LISTEN_FDS")):
            process = activated(tiny, given, 3, LISTEN_FDS=count, LISTEN_PID="OWN")
            try:
                assert process.wait(PATIENCE) == 11
                assert process.stderr and word in process.stderr.read().decode()
            finally:
                stop(process)


@pytest.mark.skipif(not shutil.which("systemd-socket-activate"), reason="systemd-socket-activate is not installed")
@pytest.mark.parametrize("accept", [False, True])
def test_systemd(tiny: Path, private: Path, accept: bool) -> None:
    path = private / f"systemd{accept}"
    activate = ["systemd-socket-activate", "-l", str(path), *(["--accept"] if accept else [])]
    activate += ["-E", f"PYTHONPATH={Path(__file__).parents[1]}", *command("uds", tiny)]
    process = subprocess.Popen(activate, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        for _ in range(2):
            with Socket(path) as client:
                client.ready()
                assert client.answer({"id": 1, **SHORT})[-1]["event"] == "done"
                client.end_input()
                assert client.rest() == []
    finally:
        stop(process)


# Real clients


def lines(text: bytes) -> list[dict[str, Any]]:
    return [json.loads(each) for each in text.splitlines()]


REQUESTS = b"".join(json.dumps(each).encode() + b"\n" for each in ({"id": 1, **SHORT}, {"id": 2, "op": "info"}))


@pytest.mark.parametrize(
    "client",
    [["nc", "-N", "-U"], ["socat", "-t", "20", "-"]],
    ids=lambda client: client[0],
)
def test_a_real_client(server: Server, client: list[str]) -> None:
    if not shutil.which(client[0]):
        pytest.skip(f"{client[0]} is not installed")
    address = f"UNIX-CONNECT:{server.path}" if client[0] == "socat" else str(server.path)
    result = subprocess.run([*client, address], input=REQUESTS, capture_output=True, timeout=60, check=True)
    events = lines(result.stdout)
    assert [each["event"] for each in events][:2] == ["hello", "ready"]
    assert [each["id"] for each in events if each["event"] in ("done", "result")] == [1, 2]


@pytest.mark.skipif(not shutil.which("jq") or not shutil.which("nc"), reason="jq or nc is not installed")
def test_jq_on_both_sides(server: Server) -> None:
    script = (
        """jq -cn '{id: 1, op: "generate", prompt: "Hello", max_tokens: 20, ignore_eos: true}' | nc -N -U "$1" """
        """| jq --unbuffered -j 'select(.event == "token").text'"""
    )
    result = subprocess.run(["sh", "-c", script, "sh", str(server.path)], capture_output=True, timeout=60, check=True)
    with server.connect() as client:
        client.ready()
        assert result.stdout.decode() == client.answer({"id": 1, **LONG, "max_tokens": 20})[-1]["text"]


# Abuse


def test_a_thousand_vanishing_clients(server: Server) -> None:
    """They connect, send something or half of it, read something or nothing, and are gone. The next is served."""
    rng = random.Random(7)
    text = json.dumps({"id": 1, **LONG, "max_tokens": 30}).encode() + b"\n"
    text += json.dumps({"id": 2, "op": "cancel", "target": 1}).encode() + b"\nrubbish\n"
    with server.connect() as client:
        client.ready()
        client.answer({"id": 1, **SHORT})
    time.sleep(0.1)
    before = resident_kilobytes(server.process.pid)
    descriptors = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    for _ in range(1000):
        with socket.socket(socket.AF_UNIX) as gone:
            gone.connect(str(server.path))
            gone.settimeout(0.02)
            try:
                gone.sendall(text[: rng.randrange(len(text) + 1)])
                for _ in range(rng.choice((0, 0, 1, 2))):
                    gone.recv(rng.choice((1, 100, 10_000)))
                if rng.random() < 0.2:
                    gone.shutdown(rng.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)))
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                pass  # it was one too many, or waited for what does not come
    with server.connect() as client:
        client.ready()
        assert client.answer({"id": 1, **SHORT})[-1]["event"] == "done"
    time.sleep(0.1)
    assert len(os.listdir(f"/proc/{server.process.pid}/fd")) == descriptors
    assert resident_kilobytes(server.process.pid) - before < 2000


def test_eight_clients_at_once(server: Server) -> None:
    """Every client gets its own answers, whole and in order, whatever the others do."""
    failures: list[BaseException] = []

    def converse(seed: int) -> None:
        rng = random.Random(seed)
        try:
            with server.connect() as client:
                client.ready()
                for i in range(25):
                    id = f"{seed}.{i}"
                    count = rng.randrange(1, 6)
                    request = rng.choice(
                        [
                            {"id": id, **LONG, "max_tokens": count},
                            {"id": id, "op": "tokenize", "text": id},
                            {"id": id, "op": "nonsense"},
                        ]
                    )
                    events = client.answer(request)
                    assert {each["id"] for each in events} == {id}
                    if request["op"] == "generate":
                        tokens = [each for each in events if each["event"] == "token" and each["token"] is not None]
                        assert len(tokens) == count
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=converse, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_memory_for_what_waits_is_bounded(server: Server) -> None:
    """Seven connections fill their buffers behind a running request: nothing more is read from them."""
    before = resident_kilobytes(server.process.pid)
    line = json.dumps({"id": 1, "op": "tokenize", "text": "x" * 1000}).encode() + b"\n"
    with server.connect() as busy:
        busy.ready()
        busy.send({"id": 1, **LONG})
        busy.until("token")
        clients = [server.connect() for _ in range(7)]
        for client in clients:
            client.socket.setblocking(False)
            sent = 0
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                try:
                    sent += client.socket.send(line * 60)
                except BlockingIOError:
                    time.sleep(0.001)
            assert sent < 6 << 20
        assert resident_kilobytes(server.process.pid) - before < 7 * (4 << 10) * 2
        for client in clients:
            client.socket.close()


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, tiny: Path) -> None:
    """The lock cannot be written: no socket stays, and the next start finds the place free."""
    directory = tmp_path / "own"
    directory.mkdir(mode=0o700)
    path = directory / "s.sock"
    command = [sys.executable, "-m", "reflex_ipc", "uds", str(tiny), str(path), "--backend", "cpu"]
    script = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    script += "os.execv(sys.argv[1], sys.argv[1:])"
    full = subprocess.run(
        [sys.executable, "-c", script, *command], capture_output=True, timeout=60, stdin=subprocess.DEVNULL, cwd=ROOT
    )
    assert full.returncode != 0 and not path.exists()
    again = subprocess.run(
        [*command, "--exit-after-idle", "0.2"], capture_output=True, timeout=60, stdin=subprocess.DEVNULL, cwd=ROOT
    )
    assert again.returncode == 0, again.stderr


def test_somebody_elses_lock_file_is_left_alone(tmp_path: Path, tiny: Path) -> None:
    directory = tmp_path / "own"
    directory.mkdir(mode=0o700)
    lock = directory / "s.sock.lock"
    lock.write_text("my notes\n")
    command = [sys.executable, "-m", "reflex_ipc", "uds", str(tiny), str(directory / "s.sock"), "--backend", "cpu"]
    result = subprocess.run(command, capture_output=True, timeout=60, stdin=subprocess.DEVNULL, cwd=ROOT)
    assert result.returncode == 11 and b"no lock of ours" in result.stderr
    assert lock.read_text() == "my notes\n"
