"""The socket that `reflex uds` serves: made at a path, or handed over by whoever started the process.

A path is ours only while we hold the lock beside it, SOCKET.lock. The lock file names the socket's device and inode, so
that after a crash the next process knows the socket that lies there for a dead one of ours, and nothing else is ever
removed.
"""

import errno
import fcntl
import os
import re
import signal
import socket
import stat

from reflex_ipc.errors import InputOutputError, InvalidRequestError

_HANDED_OVER = 3
"""The first descriptor of the LISTEN_FDS convention (sd_listen_fds(3))."""

_LOCK = re.compile(rb"(?:\(\d+, \d+\)\n)?")
"""What a lock file holds: nothing yet, or device and inode of the socket."""


class Listener:
    """A listening socket. As a context manager: on exit what we put into the file system is removed, if it is ours."""

    def __init__(self, sock: socket.socket, name: str, path: str | None = None, lock: int | None = None):
        self.name = name
        self._sock = sock
        self._path = path
        self._lock = lock
        self._identity = _identity(path) if path is not None else None
        sock.setblocking(False)

    @property
    def fd(self) -> int:
        return self._sock.fileno()

    def accept(self) -> int | None:
        """The descriptor of a new connection, non-blocking; None if the client has thought better of it.

        Raises OSError when the system has no descriptor or memory for one.
        """
        try:
            connection, _ = self._sock.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        connection.setblocking(False)
        return connection.detach()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; what we put into the file system is removed, if it is ours."""
        self._sock.close()
        if self._path is not None and self._lock is not None:
            if _identity(self._path) == self._identity:
                os.unlink(self._path)
            os.unlink(_lock_path(self._path))
            os.close(self._lock)


def default_path() -> str:
    directory = os.environ.get("XDG_RUNTIME_DIR")
    if not directory:
        raise InvalidRequestError("no socket path was given, and XDG_RUNTIME_DIR, where it would be, is not set")
    return os.path.join(directory, "reflex.sock")


def listen(path: str, mode: int = 0o600) -> Listener:
    """Make the socket at `path`, with these permission bits from the start. Raises InputOutputError."""
    path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    if len(os.fsencode(path)) > 107:
        raise InputOutputError(f"{path}: a socket's path has at most 107 bytes")
    _check_directory(os.path.dirname(path))
    try:
        lock = _take_lock(path)
        try:
            _clear(path, lock)
            return _bind(path, mode, lock)
        except BaseException:
            # What it says of a socket that is still there is the next engine's proof; an empty one says nothing.
            if os.fstat(lock).st_size == 0:
                os.unlink(_lock_path(path))
            os.close(lock)
            raise
    except OSError as error:
        raise InputOutputError(f"{path}: {error.strerror or error}") from error


def _bind(path: str, mode: int, lock: int) -> Listener:
    # A signal between the two would leave a socket that no lock speaks of, and that nobody removes.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o777 & ~mode)
        try:
            sock.bind(path)
        finally:
            os.umask(before)
        try:
            listener = Listener(sock, path, path, lock)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{listener._identity}\n".encode(), 0)
            sock.listen(64)
        except BaseException:
            os.unlink(path)
            os.ftruncate(lock, 0)
            raise
        return listener
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def handed_over_listener() -> Listener | None:
    """The listening socket of socket activation, if there is one."""
    sock = _handed_over()
    if sock is None:
        return None
    return Listener(sock, f"{os.fsdecode(sock.getsockname()) or 'a nameless socket'}, handed over")


def handed_over_connection(path: str | None) -> int | None:
    """The descriptor of a connection that this process was started for, in place of a listening socket.

    It is descriptor 3 of socket activation, or, unless a path was given, descriptor 0 (`StandardInput=socket`, inetd).
    """
    sock = _handed_over()
    if sock is None and path is None:
        sock = _unix_stream(0)
    if sock is None or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        if sock is not None:
            sock.detach()
        return None
    connection = fcntl.fcntl(sock.detach(), fcntl.F_DUPFD_CLOEXEC, _HANDED_OVER + 1)
    ours = os.fstat(connection)
    # With StandardInput=socket the other two descriptors are the connection too, unless the unit says otherwise.
    with open(os.devnull, "r+b") as nothing:
        for fd in (0, 1, 2, _HANDED_OVER):
            try:
                if os.path.samestat(os.fstat(fd), ours):
                    os.dup2(nothing.fileno(), fd)
            except OSError:
                continue  # not open
    return connection


def _handed_over() -> socket.socket | None:
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = os.environ.get("LISTEN_FDS", "")
    if count != "1":
        raise InputOutputError(f"LISTEN_FDS is {count!r}: this engine serves one socket")
    os.set_inheritable(_HANDED_OVER, False)
    sock = _unix_stream(_HANDED_OVER)
    if sock is None:
        raise InputOutputError("the descriptor handed over is no Unix stream socket")
    return sock


def _unix_stream(fd: int) -> socket.socket | None:
    """The socket at this descriptor, if it is a Unix stream socket. Detach it to leave the descriptor open."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return None
    except OSError:
        return None
    sock = socket.socket(fileno=fd)
    if sock.family == socket.AF_UNIX and sock.type == socket.SOCK_STREAM:
        return sock
    sock.detach()
    return None


def _check_directory(directory: str) -> None:
    """Nobody but us and root may be able to put something else at a path in it, or to replace it."""
    place = directory
    while True:
        try:
            found = os.stat(place)
        except OSError as error:
            raise InputOutputError(f"{place}: {error.strerror}") from error
        # In a sticky directory others can't touch what is ours, but the socket's own name must not be theirs to take.
        sticky = found.st_mode & stat.S_ISVTX and place != directory
        if found.st_uid not in (0, os.geteuid()) or (found.st_mode & 0o022 and not sticky):
            raise InputOutputError(
                f"{place}: others can write to this directory; put the socket into one that only you can (mode 0700)"
            )
        if place == os.path.dirname(place):
            return
        place = os.path.dirname(place)


def _lock_path(path: str) -> str:
    return path + ".lock"


def _take_lock(path: str) -> int:
    """The open lock file, locked until it is closed."""
    while True:
        lock = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = os.fstat(lock)
            # Whoever held it may have removed the file between our two calls; then this lock is of no file.
            if _identity(_lock_path(path)) == (held.st_dev, held.st_ino):
                if not _LOCK.fullmatch(os.pread(lock, 100, 0)):
                    os.close(lock)
                    raise InputOutputError(f"{_lock_path(path)}: this file is no lock of ours; name another socket")
                return lock
        except BlockingIOError:
            os.close(lock)
            raise InputOutputError(f"{path}: another engine serves this socket") from None
        os.close(lock)


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _clear(path: str, lock: int) -> None:
    """Remove the socket a dead engine left at `path`; refuse anything else. The lock is ours."""
    found = _identity(path)
    if found is None:
        return
    left_by_us = os.pread(lock, 100, 0).decode("ascii", "replace").strip() == str(found)
    if not left_by_us or not stat.S_ISSOCK(os.lstat(path).st_mode) or not _is_dead(path):
        raise InputOutputError(
            f"{path}: what is there was not left behind by a dead engine; remove it, or name another"
        )
    os.unlink(path)


def _is_dead(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED
