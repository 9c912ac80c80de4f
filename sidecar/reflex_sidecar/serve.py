"""uvicorn, set up: one process, no logs of its own that could hold a request's text, time-outs on slow clients."""

import argparse
import asyncio
import logging
import resource
import socket
import sys
from collections.abc import Sequence
from typing import ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from reflex_sidecar.app import Settings, create_app
from reflex_sidecar.engine import Engine
from reflex_sidecar.errors import ApiError
from reflex_sidecar.guard import BODY_S, refusal
from reflex_sidecar.links import ChildLink, Link, SocketLink

HEADERS_S = 10.0
"""How long the headers of a request may take."""
READER_S = 20.0
"""How long a client may leave a full buffer unread. The engine waits that long too: keep it below its own time-out."""
BACKLOG = 512
AT_ONCE = 16
"""Connections accepted before the event loop goes on."""
SPARE_DESCRIPTORS = 64
"""For everything that is no client: the engine, its links, logs. Without one left, asyncio logs without end."""
GRACE_S = 5
"""How long running answers may take when the process is told to end."""
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")


class Listener(socket.socket):
    """asyncio takes the length of the queue for how many connections to accept in a row, and those must not need more
    descriptors than are spare; the queue itself may be longer."""

    def listen(self, backlog: int = BACKLOG, /) -> None:
        super().listen(max(backlog, BACKLOG))


class PatientOnlySoLong(H11Protocol):
    """Closes a connection whose request does not arrive, or whose client does not read the answer.

    uvicorn itself limits only the time between two requests. What is no HTTP, or too much of it, is refused in the
    shape of the other errors.
    """

    most = 0
    """Connections that there are descriptors for. Beyond it the one goes that has been silent longest."""
    _open: ClassVar[dict["PatientOnlySoLong", None]] = {}
    _request_timer: asyncio.TimerHandle | None = None
    _timed: object = None
    _reader_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open[self] = None
        if len(self._open) > self.most:
            one = next(filter(PatientOnlySoLong._is_silent, self._open), self)
            del self._open[one]  # it closes in a moment, and must not be chosen again
            one.transport.abort()
        self._time_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.pop(self, None)
        _stop(self._request_timer)
        _stop(self._reader_timer)
        super().connection_lost(exc)

    def _is_silent(self) -> bool:
        """Is there nothing that this connection waits for: no request, or one that was answered before it was whole?"""
        return self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader_timer = self._reader_timer or self.loop.call_later(READER_S, self.transport.abort)

    def resume_writing(self) -> None:
        _stop(self._reader_timer)
        self._reader_timer = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Called where h11 found a request that it can't read, before there is one for the application."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # a body went wrong that is being answered
            self.transport.close()
            return
        error = ApiError(400, "bad_http", "this is no request of HTTP/1.1, or its head is longer than 64 KiB")
        answer = refusal(error)
        headers = [*answer.raw_headers, (b"x-content-type-options", b"nosniff"), (b"connection", b"close")]
        for event in (
            h11.Response(status_code=error.status, headers=headers, reason=b"Bad Request"),
            h11.Data(data=bytes(answer.body)),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    def _time_request(self) -> None:
        """A limit for the headers, and one for the body, whether or not the answer has been given already."""
        state = self.conn.their_state
        if state is not self._timed:
            _stop(self._request_timer)
            self._timed = state
            limit = {h11.IDLE: HEADERS_S, h11.SEND_BODY: BODY_S + HEADERS_S}.get(state)
            self._request_timer = None if limit is None else self.loop.call_later(limit, self.transport.close)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def serve(options: argparse.Namespace, command: Sequence[str], key: str | None, hidden: Sequence[str]) -> int:
    """Serve until SIGINT or SIGTERM. `hidden`: see ChildLink. Returns the exit code."""
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        made = socket.create_server((options.host, options.port), family=family, backlog=BACKLOG)
        listener = Listener(fileno=made.detach())
        # Connections inherit it. asyncio sets it only on sockets that were made with an explicit protocol number, and
        # without it every answer waits 40 ms for the client's delayed acknowledgement of its headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except (OSError, OverflowError) as error:
        print(f"reflex-sidecar: {options.host} port {options.port}: {error}", file=sys.stderr)
        return 1
    # Idle connections cost descriptors until their headers are due; a limit on their number would shut out /livez.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft = max(soft, min(hard, 16384)) if hard >= 0 else 16384
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    PatientOnlySoLong.most = max(1, soft - SPARE_DESCRIPTORS)
    link: Link = SocketLink(options.socket) if options.socket is not None else ChildLink(command, hidden)
    bound = f"[{options.host}]" if family == socket.AF_INET6 else options.host
    settings = Settings(
        hosts=frozenset(name.lower() for name in (*LOOPBACK_HOSTS, bound, *options.allow_host)),
        origins=frozenset(options.allow_origin),
        key=key,
        model_names=tuple(options.model_name),
        body_bytes=options.body_bytes,
        ping_s=options.ping,
    )
    app = create_app(Engine(link, queue=options.queue, wait_s=options.wait), settings)
    config = uvicorn.Config(
        app,
        loop="asyncio",  # its clock is the monotonic one
        backlog=AT_ONCE,
        http=PatientOnlySoLong,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=GRACE_S,
    )
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)  # its traces quote what they were doing
    port = listener.getsockname()[1]
    print(f"reflex-sidecar: listening on http://{bound}:{port}/", file=sys.stderr, flush=True)
    server = uvicorn.Server(config)
    asyncio.run(server.serve(sockets=[listener]))
    return 0 if server.started else 1
