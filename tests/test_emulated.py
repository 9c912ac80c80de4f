"""Every family's logits and answers on the emulated device: all kernels but products of one row, run on the host."""

from functools import partial
from pathlib import Path

import emulator
import numpy as np
import pytest
from emulator.build import library

from reflex_ipc import archs
from reflex_ipc.check import compare
from reflex_ipc.cuda import executor as cuda
from reflex_ipc.cuda import families, launch, linear
from reflex_ipc.cuda.device import start_driver
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import PARENT_NONE, PARENT_STATE, Step
from reflex_ipc.reference.executor import ReferenceExecutor
from reflex_ipc.reference.ops import States
from reflex_ipc.reference.weights import Weights
from reflex_ipc.sampler import Sampler, Sampling

KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"
pytestmark = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")

DENSE = ["llama", "qwen2", "qwen3-untied"]
OTHERS = ["qwen3moe", "qwen35", "qwen35moe", "qwen3next", "deepseek3"]
BOUND = 1e-3
"""Products are exact here: what is lost is the half-precision cache, and values on the tensor cores."""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> tuple[str, str]:
    """The emulated driver, and its kernels."""
    return str(library(KERNELS)), str(emulator.kernels(KERNELS, tmp_path_factory.mktemp("emulated")))


@pytest.fixture
def opened(emulated, monkeypatch, fixtures: Path):
    path, lib = emulated
    monkeypatch.setattr(linear, "linear", emulator.naive_linear)
    monkeypatch.setattr(linear, "expert_linear", emulator.naive_experts)
    monkeypatch.setattr(cuda, "Kernels", partial(launch.Kernels, lib=lib))
    executors = []

    def open_model(name: str, *, fuse: bool = True):
        stem = fixtures / (name if "/" in name else f"exact/{name}-f16")
        gguf = GGUF.open(f"{stem}.gguf")
        plan = archs.build(gguf)
        executor = cuda.CudaExecutor(gguf, plan, plan.n_ctx_train, opening=start_driver(0, path), fuse=fuse)
        executors.append((executor, gguf))
        return executor, gguf, np.load(f"{stem}.npz")

    yield open_model
    for executor, gguf in executors:
        executor.close()
        gguf.close()


def relative_error(actual, expected) -> float:
    expected = expected.astype(np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "alone"])
@pytest.mark.parametrize("name", [*DENSE, *OTHERS])
def test_logits(opened, name: str, fuse: bool) -> None:
    executor, _, reference = opened(name, fuse=fuse)
    ids = reference["ids"].tolist()
    for sizes in ([48], [7, 1, 1, 1, 20, 18]):
        executor.reset()
        executor.reserve(len(ids))
        rows, start = [], 0
        for size in sizes:
            executor.forward(Step.text(ids[start : start + size], start, range(size)))
            rows.append(executor.logits())
            start += size
        assert relative_error(np.concatenate(rows), reference["logits"]) <= BOUND


@pytest.mark.parametrize("name", ["large/qwen3", "large/llama"])
def test_activations_beyond_half_precision(opened, name: str) -> None:
    """The cache and attention, with values and scores that half precision does not hold."""
    executor, _, reference = opened(name)
    ids, rows = reference["ids"].tolist(), reference["rows"].tolist()
    executor.reserve(len(ids))
    executor.forward(Step.text(ids, 0, rows))
    assert relative_error(executor.logits(), reference["logits"]) <= BOUND
    executor.reset()
    executor.forward(Step.text(ids[:62], 0, []))
    for position in range(62, len(ids)):
        executor.forward(Step.text([ids[position]], position, [0]))
    assert relative_error(executor.logits()[0], reference["logits"][rows.index(len(ids) - 1)]) <= BOUND


def test_logits_of_27_blocks(opened) -> None:
    """Half-precision latents alone are worth 9e-3 here, most of it at two positions."""
    executor, _, reference = opened("deepseek2-lite")
    executor.reserve(48)
    executor.forward(Step.text(reference["ids"].tolist(), 0, range(48)))
    assert relative_error(executor.logits(), reference["logits"]) <= 1e-2


@pytest.mark.parametrize("name", ["qwen35moe", "deepseek3"])
def test_routers_are_not_tipped(opened, monkeypatch, name: str) -> None:
    """Products as tensor cores compute them: within the bound with what feeds a router exact, and not without."""
    monkeypatch.setattr(linear, "linear", emulator.half_linear)
    monkeypatch.setattr(linear, "expert_linear", emulator.half_experts)
    errors = []
    for before_routers in (families.before_routers, lambda plan: frozenset()):
        monkeypatch.setattr(families, "before_routers", before_routers)
        executor, _, reference = opened(name)
        executor.reserve(48)
        executor.forward(Step.text(reference["ids"].tolist(), 0, range(48)))
        errors.append(relative_error(executor.logits(), reference["logits"]))
    assert errors[0] <= BOUND < errors[1]


