"""The kernels of delta nets on the emulated device against the same in float64: outputs and what is kept."""

import json
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import emulator
import numpy as np
import pytest
from delta_reference import Data, Net, expected
from emulator.build import library

from reflex_ipc import archs, ops
from reflex_ipc.cuda import delta, families, launch
from reflex_ipc.cuda.device import start_driver
from reflex_ipc.cuda.fuse import Group, alone, fused
from reflex_ipc.cuda.launch import Kernels
from reflex_ipc.cuda.lower import Lowering
from reflex_ipc.cuda.places import Places, Shape
from reflex_ipc.errors import UnsupportedModelError
from reflex_ipc.gguf import GGUF
from reflex_ipc.ops import Value
from reflex_ipc.plan import PARENT_NONE, Plan

KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"
pytestmark = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")

BOUND = 2e-6
"""Of the norm of all numbers of a kind: float32 sums of at most 128 products, and exp."""


class Bench(Lowering):
    """Lowers a delta net onto arrays of this process, which are the emulated device's memory."""

    def __init__(self, device, kernels, net: Net, data: Data) -> None:
        self.group = net.group()
        self.arrays = {name: np.ascontiguousarray(array) for name, array in vars(data).items()}
        super().__init__(
            device, kernels, device.stream(), net.plan(), [], None, Places(), lambda n: self.arrays[n].ctypes.data
        )
        self.states = {}
        for name in ("tail", "matrices"):
            before = self.arrays[name]
            self.states[name] = np.stack([before, np.full_like(before, np.nan)])
            self.places.states[name] = self.states[name].ctypes.data, before.nbytes
        self.parity = 0

    def at(self, value: Value) -> int:
        return self.arrays[value.name].ctypes.data

    def run(
        self, n: int, parents: list[int] | None = None, kept: int | None = None, *, apart: bool = False
    ) -> np.ndarray:
        kept = n if kept is None else kept
        control = np.array([0, kept, 0, self.parity], np.int32)
        tree = np.array(parents or [], np.int32)
        matrices = self.arrays["matrices"]
        scratch = families.scratch_bytes(self.plan, n) // 4
        room = [np.full(size, np.nan, np.float32) for size in (n * matrices.size, scratch + 64)]
        p = self.places
        p.control, p.parents = control.ctypes.data, tree.ctypes.data
        p.branches, p.scratch = (a.ctypes.data for a in room)
        shape = Shape(n, 0, parents is not None)
        groups = [Group("op", [op], [op.out]) for op in self.group.parts] if apart else [self.group]
        for group in groups:
            for value in group.outputs:
                self.arrays[value.name] = np.full((n, value.width), np.nan, np.float32)
            for each in self.launches_of(group, shape):
                each()
        assert np.isnan(room[1][scratch:]).all(), "what lies behind the scratch"
        self.parity ^= kept > 0
        return self.arrays["gate"]

    def part(self, first: int, last: int, data: Data) -> np.ndarray:
        """Run tokens first .. last as a plain text."""
        for name in ("x", "z", "alpha", "beta"):
            self.arrays[name] = np.ascontiguousarray(vars(data)[name][first:last])
        return self.run(last - first).copy()


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> tuple[str, str]:
    """The emulated driver, and its kernels."""
    return str(library(KERNELS)), str(emulator.kernels(KERNELS, tmp_path_factory.mktemp("emulated")))


@pytest.fixture(scope="module")
def bench(emulated):
    path, lib = emulated
    opening = start_driver(0, path)
    device = opening.wait()
    yield lambda net, data: Bench(device, Kernels(device, lib), net, data)
    opening.close()


def close(actual: np.ndarray, wanted: np.ndarray, bound: float = BOUND, least: float = 0) -> None:
    """`least`: an error so small is none."""
    assert actual.shape == wanted.shape
    assert float(np.linalg.norm(actual - wanted)) <= max(bound * float(np.linalg.norm(wanted)), least)


NETS = [
    Net(1, 4, 128),
    Net(2, 4, 128, tiled=False),
    Net(2, 2, 64),
    Net(2, 4, 24),
    Net(1, 3, 32, tiled=False),
    Net(1, 2, 100),
]


