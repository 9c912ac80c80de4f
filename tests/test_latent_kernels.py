"""Latent attention on the emulated device, absorbed and expanded, against the same in float64."""

import json
import subprocess
import sys
from pathlib import Path

import emulator
import numpy as np
import pytest
from emulator.build import library
from legacy_file import PACKED

from reflex_ipc.cuda import experts, families, latent, launch
from reflex_ipc.cuda.device import start_driver
from reflex_ipc.cuda.fuse import Group
from reflex_ipc.cuda.launch import Kernels
from reflex_ipc.cuda.lower import Lowering
from reflex_ipc.cuda.places import Places, Shape
from reflex_ipc.cuda.steps import mask_of
from reflex_ipc.gguf import TYPES, Tensor
from reflex_ipc.ops import LatentAttention, Value
from reflex_ipc.plan import PARENT_NONE, PARENT_STATE, Plan, Step
from reflex_ipc.reference.dequant import dequantise

KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"
pytestmark = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")

KINDS = {kind.name: kind for kind in TYPES.values()}
BOUND = 3e-6
"""Products of 22 bits, float32 sums, and what two halves hold of keys, values and weights."""


class Bench(Lowering):
    """Latent attention of random matrices, packed as `kind`, on arrays of this process, which are the emulated device's
    memory. Shape: n_head, d_nope, d_rope, d_v, rank."""

    def __init__(self, device, kernels, shape, kind: str, *, is_legacy: bool, n_positions: int, spread: float = 1.0):
        n_head, d_nope, d_rope, d_v, rank = self.shape = shape
        rng = np.random.default_rng(sum(shape))
        plain = {"k": (n_head, rank, d_nope), "v": (n_head, d_v, rank)}
        if is_legacy:
            plain = {"kv": (n_head, d_nope + d_v, rank)}
        tensors, self.arrays, numbers = {}, {}, {}
        for name, dims in plain.items():
            values = (rng.standard_normal(dims) * rank**-0.5 * spread).astype(np.float32)
            raw = PACKED[kind](values.reshape(-1, dims[2]))
            numbers[name] = dequantise(raw, kind, values.size).reshape(dims).astype(np.float64)
            self.arrays[name] = np.frombuffer(raw + bytes(16), np.uint8).copy()
            ne = (rank, n_head * dims[1]) if is_legacy else dims[::-1]
            tensors[name] = Tensor(name, KINDS[kind], ne, 0, 0, len(raw))
        if is_legacy:
            self.k_b, self.v_b = numbers["kv"][:, :d_nope].transpose(0, 2, 1), numbers["kv"][:, d_nope:]
        else:
            self.k_b, self.v_b = numbers["k"], numbers["v"]
        q, row, out = Value("q", n_head * (d_nope + d_rope)), Value("row", rank + d_rope), Value("a", n_head * d_v)
        op = LatentAttention("a", out, q, row, "s", tuple(plain), n_head, rank, (d_nope + d_rope) ** -0.5)
        plan = Plan("test", (op,), (), tensors, out, 1, 1, 1, 1, ())
        super().__init__(
            device, kernels, device.stream(), plan, [], None, Places(), lambda n: self.arrays[n].ctypes.data
        )
        self.op, self.stored, self.launched = op, np.zeros((0, row.width)), []
        pages = self.layout.pages(n_positions) * self.layout.page_bytes
        self.fixed = [np.full(pages, 0xFF, np.uint8), np.full(self.partial_bytes() // 4, np.nan, np.float32)]
        self.fixed += [np.zeros(self.ticket_bytes() // 4, np.int32), np.arange(n_head, dtype=np.float32)]
        p = self.places
        p.cache, p.partial, p.tickets, p.heads = (array.ctypes.data for array in self.fixed)

    def at(self, value: Value) -> int:
        return self.arrays[value.name].ctypes.data

    def launch(self, name, *arguments):
        self.launched.append(name)
        return super().launch(name, *arguments)

    def run(
        self, q: np.ndarray, rows: np.ndarray, *, expand: bool, tree: Step | None = None, n_splits: int = 0
    ) -> np.ndarray:
        """One step behind what is stored, which the rows then are part of: as the halves that the cache has."""
        n, past = len(q), len(self.stored)
        shape = Shape(n, 0, tree is not None, n_splits, latent.n_expanded(past + n) if expand else 0)
        size = families.scratch_bytes(self.plan, n, shape.n_expanded)
        control, scratch = np.array([past, n], np.int32), np.full(size // 4 + 128, np.nan, np.float32)
        scratch = scratch[-scratch.ctypes.data % 256 // 4 :]  # where scratch may begin
        mask = np.frombuffer(mask_of(tree), np.uint32).copy() if tree else np.zeros(1, np.uint32)
        p = self.places
        p.control, p.scratch, p.mask = control.ctypes.data, scratch.ctypes.data, mask.ctypes.data
        self.arrays.update(q=np.ascontiguousarray(q), row=np.ascontiguousarray(rows))
        self.arrays["a"] = np.full((n + 1, self.op.out.width), np.nan, np.float32)
        for each in self.launches_of(Group("op", [self.op], [self.op.out]), shape):
            each()
        assert np.isnan(scratch[size // 4 :]).all(), "what lies behind the scratch"
        assert np.isnan(self.arrays["a"][n]).all(), "what lies behind the values"
        powers = 2.0 ** np.maximum(np.floor(np.log2(np.abs(rows).max(axis=1, keepdims=True))) - 14, 0)
        halves = (rows / powers).astype(np.float16).astype(np.float64) * powers
        self.stored = np.concatenate([self.stored, halves])
        self.scratch = scratch
        return self.arrays["a"][:n]

    def expected(self, q: np.ndarray, visible: np.ndarray) -> np.ndarray:
        """Absorbed, in float64, of the last len(q) tokens."""
        n_head, d_nope, _, _, rank = self.shape
        heads = q.astype(np.float64).reshape(len(q), n_head, -1)
        absorbed = np.einsum("thd,hrd->thr", heads[:, :, :d_nope], self.k_b)
        absorbed = np.concatenate([absorbed, heads[:, :, d_nope:]], axis=2)
        scores = np.einsum("thr,sr->hts", absorbed, self.stored) * self.op.scale
        scores = np.where(visible[None], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.einsum("hts,sr,hvr->thv", weights, self.stored[:, :rank], self.v_b, optimize=True).reshape(len(q), -1)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> tuple[str, str]:
    """The emulated driver, and its kernels."""
    return str(library(KERNELS)), str(emulator.kernels(KERNELS, tmp_path_factory.mktemp("emulated")))


@pytest.fixture(autouse=True)
def products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one row are not made for the emulated device."""
    monkeypatch.setattr(experts, "expert_linear", emulator.half_experts)


@pytest.fixture(scope="module")
def bench(emulated):
    path, lib = emulated
    opening = start_driver(0, path)
    device = opening.wait()
    yield lambda *given, **named: Bench(device, Kernels(device, lib), *given, **named)
    opening.close()


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def inputs(shape, n: int, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    n_head, d_nope, d_rope, _, rank = shape
    rng = np.random.default_rng(seed)
    q, rows = (rng.standard_normal((n, w)).astype(np.float32) for w in (n_head * (d_nope + d_rope), rank + d_rope))
    return 2 * q, rows


def causal(n: int, total: int) -> np.ndarray:
    return np.tril(np.ones((total, total), bool))[total - n :]


SMALL, ODD, V2 = (4, 32, 16, 32, 32), (3, 72, 16, 40, 256), (2, 128, 64, 128, 512)
CASES = [
    (SMALL, "F16", False),
    (ODD, "F16", False),
    (ODD, "Q4_K", True),
    (V2, "Q8_0", False),
    (V2, "Q8_0", True),
]


@pytest.mark.parametrize(("shape", "kind", "is_legacy"), CASES, ids=str)
def test_a_long_step_and_another_behind_it(bench, shape, kind: str, is_legacy: bool) -> None:
    """70 tokens, then 66 more and 130, across the border of two pages: what does not fill a tile."""
    sizes = (70, 66, 130) if shape != V2 else (190, 70)
    one = bench(shape, kind, is_legacy=is_legacy, n_positions=sum(sizes))
    for i, n in enumerate(sizes):
        q, rows = inputs(shape, n, i)
        out = one.run(q, rows, expand=True)
        assert error(out, one.expected(q, causal(n, len(one.stored)))) <= BOUND
    assert {"expand", "attention_prefill_exact"} < set(one.launched)


def test_keys_and_values_are_exact(bench) -> None:
    """What is expanded, read back: two halves of each number, and the rotated part as it is cached."""
    n_head, d_nope, d_rope, d_v, rank = shape = ODD
    one = bench(shape, "F16", is_legacy=False, n_positions=70)
    q, rows = inputs(shape, 70)
    rows[3] *= 3e5
    one.run(q, rows, expand=True)
    page = 2 * 256 * n_head * (2 * (d_nope + d_rope + d_v) + 8)
    high, low = one.scratch.view(np.uint8)[:page].reshape(2, -1)
    keys_end, values_end = 512 * n_head * (d_nope + d_rope), 512 * n_head * (d_nope + d_rope + d_v)
    scales = high[values_end:].view(np.float32).reshape(2, 256, n_head, 1)[:, :70].astype(np.float64)
    assert (scales[:, 3] > 1).all() and (np.delete(scales, 3, axis=1) == 1).all()
    found = []
    for begin, end, scale in ((0, keys_end, scales[0]), (keys_end, values_end, scales[1])):
        parts = [half[begin:end].view(np.float16).reshape(256, n_head, -1)[:70] for half in (high, low)]
        found.append([part.astype(np.float64) * scale for part in parts])
    c = one.stored[:, :rank]
    key = (found[0][0] + found[0][1])[:, :, :d_nope]
    wanted = np.einsum("sr,hrd->shd", c, one.k_b), np.einsum("sr,hvr->shv", c, one.v_b)
    for actual, expected in zip((key, found[1][0] + found[1][1]), wanted, strict=True):
        errors = np.linalg.norm(actual - expected, axis=2) / np.linalg.norm(expected, axis=2)
        assert errors.max() <= BOUND
    rotated = found[0][0][:, :, d_nope:]
    assert np.abs(rotated - one.stored[:, None, rank:]).max() <= 1e-3 * np.abs(rows[3]).max() * 2**-11
    assert (np.delete(rotated, 3, axis=0) == np.delete(one.stored, 3, axis=0)[:, None, rank:]).all()


@pytest.mark.parametrize("is_legacy", [False, True])
def test_heads_in_turns_are_all_at_once(bench, monkeypatch: pytest.MonkeyPatch, is_legacy: bool) -> None:
    found = []
    for room in (latent.EXPANDED, 800 << 10, 1):
        monkeypatch.setattr(latent, "EXPANDED", room)
        one = bench(SMALL, "F16", is_legacy=is_legacy, n_positions=140)
        for seed in (1, 2):
            out = one.run(*inputs(SMALL, 70, seed), expand=True)
        found.append((one.launched.count("expand"), out.tobytes()))
    assert [turns for turns, _ in found] == [2, 4, 8]
    assert len({bits for _, bits in found}) == 1


def test_a_tree(bench) -> None:
    """Behind 70 tokens, of which some see nothing; branches end tiles away from where they begin."""
    n, past = 150, 70
    rng = np.random.default_rng(5)
    parents = [PARENT_STATE] + [int(rng.integers(max(-1, i - 90), i)) for i in range(1, n)]
    parents[40] = parents[90] = PARENT_NONE
    visible = np.zeros((n, past + n), bool)
    for i, parent in enumerate(parents):
        visible[i] = visible[parent] if parent >= 0 else False
        visible[i, :past] |= parent == PARENT_STATE
        visible[i, past + i] = True
    for expand in (True, False):
        one = bench(SMALL, "F16", is_legacy=False, n_positions=past + n)
        one.run(*inputs(SMALL, past), expand=True)
        q, rows = inputs(SMALL, n, 2)
        out = one.run(q, rows, expand=expand, tree=Step([0] * n, [0] * n, parents, [], 0))
        assert error(out, one.expected(q, visible)) <= BOUND


def test_beyond_the_range_of_half_precision(bench) -> None:
    """Matrices of thousands, so that keys and values pass 65504; and such that the rest of a half is hardly any."""
    for spread, of_rows, of_queries, bound in ((1e3, 30, 1e-5, BOUND), (1e-6, 1, 1e4, 1e-4)):
        one = bench(ODD, "F16", is_legacy=False, n_positions=80, spread=spread)
        q, rows = inputs(ODD, 80)
        q *= np.float32(of_queries)
        rows *= np.where(np.arange(80) % 7, of_rows, 300 * of_rows)[:, None].astype(np.float32)
        assert error(one.run(q, rows, expand=True), one.expected(q, causal(80, 80))) <= bound


@pytest.mark.parametrize("kind", ["Q5_0", "Q5_1"])
def test_what_quantisers_put_in_place_of_k_quants(bench, kind: str) -> None:
    """128 columns of keys' matrices are no block of 256: both forms, with the types that such matrices get."""
    one = bench(V2, kind, is_legacy=False, n_positions=73)
    for n, expand in ((70, True), (2, False), (1, False)):
        q, rows = inputs(V2, n, n)
        out = one.run(q, rows, expand=expand)
        assert error(out, one.expected(q, causal(n, len(one.stored)))) <= BOUND


def test_absorbed_and_expanded_are_one(bench) -> None:
    """A prompt in pieces of both kinds, and its tokens one by one behind it, are the prompt in one."""
    q, rows = inputs(SMALL, 200)
    whole = bench(SMALL, "F16", is_legacy=False, n_positions=200)
    expected = whole.run(q, rows, expand=True).copy()
    pieces = bench(SMALL, "F16", is_legacy=False, n_positions=200)
    at = 0
    for n in (70, 1, 1, 20, 65, 30, 13):
        out = pieces.run(q[at : at + n], rows[at : at + n], expand=n > families.ABSORBED)
        assert error(out, expected[at : at + n]) <= BOUND
        at += n
    assert at == 200 and "attention_latent_1" in pieces.launched


@pytest.mark.parametrize(("shape", "kind"), [(ODD, "F16"), (V2, "Q8_0"), ((6, 32, 16, 32, 1024), "F16")], ids=str)
def test_heads_that_share_a_block(bench, shape, kind: str) -> None:
    """One token's positions shared out among blocks, of which some have none, and several tokens' heads: each with
    blocks of four heads that are not all there."""
    n, tail = (70, 40) if shape != V2 else (300, 1)
    one = bench(shape, kind, is_legacy=False, n_positions=n + tail + 3)
    one.run(*inputs(shape, n), expand=True)
    if tail > 1:
        q, rows = inputs(shape, tail, 2)
        assert error(one.run(q, rows, expand=False), one.expected(q, causal(tail, n + tail))) <= BOUND
    for n_splits in (2, 5, 64):
        q, rows = inputs(shape, 1, n_splits)
        out = one.run(q, rows, expand=False, n_splits=n_splits)
        assert error(out, one.expected(q, causal(1, len(one.stored)))) <= BOUND
        assert not one.fixed[2].any(), "counters are zero again"
    assert "attention_latent_4" in one.launched


def test_the_benchmark_runs(emulated, tmp_path: Path) -> None:
    """bench/latent.py, as far as a device that takes no time can show it."""
    script = Path(__file__).parent.parent / "bench" / "latent.py"
    command = [sys.executable, str(script), str(tmp_path), "--counts", "3", "--layers", "1", "--heads", "1"]
    command += ["--pasts", "5", "--rounds", "1", "--library", emulated[0], "--kernels", emulated[1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "latent.json").read_text())["rows"]
    found = {(row["form"], row["past"], row["what"]) for row in rows if row["n"] == 3}
    assert found == {
        (form, 5, what) for form in ("new", "legacy") for what in ("absorb", "absorbed", "expand", "expanded")
    }
