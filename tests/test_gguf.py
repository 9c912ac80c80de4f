"""The reader against the `gguf` package, and against files that are not what they claim to be."""

import os
import random
import shutil
import socket
import stat
import struct
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
    STRING,
    U8,
    U16,
    U32,
    U64,
    array,
    build,
    scalar,
    string,
    tensor,
)

from reflex_ipc.errors import ModelFileError, ReflexError, UnsupportedModelError
from reflex_ipc.gguf import GGUF, TYPES, StringArray, Tensor

HERE = Path(__file__).parent
MODELS = sorted(path.relative_to(HERE).as_posix() for path in (HERE / "fixtures").glob("*/*.gguf"))
# ids of the types that exist and no file may have: retired, or for activations only
REFUSED = {4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 31: "Q4_0_4_4", 36: "IQ4_NL_4_4"}


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, StringArray | memoryview) else value


def assert_agrees_with_package(path: Path) -> None:
    """Every key, value, tensor and byte."""
    theirs = gguf.GGUFReader(path)
    with GGUF.open(path) as ours:
        assert ours.path == str(path)
        assert ours.version == theirs.fields["GGUF.version"].contents()
        assert ours.alignment == theirs.alignment
        assert ours.n_shards == 1
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
    assert len(MODELS) == 23


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


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


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
    before = os.listdir("/proc/self/fd")
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
    assert os.listdir("/proc/self/fd") == before


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


# --- shards


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    """Five tensors over three files, as the package writes them."""
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama", split_max_tensors=2)
    writer.add_block_count(3)
    for i in range(5):
        writer.add_tensor(f"t{i}", np.full((4, 8), i, np.float32))
    finish(writer)
    paths = sorted(tmp_path.glob("model-*.gguf"))
    assert [path.name for path in paths] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return paths


def test_shards(shards: list[Path]) -> None:
    with GGUF.open(shards[0]) as file:
        assert file.n_shards == 3
        assert [shard.path for shard in file.shards] == [str(path) for path in shards]
        assert file.int("llama.block_count") == 3
        assert list(file.tensors) == ["t0", "t1", "t2", "t3", "t4"]
        assert [t.shard for t in file.tensors.values()] == [0, 0, 1, 1, 2]
        for i, t in enumerate(file.tensors.values()):
            expected = np.full(32, i, np.float32).tobytes()
            assert file.data(t) == expected
            assert os.pread(file.shards[t.shard].fd, t.nbytes, t.offset) == expected
            assert shards[t.shard].read_bytes()[t.offset : t.offset + t.nbytes] == expected


def test_first_shard_without_tensors(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=1, small_first_shard=True)
    for i in range(2):
        writer.add_tensor(f"t{i}", np.full(8, i, np.float32))
    finish(writer)
    with GGUF.open(tmp_path / "m-00001-of-00003.gguf") as file:
        assert [t.shard for t in file.tensors.values()] == [1, 2]
        assert file.data(file.tensors["t1"]) == np.full(8, 1, np.float32).tobytes()


def refused(path: Path, *words: str, kind: type[ReflexError] = ModelFileError) -> None:
    """Opening ends in the typed error, naming the file and these words, and leaves no file open."""
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ReflexError) as caught:
        GGUF.open(path)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    for word in (str(path.parent), *words):
        assert word in message
    del caught
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("i", [1, 2])
def test_not_the_first_shard(shards: list[Path], i: int) -> None:
    refused(shards[i], f"shard {i + 1} of 3", f"open the first, {shards[0]}")


@pytest.mark.parametrize("i", [1, 2])
def test_missing_shard(shards: list[Path], i: int) -> None:
    shards[i].unlink()
    refused(shards[0], f"shard {i + 1} of 3", str(shards[i]), "no such file")


def test_shuffled_shards(shards: list[Path]) -> None:
    third = shards[2].read_bytes()
    shards[2].write_bytes(shards[1].read_bytes())
    shards[1].write_bytes(third)
    refused(shards[0], str(shards[1]), "'split.no' is 2, not 1")


def test_the_same_shard_twice(shards: list[Path]) -> None:
    shutil.copy(shards[1], shards[2])
    refused(shards[0], "tensor 't2' appears in shard 2 and in", str(shards[2]))


