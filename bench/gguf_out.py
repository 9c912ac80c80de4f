"""Writes GGUF files of random weights as fast as the disk takes them, with NumPy and nothing else.

A tensor's blocks come from a pool of its type and width, begun anywhere and gone round as often as needed: speed does
not depend on weights, so they need not differ everywhere. Within a block all bits are random but the scales, which are
set so that a row times a normalised vector is about as large as the vector.
"""

import lzma
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

ALIGNMENT = 32
POOL = 262_147  # blocks; a prime, so that rows repeat only after so many, and no vocabulary has so many
WRITERS = 4  # threads: one does not fill a fast disk's cache
Bytes = npt.NDArray[np.uint8]


class Type(NamedTuple):
    """A tensor type. halves: (offset, factor) of each 16-bit scale in a block, factor / spread being its value."""

    id: int
    elements: int  # of a block
    bytes: int  # of a block
    spread: float = 1.0  # standard deviation of an element where the first scale is 1
    halves: tuple[tuple[int, float], ...] = ()


# Spreads of uniformly random bits: Q4_K is scale * 6 bits * 4 bits less min * 6 bits, whose means are made to cancel.
TYPES = {
    "F32": Type(0, 1, 4),
    "BF16": Type(30, 1, 2),
    "Q5_0": Type(6, 32, 22, 9.23, ((0, 1.0),)),
    "Q8_0": Type(8, 32, 34, 73.9, ((0, 1.0),)),
    "Q4_K": Type(12, 256, 144, 258.0, ((0, 1.0), (2, 7.5))),
    "Q6_K": Type(14, 256, 210, 1366.0, ((208, 1.0),)),
}


Fill = str | tuple[float, ...]


class Tensor(NamedTuple):
    """`ne` fastest first, as in the file. fill: "weight", or for F32 "norm", "decay", "bias", or the values."""

    name: str
    type: str
    ne: tuple[int, ...]
    fill: Fill = "weight"

    @property
    def n_elements(self) -> int:
        n = 1
        for extent in self.ne:
            n *= extent
        return n

    @property
    def nbytes(self) -> int:
        t = TYPES[self.type]
        return self.n_elements // t.elements * t.bytes


