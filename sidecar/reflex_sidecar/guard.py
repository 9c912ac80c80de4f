"""Who may ask, and how: checked before a route sees the request, cheapest first.

A page in a browser on this machine can reach a loopback port. What keeps it out: the Host allow-list (a name that was
rebound to 127.0.0.1 is not on it), the Origin check, and that a body has to be declared as JSON, which no form can.
"""

import asyncio
import hmac
import logging
import time
import traceback
from collections.abc import Collection, Sequence
from urllib.parse import unquote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from reflex_sidecar.errors import ApiError
from reflex_sidecar.metrics import Metrics

logger = logging.getLogger("reflex_sidecar")

ALIVE_PATH = "/livez"
"""It says "ok" to anyone under any name: it may fail only when the process is dead."""
OPEN_PATHS = frozenset(("/", "/readyz"))
"""They hold nothing that a key protects: a static file, and one word for who has none."""
BODY_S = 30.0
"""How long a body may take to arrive."""


class Guard:
    """Raises nothing: whatever it refuses is answered here."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: Collection[str],
        origins: Collection[str] = (),
        key: str | None = None,
        body_bytes: int,
    ):
        """`hosts` without ports, in lower case; `origins` as browsers send them; `key` None: none is asked for."""
        self._app = app
        self._hosts = frozenset(hosts)
        self._origins = frozenset(origins)
        self._key = key
        self._body_bytes = body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            _check_version(scope["http_version"])
            _check_framing(headers)
            if scope["path"] == ALIVE_PATH:
                await self._app(scope, receive, send)
                return
            host = self._check_host(headers)
            self._check_served(scope.get(AUTHORITY, host))
            origin = self._check_origin(headers, host)
            send = _with_headers(send, origin)
            if scope["method"] == "OPTIONS" and origin is not None and "access-control-request-method" in headers:
                await _preflight()(scope, receive, send)
                return
            if scope["path"] not in OPEN_PATHS:
                self._check_key(headers)
            if scope["method"] == "POST":
                _check_content_type(headers)
            receive = self._bounded(headers, receive)
        except ApiError as error:
            await refusal(error)(scope, receive, _with_headers(send, None))
            return
        await self._app(scope, receive, send)

    def _check_host(self, headers: Headers) -> str:
        values = headers.getlist("host")
        if len(values) != 1:
            raise ApiError(400, "bad_host", "exactly one Host header is needed")
        host = values[0].strip().lower()
        self._check_served(host)
        return host

    def _check_served(self, host: str) -> None:
        if _without_port(host) not in self._hosts:
            raise ApiError(403, "host_not_allowed", "this Host is not served here; --allow-host adds one")

    def _check_origin(self, headers: Headers, host: str) -> str | None:
        """The allowed foreign origin that asks, None if it is our own page or no page at all."""
        origins = headers.getlist("origin")
        if not origins:
            return None
        if len(origins) == 1:
            if origins[0] in self._origins:
                return origins[0]
            if origins[0].lower() in (f"http://{host}", f"https://{host}"):
                return None
        raise ApiError(403, "origin_not_allowed", "this Origin may not ask here; --allow-origin adds one")

    def _check_key(self, headers: Headers) -> None:
        if self._key is not None and not has_key(headers, self._key):
            raise ApiError(
                401,
                "invalid_api_key",
                "the key is missing or wrong: Authorization: Bearer KEY",
                headers={"www-authenticate": "Bearer"},
            )

    def _bounded(self, headers: Headers, receive: Receive) -> Receive:
        """The body, cut off with an error when it is too long or takes too long."""
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._body_bytes:
            raise self._too_large()
        until = time.monotonic() + BODY_S
        seen = 0
        complete = False

        async def bounded() -> Message:
            nonlocal seen, complete
            if complete:  # what comes now is the hang-up, and that may take as long as it likes
                return await receive()
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError:
                raise _closing(ApiError(408, "body_timeout", f"the body took more than {BODY_S:g} seconds")) from None
            if message["type"] == "http.request":
                seen += len(message.get("body", b""))
                complete = not message.get("more_body", False)
                if seen > self._body_bytes:
                    raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> ApiError:
        return _closing(ApiError(413, "request_too_large", f"the body is longer than {self._body_bytes} bytes"))


def _closing(error: ApiError) -> ApiError:
    """The rest of the body is not read, so the connection is of no more use."""
    error.headers["connection"] = "close"
    return error


AUTHORITY = "reflex_sidecar.authority"
"""In a scope: the host that the request's target named."""


