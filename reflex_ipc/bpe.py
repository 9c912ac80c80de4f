"""Byte-pair merging, and the letters that byte-level vocabularies write bytes with.

A *symbol* is what is being merged, in the file's own spelling: the UTF-8 of the letters that stand for its bytes. So a
merge is looked up as it stands in the file, `left + b" " + right`, and a finished symbol is a token's text; neither
list has to be decoded first.
"""

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

_NO_RANK = 1 << 62


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


def merge(symbols: Sequence[bytes], ranks: Mapping[bytes, int]) -> list[bytes]:
    """Merges the neighbouring pair of lowest rank, the leftmost of equals, until no pair has a rank.

    Keeps the pairs in a heap, so n symbols cost O(n log n): a piece can be as long as the text, if that is one word.
    """
    n = len(symbols)
    rank = ranks.get
    left = list(symbols)  # what has been merged into its neighbour on the left becomes b""
    before = list(range(-1, n - 1))
    after = list(range(1, n + 1))
    pairs = [rank(a + b" " + b, _NO_RANK) for a, b in pairwise(left)]  # of each symbol with the next
    pairs.append(_NO_RANK)
    heap = [pair * n + i for i, pair in enumerate(pairs) if pair != _NO_RANK]  # in order of rank, then of place
    heapq.heapify(heap)
    while heap:
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


def n_candidates(n: int) -> int:
    """An upper bound of `len(candidates(symbols))` for n symbols: the ways to choose three borders in order."""
    return (n + 1) * n * (n - 1) // 6


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
