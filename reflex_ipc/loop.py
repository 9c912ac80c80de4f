"""The only file that does protocol I/O: standard input and output, and a Unix socket.

One thread, one `poll`. A connection is a `Channel`: a session (the rules), the descriptor its lines come from, the one
its events go to, and the lines that wait to be written. The engine runs in the same thread and calls back where
protocol.md says that a request can end, and that call looks at every descriptor without waiting. Nothing here is
asynchronous; nothing is concurrent.

Descriptors that were inherited stay in blocking mode, because the mode belongs to whoever else has them open. They are
read and written only after `poll`, never more than PIPE_BUF at once, which a ready pipe takes without blocking.
"""

import contextlib
import fcntl
import gc
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

from reflex_ipc import __version__
from reflex_ipc.answer import answer, typed
from reflex_ipc.errors import InputOutputError, ReflexError
from reflex_ipc.messages import Error, Limits, Loading, Ready, encode
from reflex_ipc.session import Session, State

if TYPE_CHECKING:
    from reflex_ipc.engine import Engine
    from reflex_ipc.listener import Listener

READ_BYTES = 64 << 10
UNREAD_EVENTS = 256
"""With so many events unread, a client's lines are not read either: what it is owed stays bounded."""
LAST_WORDS_S = 1.0
"""How long a reader may take nothing of what is being written when the process was told to end."""
LOADING_EVERY_S = 0.1
COMES_AGAIN = 2
"""After so many requests it is likely that more will come: what serves them all is made ready when nobody asks."""
ACCEPT_AGAIN_S = 1.0
"""How long no connection is accepted after one could not be, unless one closes before."""

OpenEngine = Callable[..., "Engine"]
"""Called as open_engine(model, progress=callable); raises the typed errors."""


def serve_stdio(model: str, open_engine: OpenEngine, limits: Limits | None = None) -> int:
    """Serve standard input and output until the input ends.

    Returns the exit code of the process, or 128 + n when it has to end by signal n.
    """
    limits = limits or Limits()
    try:
        source, sink = _take_stdio()
    except OSError as error:
        print(f"reflex: standard input or output: {error.strerror}", file=sys.stderr)
        return InputOutputError.exit_code
    loop = Loop(limits)
    channel = loop.connect(source, sink)
    code = loop.serve(model, open_engine)
    if code == 0 and isinstance(channel.lost, ConnectionError):
        return 128 + signal.SIGPIPE
    if code == 0 and channel.lost is not None:
        print(f"reflex: standard input or output: {channel.lost.strerror}", file=sys.stderr)
        return InputOutputError.exit_code
    return code


def serve_uds(
    model: str,
    path: str | None,
    open_engine: OpenEngine,
    limits: Limits | None = None,
    *,
    mode: int = 0o600,
    exit_after_idle: float | None = None,
) -> int:
    """Serve a Unix socket: the one at `path`, or one handed over at the start (listening, or already connected).

    `path` None without one handed over: reflex.sock under XDG_RUNTIME_DIR. `exit_after_idle` is in seconds. Returns
    what `serve_stdio` returns; raises InputOutputError when there is no socket to be had, before the model is touched.
    """
    from reflex_ipc import listener as sockets

    limits = limits or Limits(connections=8)
    connection = sockets.handed_over_connection(path)
    if connection is not None:
        loop = Loop(limits)
        loop.connect(connection, connection)
        return loop.serve(model, open_engine)
    with sockets.handed_over_listener() or sockets.listen(sockets.default_path() if path is None else path, mode) as at:
        print(f"reflex: listening on {at.name}", file=sys.stderr, flush=True)
        return Loop(limits, at, exit_after_idle).serve(model, open_engine)


def _take_stdio() -> tuple[int, int]:
    """(source, sink): private copies of descriptors 0 and 1, which from now on are nobody's way into the protocol."""
    # From 3 on: where 1 is closed, a plain dup(0) would become it.
    source, sink = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (0, 1))
    with open(os.devnull, "r+b") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(2 if sys.stderr is not None else nothing.fileno(), 1)
    return source, sink


class Unread(BaseException):
    """While the model was loading, the one reader went away."""


