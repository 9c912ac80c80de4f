"""Every kernel but the products, launched as the product launches it, against CuPy in float64.

Outputs are poisoned with NaN and lie between guards.
"""

import numpy as np
import pytest
from legacy_file import PACKED

from reflex_ipc import ops
from reflex_ipc.cuda import families, latent
from reflex_ipc.cuda.fuse import Group
from reflex_ipc.cuda.lower import MAX_SPLITS, Lowering
from reflex_ipc.cuda.places import PAGE, Places, Shape
from reflex_ipc.cuda.sampling import CONTROL, Sampling
from reflex_ipc.errors import ReflexError
from reflex_ipc.gguf import TYPES, Tensor
from reflex_ipc.ops import Rope, Value
from reflex_ipc.plan import PARENT_NONE, Plan
from reflex_ipc.reference.dequant import dequantise
from reflex_ipc.sampler import Sampler
from reflex_ipc.sampler import Sampling as Settings

cp = pytest.importorskip("cupy")
pytestmark = pytest.mark.gpu

GUARD = 64  # float32 on either side of an output


class Bench(Lowering):
    """Lowers single groups onto CuPy arrays."""

    def __init__(self, device, kernels, op_list, weights=None, tensors=None, cache_tokens=PAGE):
        self.arrays = {}
        self.guarded = {}
        self.constants = {name: cp.asarray(w) for name, w in (weights or {}).items()}
        plan = Plan("test", tuple(op_list), (), tensors or {}, op_list[-1].out, 1, 1, 1, 1, ())
        super().__init__(
            device, kernels, device.stream(), plan, [], None, Places(), lambda n: self.constants[n].data.ptr
        )
        p = self.places
        self.step = cp.zeros(8 + 2 * 4096, cp.int32)
        p.control, p.tokens, p.positions = (self.step.data.ptr + 4 * i for i in (0, 8, 8 + 4096))
        self.pages = cp.full(self.layout.pages(cache_tokens) * self.layout.page_bytes + 4096, 0xFF, cp.uint8)
        p.cache = self.pages.data.ptr
        self.partial = cp.full(self.partial_bytes() // 4 + MAX_SPLITS, cp.nan, cp.float32)
        self.tickets = cp.zeros(self.ticket_bytes() // 4, cp.int32)
        self.heads = cp.arange(max((op.n_head for op in self.latents), default=0) + 1, dtype=cp.float32)
        p.partial, p.tickets, p.heads = (x.data.ptr for x in (self.partial, self.tickets, self.heads))
        self.kept = []
        for op in op_list:
            if isinstance(op, ops.Rotate):
                frequencies = cp.asarray(np.array(op.rope.frequencies()))
                table = cp.full((4096, op.rope.n_rot), cp.nan, cp.float32)
                self.kept += [frequencies, table]
                p.frequencies[op.rope, op.factors] = frequencies.data.ptr
                p.tables[op.rope, op.factors] = table.data.ptr

    def at(self, value):
        return self.arrays[value.name].data.ptr

    def run(self, group, shape, inputs, *, past=0, positions=None, mask=None):
        for name, x in inputs.items():
            self.arrays[name] = cp.ascontiguousarray(cp.asarray(x), dtype=cp.float32)
        n = shape.n_tokens
        for value in group.outputs:
            room = cp.full(self.rows(value, shape) * value.width + 2 * GUARD, cp.nan, cp.float32)
            self.guarded[value.name] = room
            self.arrays[value.name] = room[GUARD:-GUARD].reshape(-1, value.width)
        self.step[0] = past
        self.step[8 : 8 + n] = cp.arange(n)
        self.step[8 + 4096 : 8 + 4096 + n] = cp.asarray(range(past, past + n) if positions is None else positions)
        size = max(self.finished_bytes(n), families.scratch_bytes(self.plan, n, shape.n_expanded))
        scratch = cp.full(size // 4 + 64, cp.nan, cp.float32)
        self.places.scratch = scratch.data.ptr
        if mask is not None:
            mask = cp.asarray(mask)
            self.places.mask = mask.data.ptr
        cp.cuda.runtime.deviceSynchronize()
        for key in self.places.tables:
            self._table(key, shape)()
        for launch in self.launches_of(group, shape):
            launch()
        self.stream.synchronize()
        for room in self.guarded.values():
            assert cp.isnan(room[:GUARD]).all() and cp.isnan(room[-GUARD:]).all(), "written outside the output"
        return [self.arrays[value.name] for value in group.outputs]


def alone(op):
    return Group("op", [op], [op.out])


def error(actual, expected):
    expected = cp.asarray(expected, dtype=cp.float64)
    return float(cp.linalg.norm(actual - expected) / cp.linalg.norm(expected))


def random(shape, seed=0):
    return cp.random.default_rng(seed).standard_normal(shape).astype(cp.float32)


# Rows


@pytest.mark.parametrize(("n", "n_group", "width"), [(1, 1, 1), (3, 1, 31), (5, 7, 128), (2, 1, 4096), (2, 3, 5003)])
def test_norms(device, kernels, n, n_group, width):
    x = Value("x", n_group * width)
    norm = ops.RmsNorm("norm", Value("norm", x.width), x, "w", n_group, 1e-6)
    weight = random(width, 1)
    data = random((n, x.width)) * 1000
    (out,) = Bench(device, kernels, [norm], {"w": weight}).run(alone(norm), Shape(n, 0), {"x": data})
    parts = data.astype(cp.float64).reshape(n, n_group, width)
    expected = parts / cp.sqrt((parts**2).mean(axis=2, keepdims=True) + 1e-6) * weight
    assert error(out, expected.reshape(n, -1)) <= 1e-6


@pytest.mark.parametrize("n", [1, 7, 300])
def test_elementwise(device, kernels, n):
    a, b, one = (Value(name, width) for name, width in (("a", 333), ("b", 333), ("one", 1)))
    x, y, z = random((n, 333)) * 30, random((n, 333), 1), random((n, 1), 2)
    wide, inputs = x.astype(cp.float64), {"a": x, "b": y, "one": z}
    sigmoid = lambda v: 1 / (1 + cp.exp(-v.astype(cp.float64)))  # noqa: E731
    for op, expected in (
        (ops.SwiGlu("o", Value("o", 333), a, b), wide * sigmoid(x) * y),
        (ops.Add("o", Value("o", 333), a, b), wide + y),
        (ops.Gate("o", Value("o", 333), a, b), wide * sigmoid(y)),
        (ops.Gate("o", Value("o", 333), a, one), wide * sigmoid(z)),
        (ops.Slice("o", Value("o", 150), a, 3, 11, 50), x.reshape(n, 3, 111)[:, :, 11:61].reshape(n, -1)),
        (ops.Concat("o", Value("o", 334), a, one), cp.concatenate([x, z], axis=1)),
    ):
        (out,) = Bench(device, kernels, [op]).run(alone(op), Shape(n, 0), inputs)
        assert error(out, expected) <= 1e-6


@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS", "MXFP4"]
)
def test_embedding_rows(device, kernels, kind):
    width, rows = 512, 9
    ggml = next(t for t in TYPES.values() if t.name == kind)
    size = width // ggml.block * ggml.size
    raw = np.random.default_rng(3).integers(0, 256, (rows, size), dtype=np.uint8)
    if kind == "F32":
        raw = np.random.default_rng(3).standard_normal((rows, width)).astype(np.float32).view(np.uint8)
    raw[:, 1::2] &= 0x3B  # no exponent of a half, bfloat or E8M0 is the largest
    table = dequantise(raw.tobytes(), kind, rows * width).reshape(rows, width)
    op = ops.Embed("e", Value("e", width), "w")
    tensor = Tensor("w", ggml, (width, rows), 0, 0, raw.nbytes)
    bench = Bench(device, kernels, [op], {"w": raw}, {"w": tensor})
    (out,) = bench.run(alone(op), Shape(rows, 0), {})
    assert (out.get() == table).all()


# Rotation


@pytest.mark.parametrize("style", ["norm", "neox"])
@pytest.mark.parametrize(("d", "n_rot", "offset"), [(16, 16, 0), (128, 128, 0), (256, 64, 0), (192, 64, 128)])
def test_rotation(device, kernels, style, d, n_rot, offset):
    rope = Rope(style, n_rot, 1e6)
    x = Value("x", 3 * d)
    op = ops.Rotate("r", Value("r", x.width), x, 3, offset, rope)
    data, positions = random((4, x.width)), [0, 1, 4095, 1_000_003]
    (out,) = Bench(device, kernels, [op]).run(alone(op), Shape(4, 0), {"x": data}, positions=positions)
    assert error(out, rotated(data, positions, rope, 3, offset)) <= 1e-6


def rotated(x, positions, rope, n_head, offset):
    out = x.astype(cp.float64).reshape(len(x), n_head, -1).copy()
    angle = cp.asarray(positions, dtype=cp.float64)[:, None] * cp.asarray(rope.frequencies())
    cos, sin = cp.cos(angle)[:, None], cp.sin(angle)[:, None]
    part = out[:, :, offset : offset + rope.n_rot]
    half = rope.n_rot // 2
    a, b = (part[..., 0::2], part[..., 1::2]) if rope.style == "norm" else (part[..., :half], part[..., half:])
    a[:], b[:] = a * cos - b * sin, a * sin + b * cos
    return out.reshape(len(x), -1)


# Attention


def attention_op(n_head, n_head_kv, d, d_v):
    q, k, v = Value("q", n_head * d), Value("k", n_head_kv * d), Value("v", n_head_kv * d_v)
    return ops.Attention("a", Value("a", n_head * d_v), q, k, v, "ks", "vs", n_head, n_head_kv, d**-0.5)


def attended(op, q, k, v, visible):
    """Float64 attention of the last len(q) of len(k) tokens."""
    n, m = len(q), len(k)
    group = op.n_head // op.n_head_kv
    q, k, v = (
        x.astype(cp.float64).reshape(len(x), h, -1) for x, h in ((q, op.n_head), (k, op.n_head_kv), (v, op.n_head_kv))
    )
    scores = cp.einsum("nhd,mhd->hnm", q, k.repeat(group, axis=1)) * op.scale
    scores = cp.where(visible[None], scores, -cp.inf)
    weights = cp.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    assert weights.shape == (op.n_head, n, m)
    return cp.einsum("hnm,mhd->nhd", weights, v.repeat(group, axis=1)).reshape(n, -1)


SHAPES = [
    (1, 1, 16, 16),
    (6, 2, 24, 24),
    (14, 2, 64, 64),
    (5, 1, 80, 80),
    (3, 3, 96, 64),
    (32, 8, 128, 128),
    (16, 1, 128, 128),
]
SHAPES += [(8, 2, 192, 128), (16, 2, 256, 256)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("past", "n"), [(0, 1), (0, 5), (0, 130), (61, 67), (250, 20), (600, 3)])
def test_attention_of_prompts_and_tokens(device, kernels, shape, past, n):
    """The tokens before `past` in one step, n more in another, the last once more as decoding does."""
    op = attention_op(*shape)
    bench = Bench(device, kernels, [op], cache_tokens=past + n)
    total = past + n
    q, k, v = (random((total, x.width), i) for i, x in enumerate((op.q, op.k, op.v)))
    causal = cp.tril(cp.ones((total, total), bool))
    expected = attended(op, q, k, v, causal)
    for begin, end in ((0, past), (past, total)):
        if end > begin:
            part = {"q": q[begin:end], "k": k[begin:end], "v": v[begin:end]}
            (out,) = bench.run(alone(op), Shape(end - begin, 0), part, past=begin)
            assert error(out, expected[begin:end]) <= 1e-3
    for n_splits in {1, 3, bench.n_splits(total)}:
        last = {"q": q[-1:], "k": k[-1:], "v": v[-1:]}
        (out,) = bench.run(alone(op), Shape(1, 0, n_splits=n_splits), last, past=total - 1)
        assert error(out, expected[-1:]) <= 1e-3
        assert not bench.tickets.any()


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_a_tree(device, kernels, shape):
    from reflex_ipc.cuda.steps import mask_of
    from reflex_ipc.plan import Step

    op = attention_op(*shape)
    past, n = 70, 100
    rng = np.random.default_rng(5)
    parents = [-1] + [int(rng.integers(-1, i)) for i in range(1, n)]
    parents[40] = PARENT_NONE
    bench = Bench(device, kernels, [op], cache_tokens=past + n)
    q, k, v = (random((past + n, x.width), i) for i, x in enumerate((op.q, op.k, op.v)))
    bench.run(alone(op), Shape(past, 0), {"q": q[:past], "k": k[:past], "v": v[:past]})
    visible = np.zeros((n, past + n), bool)
    for i, parent in enumerate(parents):
        visible[i] = visible[parent] if parent >= 0 else False
        if parent == -1:
            visible[i, :past] = True
        visible[i, past + i] = True
    step = Step([0] * n, [0] * n, parents, [], 0)
    mask = np.frombuffer(mask_of(step), np.uint32)
    part = {"q": q[past:], "k": k[past:], "v": v[past:]}
    (out,) = bench.run(alone(op), Shape(n, 0, True), part, past=past, mask=mask)
    assert error(out, attended(op, q[past:], k, v, cp.asarray(visible))) <= 1e-3


@pytest.mark.parametrize("shape", [(6, 2, 64, 64), (16, 2, 256, 256)])
def test_attention_beyond_the_range_of_half_precision(device, kernels, shape):
    """Queries, keys and values of 1e5 and more, in some rows only."""
    op = attention_op(*shape)
    n = 90
    q, k, v = (random((n, x.width), i) for i, x in enumerate((op.q, op.k, op.v)))
    q[::3] *= 3e5
    k *= 1e-5
    k[5] *= 3e10  # one key of 3e5 and more
    q[:, :] *= cp.where(cp.arange(n) % 3 == 0, 1e-2, 1e-5)[:, None].astype(cp.float32)
    v[::4] *= 2e5
    bench = Bench(device, kernels, [op], cache_tokens=n)
    expected = attended(op, q, k, v, cp.tril(cp.ones((n, n), bool)))
    (out,) = bench.run(alone(op), Shape(n, 0), {"q": q, "k": k, "v": v})
    assert error(out, expected) <= 2e-3
    (out,) = bench.run(alone(op), Shape(1, 0, n_splits=2), {"q": q[-1:], "k": k[-1:], "v": v[-1:]}, past=n - 1)
    assert error(out, expected[-1:]) <= 2e-3


@pytest.mark.parametrize("style", ["norm", "neox"])
@pytest.mark.parametrize("with_norm", [False, True])
def test_attention_with_its_norms_and_rotations(device, kernels, style, with_norm):
    n_head, n_head_kv, d, n, past = 6, 2, 64, 33, 40
    rope = Rope(style, 48, 1e4)
    raw_q, raw_k, v = Value("raw_q", n_head * d), Value("raw_k", n_head_kv * d), Value("v", n_head_kv * d)
    norm_q = ops.RmsNorm("nq", Value("nq", raw_q.width), raw_q, "wq", n_head, 1e-5)
    norm_k = ops.RmsNorm("nk", Value("nk", raw_k.width), raw_k, "wk", n_head_kv, 1e-5)
    rot_q = ops.Rotate("rq", Value("rq", raw_q.width), norm_q.out if with_norm else raw_q, n_head, 0, rope)
    rot_k = ops.Rotate("rk", Value("rk", raw_k.width), norm_k.out if with_norm else raw_k, n_head_kv, 0, rope)
    op = attention_op(n_head, n_head_kv, d, d)._replace(q=rot_q.out, k=rot_k.out, v=v)
    parts = [*((norm_q, norm_k) if with_norm else ()), rot_q, rot_k, op]
    weights = {"wq": random(d, 8), "wk": random(d, 9)}
    total = past + n
    inputs = {x.name: random((total, x.width), i) for i, x in enumerate((raw_q, raw_k, v))}

    def finished(name, weight, heads):
        x = inputs[name].astype(cp.float64)
        if with_norm:
            p = x.reshape(total, heads, d)
            x = (p / cp.sqrt((p**2).mean(axis=2, keepdims=True) + 1e-5) * weights[weight]).reshape(total, -1)
        return rotated(x, range(total), rope, heads, 0)

    expected = attended(
        op,
        finished("raw_q", "wq", n_head),
        finished("raw_k", "wk", n_head_kv),
        inputs["v"],
        cp.tril(cp.ones((total, total), bool)),
    )
    bench = Bench(device, kernels, parts, weights, cache_tokens=total)
    group = Group("attention", parts, [op.out])
    for begin, end in ((0, past), (past, total)):
        part = {name: x[begin:end] for name, x in inputs.items()}
        (out,) = bench.run(group, Shape(end - begin, 0), part, past=begin)
        assert error(out, expected[begin:end]) <= 1e-3
    for n_splits in (1, 2, 5):
        part = {name: x[-1:] for name, x in inputs.items()}
        (out,) = bench.run(group, Shape(1, 0, n_splits=n_splits), part, past=total - 1)
        assert error(out, expected[-1:]) <= 1e-3


# Latent attention


class Latent:
    """One op of random matrices, packed as `kind`, and inputs for `total` tokens. Shape: n_head, d_nope, d_rope, d_v,
    rank."""

    def __init__(self, device, kernels, shape, kind, total, *, is_legacy):
        n_head, d_nope, d_rope, d_v, rank = self.shape = shape
        plain = {"k": (n_head, rank, d_nope), "v": (n_head, d_v, rank)}
        if is_legacy:
            plain = {"w": (n_head, d_nope + d_v, rank)}
        ggml = next(t for t in TYPES.values() if t.name == kind)
        weights, tensors, matrices = {}, {}, {}
        for name, dims in plain.items():
            values = np.random.default_rng(4).standard_normal(dims).astype(np.float32) * rank**-0.5
            raw = PACKED[kind](values.reshape(-1, dims[2]))
            ne = (rank, n_head * dims[1]) if is_legacy else dims[::-1]
            weights[name], tensors[name] = np.frombuffer(raw, np.uint8), Tensor(name, ggml, ne, 0, 0, len(raw))
            matrices[name] = cp.asarray(dequantise(raw, kind, values.size)).astype(cp.float64).reshape(dims)
        if is_legacy:
            self.k_b, self.v_b = matrices["w"][:, :d_nope].transpose(0, 2, 1), matrices["w"][:, d_nope:]
        else:
            self.k_b, self.v_b = matrices["k"], matrices["v"]
        q, row, out = Value("q", n_head * (d_nope + d_rope)), Value("l", rank + d_rope), Value("a", n_head * d_v)
        scale = (d_nope + d_rope) ** -0.5
        self.op = ops.LatentAttention("a", out, q, row, "s", tuple(plain), n_head, rank, scale)
        self.bench = Bench(device, kernels, [self.op], weights, tensors, cache_tokens=total)
        self.q, self.rows = random((total, q.width)), random((total, row.width), 1)

    def run(self, begin, end, *, expand, mask=None):
        n_expanded = latent.n_expanded(end) if expand else 0
        shape = Shape(end - begin, 0, mask is not None, 0, n_expanded)
        part = {"q": self.q[begin:end], "l": self.rows[begin:end]}
        (out,) = self.bench.run(alone(self.op), shape, part, past=begin, mask=mask)
        return out

    def expected(self, begin, visible):
        """Float64, of the tokens from `begin` on, by the latents as they were before they were cached."""
        n_head, d_nope, _, _, rank = self.shape
        heads, c = self.q[begin:].astype(cp.float64), self.rows.astype(cp.float64)
        heads = heads.reshape(len(heads), n_head, -1)
        absorbed = cp.einsum("thd,hrd->thr", heads[:, :, :d_nope], self.k_b)
        scores = cp.einsum("thr,sr->hts", cp.concatenate([absorbed, heads[:, :, d_nope:]], axis=2), c) * self.op.scale
        scores = cp.where(visible[None], scores, -cp.inf)
        weights = cp.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        mixed = cp.einsum("hts,sr->thr", weights, c[:, :rank])
        return cp.einsum("thr,hvr->thv", mixed, self.v_b).reshape(len(heads), -1)


LATENT_SHAPES = [(16, 128, 64, 128, 512), (3, 72, 16, 40, 256)]


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(("past", "n"), [(0, 1), (0, 9), (61, 67)])
@pytest.mark.parametrize("shape", LATENT_SHAPES)
def test_latent_attention_of_legacy_files(device, kernels, shape, past, n, kind):
    """`attn_kv_b` in one piece, of DeepSeek-V2-Lite's shape and of one that fills no block."""
    total = past + n
    one = Latent(device, kernels, shape, kind, total, is_legacy=True)
    expected = one.expected(0, cp.tril(cp.ones((total, total), bool)))
    for begin, end in ((0, past), (past, total)):
        if end > begin:
            assert error(one.run(begin, end, expand=False), expected[begin:end]) <= 2e-3


@pytest.mark.parametrize(("kind", "is_legacy"), [("F16", False), ("Q4_K", True)])
@pytest.mark.parametrize(("past", "n"), [(0, 5), (0, 130), (61, 67), (250, 400), (1100, 700)])
@pytest.mark.parametrize("shape", [*LATENT_SHAPES, (4, 32, 16, 32, 256)])
def test_latent_attention_expanded(device, kernels, monkeypatch, shape, past, n, kind, is_legacy):
    """The same bits with all heads at once and one by one; and what the absorbed form has, to what is rounded."""
    total = past + n
    one = Latent(device, kernels, shape, kind, total, is_legacy=is_legacy)
    expected = one.expected(0, cp.tril(cp.ones((total, total), bool)))
    if past:
        assert error(one.run(0, past, expand=True), expected[:past]) <= 1e-3
    out = one.run(past, total, expand=True).copy()
    assert error(out, expected[past:]) <= 1e-3
    assert error(out, one.run(past, total, expand=False).astype(cp.float64)) <= 1e-5
    monkeypatch.setattr(latent, "EXPANDED", 1)
    assert (one.run(past, total, expand=True) == out).all()


@pytest.mark.parametrize("shape", [*LATENT_SHAPES, (6, 32, 16, 32, 1024)])
def test_latent_attention_of_heads_that_share_a_block(device, kernels, shape):
    """A token's positions shared out among blocks, of which some have none; several tokens."""
    past, n = 600, 60
    one = Latent(device, kernels, shape, "F16", past + n, is_legacy=False)
    expected = one.expected(0, cp.tril(cp.ones((past + n, past + n), bool)))
    one.run(0, past, expand=True)
    assert error(one.run(past, past + n, expand=False), expected[past:]) <= 1e-3
    for n_splits in (1, 2, 7, 64, one.bench.n_splits(past + n)):
        part = {"q": one.q[-1:], "l": one.rows[-1:]}
        (out,) = one.bench.run(alone(one.op), Shape(1, 0, n_splits=n_splits), part, past=past + n - 1)
        assert error(out, expected[-1:]) <= 1e-3
        assert not one.bench.tickets.any()


@pytest.mark.parametrize("shape", LATENT_SHAPES)
def test_latent_attention_of_a_tree_expanded(device, kernels, shape):
    from reflex_ipc.cuda.steps import mask_of
    from reflex_ipc.plan import Step

    past, n = 70, 200
    rng = np.random.default_rng(5)
    parents = [-1] + [int(rng.integers(max(-1, i - 90), i)) for i in range(1, n)]
    parents[40] = parents[120] = PARENT_NONE
    visible = np.zeros((n, past + n), bool)
    for i, parent in enumerate(parents):
        visible[i] = visible[parent] if parent >= 0 else False
        visible[i, :past] |= parent == -1
        visible[i, past + i] = True
    one = Latent(device, kernels, shape, "F16", past + n, is_legacy=False)
    one.run(0, past, expand=True)
    mask = np.frombuffer(mask_of(Step([0] * n, [0] * n, parents, [], 0)), np.uint32)
    out = one.run(past, past + n, expand=True, mask=mask)
    assert error(out, one.expected(past, cp.asarray(visible))) <= 1e-3


# Sampling

SETTINGS = [
    {},
    {"top_logprobs": 20},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.3, "seed": -6, "top_k": 40},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    {"temperature": 1.0, "seed": 7, "top_p": 0.0},
    {"temperature": 1.0, "seed": 8, "min_p": 0.05},
    {"temperature": 100.0, "seed": 8},
    {"temperature": 0.7, "seed": 9, "top_k": 50, "top_p": 0.8, "min_p": 0.02, "top_logprobs": 5},
    {"temperature": 1.0, "seed": 3, "repeat_penalty": 1.3},
    {"repeat_penalty": 0.8, "presence_penalty": 0.5, "frequency_penalty": -0.3, "repeat_last_n": -1},
    {"temperature": 1.0, "seed": 3, "logit_bias": {0: 10.0}, "presence_penalty": 1.0, "top_p": 0.95, "top_logprobs": 3},
]


def logits_of(kind, n, rng):
    x = (rng.standard_normal(n) * 4).astype(np.float32)
    if kind == "ties":
        x = np.round(x)
    if kind == "holes":
        x[rng.random(n) < 0.5] = -np.inf
        x[n // 2] = 1.0
    if kind == "wide":
        x *= 1e6
    return x


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "ties", "holes", "wide"])
@pytest.mark.parametrize("n", [1, 2, 33, 512, 32000, 151936])
def test_sampling_is_the_hosts(device, kernels, settings, kind, n):
    settings = Settings(**settings)
    rng = np.random.default_rng(n)
    step = cp.zeros(CONTROL.size // 4 + 2, cp.int32)
    places = Places()
    places.control = step.data.ptr
    places.tokens, places.positions = places.control + CONTROL.size, places.control + CONTROL.size + 4
    stream = device.stream()
    sampling = Sampling(device, kernels, stream, n, places)
    cp.cuda.runtime.deviceSynchronize()  # the zeros are there before anything else is written: another stream's work
    host, mine = (Sampler(settings, n, [0, n - 1]) for _ in range(2))
    stream.to_device(places.control, CONTROL.pack(10, 3, 0, 0))
    for i in range(4):
        logits = logits_of(kind, n, rng)
        on_device = cp.asarray(logits)
        cp.cuda.runtime.deviceSynchronize()
        sampling.begin(mine)
        for launch in sampling.launches(sampling.kind(mine), on_device.data.ptr, dependent=False):
            launch()
        got, wanted = sampling.receive(sampling.queued(), mine), host.sample(logits)
        assert got.id == wanted.id
        assert got.logprob == pytest.approx(wanted.logprob, rel=1e-6, abs=1e-5)
        assert [t for t, _ in got.top] == [t for t, _ in wanted.top]
        assert [x for _, x in got.top] == pytest.approx([x for _, x in wanted.top], rel=1e-6, abs=1e-5)
        stream.synchronize()
        assert step[-2:].tolist() == [got.id, 13 + i]  # the next step's token and position
        assert step[:2].tolist() == [13 + i, 1]
    assert host.step == mine.step


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("settings", [Settings(), Settings(temperature=1.0, seed=1)], ids=["greedy", "drawn"])
def test_a_broken_models_logits_are_an_error(device, kernels, bad, settings):
    n = 3000
    logits = cp.full(n, bad, cp.float32) if bad == -np.inf else cp.zeros(n, cp.float32)
    logits[1234] = bad
    step = cp.zeros(CONTROL.size // 4 + 2, cp.int32)
    places = Places()
    places.control = places.tokens = places.positions = step.data.ptr
    places.tokens += CONTROL.size
    places.positions += CONTROL.size + 4
    sampling = Sampling(device, kernels, device.stream(), n, places)
    sampler = Sampler(settings, n, [])
    cp.cuda.runtime.deviceSynchronize()
    sampling.begin(sampler)
    for launch in sampling.launches(sampling.kind(sampler), logits.data.ptr, dependent=False):
        launch()
    with pytest.raises(ReflexError, match="only minus infinity" if bad == -np.inf else "token 1234"):
        sampling.receive(sampling.queued(), sampler)
