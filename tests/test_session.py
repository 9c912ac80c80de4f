"""The rules of one connection, driven without I/O: examples, and a naive model against the table."""

import json
import time
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from reflex_ipc import messages
from reflex_ipc.messages import Done, Error, Generate, Hello, Info, Limits, Prompt, Ready, Result, Started, Token
from reflex_ipc.session import TRANSITIONS, UNDER_WAY, Happening, RulesBrokenError, Session, State

LIMITS = Limits(line_bytes=200)
NO_TOKENS = {"prompt_tokens": 0, "reused_tokens": 0, "completion_tokens": 0}


def line(op: str, id: Any, **fields: Any) -> bytes:
    return json.dumps({"id": id, "op": op, **fields}).encode() + b"\n"


def generate(id: Any, **fields: Any) -> bytes:
    return line("generate", id, prompt="x", **fields)


def said(session: Session) -> list[Any]:
    events = list(session.output)
    session.output.clear()
    return events


def done(id: Any, reason: str = "stop") -> Done:
    return Done(id, reason, "", NO_TOKENS, {})


@pytest.fixture
def session() -> Session:
    session = Session(LIMITS, "1.2")
    session.loaded(Ready({}, {}))
    session.output.clear()
    return session


def test_hello_then_ready() -> None:
    session = Session(LIMITS, "1.2")
    assert session.room == 0  # no line is read before the model is there
    session.loaded(Ready({"name": "m"}, {}))
    hello, ready = said(session)
    assert isinstance(hello, Hello) and hello.version == "1.2" and hello.limits["line_bytes"] == 200
    assert ready == Ready({"name": "m"}, {}) and session.room == 201


def test_one_request_at_a_time(session: Session) -> None:
    session.receive(generate(1) + line("info", 2), 10.0)
    assert session.take(11.5) == Generate(1, prompt="x") and session.queued_ms == 1500
    assert not session.has_line
    session.say(Started(1, 1))
    with pytest.raises(RulesBrokenError):
        session.take(12)
    session.say(Token(1, 0, 5, "a", -1.0))
    session.say(done(1))
    assert session.has_line and session.take(12) == Info(2)
    session.say(Result(2, {}))
    assert [type(each) for each in said(session)] == [Started, Token, Done, Result]


def test_lines_in_any_pieces(session: Session) -> None:
    text = b"\n\r\n \t\r\n" + line("info", 1)[:-1] + b"\r\n" + line("info", 2)[:-1]  # the last without a newline
    for at in range(len(text)):
        session.receive(text[at : at + 1], 1.0)
    session.receive(b"", 2.0)
    for id in (1, 2):
        assert session.take(3) == Info(id)
        session.say(Result(id, {}))
    assert session.has_line and session.take(3) is None and session.state is State.CLOSED


def test_a_bad_line_is_answered_in_its_turn(session: Session) -> None:
    session.receive(line("info", 1) + b'{"id":2,\n' + line("info", 3), 1)
    assert session.take(1) == Info(1) and not said(session)
    session.say(Result(1, {}))
    assert session.take(1) is None and session.take(1) == Info(3)
    _, error = said(session)
    assert (error.id, error.code) == (2, "invalid_json")


@pytest.mark.parametrize("pieces", [1, 7, 199, 200, 201, 5000])
def test_a_line_over_the_limit(session: Session, pieces: int) -> None:
    def long(id: int, length: int) -> bytes:
        start = line("tokenize", id, text="")[:-3]
        return start + b"x" * (length - len(start) - 2) + b'"}\n'

    text = long(1, 200) + long(2, 201) + long(3, 1000) + line("info", 4)
    assert text.index(b"\n") == 200
    answers: list[Any] = []
    rest = text
    while rest or session.has_line:
        size = min(pieces, session.room)
        session.receive(rest[:size], 1) if size and rest else None
        rest = rest[size:]
        while session.has_line:
            if (request := session.take(1)) is not None:
                session.say(Result(request.id, {}))
            answers += said(session)
    assert [each.id for each in answers] == [1, 2, 3, 4]
    assert [type(each) for each in answers] == [Result, Error, Error, Result]
    assert "longer than 200 bytes" in answers[1].message


def test_a_long_line_is_refused_before_it_ends(session: Session) -> None:
    session.receive(b'{"id":"long","prompt":"' + b"x" * 300, 1)
    assert session.take(1) is None
    (error,) = said(session)
    assert error.id == "long" and error.code == "invalid_json"
    for _ in range(1000):
        assert session.room > 0
        session.receive(b"x" * 100, 1)
        assert not session.has_line
    session.receive(b'"}\n' + line("info", 1), 1)
    assert session.take(1) == Info(1)


