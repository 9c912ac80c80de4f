"""A request's body -> a JSON object, strictly: what the engine's own lines may not hold, a body may not either."""

import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from reflex_sidecar.errors import ClientGoneError, bad_request


async def read_object(request: Request) -> dict[str, Any]:
    """Raises ApiError 400, ClientGoneError. Size and time are bounded by `guard`."""
    try:
        return parse_object(await request.body())
    except ClientDisconnect:
        raise ClientGoneError from None


def parse_object(data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, parse_int=_bounded
        )
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # a lone surrogate, written as an escape, fails here
    except UnicodeDecodeError:
        raise bad_request(None, "the body is not UTF-8", "invalid_json") from None
    except UnicodeEncodeError:
        raise bad_request(None, "the body holds a lone surrogate", "invalid_json") from None
    except RecursionError:
        raise bad_request(None, "the body nests too deep", "invalid_json") from None
    except json.JSONDecodeError as error:
        raise bad_request(None, f"the body is not JSON: {error.msg} at character {error.pos}", "invalid_json") from None
    except ValueError as error:
        raise bad_request(None, f"the body is not JSON that can be taken: {error}", "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(None, "the body has to be a JSON object", "invalid_json")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return value


def _no_constant(_: str) -> NoReturn:
    raise ValueError("NaN and Infinity are not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if abs(number) > 2**53:
        raise ValueError("a number beyond 2^53")
    return number


def _bounded(text: str) -> int:
    if len(text) > 17 or abs(int(text)) > 2**53:
        raise ValueError("a number beyond 2^53")
    return int(text)
