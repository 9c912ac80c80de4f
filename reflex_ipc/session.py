"""The rules of one connection, with no I/O: what may happen in which state, and what is said in answer.

A `Session` is told what happened: bytes arrived, the engine has an event, the deadline passed, the reader is gone. It
splits lines, answers what needs no engine (a bad line, `cancel`), hands out one request at a time, and collects in
`output` the events to be written, in order. `TRANSITIONS` is the whole of the state machine: what is not in it cannot
happen, and is a defect in the caller when it does. protocol.md shows the same table as a diagram.

Times are seconds of a monotonic clock, always the caller's.
"""

from collections import deque
from enum import Enum

from reflex_ipc import messages
from reflex_ipc.errors import InvalidJsonError
from reflex_ipc.messages import Cancel, Done, Error, Event, Limits, Refusal, Request


class State(Enum):
    LOADING = "loading"  # hello was said; no line is read
    IDLE = "idle"  # no request of this connection is under way
    RUNNING = "running"  # a request was handed out and has said nothing yet
    STREAMING = "streaming"  # `started` was said
    STOPPING = "stopping"  # its end is decided; the engine has yet to come to it
    ABANDONED = "abandoned"  # nobody will read the answer; the engine has yet to come to an end
    CLOSED = "closed"


class Happening(Enum):
    # the engine
    LOADED = "the model is ready"
    STARTED = "started"
    PROMPT = "prompt"
    TOKEN = "token"
    DONE = "done"
    RESULT = "result"
    ERROR = "error"
    FATAL = "fatal error"
    # lines
    REQUEST = "a request"
    REFUSED = "a bad line"
    CANCEL = "cancel of the running request"
    OTHER_CANCEL = "another cancel"
    END = "end of input"
    # the world
    DEADLINE = "deadline"
    HANG_UP = "hang-up"
    TERMINATE = "SIGTERM"


_S, _H = State, Happening

TRANSITIONS: dict[State, dict[Happening, State]] = {
    _S.LOADING: {
        _H.LOADED: _S.IDLE,
        _H.FATAL: _S.CLOSED,
        _H.HANG_UP: _S.CLOSED,
        _H.TERMINATE: _S.CLOSED,
    },
    _S.IDLE: {
        _H.REQUEST: _S.RUNNING,
        _H.REFUSED: _S.IDLE,
        _H.OTHER_CANCEL: _S.IDLE,
        _H.END: _S.CLOSED,
        _H.FATAL: _S.CLOSED,
        _H.HANG_UP: _S.CLOSED,
        _H.TERMINATE: _S.CLOSED,
    },
    _S.RUNNING: {
        _H.STARTED: _S.STREAMING,
        _H.DONE: _S.IDLE,
        _H.RESULT: _S.IDLE,
        _H.ERROR: _S.IDLE,
        _H.FATAL: _S.CLOSED,
        _H.CANCEL: _S.STOPPING,
        _H.OTHER_CANCEL: _S.RUNNING,
        _H.DEADLINE: _S.STOPPING,
        _H.HANG_UP: _S.ABANDONED,
        _H.TERMINATE: _S.ABANDONED,
    },
    _S.STREAMING: {
        _H.PROMPT: _S.STREAMING,
        _H.TOKEN: _S.STREAMING,
        _H.DONE: _S.IDLE,
        _H.ERROR: _S.IDLE,
        _H.FATAL: _S.CLOSED,
        _H.CANCEL: _S.STOPPING,
        _H.OTHER_CANCEL: _S.STREAMING,
        _H.DEADLINE: _S.STOPPING,
        _H.HANG_UP: _S.ABANDONED,
        _H.TERMINATE: _S.ABANDONED,
    },
    _S.STOPPING: {
        _H.PROMPT: _S.STOPPING,
        _H.TOKEN: _S.STOPPING,
        _H.DONE: _S.IDLE,
        _H.RESULT: _S.IDLE,
        _H.ERROR: _S.IDLE,
        _H.FATAL: _S.CLOSED,
        _H.CANCEL: _S.STOPPING,
        _H.OTHER_CANCEL: _S.STOPPING,
        _H.HANG_UP: _S.ABANDONED,
        _H.TERMINATE: _S.ABANDONED,
    },
    _S.ABANDONED: {
        _H.STARTED: _S.ABANDONED,
        _H.PROMPT: _S.ABANDONED,
        _H.TOKEN: _S.ABANDONED,
        _H.DONE: _S.CLOSED,
        _H.RESULT: _S.CLOSED,
        _H.ERROR: _S.CLOSED,
        _H.FATAL: _S.CLOSED,
        _H.HANG_UP: _S.ABANDONED,
        _H.TERMINATE: _S.ABANDONED,
    },
    _S.CLOSED: {},
}

