"""Products of several rows on the emulated device, kernel by kernel as on a real one, against float64.

The tensor cores are emulated for what other architectures than 9.0 run: `gemm_half` with groups of four warps is for a
device to show.
"""

from contextlib import contextmanager
from pathlib import Path

import emulator
import numpy as np
import pytest
from emulator.build import library

from reflex_ipc.cuda import formats, launch, linear
from reflex_ipc.cuda.device import Device
from reflex_ipc.cuda.driver import Driver
from reflex_ipc.cuda.experts import expert_linear, expert_scratch_bytes
from reflex_ipc.cuda.few import FewShape, few, few_shapes, few_width
from reflex_ipc.cuda.formats import FLOATS, FORMATS
from reflex_ipc.cuda.products import Experts, Input, Limits, Matrix
from reflex_ipc.reference.dequant import dequantise

KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"
pytestmark = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")

LIMITS = Limits(4, 227 << 10)
SCALES = {
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q5_0": [0],
    "Q6_K": [208],
    "Q8_0": [0],
    "IQ3_S": [0],
    "MXFP4": [],
    "NVFP4": [],
}
TYPES = ["F16", "BF16", *SCALES]
EXACT = 2e-6
"""Of exact products: two halves have 22 bits, and float32 adds them up."""


@contextmanager
def emulated(where, groups):
    lib = emulator.kernels(KERNELS, where)
    with Device(0, Driver(str(library(KERNELS, groups=groups)))) as device:
        kernels, stream = launch.Kernels(device, str(lib)), device.stream()

        def run(calls):
            for call in calls:
                call.prepare(kernels, stream)()
            device.synchronize()
            return [call.kernel for call in calls]

        run.cluster = 8 if groups else 1
        yield run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with emulated(tmp_path_factory.mktemp("emulated"), True) as run:
        yield run


@pytest.fixture(scope="module", params=["four warps together", "and copies arrive at once", "a warp alone"])
def run_few(tmp_path_factory, request):
    with pytest.MonkeyPatch.context() as patch:
        if "at once" in request.param:
            patch.setenv("EMULATED_EARLY", "1")
        with emulated(tmp_path_factory.mktemp("emulated"), "alone" not in request.param) as run:
            yield run


