"""What `reflex inspect` shows: a description of an open model file, as plain values or as text."""

from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from reflex_ipc.gguf import GGUF, StringArray, Value
from reflex_ipc.plan import PREFILL_CHUNK, Plan
from reflex_ipc.terminal import visible

_SHOWN = 6  # elements of an array that the text shows
_WIDTH = 96  # letters of a value that the text shows


def describe(gguf: GGUF) -> dict[str, Any]:
    """Everything the file says, ready for JSON: arrays whole, bytes that are no UTF-8 replaced, NaN and infinities as
    strings. Sizes and offsets in bytes; `shape` in NumPy's order, `ne` in the file's. Raises ModelFileError if a
    tokenizer key has a wrong type.
    """
    types: dict[str, dict[str, int]] = {}
    for tensor in gguf.tensors.values():
        total = types.setdefault(tensor.type.name, {"tensors": 0, "elements": 0, "bytes": 0})
        total["tensors"] += 1
        total["elements"] += tensor.n_elements
        total["bytes"] += tensor.nbytes
    return {
        "files": [{"path": s.path, "bytes": s.size, "data_offset": s.data_offset} for s in gguf.shards],
        "bytes": sum(s.size for s in gguf.shards),
        "version": gguf.version,
        "alignment": gguf.alignment,
        "metadata": {key: _plain(value) for key, value in gguf.metadata.items()},
        "tokenizer": _tokenizer(gguf),
        "tensors": [
            {
                "name": t.name,
                "type": t.type.name,
                "ne": list(t.ne),
                "shape": list(t.shape),
                "bytes": t.nbytes,
                "file": t.shard,
                "offset": t.offset,
            }
            for t in gguf.tensors.values()
        ],
        "types": types,
    }


def add_plan(description: dict[str, Any], gguf: GGUF, context: int | None) -> None:
    """What a program makes of the tensors: the entries `memory` and `ignored`, tensors that take no part in generation
    (prediction blocks, vision). Raises UnsupportedModelError and ModelFileError as opening the model would."""
    from reflex_ipc import archs
    from reflex_ipc.reference import memory

    plan = archs.build(gguf)
    n_ctx = plan.n_ctx_train if context is None else context
    need = memory.estimate(plan, n_ctx)
    per_token, fixed = plan.state_elements()
    description["memory"] = [
        {
            "backend": "cpu",
            "context": n_ctx,
            "weights": need.weights,
            "cache": need.cache,
            "scratch": need.scratch,
            "total": need.total,
            "fixed_state": 4 * fixed,
            "bytes_per_token": 4 * per_token,
        }
    ]
    on_device = _on_device(gguf, plan, n_ctx)
    if on_device is not None:
        description["memory"].append(on_device)
    description["ignored"] = list(plan.ignored)


def _on_device(gguf: GGUF, plan: Plan, n_ctx: int) -> dict[str, Any] | None:
    """The same for a CUDA device, None for a model that runs on the CPU only: the file's own bytes, a half-precision
    cache in pages, recurrent states twice."""
    from reflex_ipc.cuda import families
    from reflex_ipc.cuda.fuse import fused
    from reflex_ipc.cuda.places import PAGE, CacheLayout, Columns
    from reflex_ipc.cuda.room import working_space
    from reflex_ipc.cuda.weights import Weights
    from reflex_ipc.errors import UnsupportedModelError

    try:
        families.check(plan)
    except UnsupportedModelError:
        return None
    layout, columns = CacheLayout(plan), Columns(fused(plan), plan.logits.name)
    _, fixed = plan.state_elements()
    weights = Weights(gguf, plan).size
    cache = layout.pages(n_ctx) * layout.page_bytes + 2 * 4 * fixed
    scratch = working_space(plan, columns, min(n_ctx, PREFILL_CHUNK), n_ctx)
    return {
        "backend": "cuda",
        "context": n_ctx,
        "weights": weights,
        "cache": cache,
        "scratch": scratch,
        "total": weights + cache + scratch,
        "fixed_state": 2 * 4 * fixed,
        "bytes_per_token": layout.page_bytes // PAGE,
    }


