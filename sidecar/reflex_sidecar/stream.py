"""Answering one generation over HTTP: whole or as server-sent events, ended in the engine when the client leaves."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from reflex_sidecar import openai_answers
from reflex_sidecar.engine import Engine, Reply, Turn
from reflex_sidecar.errors import ApiError, ClientGoneError
from reflex_sidecar.metrics import Metrics
from reflex_sidecar.openai_requests import Job, bounded
from reflex_sidecar.wire import Event

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}
"""So that nothing between us and the client collects or compresses what should be seen at once."""
CLIENT_CLOSED = 499
"""The status in log and metrics when the client left before it had its answer."""


T = TypeVar("T")


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client hangs up. The body must have been read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_hang_up(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for each in (working, watching):
            each.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Generation(Response):
    """The response to a chat or completion request: the engine runs while it is sent."""

    def __init__(
        self,
        engine: Engine,
        job: Job,
        name_model: Callable[[Job], str],
        metrics: Metrics,
        ping_s: float,
    ):
        """`name_model`: what the model is called in the answer; called once the engine is known. May refuse."""
        self.background = None
        self._engine = engine
        self._job = job
        self._name_model = name_model
        self._metrics = metrics
        self._ping_s = ping_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._run(scope, receive, send))
        except ClientGoneError:
            self._metrics.count("reflex_sidecar_client_gone_total")
            await Response(status_code=CLIENT_CLOSED)(scope, receive, send)  # nobody reads it; the log does

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.monotonic()
        async with self._engine.conversation() as turn:
            name = self._name_model(self._job)
            job = bounded(self._job, self._engine.limits, self._engine.model.get("n_ctx"))
            if "messages" in job.ask:
                answer: openai_answers.Answer = openai_answers.Chat(job, name)
            else:
                answer = openai_answers.Completion(job, name, await self._echoed(turn, job))
            running = await turn.ask(job.ask, job.names)
            if running.first["event"] != "started":
                raise _not_started(running.first)
            if job.stream:
                await _Stream(send, self._ping_s).run(running, answer, lambda e: self._observe(e, began))
                return
            while (event := await running.next()) is not None:
                self._observe(event, began)
                if event["event"] == "done":
                    whole = answer.whole(event)
                    break
                if event["event"] in ("prompt", "token"):
                    answer.token(event)
        # The engine is free while the answer is sent.
        await JSONResponse(whole)(scope, receive, send)

    @staticmethod
    async def _echoed(turn: Turn, job: Job) -> str:
        """The text of the prompt, where it is to be part of the answer and does not come token by token."""
        if job.echo is None or "prompt_logprobs" in job.ask:
            return ""
        if isinstance(job.echo, str):
            return job.echo
        answer = await turn.ask({"op": "detokenize", "tokens": job.echo}, {"tokens": "prompt"})
        return str(answer.first["text"])

    def _observe(self, event: Event, began: float) -> None:
        if event["event"] == "token" and event.get("index") == 0:
            self._metrics.observe("reflex_sidecar_first_token_seconds", time.monotonic() - began)
        elif event["event"] == "done":
            usage = event.get("usage", {})
            for name in ("prompt_tokens", "reused_tokens", "completion_tokens"):
                self._metrics.count(f"reflex_sidecar_{name}_total", usage.get(name, 0))
            self._metrics.count("reflex_sidecar_finished_total", 1, reason=str(event.get("finish_reason")))


def _not_started(first: Event) -> ApiError:
    """An end without a beginning: the deadline passed while the request waited in the engine."""
    reason = first.get("finish_reason")
    if reason == "deadline":
        return ApiError(504, "deadline", "deadline_ms passed before the engine could begin", param="deadline_ms")
    return ApiError(502, "engine_gone", f"the engine ended the request before it began: {reason}")


class _Stream:
    """Server-sent events. Once the headers are out, an error can only be one of the events."""

    def __init__(self, send: Send, ping_s: float):
        self._send = send
        self._ping_s = ping_s

    async def run(self, running: Reply, answer: openai_answers.Answer, observe: Callable[[Event], None]) -> None:
        headers = [(name.encode(), value.encode()) for name, value in STREAM_HEADERS.items()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._say(*answer.opening())
            while True:
                event = await running.next(self._ping_s)
                if event is None:
                    await self._write(b": ping\n\n")
                    continue
                observe(event)
                if event["event"] in ("prompt", "token"):
                    await self._say(*answer.token(event))
                elif event["event"] == "done":
                    await self._say(*answer.closing(event))
                    await self._write(b"data: [DONE]\n\n", more=False)
                    return
        except ApiError as error:
            await self._say(error.body())
            await self._write(b"", more=False)

    async def _say(self, *objects: dict[str, Any]) -> None:
        if objects:
            await self._write(b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in objects))

    async def _write(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
