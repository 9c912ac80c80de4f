"""Models whose activations pass what half precision holds: all ways to compute a product, attention and the cache."""

from pathlib import Path

import numpy as np
import pytest

from reflex_ipc import archs
from reflex_ipc.check import check_ops
from reflex_ipc.cuda.executor import CudaExecutor
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import Step

pytestmark = pytest.mark.gpu

BOUND = 3e-3
"""Of dense families. Half precision with a scale a row alone costs 1e-3 and 7e-4 (fixtures/make_large.py)."""


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "alone"])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_logits(fixtures: Path, name: str, fuse: bool) -> None:
    """70 tokens at once and in steps of a few (x in half precision), and one by one (16-bit integers)."""
    reference = np.load(fixtures / "large" / f"{name}.npz")
    ids, rows = reference["ids"].tolist(), reference["rows"].tolist()
    expected = reference["logits"].astype(np.float64)
    with GGUF.open(fixtures / "large" / f"{name}.gguf") as gguf:
        plan = archs.build(gguf)
        executor = CudaExecutor(gguf, plan, plan.n_ctx_train, fuse=fuse)
        try:
            executor.reserve(len(ids))
            for sizes in ([70], [7, 1, 30, 32], [1] * 70):
                executor.reset()
                found, start = [], 0
                for size in sizes:
                    executor.forward(Step.text(ids[start : start + size], start, range(size)))
                    found.append(executor.logits())
                    start += size
                actual = np.concatenate(found)[rows]
                assert np.isfinite(actual).all()
                error = np.linalg.norm(actual - expected, axis=1) / np.linalg.norm(expected, axis=1)
                assert error.max() <= 3 * BOUND, dict(zip(rows, error.tolist(), strict=True))
                assert np.linalg.norm(actual - expected) <= BOUND * np.linalg.norm(expected)
        finally:
            executor.close()


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "alone"])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_every_op_on_the_references_inputs(fixtures: Path, name: str, fuse: bool) -> None:
    with GGUF.open(fixtures / "large" / f"{name}.gguf") as gguf:
        ids = np.load(fixtures / "large" / f"{name}.npz")["ids"].tolist()
        check_ops(gguf, archs.build(gguf), ids, 0, fuse=fuse)
