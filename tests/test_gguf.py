"""The reader against the `gguf` package, on sound files."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf_bytes import (
    BOOL,
    F32,
    F64,
    I8,
    I16,
    I32,
    I64,
    REFUSED,
    STRING,
    U8,
    U16,
    U32,
    U64,
    array,
    build,
    scalar,
    tensor,
    write,
)
from gguf_refusal import open_files

from reflex_ipc import gguf as gguf_module
from reflex_ipc.errors import ModelFileError
from reflex_ipc.gguf import GGUF, TYPES, StringArray

HERE = Path(__file__).parent
MODELS = sorted(path.relative_to(HERE).as_posix() for path in (HERE / "fixtures").glob("*/*.gguf"))


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, StringArray | memoryview) else value


def assert_agrees_with_package(path: Path) -> None:
    """Every key, value, tensor and byte."""
    theirs = gguf.GGUFReader(path)
    with GGUF.open(path) as ours:
        assert ours.path == str(path)
        assert ours.version == theirs.fields["GGUF.version"].contents()
        assert ours.alignment == theirs.alignment
        assert len(ours.shards) == 1
        assert (ours.shards[0].size, ours.shards[0].data_offset) == (path.stat().st_size, theirs.data_offset)
        keys = [key for key in theirs.fields if not key.startswith("GGUF.")]
        assert list(ours.metadata) == keys
        for key in keys:
            assert plain(ours.metadata[key]) == theirs.fields[key].contents(), key
        assert list(ours.tensors) == [t.name for t in theirs.tensors]
        for t in theirs.tensors:
            mine = ours.tensors[t.name]
            assert mine.name == t.name
            assert (mine.type.name, mine.type.id) == (t.tensor_type.name, t.tensor_type.value)
            assert list(mine.ne) == t.shape.tolist()
            assert mine.shape == mine.ne[::-1]
            assert (mine.shard, mine.offset, mine.nbytes) == (0, t.data_offset, t.n_bytes)
            assert mine.n_elements == t.n_elements
            assert mine.row_bytes * mine.n_elements == mine.nbytes * mine.ne[0]
            assert ours.data(mine) == t.data.tobytes()


# --- sound files


def test_the_model_fixtures_are_here() -> None:
    assert len(MODELS) == 25


@pytest.mark.parametrize("model", MODELS)
def test_fixture(model: str) -> None:
    assert_agrees_with_package(HERE / model)


def test_demo_model(smollm2: Path) -> None:
    assert_agrees_with_package(smollm2)


def test_types_are_those_of_the_package() -> None:
    known = {t.value: (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType if t.value not in REFUSED}
    ours = {id: (t.name, t.block, t.size) for id, t in TYPES.items()}
    assert ours.pop(42) == ("Q2_0", 64, 18)  # newer than the package
    assert ours == known
    assert all(t.id == id for id, t in TYPES.items())


EXTREMES: dict[gguf.GGUFValueType, list[Any]] = {
    gguf.GGUFValueType.UINT8: [0, 255],
    gguf.GGUFValueType.INT8: [-128, 127],
    gguf.GGUFValueType.UINT16: [0, 65535],
    gguf.GGUFValueType.INT16: [-32768, 32767],
    gguf.GGUFValueType.UINT32: [0, 2**32 - 1],
    gguf.GGUFValueType.INT32: [-(2**31), 2**31 - 1],
    gguf.GGUFValueType.UINT64: [0, 2**64 - 1],
    gguf.GGUFValueType.INT64: [-(2**63), 2**63 - 1],
    gguf.GGUFValueType.FLOAT32: [0.0, -1.5, 3.4028234663852886e38, float("inf")],
    gguf.GGUFValueType.FLOAT64: [1e-300, -0.1, 1.7976931348623157e308],
    gguf.GGUFValueType.BOOL: [False, True],
    gguf.GGUFValueType.STRING: ["", "a", "naïve 日本語 🦀", "\0", "x" * 255, "y" * 256, "z" * 70000, "\0" * 20],
}


def test_every_metadata_type(tmp_path: Path) -> None:
    path = tmp_path / "types.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for kind, values in EXTREMES.items():
        for i, value in enumerate(values):
            writer.add_key_value(f"{kind.name}.{i}", value, kind)
        writer.add_key_value(f"{kind.name}.array", values, gguf.GGUFValueType.ARRAY, sub_type=kind)
        writer.add_key_value(f"{kind.name}.long", values * 2000, gguf.GGUFValueType.ARRAY, sub_type=kind)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    finish(writer)
    assert_agrees_with_package(path)
    with GGUF.open(path) as file:
        for kind, values in EXTREMES.items():
            for i, value in enumerate(values):
                assert file.metadata[f"{kind.name}.{i}"] == value
                assert type(file.metadata[f"{kind.name}.{i}"]) is type(value)
            assert plain(file.metadata[f"{kind.name}.long"]) == values * 2000


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_every_tensor_type(tmp_path: Path) -> None:
    path = tmp_path / "tensors.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    rng = np.random.default_rng(1)
    for id, type in TYPES.items():
        if id == 42:
            continue
        blocks = rng.integers(0, 256, (5, 3, 2 * type.size), dtype=np.uint8)
        writer.add_tensor(type.name, blocks, raw_dtype=gguf.GGMLQuantizationType(id))
    finish(writer)
    assert_agrees_with_package(path)
    with GGUF.open(path) as file:
        assert file.tensors["Q6_K"].ne == (512, 3, 5)
        assert file.tensors["Q6_K"].row_bytes == 420
        assert file.data(file.tensors["Q6_K"]).readonly


def test_a_type_newer_than_the_package(tmp_path: Path) -> None:
    path = write(tmp_path / "q2_0.gguf", build([], [tensor("t", [128, 3], 42, 0)], bytes(range(108))))
    with GGUF.open(path) as file:
        assert bytes(file.data(file.tensors["t"])) == bytes(range(108))


def test_version_2(fixtures: Path, tmp_path: Path) -> None:
    content = bytearray((fixtures / "exact" / "llama-f16.gguf").read_bytes())
    content[4] = 2
    assert_agrees_with_package(write(tmp_path / "v2.gguf", bytes(content)))


@pytest.mark.parametrize("alignment", [1, 8, 64, 4096])
def test_alignment(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full((i + 1, 3), i, np.float32))
    finish(writer)
    assert_agrees_with_package(path)


def test_any_integer_width_for_the_alignment(tmp_path: Path) -> None:
    content = build(
        [scalar("general.alignment", U64, 64)], [tensor("t", [4], 24, 64)], bytes(64) + b"data", alignment=64
    )
    with GGUF.open(write(tmp_path / "a.gguf", content)) as file:
        assert bytes(file.data(file.tensors["t"])) == b"data"


def test_vocabulary_only_without_padding(tmp_path: Path) -> None:
    content = build([array("tokens", STRING, ["a", "bb"])])
    assert len(content) % 32
    with GGUF.open(write(tmp_path / "v.gguf", content)) as file:
        assert list(file.strings("tokens")) == ["a", "bb"]
        assert file.shards[0].data_offset == len(content)
        assert file.tensors == {}


def test_gaps_and_any_order_are_fine(tmp_path: Path) -> None:
    tensors = [tensor("late", [4], 24, 96), tensor("early", [4], 24, 32), tensor("scalar", [], 24, 0)]
    content = build([], tensors, b"s" + bytes(31) + b"eeee" + bytes(60) + b"llll")
    with GGUF.open(write(tmp_path / "gaps.gguf", content)) as file:
        assert list(file.tensors) == ["late", "early", "scalar"]
        assert [bytes(file.data(t)) for t in file.tensors.values()] == [b"llll", b"eeee", b"s"]
        assert file.tensors["scalar"].ne == (1,)


def test_beyond_four_gibibytes(tmp_path: Path) -> None:
    """A file with a hole, so that it takes no room."""
    far = 5 << 30
    path = write(tmp_path / "big.gguf", build([], [tensor("far", [4], 24, far), tensor("huge", [far // 2, 2], 24, 0)]))
    with path.open("r+b") as file:
        file.seek((path.stat().st_size + 31) // 32 * 32 + far)
        file.write(b"here")
    with GGUF.open(path) as model:
        assert bytes(model.data(model.tensors["far"])) == b"here"
        assert model.tensors["huge"].nbytes == far
        assert len(model.data(model.tensors["huge"])) == far


def test_path_like_and_odd_names(tmp_path: Path) -> None:
    path = write(tmp_path / os.fsdecode(b"caf\xe9 model.gguf"), build([scalar("k", U8, 1)]))
    for form in (path, str(path)):
        with GGUF.open(form) as file:
            assert file.int("k") == 1


def test_closing(fixtures: Path) -> None:
    path = fixtures / "exact" / "llama-f16.gguf"
    before = open_files()
    with GGUF.open(path) as file:
        first = next(iter(file.tensors.values()))
        view, tokens = file.data(first), file.strings("tokenizer.ggml.tokens")
        os.fstat(file.shards[0].fd)
    file.close()  # twice is once
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.shards[0].fd)
    del file
    assert bytes(view) == path.read_bytes()[first.offset : first.offset + first.nbytes]
    assert len(tokens.raw) == 512
    del view, tokens
    assert open_files() <= before


def test_imports_nothing_heavy() -> None:
    script = (
        "import sys; from reflex_ipc.gguf import GGUF; GGUF.open(sys.argv[1]);"
        "print(*{'numpy', 'gguf', 'dataclasses', 'inspect', 'json', 'ctypes', 'logging', 'pathlib'} & set(sys.modules))"
    )
    path = str(HERE / MODELS[0])
    done = subprocess.run(
        [sys.executable, "-S", "-c", script, path], cwd=HERE.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout == "\n"


# --- string arrays


@pytest.fixture(params=["lazily", "from the list"])
def strings(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StringArray, list[str]]:
    rng = random.Random(3)
    expected = ["é" * rng.choice([0, 1, 3, 127, 128, 129, 40000 if i % 500 == 0 else 5]) for i in range(3000)]
    content = build([array("before", U8, [1, 2, 3]), array("k", STRING, expected), scalar("after", U8, 9)])
    with GGUF.open(write(tmp_path / "s.gguf", content)) as file:
        assert file.int("after") == 9
        found = file.strings("k")
    if request.param == "from the list":
        assert found.raw == [text.encode() for text in expected]
        assert found.raw is found.raw
    return found, expected


def test_string_array_is_a_sequence(strings: tuple[StringArray, list[str]]) -> None:
    found, expected = strings
    assert len(found) == 3000
    for i in (0, 1, 1023, 1024, 1025, 2047, 2048, 2999, -1, -3000):
        assert found[i] == expected[i]
    assert found[1000:1100] == expected[1000:1100]
    assert found[::-97] == expected[::-97]
    assert found[2990:5000] == expected[2990:]
    for i in (3000, -3001):
        with pytest.raises(IndexError):
            found[i]
    assert list(found) == expected
    assert list(reversed(found)) == expected[::-1]
    assert expected[7] in found and "absent" not in found


def test_invalid_utf8_counts_only_when_asked_for(tmp_path: Path) -> None:
    content = build([array("k", STRING, [b"fine", b"caf\xe9", b"\xed\xa0\x80"])])
    with GGUF.open(write(tmp_path / "s.gguf", content)) as file:
        for _ in range(2):
            found = file.strings("k")
            assert found[0] == "fine"
            for i in (1, 2):
                with pytest.raises(ModelFileError, match=f"'k': entry {i} is not UTF-8"):
                    found[i]
            with pytest.raises(ModelFileError, match="'k': entry 1 is not UTF-8"):
                list(found)
            assert found.raw == [b"fine", b"caf\xe9", b"\xed\xa0\x80"]


# --- typed getters


@pytest.fixture
def getters(tmp_path: Path) -> GGUF:
    kinds = {"u8": U8, "i8": I8, "u16": U16, "i16": I16, "u32": U32, "i32": I32, "u64": U64, "i64": I64}
    entries = [scalar(name, kind, 7) for name, kind in kinds.items()]
    entries += [array(name + "s", kind, [1, 2, 3]) for name, kind in kinds.items()]
    entries += [scalar("f32", F32, 0.5), scalar("f64", F64, 0.1), scalar("nan", F32, float("nan"))]
    entries += [scalar("inf", F64, float("-inf")), scalar("text", STRING, "hello"), scalar("yes", BOOL, True)]
    entries += [array("floats", F32, [0.5]), array("bools", BOOL, [True, False]), array("words", STRING, ["a", "b"])]
    entries += [array("none", STRING, [])]
    return GGUF.open(write(tmp_path / "g.gguf", build(entries)))


def test_getters(getters: GGUF) -> None:
    for width in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"):
        assert getters.int(width) == 7
        assert getters.float(width) == 7.0 and type(getters.float(width)) is float
        assert getters.ints(width, 2) == (7, 7)
        assert getters.ints(width + "s", 3) == (1, 2, 3)
    assert getters.ints("bools", 2) == (1, 0)
    assert getters.float("f32") == 0.5
    assert getters.float("f64") == 0.1
    assert getters.str("text") == "hello"
    assert getters.bool("yes") is True
    assert list(getters.strings("words")) == ["a", "b"]
    assert list(getters.strings("none")) == getters.strings("none").raw == []


def test_getter_defaults(getters: GGUF) -> None:
    assert getters.int("absent", 3) == 3
    assert getters.float("absent", 2.5) == 2.5
    assert getters.str("absent", "x") == "x"
    assert getters.bool("absent", False) is False
    assert getters.ints("absent", 3, 4) == (4, 4, 4)
    assert getters.ints("absent", 3, [1, 2, 3]) == (1, 2, 3)
    words = getters.strings("words")
    assert getters.strings("absent", words) is words
    for getter in (getters.int, getters.float, getters.str, getters.bool, getters.strings):
        assert getter("absent", None) is None
    assert getters.ints("absent", 3, None) is None
    assert getters.int("u8", 3) == 7  # what is there comes before the default


GETTERS: dict[str, Callable[[GGUF, str], object]] = {
    "int": GGUF.int,
    "float": GGUF.float,
    "str": GGUF.str,
    "bool": GGUF.bool,
    "strings": GGUF.strings,
    "ints": lambda file, key: file.ints(key, 3),
}
WRONG = {
    "int": ["f32", "text", "yes", "words", "u8s"],
    "float": ["text", "yes", "words", "floats", "nan", "inf"],
    "str": ["u8", "f32", "yes", "words"],
    "bool": ["u8", "f32", "text", "bools"],
    "strings": ["text", "u8s", "u8"],
    "ints": ["f32", "floats", "text", "words", "yes", "bools"],
}


@pytest.mark.parametrize("getter", GETTERS)
def test_getters_name_the_key_that_is_wrong(getters: GGUF, getter: str) -> None:
    for key in [*WRONG[getter], "absent"]:
        with pytest.raises(ModelFileError, match=f"g.gguf: key '{key}'"):
            GETTERS[getter](getters, key)


def test_a_scalar_is_not_spread_without_bound(getters: GGUF) -> None:
    with pytest.raises(ModelFileError, match="'u8'"):
        getters.ints("u8", 2**40)


def test_strings_cut_out_of_a_long_array(tmp_path: Path) -> None:
    """Any range, across blocks too, before and after all strings are there."""
    strings = [b"%x" % (i * i) * (i % 40) for i in range(3000)]
    (tmp_path / "strings.gguf").write_bytes(build([array("key", STRING, strings), array("none", STRING, [])]))
    for ready in (False, True):
        with GGUF.open(tmp_path / "strings.gguf") as file:
            found = file.strings("key")
            if ready:
                assert found.raw == strings
            for first in (0, 1, 1023, 1024, 1025, 2047, 2999, 3000):
                for last in (0, 1, 1024, 1500, 2048, 2999, 3000):
                    assert found.cut(first, last) == strings[first:last]
                    assert found[first:last] == [text.decode() for text in strings[first:last]]
            assert found[-1:-4:-1] == [text.decode() for text in strings[-1:-4:-1]]
            assert file.strings("none").cut(0, 0) == file.strings("none").raw == file.strings("none")[:] == []


@pytest.mark.parametrize("first", [24, 64, 1000, 5000])
def test_headers_longer_than_the_first_read(fixtures: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    """Wherever the first read ends, in a name, a number, an array or a string, the next one goes on."""
    path = fixtures / "exact" / "qwen3-f16.gguf"
    with GGUF.open(path) as whole:
        expected = {key: list(v) if not isinstance(v, str | int | float) else v for key, v in whole.metadata.items()}
        tensors = whole.tensors
    monkeypatch.setattr(gguf_module, "_FIRST_READ", first)
    with GGUF.open(path) as pieces:
        found = {key: list(v) if not isinstance(v, str | int | float) else v for key, v in pieces.metadata.items()}
        assert (found, pieces.tensors) == (expected, tensors)


def test_a_file_that_shrinks_while_it_is_read(fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process cuts the file between our looking at its size and our reading it."""
    path = tmp_path / "m.gguf"
    path.write_bytes((fixtures / "exact" / "qwen3-f16.gguf").read_bytes())
    read = gguf_module.Shard.read

    def cut_first(shard: gguf_module.Shard, size: int) -> bytes:
        os.truncate(path, 3000)
        return read(shard, size)

    monkeypatch.setattr(gguf_module.Shard, "read", cut_first)
    with pytest.raises(ModelFileError, match="shrank"):
        GGUF.open(path)
