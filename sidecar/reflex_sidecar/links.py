"""Two ways to an engine: a connection to its Unix socket per request, or a child process that is kept running.

A link opens conversations that are `ready`, and takes each back with word whether its last request was finished. The
caller has at most one open at a time (see `engine`).
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import time
from collections.abc import Sequence
from subprocess import SubprocessError
from typing import Any, Protocol

from reflex_sidecar.errors import ApiError
from reflex_sidecar.wire import LINE_BYTES, Conversation

logger = logging.getLogger("reflex_sidecar")

PROBE_S = 2.0
"""How long an engine behind a socket may take to say that it is ready."""
STOP_S = 60.0
"""How long a child may take to end a cancelled request. It is within one token or one piece of the prompt."""
END_S = 3.0
"""How long a child may take to end after its input did, and again after SIGTERM."""
BACKOFF_S = (0.5, 60.0)
"""The pause before a restart: the first, doubled with each failure in a row up to the second."""
HEALTHY_S = 60.0
"""A child that was ready for so long, or that answered a request, has not failed in a row."""


class Link(Protocol):
    async def start(self) -> None: ...
    async def close(self) -> None: ...
    async def open(self, until: float) -> Conversation:
        """A conversation that is ready. Raises ApiError 503 if there is none by then (seconds, monotonic clock)."""

    async def release(self, conversation: Conversation, request_id: str, finished: bool) -> None:
        """Take the conversation back; ends its request, if there was one ("": none), unless that is `finished`."""

    async def status(self) -> dict[str, Any]:
        """`state` (ready, loading or down) and `error`; if known: model, limits, ops, timings, loading."""


def _describe(conversation: Conversation | None, state: str, error: str | None, restarts: int) -> dict[str, Any]:
    status: dict[str, Any] = {"state": state, "error": error, "restarts": restarts}
    if conversation is not None:
        status["ops"] = conversation.hello.get("ops", [])
        status["limits"] = conversation.hello.get("limits", {})
        status["version"] = conversation.hello.get("version")
        status["loading"] = list(conversation.loading.values())
        status["model"] = conversation.ready.get("model")
        status["timings"] = conversation.ready.get("timings", {})
    return status


class SocketLink:
    """An engine that somebody else runs. Closing the connection ends what it was asked."""

    RETRY_S = 0.1

    def __init__(self, path: str):
        self._path = path
        self._last: Conversation | None = None  # for what it said of the model
        self._open = 0

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def open(self, until: float) -> Conversation:
        while True:
            try:
                async with asyncio.timeout_at(until):
                    conversation = await self._connect()
                self._open += 1
                return conversation
            except TimeoutError:
                raise ApiError(503, "engine_not_ready", "the engine is not ready", retry_after=2) from None
            except ApiError as error:  # nothing was asked yet, so trying again is safe
                if error.status not in (502, 503) or time.monotonic() + self.RETRY_S > until:
                    raise ApiError(503, "engine_not_ready", error.message, retry_after=2) from None
            await asyncio.sleep(self.RETRY_S)

    async def _connect(self) -> Conversation:
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=LINE_BYTES)
        except OSError as error:
            raise ApiError(503, "engine_not_ready", f"no engine at the socket: {error.strerror}") from None
        conversation = Conversation(reader, writer)
        try:
            await conversation.greet()
        except BaseException:
            conversation.close()
            raise
        self._last = conversation
        return conversation

    async def release(self, conversation: Conversation, request_id: str, finished: bool) -> None:
        self._open -= 1
        conversation.close()

    async def status(self) -> dict[str, Any]:
        if self._open and self._last is not None:  # it answers us right now, and need not be asked
            return _describe(self._last, "ready", None, 0)
        try:
            async with asyncio.timeout(PROBE_S):
                (await self._connect()).close()
        except TimeoutError:
            return _describe(self._last, "loading", "the engine is loading or does not answer", 0)
        except ApiError as error:
            return _describe(self._last, "down", error.message, 0)
        return _describe(self._last, "ready", None, 0)


_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


class ChildLink:
    """An engine that runs as our child: restarted when it ends, killed when we do."""

    def __init__(self, command: Sequence[str], hidden: Sequence[str] = ()):
        """`hidden`: environment variables that are not the child's business."""
        self._command = list(command)
        self._environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self._conversation: Conversation | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._state = "loading"
        self._error: str | None = None
        self._failures = 0
        self._restarts = 0
        self._next_start = 0.0

    async def start(self) -> None:
        self._supervisor = asyncio.create_task(self._supervise())

    async def close(self) -> None:
        """End the child: by the end of its input, then SIGTERM, then SIGKILL."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        process = self._process
        if process is None or process.returncode is not None:
            return
        if self._conversation is not None:
            self._conversation.close()
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                if number is not None:
                    process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()
                return

    async def _supervise(self) -> None:
        while True:
            self._state = "loading"
            ready_at = None
            try:
                await self._launch()
                assert self._process is not None and self._conversation is not None
                await self._conversation.greet()
                ready_at = time.monotonic()
                self._state, self._error = "ready", None
                self._ready.set()
                logger.info("engine ready, process %d", self._process.pid)
                code = await self._process.wait()
                raise ApiError(503, "engine_gone", f"the engine ended, with {_ending(code)}")
            except ApiError as error:
                self._ready.clear()
                self._state, self._error = "down", error.message
                await self._reap()
                if ready_at is not None and time.monotonic() - ready_at > HEALTHY_S:
                    self._failures = 0
            pause = min(BACKOFF_S[1], BACKOFF_S[0] * 2 ** min(self._failures, 20))
            self._failures += 1
            self._restarts += 1
            self._next_start = time.monotonic() + pause
            logger.error("%s; next start in %.1f s", self._error, pause)
            await asyncio.sleep(pause)

    async def _launch(self) -> None:
        parent = os.getpid()

        def die_with_parent() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=self._environment,
                limit=LINE_BYTES,
                process_group=0,  # a Ctrl-C at the terminal is for us; the child ends when we end it
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise ApiError(503, "engine_gone", f"{self._command[0]}: {error.strerror}") from None
        except SubprocessError:  # from `die_with_parent`
            raise ApiError(503, "engine_gone", f"{self._command[0]}: it could not be started") from None
        assert self._process.stdout is not None and self._process.stdin is not None
        self._conversation = Conversation(self._process.stdout, self._process.stdin)

    async def _reap(self) -> None:
        """After a failed start the child may still run. One that ends by itself has the time to say why on stderr."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await process.wait()
        self._kill()
        await process.wait()

    def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def open(self, until: float) -> Conversation:
        while True:
            if self._state == "down" and self._next_start > until:
                raise self._not_ready(self._next_start - time.monotonic())
            try:
                async with asyncio.timeout_at(until):
                    await self._ready.wait()
            except TimeoutError:
                raise self._not_ready(max(2.0, self._next_start - time.monotonic())) from None
            # Its end may be known before the supervisor has run.
            if self._conversation is not None and self._process is not None and self._process.returncode is None:
                return self._conversation
            self._ready.clear()

    def _not_ready(self, retry_after: float) -> ApiError:
        why = self._error or "it is loading its model"
        return ApiError(503, "engine_not_ready", f"the engine is not ready: {why}", retry_after=retry_after)

    async def release(self, conversation: Conversation, request_id: str, finished: bool) -> None:
        if finished:
            if request_id:
                self._failures = 0
            return
        if conversation is not self._conversation:
            return  # that one is dead
        if not conversation.broken and await self._stop(conversation, request_id):
            return
        if conversation is self._conversation:  # still
            self._kill()
            self._ready.clear()  # nobody is to be given this conversation again

    @staticmethod
    async def _stop(conversation: Conversation, request_id: str) -> bool:
        """Cancel a request and read to its end. False if that does not come."""
        try:
            async with asyncio.timeout(STOP_S):
                await conversation.write({"id": f"stop {request_id}", "op": "cancel", "target": request_id})
                while True:
                    event = await conversation.read()
                    if event.get("id") == request_id and event["event"] in ("done", "result", "error"):
                        return True
        except TimeoutError:
            logger.error("the engine did not end a cancelled request within %.0f s, and is restarted", STOP_S)
        except ApiError:
            pass  # it is dead, or what it says makes no sense
        return False

    async def status(self) -> dict[str, Any]:
        return _describe(self._conversation, self._state, self._error, self._restarts)


def _ending(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
