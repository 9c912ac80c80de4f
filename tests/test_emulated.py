"""Every family's logits and answers on the emulated device: all kernels but products of one row, run on the host."""

from math import prod
from pathlib import Path

import emulator
import legacy_file
import numpy as np
import pytest
from emulator import needs_kernels
from gguf_bytes import read_plainly

from reflex_ipc import healing, scoring
from reflex_ipc.check import compare
from reflex_ipc.cuda import executor as cuda
from reflex_ipc.cuda import experts, families, linear
from reflex_ipc.cuda.fuse import Group
from reflex_ipc.cuda.lower import Lowering
from reflex_ipc.engine import Engine
from reflex_ipc.errors import CancelledError, DeadlineError, OutOfMemoryError, ReflexError
from reflex_ipc.gguf import TYPES
from reflex_ipc.ops import Route
from reflex_ipc.plan import PARENT_NONE, PARENT_STATE, Step
from reflex_ipc.reference.executor import ReferenceExecutor
from reflex_ipc.reference.ops import FUNCTIONS, Run, States
from reflex_ipc.reference.weights import Weights
from reflex_ipc.sampler import Sampler, Sampling
from reflex_ipc.scores import ScoredRows

pytest_plugins = ["emulator.fixtures"]
pytestmark = needs_kernels

DENSE = ["llama", "qwen2", "qwen3-untied"]
OTHERS = ["qwen3moe", "qwen35", "qwen35moe", "qwen3next", "deepseek3"]
QUANTISED = "quantised/deepseek3-w256-Q4_K_M"
BOUND = 1e-3
"""Products are exact here: what is lost is the half-precision cache, and values on the tensor cores."""


def relative_error(actual, expected) -> float:
    expected = expected.astype(np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def worst_position(actual, expected) -> float:
    """The relative error of the position that has the largest."""
    return max(relative_error(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "alone"])
@pytest.mark.parametrize("name", [*DENSE, *OTHERS])
def test_logits(opened, name: str, fuse: bool) -> None:
    executor, _, reference = opened(name, fuse=fuse)
    ids, found = reference["ids"].tolist(), []
    for sizes in ([48], [7, 1, 1, 1, 20, 18], [1] * 48):
        found.append(logits_of(executor, ids, sizes, list(range(48))))
        assert relative_error(found[-1], reference["logits"]) <= BOUND
        assert worst_position(found[-1], found[0]) <= BOUND


def joined(source: Path, out: Path) -> Path:
    """The same file with every expert's gate and up in one tensor, `ffn_gate_up_exps`: first gate's rows, then up's."""
    raw = source.read_bytes()
    metadata, tensors = read_plainly(raw)
    made = {}
    for name, (number, ne, at) in tensors.items():
        assert (TYPES[number].name, TYPES[number].block) in (("F16", 1), ("F32", 1))
        made[name] = number, ne, raw[at : at + prod(ne) * TYPES[number].size]
    for name in [name for name in made if name.endswith("ffn_gate_exps.weight")]:
        (number, ne, gate), (_, _, up) = (made.pop(part) for part in (name, name.replace("gate", "up")))
        both = [np.frombuffer(part, np.uint8).reshape(ne[2], -1) for part in (gate, up)]
        content = np.concatenate(both, axis=1).tobytes()
        made[name.replace("gate", "gate_up")] = number, [ne[0], 2 * ne[1], ne[2]], content
    return legacy_file.put_together(metadata, made, out)


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "alone"])
def test_gate_and_up_in_one_tensor(opened, fixtures: Path, tmp_path: Path, fuse: bool) -> None:
    file = joined(fixtures / "exact/qwen35moe-f16.gguf", tmp_path / "joined.gguf")
    executor, _, reference = opened("qwen35moe", file=file, fuse=fuse)
    apart, _, _ = opened("qwen35moe", fuse=fuse)
    assert any("ffn_gate_up_exps" in name for name in executor.plan.weights)
    assert sum(group.kind == "experts" for group in executor._lowering.groups) == (executor.plan.n_layer if fuse else 0)
    ids = reference["ids"].tolist()
    for step in (Step.text(ids[:9], 0, range(9)), Step.text(ids[9:10], 9, [0])):
        for each in (executor, apart):
            each.reserve(16)
            each.forward(step)
        assert executor.logits().tobytes() == apart.logits().tobytes()


