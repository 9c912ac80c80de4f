"""What a compiled kernel says about itself: parameters from PTX and from a cubin, registers and spills from ptxas.

A cubin is a 64-bit little-endian ELF file. Each kernel NAME has a section `.nv.info.NAME`, a list of attributes: a byte
of format, a byte of attribute, 16 bits of size, and for format 4 that many bytes of value. Attribute 0x17 describes one
parameter: 32 bits unused, 16 of ordinal, 16 of offset, and a word whose bits 18 to 31 are the size in bytes.
"""

import re
import struct
from typing import NamedTuple


class Parameter(NamedTuple):
    """One parameter: its PTX type ("u64", "f32", "b8[20]" for a structure), offset and size in bytes."""

    type: str
    offset: int
    size: int


class Usage(NamedTuple):
    """What ptxas gave a kernel: registers a thread, static shared memory, stack and spilled bytes (stores + loads)."""

    registers: int
    shared: int
    stack: int
    spill: int


class FormatError(Exception):
    """A file that is not what the compiler writes; the message says where."""


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([a-z]+)(\d+)\s+(?:\.ptr\s+(?:\.[a-z]+\s+(?:\d+\s+)?)*)?[\w$]+(?:\[(\d+)\])?$"
)


def ptx_parameters(text: str) -> dict[str, tuple[Parameter, ...]]:
    """The kernels of a PTX file and their parameters; offsets follow from each one's natural or stated alignment."""
    kernels = {}
    for name, body in _ENTRY.findall(text):
        parameters, at = [], 0
        for declaration in filter(None, (part.strip() for part in body.split(","))):
            match = _PARAMETER.match(declaration)
            if match is None:
                raise FormatError(f"{name}: cannot read the parameter {declaration!r}")
            alignment, kind, bits, count = match.groups()
            width = int(bits) // 8
            size = width * int(count) if count else width
            at = -(-at // (align := int(alignment or width))) * align
            parameters.append(Parameter(f"{kind}{bits}" + (f"[{count}]" if count else ""), at, size))
            at += size
        kernels[name] = tuple(parameters)
    return kernels


def cubin_parameters(data: bytes) -> dict[str, tuple[tuple[int, int], ...]]:
    """The kernels of a cubin and the (offset, size) of their parameters."""
    kernels = {}
    for name, section in _sections(data):
        if name.startswith(".nv.info."):
            found = sorted(_parameter_records(name, section))
            if [ordinal for ordinal, _, _ in found] != list(range(len(found))):
                raise FormatError(f"{name}: parameters are missing")
            kernels[name.removeprefix(".nv.info.")] = tuple((offset, size) for _, offset, size in found)
    return kernels


def _sections(data: bytes) -> list[tuple[str, bytes]]:
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        raise FormatError("not a 64-bit little-endian ELF file")
    table, entry, count, names = struct.unpack_from("<Q10xHHH", data, 40)
    headers = []
    for i in range(count):
        start = table + i * entry
        if start + 64 > len(data):
            raise FormatError("the section table lies outside the file")
        headers.append(struct.unpack_from("<II16xQQ", data, start))
    if names >= count:
        raise FormatError("the section names are missing")
    strings = _bytes_of(data, headers[names])
    return [(_text_at(strings, header[0]), _bytes_of(data, header)) for header in headers]


def _text_at(strings: bytes, at: int) -> str:
    end = strings.find(b"\0", at)
    if end < 0:
        raise FormatError("a section's name lies outside the names")
    return strings[at:end].decode("ascii", "replace")


def _bytes_of(data: bytes, header: tuple[int, int, int, int]) -> bytes:
    _, kind, offset, size = header
    no_bits = 8
    if kind == no_bits:
        return b""
    if offset + size > len(data):
        raise FormatError("a section lies outside the file")
    return data[offset : offset + size]


def _parameter_records(name: str, section: bytes) -> list[tuple[int, int, int]]:
    sized_value, parameter_info = 4, 0x17
    records, at = [], 0
    while at + 4 <= len(section):
        form, attribute, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if form != sized_value:
            continue
        if at + size > len(section):
            raise FormatError(f"{name}: an attribute runs past its section")
        if attribute == parameter_info:
            if size < 12:
                raise FormatError(f"{name}: a parameter of {size} bytes")
            _, ordinal, offset, word = struct.unpack_from("<IHHI", section, at)
            records.append((ordinal, offset, word >> 18))
        at += size
    return records


def usage(log: str) -> dict[str, Usage]:
    """Kernels and what they use, from what `ptxas -v` prints."""
    kernels = {}
    for part in log.split("Compiling entry function '")[1:]:
        name = part[: part.index("'")]
        stack, stores, loads = _numbers(
            part, r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        )
        (registers,) = _numbers(part, r"Used (\d+) registers")
        shared = re.search(r"(\d+) bytes smem", part)
        kernels[name] = Usage(registers, int(shared[1]) if shared else 0, stack, stores + loads)
    return kernels


def _numbers(text: str, pattern: str) -> list[int]:
    match = re.search(pattern, text)
    if match is None:
        raise FormatError(f"ptxas printed no line like {pattern!r}: {text[:200]!r}")
    return [int(group) for group in match.groups()]
