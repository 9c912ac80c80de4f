"""Matrix products on the device, through `linear`, against float64 products of the dequantised weights.

Outputs are poisoned with NaN and lie between guards, weights begin at odd multiples of 32 bytes, and nothing but what
the interface promises is initialised.
"""

import numpy as np
import pytest

from reflex_ipc.cuda import linear
from reflex_ipc.cuda.experts import expert_linear, expert_scratch_bytes
from reflex_ipc.cuda.few import FewShape, few, few_shapes
from reflex_ipc.cuda.formats import FLOATS, FORMATS, LOSSLESS
from reflex_ipc.cuda.products import Experts, Input, Limits, Matrix, limits_of
from reflex_ipc.reference.dequant import dequantise

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

GUARD = 64  # float32 on either side of an output

SCALES = {  # where the half-precision scales of a block are
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [], "NVFP4": [], "Q1_0": [0],
    "Q2_0": [0], "TQ1_0": [52], "TQ2_0": [64], "IQ1_S": [0], "IQ1_M": [], "IQ2_XXS": [0], "IQ2_XS": [0], "IQ2_S": [0],
    "IQ3_XXS": [0], "IQ3_S": [0],
}  # fmt: skip
QUANTISED = [name for name in FORMATS if name not in FLOATS]


def random_weight(name, n_out, n_in, rng):
    """The bytes of an (n_out, n_in) matrix whose blocks differ in scale by up to 2^8."""
    kind = FORMATS[name]
    if name in FLOATS:
        values = rng.standard_normal((n_out, n_in)) * 2.0 ** rng.integers(-4, 5, (n_out, 1))
        values = values.astype(np.float32)
        if name == "F16":
            return values.astype(np.float16).tobytes()
        if name == "BF16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return values.tobytes()
    n = n_out * n_in // kind.block
    data = rng.integers(0, 256, (n, kind.block_bytes), dtype=np.uint8)
    for at in SCALES[name]:
        scale = (rng.uniform(0.5, 1, n) * 2.0 ** rng.integers(-12, -4, n)).astype(np.float16)
        data[:, at : at + 2] = scale.view(np.uint8).reshape(n, 2)
    if name == "MXFP4":
        data[:, 0] = rng.integers(116, 125, n)
    if name == "NVFP4":
        data[:, :4] = rng.integers(20, 84, (n, 4))
    if name == "IQ1_M":  # the top nibbles of four words are the scale
        scale = (rng.uniform(0.5, 1, n) * 2.0 ** rng.integers(-12, -4, n)).astype(np.float16).view(np.uint16)
        words = data[:, 48:].view(np.uint16)
        for i in range(4):
            words[:, i] = words[:, i] & 0x0FFF | (scale >> 4 * i & 15) << 12
    return data.tobytes()


def values(name, data, n_out, n_in):
    """The matrix in float64, on the device."""
    return cp.asarray(dequantise(data, name, n_out * n_in).reshape(n_out, n_in)).astype(cp.float64)


def on_device(data):
    """(keeps it alive, address): an odd multiple of 32 bytes, with NaN patterns around the data."""
    room = cp.full(len(data) + 192, 0xFF, cp.uint8)
    start = 32 - room.data.ptr % 64 if room.data.ptr % 64 <= 32 else 96 - room.data.ptr % 64
    room[start : start + len(data)] = cp.frombuffer(bytearray(data), cp.uint8)
    return room, room.data.ptr + start


class Out:
    """A poisoned (m, n) float32 output, rows `stride` apart, between guards."""

    def __init__(self, m, n, stride=None):
        self.m, self.n, self.stride = m, n, stride or n
        self.room = cp.full(m * self.stride + 2 * GUARD, cp.nan, cp.float32)
        self.address = self.room.data.ptr + 4 * GUARD

    def rows(self):
        inside = self.room[GUARD : GUARD + self.m * self.stride].reshape(self.m, self.stride)
        assert bool(cp.isnan(self.room[:GUARD]).all()) and bool(cp.isnan(self.room[-GUARD:]).all()), "guards"
        assert bool(cp.isnan(inside[:, self.n :]).all()), "written between the rows"
        return inside[:, : self.n]


