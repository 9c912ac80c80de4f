"""Messages -> prompt, from the file's own chat template.

A prompt is a sequence of parts, each with a flag: text that the template wrote, where control tokens are recognised,
and text that the messages hold, where they never are, whatever the template did to it. How that is known is said in
`template_text`; jinja2 is loaded by the first rendering that needs it, so importing this module costs nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from sys import getsizeof
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from reflex_ipc.environment import complete_site
from reflex_ipc.errors import InvalidRequestError, TemplateError

if TYPE_CHECKING:
    from types import CodeType

    from reflex_ipc.gguf import GGUF
    from reflex_ipc.tokenizer import Tokenizer

TEMPLATE_KEY = "tokenizer.chat_template"
MAX_DEPTH = 32
"""Levels of lists and objects in a message or an argument."""

_ROLES = frozenset(("assistant", "developer", "function", "system", "tool", "user"))
_SET_HERE = ("add_generation_prompt", "bos_token", "eos_token", "messages")
_MAX_INTEGER_BITS = 512


class Prompt(NamedTuple):
    """A rendered conversation. `parts`: (text, whether control tokens are recognised in it), alternating."""

    parts: tuple[tuple[str, bool], ...]

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.parts)


class ChatTemplate:
    """A chat template, compiled when it is first rendered.

    `source` None or empty: the file has none, ChatML is used and `is_fallback` says so. `add_bos`: the model wants a
    BOS in front of everything; a rendering that does not begin with it gets it, so the tokenizer never has to add one.
    """

    __slots__ = ("_code", "_source", "add_bos", "bos_token", "eos_token", "is_fallback", "name")

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        add_bos: bool = False,
        name: str = TEMPLATE_KEY,
    ) -> None:
        self._source = source or ""
        self._code: CodeType | None = None
        self.is_fallback = not source
        self.bos_token, self.eos_token, self.add_bos = bos_token, eos_token, add_bos
        self.name = name

    @classmethod
    def from_gguf(cls, gguf: "GGUF", tokenizer: "Tokenizer") -> "ChatTemplate":
        """The template of a model file. Raises ModelFileError if the key holds no text."""

        def token(id: int | None) -> str:
            return "" if id is None else tokenizer.token_bytes(id, True).decode("utf-8", "replace")

        return cls(
            gguf.str(TEMPLATE_KEY, None),
            bos_token=token(tokenizer.bos),
            eos_token=token(tokenizer.eos),
            add_bos=tokenizer.add_bos,
        )

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        arguments: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
    ) -> Prompt:
        """The prompt that a conversation makes.

        A message has `role` and `content` (a text, or parts {"type": "text", "text": ...}, which are joined; null
        beside `tool_calls`), and may have `name`, `reasoning_content`, `tool_calls` and `tool_call_id`. `arguments`
        reach the template as they are: `enable_thinking`, `tools`, whatever it knows. Raises InvalidRequestError, which
        names the field, and TemplateError, which says what the template said.
        """
        reader = _Reader()
        said = reader.messages(messages)
        given = reader.arguments(arguments or {})
        if self.is_fallback:
            parts = tuple(_merged(_chatml(said, given, add_generation_prompt)))
        else:
            parts = self._render(said, given, add_generation_prompt, reader.n_bytes)
        if self.add_bos and self.bos_token and not (parts and parts[0][1] and parts[0][0].startswith(self.bos_token)):
            parts = tuple(_merged(((self.bos_token, True), *parts)))
        return Prompt(parts)

    def _render(
        self, messages: list[dict[str, Any]], arguments: dict[str, Any], add_generation_prompt: bool, n_bytes: int
    ) -> tuple[tuple[str, bool], ...]:
        complete_site()
        from reflex_ipc.template import compile_template, render
        from reflex_ipc.template_text import Budget, Marked, parts

        for message in messages:
            # One of six words that stand here: `'<|' + message.role + '|>'` may make a control token, nothing else can.
            if message["role"] in _ROLES:
                message["role"] = Marked(message["role"])
        variables = {
            **arguments,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "bos_token": Marked(self.bos_token),
            "eos_token": Marked(self.eos_token),
        }
        try:
            if self._code is None:
                self._code = compile_template(self._source)
            return parts(render(self._code, variables, Budget(n_bytes)))
        except TemplateError as error:
            raise TemplateError(f"the file's chat template ({self.name}): {error}") from None


def _chatml(
    messages: list[dict[str, Any]], arguments: dict[str, Any], add_generation_prompt: bool
) -> Iterator[tuple[str, bool]]:
    if arguments.get("tools") or any(message.get("tool_calls") for message in messages):
        raise TemplateError("the file has no chat template, and the ChatML used instead knows no tools")
    for message in messages:
        yield "<|im_start|>", True
        yield message["role"], message["role"] in _ROLES
        yield "\n", True
        yield message.get("content") or "", False
        yield "<|im_end|>\n", True
    if add_generation_prompt:
        yield "<|im_start|>assistant\n", True


def _merged(parts: Iterable[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """The same parts without empty ones, neighbours of one kind joined."""
    pending: list[str] = []
    kind = True
    for text, flag in parts:
        if flag != kind and pending:
            yield "".join(pending), kind
            pending.clear()
        if text:
            kind = flag
            pending.append(text)
    if pending:
        yield "".join(pending), kind


class _Reader:
    """Checks what a request holds and makes a copy of plain JSON values. `n_bytes`: what its texts take."""

    def __init__(self) -> None:
        self.n_bytes = 0

    def messages(self, messages: object) -> list[dict[str, Any]]:
        if not isinstance(messages, (list, tuple)) or not messages:
            _fail("messages", "has to be a list of at least one message")
        return [self._message(f"messages[{i}]", message) for i, message in enumerate(messages)]

    def arguments(self, arguments: object) -> dict[str, Any]:
        for name in _SET_HERE:
            if isinstance(arguments, dict) and name in arguments:
                _fail(f"template_arguments.{name}", "is set by the program, not by the request")
        return self._object("template_arguments", arguments)

    def _message(self, where: str, message: object) -> dict[str, Any]:
        fields = _fields(
            where, message, ("role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"), ("role",)
        )
        checked: dict[str, Any] = {}
        for field, value in fields.items():
            at = f"{where}.{field}"
            if field == "role":
                checked[field] = self._text(at, value)
            elif field == "content":
                checked[field] = self._content(at, value)
            elif field == "tool_calls":
                checked[field] = None if value is None else self._tool_calls(at, value)
            else:
                checked[field] = None if value is None else self._text(at, value)
        if checked.get("content") is None:
            if not checked.get("tool_calls"):
                _fail(f"{where}.content", "is missing; only a message with tool_calls can do without")
            checked["content"] = None
        return checked

    def _content(self, where: str, content: object) -> str | None:
        if content is None:
            return None
        if not isinstance(content, list):
            return self._text(where, content, "has to be a text or a list of text parts")
        texts = []
        for i, part in enumerate(content):
            fields = _fields(f"{where}[{i}]", part, ("type", "text"), ("type", "text"))
            if fields["type"] != "text":
                _fail(f"{where}[{i}].type", "has to be 'text'; images and sound are not supported")
            texts.append(self._text(f"{where}[{i}].text", fields["text"]))
        return "".join(texts)

    def _tool_calls(self, where: str, calls: object) -> list[dict[str, Any]]:
        """The calls: {"function": {"name", "arguments"}} or {"name", "arguments"}, where arguments may be JSON text."""
        if not isinstance(calls, list):
            _fail(where, "has to be a list of calls")
        checked = []
        for i, call in enumerate(calls):
            at = f"{where}[{i}]"
            fields = _fields(at, call, ("id", "type", "function", "name", "arguments"), ())
            if ("function" in fields) == ("name" in fields):
                _fail(at, "has to have either function or name")
            if "function" in fields:
                function = _fields(f"{at}.function", fields["function"], ("name", "arguments"), ("name",))
                fields = {**fields, "function": self._function(f"{at}.function", function)}
            checked.append(self._function(at, fields))
        return checked

    def _function(self, where: str, fields: dict[str, Any]) -> dict[str, Any]:
        for field in ("id", "type", "name"):
            if field in fields:
                fields = {**fields, field: self._text(f"{where}.{field}", fields[field])}
        if "arguments" in fields:
            at, value = f"{where}.arguments", fields["arguments"]
            if not isinstance(value, (str, dict)):
                _fail(at, "has to be an object, or its JSON text")
            fields = {**fields, "arguments": self._value(at, value, 0)}
        return fields

    def _object(self, where: str, value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            _fail(where, "has to be an object")
        return self._value(where, value, 0)  # type: ignore[no-any-return]

    def _value(self, where: str, value: object, depth: int) -> Any:
        """A copy of a JSON value in plain types."""
        if isinstance(value, str):
            return self._text(where, value)
        if isinstance(value, (dict, list)):
            self.n_bytes += getsizeof(value)
            if depth == MAX_DEPTH:
                _fail(where, f"is nested more than {MAX_DEPTH} levels deep")
            if isinstance(value, list):
                return [self._value(f"{where}[{i}]", item, depth + 1) for i, item in enumerate(value)]
            return {
                self._text(f"a key of {where}", key): self._value(f"{where}.{key}", item, depth + 1)
                for key, item in value.items()
            }
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            if value.bit_length() > _MAX_INTEGER_BITS:
                _fail(where, "is too large a number")
            return int(value)
        if isinstance(value, float):
            if value - value != 0:
                _fail(where, "is not a finite number")
            return float(value)
        return _fail(where, f"has a value of Python's type {type(value).__name__}, which JSON does not have")

    def _text(self, where: str, value: object, wanted: str = "has to be a text") -> str:
        if not isinstance(value, str):
            _fail(where, wanted)
        text = str.__str__(value)
        self.n_bytes += getsizeof(text)
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                half = ord(text[error.start])
                _fail(where, f"holds U+{half:04X} at {error.start}, half of a surrogate pair, which is no character")
        return text


def _fields(where: str, value: object, known: tuple[str, ...], needed: tuple[str, ...]) -> dict[str, Any]:
    """The value, as an object that has the needed fields and none but the known ones."""
    if not isinstance(value, dict):
        _fail(where, "has to be an object")
    for field in value:
        if field not in known:
            _fail(f"{where}.{field}", f"is an unknown field; known are {', '.join(known)}")
    for field in needed:
        if field not in value:
            _fail(f"{where}.{field}", "is missing")
    return value


def _fail(where: str, what: str) -> NoReturn:
    field = ascii(where)[1:-1]
    shown = field if len(field) <= 200 else field[:200] + "..."
    raise InvalidRequestError(f"{shown} {what}", shown)
