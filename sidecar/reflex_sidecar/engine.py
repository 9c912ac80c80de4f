"""The engine as the routes see it: one request at a time, a bounded wait, and an end that is always in order."""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

from reflex_sidecar.errors import ApiError, from_engine
from reflex_sidecar.links import Link
from reflex_sidecar.wire import Conversation, Event

LAST = ("done", "result", "error")
LONGEST_ANSWER_S = 3600.0
CLOSE_S = 3.0
"""How long cancelled requests may take to end when the process is told to."""


class Reply:
    """The events of one request. `first` is the one that was waited for: `started`, or already the last."""

    def __init__(self, conversation: Conversation, request_id: str, names: dict[str, str]):
        self._conversation = conversation
        self._names = names
        self.id = request_id
        self.first: Event = {}
        self.finished = False

    async def next(self, patience: float | None = None) -> Event | None:
        """The next event, None if there is none within `patience` seconds. Raises ApiError for an `error` event."""
        try:
            async with asyncio.timeout(patience):
                while True:
                    event = await self._conversation.read()
                    fatal = event["event"] == "error" and (event.get("id") is None or event.get("fatal"))
                    if event.get("id") == self.id or fatal:
                        break
        except TimeoutError:
            return None
        if event["event"] in LAST:
            self.finished = True
        if event["event"] == "error":
            raise from_engine(event, self._names)
        return event


class Engine:
    """At most one request is with the engine; at most `queue` wait for it, none of them longer than `wait_s`."""

    def __init__(self, link: Link, *, queue: int, wait_s: float):
        self._link = link
        self._queue = queue
        self._wait_s = wait_s
        self._turn = asyncio.Lock()
        self._numbers = itertools.count(1)
        self._endings: set[asyncio.Task[None]] = set()
        self._usual_s = 1.0  # how long a request takes, more or less
        self.waiting = 0
        self.running = 0
        self.model: dict[str, Any] = {}  # empty until the engine was first reached
        self.ops: list[str] = []
        self.limits: dict[str, Any] = {}

    async def start(self) -> None:
        await self._link.start()

    async def close(self) -> None:
        if self._endings:
            await asyncio.wait(self._endings, timeout=CLOSE_S)
        await self._link.close()

    async def status(self) -> dict[str, Any]:
        return await self._link.status()

    @contextlib.asynccontextmanager
    async def conversation(self) -> AsyncIterator["Turn"]:
        """This caller's turn. Raises ApiError 503 when too many wait or the wait is over."""
        until = time.monotonic() + self._wait_s
        await self._enter(until)
        began = time.monotonic()
        turn = None
        try:
            conversation = await self._link.open(until)
            self.model = conversation.ready.get("model", {})
            self.ops = conversation.hello.get("ops", [])
            self.limits = conversation.hello.get("limits", {})
            turn = Turn(conversation, self._numbers, until)
            yield turn
            self._usual_s += 0.2 * (time.monotonic() - began - self._usual_s)
        finally:
            # Whoever is waiting here may be cancelled; the request's end, and with it the next turn, may not.
            ending = asyncio.create_task(self._leave(turn))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _enter(self, until: float) -> None:
        if self._turn.locked() and self.waiting >= self._queue:
            raise self._busy(f"{self.running} running and {self.waiting} waiting")
        self.waiting += 1
        try:
            async with asyncio.timeout_at(until):
                await self._turn.acquire()
        except TimeoutError:
            raise self._busy(f"no turn within {self._wait_s:g} seconds") from None
        finally:
            self.waiting -= 1
        self.running += 1

    async def _leave(self, turn: "Turn | None") -> None:
        try:
            if turn is not None:
                asked = turn.reply
                await self._link.release(
                    turn.conversation, "" if asked is None else asked.id, asked is None or asked.finished
                )
        finally:
            self.running -= 1
            self._turn.release()

    def _busy(self, why: str) -> ApiError:
        return ApiError(
            503, "busy", f"the engine is busy: {why}", retry_after=min(30.0, self._usual_s * (1 + self.waiting))
        )


class Turn:
    """One caller's use of the engine: requests one after the other."""

    def __init__(self, conversation: Conversation, numbers: "itertools.count[int]", until: float):
        self.conversation = conversation
        self.reply: Reply | None = None  # to the last request
        self._numbers = numbers
        self._until = until

    async def ask(self, request: dict[str, Any], names: dict[str, str] | None = None) -> Reply:
        """Send a request and wait for its first event. `names`: see `errors.from_engine`.

        Never tries again: after its first byte the engine may have begun. Raises ApiError 501 for an op that the engine
        does not have, 503 when it takes too long to begin, and for an `error` event.
        """
        if request["op"] not in self.conversation.hello.get("ops", []):
            raise ApiError(501, "not_implemented", f"this engine has no op {request['op']!r}")
        reply = Reply(self.conversation, f"r{next(self._numbers)}", names or {})
        # From here on, the engine may have it.
        self.reply = reply
        try:
            await self.conversation.write({"id": reply.id, **request})
        except ApiError as error:
            reply.finished = error.status == 413  # not a byte was sent
            raise
        # Only `generate` says that it has begun; what else there is answers when it is done.
        wait = max(1.0, self._until - time.monotonic()) if request["op"] == "generate" else LONGEST_ANSWER_S
        first = await reply.next(wait)
        if first is None:
            raise ApiError(503, "busy", "the engine is busy with other clients", retry_after=2)
        reply.first = first
        return reply
