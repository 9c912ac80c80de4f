"""A model's metadata, read once into a frozen record.

Only what every family shares is here; a family reads its own keys beside it. Every key is `{arch}.` plus the name in
the comment. A variant that is not known is refused by the name of its key: a wrong answer is worse than none.
"""

import math
from typing import NamedTuple

from reflex_ipc.errors import ModelFileError, UnsupportedModelError
from reflex_ipc.gguf import GGUF
from reflex_ipc.ops import Rope, scope

# Absurd counts are refused before anything is sized by them; the largest real models are far below.
_MAX_LAYERS = 4096
_MAX_WIDTH = 1 << 24


class Hparams(NamedTuple):
    n_layer: int  # block_count
    n_embd: int  # embedding_length
    n_head: int  # attention.head_count
    n_head_kv: int  # attention.head_count_kv
    head_dim: int  # attention.key_length
    head_dim_v: int  # attention.value_length
    n_ff: int  # feed_forward_length
    n_vocab: int  # rows of token_embd.weight
    n_ctx_train: int  # context_length
    eps: float  # attention.layer_norm_rms_epsilon
    rope: Rope  # rope.*

    @property
    def attention_scale(self) -> float:
        return 1.0 / math.sqrt(self.head_dim)


def read(gguf: GGUF, arch: str, rope_style: str, *, rotated: float = 1.0) -> Hparams:
    """The common keys of section "{arch}." of the file; ModelFileError or UnsupportedModelError name the key.

    `rotated` is the part of a head that the rotation turns where the file does not say rope.dimension_count.
    """

    def count(key: str, default: int | None = None, *, least: int = 1, most: int = _MAX_WIDTH) -> int:
        full = f"{arch}.{key}"
        n = gguf.int(full) if default is None else gguf.int(full, default)
        if not least <= n <= most:
            raise ModelFileError(f"{gguf.path}: {full} is {n}, which is not between {least} and {most}")
        return n

    n_layer = count("block_count", most=_MAX_LAYERS)
    n_embd = count("embedding_length")
    n_head = per_layer(gguf, f"{arch}.attention.head_count", n_layer)
    n_head_kv = per_layer(gguf, f"{arch}.attention.head_count_kv", n_layer, default=n_head)
    if n_head % n_head_kv:
        raise ModelFileError(
            f"{gguf.path}: {arch}.attention.head_count ({n_head}) is no multiple of head_count_kv ({n_head_kv})"
        )
    head_dim = count("attention.key_length", n_embd // n_head)
    head_dim_v = count("attention.value_length", n_embd // n_head)
    if not gguf.bool(f"{arch}.attention.causal", True):
        raise UnsupportedModelError(f"{gguf.path}: {arch}.attention.causal is false; only causal models generate text")
    eps = gguf.float(f"{arch}.attention.layer_norm_rms_epsilon")
    if not 0.0 < eps < 1.0:
        raise ModelFileError(f"{gguf.path}: {arch}.attention.layer_norm_rms_epsilon is {eps}")
    return Hparams(
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        n_ff=per_layer(gguf, f"{arch}.feed_forward_length", n_layer, default=0, least=0),
        n_vocab=_n_vocab(gguf),
        n_ctx_train=count("context_length", most=1 << 31),
        eps=eps,
        rope=_rope(gguf, arch, rope_style, head_dim, int(head_dim * rotated)),
    )


def per_layer(gguf: GGUF, key: str, n_layer: int, *, default: int | None = None, least: int = 1) -> int:
    """A count that may be given once or once a layer, but is the same in all layers that have it: some writers put 0
    where a layer does without."""
    values = gguf.ints(key, n_layer) if default is None else gguf.ints(key, n_layer, [default] * n_layer)
    given = [v for v in values if v != 0] or [0]
    if any(v != given[0] for v in given):
        raise UnsupportedModelError(f"{gguf.path}: {key} differs between layers, which is not supported")
    if not least <= given[0] <= _MAX_WIDTH:
        raise ModelFileError(f"{gguf.path}: {key} is {given[0]}, which is not between {least} and {_MAX_WIDTH}")
    return given[0]


def n_nextn(gguf: GGUF, arch: str, n_layer: int) -> int:
    """Blocks at the end of the file that predict further tokens and take no part in ordinary generation.

    Fine-tunes count them and leave them out; a block of the main stack among them means the counts disagree.
    """
    key = f"{arch}.nextn_predict_layers"
    n = gguf.int(key, 0)
    if not 0 <= n < n_layer:
        raise ModelFileError(f"{gguf.path}: {key} is {n} of {n_layer} blocks")
    if not n:
        return 0
    counted = tuple(f"blk.{i}." for i in range(n_layer - n, n_layer))
    names = [name for name in gguf.tensors if name.startswith(counted)]
    predicting = {scope(name) for name in names if name.startswith(f"{scope(name)}.nextn.")}
    for block in map(scope, names):
        if block not in predicting:
            raise ModelFileError(
                f"{gguf.path}: {key} is {n}, but {block} has no tensor {block}.nextn.*, so it is a layer like any "
                f"other; is {arch}.block_count ({n_layer}) without the prediction blocks?"
            )
    return n


def _n_vocab(gguf: GGUF) -> int:
    tensor = gguf.tensors.get("token_embd.weight")
    if tensor is None:
        raise ModelFileError(f"{gguf.path}: tensor token_embd.weight is missing; is this a vocabulary-only file?")
    return tensor.ne[1] if len(tensor.ne) > 1 else 1


def _rope(gguf: GGUF, arch: str, style: str, head_dim: int, default: int) -> Rope:
    n_rot = gguf.int(f"{arch}.rope.dimension_count", default)
    if not 0 < n_rot <= head_dim or n_rot % 2:
        raise ModelFileError(f"{gguf.path}: {arch}.rope.dimension_count is {n_rot} for heads of {head_dim}")
    base = gguf.float(f"{arch}.rope.freq_base", 10000.0)
    if not base > 1.0:  # or later pairs would not turn more slowly, and YaRN divides by its logarithm
        raise ModelFileError(f"{gguf.path}: {arch}.rope.freq_base is {base}, which is not more than 1")
    kind = gguf.str(f"{arch}.rope.scaling.type", "linear")
    factor = gguf.float(f"{arch}.rope.scaling.factor", gguf.float(f"{arch}.rope.scale_linear", 0.0)) or 1.0
    if not factor > 0.0:
        raise ModelFileError(f"{gguf.path}: {arch}.rope.scaling.factor is {factor}")
    attn_factor = gguf.float(f"{arch}.rope.scaling.attn_factor", 1.0)
    if not attn_factor > 0.0:
        raise ModelFileError(f"{gguf.path}: {arch}.rope.scaling.attn_factor is {attn_factor}")
    if kind == "none":
        return Rope(style, n_rot, base, 1.0, 0, attn_factor)
    if kind == "linear":
        return Rope(style, n_rot, base, 1.0 / factor, 0, attn_factor)
    if kind == "yarn":
        n_ctx_orig = gguf.int(f"{arch}.rope.scaling.original_context_length", gguf.int(f"{arch}.context_length"))
        if n_ctx_orig < 1:
            raise ModelFileError(f"{gguf.path}: {arch}.rope.scaling.original_context_length is {n_ctx_orig}")
        return Rope(style, n_rot, base, 1.0 / factor, n_ctx_orig, attn_factor * yarn_magnitude(factor))
    raise UnsupportedModelError(f"{gguf.path}: {arch}.rope.scaling.type is {kind!r}; known are none, linear and yarn")


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """1 + 0.1 m ln f, the growth of attention's logits that YaRN undoes ("attention temperature" of its paper)."""
    return 1.0 + 0.1 * multiplier * math.log(factor) if factor > 1.0 else 1.0
