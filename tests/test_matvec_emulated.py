"""The matrix-vector kernels themselves, run on the host, against `gguf`'s dequantisation in float64."""

import gguf
import numpy as np
import pytest
from emulator.matvec import Matvec
from gguf.constants import GGMLQuantizationType as Type

from reflex_ipc.cuda import linear
from reflex_ipc.cuda.experts import expert_linear
from reflex_ipc.cuda.products import Experts, Input, Limits, Matrix

LARGE, SMALL = Limits(4, 232448), Limits(2, 65536)
BOUND = 1.5e-4
"""Relative error: what x loses as 16-bit integers."""
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q3_K": (108,), "Q8_0": (0,), "Q5_0": (0,)}
"""Where the half-precision scales of a block are."""


@pytest.fixture(scope="module")
def run() -> Matvec:
    kinds = ["F16", "Q3_K", "Q4_K", "Q6_K", "Q8_0"]
    return Matvec([*((kind, kind) for kind in kinds), ("Q4_K", "Q6_K"), ("Q5_0", "Q8_0")])


class Memory:
    """Arrays that begin at multiples of 256 bytes, as the device's do."""

    def __init__(self) -> None:
        self.kept: list[np.ndarray] = []

    def __call__(self, values: np.ndarray) -> np.ndarray:
        room = np.zeros(values.nbytes + 320, np.uint8)
        self.kept.append(room)
        begin = -room.ctypes.data % 256
        copy = room[begin : begin + values.nbytes].view(values.dtype).reshape(values.shape)
        copy[...] = values
        return copy


def weights(rng: np.random.Generator, kind: str, n_out: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a matrix, and its values."""
    if kind == "F16":
        values = (0.1 * rng.standard_normal((n_out, width))).astype(np.float16)
        return values.view(np.uint8), values.astype(np.float64)
    elements, size = gguf.GGML_QUANT_SIZES[Type[kind]]
    blocks = rng.integers(0, 256, (n_out, width // elements, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = rng.uniform(0.001, 0.002, blocks.shape[:2]).astype(np.float16)
        blocks[..., at : at + 2] = scale[..., None].view(np.uint8)
    rows = blocks.reshape(n_out, -1)
    return rows, gguf.quants.dequantize(rows, Type[kind]).astype(np.float64)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("kinds", "n_outs", "width", "norm", "swiglu", "residual", "limits"),
    [
        (["Q4_K"], [77], 1024, True, False, False, LARGE),
        (["Q4_K", "Q4_K", "Q6_K"], [128, 40, 40], 4096, True, False, False, LARGE),
        (["Q6_K"], [60], 12288, False, False, True, LARGE),
        (["Q4_K", "Q4_K"], [90, 90], 5120, True, True, False, LARGE),
        (["Q8_0"], [50], 1056, True, False, False, LARGE),
        (["Q5_0", "Q8_0"], [50, 30], 896, True, False, False, LARGE),
        (["F16"], [50], 1000, True, False, False, LARGE),
        (["Q3_K"], [50], 512, False, False, False, LARGE),
        (["Q4_K"], [33], 32768, True, False, True, SMALL),  # in two launches
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else None,
)
def test_products(
    run: Matvec,
    monkeypatch: pytest.MonkeyPatch,
    stages: int,
    kinds: list[str],
    n_outs: list[int],
    width: int,
    norm: bool,
    swiglu: bool,
    residual: bool,
    limits: Limits,
) -> None:
    monkeypatch.setattr(linear, "_STAGES", stages)
    rng, memory = np.random.default_rng(width), Memory()
    x = memory(rng.standard_normal(width).astype(np.float32))
    weight = memory(rng.uniform(0.5, 1.5, width).astype(np.float32))
    exact = x.astype(np.float64)
    if norm:
        exact = exact / np.sqrt((exact**2).mean() + 1e-6) * weight
    matrices, outs, expected = [], [], []
    for kind, n_out in zip(kinds, n_outs, strict=True):
        data, values = weights(rng, kind, n_out, width)
        before = memory(rng.standard_normal(n_out).astype(np.float32))
        out = memory(np.full(n_out, np.nan, np.float32))
        matrices.append(
            Matrix(
                kind, memory(data).ctypes.data, n_out, out.ctypes.data, n_out,
                residual=before.ctypes.data if residual else 0,
            )
        )  # fmt: skip
        outs.append(out)
        expected.append(values @ exact + (before if residual else 0))
    if swiglu:
        gate, up = expected
        outs, expected = outs[:1], [gate / (1 + np.exp(-gate)) * up]
    entry = Input(x.ctypes.data, 1, width, width, weight.ctypes.data if norm else 0, 1e-6)
    calls = linear.linear(limits, entry, matrices, swiglu=swiglu)
    run(calls)
    first = [out.tobytes() for out in outs]
    for out, wanted in zip(outs, expected, strict=True):
        assert np.linalg.norm(out - wanted) <= BOUND * np.linalg.norm(wanted)
    run(calls)
    assert [out.tobytes() for out in outs] == first


@pytest.mark.parametrize("n_matrices", [1, 2])
@pytest.mark.parametrize("per_expert", [False, True])
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "F16"])
def test_experts_one_by_one(run: Matvec, kind: str, per_expert: bool, n_matrices: int) -> None:
    """Gate and up of every token's experts in one launch, or one matrix of each."""
    rng, memory = np.random.default_rng(n_matrices), Memory()
    n, n_used, n_expert, n_out, width = 3, 2, 5, 37, 512
    x = memory(rng.standard_normal((n, n_used if per_expert else 1, width)).astype(np.float32))
    ids = np.stack([rng.permutation(n_expert)[:n_used] for _ in range(n)])
    routes = memory(np.concatenate([ids, np.full((n, n_used), np.nan)], axis=1).astype(np.float32))
    out = memory(np.full((n, n_used, n_out), np.nan, np.float32))
    matrices, sides = [], []
    for _ in range(n_matrices):
        data, values = weights(rng, kind, n_expert * n_out, width)
        matrices.append(Matrix(kind, memory(data).ctypes.data, n_out, out.ctypes.data, n_out))
        chosen = values.reshape(n_expert, n_out, width)[ids]
        parts = np.broadcast_to(x.astype(np.float64), (n, n_used, width))
        sides.append(np.einsum("tki,tkoi->tko", parts, chosen))
    experts = Experts(routes.ctypes.data, 2 * n_used, n_used, data.size // n_expert, n_expert)
    entry = Input(x.ctypes.data, n, width, x.size // n)
    calls = expert_linear(LARGE, entry, matrices, experts, per_expert=per_expert)
    assert [call.kernel for call in calls] == [f"matvec_{kind.lower()}"]
    run(calls)
    wanted = sides[0] if n_matrices == 1 else sides[0] * np.exp(-np.logaddexp(0, -sides[0])) * sides[1]
    assert np.linalg.norm(out - wanted) <= BOUND * np.linalg.norm(wanted)
