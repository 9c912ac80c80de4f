"""The engine's events -> OpenAI's objects, whole or in chunks. No I/O.

An `Answer` is fed the events of one `generate` and says what a stream has to carry for each; `whole` is the object of
an answer that is not streamed.
"""

import time
import uuid
from typing import Any

from reflex_sidecar.openai_requests import Job
from reflex_sidecar.wire import Event

FINISH_REASONS = {
    "stop": "stop",
    "stop_string": "stop",
    "cancelled": "stop",
    "length": "length",
    "context": "length",
    "deadline": "length",
}
"""The engine's -> OpenAI's. One that is not here is new, and ends an answer for a reason that is not its length."""


class Answer:
    """What chat and completions share. `first` and `last` are the kinds of object in a stream and in one piece."""

    prefix = ""
    kind = ""
    chunk_kind = ""

    def __init__(self, job: Job, model: str):
        self._job = job
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._texts: list[str] = []
        self._done: Event = {}

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with, as soon as the engine has started."""
        raise NotImplementedError

    def token(self, event: Event) -> list[dict[str, Any]]:
        """The chunks for one `token` event: none while its text is withheld and nobody asked for log-probabilities.

        A `prompt` event, which comes only where an echoed prompt's log-probabilities were asked for, is like it.
        """
        raise NotImplementedError

    def closing(self, done: Event) -> list[dict[str, Any]]:
        """What a stream ends with."""
        self._done = done
        chunks = [self._chunk(self._end_choice()) | {"reflex": self._reflex()}]
        if self._job.include_usage:
            chunks.append({**self._head, "object": self.chunk_kind, "choices": [], "usage": self._usage()})
        return chunks

    def whole(self, done: Event) -> dict[str, Any]:
        """The answer in one piece, after all its tokens."""
        self._done = done
        choice = self._whole_choice("".join(self._texts))
        return {
            **self._head,
            "object": self.kind,
            "choices": [choice],
            "usage": self._usage(),
            "reflex": self._reflex(),
        }

    def _whole_choice(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _end_choice(self) -> dict[str, Any]:
        raise NotImplementedError

    def _finish_reason(self) -> str:
        return FINISH_REASONS.get(str(self._done.get("finish_reason")), "stop")

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self._job.include_usage else {}
        return {**self._head, "object": self.chunk_kind, "choices": [choice], **usage}

    def _usage(self) -> dict[str, Any]:
        usage = self._done.get("usage", {})
        prompt, completion = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": usage.get("reused_tokens", 0)},
        }

    def _reflex(self) -> dict[str, Any]:
        return {"finish_reason": self._done.get("finish_reason"), "timings": self._done.get("timings", {})}


class Chat(Answer):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, model: str):
        super().__init__(job, model)
        self._entries: list[dict[str, Any]] = []

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk(self._choice({"role": "assistant", "content": ""}, None, None))]

    def token(self, event: Event) -> list[dict[str, Any]]:
        text = event["text"]
        self._texts.append(text)
        logprobs = None
        if self._job.logprobs is not None and event.get("token") is not None:
            entry = self._entry(own_bytes(event), event)
            entry["top_logprobs"] = [self._entry(own_bytes(each), each) for each in event.get("top_logprobs") or []]
            self._entries.append(entry)
            logprobs = {"content": [entry], "refusal": None}
        if not text and logprobs is None:
            return []
        return [self._chunk(self._choice({"content": text}, logprobs, None))]

    @staticmethod
    def _entry(raw: bytes, event: Event) -> dict[str, Any]:
        return {"token": raw.decode("utf-8", "replace"), "logprob": event["logprob"], "bytes": list(raw)}

    @staticmethod
    def _choice(delta: dict[str, Any], logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _end_choice(self) -> dict[str, Any]:
        return self._choice({}, None, self._finish_reason())

    def _whole_choice(self, text: str) -> dict[str, Any]:
        logprobs = None if self._job.logprobs is None else {"content": self._entries, "refusal": None}
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason()}


class Completion(Answer):
    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(self, job: Job, model: str, echo: str = ""):
        super().__init__(job, model)
        self._echo = echo
        self._length = len(echo)  # characters so far
        self._columns: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if echo:
            self._texts.append(echo)

    def opening(self) -> list[dict[str, Any]]:
        return [self._chunk(self._choice(self._echo, None, None))] if self._echo else []

    def token(self, event: Event) -> list[dict[str, Any]]:
        text = event["text"]
        self._texts.append(text)
        logprobs = None
        if self._job.logprobs is not None and event.get("token") is not None:
            top = event.get("top_logprobs")  # none of a prompt's first token, which has no log-probability either
            tops = [None if top is None else {_name(own_bytes(each)): each["logprob"] for each in top}]
            logprobs = {
                "tokens": [_name(own_bytes(event))],
                "token_logprobs": [event["logprob"]],
                "top_logprobs": tops if self._job.logprobs else None,
                "text_offset": [self._length],
            }
            for name, column in self._columns.items():
                column += logprobs[name] or []
        self._length += len(text)
        if not text and logprobs is None:
            return []
        return [self._chunk(self._choice(text, logprobs, None))]

    @staticmethod
    def _choice(text: str, logprobs: Any, finish_reason: str | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _end_choice(self) -> dict[str, Any]:
        return self._choice("", None, self._finish_reason())

    def _whole_choice(self, text: str) -> dict[str, Any]:
        logprobs = None
        if self._job.logprobs is not None:
            logprobs = self._columns | ({} if self._job.logprobs else {"top_logprobs": None})
        return self._choice(text, logprobs, self._finish_reason())


def own_bytes(event: Event) -> bytes:
    """The bytes of a token by itself; its event's `text` may be less, or more by what was withheld before."""
    if event.get("bytes") is not None:
        return bytes(event["bytes"])
    for each in event.get("top_logprobs") or []:
        if each["token"] == event["token"]:
            return own_bytes(each)
    return str(event["text"]).encode()


def _name(raw: bytes) -> str:
    """A token as /v1/completions writes it: bytes that are no text are spelt out."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
