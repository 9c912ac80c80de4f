"""Blocks of quantised weights -> float32, bit for bit what the `gguf` package computes.

Every format is `y = scale * level + offset`: small integer levels, and a scale and perhaps an offset per sub-block. A
format is declared by the fields of its block in byte order and a function from these fields to levels, scales and
offsets; one loop does the float part. Formats come from the ggml block structs; names in the code are theirs.

Every operation is a whole-array one over a slice of blocks that stays in cache, where integers are eight bits wide for
as long as they can be. NumPy lets other threads run meanwhile and nothing is shared but constant tables: a caller may
dequantise several tensors, or parts of one, at the same time.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from reflex_ipc.errors import ModelFileError, UnsupportedModelError
from reflex_ipc.reference.codebooks import CODEBOOKS, FP4_VALUES, IQ4_VALUES, PARITY_SIGNS

Array: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[np.float32]

SLICE_ELEMENTS = 1 << 16
"""Elements dequantised at a time: 256 kB of output and what leads to it fit a core's second-level cache, and arrays of
one byte an element stay below the 128 kB from which malloc asks the kernel for fresh pages each time."""


class Parts(NamedTuple):
    """What a format takes a slice of n blocks apart into; s sub-blocks of equal length in each."""

    levels: Array  # n * block_elements numbers in element order, any shape
    scale: Floats | None = None  # (n, s)
    offset: Floats | None = None  # (n, s)


TakeApart: TypeAlias = Callable[[Array], Parts]
"""From a slice of blocks, a structured array (n,) of the format's fields."""