@pytest.mark.parametrize("name", ["qwen3", "qwen35"])
def test_tokens_behind_a_prompt_that_needs_more_room(opened, name: str) -> None:
    """Buffers move, and graphs of decoding know where they were: as of an executor that saw this prompt alone."""

    def tokens(executor: cuda.CudaExecutor, prompt: list[int]) -> list[int]:
        executor.reset()
        executor.reserve(len(prompt) + 8)
        executor.forward(Step.text(prompt, 0, [len(prompt) - 1]))
        answer = executor.decode(Sampler(Sampling(), executor.plan.n_vocab, prompt))
        found = [next(answer).id for _ in range(5)]
        answer.close()
        return found

    used, _, reference = opened(name)
    alone, _, _ = opened(name)
    ids = reference["long_ids"].tolist()
    tokens(used, ids[:10])
    assert tokens(used, ids[:120]) == tokens(alone, ids[:120])


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


@pytest.mark.parametrize("n_splits", [2, 5, 64])
def test_latent_attention_of_one_token_shared_out(opened, monkeypatch: pytest.MonkeyPatch, n_splits: int) -> None:
    """Blocks with some positions, and without any: 64 of them share at most 48."""
    executor, _, reference = opened("deepseek3")
    ids, logits = reference["ids"].tolist(), []
    for n in (1, n_splits, n_splits):
        monkeypatch.setattr(Lowering, "n_splits", lambda self, n_tokens, n=n: n)
        executor.reset()
        executor.reserve(len(ids))
        executor.forward(Step.text(ids[:40], 0, [39]))
        rows = []
        for at in range(40, 48):
            executor.forward(Step.text(ids[at : at + 1], at, [0]))
            rows.append(executor.logits())
        logits.append(np.concatenate(rows))
    assert relative_error(logits[1], reference["logits"][40:]) <= BOUND
    assert 0 < relative_error(logits[1], logits[0]) < 1e-5
    assert logits[1].tobytes() == logits[2].tobytes()


def test_logits_of_27_blocks(opened) -> None:
    """Half-precision latents alone are worth 9e-3 here, most of it at two positions; however a text comes, though, they
    are the same latents."""
    executor, _, reference = opened("deepseek2-lite")
    ids, rows = reference["ids"].tolist(), list(range(48))
    whole = logits_of(executor, ids, [48], rows)
    assert relative_error(whole, reference["logits"]) <= 1e-2
    assert worst_position(logits_of(executor, ids, [7, *[1] * 23, 18], rows), whole) <= 2e-3


def logits_of(executor: cuda.CudaExecutor, ids: list[int], sizes: list[int], wanted: list[int]) -> np.ndarray:
    """Logits of some rows of a text, in steps of these sizes."""
    executor.reset()
    executor.reserve(len(ids))
    found, start = [], 0
    for size in sizes:
        rows = [row - start for row in wanted if start <= row < start + size]
        executor.forward(Step.text(ids[start : start + size], start, rows))
        found.append(executor.logits())
        start += size
    return np.concatenate(found)


IN_PIECES = [[20, 28], [7, 1, 1, 1, 20, 18], [24, *[1] * 24]]


