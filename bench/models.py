"""Model files of real shapes with random weights, to measure speed with where the real ones are too large to keep.

    python bench/models.py OUT qwen3-8b                   in the mix Q4_K_M
    python bench/models.py OUT qwen3-0.6b --mix BF16 --layers 2
    python bench/models.py OUT deepseek-v3 --sparse       holes for weights: what `reflex inspect` needs of 400 GB

The vocabulary is a real one, the mix that of llama.cpp's quantiser, the metadata what its converter writes. What such a
model says means nothing.
"""

import argparse
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ending
import gguf_out
import measure
from gguf_out import Fill, Tensor

VOCABULARIES = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "tokenizers"
MIXES = {"Q4_K_M": 15, "Q8_0": 7, "BF16": 32}
"""Mix -> general.file_type."""


class Shape(NamedTuple):
    """n_ff: of a dense layer. n_ff_exp, n_expert, n_used: of layers of experts; n_ff_shared: beside them."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    n_vocab: int
    n_ctx: int
    vocabulary: str
    tied: bool = False
    n_expert: int = 0
    n_used: int = 0
    n_ff_exp: int = 0
    n_ff_shared: int = 0
    n_head_k: int = 0  # of delta-net layers
    n_head_v: int = 0
    bos: int | None = None  # where prompts begin with one
    n_dense: int = 0  # leading layers without experts, of DeepSeek
    q_rank: int = 0  # of DeepSeek's queries; 0: in one piece
    eps: float = 1e-6
    freq_base: float = 1e6


SHAPES = {
    # Its own vocabulary is not among the recorded ones; another real one is filled up to its size.
    "llama-3.2-1b": Shape(
        "llama", 16, 2048, 32, 8, 64, 8192, 128256, 131072, "deepseek-llm", tied=True, bos=100000, eps=1e-5,
        freq_base=5e5,
    ),
    "qwen2.5-1.5b": Shape("qwen2", 28, 1536, 12, 2, 128, 8960, 151936, 32768, "qwen3", tied=True),
    "qwen3-0.6b": Shape("qwen3", 28, 1024, 16, 8, 128, 3072, 151936, 40960, "qwen3", tied=True),
    "qwen3-8b": Shape("qwen3", 36, 4096, 32, 8, 128, 12288, 151936, 40960, "qwen3"),
    "qwen3-30b-a3b": Shape(
        "qwen3moe", 48, 2048, 32, 4, 128, 6144, 151936, 40960, "qwen3", n_expert=128, n_used=8, n_ff_exp=768
    ),
    "qwen3.5-0.8b": Shape(
        "qwen35", 24, 1024, 8, 2, 256, 3584, 248320, 262144, "qwen35", tied=True, n_head_k=16, n_head_v=16,
        freq_base=1e7,
    ),
    "qwen3.5-9b": Shape(
        "qwen35", 32, 4096, 16, 4, 256, 12288, 248320, 262144, "qwen35", n_head_k=16, n_head_v=32,
        freq_base=1e7,
    ),
    "qwen3.5-35b-a3b": Shape(
        "qwen35moe", 40, 2048, 16, 2, 256, 0, 248320, 262144, "qwen35", n_expert=256, n_used=8, n_ff_exp=512,
        n_ff_shared=512, n_head_k=16, n_head_v=32, freq_base=1e7,
    ),
    "qwen3-next-80b-a3b": Shape(
        "qwen3next", 48, 2048, 16, 2, 256, 5120, 151936, 262144, "qwen3", n_expert=512, n_used=10, n_ff_exp=512,
        n_ff_shared=512, n_head_k=16, n_head_v=32, freq_base=1e7,
    ),
    "deepseek-v2-lite": Shape(
        "deepseek2", 27, 2048, 16, 1, 192, 10944, 102400, 163840, "deepseek-llm", n_expert=64, n_used=6, n_ff_exp=1408,
        n_ff_shared=2816, bos=100000, n_dense=1, freq_base=1e4,
    ),
    "deepseek-v3": Shape(
        "deepseek2", 61, 7168, 128, 1, 192, 18432, 129280, 163840, "deepseek-v3", n_expert=256, n_used=8, n_ff_exp=2048,
        n_ff_shared=2048, bos=0, n_dense=3, q_rank=1536, freq_base=1e4,
    ),
}  # fmt: skip

_CONV, _STATE = 4, 128  # taps of the convolution and size of a delta-net head, in every Qwen3.5 and Qwen3-Next
_EVERY = 4  # one layer in so many is of full attention
_RANK, _NOPE, _ROPE, _VALUE = 512, 128, 64, 128  # DeepSeek-V2's latent attention

_FACTOR, _LOW, _HIGH, _ORIGINAL = 32.0, 1.0, 4.0, 8192  # of Llama 3.2's longer context

# A tensor before the mix is chosen: name, ne, and for F32 what fills it.
Slot = tuple[str, tuple[int, ...], Fill | None]


def tensors(shape: Shape, mix: str) -> list[Tensor]:
    """In the order of llama.cpp's converter."""
    slots = list(_slots(shape))
    n_values = sum(_is_value(name) for name, _, _ in slots)
    values_seen, out = 0, []
    for name, ne, fill in slots:
        if fill is not None:
            out.append(Tensor(name, "F32", ne, fill))
            continue
        layer = int(name.split(".")[1]) if name.startswith("blk.") else 0
        finer = False
        if _is_value(name):
            finer = _more_bits(values_seen, n_values)
            values_seen += 1
        elif ".ffn_down" in name:
            finer = _more_bits(layer, shape.n_layer)
        elif name == ("token_embd.weight" if shape.tied else "output.weight"):
            finer = True
        out.append(Tensor(name, _type(mix, ne[0], finer), ne))
    return out


