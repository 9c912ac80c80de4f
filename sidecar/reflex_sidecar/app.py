"""The routes."""

import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import PurePath
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from reflex_sidecar import openai_requests
from reflex_sidecar.body import read_object
from reflex_sidecar.engine import Engine
from reflex_sidecar.errors import ApiError, ClientGoneError, bad_request
from reflex_sidecar.guard import Guard, Observed, has_key, refusal
from reflex_sidecar.metrics import Metrics
from reflex_sidecar.openai_requests import Job
from reflex_sidecar.page import page
from reflex_sidecar.stream import CLIENT_CLOSED, Generation, unless_gone


class Settings(NamedTuple):
    """What the command line sets."""

    hosts: frozenset[str]
    origins: frozenset[str] = frozenset()
    key: str | None = None
    model_names: tuple[str, ...] = ()
    body_bytes: int = 4 << 20
    ping_s: float = 15.0


def create_app(engine: Engine, settings: Settings) -> ASGIApp:
    """The whole application, guarded. The engine is started and closed with it."""
    metrics = Metrics()
    routes = _Routes(engine, settings, metrics)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.close()

    table = [
        Route("/", routes.page),
        Route("/v1/chat/completions", routes.chat, methods=["POST"]),
        Route("/v1/completions", routes.completions, methods=["POST"]),
        Route("/v1/score", routes.score, methods=["POST"]),
        Route("/v1/models", routes.models),
        Route("/v1/models/{id:path}", routes.model),
        Route("/tokenize", routes.tokenize, methods=["POST"]),
        Route("/livez", routes.livez),
        Route("/readyz", routes.readyz),
        Route("/metrics", routes.metrics),
    ]
    app = Starlette(
        routes=table,
        lifespan=lifespan,
        exception_handlers={ApiError: _refuse, HTTPException: _refuse_plainly, ClientGoneError: _note_gone},
    )
    app.router.redirect_slashes = False
    guard = Guard(app, hosts=settings.hosts, origins=settings.origins, key=settings.key, body_bytes=settings.body_bytes)
    return Observed(guard, metrics, table)


def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return refusal(error)


def _refuse_plainly(request: Request, error: Exception) -> Response:
    """No such path or method, in the shape of the other errors."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    return refusal(ApiError(error.status_code, code, error.detail, headers=dict(error.headers or {})))


def _note_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


class _Routes:
    def __init__(self, engine: Engine, settings: Settings, metrics: Metrics):
        self._engine = engine
        self._settings = settings
        self._metrics = metrics
        self._page = page()

    # What OpenAI's clients know

    async def chat(self, request: Request) -> Response:
        return self._generation(openai_requests.chat(await read_object(request)))

    async def completions(self, request: Request) -> Response:
        return self._generation(openai_requests.completion(await read_object(request)))

    def _generation(self, job: Job) -> Generation:
        if self._settings.model_names or self._engine.model:
            self._name_model(job)  # refused now rather than when its turn has come
        return Generation(self._engine, job, self._name_model, self._metrics, self._settings.ping_s)

    def _name_model(self, job: Job) -> str:
        openai_requests.check_model(job.model, self._names())
        return self._names()[0]

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": await self._models(request)})

    async def model(self, request: Request) -> Response:
        found = await self._models(request)
        name = request.path_params["id"]
        openai_requests.check_model(name, self._names())
        return JSONResponse(next(each for each in found if each["id"] == name))

    async def _models(self, request: Request) -> list[dict[str, Any]]:
        """The one model, under each of its names."""
        if not self._engine.model:
            await unless_gone(request.receive, self._meet())
        about = {"object": "model", "created": _STARTED, "owned_by": "reflex", "reflex": self._engine.model}
        return [{"id": name, **about} for name in self._names()]

    async def _meet(self) -> None:
        async with self._engine.conversation():
            pass

    def _names(self) -> tuple[str, ...]:
        """What the model may be called: the names given, else its file's."""
        if self._settings.model_names:
            return self._settings.model_names
        model = self._engine.model
        return (PurePath(str(model.get("file") or model.get("name") or "reflex")).name.removesuffix(".gguf"),)

    # Reflex's own

    async def score(self, request: Request) -> Response:
        """The engine's `score`, field by field."""
        body = await read_object(request)
        for name in ("id", "op"):
            if name in body:
                raise bad_request(name, "unknown parameter", "unknown_parameter")
        model = body.pop("model", None)
        answer = await unless_gone(request.receive, self._result({"op": "score", **body}, model))
        return JSONResponse({"object": "score", "model": self._names()[0], **answer})

    async def tokenize(self, request: Request) -> Response:
        body = await read_object(request)
        model = body.pop("model", None)
        answer = await unless_gone(request.receive, self._result(_tokenize(body), model))
        return JSONResponse({**answer, "count": len(answer["tokens"])})

    async def _result(self, ask: dict[str, Any], model: Any) -> dict[str, Any]:
        """The fields of the `result` that a request has."""
        async with self._engine.conversation() as turn:
            openai_requests.check_model(model, self._names())
            answer = await turn.ask(ask)
            event = answer.first
            while event["event"] != "result":
                if event["event"] == "done":
                    raise ApiError(504, "deadline", "deadline_ms passed before the engine began", param="deadline_ms")
                event = await answer.next() or event
            return {name: value for name, value in event.items() if name not in ("id", "event")}

    # Operation

    async def page(self, _: Request) -> Response:
        return self._page

    async def livez(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(self, request: Request) -> Response:
        """The state for anyone, the rest for who has the key."""
        status = await self._engine.status()
        if not self._settings.key or has_key(request.headers, self._settings.key):
            said = status
        else:
            said = {"state": status["state"]}
        return JSONResponse(said, 200 if status["state"] == "ready" else 503, {"cache-control": "no-store"})

    async def metrics(self, _: Request) -> Response:
        status = await self._engine.status()
        gauges = {
            "reflex_sidecar_running": self._engine.running,
            "reflex_sidecar_waiting": self._engine.waiting,
            "reflex_sidecar_engine_ready": status["state"] == "ready",
            "reflex_sidecar_engine_restarts_total": status["restarts"],
        }
        return PlainTextResponse(self._metrics.render(gauges), media_type="text/plain; version=0.0.4")


def _tokenize(body: dict[str, Any]) -> dict[str, Any]:
    for name in body:
        if name not in ("text", "special"):
            raise bad_request(name, "unknown parameter; there are text and special", "unknown_parameter")
    return {"op": "tokenize", **body}


_STARTED = int(time.time())
