"""From plan to launches without a device: what is fused, where values lie, and what the executor asks of the driver.

The driver is the fake one, which checks handles, parameter sizes, the bounds of every copy, and what is given back.
"""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
from fakecuda import Fake, fail_each_call

from reflex_ipc import archs
from reflex_ipc.cuda import families, latent, launch
from reflex_ipc.cuda.device import start_driver
from reflex_ipc.cuda.executor import CudaExecutor
from reflex_ipc.cuda.experts import expert_linear
from reflex_ipc.cuda.fuse import alone, fused
from reflex_ipc.cuda.lower import Lowering
from reflex_ipc.cuda.places import PAGE, Columns, Places, Shape
from reflex_ipc.cuda.products import Experts, Input, Limits, Matrix
from reflex_ipc.cuda.room import HEAD_ROWS, Room, largest_step, tree_bytes, working_space
from reflex_ipc.cuda.steps import mask_of
from reflex_ipc.cuda.weights import Weights
from reflex_ipc.errors import CancelledError, DeadlineError, OutOfMemoryError, ReflexError, UnsupportedModelError
from reflex_ipc.gguf import GGUF
from reflex_ipc.ops import LatentAttention, Op, Value, inputs, scope
from reflex_ipc.plan import PARENT_NONE, Step
from reflex_ipc.sampler import Sampler, Sampling

pytest_plugins = ["fakecuda.fixtures"]

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3-untied", "qwen3moe", "qwen35", "qwen35moe", "qwen3next"]
FAMILIES += ["deepseek2-lite", "deepseek3"]
KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"

needs_kernels = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")


def plan_of(fixtures: Path, name: str):
    with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
        return archs.build(gguf)


# Plans


@pytest.mark.parametrize("how", [alone, fused])
@pytest.mark.parametrize("name", FAMILIES)
def test_groups_compute_every_op_once_and_before_it_is_read(fixtures: Path, name: str, how) -> None:
    plan = plan_of(fixtures, name)
    groups = how(plan)
    assert sorted(op.name for group in groups for op in group.parts) == sorted(op.name for op in plan.ops)
    known: set[str] = set()
    for group in groups:
        assert {value.name for value in group.inputs} <= known
        inside = set(known)
        for op in group.parts:
            assert {value.name for value in inputs(op)} <= inside
            inside.add(op.out.name)
        known.update(value.name for value in group.outputs)
    assert plan.logits.name in known


def test_a_dense_layer_is_five_groups(fixtures: Path) -> None:
    groups = [group for group in fused(plan_of(fixtures, "qwen3")) if group.name.startswith("blk.1.")]
    assert [group.kind for group in groups] == ["linears", "attention", "linear_add", "swiglu", "linear_add"]
    assert [len(group.parts) for group in groups] == [4, 5, 2, 4, 2]


@pytest.mark.parametrize("how", [alone, fused])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_that_live_at_once_lie_apart(fixtures: Path, name: str, how) -> None:
    plan = plan_of(fixtures, name)
    groups = how(plan)
    columns = Columns(groups, plan.logits.name)
    last_read = {value.name: i for i, group in enumerate(groups) for value in group.inputs}
    last_read[plan.logits.name] = len(groups)
    alive: list[tuple[bool, int, int, str]] = []
    for i, group in enumerate(groups):
        for value in group.outputs:
            start, stop = columns.start[value.name], columns.start[value.name] + value.width
            assert start % 64 == 0
            assert stop <= (columns.selected_width if value.selected else columns.width)
            for selected, other, end, who in alive:
                assert selected != value.selected or stop <= other or start >= end, (value.name, who)
            alive.append((value.selected, start, stop, value.name))
        alive = [room for room in alive if last_read.get(room[3], i) > i]
    assert columns.width <= 3 * plan.peak_width() + 64 * 20


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_lie_as_in_the_file(fixtures: Path, name: str) -> None:
    with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
        plan = archs.build(gguf)
        weights = Weights(gguf, plan)
    rooms = sorted((weights.place[t.name], t.nbytes) for t in plan.weights.values())
    assert all(at + size <= after for (at, size), (after, _) in pairwise(rooms))
    assert [at for at, _ in rooms] == sorted(t.offset for t in plan.weights.values())
    assert weights.start <= rooms[0][0] < weights.start + 256 and rooms[-1][0] + rooms[-1][1] == weights.stop
    assert weights.size == weights.stop - weights.start
    assert all((at - weights.start) % gguf.alignment == 0 for at, _ in rooms)
    order = [weights.group[name] for name in plan.weights]
    assert order == sorted(order)
    assert [index for index, _ in weights.groups] == list(range(order[-1] + 1))


