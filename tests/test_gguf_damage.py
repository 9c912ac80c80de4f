"""Files that are not what they claim to be: other things, damaged, cut, one bit off; each a typed error."""

import os
import shutil
import socket
import stat
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf_bytes import (
    BOOL,
    F32,
    I16,
    I32,
    REFUSED,
    STRING,
    U8,
    U32,
    U64,
    array,
    build,
    scalar,
    string,
    tensor,
    write,
)
from gguf_refusal import refused

from reflex_ipc.errors import ModelFileError, ReflexError, UnsupportedModelError
from reflex_ipc.gguf import GGUF, StringArray, Tensor

HERE = Path(__file__).parent
MODELS = sorted(path.relative_to(HERE).as_posix() for path in (HERE / "fixtures").glob("*/*.gguf"))


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
        if isinstance(value, StringArray):
            return value.raw
        return list(value) if isinstance(value, memoryview) else value

    return file.version, [(key, raw(value)) for key, value in file.metadata.items()], list(file.tensors.values())
