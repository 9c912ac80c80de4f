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


def mask_of(step: Step) -> bytearray:
    """For every token a word that says whether it sees the cache, then a bit a token of the step that it sees."""
    n = len(step.tokens)
    size = 4 * (1 + (n + 31) // 32)
    mask = bytearray(n * size)
    rows = memoryview(mask)
    for i, parent in enumerate(step.parents):
        at = i * size
        if parent >= 0:
            rows[at : at + size] = rows[parent * size : (parent + 1) * size]
        elif parent != PARENT_NONE:
            mask[at] = 1
        mask[at + 4 + i // 8] |= 1 << i % 8
    return mask
