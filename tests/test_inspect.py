"""What `reflex inspect` says, against the `gguf` package and against files made to confuse a terminal."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import pytest
from gguf_bytes import BOOL, F32, F64, I32, STRING, U8, U16, U32, array, build, scalar, tensor

from reflex_ipc import archs
from reflex_ipc.errors import ModelFileError
from reflex_ipc.gguf import GGUF
from reflex_ipc.inspect import add_plan, describe, render
from reflex_ipc.ops import LatentAttention

HERE = Path(__file__).parent
MODELS = ["exact/llama-f16.gguf", "exact/qwen35-f16.gguf", "quantised/qwen3moe-w256-MXFP4_MOE.gguf"]


def described(path: Path) -> dict[str, Any]:
    with GGUF.open(path) as file:
        return describe(file)


def made(tmp_path: Path, *entries: bytes, tensors: list[bytes] | None = None, data: bytes = b"") -> dict[str, Any]:
    path = tmp_path / "made.gguf"
    path.write_bytes(build([*entries], tensors, data))
    return described(path)


def row(text: str, name: str) -> str:
    """What follows `name` in the only line that begins with it, runs of spaces made one."""
    (line,) = (line for line in text.splitlines() if line.split()[:1] == [name])
    return " ".join(line.split()[1:])


@pytest.mark.parametrize("model", MODELS)
def test_describes_what_the_package_reads(fixtures: Path, model: str) -> None:
    path = fixtures / model
    theirs = gguf.GGUFReader(path)
    found = described(path)
    assert found == json.loads(json.dumps(found, allow_nan=False))
    assert found["files"] == [{"path": str(path), "bytes": path.stat().st_size, "data_offset": theirs.data_offset}]
    assert (found["bytes"], found["version"], found["alignment"]) == (path.stat().st_size, 3, 32)
    assert found["metadata"] == {
        key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")
    }
    assert found["tensors"] == [
        {
            "name": t.name,
            "type": t.tensor_type.name,
            "ne": t.shape.tolist(),
            "shape": t.shape.tolist()[::-1],
            "bytes": t.n_bytes,
            "file": 0,
            "offset": t.data_offset,
        }
        for t in theirs.tensors
    ]
    tensors, elements, sizes = Counter[str](), Counter[str](), Counter[str]()
    for t in theirs.tensors:
        tensors[t.tensor_type.name] += 1
        elements[t.tensor_type.name] += t.n_elements
        sizes[t.tensor_type.name] += t.n_bytes
    assert found["types"] == {
        name: {"tensors": tensors[name], "elements": elements[name], "bytes": sizes[name]} for name in tensors
    }


@pytest.mark.parametrize("model", MODELS)
def test_text_has_every_key_and_tensor(fixtures: Path, model: str) -> None:
    path = fixtures / model
    theirs = gguf.GGUFReader(path)
    text = render(described(path))
    for key in theirs.fields:
        if not key.startswith("GGUF."):
            assert row(text, key) != ""
    for t in theirs.tensors:
        shape = " x ".join(map(str, t.shape.tolist()[::-1]))
        assert row(text, t.name) == f"{t.tensor_type.name} {shape} {t.n_bytes:,}"
    total = f"{len(theirs.tensors):,} {sum(t.n_elements for t in theirs.tensors):,} "
    assert row(text, "total").startswith(total)
    assert text.endswith("\n") and not text.endswith("\n\n")
    assert all(line == line.rstrip() for line in text.splitlines())


def test_demo_model(smollm2: Path) -> None:
    found = described(smollm2)
    assert found["tokenizer"] == {
        "model": "gpt2",
        "pre": "smollm",
        "n_vocab": 49152,
        "n_merges": 48900,
        "bos": {"id": 1, "text": "<|im_start|>"},
        "eos": {"id": 2, "text": "<|im_end|>"},
        "add_bos": False,
        "chat_template": True,
    }
    text = render(found)
    assert "98,362,432 bytes" in text
    assert row(text, "llama.embedding_length") == "576"
    assert row(text, "llama.attention.layer_norm_rms_epsilon") == "1e-05"
    assert row(text, "token_embd.weight") == "Q8_0 49152 x 576 30,081,024"
    assert row(text, "Q4_1") == "210 106,168,320 66,355,200 63.3 MiB"
    assert row(text, "tokens") == "49,152"
    assert row(text, "bos") == '1 "<|im_start|>"'
    assert "add bos        no" in text
    assert "chat template  yes" in text
    assert (
        '["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>", "<file_sep>", ...] (49,152)'
        in text
    )
    assert max(map(len, text.splitlines())) < 250


def test_without_a_tokenizer_or_tensors(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert found["tokenizer"] is None and found["tensors"] == [] and found["types"] == {}
    text = render(found)
    assert "tokenizer: none" in text and "tensors: none" in text and "metadata (0)" in text


def test_a_sparse_tokenizer(tmp_path: Path) -> None:
    found = made(
        tmp_path,
        array("tokenizer.ggml.tokens", STRING, ["a", b"\xff"]),
        scalar("tokenizer.ggml.bos_token_id", U32, 2),
        scalar("tokenizer.ggml.eos_token_id", I32, 1),
    )
    assert found["tokenizer"] == {
        "model": None,
        "pre": None,
        "n_vocab": 2,
        "n_merges": 0,
        "bos": {"id": 2, "text": None},
        "eos": {"id": 1, "text": "\ufffd"},
        "add_bos": None,
        "chat_template": False,
    }
    assert found["metadata"]["tokenizer.ggml.tokens"] == ["a", "\ufffd"]
    text = render(found)
    assert "bos            2 (not in the vocabulary)" in text
    assert "add bos        not said" in text


def test_tokenizer_keys_of_a_wrong_type(tmp_path: Path) -> None:
    for key in ("tokens", "merges", "bos_token_id", "model", "add_bos_token"):
        entries = [array("tokenizer.ggml.tokens", STRING, ["a"])] if key != "tokens" else []
        with pytest.raises(ModelFileError, match=f"'tokenizer.ggml.{key}'"):
            made(tmp_path, *entries, array(f"tokenizer.ggml.{key}", U8, [1]))


def test_values_on_one_line(tmp_path: Path) -> None:
    found = made(
        tmp_path,
        scalar("a.nan", F32, float("nan")),
        scalar("a.inf", F64, float("-inf")),
        scalar("a.third", F64, 1 / 3),
        scalar("a.yes", BOOL, True),
        array("a.infs", F32, [float("inf"), 1.0]),
        array("a.six", U8, [1, 2, 3, 4, 5, 6]),
        array("a.seven", U8, [1, 2, 3, 4, 5, 6, 7]),
        array("a.flags", BOOL, [True, False]),
        scalar("a.quote", STRING, 'say "\\n"'),
        scalar("a.long", STRING, "x" * 97),
        scalar("a.just", STRING, "y" * 96),
    )
    assert found["metadata"]["a.nan"] == "nan" and found["metadata"]["a.inf"] == "-inf"
    assert found["metadata"]["a.infs"] == ["inf", 1.0]
    assert found["metadata"]["a.third"] == 1 / 3
    json.dumps(found, allow_nan=False)
    text = render(found)
    assert row(text, "a.third") == "0.3333333"
    assert row(text, "a.yes") == "true"
    assert row(text, "a.six") == "[1, 2, 3, 4, 5, 6]"
    assert row(text, "a.seven") == "[1, 2, 3, 4, 5, 6, ...] (7)"
    assert row(text, "a.flags") == "[true, false]"
    assert row(text, "a.quote") == r'"say \"\\n\""'
    assert row(text, "a.long") == f'"{"x" * 96}..." (97 letters)'
    assert row(text, "a.just") == f'"{"y" * 96}"'


def test_nothing_in_a_file_moves_the_cursor(tmp_path: Path) -> None:
    evil = "\x1b[2J\r\n\x07\u202e\x9b"
    found = made(
        tmp_path,
        scalar("key" + evil, STRING, evil),
        array("tokenizer.ggml.tokens", STRING, [evil]),
        scalar("tokenizer.ggml.eos_token_id", U8, 0),
        scalar("tokenizer.ggml.model", STRING, evil),
        tensors=[tensor("name" + evil, [4], 24, 0)],
        data=b"data",
    )
    assert found["tensors"][0]["name"] == "name" + evil  # JSON escapes by itself
    text = render(found)
    assert all(line.isprintable() for line in text.split("\n"))
    assert "key\\x1b[2J\\r\\n\\x07\\u202e\\x9b" in text
    assert "name\\x1b[2J\\r\\n" in text


def test_shards(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, path in enumerate(paths):
        keys = [scalar("split.no", U16, i), scalar("split.count", U16, 2), scalar("split.tensors.count", I32, 2)]
        path.write_bytes(build(keys, [tensor(f"t{i}", [4], 24, 0)], b"data"))
    found = described(paths[0])
    assert [file["path"] for file in found["files"]] == [str(path) for path in paths]
    assert found["bytes"] == sum(path.stat().st_size for path in paths)
    assert [t["file"] for t in found["tensors"]] == [0, 1]
    text = render(found)
    assert row(text, "name") == "type shape bytes file"
    assert row(text, "t0") == "I8 4 4 1"
    assert row(text, "t1") == "I8 4 4 2"
    for path in paths:
        assert row(text, str(path)) == f"{path.stat().st_size} bytes"


def test_memory_is_shown_when_given(tmp_path: Path) -> None:
    found = made(tmp_path)
    assert "memory a run needs" not in render(found)
    need = {"weights": 3 << 30, "cache": 5 << 20, "scratch": 1536, "fixed_state": 0, "bytes_per_token": 23040}
    found["memory"] = [{"backend": name, "total": 1023, **need} for name in ("cpu", "cuda")]
    text = render(found)
    for name in ("cpu", "cuda"):
        assert row(text, name) == "3.0 GiB 5.0 MiB 1.5 KiB 1023 B 0 B 22.5 KiB"


def test_scratch_of_latents_that_are_expanded(fixtures: Path) -> None:
    """Of DeepSeek-V2-Lite's positions, that are keys and values of each head for a while: two halves a number and a
    scale, of as many heads as 256 MiB hold, or of one."""
    with GGUF.open(fixtures / "exact/deepseek2-lite-f16.gguf") as file:
        op = next(op for op in archs.build(file).ops if isinstance(op, LatentAttention))
        position = 4 * (op.q.width + op.out.width) // op.n_head + 16

        def scratch(context: int) -> int:
            found: dict[str, Any] = {}
            add_plan(found, file, context)
            (entry,) = (entry for entry in found["memory"] if entry["backend"] == "cuda")
            return int(entry["scratch"])

        short = scratch(512)
        for context in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
            expanded = min(op.n_head * position * context, max(256 << 20, position * context))
            assert 0 < scratch(context) - expanded < short + (2 << 20)
