"""Byte-pair merging against the definition, and both ways to find merges against each other."""

import random
import time
from collections.abc import Callable, Mapping

import pytest
from gguf_bytes import STRING, array, build

from reflex_ipc import bpe
from reflex_ipc.bpe import BYTES, LETTERS, SYMBOLS, BytePairs, candidates, merge, n_candidates
from reflex_ipc.errors import InvalidRequestError, ModelFileError
from reflex_ipc.gguf_header import Header, StringArray


def in_a_file(strings: list[bytes]) -> StringArray:
    array_ = Header(build([array("key", STRING, strings)]), "x.gguf").metadata["key"]
    assert isinstance(array_, StringArray)
    return array_


def pairs_of(tokens: list[bytes], merges: list[bytes], ignore_merges: bool = False) -> BytePairs:
    return BytePairs("x.gguf", in_a_file(tokens), in_a_file(merges), ignore_merges)


def merge_plainly(symbols: list[bytes], ranks: Mapping[bytes, int]) -> list[bytes]:
    """The definition: again and again the pair of lowest rank, the leftmost of equals."""
    symbols = list(symbols)
    while True:
        ranked = [
            (ranks[pair], i) for i in range(len(symbols) - 1) if (pair := symbols[i] + b" " + symbols[i + 1]) in ranks
        ]
        if not ranked:
            return symbols
        i = min(ranked)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


def random_merges(rng: random.Random, alphabet: list[bytes], count: int) -> list[bytes]:
    """Merges of known symbols in an order that no training would give: later ones may be needed by earlier ones."""
    known, merges = list(alphabet), []
    for _ in range(count):
        left, right = rng.choice(known), rng.choice(known)
        if len(left + right) <= 12 and left + b" " + right not in merges:
            merges.append(left + b" " + right)
            known.append(left + right)
    rng.shuffle(merges)
    return merges


def test_letters_of_bytes() -> None:
    assert len(set(LETTERS)) == 256
    assert (LETTERS[0x20], LETTERS[0x0A], LETTERS[0x00], LETTERS[0xAD]) == ("Ġ", "Ċ", "Ā", "Ń")
    assert all(LETTERS[byte] == chr(byte) for byte in b"!~azAZ09\xa1\xac\xae\xff")
    assert [BYTES[symbol.decode()] for symbol in SYMBOLS] == list(range(256))


def with_a_heap(symbols: list[bytes], ranks: Mapping[bytes, int]) -> list[bytes]:
    return bpe._merge_long(symbols, ranks, None)


@pytest.mark.parametrize("merging", [bpe._merge_short, with_a_heap])
def test_merge_is_the_definition(merging: Callable[[list[bytes], Mapping[bytes, int]], list[bytes]]) -> None:
    rng = random.Random(0)
    for _ in range(3000):
        alphabet = [b"a", b"b", "Ġ".encode(), b"c"][: rng.randint(1, 4)]
        merges = random_merges(rng, alphabet, rng.randint(0, 30))
        ranks = {text: rank for rank, text in enumerate(merges)}
        symbols = rng.choices(alphabet, k=rng.randint(0, 40))
        assert merging(symbols, ranks) == merge_plainly(symbols, ranks)


def test_short_and_long_pieces_merge_alike() -> None:
    """On both sides of the length from which on there is a heap, whatever is merged and in whatever order."""
    rng = random.Random(3)
    for length in range(bpe._SHORT - 20, bpe._SHORT + 20):
        for _ in range(40):
            alphabet = [b"a", b"b", "Ġ".encode(), b"c"][: rng.randint(1, 4)]
            ranks = {text: rank for rank, text in enumerate(random_merges(rng, alphabet, rng.randint(1, 60)))}
            symbols = rng.choices(alphabet, k=length)
            assert bpe._merge_short(symbols, ranks) == with_a_heap(symbols, ranks) == merge(symbols, ranks)


def test_candidates_are_all_that_merging_can_ask_for() -> None:
    asked: set[bytes] = set()

    class Recorder(dict[bytes, int]):
        def get(self, key: bytes, default: int = 0) -> int:  # type: ignore[override]
            asked.add(key)
            return super().get(key, default)

    rng = random.Random(1)
    for _ in range(500):
        alphabet = [b"a", b"b", "Ġ".encode()]
        ranks = Recorder({text: rank for rank, text in enumerate(random_merges(rng, alphabet, 20))})
        symbols = rng.choices(alphabet, k=rng.randint(0, 10))
        asked.clear()
        merge(symbols, ranks)
        wanted = candidates(symbols)
        assert asked <= wanted
        assert len(wanted) <= n_candidates(len(symbols))
    assert candidates([b"a", b"bc", b"d"]) == {b"a bc", b"bc d", b"abc d", b"a bcd"}
    assert n_candidates(3) == 4


