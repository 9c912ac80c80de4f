"""What goes wrong, as HTTP and in OpenAI's shape."""

import math
from typing import Any

_STATUS = {
    "invalid_request": 400,
    "invalid_json": 400,
    "template": 400,
    "context_overflow": 400,
    "deadline": 504,
    "busy": 503,
    "device": 503,
    "model_file": 503,
    "unsupported_model": 503,
    "out_of_memory": 503,
}
"""HTTP status of an engine's error code; 500 for any other."""

_OPENAI_CODES = {"context_overflow": "context_length_exceeded"}
"""Codes that OpenAI's clients know under another name."""


class ApiError(Exception):
    """An answer that is an error. `param` names the request's parameter at fault, `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    def body(self) -> dict[str, Any]:
        # As OpenAI answers, also where there is no such model or the key is wrong: `code` tells them apart.
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class ClientGoneError(Exception):
    """The client has hung up: nobody is there to be answered."""


def bad_request(param: str | None, message: str, code: str = "invalid_request") -> ApiError:
    return ApiError(400, code, message if param is None else f"{param}: {message}", param=param)


def missing(param: str, what: str) -> ApiError:
    return bad_request(param, f"is missing; it has to be {what}", "missing_required_parameter")


def wrong_type(param: str, what: str) -> ApiError:
    return bad_request(param, f"has to be {what}", "invalid_type")


def engine_gone(what: str) -> ApiError:
    """The engine died, or spoke something that is not the protocol, with this request under way."""
    return ApiError(502, "engine_gone", what)


def from_engine(event: dict[str, Any], names: dict[str, str]) -> ApiError:
    """An engine's `error` event. `names`: what the request called a field that the engine knows under another name."""
    code = str(event.get("code", "internal"))
    message = str(event.get("message", "the engine gave no reason"))
    field = event.get("field")
    if isinstance(field, str):
        for engine_name, name in names.items():
            if field == engine_name or field.startswith((engine_name + ".", engine_name + "[")):
                if message.startswith(field):
                    message = name + message[len(engine_name) :]
                field = name + field[len(engine_name) :]
                break
    else:
        field = None
    status = _STATUS.get(code, 500)
    return ApiError(
        status, _OPENAI_CODES.get(code, code), message, param=field, retry_after=1 if status == 503 else None
    )