class Channel:
    """One connection's descriptors and what waits to be written to it."""

    def __init__(self, session: Session, source: int, sink: int, write_bytes: int):
        self.session = session
        self.source = source
        self.sink = sink
        self.write_bytes = write_bytes
        self.unread: deque[tuple[bytes, float]] = deque()  # encoded events, and when each was due
        self.written = 0  # bytes of the first of them that are out
        self.written_at = 0.0  # when some were
        self.collected = 0  # events so far
        self.lost: OSError | None = None  # why nobody is at the other end any more
        self.held_up = 0.0  # seconds for which others had to wait for this one to read the running request's events

    def collect(self, now: float) -> None:
        while self.session.output:
            self.unread.append((encode(self.session.output.popleft()), now))
            self.collected += 1

    @property
    def is_owed(self) -> bool:
        """Whether there are events that are not out."""
        return bool(self.unread or self.session.output)

    @property
    def delivered(self) -> int:
        """Events so far that are out."""
        return self.collected - len(self.unread)

    def write(self) -> None:
        """As much of the first event as the descriptor takes. Call when `poll` says that it takes some."""
        line = self.unread[0][0]
        self.written += os.write(self.sink, line[self.written : self.written + self.write_bytes])
        self.written_at = time.monotonic()
        if self.written == len(line):
            self.unread.popleft()
            self.written = 0


