"""Files whose keys make no sense, or ask for what their architecture does not do: errors that name the key or tensor.

Most of these were once an internal error, or another model's logits in silence.
"""

from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
from gguf_parts import Parts

from reflex_ipc import archs, ops
from reflex_ipc.engine import Engine
from reflex_ipc.errors import ModelFileError, ReflexError, UnsupportedModelError
from reflex_ipc.gguf import GGUF

QWEN_EXPERTS = ["qwen3moe", "qwen35moe", "qwen3next"]


@pytest.fixture
def parts(fixtures: Path) -> Callable[[str], Parts]:
    return lambda name: Parts(fixtures / f"exact/{name}-f16.gguf")


REFUSED: list[tuple[str, dict[str, Any], type[ReflexError], str]] = [
    ("deepseek3", {"rope__freq_base": 1.0}, ModelFileError, "rope.freq_base is 1"),
    ("qwen3", {"rope__freq_base": 1e-45}, ModelFileError, "rope.freq_base is"),
    ("qwen3", {"rope__scaling__attn_factor": 0.0}, ModelFileError, "rope.scaling.attn_factor is 0"),
    ("qwen3", {"rope__scaling__attn_factor": -1.0}, ModelFileError, "rope.scaling.attn_factor is -1"),
    ("deepseek3", {"rope__scaling__yarn_log_multiplier": -0.1}, ModelFileError, "yarn_log_multiplier is -0.1"),
    ("deepseek3", {"rope__dimension_count": None}, ModelFileError, "with rope.dimension_count 48"),
    # 16 experts in 4 groups: with groups, how many of them is no choice of ours, and they have to hold the experts
    ("deepseek3", {"expert_group_used_count": None}, ModelFileError, "expert_group_used_count is 0 of"),
    ("deepseek3", {"expert_group_used_count": 0}, ModelFileError, "expert_group_used_count is 0 of"),
    ("deepseek3", {"expert_group_used_count": 5}, ModelFileError, "expert_group_used_count is 5 of"),
    ("deepseek3", {"expert_group_used_count": 1, "expert_used_count": 5}, ModelFileError, "expert_used_count is 5"),
    ("deepseek3", {"expert_group_count": 16, "expert_group_used_count": 3}, ModelFileError, "expert_used_count is 4"),
    # 48 wide; where there is no key, as wide as a dense layer
    ("qwen3next", {"expert_shared_feed_forward_length": None}, ModelFileError, "its metadata ask for {64,160}"),
    ("deepseek3", {"attention__temperature_scale": 0.1}, UnsupportedModelError, "temperature_scale is not supported"),
    ("llama", {"expert_count": 8}, UnsupportedModelError, "llama.expert_count"),
    ("qwen3", {"attention__causal": False}, UnsupportedModelError, "attention.causal is false"),
    *(
        (name, {key: value}, UnsupportedModelError, f"{key} is {value:g}, which is not supported in {name}")
        for name in QWEN_EXPERTS
        for key, value in (("expert_gating_func", 2), ("expert_group_count", 4), ("expert_weights_scale", 2.5))
    ),
    *(
        (name, {"norm_top_k_prob": True, "expert_weights_norm": False}, ModelFileError, "contradict each other")
        for name in QWEN_EXPERTS
    ),
]


@pytest.mark.parametrize(("name", "keys", "error", "message"), REFUSED)
def test_refused_keys(
    parts, tmp_path: Path, name: str, keys: dict[str, Any], error: type[ReflexError], message: str
) -> None:
    p = parts(name)
    p.set(**keys)
    with GGUF.open(p.write(tmp_path / "changed.gguf")) as gguf, pytest.raises(error) as raised:
        archs.build(gguf)
    assert message in str(raised.value)