def products(x, w):
    """(x W^T, the norm of the products that each sum has) in float64: rounding errors go with the latter."""
    x = x.astype(cp.float64)
    return x @ w.T, cp.sqrt((x * x) @ (w * w).T)


def error(got, expected, size):
    """The greatest error of a row, norm over norm; NaN where something is NaN."""
    return float((cp.linalg.norm(got.astype(cp.float64) - expected, axis=1) / cp.linalg.norm(size, axis=1)).max())


@pytest.fixture(scope="module")
def gpu():
    from reflex_ipc.cuda.device import Device
    from reflex_ipc.cuda.launch import Kernels

    cp.zeros(1)
    with Device() as device:
        kernels = Kernels(device)
        stream = device.stream()
        limits = limits_of(device, kernels)

        def run(calls):
            cp.cuda.Device().synchronize()
            for call in calls:
                call.prepare(kernels, stream)()
            device.synchronize()

        run.limits = limits
        yield run


def multiply(gpu, x, matrices, width=None, norm=0, eps=0.0, swiglu=False, limits=None, exact=False):
    """Run `linear` with scratch that is poisoned first."""
    width = width or x.shape[1]
    source = Input(x.data.ptr, x.shape[0], width, x.strides[0] // 4, norm, eps)
    size = linear.scratch_bytes(limits or gpu.limits, x.shape[0], width, matrices, swiglu, exact=exact)
    scratch = cp.full(size + 512, 0xFF, cp.uint8)
    start = -scratch.data.ptr % 256
    at = scratch.data.ptr + start
    gpu(linear.linear(limits or gpu.limits, source, matrices, at, swiglu=swiglu, exact=exact))
    assert bool((scratch[:start] == 0xFF).all()) and bool((scratch[start + size :] == 0xFF).all()), "beyond scratch"


def bound(name, m):
    """Relative error of a product that the arithmetic explains: 16-bit x for one row (but one scale a group of 32), a
    half's 2^-12 on average for x and as much for weights that halves lose something of, float32 for floats."""
    if name == "F32" or (name in FLOATS and m == 1):
        return 2e-6
    if m == 1:
        return 8e-5
    return 4.9e-4 if name in LOSSLESS else 9e-4


def activations(m, n, rng, spread=6):
    """Rows of very different size, with a few elements ten times the others."""
    x = rng.standard_normal((m, n)).astype(np.float32)
    x[:, rng.integers(0, n, n // 50)] *= 10
    x *= 10.0 ** rng.uniform(-spread, spread, (m, 1))
    return cp.asarray(x.astype(np.float32))


SHAPES = {
    1: (37, 768),
    2: (33, 512),
    5: (70, 256),
    9: (16, 1024),
    17: (129, 256),
    33: (40, 768),
    64: (65, 512),
    65: (130, 256),
    200: (131, 768),
}


@pytest.mark.parametrize("m", SHAPES)
@pytest.mark.parametrize("name", FORMATS)
def test_every_type_and_number_of_rows(gpu, name, m):
    n_out, n_in = SHAPES[m]
    rng = np.random.default_rng([m, *name.encode()])
    data = random_weight(name, n_out, n_in, rng)
    _keep, weight = on_device(data)
    x, out = activations(m, n_in, rng), Out(m, n_out, n_out + 3)
    multiply(gpu, x, [Matrix(name, weight, n_out, out.address, out.stride)])
    assert error(out.rows(), *products(x, values(name, data, n_out, n_in))) < bound(name, m)


@pytest.mark.parametrize("m", [5, 17, 130])
@pytest.mark.parametrize("name", FORMATS)
def test_exact_products_of_several_rows(gpu, name, m):
    """As little is lost as of one row: what feeds a router must not tip it."""
    # Two planes of halves lose less than 2e-6, as the emulated kernels show, whose sums are rounded. Tensor cores cut
    # sums off instead: up to 7.3e-6 on an H200. One plane, which is what must be noticed, loses 5e-4.
    n_out, n_in = 150, 768
    rng = np.random.default_rng([m, *name.encode()])
    data = random_weight(name, n_out, n_in, rng)
    _keep, weight = on_device(data)
    x, out = activations(m, n_in, rng), Out(m, n_out, n_out + 3)
    multiply(gpu, x, [Matrix(name, weight, n_out, out.address, out.stride)], exact=True)
    limit = bound(name, 1) if m <= linear.REPEATED else 1e-5
    assert error(out.rows(), *products(x, values(name, data, n_out, n_in))) < limit


@pytest.mark.parametrize("m", [1, 3, 70])
@pytest.mark.parametrize("n_in", [32, 96, 576, 1536])
@pytest.mark.parametrize("name", ["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "MXFP4"])
def test_rows_of_few_blocks(gpu, name, n_in, m):
    rng = np.random.default_rng([m, n_in])
    data = random_weight(name, 50, n_in, rng)
    _keep, weight = on_device(data)
    x, out = activations(m, n_in, rng), Out(m, 50)
    multiply(gpu, x, [Matrix(name, weight, 50, out.address, out.stride)])
    assert error(out.rows(), *products(x, values(name, data, 50, n_in))) < bound(name, m)


@pytest.mark.parametrize("m", [1, 6, 90])
@pytest.mark.parametrize("n_in", [1, 7, 64, 65, 200, 1001])
@pytest.mark.parametrize("name", FLOATS)
def test_float_rows_of_any_length(gpu, name, n_in, m):
    rng = np.random.default_rng([m, n_in])
    data = random_weight(name, 19, n_in, rng)
    _keep, weight = on_device(data)
    x = cp.full((m, n_in + 3), cp.nan, cp.float32)
    x[:, :n_in] = activations(m, n_in, rng)
    out = Out(m, 19)
    multiply(gpu, x, [Matrix(name, weight, 19, out.address, out.stride)], width=n_in)
    few = 1 if n_in > 32 else 2  # errors of a few products do not average
    assert error(out.rows(), *products(x[:, :n_in], values(name, data, 19, n_in))) < few * bound(name, m)


MIXES = [
    ("Q4_K", "Q4_K", "Q6_K"),
    ("Q5_0", "Q8_0", "Q5_0"),
    ("F16", "F16", "F16"),
    ("Q8_0", "F32", "Q4_K"),
    ("Q6_K", "Q4_K", "Q5_K"),
    ("Q4_K", "IQ3_S", "Q8_0"),
]


@pytest.mark.parametrize("m", [1, 4, 20, 100])
@pytest.mark.parametrize("types", MIXES)
def test_several_matrices_with_norm_bias_and_residual(gpu, types, m):
    """The three parts of an attention layer's input, of different heights; the residual is also the output."""
    rng = np.random.default_rng(m)
    n_in, heights, eps = 512, (136, 24, 41), 1e-5
    x = activations(m, n_in, rng, spread=3)
    norm = cp.asarray(rng.uniform(0.5, 1.5, n_in).astype(np.float32))
    wide = x.astype(cp.float64)
    normed = wide / cp.sqrt((wide**2).mean(axis=1, keepdims=True) + eps) * norm
    keep, matrices, checks = [], [], []
    for name, n_out in zip(types, heights, strict=True):
        data = random_weight(name, n_out, n_in, rng)
        room, weight = on_device(data)
        bias = cp.asarray(rng.standard_normal(n_out).astype(np.float32))
        out = Out(m, n_out)
        before = cp.asarray(rng.standard_normal((m, n_out)).astype(np.float32))
        out.rows()[...] = before
        matrices.append(Matrix(name, weight, n_out, out.address, out.stride, bias.data.ptr, out.address))
        expected, size = products(normed, values(name, data, n_out, n_in))
        checks.append((name, out, expected + bias + before, size))
        keep += [room, bias]
    multiply(gpu, x, matrices, norm=norm.data.ptr, eps=eps)
    for name, out, expected, size in checks:
        assert error(out.rows(), expected, size) < bound(name, m)


@pytest.mark.parametrize("m", [1, 4, 20, 64, 100])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "F16", "BF16", "F32", "IQ3_S", "NVFP4"])
def test_swiglu(gpu, name, m):
    rng = np.random.default_rng(m)
    n_in, n_out, eps = 512, 147, 1e-6
    x = activations(m, n_in, rng, spread=3)
    norm = cp.asarray((rng.uniform(0.5, 1.5, n_in) * 0.02).astype(np.float32))
    keep, matrices, sides = [], [], []
    wide = x.astype(cp.float64)
    normed = wide / cp.sqrt((wide**2).mean(axis=1, keepdims=True) + eps) * norm
    out = Out(m, n_out)
    for _ in range(2):
        data = random_weight(name, n_out, n_in, rng)
        room, weight = on_device(data)
        bias = cp.asarray(rng.standard_normal(n_out).astype(np.float32))
        keep += [room, bias]
        matrices.append(Matrix(name, weight, n_out, out.address, out.stride, bias.data.ptr))
        expected, size = products(normed, values(name, data, n_out, n_in))
        sides.append((expected + bias, size))
    multiply(gpu, x, matrices, norm=norm.data.ptr, eps=eps, swiglu=True)
    (gate, gate_size), (up, up_size) = sides
    silu = gate / (1 + cp.exp(-gate))
    # The slope of silu is at most 1.1; float32's exponential adds a little.
    size = 1.1 * gate_size * cp.abs(up) + cp.abs(silu) * up_size
    assert error(out.rows(), silu * up, size) < bound(name, m)


@pytest.mark.parametrize("m", [1, 2, 64, 100])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "F16", "Q3_K"])
def test_same_bits_twice(gpu, name, m):
    rng = np.random.default_rng(m)
    data = random_weight(name, 777, 1024, rng)
    _keep, weight = on_device(data)
    x = activations(m, 1024, rng)
    results = []
    for _ in range(3):
        out = Out(m, 777)
        multiply(gpu, x, [Matrix(name, weight, 777, out.address, out.stride)])
        results.append(out.rows().get().tobytes())
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("m", [1, 8, 100])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "F16", "BF16"])
def test_activations_beyond_half_precision(gpu, name, m):
    """1e6 and more, in rows that also hold ordinary numbers; weights far from 1 as well."""
    rng = np.random.default_rng(m)
    n_in, n_out = 2048, 64
    x = rng.standard_normal((m, n_in)).astype(np.float32)
    x[:, ::97] = 3e6
    x = cp.asarray(x)
    data = random_weight(name, n_out, n_in, rng)
    _keep, weight = on_device(data)
    out = Out(m, n_out)
    multiply(gpu, x, [Matrix(name, weight, n_out, out.address, out.stride)])
    assert error(out.rows(), *products(x, values(name, data, n_out, n_in))) < bound(name, m)


