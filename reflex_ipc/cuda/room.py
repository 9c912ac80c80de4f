"""What a step needs of a device's memory beside weights and cache, and how many tokens it may have by that."""

from reflex_ipc.cuda import families, lower
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.places import PAGE, Columns
from reflex_ipc.cuda.sampling import CONTROL
from reflex_ipc.ops import ExpertLinear

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reflex_ipc.cuda.lower import Lowering
    from reflex_ipc.plan import Plan

HEAD_ROWS = 1024
"""Rows whose logits are held at once when scoring."""
LEAST_TOKENS = 64
"""Tokens there is room for at least, more once a step has more; and the most that a tree may have whose ancestors lie
among a step's inputs."""
LEAST_ROWS = 8
"""Rows that want logits there is room for at least: those of a few candidates. A first decision would make other
buffers for them, and give these back, while weights are on their way."""
_GRID = 65535
"""Blocks in a grid's second dimension: a kernel has one a token, or one a tile of an expert's tokens."""
_NOT_FULL = 4096
"""Tiles of a step that may not be full: more than any model has experts, or heads."""


class Room:
    """Bytes of all that has a place of its own in a step of up to `n_tokens`, of which `n_rows` want logits; of
    `n_expanded` positions latents are expanded."""

    __slots__ = ("inputs", "scratch", "selected", "tables", "values")

    def __init__(self, low: "Lowering", n_tokens: int, n_rows: int, n_expanded: int) -> None:
        self.values = 4 * low.columns.width * n_tokens
        self.selected = 4 * low.columns.selected_width * n_rows
        self.scratch = max(
            low.linear_scratch(n_tokens, n_rows),
            low.finished_bytes(n_tokens),
            families.scratch_bytes(low.plan, n_tokens, n_expanded),
        )
        self.tables = {key: 4 * rope.n_rot * n_tokens for key, rope in lower.tables_of(low.plan).items()}
        self.inputs = CONTROL.size + 4 * (2 * n_tokens + n_rows) + ancestor_bytes(LEAST_TOKENS)

    @property
    def size(self) -> int:
        """All, as one allocation."""
        return sum(map(aligned, (self.inputs, self.values, self.selected, self.scratch, *self.tables.values())))


def working_space(plan: "Plan", columns: Columns, n_tokens: int, n_positions: int) -> int:
    """About the bytes of a `Room` of `n_tokens`, LEAST_ROWS of which want logits, that leave the cache with
    `n_positions`; where there is no device yet whose limits say what scratch its launches need: that and all that is
    small is put at 64 MiB, beside what latents are expanded to."""
    need = 4 * (n_tokens * columns.width + LEAST_ROWS * columns.selected_width) + (64 << 20)
    if n_tokens > families.ABSORBED and families.can_expand(plan):
        from reflex_ipc.cuda import latent  # only some models need it

        need += families.scratch_bytes(plan, n_tokens, latent.n_expanded(n_positions))
    return need


def ancestor_bytes(n_tokens: int) -> int:
    """Parents and mask of a tree."""
    return 4 * n_tokens * (2 + -(-n_tokens // 32))


def tree_bytes(low: "Lowering", n_past: int, n_backed: int, n_tokens: int) -> int:
    """All that scoring a tree of `n_tokens` behind `n_past` takes, beside what the cache has: `n_backed` positions."""
    n_room = aligned(n_tokens, 64)
    room = Room(low, n_room, min(n_tokens, HEAD_ROWS), low.n_expanded(n_tokens, n_past + n_tokens))
    cache = max(0, low.layout.pages(n_past + n_tokens) - n_backed // PAGE) * low.layout.page_bytes
    branches = families.branch_bytes(low.plan, n_tokens)
    return room.size + ancestor_bytes(n_tokens) + branches + cache


def largest_step(low: "Lowering") -> int:
    """Tokens that a step may have, whatever the memory: 65,535, as a grid has no more rows. Where a token has experts,
    or heads with a matrix of their own that cannot be expanded, tiles of such choices are rows of the grid: full ones
    of `experts.tile_width`, and one more for each expert."""
    choices = [op.routes.width // 2 for op in low.plan.ops if isinstance(op, ExpertLinear)]
    if latents := families.latents(low.plan):
        from reflex_ipc.cuda.latent import can_expand  # only some models need it

        choices += [op.n_head for op in latents if not can_expand(op)]
    if not choices:
        return _GRID
    from reflex_ipc.cuda.experts import tile_width  # only some models need it

    return min(_GRID, (_GRID - _NOT_FULL) * tile_width(low.limits) // max(choices))


def step_limit(low: "Lowering", n_past: int, n_backed: int, n_tokens: int, free: int) -> int:
    """How many of `n_tokens` a step may have when `free` bytes may be used for it."""
    while n_tokens > 1 and (need := tree_bytes(low, n_past, n_backed, n_tokens)) > free:
        n_tokens = max(1, min(n_tokens - 1, n_tokens * free // need))
    return n_tokens
