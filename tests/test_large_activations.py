"""Models whose activations pass what half precision holds: fixtures/make_large.py says how, and whence the logits."""

from pathlib import Path

import numpy as np
import pytest

from reflex_ipc import archs
from reflex_ipc.engine import Engine
from reflex_ipc.gguf import GGUF
from reflex_ipc.ops import Attention, SwiGlu
from reflex_ipc.plan import Step
from reflex_ipc.reference.ops import FUNCTIONS, Run, States
from reflex_ipc.reference.weights import Weights

HALF = 65504.0


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_logits(fixtures: Path, name: str) -> None:
    reference = np.load(fixtures / "large" / f"{name}.npz")
    expected = reference["logits"].astype(np.float64)
    with Engine.open(fixtures / "large" / f"{name}.gguf", backend="cpu") as engine:
        actual = engine.logits(reference["ids"].tolist())[reference["rows"]]
    assert np.linalg.norm(actual - expected) <= 2e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_they_do_pass_it(fixtures: Path, name: str) -> None:
    """In every layer: what the other tests of these files, here and on devices, stand on."""
    ids = np.load(fixtures / "large" / f"{name}.npz")["ids"].tolist()
    with GGUF.open(fixtures / "large" / f"{name}.gguf") as gguf:
        plan = archs.build(gguf)
        weights, states = Weights(gguf, plan, 1), States(plan.states)
        states.reserve(len(ids))
        run = Run(Step.text(ids, 0, [0]), weights, states)
        products, values, scores = [], [], []
        for op in plan.ops:
            run.values[op.out.name] = FUNCTIONS[type(op)](op, run)
            if isinstance(op, SwiGlu):
                products.append(float(np.abs(run[op.out]).max()))
            elif isinstance(op, Attention):
                values.append(float(np.abs(run[op.v]).max()))
                q = run[op.q].reshape(len(ids), op.n_head, -1)
                k = np.repeat(run[op.k].reshape(len(ids), op.n_head_kv, -1), op.n_head // op.n_head_kv, axis=1)
                scores.append(float(np.abs(np.einsum("ihd,jhd->hij", q, k)).max()))
        weights.close()
    assert min(products) > 1e5 > HALF
    assert min(values if name == "qwen3" else scores) > 1e5
