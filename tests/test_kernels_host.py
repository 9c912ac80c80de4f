"""The kernels' dequantisation, compiled for the host, against the `gguf` package."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest

from kernels.codebooks_header import header
from reflex_ipc.cuda import formats
from reflex_ipc.reference.dequant import dequantise

ROOT = Path(__file__).parent.parent
QUANTISED = [name for name in formats.FORMATS if name not in formats.FLOATS]
# The package cannot dequantise these two; the reference's own reading of their three lines of layout stands in.
NO_ORACLE = {"Q1_0", "Q2_0"}


class Facts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int) for name in ("elements", "bytes", "zero", "greatest", "has_offset", "is_signed")]
    _fields_ += [("piece", ctypes.c_int), ("rows", ctypes.c_int)]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    build = tmp_path_factory.mktemp("host")
    library = build / "host.so"
    command = [
        "g++",
        "-std=c++17",
        "-O1",
        "-Wall",
        "-Wextra",
        "-Wno-unknown-pragmas",
        "-Werror",
        "-ffp-contract=off",
        "-fsanitize=undefined",
    ]
    command += ["-fno-sanitize=alignment", "-fno-sanitize-recover", "-shared", "-fPIC"]
    command += [f"-I{ROOT / 'kernels'}", str(ROOT / "tests" / "kernels_host.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def test_codebooks_header_is_current():
    assert (ROOT / "kernels" / "codebooks.cuh").read_text() == header(), "python -m kernels.codebooks_header"


def run(host, name, data):
    facts = getattr(host, f"facts_{name}")
    facts.restype = Facts
    known = facts()
    n = len(data) // known.bytes
    out = np.full(n * known.elements, np.nan, np.float32)
    getattr(host, f"blocks_{name}")(data.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(n), out.ctypes)
    return out


@pytest.mark.parametrize("name", QUANTISED)
def test_equals_gguf(host, name):
    """Random bytes, so that every bit pattern of every field occurs, infinite and undefined scales included."""
    kind = getattr(gguf.GGMLQuantizationType, name, None)
    rng = np.random.default_rng(sum(name.encode()))
    facts = getattr(host, f"facts_{name}")
    facts.restype = Facts
    data = rng.integers(0, 256, 2000 * facts().bytes, dtype=np.uint8)
    with np.errstate(all="ignore"):
        if name in NO_ORACLE:
            expected = dequantise(data, name, 2000 * facts().elements)
        else:
            expected = gguf.dequantize(data.reshape(2000, -1), kind).reshape(-1)
    np.testing.assert_array_equal(run(host, name, data), expected)


@pytest.mark.parametrize("name", QUANTISED)
def test_facts(host, name):
    """Block sizes are the format's, and `zero` and `greatest` bound the levels: kernels scale by them."""
    function = getattr(host, f"facts_{name}")
    function.restype = Facts
    facts = function()
    kind = getattr(gguf.GGMLQuantizationType, name, None)
    if kind is not None:
        assert (facts.elements, facts.bytes) == gguf.GGML_QUANT_SIZES[kind]
    known = formats.FORMATS[name]
    assert (known.piece, known.block, known.block_bytes, known.rows) == (
        facts.piece,
        facts.elements,
        facts.bytes,
        facts.rows,
    )
    assert not (facts.is_signed and facts.zero)
    assert not (facts.has_offset and facts.zero)
    nothing = getattr(host, f"of_nothing_{name}")
    nothing.restype = ctypes.c_float
    assert nothing() == 0.0
