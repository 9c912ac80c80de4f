"""Launches of latent attention: absorbed for a few tokens, expanded for a long step. See `families`.

Absorbed (kernels/latent.cu), a query times its head's keys' matrix is compared with the latents themselves, which are
mixed as they are and multiplied with the values' matrix at last. Expanded (kernels/expand.cu), every position's latent
becomes each head's key and value first, and attention is that of any model (kernels/attention_prefill.cu).

Which form, estimated and not measured, for an H200 and a head of DeepSeek-V2 (rank 512, keys 128 + 64, values 128),
with P positions of which each of T tokens sees most:

    absorbed    a pair of token and position: 2 (576 + 512) = 2,176 operations in float32, 75 instructions of a warp
                where four heads share a block, else 187, so 81 or 202 ps on 132 multiprocessors; a token: 6 ns for
                the products with both matrices
    expanded    a position: 2 * 512 * 256 = 262 k operations, twice as weights have two planes: 2.1 ns at 250
                TFLOP/s; a pair: 2 (2 * 192 + 128 + 3 * 128) = 1,792 operations, 12 ps at 150 TFLOP/s

Both grow with P alike, so what decides is T alone: 2.1 ns are less than T times 69 ps from 31 tokens on. But tiles have
64 rows; with fewer tokens one is not full, and there are as many blocks as heads: 16 of V2-Lite on 132 multiprocessors
take some 300 us for 4,096 positions, and expanding these 140 us: as long as 83 tokens absorbed in shared blocks, and 33
in others. Where there is no past, 64 tokens take 9 us absorbed, of which expanded saves most and spends it on launches.
So up to 64 tokens, for which there are buffers from the start, are absorbed.
"""

from struct import Struct

from reflex_ipc import ops
from reflex_ipc.cuda import experts
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.places import PAGE, Cache
from reflex_ipc.cuda.products import Experts, Input, Matrix

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from reflex_ipc.cuda.launch import Launch
    from reflex_ipc.cuda.lower import Lowering
    from reflex_ipc.cuda.places import Shape
    from reflex_ipc.gguf import Tensor
    from reflex_ipc.plan import Plan

LARGEST_RANK = 1024  # kernels/latent.cu
SHARING = 4
"""Heads of a block of absorbed attention where there are many: kernels/latent.cu."""
EXPANDED = 256 << 20
"""Bytes of scratch for what is expanded at a time, of as many heads as there is room for; more where one takes more."""

_LARGEST = 192, 128  # numbers of keys and of values that there are kernels for: attention_prefill.cu, expand.cu
_LEAST_POSITIONS = 1024
_TILE, _COLUMNS = 8, 64  # tokens and columns of a block of `absorb`
_ROWS, _EXPAND_SHARED = 128, 3 * (128 + 128) * 80  # positions of a block of `expand`, bytes of its stages

_FIRST, _LATENT = Struct("<5Q"), Struct("<2Q4ifI")  # before and behind the cache
_ABSORB = Struct("<3Q6i")
_HALVE = Struct("<3Q4iq")
_EXPAND = Struct("<3Q4i")  # behind both caches


def refusal(op: ops.LatentAttention) -> str | None:
    """Why the kernels cannot run this op, or None."""
    if op.rank > LARGEST_RANK or op.rank % 8 or op.latent.width % 8:
        return f"has latents of rank {op.rank}; the CUDA kernels take multiples of 8 up to {LARGEST_RANK}"
    return None


def can_expand(op: ops.LatentAttention) -> bool:
    """Whether there are kernels for its keys and values; where there are none, steps of all sizes are absorbed."""
    (d_q, d_nope, d_v), (d_most, d_v_most) = _widths(op), _LARGEST
    return d_q <= d_most and max(d_nope, d_v) <= d_v_most and not (d_q % 8 or d_v % 8)


def n_expanded(n_positions: int) -> int:
    """`Shape.n_expanded` of a step that is expanded, behind which the cache has `n_positions`: the next power of two,
    so that one shape serves many."""
    return max(_LEAST_POSITIONS, 1 << (n_positions - 1).bit_length())


def scratch_bytes(plan: "Plan", op: ops.LatentAttention, n_tokens: int, n_expanded: int, absorbed: int) -> int:
    """Room between launches for steps of up to so many tokens and expanded positions; those of up to `absorbed` tokens
    are absorbed, and all of them where no positions are expanded."""
    if not n_expanded or not can_expand(op):
        return _absorbed_bytes(plan, op, n_tokens)
    one, every = (_Room(plan, op, n_head, n_expanded, 0).end for n_head in (1, op.n_head))
    return max(_absorbed_bytes(plan, op, min(n_tokens, absorbed)), min(every, max(one, EXPANDED)))