@pytest.mark.parametrize("m", [1, 3, 80])
@pytest.mark.parametrize("name", ["Q4_K", "Q4_0", "F16", "F32"])
def test_not_a_number_is_not_lost(gpu, name, m):
    rng = np.random.default_rng(m)
    data = random_weight(name, 40, 256, rng)
    _keep, weight = on_device(data)
    x = cp.asarray(rng.standard_normal((m, 256)).astype(np.float32))
    x[m - 1, 100] = cp.nan
    out = Out(m, 40)
    multiply(gpu, x, [Matrix(name, weight, 40, out.address, out.stride)])
    assert bool(cp.isnan(out.rows()[m - 1]).all())
    assert not bool(cp.isnan(out.rows()[: m - 1]).any())


@pytest.mark.parametrize("name", ["Q4_K", "Q8_0", "F16"])
@pytest.mark.parametrize("n_multiprocessors", [1, 3, 7, 132, 400])
def test_any_number_of_blocks(gpu, name, n_multiprocessors):
    """The shape of the launch follows the device; every shape computes the same sums."""
    rng = np.random.default_rng(5)
    n_in, n_out = 1024, 1100
    data = random_weight(name, n_out, n_in, rng)
    _keep, weight = on_device(data)
    x, out = activations(1, n_in, rng), Out(1, n_out)
    multiply(gpu, x, [Matrix(name, weight, n_out, out.address, out.stride)], limits=Limits(n_multiprocessors, 99 << 10))
    assert error(out.rows(), *products(x, values(name, data, n_out, n_in))) < bound(name, 1)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "F16"])