def test_renamed_first_shard(shards: list[Path]) -> None:
    refused(shards[0].rename(shards[0].with_name("other.gguf")), "'split.no'", "-00001-of-00003.gguf")


def test_cut_shard(shards: list[Path]) -> None:
    os.truncate(shards[1], shards[1].stat().st_size - 1)
    refused(shards[0], "shard 2 of 3", str(shards[1]), "tensor 't3'")


def shard(no: int, count: int, total: int | None, *more: bytes, name: str = "t") -> bytes:
    entries = [scalar("split.no", U16, no), scalar("split.count", U16, count), *more]
    if total is not None:
        entries.append(scalar("split.tensors.count", I32, total))
    return build(entries, [tensor(name, [4], 24, 0)], b"data")


OTHER_SHARDS: dict[str, tuple[bytes, bytes, list[str]]] = {
    "of another number": (shard(0, 2, 2), shard(1, 3, 2, name="u"), ["'split.count' is 3, not 2"]),
    "without keys": (shard(0, 2, 2), build([], [tensor("u", [4], 24, 0)], b"data"), ["'split.no' is missing, not 1"]),
    "of another total": (shard(0, 2, 3), shard(1, 2, 3, name="u"), ["'split.tensors.count' is 3, but 2"]),
    "without a total": (shard(0, 2, None), shard(1, 2, None, name="u"), ["'split.tensors.count' is missing"]),
    "of another architecture": (
        shard(0, 2, 2, scalar("general.architecture", STRING, "llama")),
        shard(1, 2, 2, scalar("general.architecture", STRING, "qwen3"), name="u"),
        ["'general.architecture' is the string 'qwen3', not the string 'llama'"],
    ),
    "with the tensor of the first": (shard(0, 2, 2), shard(1, 2, 2), ["tensor 't' appears in shard 1 and in"]),
    "with a number that is text": (
        build([scalar("split.no", STRING, "0"), scalar("split.count", U16, 2)]),
        b"",
        ["'split.no' has to be an integer"],
    ),
    "with a count that is text": (build([scalar("split.count", STRING, "2")]), b"", ["'split.count' has to be"]),
    "that is empty": (shard(0, 2, 2), b"", ["shard 2 of 2", "the file is empty"]),
    "that is no GGUF": (shard(0, 2, 2), b"something else", ["shard 2 of 2", "not a GGUF file"]),
}


@pytest.mark.parametrize("case", OTHER_SHARDS)
def test_shard(case: str, tmp_path: Path) -> None:
    first, second, words = OTHER_SHARDS[case]
    write(tmp_path / "m-00002-of-00002.gguf", second)
    refused(write(tmp_path / "m-00001-of-00002.gguf", first), *words)


def test_a_split_of_one(tmp_path: Path) -> None:
    with GGUF.open(write(tmp_path / "m.gguf", shard(0, 1, 1))) as file:
        assert file.n_shards == 1
    refused(write(tmp_path / "n.gguf", shard(0, 1, 2)), "'split.tensors.count' is 2, but 1")


# --- not a model at all


def test_paths_that_are_no_files(tmp_path: Path) -> None:
    refused(tmp_path / "absent.gguf", "no such file")
    refused(tmp_path, "is a directory")
    refused(write(tmp_path / "empty.gguf", b""), "is empty")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "is a pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket.gguf"))
        refused(tmp_path / "socket.gguf", "is a socket")
    (tmp_path / "loop.gguf").symlink_to("loop.gguf")
    refused(tmp_path / "loop.gguf", "symbolic links")
    refused(tmp_path / "empty.gguf" / "x.gguf", "not a directory")
    refused(tmp_path / ("x" * 300), "too long")
    refused(Path("/dev/zero"), "character device")
    refused(Path("/proc/version"), "is empty")
    with pytest.raises(ModelFileError, match="NUL"):
        GGUF.open("a\0b.gguf")
    with pytest.raises(ModelFileError, match="no such file"):
        GGUF.open("")