def test_what_waits_is_at_most_one_longest_line(session: Session) -> None:
    session.receive(generate(1), 1)
    session.take(1)
    waiting = line("info", 2)
    count = 0
    while session.room:
        session.receive(waiting[: session.room], 1)
        count += 1
    assert 201 / len(waiting) <= count <= 201 / len(waiting) + 2
    session.say(done(1))
    session.take(1)
    assert session.room == len(waiting)


# Cancel


def test_cancel_the_running_request(session: Session) -> None:
    session.receive(generate(1), 1)
    session.take(1)
    session.say(Started(1, 1))
    assert session.verdict(1) is None
    session.receive(line("cancel", 9, target=1), 1)
    assert session.state is State.STOPPING and session.verdict(1) == "cancelled"
    session.receive(line("cancel", 10, target=1), 1)
    session.say(Token(1, 0, None, "held back", None))
    session.say(done(1, "cancelled"))
    _, first, second, _, last = said(session)
    assert first == Result(9, {"target": 1, "found": "running"})
    assert second == Result(10, {"target": 1, "found": "running"})
    assert last.finish_reason == "cancelled" and session.state is State.IDLE


def test_cancel_a_waiting_request(session: Session) -> None:
    session.receive(generate(1) + generate(2) + line("info", 3) + generate(2) + line("cancel", 9, target=2), 1)
    assert said(session) == [Result(9, {"target": 2, "found": "waiting"})]
    assert session.take(1) == Generate(1, prompt="x") and session.verdict(1) is None
    session.say(done(1))
    assert session.take(3) is None
    assert said(session)[1] == Done(2, "cancelled", "", NO_TOKENS, {"queued_ms": 2000})
    assert session.take(3) == Info(3)
    session.say(Result(3, {}))
    assert session.take(3) == Generate(2, prompt="x")  # the second of that id was not meant


def test_a_cancel_that_finds_nothing(session: Session) -> None:
    session.receive(generate(1), 1)
    session.take(1)
    session.say(done(1))
    session.receive(line("cancel", 2, target=1) + line("cancel", 3, target="1") + line("cancel", 4, target=4), 1)
    assert said(session)[1:] == [Result(i, {"target": t, "found": "unknown"}) for i, t in ((2, 1), (3, "1"), (4, 4))]
    assert not session.has_line and session.state is State.IDLE


def test_a_bad_line_is_no_target(session: Session) -> None:
    session.receive(b'{"id":5,"op":"x"}\n' + line("cancel", 9, target=5), 1)
    assert said(session) == [Result(9, {"target": 5, "found": "unknown"})]
    session.take(1)
    assert said(session)[0].code == "invalid_request"


def test_only_cancels_jump_the_queue(session: Session) -> None:
    session.receive(generate(1), 1)
    session.take(1)
    session.receive(line("info", 2) + b"not json\n" + line("tokenize", 3, text=""), 1)
    assert said(session) == [] and session.verdict(1) is None


# Deadlines


def test_a_deadline_counts_from_reading(session: Session) -> None:
    session.receive(generate(1, deadline_ms=1000), 10.0)
    assert session.take(10.5) is not None
    assert session.verdict(10.999) is None
    assert session.verdict(11.0) == "deadline" and session.state is State.STOPPING
    session.receive(line("cancel", 2, target=1), 12)
    assert session.verdict(13) == "deadline"  # what came first stays the reason


def test_a_deadline_that_passes_while_waiting(session: Session) -> None:
    session.receive(generate(1, deadline_ms=1000) + generate(2), 10.0)
    assert session.take(11.0) is None
    assert said(session) == [Done(1, "deadline", "", NO_TOKENS, {"queued_ms": 1000})]
    assert session.take(11.0) is not None and session.verdict(1e9) is None  # the next has none


# Ends


def test_end_of_input_cancels_nothing(session: Session) -> None:
    session.receive(generate(1) + generate(2), 1)
    session.take(1)
    session.receive(b"", 1)
    assert session.verdict(1) is None and session.room == 0 and session.unanswered
    session.say(done(1))
    assert session.take(1) is not None
    session.say(done(2))
    assert not session.unanswered and session.has_line
    session.take(1)
    assert session.state is State.CLOSED