@pytest.mark.parametrize("name", QWEN_EXPERTS)
def test_keys_that_say_what_is_so_anyway(parts, fixtures: Path, tmp_path: Path, name: str) -> None:
    p = parts(name)
    p.set(expert_gating_func=1, expert_group_count=1, expert_weights_scale=1.0, norm_top_k_prob=True)
    with GGUF.open(p.write(tmp_path / "changed.gguf")) as gguf, GGUF.open(fixtures / f"exact/{name}-f16.gguf") as own:
        assert archs.build(gguf).ops == archs.build(own).ops


def test_dense_layers_alone_need_no_keys_of_experts(parts, tmp_path: Path) -> None:
    p = parts("deepseek3")
    assert p.key("leading_dense_block_count") == 1
    p.tensors = {name: tensor for name, tensor in p.tensors.items() if not name.startswith(("blk.1.", "blk.2."))}
    p.set(block_count=1, **{key.partition(".")[2]: None for key in list(p.metadata) if ".expert_" in key})
    with GGUF.open(p.write(tmp_path / "changed.gguf")) as gguf:
        assert not any(isinstance(op, ops.Route) for op in archs.build(gguf).ops)


@pytest.mark.parametrize("attn_factor", [0.5, 2.0])
def test_attn_factor_multiplies_the_magnitude(parts, tmp_path: Path, attn_factor: float) -> None:
    """Of DeepSeek's rotation, too, whose magnitude is otherwise 1."""
    p = parts("deepseek3")
    p.set(rope__scaling__attn_factor=attn_factor)
    with GGUF.open(p.write(tmp_path / "changed.gguf")) as gguf:
        found = {op.rope.magnitude for op in archs.build(gguf).ops if isinstance(op, ops.Rotate)}
    assert found == {attn_factor}


@pytest.mark.parametrize("d_v", [16, 64])
@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "qwen3next"])
def test_values_as_wide_as_their_gates(parts, tmp_path: Path, name: str, d_v: int) -> None:
    """Keys and tensors agree on heads of values that are narrower or wider than heads of keys; gates are as keys."""
    p = parts(name)
    n_head, n_head_kv = p.key("attention.head_count"), p.key("attention.head_count_kv")
    for blk in p.layers("attn_v.weight"):
        p[blk + "attn_v.weight"] = np.resize(p[blk + "attn_v.weight"], (n_head_kv * d_v, p.key("embedding_length")))
        p[blk + "attn_output.weight"] = np.resize(
            p[blk + "attn_output.weight"], (p.key("embedding_length"), n_head * d_v)
        )
    p.set(attention__value_length=d_v)
    with (
        GGUF.open(p.write(tmp_path / "changed.gguf")) as gguf,
        pytest.raises(ModelFileError, match=rf"attention\.value_length is {d_v}, but gates are as wide as key_length"),
    ):
        archs.build(gguf)


@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.1.ffn_up.weight", "output_norm.weight"])
def test_weights_of_integers(parts, tmp_path: Path, tensor: str) -> None:
    """A type that GGUF has and weights do not, of a matrix, of an embedding, of a norm."""
    p = parts("qwen3-untied")
    _, ne, _ = p.tensors[tensor]
    p.tensors[tensor] = 26, ne, np.ones(ne[::-1], np.int32).tobytes()  # 26 is GGML_TYPE_I32
    with pytest.raises(UnsupportedModelError, match=f"tensor {tensor} is I32"):
        Engine.open(p.write(tmp_path / "changed.gguf"), backend="cpu")


def test_thousands_of_prediction_blocks(parts, tmp_path: Path) -> None:
    """As many as a file may count, and tensors in one of them: one look at each, not one for every block."""
    p = parts("deepseek3")
    n_layer = p.key("block_count")
    p.set(block_count=4096, nextn_predict_layers=4096 - n_layer)
    names = [f"blk.4095.nextn.{i}" for i in range(20_000)]
    p.tensors |= dict.fromkeys(names, (0, [1], bytes(4)))
    with GGUF.open(p.write(tmp_path / "changed.gguf")) as gguf:
        start = process_time()
        plan = archs.build(gguf)
        assert process_time() - start < 3
    assert plan.n_layer == n_layer and set(plan.ignored) == set(names)