@pytest.mark.parametrize(
    ("name", "bound", "pieces"),
    [("deepseek3", BOUND, IN_PIECES), (QUANTISED, BOUND, IN_PIECES), ("deepseek2-lite", 1e-2, IN_PIECES[:1])],
)
def test_latent_attention_expanded(
    opened, monkeypatch: pytest.MonkeyPatch, name: str, bound: float, pieces: list[list[int]]
) -> None:
    """Steps of two tokens and more, in one piece, in pieces, and with single tokens between and behind them."""
    monkeypatch.setattr(families, "ABSORBED", 1)
    executor, _, reference = opened(name)
    ids, rows = reference["ids"].tolist(), list(range(48))
    whole = logits_of(executor, ids, [48], rows)
    assert relative_error(whole, reference["logits"]) <= bound
    for sizes in pieces:
        logits = logits_of(executor, ids, sizes, rows)
        assert relative_error(logits, reference["logits"]) <= bound
        assert relative_error(logits, whole) <= 1e-5


def test_long_steps_are_expanded_by_themselves(opened) -> None:
    """The reference's long text in one step and in two, through two pages of the cache."""
    executor, _, reference = opened("deepseek3")
    ids, rows = reference["long_ids"].tolist(), reference["long_rows"].tolist()
    whole = logits_of(executor, ids, [300], rows)
    assert relative_error(whole, reference["long_logits"]) <= BOUND
    assert relative_error(logits_of(executor, ids, [170, 130], rows), whole) <= 1e-6


LEGACY = {"F16": ("deepseek3", None), "Q8_0": (QUANTISED, None), "Q4_K": (QUANTISED, 256)}
"""Type of `attn_kv_b` -> the file it is put into, and the rank its latents get."""


@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "alone"])
@pytest.mark.parametrize("kind", LEGACY)
def test_logits_of_legacy_files(opened, fixtures: Path, tmp_path: Path, kind: str, fuse: bool) -> None:
    """`attn_kv_b` in one piece. As F16 these are the numbers of the absorbed file, and so are the logits."""
    name, rank = LEGACY[kind]
    source = fixtures / (name if "/" in name else f"exact/{name}-f16")
    file = legacy_file.write(source.with_suffix(".gguf"), tmp_path / "legacy.gguf", kind, rank)
    executor, gguf, reference = opened(name, fuse=fuse, file=file)
    ids, expected = reference["ids"].tolist(), reference["logits"]
    cpu = ReferenceExecutor(gguf, executor.plan, 64)
    cpu.reserve(48)
    executor.reserve(48)
    cpu.forward(Step.text(ids, 0, range(48)))
    if kind == "F16":
        assert relative_error(cpu.logits(), expected) <= 2e-5
    expected = cpu.logits()
    for sizes in ([48], [7, 1, 1, 1, 20, 18]):
        executor.reset()
        rows, start = [], 0
        for size in sizes:
            executor.forward(Step.text(ids[start : start + size], start, range(size)))
            rows.append(executor.logits())
            start += size
        assert relative_error(np.concatenate(rows), expected) <= BOUND
    if kind == "F16":
        executor.reset()
        prompt = ids[: int(reference["prompt_len"])]
        executor.forward(Step.text(prompt, 0, [len(prompt) - 1]))
        answer = executor.decode(Sampler(Sampling(), executor.plan.n_vocab, prompt))
        assert [next(answer).id for _ in range(8)] == reference["greedy"][:8].tolist()
        answer.close()


