"""What files and their mathematics trip implementations up with: one case a trap, on files changed accordingly.

Where a writer lays the same model out differently, the logits are the fixture's, which come from another library.
Elsewhere the values are computed here, in float64, or are published numbers. These traps have their cases elsewhere:

- norms that are stored with their 1 added, l2norm that is a sum and no mean, a norm called post-attention that is none,
  gates of attention head by head behind their queries, llama's permuted and Qwen's plain q and k, QK-norm before the
  rotation, heads * head_dim that is not n_embd, tied and separate output matrices, matrices by head that have three
  dimensions and are no experts, biases of the choice that are none of the weights: the fixtures' own logits are wrong
  by far with any of them (test_fidelity.py, test_emulated.py).
- `attn_kv_b` in one piece: test_fidelity.py, test_emulated.py::test_logits_of_legacy_files, test_latent_kernels.py.
- latents and scores beyond half precision: test_latent_kernels.py::test_beyond_the_range_of_half_precision,
  test_large_activations.py.
- the delta rule's gates that reach 0 and 1, on the device: test_delta_kernels.py::test_long_texts_in_pieces.
- gate and up in one tensor, on the device: test_emulated.py::test_gate_and_up_in_one_tensor; MXFP4 experts among Q8_0:
  test_fidelity.py::test_logits_of_quantised_weights.
- offsets beyond 2^31: test_gguf.py::test_beyond_four_gibibytes.
- `attn_k_b` of 128 columns as Q5_0, Q5_1, Q8_0: gpu/test_matmul.py, test_latent_kernels.py.
- recurrent state that cannot be cut back, padding, tails before the convolution: test_splits.py, test_delta_kernels.py.
- a state left over from another text: test_fidelity.py, whose engines run two.
- linear scaling and its old key, Llama 3's divisors, YaRN's ramp: test_rope.py; senseless keys: test_model_keys.py.
- more tokens than merges, [PADn] rows: test_tokenizer.py.
"""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from delta_reference import Data, Net, expected
from emulator import needs_kernels
from gguf_parts import Parts

from reflex_ipc import archs, cli, ops
from reflex_ipc.check import compare
from reflex_ipc.engine import Engine
from reflex_ipc.errors import ModelFileError, UnsupportedModelError
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import Plan, Step
from reflex_ipc.reference.ops import FUNCTIONS, Run, States
from reflex_ipc.reference.weights import Weights

pytest_plugins = ["emulator.fixtures"]

HYBRID = ["qwen35", "qwen35moe", "qwen3next"]
BOUND = 5e-5
"""Of the reference executor's logits, as in test_fidelity.py."""
DEVICE_BOUND = 1e-3
"""Of the emulated device's, as in test_emulated.py."""


@pytest.fixture
def parts(fixtures: Path) -> Callable[[str], Parts]:
    return lambda name: Parts(fixtures / f"exact/{name}-f16.gguf")


def relative_error(actual: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(actual - wanted.astype(np.float64)) / np.linalg.norm(wanted.astype(np.float64)))


def logits(file: Path, ids: list[int]) -> np.ndarray:
    with Engine.open(file, backend="cpu") as engine:
        return engine.logits(ids)


def plan_of(file: Path) -> Plan:
    with GGUF.open(file) as gguf:
        return archs.build(gguf)


# Layouts: each changes a file and not what it means