def render(description: dict[str, Any]) -> str:
    """The description as text for a terminal, long values shortened, control characters escaped.

    `description` is what `describe` returned. If it has an entry `memory`, a list of what a run needs on each backend
    with the keys backend, weights, cache, scratch, total, fixed_state and bytes_per_token, that is shown too.
    """
    sections = [
        _files(description),
        _metadata(description["metadata"]),
        _tokenizer_text(description["tokenizer"]),
        _tensors(description["tensors"]),
        _types(description["types"]),
        _ignored(description.get("ignored", ())),
        _memory(description.get("memory", ())),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _plain(value: Value) -> Any:
    if isinstance(value, StringArray):
        return [raw.decode(errors="replace") for raw in value.raw]
    if isinstance(value, memoryview):
        return [_plain(element) for element in value]
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    return value


def _tokenizer(gguf: GGUF) -> dict[str, Any] | None:
    tokens = gguf.strings("tokenizer.ggml.tokens", None)
    if tokens is None:
        return None
    merges = gguf.strings("tokenizer.ggml.merges", None)

    def token(name: str) -> dict[str, Any] | None:
        id = gguf.int(f"tokenizer.ggml.{name}_token_id", None)
        if id is None:
            return None
        return {"id": id, "text": tokens.raw[id].decode(errors="replace") if 0 <= id < len(tokens) else None}

    return {
        "model": gguf.str("tokenizer.ggml.model", None),
        "pre": gguf.str("tokenizer.ggml.pre", None),
        "n_vocab": len(tokens),
        "n_merges": 0 if merges is None else len(merges),
        "bos": token("bos"),
        "eos": token("eos"),
        "add_bos": gguf.bool("tokenizer.ggml.add_bos_token", None),
        "chat_template": "tokenizer.chat_template" in gguf.metadata,
    }


def _files(description: dict[str, Any]) -> list[str]:
    rows = [(visible(file["path"]), f"{file['bytes']:,} bytes") for file in description["files"]]
    size = _size(description["bytes"])
    return [*_table(rows, "<>"), f"GGUF version {description['version']}, {size}, alignment {description['alignment']}"]


def _metadata(metadata: dict[str, Any]) -> list[str]:
    rows = [(visible(key), _short(value)) for key, value in metadata.items()]
    return [f"metadata ({len(rows)})", *_table(rows, "<<", "  ")]


def _tokenizer_text(tokenizer: dict[str, Any] | None) -> list[str]:
    if tokenizer is None:
        return ["tokenizer: none in this file"]

    def token(entry: dict[str, Any] | None) -> str:
        if entry is None:
            return "none"
        return f"{entry['id']} {'(not in the vocabulary)' if entry['text'] is None else _short(entry['text'])}"

    add_bos = {True: "yes", False: "no", None: "not said"}[tokenizer["add_bos"]]
    rows = [
        ("model", _short(tokenizer["model"])),
        ("pre", _short(tokenizer["pre"])),
        ("tokens", f"{tokenizer['n_vocab']:,}"),
        ("merges", f"{tokenizer['n_merges']:,}"),
        ("bos", token(tokenizer["bos"])),
        ("eos", token(tokenizer["eos"])),
        ("add bos", add_bos),
        ("chat template", "yes" if tokenizer["chat_template"] else "no"),
    ]
    return ["tokenizer", *_table(rows, "<<", "  ")]


def _tensors(tensors: Sequence[dict[str, Any]]) -> list[str]:
    if not tensors:
        return ["tensors: none in this file"]
    rows = [("name", "type", "shape", "bytes", "file")]
    for t in tensors:
        shape = " x ".join(map(str, t["shape"]))
        rows.append((visible(t["name"]), t["type"], shape, f"{t['bytes']:,}", str(t["file"] + 1)))
    columns = 5 if any(t["file"] for t in tensors) else 4
    return [f"tensors ({len(tensors)})", *_table([row[:columns] for row in rows], "<<<>>", "  ")]


def _types(types: dict[str, dict[str, int]]) -> list[str]:
    if not types:
        return []
    total = {key: sum(t[key] for t in types.values()) for key in ("tensors", "elements", "bytes")}
    rows = [
        (name, f"{t['tensors']:,}", f"{t['elements']:,}", f"{t['bytes']:,}", _size(t["bytes"]))
        for name, t in [*types.items(), ("total", total)]
    ]
    return ["types", *_table([("type", "tensors", "elements", "bytes", ""), *rows], "<>>>>", "  ")]


def _ignored(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    blocks = tuple(dict.fromkeys(f"{block}." for block, found, _ in (n.partition(".nextn.") for n in names) if found))
    others = [name for name in names if not name.startswith(blocks)]
    lines = [f"  {visible(block)}*, which predicts further tokens" for block in blocks]
    return [f"not used for generation ({len(names)} tensors)", *lines, *([f"  {_short(others)}"] if others else [])]


def _memory(entries: Iterable[dict[str, Any]]) -> list[str]:
    columns = ("weights", "cache", "scratch", "total", "fixed_state", "bytes_per_token")
    rows = [(entry["backend"], *(_size(entry[column]) for column in columns)) for entry in entries]
    if not rows:
        return []
    heading = ("backend", "weights", "cache", "scratch", "total", "fixed state", "a token")
    return ["memory a run needs", *_table([heading, *rows], "<>>>>>>", "  ")]


def _table(rows: Sequence[Sequence[str]], align: str, indent: str = "") -> list[str]:
    """Rows as lines with columns in line; `align` has a < or > for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (indent + "  ".join(f"{cell:{a}{width}}" for cell, a, width in zip(row, align, widths, strict=False))).rstrip()
        for row in rows
    ]


def _short(value: Any) -> str:
    """A metadata value on one line."""
    if isinstance(value, list):
        shown = ", ".join(_short(element) for element in value[:_SHOWN])
        return f"[{shown}]" if len(value) <= _SHOWN else f"[{shown}, ...] ({len(value):,})"
    if isinstance(value, str):
        text = visible(value[:_WIDTH].replace("\\", "\\\\").replace('"', '\\"'))
        return f'"{text}"' if len(value) <= _WIDTH else f'"{text}..." ({len(value):,} letters)'
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "none"
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def _size(n: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if n >= unit:
            return f"{n / unit:.1f} {name}"
    return f"{n} B"