@pytest.mark.parametrize("leave", ["hang_up", "terminate"])
def test_nobody_reads_the_answer(session: Session, leave: str) -> None:
    session.receive(generate(1) + generate(2), 1)
    session.take(1)
    session.say(Started(1, 1))
    said(session)
    getattr(session, leave)()
    assert session.verdict(1) == "cancelled" and session.room == 0
    session.say(Token(1, 0, None, "x", None))
    session.say(done(1, "cancelled"))
    assert said(session) == [] and session.state is State.CLOSED and not session.has_line


def test_a_fatal_error_is_the_last_word(session: Session) -> None:
    session.receive(generate(1) + generate(2), 1)
    session.take(1)
    session.fail(Error(1, "device", "lost", fatal=True))
    assert said(session) == [Error(1, "device", "lost", fatal=True)]
    assert session.state is State.CLOSED and not session.has_line and session.room == 0


# The table


def test_the_table_is_total_and_connected() -> None:
    assert set(TRANSITIONS) == set(State)
    reached = {State.LOADING}
    for _ in State:
        reached |= {after for state in reached for after in TRANSITIONS[state].values()}
    assert reached == set(State)
    assert {each for row in TRANSITIONS.values() for each in row} == set(Happening)
    assert all(Happening.REQUEST not in row for state, row in TRANSITIONS.items() if state is not State.IDLE)
    for state in State:
        if state not in UNDER_WAY:
            assert not {Happening.TOKEN, Happening.DONE, Happening.RESULT} & set(TRANSITIONS[state])


class NaiveSession:
    """The rules written down once more, as plainly as possible: a list of lines, an answer for each, no states."""

    def __init__(self) -> None:
        self.queue: list[dict[str, Any]] = []
        self.current: dict[str, Any] | None = None
        self.stop: str | None = None
        self.ended = self.gone = self.closed = False
        self.expected: list[tuple[Any, ...]] = []

    def arrive(self, request: dict[str, Any], now: float) -> None:
        if request["op"] != "cancel":
            self.queue.append({**request, "at": now, "cancelled": False})
            return
        found = "unknown"
        if self.current is not None and self.current["id"] == request["target"]:
            found = "running"
            self.stop = self.stop or "cancelled"
        else:
            for each in self.queue:
                if each["id"] == request["target"] and each["op"] != "bad" and not each["cancelled"]:
                    each["cancelled"] = True
                    found = "waiting"
                    break
        self.expected.append(("result", request["id"], found))

    def take(self, now: float) -> None:
        if not self.queue:
            self.closed = True
            return
        first = self.queue.pop(0)
        late = first.get("deadline") is not None and now >= first["at"] + first["deadline"]
        if first["op"] == "bad":
            self.expected.append(("error", first["id"]))
        elif first["cancelled"] or late:
            self.expected.append(("done", first["id"], "cancelled" if first["cancelled"] else "deadline"))
        else:
            self.current = first
            self.stop = None

    def look(self, now: float) -> str | None:
        assert self.current is not None
        late = self.current.get("deadline") is not None and now >= self.current["at"] + self.current["deadline"]
        self.stop = self.stop or ("deadline" if late else None)
        return self.stop

    def finish(self, event: tuple[Any, ...]) -> None:
        self.current = None
        if self.gone:
            self.closed = True
        else:
            self.expected.append(event)

    def leave(self) -> None:
        self.gone = True
        self.queue.clear()
        if self.current is None:
            self.closed = True
        self.stop = self.stop or "cancelled"


IDS = st.sampled_from([1, 2, "1"])


class TableAgainstModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.session = Session(Limits(), "0")
        self.session.loaded(Ready({}, {}))
        self.session.output.clear()
        self.model = NaiveSession()
        self.now = 0.0
        self.started = False
        self.rest = b""

    def heard(self) -> list[tuple[Any, ...]]:
        short: list[tuple[Any, ...]] = []
        for event in said(self.session):
            if isinstance(event, Result) and "found" in event.fields:
                short.append(("result", event.id, event.fields["found"]))
            elif isinstance(event, Done):
                short.append(("done", event.id, event.finish_reason))
            else:
                short.append((messages.EVENT_NAMES[type(event)], event.id))
        return short

    def open(self) -> bool:
        return self.session.room > 0

    @precondition(open)
    @rule(id=IDS, op=st.sampled_from(["generate", "info", "bad"]), deadline=st.sampled_from([None, 1, 5]))
    def request(self, id: Any, op: str, deadline: float | None) -> None:
        fields = {} if deadline is None or op != "generate" else {"deadline_ms": deadline * 1000}
        text = {"generate": generate(id, **fields), "info": line("info", id), "bad": line("x", id)}[op]
        self.session.receive(text, self.now)
        self.model.arrive({"op": op, "id": id, "deadline": deadline if op == "generate" else None}, self.now)

    @precondition(open)
    @rule(id=IDS, whom=IDS)
    def cancel(self, id: Any, whom: Any) -> None:
        self.session.receive(line("cancel", id, target=whom), self.now)
        self.model.arrive({"op": "cancel", "id": id, "target": whom}, self.now)

    @precondition(open)
    @rule()
    def end_of_input(self) -> None:
        self.session.receive(b"", self.now)
        self.model.ended = True

    @rule(seconds=st.sampled_from([0.5, 1, 3]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.session.has_line)
    @rule()
    def take(self) -> None:
        request = self.session.take(self.now)
        self.model.take(self.now)
        current = self.model.current
        assert (request is None) == (current is None)
        if request is not None and current is not None:
            assert (type(request).__name__.lower(), request.id) == (current["op"], current["id"])
        self.started = False

    @precondition(lambda self: self.session.state in UNDER_WAY)
    @rule()
    def look(self) -> None:
        assert self.session.verdict(self.now) == self.model.look(self.now)

    @precondition(lambda self: self.session.state in UNDER_WAY)
    @rule(end=st.sampled_from(["done", "error", "prompt", "token", "token", "token"]))
    def engine(self, end: str) -> None:
        assert self.model.current is not None
        id = self.model.current["id"]
        if self.model.current["op"] == "info":
            self.session.say(Result(id, {}))
            self.model.finish(("result", id))
        elif end == "error":
            self.session.say(Error(id, "internal", ""))
            self.model.finish(("error", id))
        elif not self.started and self.model.stop is None:
            self.session.say(Started(id, 1))
            self.started = True
            if not self.model.gone:
                self.model.expected.append(("started", id))
        elif end in ("prompt", "token") and self.started:
            self.session.say((Prompt if end == "prompt" else Token)(id, 0, 1, "", None))
            if not self.model.gone:
                self.model.expected.append((end, id))
        else:
            reason = self.model.stop or "stop"
            self.session.say(done(id, reason))
            self.model.finish(("done", id, reason))

    @rule(how=st.sampled_from(["hang_up", "terminate"]), really=st.integers(0, 9))
    def leave(self, how: str, really: int) -> None:
        if really == 0 and not self.model.closed:
            getattr(self.session, how)()
            self.model.leave()

    @rule(really=st.integers(0, 19))
    def fail(self, really: int) -> None:
        if really == 0 and not self.model.closed:
            self.session.fail(Error(None, "device", "", fatal=True))
            self.model.queue.clear()
            self.model.finish(("error", None))
            self.model.closed = True

    @invariant()
    def agree(self) -> None:
        assert self.heard() == self.model.expected
        self.model.expected.clear()
        assert (self.session.state is State.CLOSED) == self.model.closed
        waits = bool(self.model.queue) or self.model.ended
        assert self.session.has_line == (waits and self.model.current is None and not self.model.closed)
        if not self.model.closed:
            pending = any(each["op"] != "bad" for each in self.model.queue)
            assert self.session.unanswered == (pending or self.model.current is not None)


TestTable = TableAgainstModel.TestCase
TestTable.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)


def test_cancels_do_not_search_the_queue() -> None:
    """Tens of thousands of cancels behind as many waiting lines: each is answered by a look-up."""
    session = Session(Limits(), "1")
    session.loaded(Ready({}, {}))
    session.output.clear()
    session.receive(b'{"id":0,"op":"info"}\n' + b"x\n" * 30_000, 0.0)
    assert session.take(0.0) is not None
    began = time.process_time()
    session.receive(b"".join(b'{"id":1,"op":"cancel","target":%d}\n' % n for n in range(1, 20_001)), 0.0)
    assert time.process_time() - began < 5  # searching took minutes
    assert sum(isinstance(event, Result) for event in session.output) == 20_000


def test_lines_read_ahead_are_bounded_in_number() -> None:
    session = Session(Limits(), "1")
    session.loaded(Ready({}, {}))
    session.receive(b'{"id":0,"op":"info"}\n', 0.0)
    assert session.take(0.0) is not None
    n = 0
    while session.room >= 2:
        session.receive(b"x\n", 0.0)
        n += 1
    assert n < 5000
