"""From text to pieces: NFC where the models use it, and the split rules that `tokenizer.ggml.pre` names.

The rules are the published regular expressions. They need Unicode classes, which `re` lacks and whose content must not
depend on the interpreter, so they run over a *shadow* of the text: every character outside ASCII is replaced by one
that stands for its class, and the spans that match there cut the text itself. ASCII text is its own shadow, so the
tables of Unicode are not even imported for it.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from reflex_ipc.errors import Watch

_CLASSES = (
    "OLMNPSW"  # a character's stand-in is 0x80 + its index here + 8 for its first named set, 16 for its second...
)
_ASCII = {
    "L": "A-Za-z",
    "M": "",
    "N": "0-9",
    "P": r"!-#%-*,-/:;?@\[-\]_{}",
    "S": r"$+<->\^`|~",
    "W": r"\t-\r ",
}

_LONG_RUN = 1000
_LONG_TEXT = 1 << 18  # characters; splitting so many takes some ten milliseconds
_SEGMENT = 1 << 16
_MARKS = 64  # in a row; more are looked through for no place to cut

# Between the two characters that one of these finds a text may be cut: its pieces are those of the two parts. No rule
# has a match that goes on from the first to the second; every set of rules has a match for the first (what none matches
# goes on); what begins at the second does not depend on what is before it; and it composes with nothing.
# Left out is, before a space, what "deepseek-llm" or "deepseek-coder" have no match for: symbols, and letters of
# scripts that are neither cased nor in their Asian range (as Hebrew, Arabic). Before punctuation: marks, which most
# rules take for punctuation, and so letters that NFC makes a letter and a mark of.
_HAN = "\u4e00-\u9fa5"
_KANA = "\u3041-\u3096\u30a1-\u30fa\u30fc-\u30fe"
_LETTERS = (
    "0-9A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u00ff\u0391-\u03a1\u03a3-\u03a9\u03b1-\u03c9\u0401\u0410-\u044f\u0451"
    "\u0904-\u0939\u0e01-\u0e30\u0e32\u0e33\u0e40-\u0e46\uac00-\ud7a3" + _KANA + _HAN
)
_BORDER = (
    rf"[{_LETTERS}](?=[\t-\r !-/:-@\[-`{{-~])"
    r"|[\u05d0-\u05ea\u0620-\u064a](?=[\n\r!-/:-@\[-`{-~])"
    rf"|[{_KANA}{_HAN}](?=[\u3001\u3002\uff01\uff0c\uff1a\uff1b\uff1f])"
    r"|[!-#%-*,-/:;?@\[-\]_{}\u0900-\u097f\u0e01-\u0e3a\u0e3f-\u0e5b\u3099-\u30ff](?= )"
)

_Item = TypeVar("_Item")

_Ranges = tuple[tuple[int, int], ...]


def _ranges(text: str) -> _Ranges:
    """Ranges of code points from `41-5A B5 ...`."""
    pairs = (word.partition("-") for word in text.split())
    return tuple((int(first, 16), int(last or first, 16)) for first, _, last in pairs)


_SETS: dict[str, tuple[str, _Ranges]] = {  # name: (its ASCII part, the rest)
    # `(?i:s)` also matches the long s
    "long_s": ("", _ranges("17F")),
    "kana_han": ("", _ranges("3040-30FF 4E00-9FA5")),
    "asian": ("", _ranges("800-9FA5 AC00-D7FF")),
    # ":-~" is what the models' own rule says; it takes in all letters
    "marks": ("!-/:-~", _ranges("2018-201F 3000-3002 FF01-FF0F FF1A-FF5E")),
    "cased": (
        "A-Za-z",
        _ranges(
            "B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376-377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 "
            "3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A "
            "1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE "
            "1FC2-1FC4 1FC6-1FCC 1FD0-1FD3 1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D "
            "2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183-2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE "
            "2CF2-2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A "
            "FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2 118A0-118DF 1E900-1E943"
        ),
    ),
}

_CONTRACTION = r"'(?:[sStTmMdD\p{long_s}]|[rRvV][eE]|[lL][lL])"  # (?i:'s|'t|'re|'ve|'m|'ll|'d)
_SPACES = r"[\s]*[\r\n]+|[\s]+(?![^\s])|[\s]+"

# Each rule is applied to the pieces that the one before left. What a rule does not match is a piece too.
_RULES: dict[str, tuple[str, ...]] = {
    "qwen2": (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}]+|[\p{N}]| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,),
    "qwen35": (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|[\p{N}]| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,),
    "llama-bpe": (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}]+|[\p{N}]{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,),
    "gpt-2": (r"'(?:[stmd]|re|ve|ll)| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|[\s]+(?![^\s])|[\s]+",),
    "deepseek-v3": (
        r"[\p{N}]{1,3}",
        r"[\p{kana_han}]+",
        r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    ),
    "deepseek-llm": (
        r"[\r\n]",
        r"[\s]?[\p{cased}]+",
        r"[\s]?[\p{marks}]+",
        r"(?<![\s])[\s]+$",
        r"[\p{asian}]+",
        r"[\p{N}]",
    ),
    "deepseek-coder": (r"[\r\n]", r"[\s]?[\p{L}]+", r"[\s]?[\p{P}]+", r"[\p{asian}]+", r"[\p{N}]"),
}
_RULES["smollm"] = (r"[\p{N}]", *_RULES["gpt-2"])
_RULES["default"] = (r"[\p{P}$+<=>\^~|]+", *_RULES["gpt-2"], r"[\p{N}]+", r"[0-9][0-9][0-9]")


class PreTokenizer:
    """What a value of `tokenizer.ggml.pre` means."""

    __slots__ = ("add_bos", "ignore_merges", "nfc", "rules")

    def __init__(self, rules: str, nfc: bool = False, ignore_merges: bool = False, add_bos: bool = False) -> None:
        self.rules = rules  # the name of the split rules, for `Splitter`
        self.nfc = nfc  # the models' own tokenizer normalises text to NFC first
        self.ignore_merges = ignore_merges  # a piece that is a token stays whole, whatever the merges say
        self.add_bos = add_bos  # a prompt begins with BOS when the file does not say


_LLAMA = PreTokenizer("llama-bpe", ignore_merges=True, add_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer("default"),
    "qwen2": PreTokenizer("qwen2", nfc=True),
    "deepseek-r1-qwen": PreTokenizer("qwen2", nfc=True),
    "qwen35": PreTokenizer("qwen35", nfc=True),
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "falcon3": _LLAMA,
    "midm-2.0": _LLAMA,
    "pixtral": _LLAMA,
    "gpt-2": PreTokenizer("gpt-2"),
    "smollm": PreTokenizer("smollm"),
    "deepseek-v3": PreTokenizer("deepseek-v3"),
    "deepseek-llm": PreTokenizer("deepseek-llm"),
    "deepseek-coder": PreTokenizer("deepseek-coder"),
}
"""The known values of `tokenizer.ggml.pre`."""


class Splitter:
    """Cuts text into the pieces that byte pairs are merged in. The pieces, joined, are the text."""

    __slots__ = ("_rules", "_shadow")

    def __init__(self, rules: str) -> None:
        sources = _RULES[rules]
        sets = [name for name in _SETS if any(rf"\p{{{name}}}" in source for source in sources)]
        self._shadow = _Shadow([_SETS[name][1] for name in sets])
        self._rules = [re.compile(_spell_out(source, sets)) for source in sources]

    def split(self, text: str, watch: Watch | None = None) -> list[str]:
        """`watch` is called now and then, if there is much to do."""
        is_long = len(text) > _LONG_TEXT
        if text.isascii():
            shadow = text
        elif not is_long:
            shadow = text.translate(self._shadow)
        else:
            starts = _watched(range(0, len(text), _SEGMENT), watch)
            shadow = "".join([text[at : at + _SEGMENT].translate(self._shadow) for at in starts])
        if len(self._rules) == 1 and not is_long:  # such a rule leaves nothing unmatched
            matches = self._rules[0].findall(shadow)
            if shadow is text:
                return matches
            return _cut(text, itertools.accumulate(map(len, matches)))
        ends: Iterable[int] = [len(text)] if text else []
        for rule in self._rules:
            ends = _refine(rule, shadow, ends, watch if is_long else None)
        return _cut(text, ends)


def borders(text: str) -> Iterator[int]:
    """Where a text may be cut in two, whatever follows it: its pieces are those of the parts. The last place first."""
    end, size = len(text), 64
    while end > 0:
        start = max(0, end - size)
        for match in reversed(list(re.compile(_BORDER).finditer(text, start, end + 1))):  # with what follows the last
            yield match.end()
        end, size = start, 8 * size


def segments(text: str) -> Iterator[str]:
    """A long text in parts of which each can be normalised and split by itself."""
    start = 0
    while len(text) - start > _LONG_TEXT and (match := re.compile(_BORDER).search(text, start + _SEGMENT)):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:] if start else text


def _watched(items: Iterable[_Item], watch: Watch | None) -> Iterator[_Item]:
    for item in items:
        if watch is not None:
            watch()
        yield item


def _refine(rule: re.Pattern[str], shadow: str, ends: Iterable[int], watch: Watch | None) -> list[int]:
    """The ends of the pieces that `rule` makes of the pieces that end at `ends`: its matches and what is between."""
    refined: list[int] = []
    append = refined.append
    start = 0
    for end in ends if watch is None else _watched(ends, watch):
        matches: Iterable[re.Match[str]] = rule.finditer(shadow, start, end)
        if watch is not None:
            matches = _watched(matches, watch)
        for match in matches:
            first, last = match.span()
            if first > start:
                append(first)
            append(last)
            start = last
        if start < end:
            append(end)
            start = end
    return refined


def _cut(text: str, ends: Iterable[int]) -> list[str]:
    pieces = []
    start = 0
    for end in ends:
        pieces.append(text[start:end])
        start = end
    return pieces


def _spell_out(source: str, sets: list[str]) -> str:
    """A rule with its classes and sets (which stand in brackets only) spelt out for the shadow."""
    extras = range(1 << len(sets))
    members = {
        rf"\p{{{letter}}}": ascii_part + "".join(chr(0x80 + _CLASSES.index(letter) + 8 * extra) for extra in extras)
        for letter, ascii_part in _ASCII.items()
    }
    for k, name in enumerate(sets):
        members[rf"\p{{{name}}}"] = _SETS[name][0] + "".join(
            chr(0x80 + index + 8 * extra) for extra in extras if extra >> k & 1 for index in range(len(_CLASSES))
        )
    members[r"\s"] = members[r"\p{W}"]
    for name, characters in members.items():
        source = source.replace(name, characters)
    return source


class _Shadow(dict[int, int]):
    """code point -> its stand-in, found when first met."""

    __slots__ = ("_sets",)

    def __init__(self, sets: list[_Ranges]) -> None:
        self._sets = sets

    def __missing__(self, code_point: int) -> int:
        stand_in = code_point
        if code_point >= 0x80:
            from reflex_ipc.unicode_tables import general_class

            stand_in = 0x80 + _CLASSES.index(general_class(code_point))
            for k, ranges in enumerate(self._sets):
                if any(first <= code_point <= last for first, last in ranges):
                    stand_in += 8 << k
        self[code_point] = stand_in
        return stand_in


def nfc(text: str, watch: Watch | None = None) -> str:
    """Normalisation form C as the models' own tokenizers compute it: that of Unicode 9.0, whatever the interpreter.

    Later versions of Unicode changed nothing for the characters of 9.0 (a promise of the standard) and only added
    others. Those are inert here, and what stands on their two sides does not interact; so the interpreter's own
    function gives the right answer for each run of characters that could be touched in 9.0.

    `watch` is called now and then, if there is much to do.
    """
    if text.isascii():
        return text
    if len(text) > _LONG_TEXT:
        return "".join([_nfc(part, watch) for part in _watched(_normal_parts(text), watch)])
    return _nfc(text, watch)


def _normal_parts(text: str) -> Iterator[str]:
    """A long text in parts that can be normalised each by itself, as far as it has a place to cut it now and then."""
    from unicodedata import category

    start = 0
    for at in range(_SEGMENT, len(text), _SEGMENT):
        for end in range(at, min(at + _MARKS, len(text))):
            # All that composes with what is before it is a mark, or a vowel or final consonant of Hangul.
            if category(text[end])[0] != "M" and not "\u1161" <= text[end] <= "\u11c2":
                yield text[start:end]
                start = end
                break
    yield text[start:]


def _nfc(text: str, watch: Watch | None) -> str:
    import unicodedata

    if unicodedata.is_normalized("NFC", text):  # then every part of it is, in every version
        return text
    from reflex_ipc.unicode_tables import NORMALISED

    touched = "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in _ranges(NORMALISED))
    return re.sub(f"[{touched}]+", lambda run: _normalise(run[0], watch), text)


def _normalise(run: str, watch: Watch | None) -> str:
    """The interpreter's NFC. It sorts marks by insertion, which takes minutes for a megabyte: hence in order."""
    from unicodedata import combining, normalize

    if len(run) > _LONG_RUN:
        starts = _watched(range(0, len(run), _SEGMENT), watch)
        apart = "".join(["".join([normalize("NFD", c) for c in run[at : at + _SEGMENT]]) for at in starts])
        parts = itertools.groupby(apart, lambda c: combining(c) > 0)
        run = "".join([_in_order(part, combining, watch) if marks else "".join(part) for marks, part in parts])
    return normalize("NFC", run)


def _in_order(marks: Iterator[str], combining: Callable[[str], int], watch: Watch | None) -> str:
    """Sorted by combining class, those of one class as they were."""
    some = sorted(itertools.islice(marks, _SEGMENT), key=combining)
    if len(some) < _SEGMENT:
        return "".join(some)
    by_class: dict[int, list[str]] = {}
    while some:
        if watch is not None:
            watch()
        for kind, same in itertools.groupby(some, combining):
            by_class.setdefault(kind, []).append("".join(same))
        some = sorted(itertools.islice(marks, _SEGMENT), key=combining)
    return "".join(["".join(by_class[kind]) for kind in sorted(by_class)])
