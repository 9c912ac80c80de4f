"""Greedy answers of the quantised fixtures: those of llama.cpp on the dequantised weights, in float32."""

from pathlib import Path

import numpy as np
import pytest

from reflex_ipc import archs
from reflex_ipc.cuda.executor import CudaExecutor
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import Step
from reflex_ipc.sampler import Sampler, Sampling

pytestmark = pytest.mark.gpu

BOUND = 1e-2
"""Relative error of logits."""
FILES = sorted((Path(__file__).parents[1] / "fixtures" / "quantised").glob("*.gguf"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def model(request: pytest.FixtureRequest):
    with GGUF.open(request.param) as gguf:
        plan = archs.build(gguf)
        executor = CudaExecutor(gguf, plan, plan.n_ctx_train)
        try:
            executor.reserve(64)
            yield executor, np.load(request.param.with_suffix(".npz"))
        finally:
            executor.close()


def decided(reference) -> np.ndarray:
    """Steps whose best two lie so far apart that logits, each off by the bound, cannot change places."""
    return np.asarray(reference["greedy_gap"] > 2 * BOUND * reference["logits"].std(axis=1).mean())


def test_there_is_much_to_compare() -> None:
    found = [decided(np.load(path.with_suffix(".npz"))) for path in FILES]
    assert len(found) == 13 and min(each.sum() for each in found) >= 20
    assert sum(each.sum() for each in found) >= 290  # of 312


def test_answers(model, capsys: pytest.CaptureFixture[str]) -> None:
    executor, reference = model
    prompt = reference["ids"][: int(reference["prompt_len"])].tolist()
    expected = reference["greedy"].tolist()
    executor.forward(Step.text(prompt, 0, [len(prompt) - 1]))
    tokens = executor.decode(Sampler(Sampling(), executor.plan.n_vocab, prompt))
    answer = [next(tokens).id for _ in expected]
    tokens.close()
    for at, (got, wanted) in enumerate(zip(answer, expected, strict=True)):
        if got != wanted:  # what follows is another text
            with capsys.disabled():
                print(f"\ntoken {at}: {got} for {wanted}, {reference['greedy_gap'][at]:.4f} before the second")
            assert not decided(reference)[at]
            break


def test_every_token_behind_those_before(model) -> None:
    """However rounding decided one, the others are compared."""
    executor, reference = model
    prompt = reference["ids"][: int(reference["prompt_len"])].tolist()
    expected = reference["greedy"]
    executor.forward(Step.text(prompt, 0, [len(prompt) - 1]))
    best = [int(executor.logits()[0].argmax())]
    for token in expected[:-1].tolist():
        executor.forward(Step.text([token], executor.n_past, [0]))
        best.append(int(executor.logits()[0].argmax()))
    sure = decided(reference)
    assert (np.array(best)[sure] == expected[sure]).all()
