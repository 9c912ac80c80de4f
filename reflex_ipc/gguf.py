"""The model file: a GGUF, its metadata and tensor table; one file or a set of shards.

The header is read; the data section is mapped by whoever asks for `data`, and read by everybody else. A file that
another process cuts while it is open becomes an error where it is read, and SIGBUS at the first touch of a page that is
gone where it is mapped: no reader of a map can prevent that.
"""

import builtins
import errno
import mmap
import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol, overload

from reflex_ipc.errors import ModelFileError, OutOfMemoryError
from reflex_ipc.gguf_header import TYPES, GGMLType, Header, MoreNeeded, StringArray, Tensor, Value, describe, quoted

__all__ = ["GGUF", "TYPES", "GGMLType", "Shard", "StringArray", "Tensor", "Value"]

_NOT_FILES = (
    (stat.S_ISDIR, "is a directory; give the .gguf file in it"),
    (stat.S_ISCHR, "is a character device, not a file"),
    (stat.S_ISBLK, "is a block device, not a file"),
    (stat.S_ISFIFO, "is a pipe; a model is mapped, so it has to be a file"),
)

_FIRST_READ = 8 << 20
"""Bytes that hold the whole header of the usual file, 152k words included."""
_MOST_LAYERS = 1 << 16  # of a model; a scalar is not spread over more


class Shard:
    """One open file. `data_offset`: where its data section starts."""

    __slots__ = ("_map", "data_offset", "fd", "path", "size", "status")

    def __init__(self, path: str) -> None:
        self.path = path
        self.data_offset = 0
        try:
            # Without O_NONBLOCK the open of a pipe would wait for a writer. It changes nothing for a file.
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        except ValueError:
            raise ModelFileError(f"{path!r}: no path can hold a NUL") from None
        except OSError as error:
            what = "is a socket, not a file" if error.errno == errno.ENXIO else os.strerror(error.errno or 0).lower()
            raise ModelFileError(f"{path}: {what}") from None
        try:
            self.status = os.fstat(self.fd)
            for is_kind, what in _NOT_FILES:
                if is_kind(self.status.st_mode):
                    raise ModelFileError(f"{path}: {what}")
            self.size = self.status.st_size
            if self.size == 0:
                raise ModelFileError(f"{path}: the file is empty")
        except BaseException:
            os.close(self.fd)
            raise
        self._map: mmap.mmap | None = None

    @property
    def map(self) -> mmap.mmap:
        """The mapped file. Only the data section is looked at through it, and only by whoever asks for it."""
        if self._map is None:
            try:
                self._map = mmap.mmap(self.fd, self.size, prot=mmap.PROT_READ)
            except (OSError, ValueError) as error:  # ValueError: the file shrank since fstat
                if isinstance(error, OSError) and error.errno == errno.ENOMEM:
                    raise OutOfMemoryError(f"{self.path}: there is no room to map its {self.size:,} bytes") from None
                raise ModelFileError(f"{self.path}: cannot be mapped: {error}") from None
        return self._map

    def read(self, size: int) -> bytes:
        """The file's first `size` bytes, or all there are."""
        parts: list[bytes] = []
        at = 0
        while at < size:
            try:
                part = os.pread(self.fd, size - at, at)
            except OSError as error:
                raise ModelFileError(f"{self.path}: cannot be read: {error.strerror}") from None
            if not part:
                break
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Native(Protocol):
    """What a compiled helper does for the reader, if there is one."""

    def beginning(self, status: os.stat_result) -> memoryview | None:
        """The first bytes of this file, if they have been read already."""

    def string_lengths(
        self, buffer: bytes | memoryview, at: int, count: int, block: int
    ) -> tuple[int, Sequence[int], Sequence[int]] | None:
        """Walk `count` strings from `at` in a buffer: where they end, the length of each, and where every `block`-th
        one begins; None where the buffer does not hold them."""


_REQUIRED: Any = object()
_EXPECTED = {str: "a string", bool: "a bool", int: "an integer", float: "a number", StringArray: "an array of strings"}