@pytest.mark.parametrize(("name", "half"), [("deepseek2-lite", False), ("deepseek3", False), ("deepseek3", True)])
def test_legacy_files_on_the_references_inputs(
    opened, monkeypatch, fixtures: Path, tmp_path: Path, name: str, half: bool
) -> None:
    """Latent attention is what it is of the absorbed file, to a few roundings of float32: where products are exact, and
    where a prompt's heads are grouped like experts."""
    if half:
        monkeypatch.setattr(experts, "expert_linear", emulator.half_experts)
    file = legacy_file.write(fixtures / f"exact/{name}-f16.gguf", tmp_path / "legacy.gguf")
    (legacy, gguf, _), (absorbed, _, _) = opened(name, file=file), opened(name)
    weights, states = Weights(gguf, legacy.plan, 2), States(legacy.plan.states)
    states.reserve(32)
    tree = Step([1, 2, 3, 4, 5, 6], [9, 10, 10, 11, 0, 1], [-1, 0, 0, 2, PARENT_NONE, 4], [1, 3, 5], 1)
    for step in (Step.text(range(9), 0, [8]), tree, Step.text([7], 10, [0])):
        for what, _, error, bound in compare(legacy, step, weights, states):
            assert error <= bound, what
    states.n_past = 0
    for executor in (legacy, absorbed):
        executor.reset()
    for step in (Step.text(range(9), 0, [8]), tree, Step.text([7], 10, [0])):
        errors = legacy_file.latent_errors(legacy, absorbed, Run(step, weights, states))
        assert len(errors) == legacy.plan.n_layer
        assert max(errors) <= 1e-5


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek3"])
@np.errstate(invalid="ignore")
def test_logits_of_a_router_that_are_no_numbers(opened, name: str) -> None:
    """Experts are real ones whatever is in the logits, and weights are NaN where those are not finite."""
    executor, gguf, _ = opened(name)
    weights, states = Weights(gguf, executor.plan, 2), States(executor.plan.states)
    states.reserve(8)
    run = Run(Step.text(range(6), 0, [5]), weights, states)

    def feed(group: Group) -> dict[str, bytes]:
        for op in group.parts:
            if isinstance(op, Route):
                x = run.values[op.logits.name] = run[op.logits].copy()
                x[0], x[1, -1], x[2, 1:], x[3] = np.nan, np.nan, np.nan, -np.inf
                x[4, 3] = np.inf
        return {value.name: run[value].astype(np.float32).tobytes() for value in group.inputs}

    seen = 0
    for group, left in executor.trace(run.step, feed):
        for op in group.parts:
            run.values[op.out.name] = FUNCTIONS[type(op)](op, run)
            if isinstance(op, Route):
                seen += 1
                ids, parts = np.split(np.frombuffer(left[op.out.name], np.float32).reshape(6, -1), 2, axis=1)
                assert (ids == ids.astype(int)).all() and ids.min() >= 0 and ids.max() < op.logits.width
                assert np.isnan(parts[:5]).all() and not np.isnan(parts[5]).any()
                assert (np.isnan(parts) == np.isnan(run[op.out][:, op.n_used :])).all()
                assert np.abs(np.concatenate([ids, parts], axis=1)[5] - run[op.out][5]).max() <= 1e-6
                run.values[op.out.name] = np.nan_to_num(run[op.out])
    assert seen


@pytest.mark.parametrize(
    ("name", "broken", "by"),
    [
        ("qwen3moe", "ffn_norm.weight", np.nan),
        ("deepseek3", "ffn_norm.weight", np.nan),
        *(("deepseek3", "exp_probs_b.bias", by) for by in (np.nan, np.inf, -np.inf)),
        *(("deepseek3", "ffn_gate_inp.weight", by) for by in (np.nan, np.inf, -np.inf)),
    ],
)
def test_a_broken_file_of_experts_ends_in_an_error(
    opened, fixtures: Path, tmp_path: Path, name: str, broken: str, by: float
) -> None:
    """Not finite before a router or in it: no expert beyond the last is read, and the sampler says what came of it."""
    raw = bytearray((fixtures / f"exact/{name}-f16.gguf").read_bytes())
    places = [at for tensor, (_, _, at) in read_plainly(bytes(raw))[1].items() if tensor.endswith(broken)]
    assert places
    for at in places:
        raw[at : at + 4] = np.float32(by).tobytes()
    (tmp_path / "broken.gguf").write_bytes(raw)
    with (
        Engine.open(tmp_path / "broken.gguf", backend="cpu") as engine,
        pytest.raises(ReflexError, match="nan as the logit"),
    ):
        next(engine.generate([5, 6, 7], max_tokens=1))
    executor, _, _ = opened(name, file=tmp_path / "broken.gguf")
    for prompt in ([5], [5, 6, 7, 8, 9]):
        executor.reset()
        executor.reserve(16)
        executor.forward(Step.text(prompt, 0, [len(prompt) - 1]))
        answer = executor.decode(Sampler(Sampling(), executor.plan.n_vocab, prompt))
        with pytest.raises(ReflexError, match="nan as the logit of token 0"):
            next(answer)
        answer.close()