@pytest.mark.parametrize("apart", [False, True], ids=["one", "apart"])
@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65])
@pytest.mark.parametrize("net", NETS, ids=str)
def test_texts(bench, net: Net, n: int, apart: bool) -> None:
    data = Data(net, n)
    b = bench(net, data)
    out, tail, matrices = expected(net, data, list(range(-1, n - 1)), n)
    close(b.run(n, apart=apart), out)
    close(b.states["tail"][1], tail, 0)
    close(b.states["matrices"][1], matrices)
    for name in ("tail", "matrices"):
        assert (b.states[name][0] == b.arrays[name]).all(), "the state before is still there"


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("net", [Net(1, 4, 128), Net(2, 4, 64, tiled=False)], ids=str)
def test_long_texts_in_pieces(bench, net: Net, hard: bool) -> None:
    """A prompt, more of it, then token by token; with decays and gates that reach 0 and 1 in float32, too."""
    n = 300
    data = Data(net, n, hard=hard)
    with np.errstate(over="raise", invalid="raise"):
        out, tail, matrices = expected(net, data, list(range(-1, n - 1)), n)
    for cuts in ([0, 300], [0, 7, 8, 9, 200, 297, 298, 299, 300]):
        b = bench(net, data)
        close(np.concatenate([b.part(i, j, data) for i, j in pairwise(cuts)]), out)
        close(b.states["tail"][b.parity], tail, 0)
        close(b.states["matrices"][b.parity], matrices)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("net", [Net(1, 2, 128), Net(2, 4, 64, tiled=False)], ids=str)
def test_any_pieces(bench, net: Net, seed: int) -> None:
    """Chunks, the rule token by token, and the kernel of one token, joined anywhere."""
    n, rng = 130, np.random.default_rng(seed)
    data = Data(net, n)
    out, tail, matrices = expected(net, data, list(range(-1, n - 1)), n)
    cuts = sorted(rng.choice(np.arange(1, n), 1 + 3 * seed, replace=False).tolist())
    b = bench(net, data)
    close(np.concatenate([b.part(i, j, data) for i, j in pairwise([0, *cuts, n])]), out)
    close(b.states["tail"][b.parity], tail, 0)
    close(b.states["matrices"][b.parity], matrices)