def grouped(p: Parts) -> None:
    """Value heads of a key head side by side, as they were trained: head i r + j from j n_k + i."""
    n_k, n_v, d = p.key("ssm.group_count"), p.key("ssm.time_step_rank"), p.key("ssm.state_size")
    heads = [j * n_k + i for i in range(n_k) for j in range(n_v // n_k)]
    rows = [h * d + at for h in heads for at in range(d)]
    mixed = [*range(2 * n_k * d), *(2 * n_k * d + row for row in rows)]
    for blk in p.layers("ssm_a"):
        for name, order in (("attn_qkv.weight", mixed), ("ssm_conv1d.weight", mixed), ("attn_gate.weight", rows)):
            p[blk + name] = p[blk + name][order]
        for name in ("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"):
            p[blk + name] = p[blk + name][heads]
        p[blk + "ssm_out.weight"] = p[blk + "ssm_out.weight"][:, rows]
    p.set(ssm__v_head_reordered=False)


def layers_by_their_interval(p: Parts) -> None:
    assert p.key("full_attention_interval") == 4
    p.set(attention__recurrent_layers=None)


def layers_by_the_usual_interval(p: Parts) -> None:
    layers_by_their_interval(p)
    p.set(full_attention_interval=None)


def layers_one_by_one(p: Parts) -> None:
    """Where each layer is told, the interval has no say."""
    assert f"{p.arch}.attention.recurrent_layers" in p.metadata
    p.set(full_attention_interval=2)


def without_a_rotated_width(p: Parts) -> None:
    p.set(rope__dimension_count=None)


def gate_and_up_joined(p: Parts) -> None:
    for blk in p.layers("ffn_gate_exps.weight"):
        both = [p.pop(f"{blk}ffn_{name}_exps.weight") for name in ("gate", "up")]
        p[blk + "ffn_gate_up_exps.weight"] = np.concatenate(both, axis=1)


def shared_gate_of_one_dimension(p: Parts) -> None:
    for blk in p.layers("ffn_gate_inp_shexp.weight"):
        p[blk + "ffn_gate_inp_shexp.weight"] = p[blk + "ffn_gate_inp_shexp.weight"].reshape(-1)


def one_input_projection(p: Parts) -> None:
    """`ssm_in` of the first qwen3next files: of each key head its q, its k, its values' v, their z."""
    n_k, n_v, d = p.key("ssm.group_count"), p.key("ssm.time_step_rank"), p.key("ssm.state_size")
    for blk in p.layers("ssm_a"):
        qkv, z = p.pop(blk + "attn_qkv.weight"), p.pop(blk + "attn_gate.weight")
        q, k, v = np.split(qkv, [n_k * d, 2 * n_k * d])
        wide = n_v // n_k * d
        joint = []
        for i in range(n_k):
            joint += [q[i * d :][:d], k[i * d :][:d], v[i * wide :][:wide], z[i * wide :][:wide]]
        p[blk + "ssm_in.weight"] = np.concatenate(joint)


def imported_by_ollama(p: Parts) -> None:
    """What ollama's own imports of the family differ in, all of it."""
    n = p.key("block_count")
    is_full = [(i + 1) % p.key("full_attention_interval") == 0 for i in range(n)]
    p.set(
        attention__head_count_kv=[p.key("attention.head_count_kv") if full else 0 for full in is_full],
        rope__dimension_sections=p.key("rope.dimension_sections")[:3],
        mrope_sections=p.key("rope.dimension_sections")[:3],
        rope__mrope_interleaved=True,
        ssm__v_head_reordered=True,
        norm_top_k_prob=True,
    )
    if p.arch == "qwen35moe":
        p.set(feed_forward_length=0)
    for blk in p.layers("ssm_a"):
        p[blk + "ssm_dt"] = p.pop(blk + "ssm_dt.bias")
    for name in ("v.blk.0.attn_q.weight", "mm.0.weight", "mtp.layers.0.input_layernorm.weight"):
        p[name] = np.ones((3, 5), np.float16)


def prediction_block(p: Parts) -> list[str]:
    """Another block at the end, which predicts one token further: an attention layer and what joins it to the model."""
    n = p.key("block_count")
    rng = np.random.default_rng(n)
    like = max(p.layers("attn_output.weight"))
    made = {name.removeprefix(like): p[name] for name in p.tensors if name.startswith(like)}
    n_embd = p.key("embedding_length")
    made |= {"nextn.eh_proj.weight": np.empty((n_embd, 2 * n_embd), np.float16)}
    made |= {f"nextn.{name}.weight": np.empty(n_embd, np.float32) for name in ("enorm", "hnorm", "shared_head_norm")}
    for name, array in made.items():
        p[f"blk.{n}.{name}"] = rng.standard_normal(array.shape).astype(array.dtype)
    counted_as_a_layer(p)
    return [f"blk.{n}.{name}" for name in made]


def counted_as_a_layer(p: Parts) -> None:
    """A prediction block that is not there: fine-tunes lose it."""
    p.set(block_count=p.key("block_count") + 1, nextn_predict_layers=1)
    if f"{p.arch}.attention.recurrent_layers" in p.metadata:
        p.set(attention__recurrent_layers=[*p.key("attention.recurrent_layers"), False])


def without_the_keys_of_absorbed_files(p: Parts) -> None:
    p.set(attention__key_length_mla=None, attention__value_length_mla=None)


def both_forms_of_key_matrices(p: Parts) -> None:
    """Experiments before absorbed files: no keys for them, the whole `attn_kv_b`, and its parts as flat matrices."""
    without_the_keys_of_absorbed_files(p)
    p.set(attention__head_count_kv=p.key("attention.head_count"))
    for blk in p.layers("attn_k_b.weight"):
        k, v = p[blk + "attn_k_b.weight"], p[blk + "attn_v_b.weight"]
        whole = np.concatenate([k.transpose(0, 2, 1), v], axis=1)
        p[blk + "attn_kv_b.weight"] = np.ascontiguousarray(whole.reshape(-1, whole.shape[2]))
        for part in "kv":
            name = f"{blk}attn_{part}_b.weight"
            p[name] = p[name].reshape(-1, p[name].shape[2])


LAYOUTS: list[tuple[str, Callable[[Parts], Any]]] = [
    ("qwen35", grouped),
    ("qwen35moe", grouped),
    *((name, change) for name in HYBRID for change in (without_a_rotated_width, layers_by_their_interval)),
    ("qwen35", layers_by_the_usual_interval),
    ("qwen35", layers_one_by_one),
    ("deepseek3", without_the_keys_of_absorbed_files),
    ("deepseek2-lite", without_the_keys_of_absorbed_files),
    ("deepseek3", both_forms_of_key_matrices),
    ("qwen35", imported_by_ollama),
    ("qwen35moe", imported_by_ollama),
    *((name, change) for name in [*HYBRID, "deepseek3"] for change in (prediction_block, counted_as_a_layer)),
    ("qwen3next", one_input_projection),
    ("qwen35moe", shared_gate_of_one_dimension),
    ("qwen3next", shared_gate_of_one_dimension),
    ("qwen3moe", gate_and_up_joined),
    ("deepseek3", gate_and_up_joined),
]
layouts = pytest.mark.parametrize(
    ("name", "change"), LAYOUTS, ids=[f"{name}-{change.__name__}" for name, change in LAYOUTS]
)


@layouts
def test_a_layout_changes_no_logits(
    parts, fixtures: Path, tmp_path: Path, name: str, change: Callable[[Parts], Any]
) -> None:
    p = parts(name)
    change(p)
    reference = np.load(fixtures / f"exact/{name}-f16.npz")
    found = logits(p.write(tmp_path / "changed.gguf"), reference["ids"].tolist())
    assert relative_error(found, reference["logits"]) <= BOUND


@needs_kernels
@layouts
def test_a_layout_changes_no_logits_of_the_device(
    opened, parts, tmp_path: Path, name: str, change: Callable[[Parts], Any]
) -> None:
    p = parts(name)
    change(p)
    executor, _, reference = opened(name, file=p.write(tmp_path / "changed.gguf"))
    ids = reference["ids"].tolist()
    executor.reserve(48)
    rows = []
    for start, stop in pairwise((0, 20, 21, 48)):
        executor.forward(Step.text(ids[start:stop], start, range(stop - start)))
        rows.append(executor.logits())
    assert relative_error(np.concatenate(rows), reference["logits"]) <= (
        1e-2 if name == "deepseek2-lite" else DEVICE_BOUND
    )


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe"])
def test_the_order_of_value_heads_matters(parts, fixtures: Path, tmp_path: Path, name: str) -> None:
    """Heads side by side that the file does not admit to: nothing in it tells, and this is what the key is for."""
    p = parts(name)
    grouped(p)
    p.set(ssm__v_head_reordered=None)
    reference = np.load(fixtures / f"exact/{name}-f16.npz")
    found = logits(p.write(tmp_path / "changed.gguf"), reference["ids"].tolist())
    assert relative_error(found, reference["logits"]) > 0.1


def test_full_width_rotation_is_wrong(parts, fixtures: Path, tmp_path: Path) -> None:
    p = parts("qwen35")
    p.set(rope__dimension_count=p.key("attention.key_length"))
    reference = np.load(fixtures / "exact/qwen35-f16.npz")
    found = logits(p.write(tmp_path / "changed.gguf"), reference["ids"].tolist())
    assert relative_error(found, reference["logits"]) > 0.01


def test_eps_is_the_files(parts, fixtures: Path, tmp_path: Path) -> None:
    """Twice to the fourth of everything in the residual stream, and of eps its square, moves no bit but exponents."""
    p = parts("llama")
    for name in p.tensors:
        if name.endswith(("attn_output.weight", "ffn_down.weight")) or name == "token_embd.weight":
            p[name] = p[name] * np.float16(16)
    p.set(attention__layer_norm_rms_epsilon=256 * p.key("attention.layer_norm_rms_epsilon"))
    ids = np.load(fixtures / "exact/llama-f16.npz")["ids"].tolist()
    before = logits(fixtures / "exact/llama-f16.gguf", ids)
    assert "output.weight" not in p.tensors, "the output matrix is the embedding, and 16 times as large"
    assert (logits(p.write(tmp_path / "larger.gguf"), ids) == 16 * before).all()
    p.set(attention__layer_norm_rms_epsilon=1e-6)
    assert (logits(p.write(tmp_path / "same.gguf"), ids) != 16 * before).any()


# What cannot be told, or is not so


@pytest.mark.parametrize("name", ["qwen35", "qwen3next", "deepseek3"])
def test_layers_are_not_dropped_for_prediction_blocks(parts, tmp_path: Path, name: str) -> None:
    """A block count without the prediction blocks that the file says it has: the last layers would be left out."""
    p = parts(name)
    p.set(nextn_predict_layers=1)
    with pytest.raises(ModelFileError, match=rf"{p.arch}\.nextn_predict_layers is 1, but blk\.\d has no tensor"):
        plan_of(p.write(tmp_path / "changed.gguf"))


@pytest.mark.parametrize("tensor", ["ssm_ba", "ssm_in"])
def test_joint_projections_have_no_reordered_heads(parts, tmp_path: Path, tensor: str) -> None:
    p = parts("qwen3next")
    if tensor == "ssm_in":
        one_input_projection(p)
    p.set(ssm__v_head_reordered=True)
    with pytest.raises(UnsupportedModelError, match=r"qwen3next\.ssm\.v_head_reordered has to be false"):
        plan_of(p.write(tmp_path / "changed.gguf"))


@pytest.mark.parametrize(
    ("key", "factor", "message"),
    [
        ("ssm.time_step_rank", 2, "ssm.inner_size"),
        ("ssm.group_count", 2, "attn_qkv.weight"),
        ("ssm.state_size", 2, "ssm.inner_size"),
        ("ssm.inner_size", 2, "ssm.inner_size"),
        ("ssm.conv_kernel", 2, "ssm_conv1d.weight"),
        ("full_attention_interval", 2, "attn_qkv.weight"),
    ],
)
def test_keys_of_delta_nets_that_its_tensors_deny(parts, tmp_path: Path, key: str, factor: int, message: str) -> None:
    """Configurations that were overwritten when a checkpoint was saved again."""
    p = parts("qwen35")
    layers_by_their_interval(p)
    p.set(**{key.replace(".", "__"): factor * p.key(key)})
    with pytest.raises(ModelFileError, match=message):
        plan_of(p.write(tmp_path / "changed.gguf"))
    if key != "ssm.inner_size" and "inner_size" in message:
        p.set(ssm__inner_size=2 * p.key("ssm.inner_size"))  # denied by the tensors, then
        with pytest.raises(ModelFileError, match=r"attn_qkv\.weight has dimensions"):
            plan_of(p.write(tmp_path / "both.gguf"))


@pytest.mark.parametrize("tensor", ["ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias", "ssm_norm.weight"])
def test_tensors_of_delta_nets_of_a_wrong_size(parts, tmp_path: Path, tensor: str) -> None:
    p = parts("qwen35")
    p["blk.1." + tensor] = np.repeat(p["blk.1." + tensor], 2, axis=0)
    with pytest.raises(ModelFileError, match=f"tensor blk.1.{tensor} has dimensions"):
        plan_of(p.write(tmp_path / "changed.gguf"))


@pytest.mark.parametrize("name", [*HYBRID, "deepseek3"])
def test_inspect_says_that_prediction_blocks_are_left_out(parts, tmp_path: Path, name: str, capfd) -> None:
    p = parts(name)
    n_layer = p.key("block_count")
    block = prediction_block(p)
    file = p.write(tmp_path / "changed.gguf")
    assert cli.main(["inspect", str(file)]) == 0
    text = capfd.readouterr().out
    said = text[text.index("not used for generation") :].splitlines()[:2]
    assert said == [
        f"not used for generation ({len(block)} tensors)",
        f"  blk.{n_layer}.*, which predicts further tokens",
    ]
    assert cli.main(["inspect", str(file), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert sorted(found["ignored"]) == sorted(block)
    plan = plan_of(file)
    assert plan.n_layer == n_layer
    assert not any(name.startswith(f"blk.{n_layer}.") for name in plan.weights)


# Mathematics, in float64


def routed(x: np.ndarray, op: ops.Route, bias: np.ndarray | None, best: int) -> list[dict[int, float]]:
    """Expert -> weight of every token, from its logits; a group counts as the sum of its `best` largest."""
    rows = []
    for token in x.astype(np.float64):
        e = np.exp(token - token.max())
        p = e / e.sum() if op.gating == "softmax" else 1 / (1 + np.exp(-token))
        by = p if bias is None else p + bias
        size = len(by) // op.n_group
        groups = sorted(range(op.n_group), key=lambda g: -sum(sorted(by[g * size :][:size])[-best:]))
        allowed = [i for i in range(len(by)) if i // size in groups[: op.n_group_used]]
        ids = sorted(allowed, key=lambda i: -by[i])[: op.n_used]
        total = sum(p[i] for i in ids) if op.normalise else 1.0
        rows.append({i: p[i] / total * op.scale for i in ids})
    return rows


def routes(file: Path, ids: list[int]) -> list[tuple[ops.Route, np.ndarray, np.ndarray | None, list[dict[int, float]]]]:
    """Of every router: the op, its logits, its bias, and what the reference executor chose."""
    found = []
    with GGUF.open(file) as gguf:
        plan = archs.build(gguf)
        weights, states = Weights(gguf, plan, 1), States(plan.states)
        states.reserve(len(ids))
        run = Run(Step.text(ids, 0, [0]), weights, states)
        for op in plan.ops:
            out = run.values[op.out.name] = FUNCTIONS[type(op)](op, run)
            if isinstance(op, ops.Route):
                chosen = [dict(zip(row[: op.n_used].astype(int), row[op.n_used :], strict=True)) for row in out]
                found.append((op, run[op.logits], None if op.bias is None else weights[op.bias], chosen))
    return found


def softmax_groups(p: Parts) -> int:
    """DeepSeek-V2's router: the best expert of a group speaks for it, nothing is added, nothing renormalised."""
    for blk in p.layers("exp_probs_b.bias"):
        p.pop(blk + "exp_probs_b.bias")
    p.set(expert_gating_func=1, expert_weights_norm=None, expert_weights_scale=16.0)
    return 1


def sigmoid_groups(p: Parts) -> int:
    """V3's: its two best do."""
    return 2


def no_groups(p: Parts) -> int:
    """V3's of files before there were keys for groups: any expert."""
    p.set(expert_group_count=None, expert_group_used_count=None)
    return 2


def not_renormalised(p: Parts) -> int:
    p.set(norm_top_k_prob=False)
    return 1


def not_renormalised_by_another_name(p: Parts) -> int:
    p.set(expert_weights_norm=False)
    return 1


ROUTERS: list[tuple[str, Callable[[Parts], int], dict[str, Any]]] = [
    ("deepseek3", softmax_groups, {"n_group": 4, "n_group_used": 2, "gating": "softmax", "normalise": False}),
    ("deepseek3", sigmoid_groups, {"n_group": 4, "n_group_used": 2, "gating": "sigmoid", "normalise": True}),
    ("deepseek3", no_groups, {"n_group": 1, "gating": "sigmoid", "normalise": True}),
    ("qwen3moe", not_renormalised, {"normalise": False, "gating": "softmax"}),
    ("qwen35moe", not_renormalised, {"normalise": False, "gating": "softmax"}),
    ("qwen3moe", not_renormalised_by_another_name, {"normalise": False, "gating": "softmax"}),
]
routers = pytest.mark.parametrize(
    ("name", "change", "fields"), ROUTERS, ids=[f"{name}-{change.__name__}" for name, change, _ in ROUTERS]
)


@routers
def test_routers(parts, fixtures: Path, tmp_path: Path, name: str, change: Callable[[Parts], int], fields) -> None:
    p = parts(name)
    best = change(p)
    ids = np.load(fixtures / f"exact/{name}-f16.npz")["long_ids"].tolist()
    found = routes(p.write(tmp_path / "changed.gguf"), ids)
    assert found
    others = 0
    for op, x, bias, chosen in found:
        assert {key: getattr(op, key) for key in fields} == fields
        wanted = routed(x, op, bias, best)
        for got, want in zip(chosen, wanted, strict=True):
            assert got == pytest.approx(want, rel=1e-5)
        others += wanted != routed(x, op, bias, 3 - best)
    if fields.get("n_group", 1) > 1:
        assert others, "these tokens tell the two scores of a group apart"


@needs_kernels
@routers
def test_routers_of_the_device(
    opened, parts, tmp_path: Path, name: str, change: Callable[[Parts], int], fields
) -> None:
    """Op by op on the reference's inputs."""
    p = parts(name)
    change(p)
    for fuse in (False, True):
        executor, gguf, reference = opened(name, fuse=fuse, file=p.write(tmp_path / "changed.gguf"))
        weights, states = Weights(gguf, executor.plan, 1), States(executor.plan.states)
        states.reserve(64)
        ids = reference["ids"].tolist()
        kinds = set()
        for step in (Step.text(ids[:40], 0, [39]), Step.text(ids[40:41], 40, [0])):
            for what, kind, error, bound in compare(executor, step, weights, states):
                assert error <= bound, what
                kinds.add(kind)
        assert kinds


@pytest.mark.parametrize(
    ("name", "multiplier", "of_192"),
    [("deepseek3", 0.1, 0.135234), ("deepseek2-lite", 0.0707, 0.114721), ("deepseek3", None, 192**-0.5)],
)
def test_yarn_of_deepseek(parts, tmp_path: Path, name: str, multiplier: float | None, of_192: float) -> None:
    """Factor 40, as published: the growth goes into the scale, squared, and not into cosine and sine. A file that does
    not say how much has it there, and the plain scale."""
    p = parts(name)
    p.set(rope__scaling__factor=40.0, rope__scaling__yarn_log_multiplier=multiplier)
    plan = plan_of(p.write(tmp_path / "changed.gguf"))
    scales = {op.scale for op in plan.ops if isinstance(op, ops.LatentAttention)}
    assert [scale * math.sqrt(48 / 192) for scale in scales] == pytest.approx([of_192], rel=1e-5)
    (magnitude,) = {op.rope.magnitude for op in plan.ops if isinstance(op, ops.Rotate)}
    assert magnitude == pytest.approx(1.0 if multiplier else 1.368888)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("net", [Net(1, 4, 128), Net(2, 4, 24, tiled=False)], ids=str)
def test_delta_nets(net: Net, hard: bool) -> None:
    """Decays of everything and of nothing, softplus far beyond what exp holds: the reference executor in float32."""
    n = 60
    data = Data(net, n, hard=hard)
    arrays = vars(data)
    with np.errstate(over="raise", invalid="raise"):
        out, tail, matrices = expected(net, data, list(range(-1, n - 1)), n)
        states = States((ops.State("tail", data.tail.shape, False), ops.State("matrices", data.matrices.shape, False)))
        for name, array in states.arrays.items():
            array[:] = arrays[name]
        weights: Any = arrays
        run = Run(Step.text(range(n), 0, []), weights, states)
        run.values = {name: arrays[name] for name in ("x", "z", "alpha", "beta")}
        for op in net.group().parts:
            run.values[op.out.name] = FUNCTIONS[type(op)](op, run)
    assert np.abs(data.alpha).max() > (89 if hard else 0)
    for found, wanted in ((run.values["gate"], out), (states.arrays["matrices"], matrices)):
        assert relative_error(found, wanted) <= 2e-6
    assert (states.arrays["tail"] == tail).all()
