"""Memory on a device for what is not a weight: where values lie while a step runs, and what there is beside them.

A value's room is given to others once nothing reads it any more. Rooms are counted in columns, so that they hold for
any number of rows: a value of width w with n rows takes w * n numbers from its column times the rows there is room for.
"""

import math
from struct import Struct

from reflex_ipc.cuda import families, lower
from reflex_ipc.cuda.driver import gib
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.places import PAGE, CacheLayout
from reflex_ipc.cuda.room import Room, ancestor_bytes, largest_step, step_limit
from reflex_ipc.cuda.sampling import CONTROL
from reflex_ipc.errors import OutOfMemoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from reflex_ipc.cuda.device import Device, Stream
    from reflex_ipc.cuda.lower import Lowering
    from reflex_ipc.cuda.memory import Memory
    from reflex_ipc.plan import Plan

SLACK, LEAST_SLACK = 1 << 17, 1 << 14
"""Positions beyond the context that have addresses: the branches of a tree lie there while they are computed. The
second where addresses can't be had without memory."""
LEAST_TOKENS = 64
"""Rows there is room for at least; more when a step has more."""


class Buffers:
    """An executor's memory, at the addresses of the lowering's `places`: a cache of up to n_ctx tokens (`layout`), what
    no step changes the size of, and what grows with steps. `forget` is called before an address becomes another that
    launches may know."""

    def __init__(
        self,
        device: "Device",
        stream: "Stream",
        plan: "Plan",
        layout: CacheLayout,
        lowering: "Lowering",
        n_ctx: int,
        forget: "Callable[[], None]",
    ) -> None:
        self._device = device
        self._stream = stream
        self._plan = plan
        self._branch_bytes = -1  # of a token of a tree, once one asked
        self._layout = layout
        self._lowering = lowering
        self._forget = forget
        self.places = lowering.places
        slack = SLACK if device.attribute(device.VIRTUAL_MEMORY) else LEAST_SLACK
        self._positions = n_ctx + slack
        self._cache = device.growing(layout.pages(self._positions) * layout.page_bytes, "keys and values")
        self.places.cache = self._cache.address
        self._backed = 0
        self._values: Memory | None = None
        self._inputs: Memory | None = None
        self._tree: Memory | None = None
        self._branches: Memory | None = None
        self._scored: Memory | None = None
        self._make_fixed()
        self.hold(LEAST_TOKENS, 1)

    def _make_fixed(self) -> None:
        """What no step changes the size of: rotary frequencies, room for partial results, counters."""
        p, device = self.places, self._device
        tables = lower.tables_of(self._plan)
        doubles = {key: rope.frequencies() for key, rope in tables.items()}
        frequencies = b"".join(Struct(f"<{len(f)}d").pack(*f) for f in doubles.values())
        heads = families.most_heads(self._plan)
        counted = Struct(f"<{heads}f").pack(*range(heads))
        states = {s.name: 4 * math.prod(s.shape) for s in self._plan.states if not s.per_token}
        partial, tickets = aligned(self._lowering.partial_bytes()), self._lowering.ticket_bytes() + 4
        sizes = [partial, tickets, len(frequencies), len(counted), *(2 * aligned(size) for size in states.values())]
        arena = device.arena(sum(map(aligned, sizes)), "partial results and recurrent states")
        p.partial = arena.take(partial, "partial results")
        p.tickets = arena.take(tickets, "counters")
        p.zero = p.tickets + tickets - 4
        self._stream.fill(p.tickets, 0, tickets)
        p.heads = arena.take(len(counted), "numbers of heads")
        if counted:
            self._stream.to_device(p.heads, counted)
        for name, size in states.items():
            p.states[name] = arena.take(2 * aligned(size), name), aligned(size)
        at = arena.take(len(frequencies), "rotary frequencies")
        if frequencies:
            self._stream.to_device(at, frequencies)
        for key, numbers in doubles.items():
            p.frequencies[key] = at
            at += 8 * len(numbers)

    def hold(self, n_tokens: int, n_rows: int, n_expanded: int = 0) -> None:
        """Buffers for a step of so many tokens and rows, and positions whose latents are expanded. What was there is
        lost, launches and graphs too."""
        p = self.places
        if n_tokens <= p.token_capacity and n_rows <= p.row_capacity and n_expanded <= p.expanded_capacity:
            return
        self._forget()
        p.token_capacity = max(p.token_capacity, aligned(n_tokens, 64))
        p.row_capacity = max(p.row_capacity, n_rows)
        p.expanded_capacity = max(p.expanded_capacity, n_expanded)
        for memory in (self._values, self._inputs):
            if memory is not None:
                memory.close()
        room = Room(self._lowering, p.token_capacity, p.row_capacity, p.expanded_capacity)
        p.scratch_size = room.scratch
        self._values = arena = self._device.arena(room.arena, "working space")
        p.values = arena.take(room.values, "activations")
        p.selected = arena.take(room.selected, "logits")
        p.scratch = arena.take(room.scratch, "products")
        for key, size in room.tables.items():
            p.tables[key] = arena.take(size, "rotary tables")
        self._inputs = inputs = self._device.allocate(room.inputs, "a step's inputs")
        p.control = inputs.address
        p.tokens = p.control + CONTROL.size
        p.positions = p.tokens + 4 * p.token_capacity
        p.rows = p.positions + 4 * p.token_capacity

    def back(self, n_tokens: int) -> None:
        """Put memory behind the cache's first `n_tokens` positions."""
        if n_tokens <= self._backed:
            return
        size = self._layout.pages(n_tokens) * self._layout.page_bytes
        try:
            self._cache.ensure(0, size)
        except OutOfMemoryError as error:
            free, _ = self._device.memory()
            raise OutOfMemoryError(
                f"a cache for {n_tokens} tokens takes {gib(size)} of device memory, {gib(self._cache.backed)} of it "
                f"are there; {gib(free)} are free: {error}"
            ) from None
        self._backed = self._layout.pages(n_tokens) * PAGE

    def hold_tree(self, n_tokens: int) -> None:
        """Room for the ancestors and the states of a tree of so many tokens."""
        p = self.places
        self._tree = self._room(self._tree, ancestor_bytes(n_tokens, p.token_capacity), "a tree's ancestors")
        self._branches = self._room(self._branches, self._branch(n_tokens), "a tree's states")
        p.parents, p.branches = self._tree.address, self._branches.address

    def hold_scores(self, size: int) -> int:
        """The address of room for log-probabilities."""
        self._scored = self._room(self._scored, size, "log-probabilities")
        return self._scored.address

    def step_limit(self, n_past: int, n_tokens: int) -> int:
        """How many of `n_tokens` one step behind `n_past` others may have, by the memory there is."""
        n_tokens = min(n_tokens, self._positions - n_past)
        if n_tokens <= LEAST_TOKENS:  # most decisions: nothing is looked up for them
            return n_tokens
        n_tokens = min(n_tokens, largest_step(self._lowering))
        p, n_expanded = self.places, self._lowering.n_expanded(n_tokens, n_past + n_tokens)
        if n_tokens <= p.token_capacity and n_expanded <= p.expanded_capacity and not self._branch(1):
            return n_tokens
        free, _ = self._device.memory()
        held = (self._values, self._inputs, self._tree, self._branches)
        free += sum(memory.size for memory in held if memory is not None)  # given back when more is asked for
        limit = step_limit(self._lowering, n_past, self._backed, n_tokens, free // 8 * 7)
        return max(LEAST_TOKENS, limit)

    def _branch(self, n_tokens: int) -> int:
        """Bytes of the states of a tree of so many tokens."""
        if self._branch_bytes < 0:
            self._branch_bytes = families.branch_bytes(self._plan, 1)
        return self._branch_bytes * n_tokens

    def _room(self, memory: "Memory | None", size: int, what: str) -> "Memory":
        """Memory of at least this size: the one there is, or another, which makes launches that know it worthless."""
        if memory is not None and memory.size >= size:
            return memory
        if memory is not None:
            memory.close()
        self._forget()
        return self._device.allocate(max(size, 1 << 16), what)