def test_parts_of_the_columns(gpu, name, parts, swiglu):
    """Added up by a cluster, or through memory where the kernels know none."""
    rng = np.random.default_rng([parts, *name.encode()])
    m, n_in, n_out = 40, 4096, 200
    data = [random_weight(name, n_out, n_in, rng) for _ in range(2)]
    kept = [on_device(each) for each in data]
    x = activations(m, n_in, rng, spread=1)
    source = Input(x.data.ptr, m, n_in, n_in)
    outs = [Out(m, n_out) for _ in data]
    matrices = [Matrix(name, at, n_out, o.address, o.stride) for (_, at), o in zip(kept, outs, strict=True)]
    warps, _, stages, shared = few_shapes(gpu.limits, name, 40)[0]
    shape = FewShape(warps, parts, n_in // FORMATS[name].few_columns // parts, stages, shared)
    scratch = cp.full(linear.scratch_bytes(gpu.limits, m, n_in, matrices, swiglu) + 256, 0xFF, cp.uint8)
    gpu(few(gpu.limits, source, matrices, -(-scratch.data.ptr // 256) * 256, swiglu, 40, shape))
    expected, size = products(x, values(name, data[0], n_out, n_in))
    if swiglu:
        up, up_size = products(x, values(name, data[1], n_out, n_in))
        silu = expected / (1 + cp.exp(-expected))
        expected, size = silu * up, 1.1 * size * cp.abs(up) + cp.abs(silu) * up_size
    assert error(outs[0].rows(), expected, size) < bound(name, m)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("m", [12, 40])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K"])
def test_every_block_of_a_large_product(gpu, name, m, swiglu):
    """More blocks than run at a time, each of many stages, on the same few rows of W: the same bits from each."""
    rng = np.random.default_rng(13)
    n_in, distinct, repeats = 12288, 192, 64
    n_out = distinct * repeats
    data = [random_weight(name, distinct, n_in, rng) for _ in range(2)]
    kept = [on_device(each * repeats) for each in data]
    x, outs = activations(m, n_in, rng, spread=1), [Out(m, n_out) for _ in data]
    matrices = [Matrix(name, at, n_out, o.address, o.stride) for (_, at), o in zip(kept, outs, strict=True)]
    multiply(gpu, x, matrices, swiglu=swiglu)
    expected, size = products(x, values(name, data[0], distinct, n_in))
    if swiglu:
        up, up_size = products(x, values(name, data[1], distinct, n_in))
        silu = expected / (1 + cp.exp(-expected))
        expected, size = silu * up, 1.1 * size * cp.abs(up) + cp.abs(silu) * up_size
    got = outs[0].rows().reshape(m, repeats, distinct)
    assert error(got[:, 0], expected, size) < bound(name, m)
    assert bool((got == got[:, :1]).all())


@pytest.mark.parametrize("name", ["Q4_K", "Q5_0", "F16"])
def test_rows_longer_than_shared_memory(gpu, name):
    """Columns in several launches, each on top of the one before; norm, bias and residual count once."""
    rng = np.random.default_rng(7)
    n_in, n_out = 16384, 90
    data = random_weight(name, n_out, n_in, rng)
    _keep, weight = on_device(data)
    x, out = activations(1, n_in, rng, spread=2), Out(1, n_out)
    norm, bias, residual = (cp.asarray(rng.standard_normal(n).astype(np.float32)) for n in (n_in, n_out, n_out))
    matrix = Matrix(name, weight, n_out, out.address, out.stride, bias.data.ptr, residual.data.ptr)
    multiply(gpu, x, [matrix], norm=norm.data.ptr, eps=1e-6, limits=Limits(132, 80 << 10))
    wide = x.astype(cp.float64)
    normed = wide / cp.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6) * norm
    expected, size = products(normed, values(name, data, n_out, n_in))
    assert error(out.rows(), expected + bias + residual, size) < bound(name, 1)


@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("m", [1, 4, 5, 70])
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "F32"])
def test_experts(gpu, name, m, per_expert):
    rng = np.random.default_rng(m)
    n_expert, n_used, n_in, n_out = 7, 3, 256, 45
    data = [random_weight(name, n_out, n_in, rng) for _ in range(n_expert)]
    _keep, weight = on_device(b"".join(data))
    x = activations(m, n_in * (n_used if per_expert else 1), rng, spread=1)
    ids = np.stack([rng.permutation(n_expert)[:n_used] for _ in range(m)])
    routes = cp.asarray(np.concatenate([ids, np.full((m, n_used), np.nan)], axis=1).astype(np.float32))
    out = Out(m, n_used * n_out)
    source = Input(x.data.ptr, m, n_in, x.shape[1])
    experts = Experts(routes.data.ptr, 2 * n_used, n_used, len(data[0]), n_expert)
    size = expert_scratch_bytes(m, n_in, name, experts, per_expert=per_expert)
    scratch = cp.full(size + 256, 0xFF, cp.uint8)
    at = scratch.data.ptr + -scratch.data.ptr % 256
    matrix = Matrix(name, weight, n_out, out.address, n_out)
    gpu(expert_linear(gpu.limits, source, [matrix], experts, at, per_expert=per_expert))
    matrices = [values(name, d, n_out, n_in) for d in data]
    rows = []
    for t in range(m):
        parts = [x[t : t + 1, k * n_in : (k + 1) * n_in] if per_expert else x[t : t + 1] for k in range(n_used)]
        rows.append([products(part, matrices[e]) for e, part in zip(ids[t], parts, strict=True)])
    expected, size = (cp.concatenate([cp.concatenate([p[i] for p in r], axis=1) for r in rows]) for i in range(2))
    assert error(out.rows(), expected, size) < (2e-6 if scratch.size > 256 else bound(name, 1))


@pytest.mark.parametrize("m", [1, 5, 70, 300])
@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K", "Q8_0", "F16", "BF16", "IQ3_S", "MXFP4", "NVFP4"])
def test_gate_and_up_of_experts(gpu, name, m):
    """In one product, one by one or put in order; again in the order that is there; the same bits every time."""
    rng = np.random.default_rng(m)
    n_expert, n_used, n_in, n_out = 7, 3, 768, 200
    data = [[random_weight(name, n_out, n_in, rng) for _ in range(n_expert)] for _ in range(2)]
    rooms = [on_device(b"".join(each)) for each in data]
    x = activations(m, n_in, rng, spread=1)
    ids = np.stack([rng.permutation(n_expert)[:n_used] for _ in range(m)])
    routes = cp.asarray(np.concatenate([ids, np.full((m, n_used), np.nan)], axis=1).astype(np.float32))
    source = Input(x.data.ptr, m, n_in, n_in)
    experts = Experts(routes.data.ptr, 2 * n_used, n_used, len(data[0][0]), n_expert)
    size = expert_scratch_bytes(m, n_in, name, experts, per_expert=False)
    scratch = cp.full(size + 256, 0xFF, cp.uint8)
    at = scratch.data.ptr + -scratch.data.ptr % 256
    results = []
    for is_grouped in (False, True, False):
        out = Out(m, n_used * n_out)
        matrices = [Matrix(name, weight, n_out, out.address, n_out) for _, weight in rooms]
        gpu(expert_linear(gpu.limits, source, matrices, experts, at, per_expert=False, is_grouped=is_grouped))
        results.append(out.rows())
    assert all(bool((each == results[0]).all()) for each in results[1:])
    sides = []
    for each in data:
        matrices = [values(name, d, n_out, n_in) for d in each]
        rows = [[products(x[t : t + 1], matrices[e]) for e in ids[t]] for t in range(m)]
        sides.append([cp.concatenate([cp.concatenate([p[i] for p in r], axis=1) for r in rows]) for i in range(2)])
    (gate, gate_size), (up, up_size) = sides
    silu = gate / (1 + cp.exp(-gate))
    size_of = 1.1 * gate_size * cp.abs(up) + cp.abs(silu) * up_size
    assert error(results[0], silu * up, size_of) < (2e-6 if size else bound(name, 1))
