"""A prompt in any pieces is the prompt in one: what is exactly so, what is so to 1e-5, and what float32 cannot tell.

The judge is the reference executor itself with float64 in place of float32: the same code, so what it cannot be blamed
for (the order of sums, the border of a piece) is not to blame here.

The hybrid fixtures have positions at which a head's output is nearly nothing and is then normalised. Rounding the
outputs of the matrix products once moves the float64 logits there by up to 7e-4, and moving the embedding by half a
unit in the last place of float32, nothing else, by 3e-4. BLAS adds up a row of a product in an order that depends on
how many rows there are, so pieces differ there by as much. Which positions these are is known from float64 alone.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_ipc import archs, ops
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import Plan, Step
from reflex_ipc.reference import blocks
from reflex_ipc.reference import ops as reference_ops
from reflex_ipc.reference.ops import FUNCTIONS, Run, States
from reflex_ipc.reference.weights import Weights

HYBRID = ["qwen35", "qwen35moe", "qwen3next"]
OTHERS = ["llama", "qwen2", "qwen3", "qwen3-untied", "qwen3moe", "deepseek3"]
BOUND = 1e-5
FIDELITY = {**dict.fromkeys(HYBRID, 5e-5), **dict.fromkeys([*OTHERS, "deepseek2-lite"], 2e-5)}
"""As in test_fidelity.py."""
UNIT = 2.0**-24
"""What rounding to float32 may change, relatively."""

Change = Callable[[ops.Op, Run, np.ndarray], np.ndarray]


class Float64:
    """NumPy, but for what it calls float32."""

    float32 = np.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class Model:
    """A fixture's plan and weights; `logits` runs it in pieces."""

    def __init__(self, fixtures: Path, name: str) -> None:
        path = fixtures / f"exact/{name}-f16.gguf"
        self.fixture = np.load(path.with_suffix(".npz"))
        self.gguf = GGUF.open(path)
        self.plan: Plan = archs.build(self.gguf)
        self.weights = Weights(self.gguf, self.plan, 1)

    def close(self) -> None:
        self.weights.close()
        self.gguf.close()

    def runs(self, ids: Sequence[int], cuts: Sequence[int], change: Change | None = None) -> Iterator[Run]:
        states = States(self.plan.states)
        states.reserve(len(ids))
        for start, stop in pairwise(cuts):
            run = Run(Step.text(ids[start:stop], start, range(stop - start)), self.weights, states)
            for op in self.plan.ops:
                value = FUNCTIONS[type(op)](op, run)
                run.values[op.out.name] = value if change is None else change(op, run, value)
            states.n_past += stop - start
            yield run

    def logits(self, ids: Sequence[int], cuts: Sequence[int], change: Change | None = None) -> np.ndarray:
        return np.concatenate([run[self.plan.logits] for run in self.runs(ids, cuts, change)])


@pytest.fixture
def opened(fixtures: Path) -> Iterator[Callable[[str], Model]]:
    models: list[Model] = []

    def open_model(name: str) -> Model:
        models.append(Model(fixtures, name))
        return models[-1]

    yield open_model
    for model in models:
        model.close()


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., np.ndarray]]:
    """`Model.logits` in float64."""

    def run(model: Model, *arguments: Any) -> np.ndarray:
        narrow = model.weights._arrays
        with monkeypatch.context() as patch:
            for module in (reference_ops, blocks):
                patch.setattr(module, "np", Float64())
            patch.setattr(model.weights, "_arrays", {name: array.astype(np.float64) for name, array in narrow.items()})
            found = model.logits(*arguments)
        assert found.dtype == np.float64
        return found

    yield run