@pytest.mark.parametrize("name", ["qwen35moe", "deepseek3"])
def test_routers_are_not_tipped(opened, monkeypatch, name: str) -> None:
    """Products as tensor cores compute them: within the bound with what feeds a router exact, and not without."""
    monkeypatch.setattr(linear, "linear", emulator.half_linear)
    monkeypatch.setattr(experts, "expert_linear", emulator.half_experts)
    errors = []
    for before_routers in (families.before_routers, lambda plan: frozenset()):
        monkeypatch.setattr(families, "before_routers", before_routers)
        executor, _, reference = opened(name)
        executor.reserve(48)
        executor.forward(Step.text(reference["ids"].tolist(), 0, range(48)))
        errors.append(relative_error(executor.logits(), reference["logits"]))
    assert errors[0] <= BOUND < errors[1]


@pytest.mark.parametrize(
    ("name", "absorbed"), [(name, families.ABSORBED) for name in ["qwen2", *OTHERS]] + [("deepseek3", 1)]
)
def test_a_tree_on_the_references_inputs(opened, monkeypatch: pytest.MonkeyPatch, name: str, absorbed: int) -> None:
    monkeypatch.setattr(families, "ABSORBED", absorbed)
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
    assert [len(row) for row in got.logprobs] == [3, 1, 2, 1]
    for row, wants, found, logsumexp in zip(executor.logits().astype(np.float64), targets, *got, strict=True):
        expected = row.max() + np.log(np.exp(row - row.max()).sum())
        assert abs(logsumexp - expected) <= 1e-5
        assert np.abs(np.subtract(found, row[wants] - expected)).max() <= 1e-5
    for a, b in zip([*got.logprobs, got.logsumexps], [*wanted.logprobs, wanted.logsumexps], strict=True):
        assert np.abs(np.subtract(a, b)).max() < 5e-3
    assert executor.n_past == 3
    # Another tree of nearly that size takes the same launches, to its own answers.
    assert len(executor._kept.shapes) <= 1
    shorter = Step([9, 10, 12], [3, 4, 3], [PARENT_STATE, 0, PARENT_STATE], [1, 2], 0)
    found = executor.score(shorter, [[1], [2]])
    for a, b in zip(found, reference.score(shorter, [[1], [2]]), strict=True):
        assert np.ravel(a) == pytest.approx(np.ravel(b), abs=5e-3)
    assert len(executor._kept.shapes) == 1 and executor.n_past == 3
    # Once they are known as one graph: the same bits.
    for _ in range(3):
        assert executor.score(shorter, [[1], [2]]) == found
    assert len(executor._kept.step_graphs) == 1
    for each in (executor, reference):
        each.forward(Step.text([20], 3, [0]))
    assert np.linalg.norm(executor.logits() - reference.logits()) <= BOUND * np.linalg.norm(reference.logits())