def test_without_permission(tmp_path: Path) -> None:
    path = write(tmp_path / "secret.gguf", build([]))
    path.chmod(0)
    is_root = os.geteuid() == 0
    if is_root:  # root may read everything
        tmp_path.chmod(stat.S_IRWXU | stat.S_IXOTH)
        os.seteuid(65534)
    try:
        refused(path, "permission denied")
    finally:
        if is_root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("<Q", 30) + b'{"__metadata__":{"format":"pt"}}', ["safetensors", "convert"]),
        (struct.pack("<Q", 2) + b"{}", ["safetensors"]),
        (b"PK\3\4" + bytes(60), ["zip", "PyTorch"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["Git LFS", "git lfs pull"]),
        (b"\xfd7zXZ\0" + bytes(60), ["xz"]),
        (b"\x1f\x8b\x08" + bytes(60), ["gzip"]),
        (b"tjgg\3\0\0\0" + bytes(60), ["GGJT", "convert"]),
        (b"<!DOCTYPE html><html>", ["not a GGUF file", "<!DO"]),
        (bytes(100), ["not a GGUF file"]),
        (b"G", ["not a GGUF file"]),
        (b"GGU", ["not a GGUF file"]),
        (b"ggufggufggufggufgguf", ["not a GGUF file"]),
    ],
)
def test_other_formats(content: bytes, words: list[str], tmp_path: Path) -> None:
    refused(write(tmp_path / "model.gguf", content), *words)


# --- damaged, or sound and not done

T = tensor("t", [4], 24, 0)  # a sound one
HUGE = 2**62