class GGUF:
    """An open model: its shards, its metadata (the first shard's) and its tensors, in file order. A context manager.

    The getters check the type of what they return: a wrong type, or a key that is missing and has no default, is a
    `ModelFileError` that names the key. An integer may have any width in the file.
    """

    __slots__ = ("_native", "alignment", "metadata", "path", "shards", "tensors", "version")

    @classmethod
    def open(cls, path: builtins.str | os.PathLike[builtins.str], native: Native | None = None) -> "GGUF":
        """Open a file, or a set of shards by its first. Raises ModelFileError or UnsupportedModelError."""
        self = cls(os.fsdecode(path), native)
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        return self

    def __init__(self, path: builtins.str, native: Native | None = None) -> None:
        self.path = path
        self._native = native
        self.version = self.alignment = 0
        self.shards: list[Shard] = []
        self.metadata: Mapping[builtins.str, Value] = {}
        self.tensors: dict[builtins.str, Tensor] = {}

    def __enter__(self) -> "GGUF":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. What was handed out stays valid: the maps go when the last of it, and of this, is gone."""
        for shard in self.shards:
            shard.close()

    def data(self, tensor: Tensor) -> memoryview:
        """The tensor's bytes in the mapped file, read-only."""
        return memoryview(self.shards[tensor.shard].map)[tensor.offset : tensor.offset + tensor.nbytes]

    def _open(self) -> None:
        header = self._add(self.path)
        self.version, self.alignment, self.metadata = header.version, header.alignment, header.metadata
        count = self.int("split.count", 1)
        if count > 1:
            self._add_rest(count)
        n_tensors = self.int("split.tensors.count", len(self.tensors) if count <= 1 else _REQUIRED)
        if n_tensors != len(self.tensors):
            self._fail(f"key 'split.tensors.count' is {n_tensors}, but {len(self.tensors)} tensors were found")

    def _add(self, path: builtins.str) -> Header:
        shard = Shard(path)
        self.shards.append(shard)
        header = self._header(shard)
        shard.data_offset = header.data_offset
        for name in header.tensors:
            if name in self.tensors:
                self._fail(f"tensor {quoted(name)} appears in shard {self.tensors[name].shard + 1} and in {path}")
        self.tensors.update(header.tensors)
        return header

    def _header(self, shard: Shard) -> Header:
        """Read, not mapped: a file that another process cuts under us is then too short, and not the end of us."""
        walk = self._native.string_lengths if self._native else None
        start: bytes | memoryview | None = self._native.beginning(shard.status) if self._native else None
        want = min(_FIRST_READ, shard.size)
        while True:
            start = start or shard.read(want)
            try:
                return Header(start, shard.path, len(self.shards) - 1, shard.size, walk)
            except MoreNeeded:
                if len(start) < want:
                    raise ModelFileError(f"{shard.path}: the file shrank while it was read") from None
                start, want = None, min(4 * want, shard.size)

    def _add_rest(self, count: builtins.int) -> None:
        no = self.int("split.no")
        end = _shard_end(no, count)
        if not self.path.endswith(end):
            self._fail(
                f"keys 'split.no' and 'split.count' make this shard {no + 1} of {count}, but its name does not end in "
                f"{end}: shards are found by their names, so give it back its own"
            )
        prefix = self.path.removesuffix(end)
        if no != 0:
            self._fail(f"this is shard {no + 1} of {count}; open the first, {prefix}{_shard_end(0, count)}")
        for i in range(1, count):
            try:
                metadata = self._add(prefix + _shard_end(i, count)).metadata
            except ModelFileError as error:
                raise ModelFileError(f"shard {i + 1} of {count}: {error}") from None
            wanted: dict[builtins.str, object] = {"split.no": i, "split.count": count}
            if "general.architecture" in metadata:
                wanted["general.architecture"] = self.metadata.get("general.architecture")
            for key, value in wanted.items():
                found = metadata.get(key)
                if found != value:
                    raise ModelFileError(
                        f"{self.shards[-1].path}: key {quoted(key)} is {describe(found)}, not {describe(value)}: "
                        "the shards are shuffled, or not of one model"
                    )

    def _fail(self, message: builtins.str) -> NoReturn:
        raise ModelFileError(f"{self.path}: {message}")

    def _get(self, key: builtins.str, default: Any, kind: type) -> Any:
        value = self.metadata.get(key)
        if value is None:
            if default is _REQUIRED:
                self._fail(f"key {quoted(key)} is missing")
            return default
        if type(value) is not kind:
            self._fail(f"key {quoted(key)} has to be {_EXPECTED[kind]}; it is {describe(value)}")
        return value

    @overload
    def str(self, key: builtins.str, default: builtins.str = ...) -> builtins.str: ...
    @overload
    def str(self, key: builtins.str, default: None) -> builtins.str | None: ...
    def str(self, key: builtins.str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, str)

    @overload
    def bool(self, key: builtins.str, default: builtins.bool = ...) -> builtins.bool: ...
    @overload
    def bool(self, key: builtins.str, default: None) -> builtins.bool | None: ...
    def bool(self, key: builtins.str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, bool)

    @overload
    def int(self, key: builtins.str, default: builtins.int = ...) -> builtins.int: ...
    @overload
    def int(self, key: builtins.str, default: None) -> builtins.int | None: ...
    def int(self, key: builtins.str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, int)

    @overload
    def float(self, key: builtins.str, default: builtins.float = ...) -> builtins.float: ...
    @overload
    def float(self, key: builtins.str, default: None) -> builtins.float | None: ...
    def float(self, key: builtins.str, default: Any = _REQUIRED) -> Any:
        """An integer in the file will do; infinities and NaN will not."""
        if type(self.metadata.get(key)) is int:
            return float(self._get(key, default, int))
        value = self._get(key, default, float)
        if value is not default and value - value != 0:
            self._fail(f"key {quoted(key)} has to be a finite number; it is {value}")
        return value

    @overload
    def ints(
        self, key: builtins.str, n: builtins.int, default: builtins.int | Sequence[builtins.int] = ...
    ) -> tuple[builtins.int, ...]: ...
    @overload
    def ints(self, key: builtins.str, n: builtins.int, default: None) -> tuple[builtins.int, ...] | None: ...
    def ints(self, key: builtins.str, n: builtins.int, default: Any = _REQUIRED) -> Any:
        """n integers, one per layer: an array of n, or one number that holds for all; so the default too. An array of
        bools counts as 0 and 1."""
        value = self.metadata.get(key)
        if isinstance(value, memoryview) and value.format in "bBhHiIqQ?":
            if len(value) != n:
                self._fail(f"key {quoted(key)} has {len(value)} entries where {n} are needed")
            return tuple(map(int, value))
        found = self._get(key, default, int)
        if type(found) is not int:
            return None if found is None else tuple(found)
        if n > _MOST_LAYERS:
            self._fail(f"key {quoted(key)}: it cannot hold for {n} layers; a model has at most {_MOST_LAYERS}")
        return (found,) * n

    @overload
    def strings(self, key: builtins.str, default: StringArray = ...) -> StringArray: ...
    @overload
    def strings(self, key: builtins.str, default: None) -> StringArray | None: ...
    def strings(self, key: builtins.str, default: Any = _REQUIRED) -> Any:
        return self._get(key, default, StringArray)


def _shard_end(no: int, count: int) -> str:
    """How the name of shard `no` (from 0) ends."""
    return f"-{no + 1:05d}-of-{count:05d}.gguf"
