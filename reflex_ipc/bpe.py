"""Byte-pair merging, and the letters that byte-level vocabularies write bytes with.

A *symbol* is what is being merged, in the file's own spelling: the UTF-8 of the letters that stand for its bytes. So a
merge is looked up as it stands in the file, `left + b" " + right`, and a finished symbol is a token's text; neither
list has to be decoded first.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, repeat

from reflex_ipc.errors import InvalidRequestError, ModelFileError, Watch
from reflex_ipc.gguf_header import StringArray

_NO_RANK = 1 << 62
_CANDIDATE = 5  # looking for a merge costs as much as looking at this many strings
_PATIENCE = 1.0  # search until that has cost as much as the dictionaries do: as looking at so many times all strings
_FIRST_BLOCK = 1 << 12  # strings searched before anything is decided by them
_NEAR = 256  # tokens looked at from where one is likely
_CACHED_PIECES = 1 << 16
_BETWEEN_LOOKS = 4096  # merges; a few milliseconds
_AT_ONCE = 8192  # pieces; some ten milliseconds if all are new
_SHORT = 64  # symbols; from about here on a heap of the pairs is faster than looking at all of them
_LONG = 1 << 16  # symbols; what is done to so many takes some ten milliseconds
_CACHED_LENGTH = 64  # characters; longer pieces do not come back


def _letters() -> list[str]:
    """GPT-2's table: a byte that prints in Latin-1 is its own letter, the others are U+0100, U+0101, ... in order."""
    own = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in own else next(spare)) for byte in range(256)]


LETTERS = _letters()
"""The letter of each byte."""

SYMBOLS = [letter.encode() for letter in LETTERS]
"""The symbol of each byte."""

BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}
"""The byte of each letter."""


def merge(symbols: Sequence[bytes], ranks: Mapping[bytes, int], watch: Watch | None = None) -> list[bytes]:
    """Merges the neighbouring pair of lowest rank, the leftmost of equals, until no pair has a rank.

    `watch` is called now and then, if there is much to do.
    """
    return _merge_short(symbols, ranks) if len(symbols) <= _SHORT else _merge_long(symbols, ranks, watch)


def _merge_short(symbols: Sequence[bytes], ranks: Mapping[bytes, int]) -> list[bytes]:
    """As the definition has it. Looking through all pairs for the lowest takes the square of the length, but little."""
    rank = ranks.get
    merged = list(symbols)
    pairs = [rank(a + b" " + b, _NO_RANK) for a, b in pairwise(merged)]  # of each symbol with the next
    while pairs and (lowest := min(pairs)) != _NO_RANK:
        i = pairs.index(lowest)
        del pairs[i]
        merged[i] = symbol = merged[i] + merged.pop(i + 1)
        if i < len(pairs):
            pairs[i] = rank(symbol + b" " + merged[i + 1], _NO_RANK)
        if i > 0:
            pairs[i - 1] = rank(merged[i - 1] + b" " + symbol, _NO_RANK)
    return merged


def _merge_long(symbols: Sequence[bytes], ranks: Mapping[bytes, int], watch: Watch | None) -> list[bytes]:
    """With the pairs in a heap, so n symbols cost O(n log n): a piece can be as long as the text, if that is one word.

    `watch` is called once, and again while that goes on.
    """
    n = len(symbols)
    rank = ranks.get
    left = list(symbols)  # what has been merged into its neighbour on the left becomes b""
    pairs: list[int] = []  # of each symbol with the next
    heap: list[int] = []  # in order of rank, then of place
    for start in range(0, n, _LONG):
        if start and watch is not None:
            watch()
        some = [rank(a + b" " + b, _NO_RANK) for a, b in pairwise(left[start : start + _LONG + 1])]
        heap += [pair * n + i for i, pair in enumerate(some, start) if pair != _NO_RANK]
        pairs += some
    pairs.append(_NO_RANK)
    before = list(range(-1, n - 1))
    after = list(range(1, n + 1))
    if n > _LONG and watch is not None:
        watch()
    heapq.heapify(heap)
    while heap:
        if watch is not None:
            watch()
        for _ in range(min(len(heap), _BETWEEN_LOOKS)):
            pair, i = divmod(heapq.heappop(heap), n)
            if pairs[i] != pair:  # one of the two has been merged with another since
                continue
            j = after[i]
            k = after[i] = after[j]
            h = before[i]
            left[i] = merged = left[i] + left[j]
            left[j] = b""
            pairs[i] = pairs[j] = _NO_RANK
            if k < n:
                before[k] = i
                pairs[i] = pair = rank(merged + b" " + left[k], _NO_RANK)
                if pair != _NO_RANK:
                    heapq.heappush(heap, pair * n + i)
            if h >= 0:
                pairs[h] = pair = rank(left[h] + b" " + merged, _NO_RANK)
                if pair != _NO_RANK:
                    heapq.heappush(heap, pair * n + h)
    return [symbol for symbol in left if symbol]


