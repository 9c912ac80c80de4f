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
from reflex_ipc.cuda.room import LEAST_ROWS, LEAST_TOKENS, Room, ancestor_bytes, largest_step, step_limit
from reflex_ipc.cuda.sampling import CONTROL
from reflex_ipc.errors import OutOfMemoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from reflex_ipc.cuda.device import Device, Stream
    from reflex_ipc.cuda.lower import Lowering
    from reflex_ipc.cuda.memory import Memory, Pinned
    from reflex_ipc.plan import Plan

SLACK, LEAST_SLACK = 1 << 17, 1 << 14
"""Positions beyond the context that have addresses: the branches of a tree lie there while they are computed. The
second where addresses can't be had without memory."""
ANSWER_BYTES = 4096
"""Of log-probabilities that a kernel writes to memory of the host; where there are more, they are fetched."""
_ANCESTORS, _BRANCHES = "a tree's ancestors", "a tree's states"


class Buffers:
    """An executor's memory, at the addresses of the lowering's `places`: a cache of up to n_ctx tokens (`layout`), what
    no step changes the size of, and what grows with steps. `forget` is called before an address becomes another that
    launches may know, or logits are lost."""

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
        self._working: Memory | None = None
        self._rooms: dict[str, Memory] = {}  # by what is in them
        self.answers: Pinned | None = None
        self._has_asked = False  # for room for them
        self._granted = 0, 0  # tokens of a step that memory holds, and the positions with it: counting takes 1 ms
        self._make_fixed()
        self._hold_values(LEAST_TOKENS, LEAST_ROWS, 0)

    def _make_fixed(self) -> None:
        """What no step changes the size of: rotary frequencies, room for partial results, counters."""
        p, device = self.places, self._device
        tables = lower.tables_of(self._plan)
        doubles = {key: rope.frequencies() for key, rope in tables.items()}
        frequencies = b"".join(Struct(f"<{len(f)}d").pack(*f) for f in doubles.values())
        heads = max((op.n_head for op in self._lowering.latents), default=0)  # that latent attention numbers
        counted = Struct(f"<{heads}f").pack(*range(heads))
        states = {s.name: aligned(4 * math.prod(s.shape)) for s in self._plan.states if not s.per_token}
        n_recurrent = sum(states.values())
        partial, tickets = aligned(self._lowering.partial_bytes()), self._lowering.ticket_bytes() + 4
        sizes = [partial, tickets, len(frequencies), len(counted), 2 * n_recurrent]
        arena = device.arena(sum(map(aligned, sizes)), "partial results and recurrent states")
        p.partial, self._partial_size = arena.take(partial, "partial results"), partial
        p.tickets = arena.take(tickets, "counters")
        p.zero = p.tickets + tickets - 4
        self._stream.fill(p.tickets, 0, tickets)
        p.heads = arena.take(len(counted), "numbers of heads")
        if counted:
            self._stream.to_device(p.heads, counted)
        at = arena.take(2 * n_recurrent, "recurrent states")
        p.recurrent = at, n_recurrent
        for name, size in states.items():
            p.states[name] = at, n_recurrent
            at += size
        at = arena.take(len(frequencies), "rotary frequencies")
        if frequencies:
            self._stream.to_device(at, frequencies)
        for key, numbers in doubles.items():
            p.frequencies[key] = at
            at += 8 * len(numbers)

    def hold(self, n_past: int, n_tokens: int, n_rows: int, n_expanded: int, is_tree: bool) -> None:
        """Memory for a step of so many tokens behind `n_past` others, of which `n_rows` want logits; of `n_expanded`
        positions latents are expanded. Where buffers become others, what was in them is lost, launches and graphs too.

        Raises OutOfMemoryError: there may be no buffers then, and the next step makes those that it takes.
        """
        try:
            self._hold(n_past, n_tokens, n_rows, n_expanded, is_tree)
        except OutOfMemoryError:
            # Buffers are for the most that any step so far had of each. What this one has of all may fit alone.
            self._give_back()
            self._hold(n_past, n_tokens, n_rows, n_expanded, is_tree)

    def _hold(self, n_past: int, n_tokens: int, n_rows: int, n_expanded: int, is_tree: bool) -> None:
        self.back(n_past + n_tokens)
        self._hold_values(n_tokens, n_rows, n_expanded)
        if is_tree:
            self._hold_tree(n_tokens)

    def _hold_values(self, n_tokens: int, n_rows: int, n_expanded: int) -> None:
        p = self.places
        if n_tokens <= p.token_capacity and n_rows <= p.row_capacity and n_expanded <= p.expanded_capacity:
            return
        if n_expanded and p.token_capacity:  # but after a failure: as many as the sequence may come to
            n_expanded = max(n_expanded, self._lowering.n_expanded(n_tokens, self._backed))
        n_tokens, n_rows = max(aligned(n_tokens, 64), p.token_capacity), max(n_rows, p.row_capacity)
        n_expanded = max(n_expanded, p.expanded_capacity)
        room = Room(self._lowering, n_tokens, n_rows, n_expanded)
        if (n_tokens, n_rows) != (p.token_capacity, p.row_capacity) or room.scratch > p.scratch_size:
            self._forget()
            self._close_working()
            self._working = arena = self._device.arena(room.size, "working space")
            p.control = arena.take(room.inputs, "a step's inputs")
            p.tokens = p.control + CONTROL.size
            p.positions = p.tokens + 4 * n_tokens
            p.rows = p.positions + 4 * n_tokens
            p.ancestors = p.rows + 4 * n_rows
            p.values = arena.take(room.values, "activations")
            p.selected = arena.take(room.selected, "logits")
            p.scratch = arena.take(room.scratch, "products")
            p.scratch_size = room.scratch
            for key, size in room.tables.items():
                p.tables[key] = arena.take(size, "rotary tables")
        p.token_capacity, p.row_capacity, p.expanded_capacity = n_tokens, n_rows, n_expanded

    def _hold_tree(self, n_tokens: int) -> None:
        """Room for the ancestors and the states of a tree of so many tokens. Few tokens' ancestors go with the other
        inputs, in one copy."""
        p = self.places
        is_small = n_tokens <= LEAST_TOKENS
        sizes = {_ANCESTORS: 0 if is_small else ancestor_bytes(n_tokens), _BRANCHES: self._branch(n_tokens)}
        if any(self._size(what) < size for what, size in sizes.items() if what in self._rooms):
            self._forget()
        p.branches = self._room(_BRANCHES, sizes[_BRANCHES]) if sizes[_BRANCHES] else 0
        p.parents = p.ancestors if is_small else self._room(_ANCESTORS, sizes[_ANCESTORS])
        p.mask = p.parents + 4 * n_tokens

    def _room(self, what: str, size: int) -> int:
        """The address of memory of at least this size: of what there is, or of other memory in its place."""
        memory = self._rooms.pop(what, None)  # until there is other memory, there is none
        if memory is not None and memory.size < size:
            memory.close()
            memory = None
        if memory is None:
            memory = self._device.allocate(max(size, 1 << 16), what)
        self._rooms[what] = memory
        return memory.address

    def _close_working(self) -> None:
        p, working = self.places, self._working
        p.token_capacity = p.row_capacity = p.expanded_capacity = p.scratch_size = 0
        self._working = None
        if working is not None:
            working.close()

    def _give_back(self) -> None:
        """Everything that steps take, but for the cache. It is done where memory was less than it seemed."""
        self._granted = 0, 0
        self._forget()
        self._close_working()
        for what in (_ANCESTORS, _BRANCHES):
            if what in self._rooms:
                self._rooms.pop(what).close()

    def reserve(self, n_tokens: int) -> None:
        """`back`, between sequences: what steps so far took is given back where memory is short."""
        try:
            self.back(n_tokens)
        except OutOfMemoryError:
            self._give_back()
            self.back(n_tokens)

    def back(self, n_tokens: int) -> None:
        """Put memory behind the cache's first `n_tokens` positions."""
        if n_tokens <= self._backed:
            return
        self._granted = 0, 0
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

    def hold_scores(self, size: int) -> int:
        """The address of room for log-probabilities: where decoding's attention has its partial results, or where that
        is too little, memory that no launch that is kept knows."""
        return self.places.partial if size <= self._partial_size else self._room("log-probabilities", size)

    def hold_answers(self) -> None:
        """Page-locked memory for log-probabilities, `answers`: it takes milliseconds, and is asked for once."""
        if not self._has_asked:
            self._has_asked = True
            try:
                self.answers = self._device.pinned(ANSWER_BYTES, "answers")
            except OutOfMemoryError:
                self.answers = None  # they are fetched

    def step_limit(self, n_past: int, n_tokens: int) -> int:
        """How many of `n_tokens` one step behind `n_past` others may have, by the memory there is."""
        n_tokens = min(n_tokens, self._positions - n_past)
        if n_tokens <= LEAST_TOKENS:  # most decisions: nothing is looked up for them
            return n_tokens
        most, furthest = self._granted
        if n_tokens <= most and n_past + n_tokens <= furthest:
            return n_tokens
        free, _ = self._device.memory()
        # `hold` gives all of this back where it must.
        free += (self._working.size if self._working else 0) + self._size(_ANCESTORS) + self._size(_BRANCHES)
        n_counted = min(aligned(n_tokens, 64), largest_step(self._lowering))
        limit = step_limit(self._lowering, n_past, self._backed, n_counted, free // 8 * 7)
        if limit >= n_tokens:
            self._granted = limit, PAGE * self._layout.pages(n_past + limit)
        return max(LEAST_TOKENS, min(limit, n_tokens))

    def _size(self, what: str) -> int:
        return self._rooms[what].size if what in self._rooms else 0

    def _branch(self, n_tokens: int) -> int:
        """Bytes of the states of a tree of so many tokens."""
        if self._branch_bytes < 0:
            self._branch_bytes = families.branch_bytes(self._plan, 1)
        return self._branch_bytes * n_tokens