@pytest.mark.parametrize("ignore_merges", [False, True])
def test_searching_and_dictionaries_agree(ignore_merges: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merges in any order and over many blocks, tokens without a merge, symbols that are no token."""
    monkeypatch.setattr(bpe, "_FIRST_BLOCK", 2)
    monkeypatch.setattr(bpe, "_NEAR", 3)
    monkeypatch.setattr(bpe, "_PATIENCE", float("inf"))
    rng = random.Random(2)
    n_whole = n_split = 0
    for _ in range(600):
        merges = random_merges(rng, [SYMBOLS[byte] for byte in b"ab "], 40)
        tokens = [SYMBOLS[byte] for byte in b"ab "] + [text.replace(b" ", b"") for text in merges]
        tokens = [text for text in dict.fromkeys(tokens) if rng.random() < 0.9] + [b"abba"] * (b"abba" not in tokens)
        tokens = list(dict.fromkeys(tokens))
        if rng.random() < 0.5:
            rng.shuffle(tokens)
        pieces = ["".join(rng.choices("ab ", k=rng.randint(1, 9))) for _ in range(4)] + ["abba"]
        searching = pairs_of(tokens, merges, ignore_merges)
        prepared = pairs_of(tokens, merges, ignore_merges)
        prepared.prepare()
        ids = prepared.encode(pieces)
        assert searching.encode(pieces) == ids
        assert searching.dropped == prepared.dropped
        assert not searching._ids  # it did search
        assert searching.encode([*pieces, "b" * 12, 7]) == prepared.encode([*pieces, "b" * 12, 7])
        ranks = {text: rank for rank, text in enumerate(merges)}
        expected = []
        for piece in pieces:
            text = [SYMBOLS[byte] for byte in piece.encode()]
            symbols = [b"".join(text)] if ignore_merges and b"".join(text) in tokens else merge_plainly(text, ranks)
            for symbol in symbols:
                letters = [symbol] if symbol in tokens else [letter.encode() for letter in symbol.decode()]
                expected += [tokens.index(letter) for letter in letters if letter in tokens]
                n_split += symbol not in tokens
                n_whole += symbol in tokens
        assert ids == expected
    assert min(n_whole, n_split) > 500


def test_bytes_without_a_token_are_noted() -> None:
    pairs = pairs_of([b"a", b"b"], [])
    assert pairs.encode(["abc", "bd"]) == [0, 1, 1]
    assert pairs.dropped == {ord("c"), ord("d")}


def test_the_first_of_equal_merges_counts() -> None:
    tokens = [b"a", b"b", b"ab", b"ba"]
    for merges in ([b"a b", b"b a", b"a b"], [b"b a", b"a b", b"b a"]):
        pairs = pairs_of(tokens, merges)
        first = pairs.encode(["aba"])
        pairs.prepare()
        assert first == pairs.encode(["aba", "abab"])[: len(first)] == ([2, 0] if merges[0] == b"a b" else [0, 3])


def test_lists_that_make_no_sense() -> None:
    with pytest.raises(ModelFileError, match=r"x.gguf: key 'tokenizer.ggml.tokens': entries 1 and 3 are both b'b'"):
        pairs_of([b"a", b"b", b"c", b"b"], []).prepare()
    for bad in (b"ab", b" ab", b""):
        with pytest.raises(ModelFileError, match=r"x.gguf: key 'tokenizer.ggml.merges': entry 1 is"):
            pairs_of([b"a", b"b"], [b"a b", bad]).prepare()


def test_half_a_character() -> None:
    with pytest.raises(InvalidRequestError, match=r"U\+D83D"):
        pairs_of([b"a"], []).encode(["a\ud83d"])


def test_time_grows_little_more_than_the_length() -> None:
    """One piece of 400,000 symbols, 25 different ones: n log n takes a second here; the square would be hours."""
    unit = [SYMBOLS[byte] for byte in range(97, 122)]
    ranks: dict[bytes, int] = {}
    for length in (1, 2, 4, 8, 16):
        for i in range(25):
            left, right = b"".join((unit * 3)[i : i + length]), b"".join((unit * 3)[i + length : i + 2 * length])
            ranks.setdefault(left + b" " + right, len(ranks))
    start = time.process_time()
    symbols = merge(unit * 16_000, ranks)
    assert time.process_time() - start < 15
    assert symbols == [b"abcdefghijklmnop", b"qrstuvwx", b"y"] * 16_000


def test_the_cache_is_bounded() -> None:
    pairs = pairs_of([SYMBOLS[byte] for byte in range(256)], [])
    for first in range(0, 300_000, 1000):
        pairs.encode([f"{i}" for i in range(first, first + 1000)] + ["long" * 30 + f"{first}"])
        assert len(pairs._cache) <= 1 << 16
    assert not any(len(piece) > 64 for piece in pairs._cache)
