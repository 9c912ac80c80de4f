"""Groups of ops -> launches of kernels, with every address, shape and argument in place.

`Lowering.launches(shape)` gives the launches of a step, group after group. Nothing of them depends on the step's
content: tokens, positions and the cache's fill are read from device memory (`Places`), so they are prepared once a
shape. Ops that only some models have, and which module has which op: `families`.
"""

from struct import Struct

from reflex_ipc import ops
from reflex_ipc.cuda import families, linear
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.places import CACHE_BYTES, PAGE, Cache, CacheLayout, Columns, Places, Shape
from reflex_ipc.cuda.products import Input, Matrix, limits_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Any

    from reflex_ipc.cuda.device import Device, Stream
    from reflex_ipc.cuda.fuse import Group
    from reflex_ipc.cuda.launch import Kernels, Launch
    from reflex_ipc.cuda.products import Call
    from reflex_ipc.ops import Value
    from reflex_ipc.plan import Plan

MIN_SHARE = 32  # positions that make a block of decoding's attention worth its start
MAX_SPLITS = 64

_HEADS = Struct(f"<7Q{CACHE_BYTES}s7if")
_DECODE = Struct("<3Qfi")  # behind _HEADS
_PREFILL = Struct(f"<4Q{CACHE_BYTES}s2if3i")


def tables_of(plan: "Plan") -> "dict[tuple[Any, ...], ops.Rope]":
    """The rotary tables a plan needs, by what tells them apart."""
    return {(op.rope, op.factors): op.rope for op in plan.ops if isinstance(op, ops.Rotate)}