def test_a_tree_becomes_bits() -> None:
    step = Step([0] * 5, [0] * 5, [-1, 0, 0, PARENT_NONE, 3], [], 1)
    words = memoryview(mask_of(step)).cast("I").tolist()
    assert words == [1, 0b1, 1, 0b11, 1, 0b101, 0, 0b1000, 0, 0b11000]


def test_what_has_no_kernel_is_refused_by_name(fixtures: Path) -> None:
    plan = plan_of(fixtures, "qwen3")
    attention = next(op for op in plan.ops if type(op).__name__ == "Attention")
    odd = attention._replace(k=attention.k._replace(width=12 * attention.n_head_kv))
    ops = tuple(odd if op is attention else op for op in plan.ops)
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.attn has keys of 12 numbers"):
        families.check(plan._replace(ops=ops))
    tensor = plan.weights["blk.0.attn_norm.weight"]
    other = plan.weights["blk.0.attn_q.weight"].type
    weights = {**plan.weights, tensor.name: tensor._replace(type=other)}
    with pytest.raises(UnsupportedModelError, match=r"tensor blk\.0\.attn_norm\.weight is F16"):
        families.check(plan._replace(weights=weights))


def test_every_module_has_the_launches_that_are_said_to_be_there() -> None:
    """And every op of `ops` is said to be somewhere."""
    for module in set(families.MODULES.values()):
        said = {of for of, where in families.MODULES.items() if where == module}
        assert import_module(f"reflex_ipc.cuda.{module}").METHODS.keys() == said
    assert set(get_args(Op)) == {of for of in families.MODULES if isinstance(of, type)}


# The executor


@pytest.fixture
def model(fixtures: Path):
    with GGUF.open(fixtures / "exact" / "qwen3-f16.gguf") as gguf:
        yield gguf, archs.build(gguf)


def opened(fake: Fake, model, **options) -> CudaExecutor:
    gguf, plan = model
    return CudaExecutor(gguf, plan, plan.n_ctx_train, opening=start_driver(0, fake.path), **options)


@pytest.fixture
def kernels(fake: Fake, monkeypatch) -> None:
    fake.c.fake_kernels(str(KERNELS).encode())
    monkeypatch.setattr("reflex_ipc.cuda.upload.usable_cpus", lambda: 4)  # the ring, whatever the machine


def use(executor: CudaExecutor) -> None:
    """Every kind of step."""
    executor.reserve(100)
    executor.forward(Step.text(range(40), 0, [39]))
    executor.forward(Step.text([1], 40, [0]))
    executor.forward(Step([1, 2, 3], [41, 42, 42], [-1, 0, 0], [1, 2], 1))
    executor.forward(Step.text(range(70), 42, range(70)))
    executor.logits()


@needs_kernels
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "alone"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_step_keeps_to_the_drivers_rules(fake: Fake, kernels, fixtures: Path, name: str, fuse: bool) -> None:
    fake.set(deferred=1)
    with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
        executor = opened(fake, (gguf, archs.build(gguf)), fuse=fuse)
        use(executor)
        assert executor.n_past == 112
        executor.close()
    launched = {line.split()[1] for line in fake.log if line.startswith("cuLaunchKernelEx")}
    assert {"attention_prefill_64", "attention_latent_1"} & launched