def rounded_products(seed: int, *, terms: bool) -> Change:
    """Every output of a matrix product up or down by one rounding, of itself or of a sum as large as its terms."""
    rng = np.random.default_rng(seed)

    def change(op: ops.Op, run: Run, value: np.ndarray) -> np.ndarray:
        if not isinstance(op, ops.Linear | ops.ExpertLinear):
            return value
        size = value
        if terms:
            weights: Any = {op.weight: np.abs(run.weights[op.weight])}
            of_terms = Run(run.step, weights, run.states)
            of_terms.values = run.values | {op.x.name: np.abs(run[op.x])}
            size = FUNCTIONS[type(op)](op, of_terms)
        return value + UNIT * size * rng.choice([-1, 1], value.shape)

    return change


def pieces(seed: int, n: int) -> list[int]:
    """Cuts of n tokens: 0, up to eleven places, n; token by token where `seed` is 0."""
    if seed == 0:
        return list(range(n + 1))
    rng = np.random.default_rng(seed)
    return [0, *sorted(rng.choice(np.arange(1, n), rng.integers(1, 12), replace=False).tolist()), n]


def prompts(model: Model) -> list[list[int]]:
    """Of more than 300 tokens, or nearly: the fixture's own, and one by chance."""
    return [model.fixture["long_ids"].tolist(), np.random.default_rng(1).integers(3, 500, 330).tolist()]


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    expected = expected.astype(np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def by_position(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    expected = expected.astype(np.float64)
    error: np.ndarray = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
    return error


@pytest.mark.parametrize("name", HYBRID)
def test_recurrence_has_no_borders(opened, name: str) -> None:
    """Convolution and delta rule of equal inputs: in any pieces, outputs and what is kept are the same bits."""
    model = opened(name)
    for ids in prompts(model):
        n = len(ids)
        (whole,) = model.runs(ids, [0, n])
        for seed in range(6):
            states = States(model.plan.states)
            for start, stop in pairwise(pieces(seed, n)):
                run = Run(Step.text(ids[start:stop], start, []), model.weights, states)
                run.values = {value: array[start:stop] for value, array in whole.values.items()}
                for op in model.plan.ops:
                    if isinstance(op, ops.Conv | ops.DeltaRule):
                        assert FUNCTIONS[type(op)](op, run).tobytes() == whole[op.out][start:stop].tobytes()
            for state in model.plan.states:
                if not state.per_token:
                    assert states.arrays[state.name].tobytes() == whole.states.arrays[state.name].tobytes()


@pytest.mark.parametrize("name", HYBRID)
def test_layers_in_pieces(opened, name: str) -> None:
    """A delta layer from norm to norm, products and all, of equal inputs: outputs and states to 1e-5."""
    model = opened(name)
    plan, layers = model.plan, {ops.scope(op.name) for op in model.plan.ops if isinstance(op, ops.DeltaRule)}
    assert len(layers) == 3
    for ids in prompts(model):
        n = len(ids)
        (whole,) = model.runs(ids, [0, n])
        for seed in range(6):
            states, outputs = States(plan.states), {layer: [] for layer in layers}
            for start, stop in pairwise(pieces(seed, n)):
                run = Run(Step.text(ids[start:stop], start, []), model.weights, states)
                for op in plan.ops:
                    inside = ops.scope(op.name) in layers
                    run.values[op.out.name] = FUNCTIONS[type(op)](op, run) if inside else whole[op.out][start:stop]
                    if op.name.endswith("attn_residual") and inside:
                        outputs[ops.scope(op.name)].append(run[op.out])
                    if op.name.endswith("ffn_residual"):  # what the next layer begins with
                        run.values[op.out.name] = whole[op.out][start:stop]
            for layer in layers:
                assert relative_error(np.concatenate(outputs[layer]), whole.values[f"{layer}.attn_residual"]) <= BOUND
            for state in plan.states:
                if not state.per_token:
                    assert relative_error(states.arrays[state.name], whole.states.arrays[state.name]) <= BOUND


@pytest.mark.parametrize("name", HYBRID)
def test_no_border_shows_in_float64(opened, in_float64, name: str) -> None:
    """At every position: no border is worth anything but float64's rounding, amplified as much as float32's is."""
    model = opened(name)
    for ids in prompts(model):
        n = len(ids)
        whole = in_float64(model, ids, [0, n])
        for seed in range(3):
            assert by_position(in_float64(model, ids, pieces(seed, n)), whole).max() <= 1e-10


@pytest.mark.parametrize("name", HYBRID)
def test_pieces_of_a_long_prompt(opened, in_float64, name: str) -> None:
    """To 1e-5 where float64 itself is not moved by more than that when the outputs of its products are rounded once,
    which is at 95% of the positions or more; at no position by more than eight times what one rounding a sum moves it.
    The bound of fidelity holds for any split at the positions of which there are logits of another library."""
    model = opened(name)
    for ids in prompts(model):
        n = len(ids)
        exact = in_float64(model, ids, [0, n])

        def moved(terms: bool, ids: list[int] = ids, exact: np.ndarray = exact) -> np.ndarray:
            changes = [rounded_products(seed, terms=terms) for seed in range(4)]
            found = [by_position(in_float64(model, ids, [0, len(ids)], change), exact) for change in changes]
            most: np.ndarray = np.max(found, axis=0)
            return most

        steady, limit = moved(terms=False) <= BOUND, np.maximum(BOUND, 8 * moved(terms=True))
        assert steady.mean() >= 0.95
        whole = model.logits(ids, [0, n])
        for seed in range(8):
            found = model.logits(ids, pieces(seed, n))
            assert relative_error(found[steady], whole[steady]) <= BOUND
            assert (by_position(found, whole) <= limit).all()
            if ids == model.fixture["long_ids"].tolist():
                rows = model.fixture["long_rows"]
                assert relative_error(found[rows], model.fixture["long_logits"]) <= FIDELITY[name]


def test_a_rounding_is_worth_more_than_that(opened, in_float64) -> None:
    """Why some positions are no matter of pieces: the embedding of one prompt moved by half a unit in the last place of
    float32, and nothing else, moves float64's logits by more than 1e-5, over all positions."""
    model = opened("qwen35moe")
    ids = model.fixture["long_ids"].tolist()
    rng = np.random.default_rng(0)

    def change(op: ops.Op, _: Run, value: np.ndarray) -> np.ndarray:
        if not isinstance(op, ops.Embed):
            return value
        return value + np.spacing(np.abs(value).astype(np.float32)) * rng.choice([-0.5, 0.5], value.shape)

    exact, moved = in_float64(model, ids, [0, 300]), in_float64(model, ids, [0, 300], change)
    assert relative_error(moved, exact) > BOUND
    assert by_position(moved, exact).max() > 1e-4


@pytest.mark.parametrize("name", OTHERS)
def test_pieces_of_other_families(opened, name: str) -> None:
    """All positions."""
    model = opened(name)
    for ids in prompts(model):
        whole = model.logits(ids, [0, len(ids)])
        for seed in range(4):
            found = model.logits(ids, pieces(seed, len(ids)))
            assert by_position(found, whole).max() <= BOUND


def test_pieces_of_many_layers(opened) -> None:
    """27 of them: over all positions, of which some differ by up to 3e-5."""
    model = opened("deepseek2-lite")
    for ids in prompts(model):
        whole = model.logits(ids, [0, len(ids)])
        for seed in range(1, 3):
            assert relative_error(model.logits(ids, pieces(seed, len(ids))), whole) <= BOUND


@pytest.mark.parametrize("name", FIDELITY)
def test_pieces_of_a_short_prompt(opened, name: str) -> None:
    """All positions of the fixture's 48 tokens, against both."""
    model = opened(name)
    ids = model.fixture["ids"].tolist()
    whole = model.logits(ids, [0, 48])
    for seed in range(8):
        found = model.logits(ids, pieces(seed, 48))
        assert relative_error(found, whole) <= BOUND
        assert relative_error(found, model.fixture["logits"]) <= FIDELITY[name]
