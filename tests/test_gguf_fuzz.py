"""Files changed at random: the reader refuses them with a typed error, or reads what a plainer reader reads.

The seeds are fixed, so a failure comes back.
"""

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf_bytes import (
    ARRAY,
    BOOL,
    CODES,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    STRING,
    U8,
    U16,
    U32,
    U64,
    array,
    build,
    read_plainly,
    scalar,
    string,
    tensor,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from reflex_ipc.errors import ModelFileError, UnsupportedModelError
from reflex_ipc.gguf import GGUF, TYPES, StringArray
from reflex_ipc.gguf_header import Header

N_MUTATED = 110_000
N_MEASURED = 3_000
N_SHARDS = 2_000


def seeds() -> list[bytes]:
    """Small sound files that together have every kind of field."""
    scalars = [scalar(f"k{kind}", kind, 1) for kind in CODES if kind not in (F32, F64)]
    scalars += [scalar("f", F32, 0.5), scalar("d", F64, -1e300), scalar("s", STRING, "hello"), scalar("e", STRING, "")]
    arrays = [array(f"a{kind}", kind, [0, 1, 1]) for kind in CODES]
    words = [array("words", STRING, ["", "a", "bb", "c" * 40]), array("none", STRING, []), array("nul", STRING, ["\0"])]
    tensors = [tensor("blk.0.w", [32, 2], 2, 0), tensor("blk.0.b", [8], 0, 64), tensor("x", [256], 12, 96)]
    data = bytes(range(240))
    aligned = [scalar("general.alignment", U32, 8), scalar("general.architecture", STRING, "llama")]
    split = [scalar("split.no", U16, 0), scalar("split.count", U16, 1), scalar("split.tensors.count", I32, 1)]
    return [
        build([]),
        build([scalar("a", U8, 1)]),
        build(scalars),
        build(arrays),
        build(words),
        build([], tensors, data),
        build(aligned, tensors, data, alignment=8),
        build(split, [tensor("t", [4, 1, 1, 1], 24, 0)], b"data"),
        build([*aligned, *scalars[:3], *words, *arrays[:2]], tensors, data, alignment=8),
    ]


ODD_NUMBERS = [0, 1, 7, 8, 9, 13, 31, 32, 33, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32]
ODD_NUMBERS += [2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]


def overwrite(rng: random.Random, content: bytearray) -> None:
    code = rng.choice("BHIQ")
    raw = struct.pack("<" + code, rng.choice(ODD_NUMBERS) % 256 ** struct.calcsize(code))
    at = rng.randrange(len(content))
    content[at : at + len(raw)] = raw


def flip(rng: random.Random, content: bytearray) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def nudge(rng: random.Random, content: bytearray) -> None:
    at = rng.randrange(len(content))
    content[at] = (content[at] + rng.choice((-1, 1))) % 256


def cut(rng: random.Random, content: bytearray) -> None:
    del content[rng.randrange(len(content)) :]


def remove(rng: random.Random, content: bytearray) -> None:
    at = rng.randrange(len(content))
    del content[at : at + rng.randint(1, 16)]


def insert(rng: random.Random, content: bytearray) -> None:
    at = rng.randrange(len(content))
    content[at:at] = rng.randbytes(rng.randint(1, 16))


def repeat(rng: random.Random, content: bytearray) -> None:
    start = rng.randrange(len(content))
    piece = content[start : start + rng.randint(1, 64)]
    at = rng.randrange(len(content))
    content[at:at] = piece


CHANGES: list[Callable[[random.Random, bytearray], None]] = [overwrite, flip, nudge, cut, remove, insert, repeat]


def changed(rng: random.Random, files: list[bytes]) -> bytes:
    content = bytearray(rng.choice(files))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        if content:
            rng.choice(CHANGES)(rng, content)
    return bytes(content)


def read(content: bytes) -> Header | None:
    """None: refused, by a typed error that names the file. Any other exception fails the test."""
    try:
        return Header(content, "m.gguf")
    except (ModelFileError, UnsupportedModelError) as error:
        assert str(error).startswith("m.gguf: ")
        assert len(str(error)) < 1000
        return None


def plain(value: Any) -> Any:
    if isinstance(value, StringArray):
        return value.raw
    if isinstance(value, memoryview):
        return list(value)
    return value.encode() if isinstance(value, str) else value


def assert_is_what_the_file_says(header: Header, content: bytes) -> None:
    metadata, tensors = read_plainly(content)
    # repr, because NaN is not equal to itself
    assert repr({key: plain(value) for key, value in header.metadata.items()}) == repr(metadata)
    assert {t.name: (t.type.id, list(t.ne), t.offset) for t in header.tensors.values()} == {
        name: (type_id, ne or [1], offset) for name, (type_id, ne, offset) in tensors.items()
    }
    end = 0
    for t in sorted(header.tensors.values(), key=lambda t: t.offset):
        n_elements = 1
        for n in t.ne:
            assert n > 0
            n_elements *= n
        assert t.ne[0] % TYPES[t.type.id].block == 0
        assert t.nbytes == n_elements * t.type.size // t.type.block
        assert t.offset >= max(end, header.data_offset)
        assert (t.offset - header.data_offset) % header.alignment == 0
        end = t.offset + t.nbytes
    assert end <= len(content)
    for value in header.metadata.values():
        if isinstance(value, StringArray):
            for i in range(len(value)):
                try:
                    assert value[i].encode() == value.raw[i]
                except ModelFileError as error:
                    assert "UTF-8" in str(error)


def test_the_seeds_are_sound() -> None:
    for content in seeds():
        header = read(content)
        assert header is not None
        assert_is_what_the_file_says(header, content)


def test_changed_at_random() -> None:
    rng, files = random.Random(20), seeds()
    accepted = 0
    for _ in range(N_MUTATED):
        content = changed(rng, files)
        header = read(content)
        if header is not None:
            accepted += 1
            assert_is_what_the_file_says(header, content)
    assert N_MUTATED // 20 < accepted < N_MUTATED // 2  # both sides were tried


def peak(content: bytes) -> int:
    """Bytes allocated at the worst moment of reading all there is to read."""
    tracemalloc.start()
    try:
        header = read(content)
        if header is not None:
            for value in header.metadata.values():
                if isinstance(value, StringArray):
                    _ = value.raw
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def most(content: bytes) -> int:
    """Python's objects for the smallest things a file can hold take up to 15 times their bytes."""
    return 16 * len(content) + (64 << 10)


def test_memory_stays_within_the_size_of_the_file() -> None:
    rng, files = random.Random(21), seeds()
    for _ in range(N_MEASURED):
        content = changed(rng, files)
        assert peak(content) < most(content)


def test_memory_of_the_densest_files() -> None:
    names = [chr(33 + i % 90) + chr(33 + i // 90) for i in range(8000)]
    dense = [
        build([scalar(name, U8, 1) for name in names]),
        build([scalar("general.alignment", U32, 1)], [tensor(n, [1], 24, i) for i, n in enumerate(names)], bytes(8000)),
        build([array("k", STRING, ["ab"] * 100_000)]),
        build([array("k", STRING, [""] * 100_000)]),
        build([array(name, STRING, [""]) for name in names]),
        build([array(name, U8, [1]) for name in names]),
        build([scalar("k", STRING, "a" * 1_000_000 + "🦀")]),
    ]
    for content in dense:
        assert read(content) is not None
        assert peak(content) < most(content)


@pytest.mark.parametrize("count", [2**20, 2**32, 2**60, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
def test_memory_for_counts_that_are_lies(count: int) -> None:
    signed = struct.unpack("<q", struct.pack("<Q", count))[0]
    liars = [build([], n_entries=signed), build([], n_tensors=signed), build([struct.pack("<Q", count) + b"key"])]
    liars += [build([string("k") + struct.pack("<IQ", STRING, count) + b"value"])]
    liars += [build([array("k", kind, [], count)]) for kind in (*CODES, STRING)]
    liars += [build([string("k") + struct.pack("<IIQQ", ARRAY, STRING, 1, count) + b"value"])]
    liars += [
        build([], [tensor("t", [count, count], 24, 0)], b"data"),
        build([], [tensor("t", [4], 24, count)], b"data"),
    ]
    for content in liars:
        assert read(content) is None
        assert peak(content) < 16 << 10


def test_changed_shards(tmp_path: Path) -> None:
    """Through the file system: whatever two shards hold, they open or are refused."""
    rng = random.Random(22)

    def shard(no: int) -> bytes:
        keys = [scalar("split.no", U16, no), scalar("split.count", U16, 2), scalar("split.tensors.count", I32, 2)]
        return build(keys, [tensor(f"t{no}", [4], 24, 0)], b"data")

    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    opened = 0
    for _ in range(N_SHARDS):
        victim = rng.randrange(2)
        for no, path in enumerate(paths):
            path.write_bytes(changed(rng, [shard(no)]) if no == victim else shard(no))
        try:
            with GGUF.open(paths[0]) as file:
                opened += 1
                for t in file.tensors.values():
                    assert len(file.data(t)) == t.nbytes
        except (ModelFileError, UnsupportedModelError) as error:
            assert str(tmp_path) in str(error)
    assert 0 < opened < N_SHARDS


NUMBERS = {U8: (0, 2**8), I8: (-(2**7), 2**7), U16: (0, 2**16), I16: (-(2**15), 2**15), U32: (0, 2**32)}
NUMBERS |= {I32: (-(2**31), 2**31), U64: (0, 2**64), I64: (-(2**63), 2**63)}
VALUES: dict[int, st.SearchStrategy[Any]] = {
    kind: st.integers(least, below - 1) for kind, (least, below) in NUMBERS.items()
}
VALUES |= {BOOL: st.booleans(), STRING: st.text(max_size=300), F32: st.floats(width=32), F64: st.floats()}
ENTRIES = st.sampled_from(sorted(VALUES)).flatmap(
    lambda kind: st.tuples(st.just(kind), VALUES[kind] | st.lists(VALUES[kind], max_size=20))
)
KEYS = st.text(min_size=1, max_size=40).filter(lambda key: not key.startswith(("general.", "split.")))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.dictionaries(KEYS, ENTRIES, max_size=12))
def test_any_metadata_comes_back(metadata: dict[str, tuple[int, Any]]) -> None:
    entries = [
        array(key, kind, value) if isinstance(value, list) else scalar(key, kind, value)
        for key, (kind, value) in metadata.items()
    ]
    header = read(build(entries))
    assert header is not None
    found = {
        key: list(value) if isinstance(value, StringArray | memoryview) else value
        for key, value in header.metadata.items()
    }
    assert repr(found) == repr({key: value for key, (_, value) in metadata.items()})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes(content: bytes, magic: bool) -> None:
    read(b"GGUF\3\0\0\0" + content if magic else content)
