"""One conversation with an engine: JSON lines both ways, as protocol.md has them."""

import json
from asyncio import LimitOverrunError, StreamReader, StreamWriter
from collections.abc import Callable
from typing import Any

from reflex_sidecar.errors import ApiError, engine_gone, from_engine

Event = dict[str, Any]

PROTOCOL = 1
LINE_BYTES = 256 << 20
"""The longest line taken from an engine: the answer to a `score` of 4 MiB and 2^20 tokens has 80 MB at most."""


class Conversation:
    """What was said so far: `hello`, `ready`, and `loading`, the last report of each phase.

    `broken`: the engine is gone, or has said something that is not the protocol, and is not to be asked again.
    """

    def __init__(self, reader: StreamReader, writer: StreamWriter):
        self._reader = reader
        self._writer = writer
        self.hello: Event = {}
        self.ready: Event = {}
        self.loading: dict[str, Event] = {}
        self.broken = False

    async def read(self) -> Event:
        """The next event; cancelling the call loses nothing. Raises ApiError if it is gone or makes no sense."""
        try:
            return await self._read()
        except ApiError:
            self.broken = True
            raise

    async def _read(self) -> Event:
        try:
            line = await self._reader.readline()
        except (OSError, ValueError, LimitOverrunError) as error:
            raise engine_gone(f"the engine's output can't be read ({type(error).__name__})") from None
        if not line.endswith(b"\n"):  # without its newline a line is to be thrown away
            raise engine_gone("the engine ended before the answer was complete")
        try:
            event = json.loads(line)
        except ValueError:
            raise engine_gone("the engine wrote a line that is not JSON") from None
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            raise engine_gone("the engine wrote a line that is no event")
        return event

    async def write(self, request: dict[str, Any]) -> None:
        """Send one request. Raises ApiError 413 if the engine takes no line that long, or when the engine is gone."""
        line = json.dumps(request, separators=(",", ":"), ensure_ascii=False).encode()
        most = self.hello.get("limits", {}).get("line_bytes")
        if isinstance(most, int) and len(line) > most:
            raise ApiError(413, "request_too_large", f"the engine takes at most {most} bytes; this makes {len(line)}")
        try:
            self._writer.write(line + b"\n")
            await self._writer.drain()
        except (OSError, RuntimeError):
            self.broken = True
            raise engine_gone("the engine ended before it took the request") from None

    async def greet(self, report: Callable[[], None] = lambda: None) -> None:
        """Read up to `ready`; `report` is called after each event."""
        while not self.ready:
            event = await self.read()
            if event["event"] == "hello":
                self.hello = event
                if event.get("protocol") != PROTOCOL:
                    raise engine_gone(f"the engine speaks protocol {event.get('protocol')!r}, not {PROTOCOL}")
            elif event["event"] == "loading":
                self.loading[str(event.get("phase"))] = event
            elif event["event"] == "ready":
                self.ready = event
            elif event["event"] == "error":
                raise from_engine(event, {})
            report()

    def close(self) -> None:
        self._writer.close()
