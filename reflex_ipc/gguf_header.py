"""What stands in front of a GGUF file's data section: its metadata and its tensor table, read and checked.

A file is, little-endian throughout:

    "GGUF", u32 version, i64 tensor count, i64 metadata count
    metadata: { string key, u32 value type, value }      a string is u64 length and UTF-8 bytes; an array is
                                                         u32 element type, u64 count, elements
    tensors:  { string name, u32 n_dims, i64 ne[n_dims], u32 type, u64 offset into the data section }
    padding to `general.alignment`, then the data section

Every count, length and offset is compared with the size of the file before anything follows from it, so a damaged file
costs no more time or memory than its size allows (measured: up to 15 times its bytes, all of it small objects) and ends
in a `ModelFileError` that names the key or tensor. What is sound but not done here (big-endian, version 1, nested
arrays, retired tensor types) is an `UnsupportedModelError`.
"""

import struct
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple, NoReturn, TypeAlias, overload

from reflex_ipc.errors import ModelFileError, UnsupportedModelError


class GGMLType(NamedTuple):
    """A tensor type: rows are whole blocks of `block` elements, `size` bytes each."""

    name: str
    id: int
    block: int
    size: int


# fmt: off
TYPES: dict[int, GGMLType] = {row[1]: GGMLType(*row) for row in (
    ("F32", 0, 1, 4),         ("F16", 1, 1, 2),         ("Q4_0", 2, 32, 18),      ("Q4_1", 3, 32, 20),
    ("Q5_0", 6, 32, 22),      ("Q5_1", 7, 32, 24),      ("Q8_0", 8, 32, 34),      ("Q2_K", 10, 256, 84),
    ("Q3_K", 11, 256, 110),   ("Q4_K", 12, 256, 144),   ("Q5_K", 13, 256, 176),   ("Q6_K", 14, 256, 210),
    ("IQ2_XXS", 16, 256, 66), ("IQ2_XS", 17, 256, 74),  ("IQ3_XXS", 18, 256, 98), ("IQ1_S", 19, 256, 50),
    ("IQ4_NL", 20, 32, 18),   ("IQ3_S", 21, 256, 110),  ("IQ2_S", 22, 256, 82),   ("IQ4_XS", 23, 256, 136),
    ("I8", 24, 1, 1),         ("I16", 25, 1, 2),        ("I32", 26, 1, 4),        ("I64", 27, 1, 8),
    ("F64", 28, 1, 8),        ("IQ1_M", 29, 256, 56),   ("BF16", 30, 1, 2),       ("TQ1_0", 34, 256, 54),
    ("TQ2_0", 35, 256, 66),   ("MXFP4", 39, 32, 17),    ("NVFP4", 40, 64, 36),    ("Q1_0", 41, 128, 18),
    ("Q2_0", 42, 64, 18),
)}
# fmt: on
"""The types a tensor in a file may have, by their number in the file."""