class Loop:
    """All connections, one engine, and whose turn it is."""

    def __init__(self, limits: Limits, listener: "Listener | None" = None, exit_after_idle: float | None = None):
        self._limits = limits
        self._listener = listener
        self._exit_after_idle = exit_after_idle
        self._engine: Engine | None = None
        self._ready: Ready | None = None
        self._channels: list[Channel] = []
        self._turns: deque[Channel] = deque()  # those with a line to be dealt with, in the order they came to have one
        self._write_timeout = limits.write_timeout_ms / 1000
        self._last_active = time.monotonic()
        self._answered = 0  # requests
        self._is_prepared = False
        self._told_to_end: int | None = None  # by this signal
        self._leaving_since: float | None = None  # since when the end is waiting for readers only
        self._cut = False  # whether the signal left a request without its last event
        self._fatal: Error | None = None
        self._is_loading = False
        self._last_loading = (0.0, "")
        self._accepting_from = 0.0  # not before this moment
        self._cannot_accept = False
        self._poller = select.poll()
        self._watched: dict[int, int] = {}  # descriptor -> event mask
        self._wake, self._wake_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch(self._wake, select.POLLIN)

    def connect(self, source: int, sink: int, write_bytes: int = select.PIPE_BUF) -> Channel:
        channel = Channel(Session(self._limits, __version__), source, sink, write_bytes)
        self._channels.append(channel)
        return channel

    def serve(self, model: str, open_engine: OpenEngine) -> int:
        """Say hello, open the model, serve until the end. Returns what `serve_stdio` returns."""
        with self._signals():
            try:
                self._engine = self._open(model, open_engine)
            except Unread:
                return 0
            except Exception as error:
                known = typed(error)
                return self._fail(Error(None, known.code, str(known), exit_code=known.exit_code))
            with self._engine:
                self._ready = Ready(self._engine.info(), self._engine.timings)
                gc.enable()  # __main__ turned it off
                self._last_active = time.monotonic()
                for channel in self._channels:
                    if channel.session.state is State.LOADING:
                        channel.session.loaded(self._ready)
                return self._run()

    def _open(self, model: str, open_engine: OpenEngine) -> "Engine":
        self._is_loading = True
        try:
            if self._told_to_end is not None:
                self._end_now(self._told_to_end)
            self._loading_pump()
            return open_engine(model, progress=self._loading)
        finally:
            self._is_loading = False

    def _run(self) -> int:
        while True:
            for channel in self._channels:
                self._queue(channel)
            if self._told_to_end is not None:
                return self._end()
            if self._fatal is not None:
                return _exit_code(self._fatal)
            if self._turns:
                self._serve(self._turns.popleft())
                continue
            if not self._channels and self._listener is None:
                return 0
            if self._answered >= COMES_AGAIN and not self._is_prepared:
                self._prepare()
                continue
            patience = None
            if self._exit_after_idle is not None and not any(channel.is_owed for channel in self._channels):
                patience = max(0.0, self._last_active + self._exit_after_idle - time.monotonic())
            seen = self._last_active
            self._pump(patience)
            if patience == 0 and self._last_active == seen and self._told_to_end is None:
                return 0  # and nobody stands at the door

    def _prepare(self) -> None:
        """If nobody asks for anything now: the dictionaries of the tokenizer, some 50 ms that a request would pay."""
        seen = self._last_active
        self._pump(0)
        is_anyone_there = bool(self._channels) or self._listener is not None  # else it would only delay the end
        if self._last_active == seen and self._told_to_end is None and is_anyone_there:
            self._is_prepared = True
            assert self._engine is not None
            # What is wrong with them is said to the first request that needs them.
            with contextlib.suppress(ReflexError):
                self._engine.tokenizer.prepare()

    def _queue(self, channel: Channel) -> None:
        """Give it a turn, behind everyone who has one, if it has a line and has read what it was owed."""
        if channel.session.has_line and not channel.unread and channel not in self._turns:
            self._turns.append(channel)

    def _serve(self, channel: Channel) -> None:
        """Deal with one line of this connection: answer a request, to its last event."""
        session = channel.session
        channel.held_up = 0.0
        request = session.take(time.monotonic())
        if request is not None:
            assert self._engine is not None
            events = answer(self._engine, request, self._limits, session.queued_ms, lambda: self._verdict(channel))
            for event in events:
                if isinstance(event, Error) and event.fatal:
                    self._fail(event, channel)
                    break
                session.say(event)
                self._deliver(channel)
            self._answered += 1
        channel.collect(time.monotonic())
        self._last_active = time.monotonic()

    def _verdict(self, channel: Channel) -> str | None:
        """The engine's question wherever it may end: go on?"""
        self._pump(0)
        return channel.session.verdict(time.monotonic())

    def _deliver(self, channel: Channel) -> None:
        """Write what this connection is owed by now, reading meanwhile what clients have to say.

        As long as others have a line, the time that takes is a request's, not an event's: a reader who takes an event
        just before each time-out would hold them up for ever.
        """
        channel.collect(time.monotonic())
        owed = channel.collected  # not what answers the lines that are still coming: they could go on for ever
        while channel.delivered < owed:
            if not self._turns:
                self._pump(None)
                continue
            began = time.monotonic()
            self._pump(max(0.0, self._write_timeout - channel.held_up))
            channel.held_up += time.monotonic() - began
            if channel.held_up >= self._write_timeout and channel.lost is None:
                self._lose(channel, TimeoutError(None, "the reader held others up for too long"))

    # The end

    def _fail(self, error: Error, asker: Channel | None = None) -> int:
        """Tell everyone that the process ends with this error; the one whose request met it, under its id."""
        self._fatal = fatal = error._replace(fatal=True)
        if self._listener is not None:
            print(f"reflex: {error.message}", file=sys.stderr)
        for channel in list(self._channels):
            channel.session.fail(fatal if channel is asker else fatal._replace(id=None))
        self._leave()
        for channel in list(self._channels):
            self._deliver(channel)
        return _exit_code(fatal)

    def _end(self) -> int:
        """Told to end by a signal: finish the events being written. 0 if that cut no request, or 128 + the signal."""
        assert self._told_to_end is not None
        self._terminate()
        for channel in list(self._channels):
            self._deliver(channel)
        return 128 + self._told_to_end if self._cut or self._told_to_end != signal.SIGTERM else 0

    def _terminate(self) -> None:
        for channel in self._channels:
            self._cut = self._cut or channel.session.unanswered
            channel.session.terminate()
        self._leave()

    def _leave(self) -> None:
        """From now on `LAST_WORDS_S` counts, from the first reason to end."""
        if self._leaving_since is None:
            self._leaving_since = time.monotonic()

    def _patience(self, channel: Channel) -> float:
        """Until when the first event that this connection is owed may wait to be taken whole."""
        until = channel.unread[0][1] + self._write_timeout
        if self._leaving_since is not None:
            until = min(until, max(self._leaving_since, channel.written_at) + LAST_WORDS_S)
        return until

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def told(number: int, _: Any) -> None:
            self._told_to_end = number
            if self._is_loading:
                self._end_now(number)

        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        # What is ignored stays so: a shell's background job is not for its Ctrl-C.
        before: dict[int, Any] = {
            each: signal.signal(each, told)
            for each in (signal.SIGTERM, signal.SIGINT)
            if signal.getsignal(each) is not signal.SIG_IGN
        }
        before[signal.SIGPIPE] = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end_now(self, number: int) -> NoReturn:
        """End by a signal that came while the model was loading.

        In the handler, wherever it interrupts: an exception raised from there would meet code that is not prepared for
        one, in the middle of an import, or be dropped by a destructor. No event is being written now.
        """
        for each in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(each) is not signal.SIG_IGN:
                signal.signal(each, signal.SIG_DFL)
        if self._listener is not None:
            self._listener.close()
        signal.raise_signal(number)
        raise AssertionError("a signal whose action is the default ends the process")

    # Loading

    def _loading(self, phase: str, done: int, total: int) -> None:
        """The engine's report while it opens: said to whoever keeps up, at most ten times a second and phase."""
        now = time.monotonic()
        last, last_phase = self._last_loading
        if done < total and phase == last_phase and now - last < LOADING_EVERY_S:
            return
        self._last_loading = (now, phase)
        for channel in self._channels:
            if channel.session.state is State.LOADING and not channel.unread:
                channel.session.output.append(Loading(phase, done, total))
        self._loading_pump()

    def _loading_pump(self) -> None:
        self._pump(0)
        if not self._channels and self._listener is None:
            raise Unread

    # Descriptors

    def _pump(self, timeout: float | None) -> None:
        """Wait at most `timeout` seconds (None: until something happens), then read, write and accept what is due."""
        now = time.monotonic()
        for channel in list(self._channels):
            channel.collect(now)
            self._queue(channel)
            if channel.session.state is State.CLOSED and not channel.unread:
                self._close(channel)
                timeout = 0
                continue
            self._watch_channel(channel)
            if channel.unread:
                left = self._patience(channel) - now
                if left <= 0:
                    self._lose(channel, TimeoutError(None, "the reader took nothing for too long"))
                    timeout = 0
                elif timeout is None or left < timeout:
                    timeout = left
        if self._listener is not None:
            pause = self._accepting_from - now
            self._watch(self._listener.fd, select.POLLIN if pause <= 0 else None)
            if pause > 0:
                timeout = pause if timeout is None else min(timeout, pause)
        due = self._poller.poll(None if timeout is None else int(timeout * 1000) + (timeout > 0))
        if not due:
            return
        by_descriptor = {fd: channel for channel in self._channels for fd in (channel.source, channel.sink)}
        newcomers = False
        for fd, mask in due:
            if fd == self._wake:
                os.read(self._wake, 4096)
                self._terminate()
            elif fd not in by_descriptor:
                newcomers = True
            elif by_descriptor[fd].lost is None:  # by what its other descriptor has said just now
                self._attend(by_descriptor[fd], fd, mask)
        if newcomers:  # after those who have left made room for them
            self._accept()

    def _attend(self, channel: Channel, fd: int, mask: int) -> None:
        if fd == channel.sink and mask & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            self._lose(channel, BrokenPipeError(None, "nobody reads any more"))
            return
        try:
            if fd == channel.sink and mask & select.POLLOUT:
                channel.write()
                self._last_active = channel.written_at
            if fd == channel.source and mask & ~select.POLLOUT and channel.session.room:
                data = os.read(fd, min(READ_BYTES, channel.session.room))
                self._last_active = now = time.monotonic()
                channel.session.receive(data, now)
        except BlockingIOError:
            pass
        except OSError as error:
            self._lose(channel, error)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            fd = self._listener.accept()
        except OSError as error:  # descriptors or memory ran out: the client waits until there are some
            self._accepting_from = time.monotonic() + ACCEPT_AGAIN_S
            if not self._cannot_accept:
                self._cannot_accept = True
                print(f"reflex: no connection can be accepted: {error.strerror}", file=sys.stderr, flush=True)
            return
        if fd is None:
            return
        self._cannot_accept = False
        full = len(self._channels) >= self._limits.connections
        channel = self.connect(fd, fd, READ_BYTES)
        self._last_active = time.monotonic()
        if full:
            message = f"{self._limits.connections} connections are open, the most this engine takes"
            channel.session.fail(Error(None, "busy", message, fatal=True))
        elif self._ready is not None:
            channel.session.loaded(self._ready)

    def _watch_channel(self, channel: Channel) -> None:
        wants_lines = channel.session.room > 0 and len(channel.unread) < UNREAD_EVENTS
        reading = select.POLLIN if wants_lines else 0
        writing = select.POLLOUT if channel.unread else 0
        if channel.source == channel.sink:
            self._watch(channel.source, reading | writing)
        else:
            # An input whose writers are gone reports so for ever: it is watched only while it is read.
            self._watch(channel.source, reading or None)
            self._watch(channel.sink, writing)

    def _watch(self, fd: int, mask: int | None) -> None:
        if self._watched.get(fd) == mask:
            return
        if mask is None:
            self._poller.unregister(fd)
            del self._watched[fd]
        else:
            self._poller.register(fd, mask)
            self._watched[fd] = mask

    def _lose(self, channel: Channel, error: OSError) -> None:
        """The other end is gone, or as good as gone."""
        channel.lost = error
        channel.session.hang_up()
        channel.session.output.clear()
        channel.unread.clear()
        self._close(channel)

    def _close(self, channel: Channel) -> None:
        self._channels.remove(channel)
        if channel in self._turns:
            self._turns.remove(channel)
        self._accepting_from = 0.0
        for fd in {channel.source, channel.sink}:
            self._watch(fd, None)
            os.close(fd)


def _exit_code(fatal: Error) -> int:
    return ReflexError.exit_code if fatal.exit_code is None else fatal.exit_code
