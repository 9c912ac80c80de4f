"""Some ops of a model by themselves, lowered as those of a whole one are, and weights for them."""

from collections.abc import Mapping, Sequence
from math import prod
from struct import Struct
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from reflex_ipc import ops
from reflex_ipc.cuda import families
from reflex_ipc.cuda.fuse import Group, alone
from reflex_ipc.cuda.lower import Lowering, tables_of
from reflex_ipc.cuda.places import PAGE, Columns, Places, Shape
from reflex_ipc.cuda.sampling import CONTROL
from reflex_ipc.cuda.steps import mask_of
from reflex_ipc.gguf import TYPES, Tensor
from reflex_ipc.plan import PARENT_STATE, Plan, Step
from reflex_ipc.reference.dequant import dequantise
from reflex_ipc.smoke.bench import Bench

Array = npt.NDArray[np.float64]

KINDS = {kind.name: kind for kind in TYPES.values()}
_POOL = 251  # different blocks of a type
_LEAST, _MOST = 0.05, 2.0  # of the largest number of a block


class Weight(NamedTuple):
    """A tensor: its type, dimensions as GGUF has them, bytes, and values (.., n_out, n_in)."""

    kind: str
    ne: tuple[int, ...]
    raw: bytes
    values: Array


def numbers(*shape: int, seed: int) -> Array:
    """Numbers between -1 and 1, exact in half precision and in bfloat16."""
    return np.random.default_rng(seed).integers(-127, 128, shape) / 128


def weight(kind: str, *ne: int, seed: int = 0) -> Weight:
    """Of a float type `numbers`; of a quantised one random bytes whose blocks are finite and of a like size, and what
    the CPU backend, which shares nothing with the kernels, reads from them."""
    if kind in ("F32", "F16", "BF16"):
        values = numbers(*reversed(ne), seed=seed)
        raw = values.astype(np.float16 if kind == "F16" else np.float32)
        if kind == "BF16":
            return Weight(kind, ne, (raw.view(np.uint32) >> 16).astype(np.uint16).tobytes(), values)
        return Weight(kind, ne, raw.tobytes(), values)
    blocks, read = _pool(kind)
    n = prod(ne) // KINDS[kind].block
    chosen = np.random.default_rng(seed).integers(0, _POOL, n)
    return Weight(kind, ne, blocks[chosen].tobytes(), read[chosen].reshape(*reversed(ne)))


def float_weight(values: Array) -> Weight:
    """These numbers as float32, which they are exact in."""
    return Weight("F32", (*reversed(values.shape),), values.astype(np.float32).tobytes(), values)


def _pool(kind: str) -> tuple[npt.NDArray[np.uint8], Array]:
    if kind not in _pools:
        block, size = KINDS[kind].block, KINDS[kind].size
        rng = np.random.default_rng(len(kind))
        blocks, read = np.empty((0, size), np.uint8), np.empty((0, block))
        while len(blocks) < _POOL:
            drawn = rng.integers(0, 256, (2048, size), dtype=np.uint8)
            with np.errstate(all="ignore"):
                values = dequantise(drawn.tobytes(), kind, 2048 * block).reshape(2048, block).astype(np.float64)
                largest = np.abs(values).max(axis=1)
            fit = (largest > _LEAST) & (largest < _MOST)  # nothing that is no number fits
            blocks, read = np.concatenate([blocks, drawn[fit]]), np.concatenate([read, values[fit]])
        _pools[kind] = blocks[:_POOL], read[:_POOL]
    return _pools[kind]


_pools: dict[str, tuple[npt.NDArray[np.uint8], Array]] = {}