@pytest.mark.parametrize("name", ["qwen2", *OTHERS])
def test_a_tree_on_the_references_inputs(opened, name: str) -> None:
    executor, gguf, _ = opened(name)
    plan = executor.plan
    weights, states = Weights(gguf, plan, 2), States(plan.states)
    states.reserve(32)
    tree = Step([1, 2, 3, 4, 5, 6], [9, 10, 10, 11, 0, 1], [-1, 0, 0, 2, PARENT_NONE, 4], [1, 3, 5], 1)
    for step in (Step.text(range(9), 0, [8]), tree, Step.text([7], 10, [0])):
        for what, _, error, bound in compare(executor, step, weights, states):
            assert error <= bound, what


@pytest.mark.parametrize("name", ["qwen3-untied", "qwen35", "deepseek3"])
def test_answers_and_taking_a_step_back(opened, name: str) -> None:
    executor, _, reference = opened(name)
    prompt, expected = reference["ids"][:16].tolist(), reference["greedy"].tolist()
    executor.reserve(64)
    executor.forward(Step.text(prompt, 0, [15]))
    answer = executor.decode(Sampler(Sampling(), executor.plan.n_vocab, prompt))
    tokens = [next(answer).id for _ in range(8)]
    answer.close()
    assert tokens == expected[:8]
    assert executor.n_past == 16 + 7
    # One step ran ahead; the last token of the eight is fed again, and the answer goes on as if nothing had happened.
    executor.forward(Step.text(tokens[-1:], executor.n_past, [0]))
    assert int(executor.logits()[0].argmax()) == expected[8]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7, "seed": 9, "top_k": 50, "top_p": 0.8, "min_p": 0.02, "top_logprobs": 5},
        {"temperature": 1.0, "seed": 3, "logit_bias": {5: 10.0}, "repeat_penalty": 1.3, "frequency_penalty": 0.3},
    ],
    ids=str,
)
def test_drawn_answers_are_the_host_samplers(opened, settings: dict) -> None:
    executor, _, reference = opened("qwen3-untied")
    prompt, n_vocab = reference["ids"][:8].tolist(), executor.plan.n_vocab
    executor.forward(Step.text(prompt, 0, [7]))
    answer = executor.decode(Sampler(Sampling(**settings), n_vocab, prompt))
    drawn = [next(answer) for _ in range(8)]
    answer.close()
    executor.reset()
    executor.forward(Step.text(prompt, 0, [7]))
    sampler = Sampler(Sampling(**settings), n_vocab, prompt)
    for got in drawn:
        wanted = sampler.sample(executor.logits()[-1])
        assert (got.id, [t for t, _ in got.top]) == (wanted.id, [t for t, _ in wanted.top])
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-5)
        executor.forward(Step.text([wanted.id], executor.n_past, [0]))


@pytest.mark.parametrize("name", ["qwen2", "qwen35", "deepseek3"])
def test_scores_are_the_references(opened, name: str) -> None:
    """A tree of candidates after a prompt: the log-probabilities the reference has, and the prompt's state after it."""
    executor, gguf, _ = opened(name)
    reference = ReferenceExecutor(gguf, executor.plan, 256)
    reference.reserve(64)
    tokens, positions = [5, 6, 7, 9, 10, 12, 3, 4], [0, 1, 2, 3, 4, 3, 0, 1]
    step = Step(tokens, positions, [-1, 0, 1, 2, 3, 2, PARENT_NONE, 6], [2, 3, 5, 7], 3)
    targets = [[9, 12, 13], [10], [1, 2], [500]]
    got, wanted = executor.score(step, targets), reference.score(step, targets)
    assert [len(row) for row in got] == [3, 1, 2, 1]
    for row, wants, found in zip(executor.logits().astype(np.float64), targets, got, strict=True):
        expected = row[wants] - row.max() - np.log(np.exp(row - row.max()).sum())
        assert np.abs(np.subtract(found, expected)).max() <= 1e-5
    for a, b in zip(got, wanted, strict=True):
        assert np.abs(np.subtract(a, b)).max() < 5e-3
    assert executor.n_past == 3
    # Another tree of nearly that size takes the same launches, to its own answers.
    assert len(executor._shapes) <= 1
    shorter = Step([9, 10, 12], [3, 4, 3], [PARENT_STATE, 0, PARENT_STATE], [1, 2], 0)
    (first,), (second,) = executor.score(shorter, [[1], [2]])
    assert [first, second] == pytest.approx([row[0] for row in reference.score(shorter, [[1], [2]])], abs=5e-3)
    assert len(executor._shapes) == 1 and executor.n_past == 3
    for each in (executor, reference):
        each.forward(Step.text([20], 3, [0]))
    assert np.linalg.norm(executor.logits() - reference.logits()) <= BOUND * np.linalg.norm(reference.logits())
