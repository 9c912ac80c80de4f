"""The strings of a chat template: who wrote each character, and how much of them there may be.

A rendering mixes text of the template, where control tokens are recognised, with text of the messages, where they
never are. Which is which is known while the template runs, and lost once it has run: `'<|im_end|>'` out of a message
looks like the template's own. So the template's constants enter its code as `Marked`, strings that carry the spans the
template wrote, and the operations of this module hand the spans on, character by character.

Everything else yields an ordinary `str`: the methods that `Marked` inherits, filters, formatting and joining in C code.
An ordinary `str` is content. What nobody accounted for is therefore content, and the worst that an operation forgotten
here can do is to leave a control token of the template unrecognised. The reverse has one rule to keep: no operation may
hand out its argument's object where the text came from somewhere else (`str.partition` does, with its separator), so
arguments are made ordinary before C code sees them.

A template is a program out of a file, so every operation also says beforehand how long its result can be, and charges
what it made and how long it worked to a `Budget`.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from sys import getsizeof
from typing import Any

from reflex_ipc.errors import TemplateError

MAX_CHARS = 1 << 24
"""The longest string a template may build, the prompt included."""
MAX_PIECES = 1 << 20
"""The most items a string may be split into."""
MAX_BYTES = 1 << 26
"""What one rendering may allocate in all, besides BYTES_PER_BYTE for each byte it was given."""
BYTES_PER_BYTE = 32
MAX_SECONDS = 2.0
"""Processor time of one rendering."""

_MAX_WORK = 1 << 30
_FUEL = 1 << 20
_STEP = 256
_SPAN_BYTES = 256
_PIECE_BYTES = 64

Span = tuple[int, int]


class Budget:
    """What one rendering may still use. Work is counted in characters looked at, about a nanosecond each."""

    __slots__ = ("_bytes", "_deadline", "_fuel")

    def __init__(self, input_bytes: int = 0) -> None:
        self._bytes = MAX_BYTES + BYTES_PER_BYTE * input_bytes
        self._deadline = time.thread_time() + MAX_SECONDS
        self._fuel = _FUEL

    def spend(self, work: int = 0) -> None:
        """Account for one operation that looks at `work` characters; now and then this reads the clock."""
        if work > _MAX_WORK:
            raise TemplateError("one operation of the template would take too long")
        self._fuel -= work + _STEP
        if self._fuel < 0:
            if time.thread_time() > self._deadline:
                raise TemplateError(f"the template ran longer than {MAX_SECONDS:g} s; it may never end")
            self._fuel = _FUEL

    def hold(self, size: int) -> None:
        """Account for `size` bytes."""
        self._bytes -= size
        if self._bytes < 0:
            raise TemplateError("the template takes too much memory")
        self.spend(size)

    def room(self, chars: int) -> None:
        """Refuse a string of that length before it is made."""
        if chars > MAX_CHARS:
            raise TemplateError(f"the template builds a text longer than {MAX_CHARS} characters")

    def keep(self, text: str) -> str:
        """Account for a string that was made."""
        if len(text) > MAX_CHARS:
            self.room(len(text))
        self.hold(getsizeof(text) + _SPAN_BYTES * len(spans(text)))
        return text


class Marked(str):
    """A string with the spans (start, stop) that the template wrote: in order, not empty, not touching each other."""

    __slots__ = ("_spans",)
    _spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: tuple[Span, ...] | None = None) -> "Marked":
        self = super().__new__(cls, text)
        self._spans = (((0, len(text)),) if text else ()) if spans is None else spans
        return self

    def __str__(self) -> str:
        return self


def spans(text: str) -> tuple[Span, ...]:
    """The spans of a string that the template wrote."""
    return text._spans if type(text) is Marked else ()


def plain(value: Any) -> Any:
    """A marked string without its marks; any other value as it is."""
    return str.__str__(value) if type(value) is Marked else value


def is_written(text: str) -> bool:
    """Whether the template wrote all of it; of nothing it wrote all."""
    return not text or spans(text) == ((0, len(text)),)


def like(result: str, *sources: str) -> str:
    """The result of an operation that mixes its sources' characters: the template's if it wrote all of them."""
    return Marked(result) if result and all(map(is_written, sources)) else plain(result)


def cut(text: str, start: int, stop: int) -> str:
    """text[start:stop] for 0 <= start and stop <= len(text)."""
    piece = str.__getitem__(text, slice(start, stop))
    found = []
    if type(text) is Marked and piece:
        i = max(bisect_right(text._spans, (start, start)) - 1, 0)
        while i < len(text._spans) and text._spans[i][0] < stop:
            first, last = text._spans[i]
            if last > start:
                found.append((max(first, start) - start, min(last, stop) - start))
            i += 1
    return Marked(piece, tuple(found)) if found else piece


def join(pieces: Sequence[str]) -> str:
    """The pieces, one after the other."""
    text = "".join(pieces)
    found: list[Span] = []
    at = 0
    for piece in pieces:
        for first, last in spans(piece):
            if found and found[-1][1] == at + first:
                found[-1] = (found[-1][0], at + last)
            else:
                found.append((at + first, at + last))
        at += len(piece)
    return Marked(text, tuple(found)) if found else text


def parts(text: str) -> tuple[tuple[str, bool], ...]:
    """The string as (text, whether the template wrote it), in order, alternating."""
    borders = sorted({0, len(text), *(border for span in spans(text) for border in span)})
    first_is_written = any(first == 0 for first, _ in spans(text)[:1])
    return tuple(
        (str.__getitem__(text, slice(start, stop)), first_is_written != bool(i % 2))
        for i, (start, stop) in enumerate(pairwise(borders))
    )


def concat(budget: Budget, pieces: Iterable[str]) -> str:
    """`"".join(pieces)`, and the same complaint if one of them is no string."""
    taken = []
    total = 0
    for i, piece in enumerate(pieces):
        if not isinstance(piece, str):
            raise TypeError(f"sequence item {i}: expected str instance, {type(piece).__name__} found")
        budget.hold(_PIECE_BYTES)
        total += len(piece)
        budget.room(total)
        taken.append(piece)
    return budget.keep(join(taken))


def repeat(budget: Budget, text: str, times: int) -> str:
    budget.room(len(text) * times)
    return budget.keep(like(plain(text) * times, text))


# The methods of str that a template may call, by name. Each takes a budget and the string, then what the method takes.


def _search(method: Callable[..., Any], scale: bool = False) -> Callable[..., Any]:
    """A method that answers a question about the string. `scale`: its worst case is length times length."""

    def run(budget: Budget, text: str, *args: Any) -> Any:
        sizes = [len(arg) for arg in args if isinstance(arg, (str, tuple))]
        budget.spend(len(text) * max(sizes, default=1) if scale else len(text) + sum(sizes))
        return method(text, *args)

    return run


def _change(method: Callable[[str], str]) -> Callable[..., str]:
    """A method without arguments that rewrites the string; some characters become three."""

    def run(budget: Budget, text: str) -> str:
        budget.spend(8 * len(text))
        return budget.keep(like(method(plain(text)), text))

    return run


def _pad(method: Callable[..., str]) -> Callable[..., str]:
    def run(budget: Budget, text: str, width: int, *fill: str) -> str:
        budget.room(width)
        return budget.keep(like(method(plain(text), width, *map(plain, fill)), text, *fill))

    return run


def _strip(left: bool, right: bool) -> Callable[..., str]:
    def run(budget: Budget, text: str, chars: str | None = None) -> str:
        ordinary, chars = plain(text), plain(chars)
        budget.spend(len(text) * len(chars or " "))
        start = len(text) - len(ordinary.lstrip(chars)) if left else 0
        stop = len(ordinary.rstrip(chars)) if right else len(text)
        return budget.keep(cut(text, start, max(start, stop)))

    return run


def _split(method: Callable[..., list[str]]) -> Callable[..., list[str]]:
    def run(budget: Budget, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
        ordinary, sep = plain(text), plain(sep)
        budget.spend(len(text) * (len(sep) if sep and method is str.rsplit else 1))
        pieces = method(ordinary, sep, MAX_PIECES if maxsplit < 0 else min(maxsplit, MAX_PIECES))
        if len(pieces) > MAX_PIECES:
            raise TemplateError(f"the template splits a text into more than {MAX_PIECES} pieces")
        if sep is None:
            pieces = [like(piece, text) for piece in pieces]
        elif type(text) is Marked:
            return [budget.keep(piece) for piece in _cuts(text, pieces, len(sep))]
        return [budget.keep(piece) for piece in pieces]

    return run


def _splitlines(budget: Budget, text: str, keepends: bool = False) -> list[str]:
    ordinary = plain(text)
    if sum(map(ordinary.count, "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029")) > MAX_PIECES:
        raise TemplateError(f"the template splits a text into more than {MAX_PIECES} lines")
    lines = _cuts(text, ordinary.splitlines(True), 0)
    if not keepends:
        lines = (cut(line, 0, len(bare)) for line, bare in zip(lines, ordinary.splitlines(), strict=True))
    return [budget.keep(line) for line in lines]


def _cuts(text: str, pieces: Iterable[str], gap: int) -> Iterator[str]:
    """The same pieces cut out of the text, where they follow each other with a gap in between."""
    at = 0
    for piece in pieces:
        yield cut(text, at, at + len(piece))
        at += len(piece) + gap


def _partition(method: Callable[[str, str], tuple[str, str, str]]) -> Callable[..., tuple[str, ...]]:
    def run(budget: Budget, text: str, sep: str) -> tuple[str, ...]:
        ordinary, sep = plain(text), plain(sep)
        budget.spend(len(text) * (len(sep) if method is str.rpartition else 1))
        return tuple(budget.keep(piece) for piece in _cuts(text, method(ordinary, sep), 0))

    return run


def _removeprefix(budget: Budget, text: str, prefix: str) -> str:
    return budget.keep(cut(text, len(text) - len(plain(text).removeprefix(plain(prefix))), len(text)))


def _removesuffix(budget: Budget, text: str, suffix: str) -> str:
    return budget.keep(cut(text, 0, len(plain(text).removesuffix(plain(suffix)))))


def _expandtabs(budget: Budget, text: str, tabsize: int = 8) -> str:
    ordinary = plain(text)
    budget.room(len(text) + ordinary.count("\t") * max(tabsize, 0))
    return budget.keep(like(ordinary.expandtabs(tabsize), text))


def _join(budget: Budget, text: str, pieces: Iterable[str]) -> str:
    def interleaved() -> Iterator[str]:
        for i, piece in enumerate(pieces):
            if i:
                yield text
            yield piece

    return concat(budget, interleaved())


def replace(budget: Budget, text: str, old: str, new: str, count: int = -1) -> str:
    """str.replace."""
    ordinary, old = plain(text), plain(old)
    found = ordinary.count(old)
    times = found if count < 0 else min(count, found)
    budget.spend(len(text))
    budget.room(len(text) + times * max(len(new) - len(old), 0))
    if not old:
        return budget.keep(like(ordinary.replace(old, plain(new), count), text, new))
    if times == 0:
        return text
    if type(text) is not Marked and type(new) is not Marked:
        return budget.keep(ordinary.replace(old, new, count))
    if times > MAX_PIECES:
        raise TemplateError(f"the template replaces more than {MAX_PIECES} times")
    return _join(budget, new, _cuts(text, ordinary.split(old, times), len(old)))


_QUESTIONS = (
    "count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable "
    "isspace istitle isupper startswith"
)

METHODS: dict[str, Callable[..., Any]] = {
    **{name: _search(getattr(str, name)) for name in _QUESTIONS.split()},
    **{name: _search(getattr(str, name), scale=True) for name in ("rfind", "rindex")},
    **{name: _change(getattr(str, name)) for name in ("capitalize", "casefold", "lower", "swapcase", "title", "upper")},
    **{name: _pad(getattr(str, name)) for name in ("center", "ljust", "rjust", "zfill")},
    "strip": _strip(True, True),
    "lstrip": _strip(True, False),
    "rstrip": _strip(False, True),
    "split": _split(str.split),
    "rsplit": _split(str.rsplit),
    "splitlines": _splitlines,
    "partition": _partition(str.partition),
    "rpartition": _partition(str.rpartition),
    "removeprefix": _removeprefix,
    "removesuffix": _removesuffix,
    "expandtabs": _expandtabs,
    "join": _join,
    "replace": replace,
}