def candidates(symbols: Sequence[bytes]) -> set[bytes]:
    """Every merge that merging these symbols could ask for: of any two neighbouring stretches of them."""
    text = b"".join(symbols)
    borders = [0]
    for symbol in symbols:
        borders.append(borders[-1] + len(symbol))
    return {
        text[first:middle] + b" " + text[middle:last]
        for m, middle in enumerate(borders)
        for first in borders[:m]
        for last in borders[m + 1 :]
    }


def n_candidates(n: int) -> int:
    """An upper bound of `len(candidates(symbols))` for n symbols: the ways to choose three borders in order."""
    return (n + 1) * n * (n - 1) // 6


class BytePairs:
    """The tokens and merges of a file, and with them pieces of text to ids.

    A cold start has one short prompt to encode. Its pieces can ask for some hundred merges at most, so those are looked
    for in the file's list, from the front, where the frequent ones are, as far as is needed; then the tokens likewise.
    Dictionaries of both lists are made for a long text, or once searching for short ones has cost as much. With them, a
    list that makes no sense is refused: equal tokens, a merge that is not two symbols. (Until then one of the equal
    tokens counts.)
    """

    __slots__ = ("_cache", "_ids", "_ignore_merges", "_merges", "_path", "_ranks", "_tokens", "_work", "dropped")

    def __init__(self, path: str, tokens: StringArray, merges: StringArray, ignore_merges: bool) -> None:
        self._path = path  # for messages
        self._tokens = tokens
        self._merges = merges
        self._ignore_merges = ignore_merges
        self._ids: dict[bytes, int] = {}  # of all tokens, once made
        self._ranks: dict[bytes, int] = {}  # of all merges, once made
        self._work = 0  # of searching so far, in strings looked at
        self._cache: dict[str, list[int]] = {}
        self.dropped: set[int] = set()
        """The bytes that no token of the file has and that were lost from a text; so other engines do too."""

    def encode(self, pieces: Iterable[str | int], watch: Watch | None = None) -> list[int]:
        """The ids of all pieces; what is an id already stays one.

        `watch` is called now and then, if there is much to do. Raises InvalidRequestError for half a character.
        """
        pieces = list(pieces)
        if len(pieces) <= _AT_ONCE:
            return self._encode_some(pieces, watch)
        ids: list[int] = []
        for start in range(0, len(pieces), _AT_ONCE):
            if watch is not None:
                watch()
            ids += self._encode_some(pieces[start : start + _AT_ONCE], watch)
        return ids

    def _encode_some(self, pieces: list[str | int], watch: Watch | None) -> list[int]:
        cache = self._cache
        new = {piece: _symbols(piece) for piece in pieces if isinstance(piece, str) and piece not in cache}
        if new:
            cache.update(self._encode_new(new, watch))
        ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
            else:
                ids += cache[piece]
        if len(cache) > _CACHED_PIECES:
            cache.clear()
        else:
            for piece in new:
                if len(piece) > _CACHED_LENGTH:
                    del cache[piece]
        return ids

    @property
    def is_prepared(self) -> bool:
        """Whether there are dictionaries."""
        return bool(self._ids)

    def prepare(self) -> None:
        """Makes the dictionaries. Raises ModelFileError."""
        if self.is_prepared:
            return
        tokens, merges = self._tokens.raw, self._merges.raw
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
        if len(ids) < len(tokens):
            i = next(i for i, token in enumerate(tokens) if ids[token] != i)
            j = ids[tokens[i]]
            raise ModelFileError(
                f"{self._path}: key 'tokenizer.ggml.tokens': entries {i} and {j} are both {tokens[i][:64]!r}"
            )
        if min(map(bytes.find, merges, repeat(b" "), repeat(1)), default=1) < 0:
            i = next(i for i, merge in enumerate(merges) if merge.find(b" ", 1) < 0)
            raise ModelFileError(
                f"{self._path}: key 'tokenizer.ggml.merges': entry {i} is {merges[i][:64]!r}, not two symbols with a "
                "space between"
            )
        # Of equal merges the first counts, hence backwards.
        self._ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
        self._ids = ids

    def _encode_new(self, pieces: dict[str, list[bytes]], watch: Watch | None) -> dict[str, list[int]]:
        if not self.is_prepared:
            self._work += _CANDIDATE * sum(n_candidates(len(symbols)) for symbols in pieces.values())
            if self._work <= _PATIENCE * (len(self._tokens) + len(self._merges)):
                return self._search(pieces)
            self.prepare()
        found, ranks = self._ids, self._ranks
        whole = self._whole(pieces, found) if self._ignore_merges else {}
        return whole | {
            piece: self._symbol_ids(merge(symbols, ranks, watch), found)
            for piece, symbols in pieces.items()
            if piece not in whole
        }

    def _search(self, pieces: dict[str, list[bytes]]) -> dict[str, list[int]]:
        """`_encode_new` without the dictionaries.

        Merging with the first n merges only is how merging with all of them begins; a piece that is one symbol by then
        is done, and the rest of the list matters to the others alone.
        """
        whole: dict[str, list[int]] = {}
        if self._ignore_merges:
            whole = self._whole(pieces, self._find({b"".join(symbols) for symbols in pieces.values()}, {}))
        merged = {piece: symbols for piece, symbols in pieces.items() if piece not in whole}
        ranks: dict[bytes, int] = {}
        blocks = self._blocks(self._merges)
        while unfinished := [piece for piece, symbols in merged.items() if len(symbols) > 1]:
            first, block = next(blocks, (0, []))
            if not block:
                break
            wanted = {candidate for piece in unfinished for candidate in candidates(merged[piece])}
            for rank, text in [(rank, text) for rank, text in enumerate(block, first) if text in wanted]:
                ranks.setdefault(text, rank)
            for piece in unfinished:
                merged[piece] = merge(merged[piece], ranks)
        found = self._find({symbol for symbols in merged.values() for symbol in symbols}, ranks)
        return whole | {piece: self._symbol_ids(symbols, found) for piece, symbols in merged.items()}

    def _find(self, wanted: set[bytes], ranks: Mapping[bytes, int]) -> dict[bytes, int]:
        """The ids of those of `wanted` that are tokens.

        Most files have the tokens in the order of the merges that make them, some with a few tokens in between that no
        merge makes. So once one token is found, its distance from its merge says where to look for the others.
        """
        makers = {text.replace(b" ", b"", 1): rank for text, rank in ranks.items()}
        found: dict[bytes, int] = {}
        for first, block in self._blocks(self._tokens):
            for id, text in [(id, text) for id, text in enumerate(block, first) if text in wanted]:
                found.setdefault(text, id)
            distance = next((id - makers[text] for text, id in found.items() if text in makers), None)
            if distance is not None:
                for text in [text for text in wanted if text in makers and text not in found]:
                    likely = max(0, makers[text] + distance)
                    near = self._tokens.cut(likely, min(likely + _NEAR, len(self._tokens)))
                    if text in near:
                        found[text] = likely + near.index(text)
            if len(found) == len(wanted):
                break
        return found

    def _blocks(self, strings: StringArray) -> Iterator[tuple[int, list[bytes]]]:
        """The strings in growing blocks, each with its place; what is not asked for is not cut out of the file."""
        first, size = 0, _FIRST_BLOCK
        while first < len(strings):
            block = strings.cut(first, min(first + size, len(strings)))
            self._work += len(block)
            yield first, block
            first += size
            size *= 2

    def _whole(self, pieces: dict[str, list[bytes]], found: Mapping[bytes, int]) -> dict[str, list[int]]:
        """The pieces that are tokens as they are."""
        texts = {piece: b"".join(symbols) for piece, symbols in pieces.items()}
        return {piece: [found[text]] for piece, text in texts.items() if text in found}

    def _symbol_ids(self, symbols: Iterable[bytes], found: Mapping[bytes, int]) -> list[int]:
        """The ids of symbols. One that is no token becomes the tokens of its bytes; a byte without a token is lost."""
        ids = []
        for symbol in symbols:
            if symbol in found:
                ids.append(found[symbol])
                continue
            letters = [letter.encode() for letter in symbol.decode()]
            single = self._ids or self._find(set(letters), {})
            ids += [single[letter] for letter in letters if letter in single]
            self.dropped.update(BYTES[letter.decode()] for letter in letters if letter not in single)
        return ids


def _symbols(piece: str) -> list[bytes]:
    try:
        return [SYMBOLS[byte] for byte in piece.encode()]
    except UnicodeEncodeError as error:
        code = ord(piece[error.start])
        message = f"the text holds U+{code:04X}, half of a surrogate pair, which is no character"
        raise InvalidRequestError(message) from None