def decode_blocks(op: ops.LatentAttention) -> int:
    """Blocks of a decoding step if none share positions; those of several heads count twice: the last one puts together
    what all have left of each."""
    return 2 * -(-op.n_head // SHARING)


def latent_attention(low: "Lowering", op: ops.LatentAttention, shape: "Shape") -> "Iterator[Launch]":
    cache = low.cache_of(op.state, n_head_kv=1, d=op.latent.width, d_v=0).pack()
    yield low.launch("store_latent", (shape.n_tokens, 1, 1), 32, [cache, low.at(op.latent), low.places.control])
    form = _expand if shape.n_expanded and can_expand(op) else _absorbed
    yield from form(low, op, shape, cache)


def _widths(op: ops.LatentAttention) -> tuple[int, int, int]:
    """Numbers of a query, of its unrotated part, and of what a head makes of its mixed latents."""
    d_q = op.q.width // op.n_head
    return d_q, d_q - (op.latent.width - op.rank), op.out.width // op.n_head


def _heads_of(tensor: "Tensor", op: ops.LatentAttention, ids: int = 0) -> Experts:
    """Every head has a matrix of its own: heads are experts, and all of them are used."""
    return Experts(ids, 0, op.n_head, tensor.nbytes // op.n_head, op.n_head)


# Absorbed


def _between(op: ops.LatentAttention, n_tokens: int) -> tuple[int, int, int]:
    """Bytes of what the products with keys' matrices begin with, of absorbed queries, and of mixed latents. The first
    are the queries' unrotated parts; of files that have `attn_kv_b` in one piece, its keys' rows as float32."""
    _, d_nope, _ = _widths(op)
    latents = 4 * n_tokens * op.n_head * op.rank
    return 4 * op.n_head * d_nope * (n_tokens if len(op.weights) == 2 else op.rank), latents, latents


def _absorbed_bytes(plan: "Plan", op: ops.LatentAttention, n_tokens: int) -> int:
    """Room in the scratch for a step of up to so many tokens, absorbed."""
    between, need = aligned(sum(_between(op, n_tokens))), 0
    for name in op.weights:
        tensor = plan.weights[name]
        heads = _heads_of(tensor, op)
        size = experts.expert_scratch_bytes(n_tokens, tensor.ne[0], tensor.type.name, heads, per_expert=True)
        need = max(need, between + size)
    return need


def _absorbed(low: "Lowering", op: ops.LatentAttention, shape: "Shape", cache: bytes) -> "Iterator[Launch]":
    n, n_head, rank, p = shape.n_tokens, op.n_head, op.rank, low.places
    d_q, d_nope, d_v = _widths(op)
    first, latents, _ = sizes = _between(op, n)
    absorbed = p.scratch + first
    mixed = absorbed + latents
    scratch = p.scratch + aligned(sum(sizes))
    yield from (_absorb if len(op.weights) == 2 else _absorb_rows)(low, op, n, absorbed, scratch)
    mask = p.mask if shape.is_tree else 0
    arguments = _FIRST.pack(mixed, absorbed, low.at(op.q), mask, p.control) + cache
    arguments += _LATENT.pack(p.partial, p.tickets, n, n_head, rank, d_q, op.scale, 0)
    # Heads share a block, and what it reads of latents, where there are blocks for all multiprocessors all the same.
    n_shared = -(-n_head // SHARING)
    at_once = SHARING if shape.n_splits or n * n_shared >= low.multiprocessors else 1
    grid = (-(-n_head // at_once), n, max(1, shape.n_splits))
    yield low.launch(f"attention_latent_{at_once}", grid, 256, [arguments], 4 * at_once * op.latent.width)
    entry = Input(mixed, n, rank, n_head * rank)
    values = low.plan.weights[op.weights[-1]]
    weight = low.weight(values.name) + (0 if len(op.weights) == 2 else d_nope * values.row_bytes)
    matrix = Matrix(values.type.name, weight, d_v, low.at(op.out), d_v)
    heads = _heads_of(values, op, p.heads)
    yield from map(low.call, experts.expert_linear(low.limits, entry, [matrix], heads, scratch, per_expert=True))


def _absorb(low: "Lowering", op: ops.LatentAttention, n: int, absorbed: int, scratch: int) -> "Iterator[Launch]":
    """absorbed[t][h] = k_b[h] q_nope[t][h]."""
    d_q, d_nope, _ = _widths(op)
    k_b = low.plan.weights[op.weights[0]]
    plain, numbers = low.places.scratch, n * op.n_head * d_nope
    yield low.launch("slice", low.wide(numbers), 256, [plain, low.at(op.q), numbers, d_q, 0, d_nope])
    entry = Input(plain, n, d_nope, op.n_head * d_nope)
    matrix = Matrix(k_b.type.name, low.weight(k_b.name), op.rank, absorbed, op.rank)
    heads = _heads_of(k_b, op, low.places.heads)
    yield from map(low.call, experts.expert_linear(low.limits, entry, [matrix], heads, scratch, per_expert=True))


def _absorb_rows(low: "Lowering", op: ops.LatentAttention, n: int, absorbed: int, _: int) -> "Iterator[Launch]":
    """The same from one `attn_kv_b`, which has k_b[h] by columns: they are dequantised once a step."""
    d_q, d_nope, d_v = _widths(op)
    name = op.weights[0]
    columns = low.places.scratch
    yield _dequantised(low, name, columns, 0, op.n_head, d_nope, d_nope + d_v)
    arguments = _ABSORB.pack(absorbed, low.at(op.q), columns, n, op.n_head, op.rank, d_nope, d_q, 0)
    yield low.launch("absorb", (-(-op.rank // _COLUMNS), op.n_head, -(-n // _TILE)), _COLUMNS, [arguments])


def _dequantised(low: "Lowering", name: str, out: int, head: int, n_head: int, rows: int, of_rows: int = 0) -> "Launch":
    """The first `rows` of the matrices of n_head heads from `head` on, as float32 (n_head, rows, width) at `out`. A
    matrix has `of_rows`, if not as many."""
    tensor = low.plan.weights[name]
    width, row_bytes = tensor.ne[0], tensor.row_bytes
    matrix_bytes = (of_rows or rows) * row_bytes
    grid = (-(-width // 16 // 32), rows, n_head)
    arguments = [out, low.weight(name) + head * matrix_bytes, 0, width, row_bytes, matrix_bytes]
    return low.launch(f"embed_{tensor.type.name}", grid, 32, arguments)


# Expanded


class _Room:
    """How scratch is divided for some heads: keys and values of so many positions as a cache of their own, whose pages
    have the same of what halves lose, `rest` halves on; then their matrices as halves in one or two planes and their
    rows' scales, then what becomes halves, float32."""

    def __init__(self, plan: "Plan", op: ops.LatentAttention, n_head: int, n_positions: int, scratch: int) -> None:
        d_q, d_nope, d_v = _widths(op)
        self.planes = 1 if all(plan.weights[name].type.name in ("F16", "BF16") for name in op.weights) else 2
        self.plane = n_head * (d_nope + d_v) * op.rank
        self.cache = scratch
        self.rest = PAGE * n_head * (d_q + d_v + 4)
        self.page_bytes = 4 * self.rest
        self.matrices = scratch + n_positions // PAGE * self.page_bytes
        self.scale = aligned(self.matrices + 2 * self.planes * self.plane)
        self.numbers = aligned(self.scale + 4 * n_head * (d_nope + d_v))
        rows = max(d_nope, d_v) if len(op.weights) == 2 else d_nope + d_v
        self.end = self.numbers + 4 * n_head * rows * op.rank


def _heads_at_a_time(plan: "Plan", op: ops.LatentAttention, n_positions: int) -> int:
    """As many as there is room for, at least one, and about the same in every turn."""
    fit = max(1, EXPANDED // _Room(plan, op, 1, n_positions, 0).end)
    turns = -(-op.n_head // fit)
    return -(-op.n_head // turns)


def _expand(low: "Lowering", op: ops.LatentAttention, shape: "Shape", cache: bytes) -> "Iterator[Launch]":
    d_q, d_nope, d_v = _widths(op)
    n_positions, p = shape.n_expanded, low.places
    at_a_time = _heads_at_a_time(low.plan, op, n_positions)
    for head in range(0, op.n_head, at_a_time):
        n_head = min(at_a_time, op.n_head - head)
        room = _Room(low.plan, op, n_head, n_positions, p.scratch)
        yield from _halves(low, op, room, head, n_head)
        keys_and_values = Cache(room.cache, room.page_bytes, n_head, d_q, d_v)
        arguments = cache + keys_and_values.pack()
        arguments += _EXPAND.pack(room.matrices, room.scale, p.control, shape.n_tokens, op.rank, room.planes, room.rest)
        grid = (-(-n_positions // _ROWS), n_head, 2)
        yield low.launch("expand", grid, 256, [arguments], _EXPAND_SHARED)
        q, out = low.at(op.q) + 4 * head * d_q, low.at(op.out) + 4 * head * d_v
        yield low.prefill(q, out, keys_and_values, n_head, op.n_head, op.scale, shape, (room.rest, d_nope))


def _halves(low: "Lowering", op: ops.LatentAttention, room: _Room, head: int, n_head: int) -> "Iterator[Launch]":
    """These heads' matrices as halves, rows of keys' before those of values': k_b is stored by columns."""
    _, d_nope, d_v = _widths(op)
    n_rows = d_nope + d_v
    parts = [(0, n_rows, False)] if len(op.weights) == 1 else [(0, d_nope, True), (d_nope, d_v, False)]
    for name, (first, n, is_turned) in zip(op.weights, parts, strict=True):
        yield _dequantised(low, name, room.numbers, head, n_head, op.rank if is_turned else n)
        arguments = _HALVE.pack(
            room.matrices + 2 * first * op.rank,
            room.scale + 4 * first,
            room.numbers,
            n,
            op.rank,
            n_rows,
            is_turned,
            room.plane if room.planes > 1 else 0,
        )
        yield low.launch("halve", (-(-n // 32), n_head, 1), 256, [arguments])


METHODS: "dict[type | str, Callable[..., Iterator[Launch]]]" = {ops.LatentAttention: latent_attention}
