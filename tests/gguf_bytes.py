"""GGUF files from their parts, sound or not, and a second reader that is too simple to be wrong.

Written from the format's description alone; shares nothing with the package.
"""

import struct
from pathlib import Path
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

# ids of the types that exist and no file may have: retired, or for activations only
REFUSED = {4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
REFUSED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(kind: int, content: Any) -> bytes:
    return string(content) if kind == STRING else struct.pack("<" + CODES[kind], content)


def scalar(key: str | bytes, kind: int, content: Any) -> bytes:
    return string(key) + struct.pack("<I", kind) + value(kind, content)


def array(key: str | bytes, kind: int, contents: list[Any], count: int | None = None) -> bytes:
    """`count`: what the file claims, if not the truth."""
    head = struct.pack("<IIQ", ARRAY, kind, len(contents) if count is None else count)
    return string(key) + head + b"".join(value(kind, content) for content in contents)


def tensor(name: str | bytes, ne: list[int], type_id: int, offset: int) -> bytes:
    dims = b"".join(struct.pack("<q" if n < 0 else "<Q", n) for n in ne)
    return string(name) + struct.pack("<I", len(ne)) + dims + struct.pack("<IQ", type_id, offset)


def build(
    entries: list[bytes],
    tensors: list[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    n_entries: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    tensors = tensors or []
    head = b"GGUF" + struct.pack(
        "<Iqq",
        version,
        len(tensors) if n_tensors is None else n_tensors,
        len(entries) if n_entries is None else n_entries,
    )
    head += b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data if data else head


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def read_plainly(buffer: bytes) -> tuple[dict[str, Any], dict[str, tuple[int, list[int], int]]]:
    """Metadata, and name -> (type id, ne, offset from the start of the file). Anything odd ends in some exception."""
    pos = 0

    def take(code: str) -> Any:
        nonlocal pos
        (result,) = struct.unpack_from("<" + code, buffer, pos)
        pos += struct.calcsize("<" + code)
        return result

    def take_string() -> bytes:
        nonlocal pos
        length = take("Q")
        if pos + length > len(buffer):
            raise ValueError("beyond the end")
        pos += length
        return buffer[pos - length : pos]

    def take_value(kind: int) -> Any:
        return take_string() if kind == STRING else take(CODES[kind])

    if buffer[:4] != b"GGUF":
        raise ValueError("magic")
    pos = 4
    take("I")
    n_tensors, n_entries = take("q"), take("q")
    metadata: dict[str, Any] = {}
    for _ in range(n_entries):
        key = take_string().decode()
        kind = take("I")
        if kind == ARRAY:
            kind, count = take("I"), take("Q")
            metadata[key] = [take_value(kind) for _ in range(count)]
        else:
            metadata[key] = take_value(kind)
    tensors = {}
    for _ in range(n_tensors):
        name = take_string().decode()
        ne = [take("q") for _ in range(take("I"))]
        tensors[name] = take("I"), ne, take("Q")
    alignment = metadata.get("general.alignment", 32)
    pos += -pos % alignment
    return metadata, {name: (type_id, ne, pos + offset) for name, (type_id, ne, offset) in tensors.items()}
