"""The tables of `reflex_ipc.reference.codebooks` as a C++ header for `dequant.cuh`.

    python -m kernels.codebooks_header      writes kernels/codebooks.cuh; a test compares the two

A point is an integer whose nibbles, lowest first, are the places of its coordinates in the codebook's list of values:
as selectors of a byte permutation they turn into the values with one instruction for four coordinates. Each table is
local to the function that reads it, so that only a cubin that does so contains it.
"""

from collections.abc import Sequence
from pathlib import Path

from reflex_ipc.reference.codebooks import CODEBOOKS, FP4_VALUES, IQ4_VALUES


def header() -> str:
    """The text of `codebooks.cuh`."""
    lines = ["// Made by codebooks_header.py; do not edit.", "#pragma once", "", "namespace reflex {", ""]
    for name, table in (("IQ4_TABLE", IQ4_VALUES), ("FP4_TABLE", FP4_VALUES)):
        lines.append(f"#define {name} {{{', '.join(_words(table))}}}  // a byte a nibble")
    for name, codebook in CODEBOOKS.items():
        digits = {value: place for place, value in enumerate(codebook.values)}
        points = [sum(digits[x] << 4 * i for i, x in enumerate(point)) for point in codebook.points()]
        kind = f"uint{4 * codebook.width}_t"
        lines += ["", f"REFLEX_BOTH uint32_t {name.lower()}_point(uint32_t index) {{"]
        lines.append(f"  static const {kind} points[{len(points)}] = {{")
        lines += [f"      {', '.join(f'0x{p:x}' for p in points[i : i + 12])}," for i in range(0, len(points), 12)]
        lines += ["  };", "  return points[index];", "}"]
        if min(codebook.values) > 0:
            low, high = _words((*codebook.values, *(0,) * (8 - len(codebook.values))))
            lines.append(f"#define {name}_VALUES {low}")
            if len(codebook.values) > 4:
                lines.append(f"#define {name}_VALUES_HIGH {high}")
    return "\n".join([*lines, "", "}  // namespace reflex"]) + "\n"


def _words(values: Sequence[int]) -> list[str]:
    """Signed bytes, four to a little-endian word."""
    data = bytes(v & 255 for v in values)
    return [f"0x{int.from_bytes(data[i : i + 4], 'little'):08x}u" for i in range(0, len(data), 4)]


if __name__ == "__main__":
    Path(__file__).with_name("codebooks.cuh").write_text(header())