def weight(name, n_out, n_in, rng):
    """(bytes at a multiple of 32, values) of a matrix whose blocks differ in scale."""
    if name in FLOATS:
        values = (rng.standard_normal((n_out, n_in)) * 2.0 ** rng.integers(-4, 5, (n_out, 1))).astype(np.float32)
        if name == "F16":
            raw = values.astype(np.float16).tobytes()
        else:
            raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        kind = FORMATS[name]
        blocks = rng.integers(0, 256, (n_out * n_in // kind.block, kind.block_bytes), dtype=np.uint8)
        for at in SCALES[name]:
            scale = (rng.uniform(0.5, 1, len(blocks)) * 2.0 ** rng.integers(-12, -4, len(blocks))).astype(np.float16)
            blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
        if name == "MXFP4":
            blocks[:, 0] = rng.integers(116, 125, len(blocks))
        if name == "NVFP4":
            blocks[:, :4] = rng.integers(0, 96, (len(blocks), 4))
        raw = blocks.tobytes()
    return raw, dequantise(raw, name, n_out * n_in).reshape(n_out, n_in).astype(np.float64)


def room(data, dtype=np.uint8):
    """An array with this content at a multiple of 256 bytes, with room to read beyond."""
    data = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8)
    whole = np.full(len(data) + 512, 0xFF, np.uint8)
    start = -whole.ctypes.data % 256
    whole[start : start + len(data)] = data
    return whole[start : start + len(data)].view(dtype)


def error(got, expected, size):
    """The greatest error of a row, norm over norm of what its sums are made of."""
    return float((np.linalg.norm(got - expected, axis=-1) / np.linalg.norm(size, axis=-1)).max())


def rows(m, n, rng):
    x = rng.standard_normal((m, n)) * 10.0 ** rng.uniform(-6, 6, (m, 1))
    x[:, :: n // 7] *= 30
    return x.astype(np.float32)


@pytest.mark.parametrize(
    ("name", "m", "exact"),
    [
        *((n, 5, False) for n in TYPES),
        *((n, 17, True) for n in TYPES),
        ("Q4_K", 70, False),
        ("Q6_K", 130, True),
        ("IQ3_S", 40, False),
    ],
)
def test_rows(run, name, m, exact):
    rng = np.random.default_rng([m, *name.encode()])
    n_out, n_in = (40, 256) if m < 70 else (130, 512)
    raw, w = weight(name, n_out, n_in, rng)
    at, x, out = room(raw), room(rows(m, n_in, rng), np.float32), room(np.full((m, n_out + 3), np.nan, np.float32))
    matrix = [Matrix(name, at.ctypes.data, n_out, out.ctypes.data, n_out + 3)]
    scratch = room(np.full(linear.scratch_bytes(LIMITS, m, n_in, matrix, exact=exact), 0xFF, np.uint8))
    calls = linear.linear(LIMITS, Input(x.ctypes.data, m, n_in, n_in), matrix, scratch.ctypes.data, exact=exact)
    run(calls)
    x = x.reshape(m, n_in).astype(np.float64)
    got = out.view(np.float32).reshape(m, -1)
    assert np.isnan(got[:, n_out:]).all()
    found = error(got[:, :n_out], x @ w.T, np.sqrt((x * x) @ (w * w).T))
    assert found < (EXACT if exact else 9e-4)
    assert exact or found > 1e-5, "half precision is what it says"


SHAPES = {  # type, rows of x, rows and columns of W, limits; parts of the columns and stages where they are given
    "one block, in parts of the columns": ("Q4_K", 24, 40, 1536, LIMITS, 3, 2),
    "parts of many stages": ("Q6_K", 40, 70, 2304, LIMITS, 2, 3),
    "three stages in turns": ("Q5_K", 64, 200, 2048, LIMITS, 1, 3),
    "four parts": ("Q4_K", 24, 40, 2048, LIMITS, 4, 2),
    "many parts and blocks": ("Q6_K", 40, 150, 2048, LIMITS, 8, 2),
    "parts of another type": ("Q8_0", 50, 33, 1024, LIMITS, 2, 2),
    "two blocks of rows, for want of shared memory": ("Q6_K", 40, 70, 768, Limits(4, 70 << 10)),
    "a last stage that is not full": ("Q8_0", 24, 33, 1056, LIMITS),
    "rows that begin anywhere": ("F16", 23, 33, 510, LIMITS),
    "bytes that begin anywhere": ("MXFP4", 17, 70, 992, LIMITS),
    "runs of a scale each": ("Q3_K", 50, 70, 768, LIMITS),
    "halves as they are": ("NVFP4", 40, 70, 960, LIMITS),
    "two slices a stage": ("BF16", 20, 50, 768, LIMITS),
    **{f"{width} rows at once": ("Q4_K", width, 20, 512, LIMITS) for width in (32, 40, 64)},
}


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("case", SHAPES)
def test_few_rows(run_few, case, swiglu):
    """Stages in shared memory; bias, residual and SwiGLU, at once and after parts; matrices beside each other.

    Parts are added up by a cluster where four warps multiply together, and through memory elsewhere."""
    name, m, n_out, n_in, limits, *given = SHAPES[case]
    limits = limits._replace(cluster=run_few.cluster, together=run_few.cluster > 1)
    rng = np.random.default_rng([m, n_in, swiglu])
    x, norm = room(rows(m, n_in, rng), np.float32), room(rng.uniform(0.02, 0.08, n_in).astype(np.float32), np.float32)
    wide = x.reshape(m, n_in).astype(np.float64)
    wide = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * norm
    keep, matrices, sides = [], [], []
    for n in (n_out, n_out if swiglu else n_out // 2 + 1):
        raw, w = weight(name, n, n_in, rng)
        before = rng.standard_normal((m, n)).astype(np.float32)
        at, bias, out = room(raw), room(rng.standard_normal(n).astype(np.float32), np.float32), room(before, np.float32)
        keep.append((at, bias, out, before))
        matrices.append(Matrix(name, at.ctypes.data, n, out.ctypes.data, n, bias.ctypes.data, out.ctypes.data))
        terms = bias**2 if swiglu else bias**2 + before.astype(np.float64) ** 2
        sides.append((wide @ w.T + bias, np.sqrt((wide**2) @ (w**2).T + terms)))
    scratch = room(np.full(linear.scratch_bytes(limits, m, n_in, matrices, swiglu), 0xFF, np.uint8))
    entry = Input(x.ctypes.data, m, n_in, n_in, norm.ctypes.data, 1e-6)
    if given:
        parts, stages = given
        width = few_width(limits, m, [name])
        warps, _, most, shared = max(few_shapes(limits, name, width), key=lambda shape: shape[2])
        part_stages = -(-n_in // (formats.FORMATS[name].few_columns * parts))
        assert stages <= most and (part_stages > stages or parts > 2)
        shape = FewShape(warps, parts, part_stages, stages, shared)
        calls = few(limits, entry, matrices, scratch.ctypes.data, swiglu, width, shape)
    else:
        calls = linear.linear(limits, entry, matrices, scratch.ctypes.data, swiglu=swiglu)
    names = run_few(calls)
    assert names[0] == "prepare_pages" and names[1].startswith(f"few_{name.lower()}_") and not names[2:]
    assert calls[1].grid[1] == (2 if "two blocks" in case else 1)
    outs = [out.reshape(m, -1) for _, _, out, _ in keep]
    if swiglu:
        (gate, gate_size), (up, up_size) = sides
        silu = gate / (1 + np.exp(-gate))
        size = 1.1 * gate_size * np.abs(up) + np.abs(silu) * up_size + np.abs(keep[0][3])
        assert error(outs[0], silu * up + keep[0][3], size) < 9e-4
    else:
        for out, (expected, size), (*_, before) in zip(outs, sides, keep, strict=True):
            assert error(out, expected + before, size) < 9e-4
    first = [out.tobytes() for out in outs]
    for *_, out, before in keep:
        out[:] = before.reshape(-1)
    run_few(calls)
    assert [out.tobytes() for out in outs] == first


@pytest.mark.parametrize("m", [3, 9, 16])
@pytest.mark.parametrize("name", formats.WHOLE)
def test_up_to_16_rows(run_few, name, m, monkeypatch):
    monkeypatch.setattr(linear, "_LARGE", {8: 0, 16: 0})
    rng = np.random.default_rng([m, *name.encode()])
    n_out, n_in = 150, 1024
    raw, w = weight(name, n_out, n_in, rng)
    at, x, out = room(raw), room(rows(m, n_in, rng), np.float32), room(np.full((m, n_out), np.nan, np.float32))
    matrix = [Matrix(name, at.ctypes.data, n_out, out.ctypes.data, n_out)]
    limits = LIMITS._replace(cluster=run_few.cluster, together=run_few.cluster > 1)
    scratch = room(np.full(linear.scratch_bytes(limits, m, n_in, matrix), 0xFF, np.uint8))
    names = run_few(linear.linear(limits, Input(x.ctypes.data, m, n_in, n_in), matrix, scratch.ctypes.data))
    assert names[1] == f"few_{name.lower()}_16" if run_few.cluster > 1 else f"mma_{name.lower()}_{8 if m < 9 else 16}"
    x = x.reshape(m, n_in).astype(np.float64)
    got = out.view(np.float32).reshape(m, -1)
    assert error(got, x @ w.T, np.sqrt((x * x) @ (w * w).T)) < 9e-4


@pytest.mark.parametrize("name", [*formats.WHOLE, "NVFP4"])
def test_weights_lose_nothing(run_few, name):
    """All that a product of k-quants, which are whole numbers, or of what are halves loses is what x loses as halves,
    also where minima are most of the sum."""
    rng = np.random.default_rng(len(name))
    m, n_out, n_in = 20, 24, 512
    x = np.repeat(rng.standard_normal((m, n_in // 32)), 32, axis=1) + 0.01 * rng.standard_normal((m, n_in))
    x = x.astype(np.float32)
    raw, _ = weight(name, n_out, n_in, rng)
    blocks = np.frombuffer(raw, np.uint8).reshape(-1, formats.FORMATS[name].block_bytes).copy()
    if name in ("Q4_K", "Q5_K"):
        blocks[:, :4] = np.array([[2.0**-14, 2.0**-6]], np.float16).view(np.uint8)  # d and dmin
    if name == "NVFP4":
        blocks[:, :4] = rng.integers(0, 256, (len(blocks), 4))  # from the least scale to the greatest
    w = dequantise(blocks.tobytes(), name, n_out * n_in).reshape(n_out, n_in).astype(np.float64)
    power = 2.0 ** (np.floor(np.log2(np.abs(x).max(axis=1, keepdims=True))) - 14)
    halves = (x / power).astype(np.float16).astype(np.float64) * power
    at, place = room(blocks), room(x, np.float32)
    out = room(np.full((m, n_out), np.nan, np.float32), np.float32)
    matrix = [Matrix(name, at.ctypes.data, n_out, out.ctypes.data, n_out)]
    limits = LIMITS._replace(cluster=run_few.cluster, together=run_few.cluster > 1)
    scratch = room(np.full(linear.scratch_bytes(limits, m, n_in, matrix), 0xFF, np.uint8))
    run_few(
        linear.linear(
            limits,
            Input(place.ctypes.data, m, n_in, n_in),
            matrix,
            scratch.ctypes.data,
        )
    )
    found = error(out.reshape(m, n_out), halves @ w.T, np.sqrt((halves**2) @ (w**2).T))
    rounded = error(x.astype(np.float64) @ w.T, halves @ w.T, np.sqrt((halves**2) @ (w**2).T))
    assert found < (3e-6 if name != "Q6_K" else 3e-4) and rounded > 1e-5


@pytest.mark.parametrize("swiglu", [False, True])
def test_exact_rows_with_norm_bias_and_residual(run, swiglu):
    rng = np.random.default_rng(3)
    m, n_out, n_in = 33, 100, 256
    x, norm = room(rows(m, n_in, rng), np.float32), room(rng.uniform(0.5, 1.5, n_in).astype(np.float32), np.float32)
    norm *= 0.05
    residual = rng.standard_normal((m, n_out)).astype(np.float32)
    wide = x.reshape(m, n_in).astype(np.float64)
    wide = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * norm
    keep, matrices, sides = [], [], []
    for name in ("Q4_K", "Q4_K" if swiglu else "F16"):
        raw, w = weight(name, n_out, n_in, rng)
        at, bias = room(raw), room(rng.standard_normal(n_out).astype(np.float32), np.float32)
        out = room(residual, np.float32)
        keep.append((at, bias, out))
        matrices.append(Matrix(name, at.ctypes.data, n_out, out.ctypes.data, n_out, bias.ctypes.data, out.ctypes.data))
        terms = bias**2 if swiglu else bias**2 + residual.astype(np.float64) ** 2
        sides.append((wide @ w.T + bias, np.sqrt((wide**2) @ (w**2).T + terms)))
    scratch = room(np.full(linear.scratch_bytes(LIMITS, m, n_in, matrices, swiglu, exact=True), 0xFF, np.uint8))
    entry = Input(x.ctypes.data, m, n_in, n_in, norm.ctypes.data, 1e-6)
    run(linear.linear(LIMITS, entry, matrices, scratch.ctypes.data, swiglu=swiglu, exact=True))
    outs = [out.reshape(m, n_out) for _, _, out in keep]
    if swiglu:
        (gate, gate_size), (up, up_size) = sides
        silu = gate / (1 + np.exp(-gate))
        size = 1.1 * gate_size * np.abs(up) + np.abs(silu) * up_size + np.abs(residual)
        assert error(outs[0], silu * up + residual, size) < EXACT
    else:
        for out, (expected, size) in zip(outs, sides, strict=True):
            assert error(out, expected + residual, size) < EXACT


class Routed:
    """m tokens' choices of experts, none of the last; x, outputs and scratch; two matrices an expert."""

    def __init__(self, name, m, n_expert, n_in, n_out, per_expert):
        rng = np.random.default_rng([m, n_expert, n_in])
        self.n_used = n_used = min(4, n_expert - 1)
        self.name, self.m, self.n_in, self.n_out, self.per_expert = name, m, n_in, n_out, per_expert
        made = [[weight(name, n_out, n_in, rng) for _ in range(n_expert)] for _ in range(2)]
        self.raw = [room(b"".join(raw for raw, _ in matrix)) for matrix in made]
        x = rows(m, n_in * (n_used if per_expert else 1), rng)
        self.x = room(x, np.float32)
        ids = np.stack([rng.permutation(n_expert - 1)[:n_used] for _ in range(m)])
        self.routes = room(np.concatenate([ids, np.full((m, n_used), np.nan)], axis=1).astype(np.float32), np.float32)
        self.out = room(np.full((m, n_used, n_out), np.nan, np.float32), np.float32)
        self.experts = Experts(self.routes.ctypes.data, 2 * n_used, n_used, len(made[0][0][0]), n_expert)
        size = expert_scratch_bytes(m, n_in, name, self.experts, per_expert=per_expert)
        self.scratch = room(np.full(size, 0xFF, np.uint8))
        parts = np.broadcast_to(x.reshape(m, -1, n_in).astype(np.float64), (m, n_used, n_in))
        w = [np.stack([values for _, values in matrix])[ids] for matrix in made]
        self.expected = [np.einsum("tki,tkoi->tko", parts, each) for each in w]
        self.sizes = [np.sqrt(np.einsum("tki,tkoi->tko", parts**2, each**2)) for each in w]

    def calls(self, n, limits=LIMITS, **options):
        at = self.out.ctypes.data
        matrices = [Matrix(self.name, raw.ctypes.data, self.n_out, at, self.n_out) for raw in self.raw[:n]]
        entry = Input(self.x.ctypes.data, self.m, self.n_in, self.x.size // self.m)
        scratch = self.scratch.ctypes.data
        return expert_linear(limits, entry, matrices, self.experts, scratch, per_expert=self.per_expert, **options)

    def found(self):
        found = self.out.reshape(self.expected[0].shape).copy()
        self.out[:] = np.nan
        return found


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize(("m", "n_expert"), [(7, 7), (23, 3)])
@pytest.mark.parametrize("name", TYPES)
def test_experts(run, name, m, n_expert, per_expert):
    """Some experts have many tokens, some none; and every slot is written once."""
    routed = Routed(name, m, n_expert, 256, 45, per_expert)
    names = run(routed.calls(1))
    assert names == ["group_experts", "prepare_rows", f"grouped_{name.lower()}"]
    assert error(routed.found(), routed.expected[0], routed.sizes[0]) < EXACT


GROUPED = {
    "tiles that are full, and many stages": ("Q4_K", 75, 3, 1024, 70, LIMITS),
    "a last stage that is not full": ("Q8_0", 20, 5, 352, 33, LIMITS),
    "rows that begin anywhere": ("F16", 9, 3, 510, 33, LIMITS),
    "half a block a slice": ("IQ3_S", 20, 3, 512, 50, LIMITS),
    "little shared memory": ("Q4_K", 60, 3, 512, 70, Limits(4, 99 << 10)),
    "hardly any": ("Q6_K", 40, 3, 512, 70, Limits(4, 64 << 10)),
}


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("case", GROUPED)
def test_experts_in_every_shape(run, case, swiglu):
    """Gate and up at once or one matrix alone; again in the order that is there; and the same bits every time."""
    *arguments, limits = GROUPED[case]
    routed = Routed(*arguments, per_expert=False)
    calls = routed.calls(1 + swiglu, limits)
    names = run(calls)
    found = routed.found()
    if swiglu:
        (gate, up), (gate_size, up_size) = routed.expected, routed.sizes
        silu = gate * np.exp(-np.logaddexp(0, -gate))
        assert error(found, silu * up, 1.1 * gate_size * np.abs(up) + np.abs(silu) * up_size) < EXACT
    else:
        assert error(found, routed.expected[0], routed.sizes[0]) < EXACT
    again = routed.calls(1 + swiglu, limits, is_grouped=True)
    assert run(again) == names[1:]
    assert routed.found().tobytes() == found.tobytes()
    assert calls[-1].shared + 768 <= limits.shared_per_block