def _origin_form(scope: Scope) -> Scope:
    """`GET http://host/path`, as a client of a proxy writes it and every server has to take it (RFC 9112, 3.2.2), is
    `GET /path` of that host. Another scheme than the two of the web is left as it is, and finds no route."""
    scheme, separator, rest = scope["raw_path"].partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return scope
    authority, slash, path = rest.partition(b"/")
    raw = (slash or b"/") + path
    host = authority.decode("ascii").lower()
    return {**scope, "raw_path": raw, "path": unquote(raw.decode("ascii")), AUTHORITY: host}


def _without_port(host: str) -> str:
    """`host` of a Host header without its port; an IPv6 address keeps its brackets."""
    if host.startswith("["):
        name, bracket, rest = host.partition("]")
        return name + bracket if not rest or (rest[0] == ":" and rest[1:].isdigit()) else host
    name, colon, port = host.partition(":")
    return name if not colon or port.isdigit() else host


def _check_version(version: str) -> None:
    """A later HTTP/1 is understood as 1.1; anything else means something that this server does not know."""
    if not version.startswith("1."):
        raise _closing(ApiError(505, "http_version", f"this server speaks HTTP/1.1, not HTTP/{version}"))


def _check_framing(headers: Headers) -> None:
    """A proxy in front that believes the other of the two would see requests where we see a body."""
    if "transfer-encoding" in headers and "content-length" in headers:
        message = "Content-Length and Transfer-Encoding exclude each other"
        raise _closing(ApiError(400, "bad_framing", message))


def _check_content_type(headers: Headers) -> None:
    kind, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().replace('"', "")
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise ApiError(415, "unsupported_media_type", "the Content-Type has to be application/json")


def has_key(headers: Headers, key: str) -> bool:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), key.encode())


def refusal(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


def _with_headers(send: Send, origin: str | None) -> Send:
    async def with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["x-content-type-options"] = "nosniff"
            headers["cross-origin-resource-policy"] = "same-origin" if origin is None else "cross-origin"
            headers.add_vary_header("Origin")
            if origin is not None:
                headers["access-control-allow-origin"] = origin
        await send(message)

    return with_headers


def _preflight() -> Response:
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": "authorization, content-type",
            "access-control-max-age": "600",
        },
    )


class Observed:
    """Outermost: one log line and one count a request, and no exception gets past it.

    Neither the log nor a trace holds anything of what was asked or answered: method, route, status, duration.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[Route]):
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        scope = _origin_form(scope)
        matching = (route.path_format for route in self._routes if route.path_regex.fullmatch(scope["path"]))
        route = next(matching, "other")
        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            logger.error("defect: %s at %s", type(error).__name__, _where(error))
            if status == 0:
                await refusal(ApiError(500, "internal", "a defect of the sidecar"))(scope, receive, watched)
        finally:
            seconds = time.monotonic() - began
            self._metrics.count("reflex_sidecar_requests_total", 1, route=route, status=str(status))
            self._metrics.observe("reflex_sidecar_request_seconds", seconds)
            logger.info("%s %s %d %.1f ms", _METHOD.get(scope["method"], "?"), route, status, 1000 * seconds)


_METHOD = {each: each for each in ("GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH")}


def _where(error: BaseException) -> str:
    """The frames of an exception, without its message: that may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames[-8:]))