class Layer(Lowering):
    """Ops on buffers of a bench, one by one or `fused` as in a model. It keeps a sequence: `n_past` tokens of at most
    `n_positions`, recurrent states (name -> numbers) zero at first."""

    def __init__(
        self,
        bench: Bench,
        op_list: "Sequence[ops.Op]",
        weights: Mapping[str, Weight],
        *,
        fused: str = "",
        n_positions: int = PAGE,
        states: Mapping[str, int] | None = None,
    ) -> None:
        self.bench = bench
        self._weights = {name: bench.put(weight.raw) for name, weight in weights.items()}
        tensors = {n: Tensor(n, KINDS[w.kind], w.ne, 0, 0, len(w.raw)) for n, w in weights.items()}
        plan = Plan("smoke", tuple(op_list), (), tensors, op_list[-1].out, 1, 1, 1, 1, ())
        # As one group of this kind (see `fuse.Group`), but for what leads to it: a router.
        n_before = sum(isinstance(op, ops.Route) for op in op_list)
        groups = alone(plan)
        if fused:
            groups[n_before:] = [Group(fused, op_list[n_before:], [plan.logits])]
        columns, places = Columns(groups, plan.logits.name), Places()
        super().__init__(
            bench.device, bench.kernels, bench.stream, plan, groups, columns, places, self._weights.__getitem__
        )
        self.n_past = self._parity = 0
        self._values: dict[str, int] = {}
        places.cache = bench.room(self.layout.pages(n_positions) * self.layout.page_bytes)
        places.partial = bench.room(self.partial_bytes())
        places.tickets = bench.put(bytes(self.ticket_bytes()))
        places.heads = bench.floats(range(max((op.n_head for op in self.latents), default=0)))
        for key, rope in tables_of(plan).items():
            frequencies = rope.frequencies()
            places.frequencies[key] = bench.put(Struct(f"<{len(frequencies)}d").pack(*frequencies))
        for name, n in (states or {}).items():
            places.states[name] = bench.put(bytes(8 * n)), 4 * n

    def at(self, value: ops.Value) -> int:
        return self._values[value.name]

    def run(
        self, inputs: Mapping[str, Array], n_splits: int = 0, *, tree: Sequence[int] | None = None, expand: bool = False
    ) -> Array:
        """What the last op makes of these rows, (n, width). `tree`: their parents; a tree leaves nothing behind."""
        n, bench, p = len(next(iter(inputs.values()))), self.bench, self.places
        n_expanded = 0
        if expand:
            from reflex_ipc.cuda import latent

            n_expanded = latent.n_expanded(self.n_past + n)
        shape = Shape(n, 0, tree is not None, n_splits, n_expanded)
        kept = 0 if tree else n
        p.control = bench.put(CONTROL.pack(self.n_past, kept, 0, self._parity))
        p.positions = bench.integers(range(self.n_past, self.n_past + n))
        p.tokens = p.rows = bench.integers(range(n))
        p.zero = bench.integers([0])
        if tree:
            p.parents = bench.integers(tree)
            p.mask = bench.put(bytes(mask_of(Step([0] * n, [0] * n, tree, [], 0))))
            p.branches = bench.room(families.branch_bytes(self.plan, n))
        p.scratch = bench.room(
            max(
                self.finished_bytes(n),
                self.linear_scratch(n, 0),
                families.scratch_bytes(self.plan, n, n_expanded),
            )
        )
        for name, rows in inputs.items():
            self._values[name] = bench.put(rows.astype(np.float32).tobytes())
        for key, rope in tables_of(self.plan).items():
            p.tables[key] = bench.room(4 * n * rope.n_rot)
            self._table(key, shape)()
        for group in self.groups:
            for value in group.outputs:
                self._values[value.name] = bench.room(4 * n * value.width)
            for launch in self.launches_of(group, shape):
                launch()
        out = self.plan.logits
        self.n_past += kept
        self._parity ^= kept > 0
        data = bench.stream.read(self.at(out), 4 * n * out.width)
        return np.frombuffer(data, np.float32).reshape(n, -1).astype(np.float64)


def outcome(got: Array, wanted: Array, bound: float) -> tuple[list[float], list[float], float]:
    return got.reshape(-1).tolist(), wanted.reshape(-1).tolist(), bound


def visible_to(past: int, tree: Sequence[int] = ()) -> npt.NDArray[np.bool_]:
    """Which positions each sees: of a text of `past` tokens, and of a tree behind it by its parents."""
    n = past + len(tree)
    visible = np.tril(np.ones((n, n))) > 0
    for i, parent in enumerate(tree, past):
        visible[i] = visible[past + parent] if parent >= 0 else np.arange(n) < past * (parent == PARENT_STATE)
        visible[i, i] = True
    return visible


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    weights: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return weights


def rms(x: Array, eps: float) -> Array:
    """x over the root of its mean square, along the last axis."""
    scale: Array = np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return x / scale