MOST_WAITING = 4096
"""Lines read ahead, however short: each costs a hundred times its bytes."""

UNDER_WAY = frozenset({State.RUNNING, State.STREAMING, State.STOPPING, State.ABANDONED})
"""The states in which the engine works for this connection."""

_SAID = {
    messages.Started: Happening.STARTED,
    messages.Prompt: Happening.PROMPT,
    messages.Token: Happening.TOKEN,
    messages.Done: Happening.DONE,
    messages.Result: Happening.RESULT,
    messages.Error: Happening.ERROR,
}


class RulesBrokenError(AssertionError):
    """Something happened that the table has no place for: a defect in the caller."""


class _Waiting:
    """A line that was read and not yet taken."""

    __slots__ = ("arrived", "cancelled", "request", "size")

    def __init__(self, request: Request | Refusal, size: int, arrived: float):
        self.request = request
        self.size = size
        self.arrived = arrived
        self.cancelled = False


class Session:
    """One connection. `output` holds the events to be written; the caller takes them out."""

    def __init__(self, limits: Limits, version: str):
        self.state = State.LOADING
        self.output: deque[Event] = deque([messages.Hello(messages.PROTOCOL, version, messages.OPS, limits.to_wire())])
        self.running: Request | None = None
        self.queued_ms = 0.0  # how long the running request had waited
        self._limits = limits
        self._deadline: float | None = None  # of the running request
        self._verdict: str | None = None  # why the running request has to stop
        self._waiting: deque[_Waiting] = deque()
        self._targets: dict[messages.Id, deque[_Waiting]] = {}  # waiting requests that a cancel may mean, by id
        self._partial = bytearray()  # the start of a line
        self._held = 0  # bytes of all waiting lines
        self._discarding = False  # the rest of a line that was too long
        self._ended = False

    def _move(self, happening: Happening) -> None:
        try:
            self.state = TRANSITIONS[self.state][happening]
        except KeyError:
            raise RulesBrokenError(f"{happening.value!r} in state {self.state.value!r}") from None

    # Lines

    @property
    def room(self) -> int:
        """How many bytes `receive` takes now; 0: do not read."""
        if self._ended or self.state in (State.LOADING, State.ABANDONED, State.CLOSED):
            return 0
        if len(self._waiting) >= MOST_WAITING:
            return 0
        return max(0, self._limits.line_bytes + 1 - self._held - len(self._partial))

    @property
    def has_line(self) -> bool:
        """Whether `take` has something to do: a line, or the end of input after the last one."""
        return self.state is State.IDLE and (bool(self._waiting) or self._ended)

    @property
    def unanswered(self) -> bool:
        """Whether a request was read that has not had its last event."""
        return self.running is not None or any(not isinstance(each.request, Refusal) for each in self._waiting)

    def receive(self, data: bytes, now: float) -> None:
        """At most `room` bytes arrived; b"" is the end of input. A `cancel` is acted on at once, the rest waits."""
        if not data:
            self._ended = True
            self._end_line(now)
            return
        lines = data.split(b"\n")
        for rest in lines[:-1]:
            self._partial += rest
            self._end_line(now)
        if not self._discarding:
            self._partial += lines[-1]
            if len(self._partial) > self._limits.line_bytes:
                self._refuse_long_line(now)

    def _end_line(self, now: float) -> None:
        if self._discarding:
            self._discarding = False
            self._partial.clear()
            return
        line = bytes(self._partial)
        self._partial.clear()
        if not line.strip():
            return
        request = messages.parse(line, self._limits)
        if isinstance(request, Cancel):
            self._cancel(request)
        else:
            self._wait(request, len(line) + 1, now)

    def _refuse_long_line(self, now: float) -> None:
        message = f"the line is longer than {self._limits.line_bytes} bytes"
        self._wait(Refusal(messages.find_id(bytes(self._partial)), InvalidJsonError.code, message), 1, now)
        self._partial.clear()
        self._discarding = True

    def _wait(self, request: Request | Refusal, size: int, now: float) -> None:
        waiting = _Waiting(request, size, now)
        self._waiting.append(waiting)
        if not isinstance(request, Refusal):
            self._targets.setdefault(request.id, deque()).append(waiting)
        self._held += size

    def _cancel(self, cancel: Cancel) -> None:
        """The running request, if it is the target; else the first that waits; else nothing. Acknowledged always."""
        found = "unknown"
        if self.running is not None and self.running.id == cancel.target:
            found = "running"
            self._move(Happening.CANCEL)
            self._verdict = self._verdict or "cancelled"
        else:
            self._move(Happening.OTHER_CANCEL)
            if cancel.target in self._targets:
                self._untarget(cancel.target).cancelled = True
                found = "waiting"
        self.output.append(messages.Result(cancel.id, {"target": cancel.target, "found": found}))

    def _untarget(self, id: messages.Id) -> _Waiting:
        """The first waiting request of this id, which no cancel means any more."""
        same = self._targets[id]
        first = same.popleft()
        if not same:
            del self._targets[id]
        return first

    def take(self, now: float) -> Request | None:
        """Deal with one line. A request that needs the engine is returned, and the caller then `say`s its events."""
        if not self._waiting:
            self._move(Happening.END)
            return None
        first = self._waiting[0]
        request = first.request
        self._move(Happening.REFUSED if isinstance(request, Refusal) else Happening.REQUEST)
        self._waiting.popleft()
        if not isinstance(request, Refusal) and not first.cancelled:
            self._untarget(request.id)
        self._held -= first.size
        if isinstance(request, Refusal):
            self.output.append(Error(*request))
            return None
        self.running = request
        self.queued_ms = 1000 * (now - first.arrived)
        self._verdict = "cancelled" if first.cancelled else None
        self._deadline = None
        deadline_ms = getattr(request, "deadline_ms", None)
        if deadline_ms is not None:
            self._deadline = first.arrived + deadline_ms / 1000
        verdict = self.verdict(now)
        if verdict is None:
            return request
        usage = {"prompt_tokens": 0, "reused_tokens": 0, "completion_tokens": 0}
        self.say(Done(request.id, verdict, "", usage, {"queued_ms": self.queued_ms}))
        return None

    # The engine

    def loaded(self, ready: messages.Ready) -> None:
        self._move(Happening.LOADED)
        self.output.append(ready)

    def fail(self, error: Error) -> None:
        """Nothing follows on this connection, whatever it was doing."""
        if self.state is State.CLOSED:
            return
        lost = self.state is State.ABANDONED
        self._move(Happening.FATAL)
        self.running = None
        if not lost:
            self.output.append(error)

    def say(self, event: Event) -> None:
        """The engine's next event for the running request."""
        lost = self.state is State.ABANDONED
        self._move(_SAID[type(event)])
        if self.state not in UNDER_WAY:
            self.running = None
        if not lost:
            self.output.append(event)

    def verdict(self, now: float) -> str | None:
        """Why the running request has to stop now: "cancelled", "deadline", or None."""
        if self._verdict is None and self._deadline is not None and now >= self._deadline:
            self._move(Happening.DEADLINE)
            self._verdict = "deadline"
        return self._verdict

    # The world

    def hang_up(self) -> None:
        """The reader is gone: what waits is dropped, what runs is stopped, and nothing more is said."""
        self._leave(Happening.HANG_UP)

    def terminate(self) -> None:
        """The process has to end: as if the reader were gone, but what is in `output` is still to be written."""
        self._leave(Happening.TERMINATE)

    def _leave(self, happening: Happening) -> None:
        if self.state is State.CLOSED:
            return
        self._move(happening)
        self._verdict = self._verdict or "cancelled"
        self._waiting.clear()
        self._targets.clear()
        self._partial.clear()
        self._held = 0