def _is_value(name: str) -> bool:
    return name.endswith(("attn_v.weight", "attn_qkv.weight"))


def _more_bits(i: int, n: int) -> bool:
    """Q4_K_M gives Q6_K to the first and the last eighth, and to every third between."""
    return i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2


def _type(mix: str, width: int, finer: bool) -> str:
    if mix != "Q4_K_M":
        return mix
    if width % 256:  # no whole super-blocks in a row
        return "Q8_0" if finer else "Q5_0"
    return "Q6_K" if finer else "Q4_K"


def _slots(s: Shape) -> Iterator[Slot]:
    if not s.tied:
        yield "output.weight", (s.n_embd, s.n_vocab), None
    yield "token_embd.weight", (s.n_embd, s.n_vocab), None
    if s.arch == "llama":
        yield "rope_freqs.weight", (s.head_dim // 2,), _slower_rotations(s)
    layer = _LAYERS.get(s.arch, _layer)
    for i in range(s.n_layer):
        for name, ne, fill in layer(s, i):
            yield f"blk.{i}.{name}", ne, fill
    yield "output_norm.weight", (s.n_embd,), "norm"


def _slower_rotations(s: Shape) -> tuple[float, ...]:
    """What Llama 3 divides angles by: 1 where a turn is short against the context it was first trained for, the whole
    factor where it is longer, something between in between."""
    found = []
    for i in range(s.head_dim // 2):
        turns = _ORIGINAL / (2 * math.pi * s.freq_base ** (2 * i / s.head_dim))
        share = min(1.0, max(0.0, (turns - _LOW) / (_HIGH - _LOW)))
        found.append(1 / (share + (1 - share) / _FACTOR))
    return tuple(found)


def _layer(s: Shape, _: int) -> Iterator[Slot]:
    yield "attn_norm.weight", (s.n_embd,), "norm"
    yield from _ffn(s, dense=s.n_expert == 0)
    yield "ffn_norm.weight", (s.n_embd,), "norm"
    yield from _attention(s, s.n_head * s.head_dim)


def _attention(s: Shape, query_rows: int) -> Iterator[Slot]:
    yield from _projection(s, "k", s.n_head_kv * s.head_dim)
    yield "attn_output.weight", (s.n_head * s.head_dim, s.n_embd), None
    yield from _projection(s, "q", query_rows)
    yield from _projection(s, "v", s.n_head_kv * s.head_dim)


def _projection(s: Shape, name: str, n: int) -> Iterator[Slot]:
    """Rows of q, k or v: with biases in qwen2, which normalises no heads, nor does llama."""
    if name != "v" and s.arch not in ("llama", "qwen2"):
        yield f"attn_{name}_norm.weight", (s.head_dim,), "norm"
    if s.arch == "qwen2":
        yield f"attn_{name}.bias", (n,), "bias"
    yield f"attn_{name}.weight", (s.n_embd, n), None


def _ffn(s: Shape, dense: bool) -> Iterator[Slot]:
    if dense:
        yield "ffn_down.weight", (s.n_ff, s.n_embd), None
        yield "ffn_gate.weight", (s.n_embd, s.n_ff), None
        yield "ffn_up.weight", (s.n_embd, s.n_ff), None
        return
    yield "ffn_down_exps.weight", (s.n_ff_exp, s.n_embd, s.n_expert), None
    yield "ffn_gate_exps.weight", (s.n_embd, s.n_ff_exp, s.n_expert), None
    yield "ffn_up_exps.weight", (s.n_embd, s.n_ff_exp, s.n_expert), None
    yield "ffn_gate_inp.weight", (s.n_embd, s.n_expert), "weight"
    if s.n_ff_shared:
        yield "ffn_down_shexp.weight", (s.n_ff_shared, s.n_embd), None
        yield "ffn_gate_shexp.weight", (s.n_embd, s.n_ff_shared), None
        yield "ffn_up_shexp.weight", (s.n_embd, s.n_ff_shared), None
        if s.n_head_v:
            yield "ffn_gate_inp_shexp.weight", (s.n_embd, 1), "weight"


def _delta_net_layer(s: Shape, i: int) -> Iterator[Slot]:
    n_key, n_value = s.n_head_k * _STATE, s.n_head_v * _STATE
    yield "attn_norm.weight", (s.n_embd,), "norm"
    if (i + 1) % _EVERY:
        yield "ssm_a", (s.n_head_v,), "decay"
        yield "ssm_conv1d.weight", (_CONV, 2 * n_key + n_value), "weight"
        yield "ssm_dt.bias", (s.n_head_v,), "bias"
        if s.arch == "qwen3next":
            yield "ssm_ba.weight", (s.n_embd, 2 * s.n_head_v), None
        else:
            yield "ssm_alpha.weight", (s.n_embd, s.n_head_v), None
            yield "ssm_beta.weight", (s.n_embd, s.n_head_v), None
        yield "attn_qkv.weight", (s.n_embd, 2 * n_key + n_value), None
        yield "attn_gate.weight", (s.n_embd, n_value), None
        yield "ssm_norm.weight", (_STATE,), "norm"
        yield "ssm_out.weight", (n_value, s.n_embd), None
    else:
        yield from _attention(s, 2 * s.n_head * s.head_dim)  # a gate beside every query
    yield from _ffn(s, dense=s.n_expert == 0)
    yield "post_attention_norm.weight", (s.n_embd,), "norm"


def _deepseek2_layer(s: Shape, i: int) -> Iterator[Slot]:
    yield "attn_norm.weight", (s.n_embd,), "norm"
    yield from _ffn(s, dense=i < s.n_dense)
    if s.q_rank and i >= s.n_dense:
        yield "exp_probs_b.bias", (s.n_expert,), "bias"
    yield "ffn_norm.weight", (s.n_embd,), "norm"
    yield "attn_kv_a_norm.weight", (_RANK,), "norm"
    yield "attn_kv_a_mqa.weight", (s.n_embd, _RANK + _ROPE), None
    yield "attn_k_b.weight", (_NOPE, _RANK, s.n_head), None
    yield "attn_v_b.weight", (_RANK, _VALUE, s.n_head), None
    yield "attn_output.weight", (s.n_head * _VALUE, s.n_embd), None
    queries = s.n_head * (_NOPE + _ROPE)
    if s.q_rank:
        yield "attn_q_a_norm.weight", (s.q_rank,), "norm"
        yield "attn_q_a.weight", (s.n_embd, s.q_rank), None
        yield "attn_q_b.weight", (s.q_rank, queries), None
    else:
        yield "attn_q.weight", (s.n_embd, queries), None


_LAYERS: dict[str, Callable[[Shape, int], Iterator[Slot]]] = {
    "qwen35": _delta_net_layer,
    "qwen35moe": _delta_net_layer,
    "qwen3next": _delta_net_layer,
    "deepseek2": _deepseek2_layer,
}


def metadata(name: str, s: Shape, mix: str) -> dict[str, Any]:
    """All but the vocabulary."""
    keys: dict[str, Any] = {
        "block_count": s.n_layer,
        "context_length": s.n_ctx,
        "embedding_length": s.n_embd,
        "attention.head_count": s.n_head,
        "attention.head_count_kv": s.n_head_kv,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": s.eps,
        "rope.freq_base": s.freq_base,
        "vocab_size": s.n_vocab,
    }
    if s.n_ff:
        keys["feed_forward_length"] = s.n_ff
    if s.n_expert:
        keys |= {"expert_count": s.n_expert, "expert_used_count": s.n_used, "expert_feed_forward_length": s.n_ff_exp}
    if s.arch in _FAMILY_KEYS:
        keys |= _FAMILY_KEYS[s.arch](s)
    bos = {} if s.bos is None else {"tokenizer.ggml.bos_token_id": s.bos}
    return {
        "general.architecture": s.arch,
        "general.name": f"{name} {mix}, random weights",
        "general.file_type": MIXES[mix],
        "general.quantization_version": 2,
        **{f"{s.arch}.{key}": value for key, value in keys.items()},
        **bos,
    }


def _delta_net_keys(s: Shape) -> dict[str, Any]:
    keys: dict[str, Any] = {"rope.dimension_count": s.head_dim // 4}
    if s.arch != "qwen3next":
        keys["rope.dimension_sections"] = [11, 11, 10, 0]
    keys |= {
        "ssm.conv_kernel": _CONV,
        "ssm.state_size": _STATE,
        "ssm.group_count": s.n_head_k,
        "ssm.time_step_rank": s.n_head_v,
        "ssm.inner_size": s.n_head_v * _STATE,
        "full_attention_interval": _EVERY,
    }
    return keys | ({"expert_shared_feed_forward_length": s.n_ff_shared} if s.n_expert else {})


def _deepseek2_keys(s: Shape) -> dict[str, Any]:
    """Of V3 where queries have a rank, else of V2-Lite: how experts are chosen, and the magnitude of YaRN."""
    is_v3 = s.q_rank > 0
    keys: dict[str, Any] = {
        "rope.dimension_count": _ROPE,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 40.0,
        "rope.scaling.original_context_length": 4096,
        "rope.scaling.yarn_log_multiplier": 0.1 if is_v3 else 0.0707,
        "attention.key_length": _RANK + _ROPE,
        "attention.value_length": _RANK,
        "attention.key_length_mla": _NOPE + _ROPE,
        "attention.value_length_mla": _VALUE,
        "attention.kv_lora_rank": _RANK,
        "leading_dense_block_count": s.n_dense,
        "expert_shared_count": s.n_ff_shared // s.n_ff_exp,
        "expert_gating_func": 2 if is_v3 else 1,
        "expert_weights_scale": 2.5 if is_v3 else 1.0,
        "expert_weights_norm": is_v3,
        "expert_group_count": 8 if is_v3 else 1,
        "expert_group_used_count": 4 if is_v3 else 1,
    }
    return keys | ({"attention.q_lora_rank": s.q_rank} if is_v3 else {})


_FAMILY_KEYS: dict[str, Callable[[Shape], dict[str, Any]]] = {
    "llama": lambda s: {"rope.dimension_count": s.head_dim},
    "qwen35": _delta_net_keys,
    "qwen35moe": _delta_net_keys,
    "qwen3next": _delta_net_keys,
    "deepseek2": _deepseek2_keys,
}


def make(
    path: Path, name: str, mix: str = "Q4_K_M", layers: int | None = None, seed: int = 7, *, sparse: bool = False
) -> int:
    """Write a model file; the number of bytes. The same arguments give the same bytes. `sparse`: weights are holes."""
    shape = SHAPES[name]
    if layers is not None:
        shape = shape._replace(n_layer=layers)
    vocabulary = VOCABULARIES / f"{shape.vocabulary}.vocab.gguf.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    return gguf_out.write(
        path, metadata(name, shape, mix), vocabulary, shape.n_vocab, tensors(shape, mix), seed, sparse=sparse
    )  # fmt: skip


def size(name: str, mix: str = "Q4_K_M") -> int:
    """Bytes of a file's weights, which is all but some megabytes of it."""
    return sum(tensor.nbytes for tensor in tensors(SHAPES[name], mix))


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False, description="Write a model of a real shape.")
    parser.add_argument("out", type=Path)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--mix", choices=MIXES, default="Q4_K_M")
    parser.add_argument("--layers", type=measure.count, help="fewer than the model has")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--sparse", action="store_true", help="holes for weights")
    options = parser.parse_args()
    began = time.perf_counter()
    size = make(options.out, options.shape, options.mix, options.layers, options.seed, sparse=options.sparse)
    seconds = time.perf_counter() - began
    print(f"{options.out}: {size / 1e9:.2f} GB in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s")
    return 0


if __name__ == "__main__":
    ending.run(main)