@pytest.mark.parametrize(
    "step",
    [Step.text([5], 0, [0]), Step.text([5, 6, 7], 0, [2]), Step([5, 6, 7, 9], [0, 1, 2, 2], [-1, 0, 1, 1], [1, 2], 2)],
    ids=["one token", "text", "tree"],
)
@pytest.mark.parametrize("name", ["qwen2", "qwen3moe", "qwen35", "deepseek3"])
def test_a_first_decision_is_the_references(opened, name: str, step: Step) -> None:
    """While weights are on their way it runs as it is; the one behind it in a shape that others have, too."""
    executor, gguf, fixture = opened(name)
    reference = ReferenceExecutor(gguf, executor.plan, 256)
    targets = [[9, 12, 13], [10]][: len(step.rows)]
    for each in (executor, reference):
        each.reserve(8)
    wanted = reference.score(step, targets)
    deviation = BOUND * np.sqrt(np.square(fixture["logits"].astype(np.float64)).mean())
    for _ in range(2):
        executor.reset()
        got = executor.score(step, targets)
        assert executor.n_past == step.n_keep and executor.logits().shape == (len(step.rows), executor.plan.n_vocab)
        for a, b in zip([*got.logprobs, got.logsumexps], [*wanted.logprobs, wanted.logsumexps], strict=True):
            assert np.abs(np.subtract(a, b)).max() <= 4 * deviation  # as of a long step's scores
    assert [key[0] for key in executor._kept.shapes] == [8]


@pytest.mark.parametrize("name", ["qwen2", "qwen35", "deepseek3"])
def test_a_neutral_context_of_several_tokens(opened, name: str) -> None:
    """A second root that is a line of its own, below which the candidates stand again."""
    executor, gguf, _ = opened(name)
    reference = ReferenceExecutor(gguf, executor.plan, 256)
    tails = [healing.Tail(str(i), ids, 1) for i, ids in enumerate([(9, 10, 11), (9, 12), (13,)])]
    split = healing.Split([5, 6, 7], tails, 0, [3, 4, 8, 14])
    for each in (executor, reference):
        each.reserve(64)
    got, wanted = (
        scoring.Scoring(each, split, scoring.Options("pmi")).run().candidates for each in (executor, reference)
    )
    for a, b in zip(got, wanted, strict=True):
        assert np.abs(np.subtract(a.token_logprobs, b.token_logprobs)).max() < 5e-3
        assert np.abs(np.subtract(a.token_logsumexps, b.token_logsumexps)).max() < 5e-3
        assert a.neutral_logprob == pytest.approx(b.neutral_logprob, abs=5e-3 * a.n_tokens)


