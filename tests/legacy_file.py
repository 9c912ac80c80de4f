"""deepseek2 files as they were before keys' matrices were absorbed, made from the new ones.

One `attn_kv_b` {rank, n_head * (d_nope + d_v)} a layer in place of `attn_k_b`, turned over, and `attn_v_b`; as many key
heads as query heads; no `_mla` keys, for the plain ones say what a head has. Written from the format's description
alone: of the package only the table of types and their dequantisation.
"""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import gguf_bytes as g
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from reflex_ipc.check import relative_error
from reflex_ipc.cuda.executor import CudaExecutor
from reflex_ipc.cuda.fuse import Group
from reflex_ipc.gguf import TYPES
from reflex_ipc.ops import LatentAttention
from reflex_ipc.reference.dequant import dequantise
from reflex_ipc.reference.ops import FUNCTIONS, Run

Array = npt.NDArray[Any]
IDS = {kind.name: number for number, kind in TYPES.items()}


def write(source: Path, out: Path, kind: str = "F16", rank: int | None = None) -> Path:
    """The legacy twin of a file, its `attn_kv_b` of this type: the same numbers as F16, and near them as Q8_0.

    As Q4_K, which wants a `rank` that is a multiple of 256, they are random ones of that spread, and so is what makes
    latents.
    """
    raw = source.read_bytes()
    metadata, tensors = g.read_plainly(raw)
    p = "deepseek2."
    n_head, d_nope = metadata[p + "attention.head_count"], 0
    rng = np.random.default_rng(1)
    made: dict[str, tuple[int, list[int], bytes]] = {}
    for name, (number, ne, at) in tensors.items():
        size = prod(ne) // TYPES[number].block * TYPES[number].size
        made[name] = number, ne, raw[at : at + size]
    for name in [name for name in made if name.endswith("attn_k_b.weight")]:
        keys, values = (_numbers(made.pop(part)) for part in (name, name.replace("attn_k_b", "attn_v_b")))
        d_nope = keys.shape[2]
        kv_b = np.concatenate([keys.transpose(0, 2, 1), values], axis=1)  # (n_head, d_nope + d_v, rank)
        if rank is not None:
            kv_b = (rng.standard_normal((*kv_b.shape[:2], rank)) * kv_b.std()).astype(np.float32)
            _widen(made, name.partition("attn_k_b")[0], rank, metadata[p + "rope.dimension_count"], rng)
        rows = kv_b.reshape(-1, kv_b.shape[2])
        made[name.replace("attn_k_b", "attn_kv_b")] = IDS[kind], [rows.shape[1], len(rows)], PACKED[kind](rows)
    metadata[p + "attention.head_count_kv"] = n_head
    metadata[p + "attention.key_length"] = metadata.pop(p + "attention.key_length_mla")
    metadata[p + "attention.value_length"] = metadata.pop(p + "attention.value_length_mla")
    assert metadata[p + "attention.key_length"] == d_nope + metadata[p + "rope.dimension_count"]
    if rank is not None:
        metadata[p + "attention.kv_lora_rank"] = rank
    return put_together(metadata, made, out)


def put_together(metadata: dict[str, Any], tensors: dict[str, tuple[int, list[int], bytes]], out: Path) -> Path:
    """A file of these: a tensor is (number of its type, ne, content)."""
    data, infos = bytearray(), []
    for name, (number, ne, content) in tensors.items():
        data += bytes(-len(data) % 32)
        infos.append(g.tensor(name, ne, number, len(data)))
        data += content
    return g.write(out, g.build([_entry(key, value) for key, value in metadata.items()], infos, bytes(data)))


def latent_errors(legacy: CudaExecutor, absorbed: CudaExecutor, run: Run) -> list[float]:
    """How far, layer by layer, latent attention of a legacy file is from that of the file it was made from, both on the
    reference's values of a step, `run`; relative, as `reflex check` has it."""

    def feed(group: Group) -> dict[str, bytes]:
        return {value.name: run[value].astype(np.float32).tobytes() for value in group.inputs}

    errors = []
    for (group, left), (_, same) in zip(legacy.trace(run.step, feed), absorbed.trace(run.step, feed), strict=True):
        for op in group.parts:
            run.values[op.out.name] = FUNCTIONS[type(op)](op, run)
            if isinstance(op, LatentAttention):
                a, b = (np.frombuffer(values[op.out.name], np.float32) for values in (left, same))
                errors.append(relative_error(a, b))
    run.states.n_past += run.step.n_keep
    return errors


def _numbers(tensor: tuple[int, list[int], bytes]) -> Array:
    number, ne, content = tensor
    return dequantise(content, TYPES[number].name, prod(ne)).reshape(ne[::-1])


def _widen(made: dict[str, Any], block: str, rank: int, n_rot: int, rng: np.random.Generator) -> None:
    """What a layer has between its input and its latents, random, for latents of this rank."""
    _, (n_embd, _), _ = made[block + "attn_kv_a_mqa.weight"]
    spread = _numbers(made[block + "attn_kv_a_mqa.weight"]).std()
    matrix = (rng.standard_normal((rank + n_rot, n_embd)) * spread).astype(np.float16)
    made[block + "attn_kv_a_mqa.weight"] = IDS["F16"], [n_embd, rank + n_rot], matrix.tobytes()
    norm = (1 + rng.standard_normal(rank) / 10).astype(np.float32)
    made[block + "attn_kv_a_norm.weight"] = IDS["F32"], [rank], norm.tobytes()


def _q8_0(rows: Array) -> bytes:
    """Blocks of 32: a half-precision scale, then signed bytes."""
    blocks = rows.reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    levels = np.round(blocks / np.maximum(scale.astype(np.float32), 1e-12)).clip(-127, 127).astype(np.int8)
    return np.concatenate([scale.view(np.uint8), levels.view(np.uint8)], axis=1).tobytes()


def _q4_k(rows: Array) -> bytes:
    """Any bits are a block of 256 but for its two half-precision scales, which come first: of the runs' scales and of
    their minima. Levels are 7.5 on average."""
    raw = np.random.default_rng(2).integers(0, 256, (rows.size // 256, 144), dtype=np.uint8)
    raw[:, :4] = np.array([1, 7.5], np.float16).view(np.uint8)
    spread = dequantise(raw.tobytes(), "Q4_K", rows.size).std()
    raw[:, :4] = np.array([rows.std() / spread, 7.5 * rows.std() / spread], np.float16).view(np.uint8)
    return raw.tobytes()


PACKED: dict[str, Callable[[Array], bytes]] = {
    "F16": lambda rows: rows.astype(np.float16).tobytes(),
    "Q8_0": _q8_0,
    "Q5_0": lambda rows: quantize(rows, GGMLQuantizationType.Q5_0).tobytes(),
    "Q5_1": lambda rows: quantize(rows, GGMLQuantizationType.Q5_1).tobytes(),
    "Q4_K": _q4_k,
}


def _entry(key: str, value: Any) -> bytes:
    if isinstance(value, list):
        return g.array(key, _kind(value[0]), value)
    return g.scalar(key, _kind(value), value)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return g.BOOL
    if isinstance(value, int):
        return g.I32 if value < 0 else g.U32
    return g.F32 if isinstance(value, float) else g.STRING