DAMAGED: dict[str, tuple[bytes, list[str]]] = {
    "version 0": (build([], version=0), ["version 0"]),
    "negative metadata count": (build([], n_entries=-1), ["-1 metadata entries"]),
    "huge metadata count": (build([], n_entries=HUGE), [f"{HUGE} metadata entries"]),
    "negative tensor count": (build([], n_tensors=-1), ["-1 tensors"]),
    "huge tensor count": (build([], n_tensors=HUGE), [f"{HUGE} tensors"]),
    "more entries than there are": (build([scalar("a", U8, 1)] * 1, n_entries=2), ["name of key number 1"]),
    "more tensors than there are": (build([scalar("a" * 40, U8, 1)], [T], n_tensors=2), ["name of tensor number 1"]),
    "key of huge length": (build([struct.pack("<Q", HUGE) + b"k" * 30]), ["name of key number 0", str(HUGE)]),
    "key of length 2^64-1": (build([struct.pack("<Q", 2**64 - 1) + b"k" * 30]), ["name of key number 0"]),
    "empty key": (build([scalar("", U64, 1)]), ["key number 0"]),
    "long key": (build([scalar("k" * 65536, U8, 1)]), ["key number 0", "65536"]),
    "duplicate long key": (build([scalar("k" * 60000, U8, 1)] * 2), [f"'{'k' * 64}'... appears twice"]),
    "key that is not UTF-8": (build([scalar(b"caf\xe9", U64, 1)]), ["key number 0", "UTF-8"]),
    "duplicate key": (build([scalar("a.b", U8, 1), scalar("a.b", U8, 2)]), ["'a.b' appears twice"]),
    "unknown value type": (build([string("a.b") + struct.pack("<IQ", 13, 0)]), ["'a.b'", "type 13"]),
    "huge value type": (build([string("a.b") + struct.pack("<IQ", 2**32 - 1, 0)]), ["'a.b'", "type 4294967295"]),
    "unknown element type": (build([string("a.b") + struct.pack("<IIQ", 9, 77, 1) + b"x"]), ["'a.b'", "type 77"]),
    "bool of 2": (build([string("a.b") + struct.pack("<IB", BOOL, 2) + bytes(8)]), ["'a.b'", "bool"]),
    "bools of 2": (build([string("a.b") + struct.pack("<IIQ", 9, BOOL, 3) + b"\0\2\1"]), ["'a.b'", "bool"]),
    "string of huge length": (build([string("a.b") + struct.pack("<IQ", STRING, HUGE) + bytes(9)]), ["'a.b'"]),
    "string that is not UTF-8": (build([scalar("a.b", STRING, b"caf\xe9")]), ["'a.b'", "UTF-8"]),
    "scalar cut": (build([scalar("a.b", U64, 1)])[:-1], ["'a.b'"]),
    "array of huge count": (build([array("a.b", U8, [1], HUGE)]), ["'a.b'", str(HUGE)]),
    "array whose bytes overflow": (build([array("a.b", U64, [1], 2**61)]), ["'a.b'", str(2**61)]),
    "array longer than the file": (build([array("a.b", U32, [1, 2], 3)]), ["'a.b'", "3 elements"]),
    "strings of huge count": (build([array("a.b", STRING, ["x"], 2**61)]), ["'a.b'", str(2**61)]),
    "strings longer than the file": (build([array("a.b", STRING, ["x" * 9], 2)]), ["'a.b'"]),
    "string of huge length in an array": (
        build([string("a.b") + struct.pack("<IIQQ", 9, STRING, 1, HUGE) + b"x"]),
        ["'a.b'"],
    ),
    "string of length 2^64-1 in an array": (
        build([string("a.b") + struct.pack("<IIQQQ", 9, STRING, 2, 2**64 - 1, 0) + b"x"]),
        ["'a.b'"],
    ),
    "last string too long": (build([array("a.b", STRING, ["x", "abc"])])[:-1], ["'a.b'"]),
    "alignment 0": (build([scalar("general.alignment", U32, 0)]), ["'general.alignment' is 0"]),
    "alignment 24": (build([scalar("general.alignment", U32, 24)]), ["'general.alignment' is 24"]),
    "alignment -8": (build([scalar("general.alignment", I32, -8)]), ["'general.alignment' is -8"]),
    "alignment text": (build([scalar("general.alignment", STRING, "32")]), ["'general.alignment'", "'32'"]),
    "alignment true": (build([scalar("general.alignment", BOOL, True)]), ["'general.alignment' is True"]),
    "alignment beyond the file": (
        build([scalar("general.alignment", U64, 2**63)], [T], b"data"),
        ["tensor 't'", "the file ends at"],
    ),
    "empty tensor name": (build([], [tensor("", [4], 24, 0)], b"data"), ["tensor number 0"]),
    "tensor name that is not UTF-8": (build([], [tensor(b"\xff", [4], 24, 0)], b"data"), ["tensor number 0", "UTF-8"]),
    "duplicate tensor": (build([], [T, tensor("t", [4], 24, 32)], bytes(64)), ["tensor 't' appears twice"]),
    "five dimensions": (build([], [tensor("t", [1] * 5, 24, 0)], b"data"), ["tensor 't' has 5 dimensions"]),
    "2^32-1 dimensions": (build([], [string("t") + b"\xff" * 40], b"data"), ["tensor 't' has 4294967295 dimensions"]),
    "dimension 0": (build([], [tensor("t", [4, 0], 24, 0)], b"data"), ["tensor 't'", "dimension of 0"]),
    "dimension -1": (build([], [tensor("t", [-1, -4], 24, 0)], b"data"), ["tensor 't'", "dimension of -1"]),
    "dimensions whose product overflows": (
        build([], [tensor("t", [2**32, 2**32], 24, 0)], b"data"),
        ["tensor 't'", "the file ends at"],
    ),
    "dimensions whose product wraps to 4": (
        build([], [tensor("t", [2**62 + 1, 4], 24, 0)], b"data"),
        ["tensor 't'", "the file ends at"],
    ),
    "rows of half a block": (build([], [tensor("t", [16, 2], 2, 0)], bytes(18)), ["tensor 't'", "16", "Q4_0"]),
    "type 43": (build([], [tensor("t", [4], 43, 0)], b"data"), ["tensor 't'", "unknown type 43"]),
    "type 2^32-1": (build([], [tensor("t", [4], 2**32 - 1, 0)], b"data"), ["tensor 't'", "unknown type"]),
    "misaligned": (build([], [tensor("t", [4], 24, 4)], bytes(64)), ["tensor 't'", "offset 4"]),
    "offset beyond the file": (build([], [tensor("t", [4], 24, 32)], bytes(32)), ["tensor 't'", "the file ends at"]),
    "offset 2^64-32": (build([], [tensor("t", [4], 24, 2**64 - 32)], bytes(32)), ["tensor 't'", "the file ends at"]),
    "a byte too long": (build([], [tensor("t", [5], 24, 0)], b"data"), ["tensor 't'", "the file ends at"]),
    "overlapping": (
        build([], [tensor("u", [33], 24, 0), tensor("v", [4], 24, 32)], bytes(64)),
        ["tensors 'u' and 'v' overlap"],
    ),
    "one inside the other": (
        build([], [tensor("v", [4], 24, 64), tensor("u", [128], 24, 0)], bytes(128)),
        ["tensors 'u' and 'v' overlap"],
    ),
    "in the same place": (build([], [T, tensor("u", [4], 24, 0)], bytes(64)), ["tensors 't' and 'u' overlap"]),
    "no data section": (build([], [T]), ["tensor 't'", "the file ends at"]),
}