@pytest.mark.parametrize("name", ["qwen2", "qwen35", "deepseek3"])
def test_a_long_steps_scores(opened, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Logits of a few rows at a time, launches a layer at a time, branches that begin tiles away from each other."""
    monkeypatch.setattr(cuda, "HEAD_ROWS", 7)
    monkeypatch.setattr(cuda, "LONG_STEP", 4)
    executor, gguf, fixture = opened(name)
    reference = ReferenceExecutor(gguf, executor.plan, 1024)
    reference.reserve(64)
    for each in (executor, reference):
        each.forward(Step.text(range(5, 25), 0, []))
    # 3 tokens more of the text, below them branches of 5, whose last grow another from their middle; then two roots.
    parents, tokens = [-1, 0, 1], [1, 2, 3]
    for branch in range(48):
        at = len(parents)
        parents += [2 if branch % 3 else PARENT_NONE if branch > 40 else 2, at, at + 1, at + 2, at + 3, at + 1]
        tokens += [7 * branch + i for i in range(6)]
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0 if parent == PARENT_NONE else 20)
    rows = list(range(2, len(tokens), 3))
    step = Step(tokens, depths, parents, rows, 3)
    targets = [[row, row + 1] for row in rows]
    asked = []
    got = executor.score(step, targets, lambda: asked.append(1))  # type: ignore[arg-type, func-returns-value]
    assert len(asked) > executor.plan.n_layer + len(rows) // 7
    # The bound of logits, as in tests/gpu/test_model.py.
    deviation = BOUND * np.sqrt(np.square(fixture["logits"].astype(np.float64)).mean())
    wanted = reference.score(step, targets)
    errors = np.subtract(got.logprobs, wanted.logprobs)
    assert np.sqrt(np.square(errors).mean()) <= np.sqrt(2) * deviation and np.abs(errors).max() <= 4 * deviation
    assert np.abs(np.subtract(got.logsumexps, wanted.logsumexps)).max() <= 4 * deviation
    for each in (executor, reference):
        each.forward(Step.text([20], 23, [0]))
    assert np.linalg.norm(executor.logits() - reference.logits()) <= BOUND * np.linalg.norm(reference.logits())


@pytest.mark.parametrize("name", ["qwen2", "qwen35", "deepseek3"])
def test_steps_behind_one_that_memory_did_not_hold(opened, name: str) -> None:
    """A text and a tree that are too large: the sequence is as it was, and goes on as if they had not been."""
    executor, _, reference = opened(name)
    ids = reference["ids"].tolist()
    tree = Step([9, 10, 12], [20, 21, 21], [PARENT_STATE, 0, 0], [1, 2], 0)
    executor.reserve(len(ids))
    executor.forward(Step.text(ids[:20], 0, range(20)))
    wanted = executor.score(tree, [[1], [2]])
    allocate = executor._device.cu.cuMemAlloc_v2
    large = Step([1] * 600, [20] * 600, [PARENT_STATE] * 600, range(600), 0)
    for step in (large, Step.text([1] * 200, 20, range(200))):
        executor._device.cu.cuMemAlloc_v2 = lambda at, size: 2
        with pytest.raises(OutOfMemoryError, match="for working space"):
            executor.forward(step)
        with pytest.raises(ReflexError, match="no logits"):
            next(executor.decode(Sampler(Sampling(), executor.plan.n_vocab, ids)))
        executor._device.cu.cuMemAlloc_v2 = allocate
        for _ in range(3):
            assert executor.score(tree, [[1], [2]]) == wanted
    executor.forward(Step.text(ids[20:], 20, range(28)))
    assert relative_error(executor.logits(), reference["logits"][20:]) <= BOUND


@pytest.mark.parametrize("name", ["qwen35", "deepseek3"])
def test_a_decisions_graph_goes_with_its_buffers(opened, name: str) -> None:
    """Known as a graph, then larger steps that make other buffers of one kind each: the same bits every time."""
    executor, _, reference = opened(name)
    ids = reference["ids"].tolist()
    executor.reserve(len(ids))
    executor.forward(Step.text(ids[:20], 0, []))
    decision = Step([9, 10, 12], [20, 21, 21], [PARENT_STATE, 0, 0], [1, 2], 0)

    def decide() -> ScoredRows:
        executor.forward(Step([9], [20], [PARENT_STATE], [], 0))  # other values, in the same places
        return executor.score(decision, [[1], [2]])

    wanted = decide()
    sizes = [(300, []), (20, range(20))]  # all buffers; logits
    if name == "qwen35":
        sizes.insert(0, (30, []))  # states of a tree
    for n, rows in sizes:
        for _ in range(3):
            assert decide() == wanted
        assert len(executor._kept.step_graphs) == 1
        before = dict(executor._buffers._rooms), executor._buffers._working
        executor.forward(Step([1] * n, [20] * n, [PARENT_STATE] * n, rows, 0))
        assert (dict(executor._buffers._rooms), executor._buffers._working) != before
        assert not executor._kept.step_graphs
    for _ in range(3):
        assert decide() == wanted
    (graph,) = executor._kept.step_graphs.values()
    executor._buffers.hold_scores(1 << 20)
    assert decide() == wanted and executor._kept.step_graphs and not graph.is_closed


def test_a_prompt_that_comes_again_keeps_its_launches(opened) -> None:
    """The first of a length passes through launches of others; all of it the same bits."""
    executor, _, _ = opened("qwen35")

    def logits(n: int) -> bytes:
        executor.reset()
        executor.forward(Step.text([7 * i % 50 + 3 for i in range(n)], 0, [n - 1]))
        return bytes(executor.logits())

    wanted = {n: logits(n) for n in (12, 13)}  # of which the first came with the weights
    executor._forget()
    for kept in ([], [13], [12, 13], [12, 13]):
        for n in (13, 12):
            assert logits(n) == wanted[n]
            if n == 13:
                assert sorted(key[0] for key, launches in executor._kept.shapes.items() if launches) == kept


def test_a_decision_that_comes_again_keeps_its_graph(opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts and answers of other lengths in between, and fewer other decisions than there is room for."""
    monkeypatch.setattr("reflex_ipc.cuda.graph.SHAPES", 3)
    executor, _, _ = opened("qwen2")

    def decision(n: int) -> Step:
        return Step([9] * n, [0] * n, [PARENT_NONE] * n, [0], 0)

    def decide(n: int) -> ScoredRows:
        return executor.score(decision(n), [[1]])

    wanted = [decide(8 * n) for n in range(1, 6)]
    assert len(executor._kept.shapes) == 3
    assert decide(8) == wanted[0] == decide(8)
    (graph,) = executor._kept.step_graphs.values()
    for n in range(2, 12):
        executor.forward(Step.text([5] * n, 0, [n - 1]))
        executor.reset()
        if n % 2:
            assert decide(8) == wanted[0]
    assert len(executor._kept.shapes) == 3
    for n in (2, 3, 4, 5):
        for _ in range(2):
            assert decide(8 * n) == wanted[n - 1]
        assert decide(8) == wanted[0] and executor._kept.step_graphs[8, 8, True, 0, 0] is graph
        assert len(executor._kept.step_graphs) == min(n, 3)
    for n in (3, 4, 5):
        decide(8 * n), decide(8 * n)
    assert graph.is_closed and decide(8) == wanted[0] == decide(8) == decide(8)


@pytest.mark.parametrize("name", ["qwen3", "qwen35", "deepseek3"])
def test_a_decision_that_is_taken_back_leaves_nothing(opened, name: str) -> None:
    """One whose graph is already under way when it is asked for; the next answers as if there had been none."""
    executor, _, _ = opened(name)

    def decide(token: int, verdict: str | None = None) -> ScoredRows:
        executor.reset()
        step = Step([token, 5, 6, 7], [0, 1, 2, 2], [-1, 0, 1, 1], [1, 2, 3], 2)
        return executor.score(step, [[1], [2], [3]], lambda: verdict)

    wanted = [decide(token) for token in (9, 10, 11)][-1]
    assert executor._kept.step_graphs and wanted != decide(10)
    for verdict, error in (("cancelled", CancelledError), ("deadline", DeadlineError)):
        with pytest.raises(error):
            decide(12, verdict)
        assert executor.n_past == 0
        assert decide(11) == wanted


@pytest.mark.parametrize("n_granted", [0, 1])
def test_an_answer_behind_one_that_memory_did_not_hold(opened, monkeypatch: pytest.MonkeyPatch, n_granted: int) -> None:
    """Room for penalties and for adjusted logits: the first time one of the two is refused."""
    executor, _, reference = opened("qwen3-untied")
    prompt, settings = reference["ids"][:8].tolist(), Sampling(logit_bias={5: 10.0}, repeat_penalty=1.3)
    executor.forward(Step.text(prompt, 0, [7]))
    wanted = Sampler(settings, executor.plan.n_vocab, prompt).sample(executor.logits()[0])
    allocate, left = executor._device.cu.cuMemAlloc_v2, n_granted

    def granted(at, size) -> int:
        nonlocal left
        left -= 1
        return allocate(at, size) if left >= 0 else 2

    with monkeypatch.context() as patch:
        patch.setattr(executor._device.cu, "cuMemAlloc_v2", granted)
        with pytest.raises(OutOfMemoryError, match=("penalties", "adjusted logits")[n_granted]):
            next(executor.decode(Sampler(settings, executor.plan.n_vocab, prompt)))
    answer = executor.decode(Sampler(settings, executor.plan.n_vocab, prompt))
    assert next(answer).id == wanted.id
    answer.close()