@needs_kernels
def test_a_known_shape_allocates_nothing(fake: Fake, kernels, model) -> None:
    executor = opened(fake, model)
    use(executor)
    executor.reset()
    before = len(fake.log)
    use(executor)
    names = {line.split()[0] for line in fake.log[before:]}
    executor.close()
    assert names <= {"cuLaunchKernelEx", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"}


@needs_kernels
def test_no_graph_is_made_before_the_first_token(fake: Fake, kernels, model) -> None:
    executor = opened(fake, model)
    executor.reserve(16)
    executor.forward(Step.text(range(5), 0, [4]))
    with pytest.raises(ReflexError, match="nan"):  # the fake computes nothing
        next(executor.decode(Sampler(Sampling(), executor.plan.n_vocab, range(5))))
    names = {line.split()[0] for line in fake.log}
    executor.close()
    assert "cuMemcpyDtoHAsync_v2" in names and not [name for name in names if "Graph" in name or "Capture" in name]


def decisions(executor: CudaExecutor, n: int = 1) -> None:
    """Each of 30 fresh tokens and three candidates of two, of which one begins like another."""
    tree = Step([1] * 32, [*range(30), 30, 30], [*range(-1, 29), 29, 29], [29, 30, 31], 30)
    for _ in range(n):
        executor.reset()
        assert list(map(len, executor.score(tree, [[1, 2], [3], [4, 5]]).logprobs)) == [2, 1, 2]


@needs_kernels
@pytest.mark.parametrize("name", ["qwen3", "qwen35", "deepseek3"])
def test_a_decision_that_comes_again_asks_little_of_the_driver(fake: Fake, kernels, fixtures: Path, name: str) -> None:
    """Before the pass one copy of all that it takes, and one call where states begin anew; behind it a copy of the
    targets, whose log-probabilities and the sums of rows are no copy. Ancestors of a tree too large for that lie
    apart."""
    with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
        executor = opened(fake, (gguf, archs.build(gguf)))
        decisions(executor, 5)
        before = len(fake.log)
        decisions(executor)
        calls = [line.split()[:2] for line in fake.log[before:]]
        names = [call[0] if call[0] != "cuLaunchKernelEx" else call[1] for call in calls]
        assert names == [
            *["cuMemsetD8Async"] * (name == "qwen35"),
            *("cuMemcpyHtoDAsync_v2", "cuGraphLaunch"),
            *("cuMemcpyHtoDAsync_v2", "score_parts", "score_rows", "cuStreamSynchronize"),
        ]
        executor.score(*big_tree(65))
        small, large = executor._places.ancestors, executor._places.parents
        decisions(executor)
        assert large != small == executor._places.parents
        executor.close()


def calls_of(fake: Fake, model, step: Callable[[CudaExecutor], object]) -> list[str]:
    """What an executor's first step asks of the driver, kernels by name, when all weights are queued."""
    executor = opened(fake, model)
    executor.reserve(16)
    executor._upload.join()  # whose threads ask for things, too
    before = len(fake.log)
    step(executor)
    calls = [line.split()[:2] for line in fake.log[before:]]
    executor.close()
    return [call[0] if call[0] != "cuLaunchKernelEx" else call[1] for call in calls]


@needs_kernels
@pytest.mark.parametrize("name", FAMILIES)
def test_a_first_decision_asks_for_what_its_prompt_does(fake: Fake, kernels, fixtures: Path, name: str) -> None:
    """Its own kernels are loaded before anything waits for weights, and it takes no memory of its own."""
    step = Step.text(range(5), 0, [4])
    with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
        model = gguf, archs.build(gguf)
        prompt = calls_of(fake, model, lambda executor: executor.forward(step))
        decision = calls_of(fake, model, lambda executor: executor.score(step, [[1, 2, 3]]))
    at = decision.index(prompt[0])
    assert set(decision[:at]) == {"cuModuleLoadDataEx", "cuModuleGetFunction", "cuFuncGetParamInfo"}
    assert decision[at : at + len(prompt)] == prompt
    assert decision[at + len(prompt) :] == [
        *("cuMemcpyHtoDAsync_v2", "score_parts", "score_rows", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize")
    ]


@needs_kernels
@pytest.mark.parametrize("name", FAMILIES)
def test_a_first_decision_of_a_few_candidates_takes_no_memory(fake: Fake, kernels, fixtures: Path, name: str) -> None:
    """But for the states behind a tree's tokens, where a family has any."""
    tree = Step([1] * 8, [*range(5), 5, 6, 5], [*range(-1, 4), 4, 5, 4], [4, 5, 6, 7], 5)
    with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
        calls = calls_of(
            fake, (gguf, archs.build(gguf)), lambda executor: executor.score(tree, [[1, 2], [3], [4], [5]])
        )
    assert calls.count("cuMemAlloc_v2") == (name in ("qwen35", "qwen35moe", "qwen3next"))
    assert not [call for call in calls if call.startswith(("cuMemFree", "cuMemHost", "cuMemCreate"))]


@needs_kernels
def test_a_first_decision_of_a_session_is_one_that_comes_again(fake: Fake, kernels, model) -> None:
    """Whoever asks for progress has all weights before the first step, which then waits for none."""
    gguf, plan = model
    executor = CudaExecutor(gguf, plan, 64, progress=lambda *_: None, opening=start_driver(0, fake.path))
    before = len(fake.log)
    decisions(executor)
    assert not any(line.startswith("cuStreamWaitEvent") for line in fake.log[before:])
    assert list(executor._kept.shapes) == [(32, 8, True, 0, 0)]
    executor.close()


@needs_kernels
def test_decisions_do_without_page_locked_memory(fake: Fake, kernels, model) -> None:
    executor = opened(fake, model)
    fake.fail("cuMemHostAlloc", n=1, code=2)
    decisions(executor, 5)
    before = len(fake.log)
    decisions(executor)
    names = [line.split()[0] for line in fake.log[before:]]
    executor.close()
    assert "cuMemHostAlloc" not in names and names[-2:] == ["cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"]


@needs_kernels
def test_every_driver_call_of_decisions_failing_in_turn_is_a_typed_error(fake: Fake, kernels, model) -> None:
    fail_each_call(fake, lambda: opened(fake, model), lambda executor: decisions(executor, 5))


@needs_kernels
def test_layers_wait_for_their_weights_in_order(fake: Fake, kernels, model) -> None:
    executor = opened(fake, model)
    executor.reserve(8)
    executor._upload.join()  # whose threads wait for events, too
    before = len(fake.log)
    executor.forward(Step.text(range(5), 0, [4]))
    log = [line.split() for line in fake.log[before:]]
    executor.close()
    waits = [i for i, line in enumerate(log) if line[0] == "cuStreamWaitEvent"]
    launches = [i for i, line in enumerate(log) if line[0] == "cuLaunchKernelEx"]
    # The embedding, every layer, the last norm with the tied output: there are launches behind each.
    runs = sum(any(a < i < b for i in launches) for a, b in zip(waits, [*waits[1:], len(log)], strict=True))
    assert runs == executor.plan.n_layer + 2
    assert waits[-1] > launches[len(launches) // 2]


@needs_kernels
def test_a_step_is_ended_where_it_waits_for_weights(fake: Fake, kernels, model) -> None:
    """The first one, at any of the groups it waits for; the next is whole. Later ones are asked about once."""
    for last in range(1, 50):
        executor = opened(fake, model)
        asked = 0

        def poll(last: int = last) -> str | None:
            nonlocal asked
            asked += 1
            return "cancelled" if asked == last else None

        executor.reserve(16)
        try:
            executor.forward(Step.text(range(5), 0, [4]), poll)
        except CancelledError:
            assert executor.n_past == 0 and not executor._lowering.is_passing
            executor.forward(Step.text(range(5), 0, [4]))
            assert executor.n_past == 5
            executor.close()
        else:
            break
    assert last == asked + 1 == executor.plan.n_layer + 4  # before it, the embedding, the layers, the rest
    asked = 0
    executor.forward(Step.text(range(5), 5, [4]), poll)
    executor.forward(Step.text(range(5), 10, [4]), poll)
    assert asked == 2
    with pytest.raises(CancelledError):
        executor.score(Step.text([1], 15, [0]), [[1]], lambda: "cancelled")
    assert executor.n_past == 0 and executor.logits().shape == (0, executor.plan.n_vocab)
    executor.close()


def big_tree(n: int) -> tuple[Step, list[list[int]]]:
    """Branches of 8 tokens below a context of 16, `n` in all, of which every one wants a log-probability."""
    parents = [*range(-1, 15), *(15 if i % 8 == 0 else 15 + i for i in range(n - 16))]
    positions = [*range(16), *(16 + i % 8 for i in range(n - 16))]
    return Step([1] * n, positions, parents, range(15, n), 16), [[2]] * (n - 15)


@needs_kernels
@pytest.mark.parametrize("name", FAMILIES)
def test_a_tree_is_one_step_where_memory_holds_it(fake: Fake, kernels, fixtures: Path, name: str) -> None:
    """32k tokens: launches within the driver's limits, in no more memory than `step_limit` thought. With memory for a
    part of it, a step of that size fits."""
    n = 33000
    with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
        fake.set(memory=1 << 35)
        executor = opened(fake, (gguf, archs.build(gguf)))
        device = executor._device
        assert device is not None and executor.step_limit(0, n) == n
        assert executor.step_limit(0, 1 << 20) == largest_step(executor._lowering) >= n
        before, _ = device.memory()
        step, targets = big_tree(n)
        scores = executor.score(step, targets)
        assert list(map(len, scores.logprobs)) == [1] * len(targets) == [1] * len(scores.logsumexps)
        assert executor.n_past == 16
        after, _ = device.memory()
        need = tree_bytes(executor._lowering, 0, 0, n)
        assert before - after <= need + (8 << 20)  # cache by granules, the targets
        rows = [line for line in fake.log if line.startswith("cuLaunchKernelEx score_rows")]
        assert len(rows) == -(-len(targets) // HEAD_ROWS)
        assert sum(line.startswith("cuLaunchKernelEx rope_table") for line in fake.log) == 1
        executor.close()
        fake.reset()
        fake.set(memory=(1 << 35) - before + need // 2)
        executor = opened(fake, (gguf, archs.build(gguf)))
        limit = executor.step_limit(0, n)
        assert n // 6 < limit < n
        executor.score(*big_tree(limit))
        assert executor.step_limit(16, n) <= limit + limit // 8  # what a step gave back counts as free
        executor.close()


@pytest.mark.parametrize("kib", [64, 99, 163, 227])
@pytest.mark.parametrize("n_head", [60, 64, 65, 128])
def test_the_largest_step_has_as_many_tiles_as_a_grid(fixtures: Path, n_head: int, kib: int) -> None:
    """Heads with a matrix of their own, fewer and more than a tile has slots, in the shared memory of every
    architecture."""
    plan, limits = plan_of(fixtures, "deepseek3"), Limits(132, kib << 10)
    wide = Value("attn_q", n_head * 264)  # keys that there are no kernels to expand for
    ops = [op._replace(n_head=n_head, q=wide) if isinstance(op, LatentAttention) else op for op in plan.ops]
    n = largest_step(SimpleNamespace(plan=plan._replace(ops=tuple(ops)), limits=limits))  # type: ignore[arg-type]
    heads, matrix = Experts(0, 0, n_head, 0, n_head), Matrix("Q4_K", 0, 128, 0, 128)

    def most(n: int) -> int:
        calls = expert_linear(limits, Input(0, n, 512, n_head * 512), [matrix], heads, per_expert=True)
        return max(max(call.grid[1:]) for call in calls)

    assert n >= 7000 and most(n) <= 65535 < most(n * 11 // 10)


@pytest.mark.parametrize("n_head", [16, 128])
@pytest.mark.parametrize("is_legacy", [False, True])
def test_what_latents_are_expanded_to_has_bounded_room(fixtures: Path, n_head: int, is_legacy: bool) -> None:
    """DeepSeek-V2-Lite and V3: less than 256 MiB, or one head; and enough where positions are fewer."""
    plan = plan_of(fixtures, "deepseek3")
    op = next(op for op in plan.ops if isinstance(op, LatentAttention))
    weights = dict(plan.weights)
    for name, ne in zip(op.weights, [(128, 512, n_head), (512, 128, n_head)], strict=True):
        n_bytes = 2 * math.prod(ne)
        weights[name] = weights[name]._replace(ne=ne, nbytes=n_bytes)
    names = op.weights
    if is_legacy:
        names = names[:1]
        weights[names[0]] = weights[names[0]]._replace(ne=(512, n_head * 256), nbytes=2 * 512 * n_head * 256)
    q, row, out = (Value("", width) for width in (n_head * 192, 576, n_head * 128))
    op = op._replace(q=q, latent=row, out=out, weights=names, n_head=n_head, rank=512)
    plan = plan._replace(ops=(op,), weights=weights)
    low = Recorder(plan)
    for log2 in range(10, 19):
        n_expanded = latent.n_expanded((1 << log2) - 5)
        assert n_expanded == 1 << log2
        size = families.scratch_bytes(plan, 4096, n_expanded)
        one = n_expanded * (4 * (192 + 128) + 4 * 2 * 2) + (1 << 20)
        assert size <= max(latent.EXPANDED, one)
        columns = Columns(alone(plan), out.name)
        spaces = [working_space(plan, columns, n, n_expanded) - 4 * n * columns.width for n in (64, 65, 4096)]
        assert spaces[1] >= size + spaces[0] and spaces[2] >= size + spaces[0]
        for smaller in (1024, n_expanded // 2, n_expanded):
            low.launched.clear()
            list(latent.latent_attention(low, op, Shape(512, 1, n_expanded=smaller)))  # type: ignore[arg-type]
            heads = [grid[1] for name, grid in low.launched if name == "attention_prefill_exact"]
            assert sum(heads) == n_head and max(heads) - min(heads) < len(heads)
            turn = max(heads) * smaller * 4 * (192 + 128)
            assert turn < (size if max(heads) == 1 else min(size, latent.EXPANDED))
    assert low.n_expanded(64, 1 << 14) == 0 and low.n_expanded(65, 1 << 14) == 1 << 14
    wide = op._replace(q=Value("", n_head * 264))  # keys that there are no kernels to expand for
    assert Recorder(plan._replace(ops=(wide,))).n_expanded(65, 1 << 14) == 0
    assert Recorder(plan._replace(ops=(wide, op))).n_expanded(65, 1 << 14) == 1 << 14


class Recorder(Lowering):
    """Says what would be launched."""

    def __init__(self, plan) -> None:
        device = SimpleNamespace(attribute=lambda _: 132, MULTIPROCESSORS=0, SHARED_PER_BLOCK=0, capability=(9, 0))
        kernels = SimpleNamespace(is_ptx=False, target="sm_80")
        super().__init__(device, kernels, None, plan, [], None, Places(), lambda name: 0)  # type: ignore[arg-type]
        self.limits = Limits(132, 227 << 10)
        self.launched: list = []

    def at(self, value: Value) -> int:
        return 0

    def launch(self, name, grid, *_):
        self.launched.append((name, grid))


@needs_kernels
@pytest.mark.parametrize("fuse", [True, False], ids=["fused", "alone"])
@pytest.mark.parametrize("name", FAMILIES)
def test_counters_of_decoding_do_not_reach_what_is_zero(
    fake: Fake, kernels, fixtures: Path, monkeypatch: pytest.MonkeyPatch, name: str, fuse: bool
) -> None:
    """A counter a block of the grid but for those that share its positions, whatever n_splits goes by."""
    monkeypatch.setattr(Lowering, "_least_blocks", lambda self: 1)
    counters = []

    def launch(self: Lowering, name: str, grid: tuple[int, int, int], *_) -> None:
        if "attention_decode" in name:
            counters.append(grid[1] * grid[2])
        elif "attention_latent" in name:
            counters.append(grid[0])

    with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
        executor = opened(fake, (gguf, archs.build(gguf)), fuse=fuse)
        monkeypatch.setattr(Lowering, "launch", launch)
        n_splits = executor._lowering.n_splits(1 << 16)
        for _, launches in executor._lowering.launches(Shape(1, 1, False, n_splits)):
            list(launches)
        assert n_splits > 8 and counters
        assert executor._places.tickets + 4 * max(counters) <= executor._places.zero
        executor.close()


@needs_kernels
@pytest.mark.parametrize("n_reserved", [3000, 0])
def test_a_text_that_grows_is_expanded_in_room_that_grows(
    fake: Fake, kernels, fixtures: Path, monkeypatch: pytest.MonkeyPatch, n_reserved: int
) -> None:
    """Steps of 300 tokens: at once for all positions that are reserved; for others when they pass a power of two, and
    counted before. Buffers become others only where more scratch is needed: here up to 2,048 positions."""
    with GGUF.open(fixtures / "exact" / "deepseek3-f16.gguf") as gguf:
        executor = opened(fake, (gguf, archs.build(gguf)))
        low, places = executor._lowering, executor._places
        one = Room(low, 320, 1, 1024).scratch, Room(low, 320, 1, 2048).scratch
        assert one[0] < one[1]
        monkeypatch.setattr(latent, "EXPANDED", one[1])
        assert Room(low, 320, 1, 4096).scratch == one[1]
        executor.reserve(n_reserved)
        executor.forward(Step.text(range(60), 0, []))
        assert not any(" expand " in line for line in fake.log)
        capacities, addresses = [], []
        for start in range(60, 2760, 300):
            assert executor.step_limit(start, 300) == 300
            executor.forward(Step.text(range(300), start, []))
            capacities.append(places.expanded_capacity)
            addresses.append((places.values, places.scratch))
        launched = {line.split()[1] for line in fake.log if line.startswith("cuLaunchKernelEx")}
        growing = [1024] * 3 + [2048] * 3 + [4096] * 3
        assert capacities == (growing if not n_reserved else [4096] * 9)
        assert len(set(addresses[:3])) == len(set(addresses[3:])) == 1
        assert (addresses[0] != addresses[3]) == (not n_reserved)
        assert {"halve", "expand", "attention_prefill_exact"} <= launched
        assert places.expanded_capacity == 4096
        executor.forward(Step.text(range(9), 2760, range(9)))  # other buffers, for as many as before
        assert places.expanded_capacity == 4096 and addresses[-1] != (places.values, places.scratch)
        executor.close()


def branches(n: int, n_past: int) -> Step:
    """As many branches of one token behind `n_past` others, none of which is kept."""
    return Step([1] * n, [n_past] * n, [-1] * n, range(n), 0)


@needs_kernels
@pytest.mark.parametrize("big", [Step.text([1] * 200, 20, range(200)), branches(900, 20)], ids=["text", "tree"])
@pytest.mark.parametrize("name", ["qwen3", "qwen35", "deepseek3"])
def test_memory_that_a_step_lacks_leaves_none_that_is_gone(
    fake: Fake, kernels, fixtures: Path, name: str, big: Step
) -> None:
    """From any allocation of a larger step on, there is no more memory. The sequence is as it was, and nothing that was
    freed is used by the steps behind it."""
    has_states = name == "qwen35"
    for n_granted in range(20):
        with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
            executor = opened(fake, (gguf, archs.build(gguf)))
            device, p = executor._device, executor._places
            assert device is not None
            executor.reserve(20)
            executor.forward(Step.text(range(20), 0, [19]))
            allocate, left = device.cu.cuMemAlloc_v2, n_granted

            def granted(at, size, allocate=allocate) -> int:
                nonlocal left
                left -= 1
                return allocate(at, size) if left >= 0 else 2

            device.cu.cuMemAlloc_v2 = granted
            try:
                executor.score(big, [[1] * 64] * len(big.rows))
            except OutOfMemoryError:
                assert executor.n_past == 20
            else:
                break
            finally:
                device.cu.cuMemAlloc_v2 = allocate
            for step in (Step.text([1], 20, [0]), branches(9, 21), big._replace(n_keep=0)):
                executor.score(step, [[1]] * len(step.rows))
                used = [p.control, p.rows, p.values, p.selected, p.scratch, *p.tables.values()]
                if step.n_keep == 0:
                    used += [p.parents, p.mask, *([p.branches] if has_states else [])]
                rooms = [range(m.address, m.address + m.size) for m in device.resources.values() if hasattr(m, "size")]
                assert all(any(at in room for room in rooms) for at in used)
            executor.close()
            fake.reset()
    executor.close()
    # Log-probabilities, working space; ancestors and states of a tree.
    assert n_granted == (2 if big.n_keep else 3 + has_states)


@needs_kernels
@pytest.mark.parametrize("name", ["qwen3", "qwen35", "deepseek3"])
def test_a_step_fits_that_was_said_to_whatever_came_before(fake: Fake, kernels, fixtures: Path, name: str) -> None:
    """Buffers for the most tokens of one step and the most rows of another are together too large for a tree, and for
    more of the cache."""
    with GGUF.open(fixtures / "exact" / f"{name}-f16.gguf") as gguf:
        fake.set(memory=1 << 35)
        executor = opened(fake, (gguf, archs.build(gguf)))
        device, buffers = executor._device, executor._buffers
        assert device is not None

        def leave(n_bytes: int) -> None:
            free, total = device.memory()
            fake.set(memory=total - free + n_bytes)

        executor.forward(Step.text([1] * 9000, 0, []))
        assert buffers._working is not None
        there = buffers._working.size + (1 << 20)
        leave(1 << 20)
        limit = executor.step_limit(0, 4000)
        alone = tree_bytes(executor._lowering, 0, 9000, limit)
        both = Room(executor._lowering, 9024, min(limit, HEAD_ROWS), executor._places.expanded_capacity).size
        assert limit > 1000 and alone < there < both
        executor.reset()
        step, targets = big_tree(limit)
        assert len(executor.score(step, targets).logprobs) == len(targets)
        assert executor._places.token_capacity < 9000
        leave(0)
        executor.reset()
        executor.reserve(buffers._cache.backed // buffers._layout.page_bytes * PAGE + PAGE)
        executor.forward(Step.text([1], 0, [0]))
        executor.close()


@needs_kernels
def test_a_long_step_is_ended_between_layers(fake: Fake, kernels, model) -> None:
    executor = opened(fake, model)
    step, targets = big_tree(4096)
    executor.score(step, targets)
    for last in range(1, 100):
        asked = 0

        def poll(last: int = last) -> str | None:
            nonlocal asked
            asked += 1
            return "deadline" if asked == last else None

        executor.reset()
        try:
            executor.score(step, targets, poll)
        except DeadlineError:
            assert executor.n_past == 0
        else:
            break
    scopes = [scope(group.name) for group in executor._lowering.groups]
    borders = 1 + sum(a != b for a, b in pairwise(scopes))
    assert borders > executor.plan.n_layer
    assert last - 1 == 1 + borders + (len(targets) - 1) // HEAD_ROWS  # at the start, each layer, further rows
    executor.close()


@needs_kernels
def test_too_little_memory_is_refused_before_the_upload(fake: Fake, kernels, model) -> None:
    fake.set(memory=1 << 20)
    with pytest.raises(OutOfMemoryError, match=r"needs .* of device memory \(.* weights, .* cache .*; .* are free"):
        opened(fake, model)
    assert not any(line.startswith("cuMemcpyHtoD") for line in fake.log)


@needs_kernels
def test_every_driver_call_failing_in_turn_is_a_typed_error(fake: Fake, kernels, model) -> None:
    fail_each_call(fake, lambda: opened(fake, model), use)


@needs_kernels
@pytest.mark.parametrize("name", ["exact/qwen3-f16", "quantised/qwen3-w256-Q4_K_M"])
def test_the_cuda_path_imports_what_it_needs(fake: Fake, fixtures: Path, name: str) -> None:
    program = """
import sys
from reflex_ipc import archs
from reflex_ipc.cuda.device import start_driver
opening = start_driver(0, sys.argv[1])
from reflex_ipc.cuda.executor import CudaExecutor
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import Step
gguf = GGUF.open(sys.argv[2])
executor = CudaExecutor(gguf, archs.build(gguf), 64, opening=opening)
executor.reserve(16)
executor.forward(Step.text(range(16), 0, [15]))
executor.close()
heavy = {"numpy", "gguf", "jinja2", "cupy", "orjson", "json", "dataclasses", "argparse"}
later = {f"reflex_ipc.cuda.{name}" for name in ("few", "gemm", "experts", "moe", "delta", "latent", "steps", "tracing")}
later.add("reflex_ipc.scores")
print(sorted((heavy | later) & set(sys.modules)))
"""
    path = fixtures / f"{name}.gguf"
    done = subprocess.run(
        [sys.executable, "-c", program, fake.path, str(path)],
        env={"FAKECUDA_KERNELS": str(KERNELS), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@needs_kernels
@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("qwen3", set()),
        ("qwen3moe", {"moe", "experts"}),
        ("qwen35", {"delta"}),
        ("qwen35moe", {"delta", "moe", "experts"}),
        ("deepseek2-lite", {"latent", "moe", "experts"}),
    ],
)
def test_what_only_some_models_need_is_imported_before_the_device_is_there(
    fake: Fake, fixtures: Path, name: str, needed: set[str]
) -> None:
    """All of it, so that nothing is imported once the device waits; and nothing for a model without such ops."""
    program = """
import sys
from reflex_ipc import archs
from reflex_ipc.cuda import device
opening = device.start_driver(0, sys.argv[1])
before, wait = set(), opening.wait
def waits():
    before.update(sys.modules)
    return wait()
opening.wait = waits
from reflex_ipc.cuda.executor import CudaExecutor
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import Step
gguf = GGUF.open(sys.argv[2])
executor = CudaExecutor(gguf, archs.build(gguf), 64, opening=opening)
executor.reserve(32)
executor.forward(Step.text(range(16), 0, [15]))
executor.forward(Step.text([1], 16, [0]))
executor.close()
own = {f"reflex_ipc.cuda.{name}": name for name in ("moe", "experts", "delta", "latent")}
print(*sorted(own[name] for name in own if name in before))
print(*sorted(own[name] for name in own if name in sys.modules))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, fake.path, fixtures / "exact" / f"{name}-f16.gguf"],
        env={"FAKECUDA_KERNELS": str(KERNELS), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    line = " ".join(sorted(needed))
    assert (done.returncode, done.stdout) == (0, f"{line}\n{line}\n"), done.stderr


@needs_kernels
def test_the_benchmark_of_experts_runs(fake: Fake, tmp_path: Path) -> None:
    """bench/experts.py, as far as a device that computes nothing can show it."""
    script = Path(__file__).parent.parent / "bench" / "experts.py"
    arguments = [
        "--shapes",
        "qwen3-30b-a3b",
        "--layers",
        "1",
        "--rounds",
        "1",
        "--counts",
        "1",
        "64",
        "--sweep",
        "--library",
    ]
    done = subprocess.run(
        [sys.executable, script, tmp_path, *arguments, fake.path],
        env={"FAKECUDA_KERNELS": str(KERNELS), "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "experts.json").read_text())
    assert [(row["down"], row["n"]) for row in saved["rows"]] == [(k, n) for k in ("Q4_K", "Q6_K") for n in (1, 64)]
    assert {(row["n"], row["what"]) for row in saved["shapes"]} == {(64, "gate, up"), (64, "down")}