class Lowering:
    """Makes launches. `weight(name)` is the address of a tensor.

    `is_dependent`: launches may start while the one before still runs. Every kernel waits itself before it reads what
    another computed; but some read weights before that, so it is for when all weights are there. `is_passing`: a
    launch is used up when the next one is asked for; it is the last one of its kernel with other arguments, which takes
    a third of the time of a new one.
    """

    def __init__(
        self,
        device: "Device",
        kernels: "Kernels",
        stream: "Stream",
        plan: "Plan",
        groups: "Sequence[Group]",
        columns: Columns,
        places: Places,
        weight: "Callable[[str], int]",
    ) -> None:
        self.kernels = kernels
        self.stream = stream
        self.plan = plan
        self.groups = groups
        self.columns = columns
        self.places = places
        self.weight = weight
        self.layout = CacheLayout(plan)
        self._exact = families.before_routers(plan)
        self.multiprocessors = device.attribute(device.MULTIPROCESSORS)
        self.limits = limits_of(device, kernels)
        self.is_dependent = self.is_passing = False
        self._last: dict[tuple[str, bool], Launch] = {}
        self._attentions = [op for op in plan.ops if isinstance(op, ops.Attention)]
        self.latents = families.latents(plan)
        self._blocks = 0
        self._can_expand: bool | None = None  # not known yet
        self.can_depend = device.capability >= (9, 0) and not kernels.is_ptx

    # Sizes

    def n_splits(self, n_tokens: int) -> int:
        """Blocks that share the positions of a head when the cache ends up with `n_tokens`: the same for all counts up
        to the next power of two, so that one graph serves them."""
        bucket = max(PAGE, 1 << (n_tokens - 1).bit_length())
        return max(1, min(bucket // MIN_SHARE, 2 * self.multiprocessors // self._least_blocks(), MAX_SPLITS))

    def n_expanded(self, n_tokens: int, n_positions: int) -> int:
        """Positions whose latents a step expands that leaves the cache with `n_positions`: the same for many of them;
        0 for a short step, and where there are no latents, or no kernels that expand them."""
        if n_tokens <= families.ABSORBED:  # most steps: nothing is looked up for them
            return 0
        if self._can_expand is None:
            self._can_expand = families.can_expand(self.plan)
        if not self._can_expand:
            return 0
        from reflex_ipc.cuda import latent  # only some models need it

        return latent.n_expanded(n_positions)

    def _least_blocks(self) -> int:
        if not self._blocks:  # every token of decoding asks
            blocks = [op.n_head_kv * _decode_shape(op)[2] for op in self._attentions]
            if self.latents:
                from reflex_ipc.cuda import latent  # only some models need it

                blocks += map(latent.decode_blocks, self.latents)
            self._blocks = max(blocks, default=1)
        return self._blocks

    def partial_bytes(self) -> int:
        """Room for what the blocks of decoding's attention leave each other."""
        widths = [op.n_head * (op.v.width // op.n_head_kv + 2) for op in self._attentions]
        return 4 * MAX_SPLITS * max(widths + [op.n_head * (op.rank + 2) for op in self.latents], default=0)

    def ticket_bytes(self) -> int:
        """Room for the counters of decoding's attention, which must be zero: no more than a head each, however many
        share a block."""
        heads = [op.n_head for op in self._attentions] + [op.n_head for op in self.latents]
        return 4 * max(heads, default=1)

    def linear_scratch(self, n_tokens: int, n_rows: int) -> int:
        """Bytes that products of so many rows need beside their inputs and outputs."""
        sizes = [0]
        for group in self.groups:
            products = [op for op in group.parts if isinstance(op, ops.Linear)]
            if products:
                n = n_rows if products[0].out.selected else n_tokens
                matrices = [
                    Matrix(self.plan.weights[op.weight].type.name, 0, op.out.width, 0, op.out.width) for op in products
                ]
                sizes.append(
                    linear.scratch_bytes(
                        self.limits,
                        n,
                        products[0].x.width,
                        matrices,
                        group.kind == "swiglu",
                        exact=self._is_exact(products),
                    )
                )
        return max(sizes)

    # Launches

    def launches(self, shape: Shape) -> "Iterator[tuple[Group | None, Iterator[Launch]]]":
        """The launches of a step, group by group; the first, of no group, make the rotary tables.

        A generator: a launch can be queued before those after it exist.
        """
        yield None, (self._table(key, shape) for key in self.places.tables)
        for group in self.groups:
            yield group, self.launches_of(group, shape)

    def launches_of(self, group: "Group", shape: Shape) -> "Iterator[Launch]":
        """The launches of one group."""
        of, what = (type(group.parts[0]), group.parts[0]) if group.kind == "op" else (group.kind, group)
        method = METHODS.get(of) or families.method(of)
        return method(self, what, shape)

    def at(self, value: "Value") -> int:
        """The address of a value."""
        p = self.places
        if value.selected:
            return p.selected + 4 * self.columns.start[value.name] * p.row_capacity
        return p.values + 4 * self.columns.start[value.name] * p.token_capacity

    def rows(self, value: "Value", shape: Shape) -> int:
        """How many rows a value has in a step."""
        return shape.n_rows if value.selected else shape.n_tokens

    def call(self, call: "Call") -> "Launch":
        """One launch of a product."""
        return self.launch(call.kernel, call.grid, call.block[0], call.arguments, call.shared, call.cluster)

    def launch(
        self,
        name: str,
        grid: "tuple[int, int, int]",
        block: int,
        arguments: "Sequence[Any]",
        shared: int = 0,
        cluster: "tuple[int, int, int] | None" = None,
    ) -> "Launch":
        known = self._last.get((name, self.is_dependent)) if self.is_passing else None
        if known is not None:
            known.grid, known.block, known.shared = grid, (block, 1, 1), shared
            if cluster is not None:
                known.cluster = cluster
            for index, value in enumerate(arguments):
                known.set(index, value)
            return known
        made = self.kernels.function(name).prepare(
            grid, (block, 1, 1), arguments, self.stream, shared=shared, dependent=self.is_dependent, cluster=cluster
        )
        if self.is_passing:
            self._last[name, self.is_dependent] = made
        return made

    def each(self, name: str, out: "Value", shape: Shape, inputs: "Sequence[int]", *more: int) -> "Launch":
        """A kernel of elementwise.cu."""
        n = out.width * self.rows(out, shape)
        return self.launch(name, self.wide(n), 256, [self.at(out), *inputs, n, *more])

    def wide(self, n: int) -> "tuple[int, int, int]":
        """The grid of 256 threads a block for n numbers that need nothing of each other."""
        return max(1, min(-(-n // 256), 16 * self.multiprocessors)), 1, 1

    def row_block(self, width: int) -> int:
        """Threads for a row whose numbers are added up."""
        return min(1024, aligned(-(-width // 4), 32))

    def cache_of(self, state: str, *, n_head_kv: int, d: int, d_v: int) -> Cache:
        """A layer's part of the cache."""
        return Cache(self.places.cache + self.layout.offsets[state], self.layout.page_bytes, n_head_kv, d, d_v)

    def _embed(self, op: ops.Embed, shape: Shape) -> "Iterator[Launch]":
        tensor = self.plan.weights[op.weight]
        arguments = [self.at(op.out), self.weight(op.weight), self.places.tokens, op.out.width, tensor.row_bytes, 0]
        grid = (-(-op.out.width // 16 // 128), shape.n_tokens, 1)
        yield self.launch(f"embed_{tensor.type.name}", grid, 128, arguments)

    def _rms_norm(self, op: ops.RmsNorm, shape: Shape) -> "Iterator[Launch]":
        width = op.x.width // op.n_group
        grid = (self.rows(op.x, shape) * op.n_group, 1, 1)
        yield self.launch(
            "rms_norm",
            grid,
            self.row_block(width),
            [self.at(op.out), self.at(op.x), self.weight(op.weight), width, op.eps],
        )

    def _swiglu(self, op: ops.SwiGlu, shape: Shape) -> "Iterator[Launch]":
        yield self.each("swiglu", op.out, shape, [self.at(op.gate), self.at(op.up)])

    def _add(self, op: ops.Add, shape: Shape) -> "Iterator[Launch]":
        yield self.each("add", op.out, shape, [self.at(op.a), self.at(op.b)])

    def _slice(self, op: ops.Slice, shape: Shape) -> "Iterator[Launch]":
        yield self.each("slice", op.out, shape, [self.at(op.x)], op.x.width // op.n_group, op.start, op.length)

    def _concat(self, op: ops.Concat, shape: Shape) -> "Iterator[Launch]":
        yield self.each("concat", op.out, shape, [self.at(op.a), self.at(op.b)], op.a.width, op.b.width)

    def _gate(self, op: ops.Gate, shape: Shape) -> "Iterator[Launch]":
        yield self.each("gate", op.out, shape, [self.at(op.x), self.at(op.gate)], op.x.width, op.gate.width)

    def _select_rows(self, op: ops.SelectRows, shape: Shape) -> "Iterator[Launch]":
        if shape.n_rows:
            # A decoding step's one row is row 0; `rows` may still hold a prompt's.
            rows = self.places.zero if shape.n_splits else self.places.rows
            yield self.each("select_rows", op.out, shape, [self.at(op.x), rows], op.x.width)

    # Products

    def _is_exact(self, products: "Sequence[ops.Linear]") -> bool:
        return any(op.out.name in self._exact for op in products)

    def _linear(self, op: ops.Linear, shape: Shape) -> "Iterator[Launch]":
        return self._products([op], op.x, shape)

    def _linears(self, group: "Group", shape: Shape) -> "Iterator[Launch]":
        norm, products = _split(group)
        return self._products(products, norm.x if norm else products[0].x, shape, norm)

    def _linear_swiglu(self, group: "Group", shape: Shape) -> "Iterator[Launch]":
        norm, (*products, act) = _split(group)
        x = norm.x if norm else products[0].x
        return self._products(products, x, shape, norm, out=act.out, swiglu=True)

    def _linear_add(self, group: "Group", shape: Shape) -> "Iterator[Launch]":
        product, addition = group.parts
        other = addition.b if addition.a == product.out else addition.a
        return self._products([product], product.x, shape, out=addition.out, residual=other)

    def _products(
        self,
        products: "Sequence[ops.Linear]",
        x: "Value",
        shape: Shape,
        norm: "ops.RmsNorm | None" = None,
        *,
        out: "Value | None" = None,
        residual: "Value | None" = None,
        swiglu: bool = False,
    ) -> "Iterator[Launch]":
        m = self.rows(x, shape)
        if not m:
            return
        matrices = [
            Matrix(
                type=self.plan.weights[op.weight].type.name,
                weight=self.weight(op.weight),
                n_out=op.out.width,
                out=self.at(out or op.out),
                out_stride=op.out.width,
                bias=self.weight(op.bias) if op.bias else 0,
                residual=self.at(residual) if residual else 0,
            )
            for op in products
        ]
        entry = Input(
            self.at(x), m, x.width, x.width, self.weight(norm.weight) if norm else 0, norm.eps if norm else 0.0
        )
        exact = self._is_exact(products)
        for call in linear.linear(self.limits, entry, matrices, self.places.scratch, swiglu=swiglu, exact=exact):
            yield self.call(call)

    # Rotation and attention

    def _table(self, key: "tuple[Any, ...]", shape: Shape) -> "Launch":
        rope, factors = key
        p = self.places
        arguments = [
            p.tables[key],
            p.positions,
            p.frequencies[key],
            self.weight(factors) if factors else 0,
            rope.magnitude,
            rope.n_rot // 2,
        ]
        return self.launch("rope_table", (shape.n_tokens, 1, 1), 64, arguments)

    def _rotate(self, op: ops.Rotate, shape: Shape) -> "Iterator[Launch]":
        d = op.x.width // op.n_head
        table = self.places.tables[op.rope, op.factors]
        arguments = [self.at(op.out), self.at(op.x), table, op.n_head, d, op.offset, op.rope.n_rot, _is_neox(op.rope)]
        yield self.launch("rotate", (shape.n_tokens, 1, 1), 256, arguments)

    def _attention(self, op: ops.Attention, shape: Shape) -> "Iterator[Launch]":
        heads = self._heads(op, op.q, op.k, op.v)
        yield self._finish_heads(op, heads, shape, 0)
        if shape.n_splits:
            yield self._decode(op, heads, shape, fused=False)
        else:
            yield self._prefill(op, self.at(op.q), shape)

    def _attention_group(self, group: "Group", shape: Shape) -> "Iterator[Launch]":
        op = group.parts[-1]
        rotations = {part.out.name: part for part in group.parts if isinstance(part, ops.Rotate)}
        norms = {part.out.name: part for part in group.parts if isinstance(part, ops.RmsNorm)}
        rotate_q, rotate_k = rotations[op.q.name], rotations[op.k.name]
        norm_q, norm_k = norms.get(rotate_q.x.name), norms.get(rotate_k.x.name)
        q, k = norm_q.x if norm_q else rotate_q.x, norm_k.x if norm_k else rotate_k.x
        heads = self._heads(op, q, k, op.v, rotate_q, norm_q, norm_k)
        if shape.n_splits:
            yield self._decode(op, heads, shape, fused=True)
        else:
            finished = self.places.scratch
            yield self._finish_heads(op, heads, shape, finished)
            yield self._prefill(op, finished, shape)

    def finished_bytes(self, n_tokens: int) -> int:
        """Room in the scratch for the finished queries of a prompt."""
        return max((4 * op.q.width * n_tokens for op in self._attentions), default=0)

    def _cache(self, op: ops.Attention) -> Cache:
        n = op.n_head_kv
        return self.cache_of(op.k_state, n_head_kv=n, d=op.k.width // n, d_v=op.v.width // n)

    def _heads(
        self,
        op: ops.Attention,
        q: "Value",
        k: "Value",
        v: "Value",
        rotate: "ops.Rotate | None" = None,
        norm_q: "ops.RmsNorm | None" = None,
        norm_k: "ops.RmsNorm | None" = None,
    ) -> bytes:
        norm = norm_q or norm_k
        return _HEADS.pack(
            self.at(q),
            self.at(k),
            self.at(v),
            self.weight(norm_q.weight) if norm_q else 0,
            self.weight(norm_k.weight) if norm_k else 0,
            self.places.tables[rotate.rope, rotate.factors] if rotate else 0,
            self.places.control,
            self._cache(op).pack(),
            q.width,
            k.width,
            v.width,
            op.n_head,
            rotate.offset if rotate else 0,
            rotate.rope.n_rot if rotate else 0,
            _is_neox(rotate.rope) if rotate else 0,
            norm.eps if norm else 0.0,
        )

    def _finish_heads(self, op: ops.Attention, heads: bytes, shape: Shape, q_out: int) -> "Launch":
        rows = 2 * op.n_head_kv + (op.n_head if q_out else 0)
        return self.launch("finish_heads", (-(-rows // 4), shape.n_tokens, 1), 128, [heads, q_out])

    def _decode(self, op: ops.Attention, heads: bytes, shape: Shape, *, fused: bool) -> "Launch":
        lanes, at_once, chunks = _decode_shape(op)
        p = self.places
        arguments = heads + _DECODE.pack(self.at(op.out), p.partial, p.tickets, op.scale, fused)
        return self.launch(
            f"attention_decode_{lanes}_{at_once}", (shape.n_splits, op.n_head_kv, chunks), 256, [arguments]
        )

    def _prefill(self, op: ops.Attention, q: int, shape: Shape) -> "Launch":
        return self.prefill(q, self.at(op.out), self._cache(op), op.n_head, op.n_head, op.scale, shape)

    def prefill(
        self,
        q: int,
        out: int,
        cache: Cache,
        n_head: int,
        stride: int,
        scale: float,
        shape: Shape,
        rest: tuple[int, int] = (0, 0),
    ) -> "Launch":
        """Attention of a step over a cache by n_head heads, of the `stride` that a row of q and of out has. `rest`:
        halves behind keys and values, where what their halves lose is, and how many numbers of a key have any."""
        name, width, rows, columns = _prefill_shape(cache.d, cache.d_v, exact=rest[0] > 0)
        p = self.places
        mask = p.mask if shape.is_tree else 0
        arguments = _PREFILL.pack(q, out, mask, p.control, cache.pack(), shape.n_tokens, n_head, scale, stride, *rest)
        tiles = -(-shape.n_tokens * (n_head // cache.n_head_kv) // rows)
        shared = 2 * (2 * rows + columns) * (width + 8) + 4 * (2 * columns + rows)
        return self.launch(f"attention_prefill_{name}", (tiles, cache.n_head_kv, 1), 2 * rows, [arguments], shared)


def _split(group: "Group") -> "tuple[ops.RmsNorm | None, list[Any]]":
    first, *rest = group.parts
    return (first, rest) if isinstance(first, ops.RmsNorm) else (None, [first, *rest])


def _is_neox(rope: ops.Rope) -> bool:
    return rope.style == "neox"


def _head_width(op: ops.Attention) -> int:
    return max(op.k.width, op.v.width) // op.n_head_kv


def _decode_shape(op: ops.Attention) -> tuple[int, int, int]:
    """Lanes a position, query heads at once, blocks for all query heads of a key head: attention_decode.cuh."""
    group = op.n_head // op.n_head_kv
    lanes = next(n for n in (8, 16, 32) if 8 * n >= _head_width(op))
    at_once = next(n for n in (1, 2, 4, 8) if n >= min(group, 8))
    return lanes, at_once, -(-group // at_once)


def _prefill_shape(d: int, d_v: int, *, exact: bool) -> tuple[str, int, int, int]:
    """Name, compiled width of keys, rows and columns of a tile: attention_prefill.cu."""
    if exact:
        return "exact", 192, 64, 32
    width = next(n for n in (64, 96, 128, 192, 256) if n >= max(d, d_v))
    return (str(width), width, 64, 64) if width <= 128 else (str(width), width, 32, 32)


METHODS: "dict[type | str, Callable[..., Iterator[Launch]]]" = {
    ops.Embed: Lowering._embed,
    ops.RmsNorm: Lowering._rms_norm,
    ops.Linear: Lowering._linear,
    ops.Rotate: Lowering._rotate,
    ops.Attention: Lowering._attention,
    ops.SwiGlu: Lowering._swiglu,
    ops.Add: Lowering._add,
    ops.Slice: Lowering._slice,
    ops.Concat: Lowering._concat,
    ops.Gate: Lowering._gate,
    ops.SelectRows: Lowering._select_rows,
    "linears": Lowering._linears,
    "swiglu": Lowering._linear_swiglu,
    "linear_add": Lowering._linear_add,
    "attention": Lowering._attention_group,
}
