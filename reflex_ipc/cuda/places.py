"""What launches are made for and from: the shape of a step, addresses on the device, which columns values have, the
layout of the cache."""

from struct import Struct

from reflex_ipc import ops
from reflex_ipc.cuda.memory import aligned

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from reflex_ipc.cuda.fuse import Group
    from reflex_ipc.plan import Plan

PAGE = 256
"""Positions of a page of the cache: kernels/cache.cuh."""
STEP = 64
"""Columns begin at multiples of this, so that every value is aligned to 256 bytes whatever the rows."""
_CACHE = Struct("<Qq3i4x")
CACHE_BYTES = _CACHE.size


class Shape:
    """What launches depend on: tokens, rows that want logits, whether `parents` form a tree, the blocks that share the
    positions of one head in decoding (0 for a prompt), and how many positions' latents are expanded at most (0: they
    are attended to as they are)."""

    __slots__ = ("is_tree", "n_expanded", "n_rows", "n_splits", "n_tokens")

    def __init__(
        self, n_tokens: int, n_rows: int, is_tree: bool = False, n_splits: int = 0, n_expanded: int = 0
    ) -> None:
        self.n_tokens = n_tokens
        self.n_rows = n_rows
        self.is_tree = is_tree
        self.n_splits = n_splits
        self.n_expanded = n_expanded

    @property
    def key(self) -> tuple[int, int, bool, int, int]:
        return self.n_tokens, self.n_rows, self.is_tree, self.n_splits, self.n_expanded


class Places:
    """Addresses on the device of everything that is not a weight."""

    __slots__ = (
        "ancestors",
        "branches",
        "cache",
        "control",
        "expanded_capacity",
        "frequencies",
        "heads",
        "mask",
        "parents",
        "partial",
        "positions",
        "recurrent",
        "row_capacity",
        "rows",
        "scratch",
        "scratch_size",
        "selected",
        "states",
        "tables",
        "tickets",
        "token_capacity",
        "tokens",
        "values",
        "zero",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)
        self.tables: dict[tuple[Any, ...], int] = {}
        self.frequencies: dict[tuple[Any, ...], int] = {}
        self.states: dict[str, tuple[int, int]] = {}  # address of the first of two, and how far behind it the other is

    values: int  # (columns, token_capacity) float32 in all
    selected: int  # (columns, row_capacity)
    token_capacity: int
    row_capacity: int
    expanded_capacity: int  # positions, as `Shape.n_expanded`, that scratch has room for
    tokens: int  # (token_capacity) int32, and so positions
    positions: int
    rows: int  # (row_capacity) int32
    ancestors: int  # behind the rows: room for parents and mask of a tree of up to LEAST_TOKENS
    parents: int  # (T) int32, of a tree; then the mask: a row a token of 1 + ceil(T/32) words
    mask: int
    branches: int  # recurrent states behind the tokens of a tree, a layer at a time
    recurrent: tuple[int, int]  # address and bytes of the first of every two states, side by side; then the second ones
    heads: int  # the numbers 0, 1, 2 ... in float32: heads as if they were experts
    control: int  # its first word is the number of tokens in the cache
    cache: int
    partial: int
    tickets: int
    zero: int  # a word that is 0
    scratch: int
    scratch_size: int


class Columns:
    """`start[name]` is the first column of each value; `width` and `selected_width` the columns of all, for values with
    a row a token and for those with a row that wants logits."""

    def __init__(self, groups: "Sequence[Group]", last: str) -> None:
        self.start: dict[str, int] = {}
        self.width = self.selected_width = 0
        last_read = {value.name: i for i, group in enumerate(groups) for value in group.inputs}
        last_read[last] = len(groups)
        alive: dict[bool, list[tuple[int, int, str]]] = {False: [], True: []}
        for i, group in enumerate(groups):
            for value in group.outputs:
                rooms = alive[value.selected]
                columns = -(-value.width // STEP) * STEP
                at = 0
                for start, size, _ in sorted(rooms):
                    if start - at >= columns:
                        break
                    at = max(at, start + size)
                self.start[value.name] = at
                rooms.append((at, columns, value.name))
                if value.selected:
                    self.selected_width = max(self.selected_width, at + columns)
                else:
                    self.width = max(self.width, at + columns)
            for rooms in alive.values():
                rooms[:] = [room for room in rooms if last_read.get(room[2], i) > i]


class Cache:
    """A cache of keys and values, or of latents, as kernels take it: `Cache` of kernels/cache.cuh. `address` is that of
    its part of the first page; of d numbers is a key, of d_v a value."""

    __slots__ = ("address", "d", "d_v", "n_head_kv", "page_bytes")

    def __init__(self, address: int, page_bytes: int, n_head_kv: int, d: int, d_v: int) -> None:
        self.address = address
        self.page_bytes = page_bytes
        self.n_head_kv = n_head_kv
        self.d = d
        self.d_v = d_v

    def pack(self) -> bytes:
        """CACHE_BYTES of a kernel's arguments."""
        return _CACHE.pack(self.address, self.page_bytes, self.n_head_kv, self.d, self.d_v)


class CacheLayout:
    """Where each layer's keys and values lie within a page of PAGE positions."""

    def __init__(self, plan: "Plan") -> None:
        self.offsets: dict[str, int] = {}  # by the name of the state of keys or latents
        self.page_bytes = 0
        for op in plan.ops:
            if isinstance(op, ops.Attention):
                self.offsets[op.k_state] = self.page_bytes
                rows = 2 * (op.k.width + op.v.width) + 2 * 4 * op.n_head_kv
                self.page_bytes += aligned(PAGE * rows)
            elif isinstance(op, ops.LatentAttention):
                self.offsets[op.state] = self.page_bytes
                self.page_bytes += aligned(PAGE * (2 * op.latent.width + 2 * 4))

    def pages(self, n_tokens: int) -> int:
        """Pages that hold `n_tokens`."""
        return -(-n_tokens // PAGE)