@pytest.fixture
def by_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts, however short."""
    monkeypatch.setattr(delta, "LEAST_CHUNKED", 1)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("net", [Net(1, 1, 128), Net(1, 2, 36)], ids=str)
def test_chunks_of_every_length(bench, by_chunks, net: Net, hard: bool) -> None:
    for n in range(1, 66):
        data = Data(net, n, hard=hard)
        b = bench(net, data)
        out, _, matrices = expected(net, data, list(range(-1, n - 1)), n)
        close(b.run(n), out)
        close(b.states["matrices"][1], matrices, least=1e-36)  # float32 ends there


@pytest.mark.parametrize("net", NETS, ids=str)
def test_chunks_after_chunks(bench, by_chunks, net: Net) -> None:
    n = 43
    data = Data(net, n)
    out, _, matrices = expected(net, data, list(range(-1, n - 1)), n)
    b = bench(net, data)
    close(np.concatenate([b.part(i, j, data) for i, j in pairwise([0, 17, 18, 34, n])]), out)
    close(b.states["matrices"][b.parity], matrices)


@pytest.mark.parametrize("what", ["alike", "kept", "large", "small", "gone"])
def test_chunks_of_tokens_that_strain_them(bench, by_chunks, what: str) -> None:
    """Keys all alike, with nothing forgotten or everything written, too; values and states far from 1, gates near 0."""
    net, n = Net(1, 2, 128), 50
    data = Data(net, n)
    data.x[:, : 2 * net.d] = data.x[0, : 2 * net.d]
    if what == "kept":
        data.alpha[:], data.beta[:] = -40, 30
    if what == "large":
        data.x[:, 2 * net.d :] *= 1e6
    if what == "small":
        data.matrices *= np.float32(1e-10)
    if what == "gone":
        data.alpha[:], data.decay[:] = 1, -4
        data.beta[-20:] = -25
    out, _, matrices = expected(net, data, list(range(-1, n - 1)), n)
    b = bench(net, data)
    close(b.run(n), out)
    close(b.states["matrices"][1], matrices)


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("net", NETS[:4], ids=str)
def test_trees(bench, net: Net, kept: int) -> None:
    parents = [-1, 0, 1, 2, 2, 1, -1, 6, PARENT_NONE, 8, 9, 8, 3, 12, 13, 14, 15, 16, 4, 18]
    data = Data(net, len(parents))
    b = bench(net, data)
    out, tail, matrices = expected(net, data, parents, kept)
    close(b.run(len(parents), parents, kept), out)
    if kept:
        close(b.states["tail"][1], tail, 0)
        close(b.states["matrices"][1], matrices)
    else:
        assert np.isnan(b.states["tail"][1]).all() and np.isnan(b.states["matrices"][1]).all()


def test_the_same_bits_every_time(bench) -> None:
    net = Net(2, 4, 128)
    data = Data(net, 40)
    first, second = (bench(net, data).run(40).tobytes() for _ in range(2))
    assert first == second


@cache
def plan_of(path: Path) -> Plan:
    with GGUF.open(path) as gguf:
        return archs.build(gguf)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "qwen3next"])
def test_a_delta_net_is_one_group(fixtures: Path, name: str) -> None:
    plan = plan_of(fixtures / "exact" / f"{name}-f16.gguf")
    groups = [group for group in fused(plan) if any(isinstance(op, ops.DeltaRule) for op in group.parts)]
    assert {group.kind for group in groups} == {"delta"}
    assert len(groups) == sum(isinstance(op, ops.DeltaRule) for op in plan.ops) > 0
    wanted = ["Conv", "Slice", "Slice", "L2Norm", "L2Norm", "Slice", "DeltaRule", "RmsNorm", "SwiGlu"]
    for group in groups:
        assert [type(op).__name__ for op in group.parts] == wanted
        assert [value.name for value in group.outputs] == [group.parts[-1].out.name]


def test_another_reader_of_a_part_keeps_them_apart(fixtures: Path) -> None:
    plan = plan_of(fixtures / "exact" / "qwen35-f16.gguf")
    rule = next(op for op in plan.ops if isinstance(op, ops.DeltaRule))
    conv = next(op for op in plan.ops if isinstance(op, ops.Conv))
    for value in (conv.out, rule.q, rule.v, rule.out):
        more = ops.Add("more", Value("more", value.width), value, value)
        groups = fused(plan._replace(ops=(*plan.ops, more)))
        assert all(group.kind != "delta" for group in groups if rule in group.parts)
        assert len(groups) <= len(alone(plan)) + 1


def test_heads_the_kernels_do_not_take_are_refused(fixtures: Path) -> None:
    plan = plan_of(fixtures / "exact" / "qwen35-f16.gguf")
    rule = next(op for op in plan.ops if isinstance(op, ops.DeltaRule))
    for d in (132, 18):
        odd = rule._replace(q=rule.q._replace(width=d * rule.n_head_k))
        changed = tuple(odd if op is rule else op for op in plan.ops)
        with pytest.raises(UnsupportedModelError, match=rf"keys of {d} and values of 16 numbers"):
            families.check(plan._replace(ops=changed))


def test_the_benchmark_runs(emulated, tmp_path: Path) -> None:
    """bench/delta.py, as far as a device that takes no time can show it."""
    script = Path(__file__).parent.parent / "bench" / "delta.py"
    command = [
        sys.executable,
        str(script),
        str(tmp_path),
        "--shapes",
        "0.8B",
        "--counts",
        "3",
        "--checked",
        "18",
    ]
    command += ["--layers", "2", "--rounds", "1", "--library", emulated[0], "--kernels", emulated[1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "delta.json").read_text())["rows"]
    assert [(row["n"], row["how"]) for row in rows if "us" in row] == [(3, how) for how in ("whole", "apart", "rule")]
    assert max(row["error_state"] for row in rows if "error_state" in row) <= BOUND