_REFUSED = {
    4: "Q4_2, which is retired",
    5: "Q4_3, which is retired",
    9: "Q8_1, which only activations have",
    15: "Q8_K, which only activations have",
    31: "Q4_0_4_4, which is retired",
    32: "Q4_0_4_8, which is retired",
    33: "Q4_0_8_8, which is retired",
    36: "IQ4_NL_4_4, which is retired",
    37: "IQ4_NL_4_8, which is retired",
    38: "IQ4_NL_8_8, which is retired",
}

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {id: struct.Struct("<" + code) for id, code in enumerate("BbHhIif?") if id != _BOOL}
_SCALARS |= {10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d")}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_COUNTS = struct.Struct("<4sIqq")
_ELEMENTS = struct.Struct("<IQ")
_INFO = [struct.Struct(f"<{n}qIQ") for n in range(5)]  # what follows n_dims in a tensor's entry

_SMALLEST_ENTRY = 14  # bytes of a metadata entry: length, one letter, type, one byte
_SMALLEST_INFO = 25  # bytes of a tensor's entry: length, one letter, n_dims, no dimension, type, offset
_LONGEST_NAME = 65535  # letters of a key; here of a tensor too
_BLOCK = 1024  # strings between two stored positions of a StringArray

_OTHER_FORMATS = (
    (b"PK\3\4", "a zip archive, perhaps a PyTorch checkpoint; convert the model to GGUF"),
    (b"version https://git-lfs", "a Git LFS pointer, not the model itself; fetch it with `git lfs pull`"),
    (b"\xfd7zXZ", "xz-compressed; unpack it first"),
    (b"\x1f\x8b", "gzip-compressed; unpack it first"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed; unpack it first"),
    (b"tjgg", "a GGJT model, older than GGUF; convert it again from the original weights"),
    (b"fmgg", "a GGMF model, older than GGUF; convert it again from the original weights"),
    (b"lmgg", "a GGML model, older than GGUF; convert it again from the original weights"),
)


class Tensor(NamedTuple):
    """An entry of the tensor table."""

    name: str
    type: GGMLType
    ne: tuple[int, ...]
    """The dimensions, the contiguous one first; as many as the file gives."""
    shard: int
    offset: int
    """Of the first byte, in the shard's file."""
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions in NumPy's order: the contiguous one last."""
        return self.ne[::-1]

    @property
    def n_elements(self) -> int:
        return self.nbytes // self.type.size * self.type.block

    @property
    def row_bytes(self) -> int:
        """Bytes of the ne[0] elements that lie together; rows follow each other without padding."""
        return self.ne[0] // self.type.block * self.type.size


class StringArray(Sequence[str]):
    """An array of strings in the file, decoded when asked for.

    Opening the file walks the lengths once, to find the array's end; they are kept, so that `raw` needs no second walk
    and a single string needs no list of all.
    """

    __slots__ = ("_buffer", "_lengths", "_raw", "_starts", "_what")

    def __init__(self, what: str, buffer: bytes | memoryview, starts: Sequence[int], lengths: Sequence[int]) -> None:
        self._what = what  # file and key, for messages
        self._buffer = buffer
        self._starts = starts  # where every _BLOCK-th string's length field lies
        self._lengths = lengths  # bytes of each string
        self._raw: list[bytes] | None = None

    @property
    def raw(self) -> list[bytes]:
        """All strings as bytes; the same list each time, so not to be changed."""
        if self._raw is None:
            self._raw = self.cut(0, len(self))
        return self._raw

    def cut(self, first: int, last: int) -> list[bytes]:
        """The strings from `first` up to `last`, that one not included, as bytes; no others are cut out for it."""
        if self._raw is not None:
            return self._raw[first:last]
        if first >= last:
            return []
        # One struct per block ("8x5s8x2s..." steps over each length field and takes the string behind it) cuts
        # the strings out without a turn of the interpreter's loop for each.
        field = _Fields().__getitem__
        known = first - first % _BLOCK
        start = self._starts[known // _BLOCK] + sum(self._lengths[known:first]) + 8 * (first - known)
        strings: list[bytes] = []
        for i in range(first, last, _BLOCK):
            lengths = self._lengths[i : min(i + _BLOCK, last)]
            strings += struct.Struct("<" + "".join(map(field, lengths))).unpack_from(self._buffer, start)
            start += sum(lengths) + 8 * len(lengths)
        return strings

    def __len__(self) -> int:
        return len(self._lengths)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(first, last, step)]
            return [self._text(i, raw) for i, raw in enumerate(self.cut(first, last), first)]
        i = range(len(self))[index]
        return self._text(i, self.cut(i, i + 1)[0])

    def __iter__(self) -> Iterator[str]:
        return (self._text(i, raw) for i, raw in enumerate(self.raw))

    def _text(self, i: int, raw: bytes) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ModelFileError(f"{self._what}: entry {i} is not UTF-8: {raw[:64]!r}") from None


class _Fields(dict[int, str]):
    """length -> the struct format of one string with its length field, made when first met."""

    def __missing__(self, length: int) -> str:
        self[length] = field = f"8x{length}s"
        return field


Value: TypeAlias = "bool | int | float | str | memoryview[Any] | StringArray"
"""A metadata value. An array of numbers is a typed view of the file's bytes: indexing or `list()` decodes it."""


Walked: TypeAlias = "tuple[int, Sequence[int], Sequence[int]]"
"""Where an array of strings ends, the length of each, and where every _BLOCK-th one's length field lies."""


class MoreNeeded(Exception):
    """The header goes on behind the part of the file that was given."""


class Header:
    """Everything in front of the data section of one file, checked against the file's size.

    `buffer` is the file's beginning, `size` the size of all of it, the buffer's own where it is left out. Raises
    MoreNeeded where the buffer ends inside the header. `walk` is `Native.string_lengths` where there is a native part.
    """

    def __init__(
        self,
        buffer: bytes | memoryview,
        path: str,
        shard: int = 0,
        size: int | None = None,
        walk: "Callable[[bytes | memoryview, int, int, int], Walked | None] | None" = None,
    ) -> None:
        self._buffer = buffer
        self._walk = walk
        self._size = len(buffer) if size is None else size
        self._path = path
        self._pos = 0
        self._where = "the header"  # what is being read, for messages
        self.metadata: dict[str, Value] = {}
        try:
            n_tensors, n_metadata = self._read_counts()
            for i in range(n_metadata):
                self._read_entry(i)
            self.alignment = self._read_alignment()
            self.tensors = self._read_tensors(n_tensors, shard)
        except (struct.error, OverflowError):  # a field, or where one should be, lies behind the last byte
            if len(buffer) < self._size:
                raise MoreNeeded from None
            self._fail(f"the file ends inside {self._where}: it is cut or damaged")

    def _fail(self, message: str, kind: type[Exception] = ModelFileError) -> NoReturn:
        raise kind(f"{self._path}: {message}") from None

    def _unpack(self, fields: struct.Struct) -> tuple[Any, ...]:
        values = fields.unpack_from(self._buffer, self._pos)
        self._pos += fields.size
        return values

    def _string(self) -> bytes:
        (length,) = self._unpack(_U64)
        start = self._pos
        if length > self._size - start:
            self._fail(f"{self._where} claims {length} bytes, but {self._size - start} are left: it is cut or damaged")
        self._pos = start + length
        if self._pos > len(self._buffer):
            raise MoreNeeded
        return bytes(self._buffer[start : self._pos])

    def _text(self) -> str:
        raw = self._string()
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self._fail(f"{self._where} is not UTF-8: {raw[:64]!r}")

    def _name(self, what: str, index: int, taken: Container[str]) -> str:
        self._where = f"the name of {what} number {index}"
        name = self._text()
        if not 0 < len(name) <= _LONGEST_NAME:
            self._fail(f"{self._where} has {len(name)} letters; 1 to {_LONGEST_NAME} are possible")
        if name in taken:
            self._fail(f"{what} {quoted(name)} appears twice")
        return name

    def _read_counts(self) -> tuple[int, int]:
        head = bytes(self._buffer[:64])
        if head[:4] != b"GGUF":
            self._fail(_identify(head))
        _, self.version, n_tensors, n_metadata = self._unpack(_COUNTS)
        if self.version == 0:
            self._fail("version 0 does not exist: the file is damaged")
        if self.version & 0xFFFF == 0:
            self._fail("the file is big-endian; only little-endian files are read", UnsupportedModelError)
        if self.version not in (2, 3):
            self._fail(f"GGUF version {self.version}; versions 2 and 3 are read", UnsupportedModelError)
        for count, smallest, what in (
            (n_metadata, _SMALLEST_ENTRY, "metadata entries"),
            (n_tensors, _SMALLEST_INFO, "tensors"),
        ):
            if not 0 <= count <= self._size // smallest:
                self._fail(f"the header claims {count} {what}, which {self._size} bytes cannot hold")
        return n_tensors, n_metadata

    def _read_entry(self, index: int) -> None:
        key = self._name("key", index, self.metadata)
        self._where = f"key {quoted(key)}"
        (kind,) = self._unpack(_U32)
        self.metadata[key] = self._read_array(key) if kind == _ARRAY else self._read_value(kind)

    def _read_value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._text()
        if kind == _BOOL:
            (byte,) = self._unpack(_SCALARS[0])
            if byte > 1:
                self._fail(f"{self._where} is a bool of value {byte}, neither 0 nor 1")
            return bool(byte)
        if kind not in _SCALARS:
            self._fail(f"{self._where} has value type {kind}, which does not exist")
        return self._unpack(_SCALARS[kind])[0]  # type: ignore[no-any-return]

    def _read_array(self, key: str) -> Value:
        kind, count = self._unpack(_ELEMENTS)
        if kind == _STRING:
            return self._read_strings(key, count)
        if kind == _ARRAY:
            self._fail(f"{self._where} is an array of arrays, which is not read", UnsupportedModelError)
        if kind != _BOOL and kind not in _SCALARS:
            self._fail(f"{self._where} has element type {kind}, which does not exist")
        code = "?" if kind == _BOOL else _SCALARS[kind].format[1:]
        start = self._pos
        nbytes = count * struct.calcsize(code)
        self._check_count(count, nbytes)
        self._pos += nbytes
        if self._pos > len(self._buffer):
            raise MoreNeeded
        view = memoryview(self._buffer)[start : self._pos]
        if kind == _BOOL and bytes(view).strip(b"\0\1"):
            self._fail(f"{self._where} is an array of bools with values other than 0 and 1")
        numbers: memoryview[Any] = view.cast(code)  # type: ignore[call-overload]
        return numbers

    def _read_strings(self, key: str, count: int) -> StringArray:
        self._check_count(count, 8 * count)
        walked = self._walk(self._buffer, self._pos, count, _BLOCK) if self._walk else None
        if walked is None:  # there is no native part, or it leaves it to this one to say what is wrong
            walked = self._walk_strings(count)
        self._pos, lengths, starts = walked
        return StringArray(f"{self._path}: key {quoted(key)}", self._buffer, starts, lengths)

    def _walk_strings(self, count: int) -> "Walked":
        # The hottest loop of a start: twice 150,000 turns, 60 ns each. Cutting the bytes at each run of seven NULs with
        # bytes.split, checking its pieces against the lengths and stripping the next length off each costs more.
        buffer, pos = self._buffer, self._pos
        unpack = _U64.unpack_from
        starts: list[int] = []
        lengths: list[int] = []
        append = lengths.append
        for first in range(0, count, _BLOCK):
            starts.append(pos)
            for _ in repeat(None, min(_BLOCK, count - first)):  # a range would make an int for each
                (length,) = unpack(buffer, pos)
                append(length)
                pos += 8 + length
        if pos > self._size:
            self._fail(f"the file ends inside {self._where}: it is cut or damaged")
        if pos > len(buffer):
            raise MoreNeeded
        return pos, lengths, starts

    def _check_count(self, count: int, least: int) -> None:
        left = self._size - self._pos
        if least > left:
            self._fail(f"{self._where} claims {count} elements, but {left} bytes are left: it is cut or damaged")

    def _read_alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            self._fail(f"key 'general.alignment' is {describe(alignment)}, not a power of two")
        return alignment

    def _read_tensors(self, count: int, shard: int) -> dict[str, Tensor]:
        entries: dict[str, tuple[GGMLType, tuple[int, ...], int]] = {}
        for i in range(count):
            name = self._name("tensor", i, entries)
            self._where = f"the entry of tensor {quoted(name)}"
            (n_dims,) = self._unpack(_U32)
            if n_dims > 4:
                self._fail(f"tensor {quoted(name)} has {n_dims} dimensions; at most 4 are possible")
            *ne, type_id, offset = self._unpack(_INFO[n_dims])
            entries[name] = self._type(name, type_id), tuple(ne) or (1,), offset
        # Without tensors there may be no padding either.
        self.data_offset = min(self._pos + -self._pos % self.alignment, self._size)
        tensors = {name: self._place(name, *entry, shard) for name, entry in entries.items()}
        self._check_overlap(tensors)
        return tensors

    def _type(self, name: str, type_id: int) -> GGMLType:
        type = TYPES.get(type_id)
        if type is None:
            if type_id in _REFUSED:
                self._fail(f"tensor {quoted(name)} has type {_REFUSED[type_id]}; quantise again", UnsupportedModelError)
            self._fail(
                f"tensor {quoted(name)} has unknown type {type_id}: the file is damaged, or newer than this program"
            )
        return type

    def _place(self, name: str, type: GGMLType, ne: tuple[int, ...], offset: int, shard: int) -> Tensor:
        n_elements = 1
        for n in ne:
            if n < 1:
                self._fail(f"tensor {quoted(name)} has a dimension of {n}: ne = {list(ne)}")
            n_elements *= n
        if ne[0] % type.block:
            self._fail(
                f"tensor {quoted(name)}: its rows of {ne[0]} elements are not whole {type.name} blocks of {type.block}"
            )
        if offset % self.alignment:
            self._fail(f"tensor {quoted(name)}: offset {offset} is no multiple of the alignment {self.alignment}")
        nbytes = n_elements // type.block * type.size
        start = self.data_offset + offset
        if start + nbytes > self._size:
            self._fail(
                f"tensor {quoted(name)} ({type.name}, ne = {list(ne)}) needs bytes {start} to {start + nbytes}, "
                f"but the file ends at {self._size}: it is cut or damaged"
            )
        return Tensor(name, type, ne, shard, start, nbytes)

    def _check_overlap(self, tensors: dict[str, Tensor]) -> None:
        last: Tensor | None = None
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if last is not None and last.offset + last.nbytes > tensor.offset:
                self._fail(f"tensors {quoted(last.name)} and {quoted(tensor.name)} overlap at byte {tensor.offset}")
            last = tensor


def _identify(head: bytes) -> str:
    """What a file that does not begin with GGUF is, from its first bytes."""
    for magic, what in _OTHER_FORMATS:
        if head.startswith(magic):
            return f"not a GGUF file but {what}"
    # safetensors: u64 length of a JSON header, then the header
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 1 << 30:
        return "not a GGUF file but safetensors; convert the model to GGUF"
    return f"not a GGUF file: it begins with {head[:4]!r}, not b'GGUF'"


def quoted(text: str) -> str:
    """A name or a text from the file for a message: control characters escaped, and no longer than a line."""
    return repr(text) if len(text) <= 64 else f"{text[:64]!r}..."


def describe(value: object) -> str:
    """A metadata value for a message about its type."""
    if isinstance(value, StringArray):
        return f"an array of {len(value)} strings"
    if isinstance(value, memoryview):
        return f"an array of {len(value)} numbers"
    if isinstance(value, str):
        return f"the string {quoted(value)}"
    return "missing" if value is None else repr(value)
