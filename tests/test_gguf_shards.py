"""Models in several files: as the `gguf` package writes them, and as they should not be."""

import os
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_bytes import I32, STRING, U16, build, scalar, tensor, write
from gguf_refusal import refused

from reflex_ipc.gguf import GGUF


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
        assert len(file.shards) == 3
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
        assert len(file.shards) == 1
    refused(write(tmp_path / "n.gguf", shard(0, 1, 2)), "'split.tensors.count' is 2, but 1")