class Dequantiser:
    """One block format: `DEQUANTISERS[name](blocks)`."""

    __slots__ = ("block_bytes", "block_elements", "layout", "take_apart")

    def __init__(self, block_elements: int, layout: np.dtype[Any], take_apart: TakeApart) -> None:
        self.block_elements = block_elements
        self.block_bytes = layout.itemsize
        self.layout = layout
        self.take_apart = take_apart

    def __call__(self, blocks: NDArray[np.uint8], out: Floats | None = None) -> Floats:
        """(n_blocks, block_bytes) -> (n_blocks, block_elements), into the C-contiguous `out` if given."""
        if out is None:
            out = np.empty((len(blocks), self.block_elements), np.float32)
        with np.errstate(all="ignore"):  # a scale may be infinite, or no number at all
            levels, scale, offset = self.take_apart(blocks.view(self.layout)[:, 0])
            out[...] = levels.reshape(out.shape)
            if scale is not None:
                by_sub_block = out.reshape(*scale.shape, self.block_elements // scale.shape[1])
                by_sub_block *= scale[:, :, None]
                if offset is not None:
                    by_sub_block += offset[:, :, None]
        return out


DEQUANTISERS: dict[str, Dequantiser] = {}
"""By GGUF type name."""


def dequantise(
    data: bytes | bytearray | memoryview | NDArray[Any], type_name: str, n_elements: int, out: Floats | None = None
) -> Floats:
    """The float32 values (n_elements,) of a tensor's bytes.

    `data` is contiguous and need not be aligned; `out` (n_elements,), C-contiguous, receives the values and is returned
    if given. May run in several threads at once. Raises UnsupportedModelError for a type that is not in DEQUANTISERS,
    ModelFileError if `data` is not as long as `n_elements` of the type are.
    """
    dequantiser = DEQUANTISERS.get(type_name)
    if dequantiser is None:
        raise UnsupportedModelError(
            f"tensor type {type_name} cannot be dequantised here; those that can: {', '.join(DEQUANTISERS)}"
        )
    n_blocks, rest = divmod(n_elements, dequantiser.block_elements)
    if rest:
        raise ModelFileError(
            f"{n_elements} elements of type {type_name} are no whole number of blocks of {dequantiser.block_elements}"
        )
    raw = np.frombuffer(data, np.uint8)
    if raw.size != n_blocks * dequantiser.block_bytes:
        raise ModelFileError(
            f"{n_elements} elements of type {type_name} take {n_blocks * dequantiser.block_bytes} bytes, not {raw.size}"
        )
    if out is None:
        out = np.empty(n_elements, np.float32)
    elif out.dtype != np.float32 or out.shape != (n_elements,) or not out.flags.c_contiguous:
        raise ValueError(f"out must be contiguous float32 ({n_elements},), not {out.dtype} {out.shape}")
    blocks = raw.reshape(n_blocks, dequantiser.block_bytes)
    values = out.reshape(n_blocks, dequantiser.block_elements)
    step = SLICE_ELEMENTS // dequantiser.block_elements
    for start in range(0, n_blocks, step):
        dequantiser(blocks[start : start + step], values[start : start + step])
    return out


# --- taking blocks apart ---------------------------------------------------------------------------------------------

_HALF = "(1,)<f2"  # a scale of the whole block, with the axis of sub-blocks


def _format(name: str, block_elements: int, **fields: str) -> Callable[[TakeApart], TakeApart]:
    """Register what follows as the format `name`, whose block has these fields, in byte order."""

    def register(take_apart: TakeApart) -> TakeApart:
        DEQUANTISERS[name] = Dequantiser(block_elements, np.dtype(list(fields.items())), take_apart)
        return take_apart

    return register


def _floats(field: Array) -> Floats:
    return field.astype(np.float32)


def _planes(field: Array, width: int) -> Array:
    """Unpack numbers of `width` bits: bytes (n, …, k) -> (n, …, 8 / width, k), lowest bits first."""
    packed = np.ascontiguousarray(field)
    k = packed.shape[-1]
    planes = np.empty((*packed.shape[:-1], 8 // width, k), np.uint8)
    rows = planes.view(f"V{k}")[..., 0]  # k bytes as one item: NumPy copies long items faster than short rows
    for p in range(8 // width):
        rows[..., p] = ((packed >> p * width) & (1 << width) - 1).view(f"V{k}")[..., 0]
    return planes


def _numbers(field: Array, width: int) -> Array:
    """Unpack numbers of `width` bits in their natural order, byte by byte: (n, k) -> (n, 8 / width * k)."""
    return _planes(field[:, :, None], width).reshape(len(field), -1)


def _bits(field: Array) -> Array:
    """Unpack bits, lowest first, byte by byte: (n, k) -> (n, 8 * k)."""
    return np.unpackbits(field, axis=-1, bitorder="little")


def _centred(levels: Array, zero: int) -> Array:
    """Bytes below 128 that mean zero at `zero` -> signed bytes."""
    signed: Array = levels.view(np.int8) - np.int8(zero)
    return signed


# --- floats ----------------------------------------------------------------------------------------------------------


@_format("F32", 1, x="<f4")
def _f32(b: Array) -> Parts:
    return Parts(b["x"])


@_format("F16", 1, x="<f2")
def _f16(b: Array) -> Parts:
    return Parts(b["x"])


@_format("BF16", 1, x="<u2")
def _bf16(b: Array) -> Parts:
    """The upper half of a float32."""
    bits = b["x"].astype(np.uint32)
    bits <<= 16
    return Parts(bits.view(np.float32))


# --- blocks of 32 to 128 elements with half-precision scales ---------------------------------------------------------


@_format("Q1_0", 128, d=_HALF, bits="(16,)u1")
def _q1_0(b: Array) -> Parts:
    return Parts(_centred(_bits(b["bits"]) << 1, 1), _floats(b["d"]))


@_format("Q2_0", 64, d=_HALF, qs="(16,)u1")
def _q2_0(b: Array) -> Parts:
    return Parts(_centred(_numbers(b["qs"], 2), 1), _floats(b["d"]))


@_format("Q4_0", 32, d=_HALF, qs="(16,)u1")
def _q4_0(b: Array) -> Parts:
    return Parts(_centred(_planes(b["qs"], 4), 8), _floats(b["d"]))


@_format("Q4_1", 32, d=_HALF, m=_HALF, qs="(16,)u1")
def _q4_1(b: Array) -> Parts:
    return Parts(_planes(b["qs"], 4), _floats(b["d"]), _floats(b["m"]))


def _five_bits(qs: Array, qh: Array) -> Array:
    """Nibbles (n, 16) and fifth bits (n, 4 bytes) -> (n, 32)."""
    levels: Array = _planes(qs, 4).reshape(-1, 32) | _bits(qh) << 4
    return levels


@_format("Q5_0", 32, d=_HALF, qh="(4,)u1", qs="(16,)u1")
def _q5_0(b: Array) -> Parts:
    return Parts(_centred(_five_bits(b["qs"], b["qh"]), 16), _floats(b["d"]))


@_format("Q5_1", 32, d=_HALF, m=_HALF, qh="(4,)u1", qs="(16,)u1")
def _q5_1(b: Array) -> Parts:
    return Parts(_five_bits(b["qs"], b["qh"]), _floats(b["d"]), _floats(b["m"]))


@_format("Q8_0", 32, d=_HALF, qs="(32,)i1")
def _q8_0(b: Array) -> Parts:
    return Parts(b["qs"], _floats(b["d"]))


# --- k-quants: blocks of 256 elements, whose sub-blocks have small integer scales ------------------------------------


@_format("Q2_K", 256, scales="(16,)u1", qs="(2,32)u1", d=_HALF, dmin=_HALF)
def _q2_k(b: Array) -> Parts:
    scale = _floats(b["d"]) * (b["scales"] & 15)
    offset = -_floats(b["dmin"]) * (b["scales"] >> 4)
    return Parts(_planes(b["qs"], 2), scale, offset)


@_format("Q3_K", 256, hmask="(32,)u1", qs="(2,32)u1", scales_l="(8,)u1", scales_h="(4,)u1", d=_HALF)
def _q3_k(b: Array) -> Parts:
    scales = _planes(b["scales_l"], 4).reshape(-1, 16) | _planes(b["scales_h"], 2).reshape(-1, 16) << 4
    levels = _planes(b["qs"], 2).reshape(-1, 256) | _planes(b["hmask"], 1).reshape(-1, 256) << 2
    return Parts(_centred(levels, 4), _floats(b["d"]) * _centred(scales, 32))


def _scales_and_offsets(b: Array) -> tuple[Floats, Floats]:
    """Of Q4_K and Q5_K: eight 6-bit scales and minima in three words, worked on four at a time.

    The bytes of `sc` and `mn` are scales and minima 0..3 with two bits of 4..7 above them; `both` has the other four.
    """
    sc, mn, both = (np.ascontiguousarray(b[word]) for word in ("sc", "mn", "both"))
    scales = np.stack([sc & 0x3F3F3F3F, both & 0x0F0F0F0F | sc >> 2 & 0x30303030], axis=1)
    minima = np.stack([mn & 0x3F3F3F3F, both >> 4 & 0x0F0F0F0F | mn >> 2 & 0x30303030], axis=1)
    return _floats(b["d"]) * scales.view(np.uint8), -_floats(b["dmin"]) * minima.view(np.uint8)


@_format("Q4_K", 256, d=_HALF, dmin=_HALF, sc="<u4", mn="<u4", both="<u4", qs="(4,32)u1")
def _q4_k(b: Array) -> Parts:
    return Parts(_planes(b["qs"], 4), *_scales_and_offsets(b))


@_format("Q5_K", 256, d=_HALF, dmin=_HALF, sc="<u4", mn="<u4", both="<u4", qh="(32,)u1", qs="(4,32)u1")
def _q5_k(b: Array) -> Parts:
    levels = _planes(b["qs"], 4).reshape(-1, 256) | _planes(b["qh"], 1).reshape(-1, 256) << 4
    return Parts(levels, *_scales_and_offsets(b))


@_format("Q6_K", 256, ql="(2,64)u1", qh="(2,32)u1", scales="(16,)i1", d=_HALF)
def _q6_k(b: Array) -> Parts:
    levels = _planes(b["ql"], 4).reshape(-1, 256) | _planes(b["qh"], 2).reshape(-1, 256) << 4
    return Parts(_centred(levels, 32), _floats(b["d"]) * b["scales"])


# --- ternary ---------------------------------------------------------------------------------------------------------


def _trits(field: Array, count: int) -> Array:
    """Unpack base-3 digits: bytes (n, k) -> (n, count * k), the first digit of every byte before the second.

    A byte is the fraction byte / 256, whose base-3 digits these are: multiplying modulo 256 by 3^i brings digit i to
    the front, and a fraction's first digit counts how many thirds of 256 it has reached.
    """
    fractions = field[:, None, :] * np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    return ((fractions > 85).view(np.uint8) + (fractions > 170)).reshape(len(field), -1)


@_format("TQ1_0", 256, qs="(32,)u1", qs_short="(16,)u1", qh="(4,)u1", d=_HALF)
def _tq1_0(b: Array) -> Parts:
    levels = np.concatenate([_trits(b["qs"], 5), _trits(b["qs_short"], 5), _trits(b["qh"], 4)], axis=1)
    return Parts(_centred(levels, 1), _floats(b["d"]))


@_format("TQ2_0", 256, qs="(2,32)u1", d=_HALF)
def _tq2_0(b: Array) -> Parts:
    return Parts(_centred(_planes(b["qs"], 2), 1), _floats(b["d"]))


# --- 4-bit values from a list ----------------------------------------------------------------------------------------


def _pairs(values: tuple[int, ...]) -> Array:
    """Two values as one item, for an index that is two nibbles in two bytes: half as many look-ups."""
    index = np.arange(0x1000)
    return np.array(values, np.int8)[np.stack([index & 15, index >> 8], axis=1)].view(np.uint16)[:, 0]


def _listed(pairs: Array, qs: Array) -> Array:
    """Values of nibbles (n, …, k bytes) -> (n, …, 2, k)."""
    return np.take(pairs, _planes(qs, 4).view(np.uint16)).view(np.int8)


_IQ4 = _pairs(IQ4_VALUES)
_FP4 = _pairs(FP4_VALUES)
# Both halved, because the values are doubled. E8M0 is a power of two, down to subnormal numbers. UE4M3 has 4 bits of
# exponent (bias 7) over 3 of mantissa, zero exponent is subnormal, the top bit is ignored, and 0x7F stands for zero.
_E8M0 = np.ldexp(np.float32(1), np.arange(256) - 128)
_UE4M3 = np.array(
    [0 if x == 0x7F else (x & 7 | (8 if x >> 3 & 15 else 0)) * 2.0 ** (max(x >> 3 & 15, 1) - 11) for x in range(256)],
    np.float32,
)


@_format("IQ4_NL", 32, d=_HALF, qs="(16,)u1")
def _iq4_nl(b: Array) -> Parts:
    return Parts(_listed(_IQ4, b["qs"]), _floats(b["d"]))


@_format("IQ4_XS", 256, d=_HALF, scales_h="(2,)u1", scales_l="(4,)u1", qs="(8,16)u1")
def _iq4_xs(b: Array) -> Parts:
    scales = _numbers(b["scales_l"], 4) | _numbers(b["scales_h"], 2) << 4
    return Parts(_listed(_IQ4, b["qs"]), _floats(b["d"]) * _centred(scales, 32))


@_format("MXFP4", 32, e="(1,)u1", qs="(16,)u1")
def _mxfp4(b: Array) -> Parts:
    return Parts(_listed(_FP4, b["qs"]), _E8M0[b["e"]])


@_format("NVFP4", 64, d="(4,)u1", qs="(4,8)u1")
def _nvfp4(b: Array) -> Parts:
    return Parts(_listed(_FP4, b["qs"]), _UE4M3[b["d"]])


# --- lattice points: 4 or 8 elements are one index into a codebook ---------------------------------------------------


@cache
def _codebook(name: str) -> Array:
    """Points of a codebook, each one item: its coordinates as bytes."""
    points = np.array(CODEBOOKS[name].points(), np.int8)
    return points.view(f"u{points.shape[1]}")[:, 0]


def _points(name: str, index: Array, sign_bits: Array) -> Array:
    """Points at index (n, 256 / width), with the signs (n, 32 bytes) of 256 elements -> (n, 256)."""
    magnitudes = np.take(_codebook(name), index).view(np.int8)
    return magnitudes * (1 - 2 * _bits(sign_bits).view(np.int8))


_PARITY_SIGNS = np.frombuffer(PARITY_SIGNS, np.uint8)
_SIGN_SHIFTS = np.array([0, 7, 14, 21], np.uint32)


def _signs_and_scale(words: Array) -> tuple[Array, Floats]:
    """Of IQ2_XXS and IQ3_XXS: (n, 8) words of four 7-bit sign indices and a 4-bit scale -> (n, 32), (n, 8)."""
    signs = np.take(_PARITY_SIGNS, (words[:, :, None] >> _SIGN_SHIFTS) & 127)
    return signs.reshape(-1, 32), _floats(words >> 28) + np.float32(0.5)


@_format("IQ2_XXS", 256, d=_HALF, qs="(8,2)<u4")
def _iq2_xxs(b: Array) -> Parts:
    index = np.ascontiguousarray(b["qs"][:, :, 0]).view(np.uint8)
    signs, scale = _signs_and_scale(b["qs"][:, :, 1])
    return Parts(_points("IQ2_XXS", index, signs), _floats(b["d"]) * scale * np.float32(0.25))


def _half_scales(scales: Array) -> Floats:
    """Nibbles s (n, k bytes) -> s + 1/2 (n, 2 * k)."""
    return _floats(_numbers(scales, 4)) + np.float32(0.5)


@_format("IQ2_XS", 256, d=_HALF, qs="(32,)<u2", scales="(8,)u1")
def _iq2_xs(b: Array) -> Parts:
    qs = np.ascontiguousarray(b["qs"])
    levels = _points("IQ2_XS", qs & 511, np.take(_PARITY_SIGNS, qs >> 9))
    return Parts(levels, _floats(b["d"]) * _half_scales(b["scales"]) * np.float32(0.25))


@_format("IQ2_S", 256, d=_HALF, qs="(32,)u1", signs="(32,)u1", qh="(8,)u1", scales="(8,)u1")
def _iq2_s(b: Array) -> Parts:
    index = b["qs"] | _numbers(b["qh"], 2).astype(np.uint16) << 8
    return Parts(_points("IQ2_S", index, b["signs"]), _floats(b["d"]) * _half_scales(b["scales"]) * np.float32(0.25))


@_format("IQ3_XXS", 256, d=_HALF, qs="(64,)u1", scales_and_signs="(8,)<u4")
def _iq3_xxs(b: Array) -> Parts:
    signs, scale = _signs_and_scale(b["scales_and_signs"])
    return Parts(_points("IQ3_XXS", b["qs"], signs), _floats(b["d"]) * scale * np.float32(0.5))


@_format("IQ3_S", 256, d=_HALF, qs="(64,)u1", qh="(8,)u1", signs="(32,)u1", scales="(4,)u1")
def _iq3_s(b: Array) -> Parts:
    index = b["qs"] | _bits(b["qh"]).astype(np.uint16) << 8
    return Parts(_points("IQ3_S", index, b["signs"]), _floats(b["d"]) * (_numbers(b["scales"], 4) * 2 + 1))


@cache
def _iq1_codebook() -> Array:
    """Points of IQ1_S and IQ1_M in eighths, moved by one eighth: up, then (index bit 11) down."""
    points = np.array(CODEBOOKS["IQ1_S"].points(), np.int8) * np.int8(8)
    return np.concatenate([points + np.int8(1), points - np.int8(1)]).view(np.uint64)[:, 0]


def _iq1_levels(qs: Array, qh: Array) -> Array:
    """Low bytes of the indices (n, 32) and the four bits above them -> (n, 256)."""
    index: Array = qs | qh.astype(np.uint16) << 8
    return np.take(_iq1_codebook(), index).view(np.int8)


_THREE_BIT_SHIFTS = np.array([0, 3, 6, 9], np.uint16)


@_format("IQ1_S", 256, d=_HALF, qs="(32,)u1", qh="(8,)<u2")
def _iq1_s(b: Array) -> Parts:
    qh = np.ascontiguousarray(b["qh"])
    high = (qh[:, :, None] >> _THREE_BIT_SHIFTS) & 7 | (qh >> 12 & 8)[:, :, None]
    scale = _floats(b["d"]) * (2 * (qh >> 12 & 7) + 1)
    return Parts(_iq1_levels(b["qs"], high.reshape(-1, 32)), scale * np.float32(0.125))


@_format("IQ1_M", 256, qs="(32,)u1", qh="(16,)u1", scales="(4,)<u2")
def _iq1_m(b: Array) -> Parts:
    s = np.ascontiguousarray(b["scales"])
    # The top nibbles of the four words are the block's half-precision scale.
    d = s[:, 0] >> 12 | s[:, 1] >> 8 & 0x00F0 | s[:, 2] >> 4 & 0x0F00 | s[:, 3] & 0xF000
    three_bits = ((s[:, :, None] >> _THREE_BIT_SHIFTS) & 7).reshape(-1, 16)
    scale = _floats(d.view("<f2"))[:, None] * (2 * three_bits + 1)
    return Parts(_iq1_levels(b["qs"], _numbers(b["qh"], 4)), scale * np.float32(0.125))