UNSUPPORTED: dict[str, tuple[bytes, list[str]]] = {
    "version 1": (build([], version=1), ["version 1"]),
    "version 4": (build([], version=4), ["version 4"]),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), ["big-endian"]),
    "arrays in an array": (build([string("a.b") + struct.pack("<IIQ", 9, 9, 1) + bytes(32)]), ["'a.b'"]),
    **{
        f"type {name}": (build([], [tensor("t", [256], id, 0)], bytes(512)), ["tensor 't'", name])
        for id, name in REFUSED.items()
    },
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged(case: str, tmp_path: Path) -> None:
    content, words = DAMAGED[case]
    refused(write(tmp_path / "m.gguf", content), "m.gguf", *words)


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported(case: str, tmp_path: Path) -> None:
    content, words = UNSUPPORTED[case]
    refused(write(tmp_path / "m.gguf", content), "m.gguf", *words, kind=UnsupportedModelError)


@pytest.mark.parametrize("model", MODELS)
def test_cut_at_every_percent(model: str, tmp_path: Path) -> None:
    path = Path(shutil.copy(HERE / model, tmp_path / "m.gguf"))
    size = path.stat().st_size
    for percent in range(99, -1, -1):
        os.truncate(path, size * percent // 100)
        refused(path, "m.gguf")


def tiny(data: bytes = bytes(165)) -> bytes:
    """Every kind of field, in 500 bytes."""
    entries = [scalar("general.architecture", STRING, "llama"), scalar("f", F32, 1.5), scalar("b", BOOL, True)]
    entries += [array("tokens", STRING, ["a", "", "ccc"]), array("ints", I16, [1, -2, 3]), scalar("u", U64, 2**63)]
    tensors = [tensor("one", [8, 2], 0, 0), tensor("two", [32, 2, 1], 8, 64), tensor("three", [5], 24, 160)]
    return build(entries, tensors, data)


def test_cut_at_every_byte(tmp_path: Path) -> None:
    content = tiny()
    path = write(tmp_path / "m.gguf", content)
    with GGUF.open(path) as file:
        assert [t.nbytes for t in file.tensors.values()] == [64, 68, 5]
    for size in range(len(content) - 1, -1, -1):
        os.truncate(path, size)
        refused(path, "m.gguf")


def test_every_bit_of_the_header_flipped(tmp_path: Path) -> None:
    """Each flip is noticed, or it changed a value or a name to another sound one, which nothing can notice."""
    content = tiny()
    path = tmp_path / "m.gguf"
    with GGUF.open(write(path, content)) as file:
        header, sound = file.shards[0].data_offset, snapshot(file)
    unnoticed = []
    for i in range(header):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[i] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                with GGUF.open(path) as file:
                    if snapshot(file) == sound:
                        unnoticed.append((i, bit))
            except ReflexError as error:
                assert isinstance(error, ModelFileError | UnsupportedModelError)
                assert str(error).startswith(f"{path}: ")
    padding = range(len(tiny(data=b"")), header)
    assert unnoticed == [(i, bit) for i in padding for bit in range(8)]
    for i in (*range(4), *range(9, 24)):  # magic and counts; one tensor fewer is a sound file, its data a little longer
        flipped = bytearray(content)
        flipped[i] ^= 1
        refused(write(path, bytes(flipped)), "m.gguf")


def snapshot(file: GGUF) -> tuple[int, list[Any], list[Tensor]]:
    def raw(value: Any) -> Any:
        return value.raw if isinstance(value, StringArray) else plain(value)

    return file.version, [(key, raw(value)) for key, value in file.metadata.items()], list(file.tensors.values())
