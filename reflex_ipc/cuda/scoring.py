"""Steps of scoring: short ones in few shapes, trees with what each token sees."""

from reflex_ipc.cuda.linear import FEW
from reflex_ipc.plan import PARENT_NONE, Step

ROUNDED = 8
"""Tokens of a short step that is scored, and rows of it, come in multiples of this."""


def rounded(step: Step) -> Step:
    """A short step with tokens that nothing sees, and its last row again, up to multiples of ROUNDED: the same launches
    then serve it whatever its length. Making them takes milliseconds, the tokens next to nothing: a block multiplies as
    many rows as the next of `formats.WIDTHS` anyway."""
    n, more = len(step.tokens), -len(step.tokens) % ROUNDED
    if n > FEW or not step.rows:
        return step
    return Step(
        [*step.tokens, *[0] * more],
        [*step.positions, *[0] * more],
        [*step.parents, *[PARENT_NONE] * more],
        [*step.rows, *[step.rows[-1]] * (-len(step.rows) % ROUNDED)],
        step.n_keep,
    )


def mask_of(step: Step) -> bytes:
    """For every token a word that says whether it sees the cache, then a bit a token of the step that it sees."""
    size = (len(step.tokens) + 31) // 32 * 4
    ancestors: list[int] = []
    sees_cache: list[int] = []
    for i, parent in enumerate(step.parents):
        ancestors.append((ancestors[parent] if parent >= 0 else 0) | 1 << i)
        sees_cache.append(sees_cache[parent] if parent >= 0 else int(parent != PARENT_NONE))
    return b"".join(
        sees.to_bytes(4, "little") + bits.to_bytes(size, "little")
        for sees, bits in zip(sees_cache, ancestors, strict=True)
    )