class Pools:
    """Blocks to draw from, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._bits: dict[str, Bytes] = {}
        self._pools: dict[tuple[str, int], Bytes] = {}

    def pieces(self, tensor: Tensor) -> list[memoryview]:
        """The bytes of a tensor, in order."""
        if tensor.type == "F32":
            return [memoryview(self._floats(tensor).tobytes())]
        key = tensor.type, tensor.ne[0]
        if key not in self._pools:
            self._pools[key] = self._pool(*key)
        pool, size = self._pools[key], TYPES[tensor.type].bytes
        view = pool.reshape(-1).data
        at = int(self._rng.integers(len(pool))) * size
        left, pieces = tensor.nbytes, []
        while left:
            piece = view[at : at + left]
            pieces.append(piece)
            left -= len(piece)
            at = 0
        return pieces

    def _pool(self, name: str, width: int) -> Bytes:
        """(blocks, bytes of a block), each element with a standard deviation of 1/sqrt(width)."""
        t, target = TYPES[name], width**-0.5
        if name == "BF16":
            values = self._rng.standard_normal(POOL, dtype=np.float32) * np.float32(target)
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(-1, 2)
        if name not in self._bits:
            self._bits[name] = np.frombuffer(self._rng.bytes(POOL * t.bytes), np.uint8).reshape(-1, t.bytes)
        pool = self._bits[name].copy()
        for offset, factor in t.halves:
            pool[:, offset : offset + 2] = np.frombuffer(np.float16(target * factor / t.spread).tobytes(), np.uint8)
        return pool

    def _floats(self, tensor: Tensor) -> npt.NDArray[np.float32]:
        if isinstance(tensor.fill, tuple):
            return np.array(tensor.fill, np.float32)
        normal = self._rng.standard_normal(tensor.n_elements, dtype=np.float32)
        if tensor.fill == "norm":
            normal = 1 + normal / np.float32(10)
        elif tensor.fill == "decay":  # -exp(A_log), from remembering a few tokens to hundreds
            normal = -np.exp(normal)
        elif tensor.fill == "weight":
            normal *= np.float32(tensor.ne[0] ** -0.5)
        return normal


def write(path: str | os.PathLike[str], metadata: dict[str, Any], vocabulary: Path, n_vocab: int,
          tensors: Sequence[Tensor], seed: int, *, sparse: bool = False) -> int:  # fmt: skip
    """Write a file and return its size. `vocabulary`, a vocabulary-only file under xz, is filled up to `n_vocab`.
    `sparse`: the tensors are left as holes, which take no room on a disk."""
    words = _vocabulary(vocabulary, n_vocab)
    pairs = [_string(key) + _value(value) for key, value in metadata.items()] + words
    infos, offset = [], 0
    for tensor in tensors:
        ne = struct.pack(f"<I{len(tensor.ne)}Q", len(tensor.ne), *tensor.ne)
        infos.append(_string(tensor.name) + ne + struct.pack("<IQ", TYPES[tensor.type].id, offset))
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs) + b"".join(infos)
    header += bytes(-len(header) % ALIGNMENT)
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}")  # whole or not at all, and another call may write it, too
    try:
        _write(part, header, offset, () if sparse else tensors, Pools(seed))
        part.rename(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return len(header) + offset


def _write(path: Path, header: bytes, n_bytes: int, tensors: Sequence[Tensor], pools: Pools) -> None:
    """Header, and `n_bytes` behind it, of which the tensors are written."""
    at = len(header)
    with open(path, "wb") as file, ThreadPoolExecutor(WRITERS) as writers:
        file.write(header)
        file.flush()
        os.truncate(file.fileno(), at + n_bytes)
        written = []
        for tensor in tensors:
            written.append(writers.submit(_write_at, file.fileno(), at, pools.pieces(tensor)))
            at += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        for each in written:
            each.result()


def _write_at(fd: int, at: int, pieces: list[memoryview]) -> None:
    for piece in pieces:
        while piece:
            n = os.pwrite(fd, piece, at)
            at, piece = at + n, piece[n:]


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    """Type and value: bool, int (unsigned 32 bits), float (32 bits), str, or a list of int (signed 32 bits)."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_UNUSED = 5  # token type of a row that no text becomes


def _vocabulary(path: Path, n_vocab: int) -> list[bytes]:
    """The `tokenizer.` pairs of a vocabulary-only file as they are, but for tokens that fill it up."""
    raw = lzma.decompress(path.read_bytes())
    pairs, at = [], 24
    for _ in range(struct.unpack_from("<Q", raw, 16)[0]):
        begin = at
        at += 8 + struct.unpack_from("<Q", raw, at)[0]
        key = raw[begin + 8 : at].decode()
        kind = struct.unpack_from("<I", raw, at)[0]
        at += 4
        if kind == 8:
            at += 8 + struct.unpack_from("<Q", raw, at)[0]
        elif kind == 9:
            element, n = struct.unpack_from("<IQ", raw, at)
            at += 12
            values = at
            if element == 8:
                for _ in range(n):
                    at += 8 + int.from_bytes(raw[at : at + 8], "little")
            else:
                at += n * _SIZES[element]
            more = b""
            if key == "tokenizer.ggml.tokens":
                more = b"".join(_string(f"[PAD{i}]") for i in range(n, n_vocab))
            elif key == "tokenizer.ggml.token_type":
                more = struct.pack("<i", _UNUSED) * (n_vocab - n)
            if more:
                array = struct.pack("<IIQ", 9, element, n_vocab) + raw[values:at]
                pairs.append(_string(key) + array + more)
                continue
        else:
            at += _SIZES[kind]
        if key.startswith("tokenizer."):
            pairs.append(raw[begin:at])
    return pairs
