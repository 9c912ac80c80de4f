"""Steps in pieces that take tens of milliseconds each: between two of them a request may be taken back.

Attention goes by blocks of rows, each with no more columns than its rows see, so that a tree of thousands of tokens
costs what its branches cost, not the square of all. Products go by rows and outputs; ops whose rows know nothing of
each other go by rows.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from reflex_ipc.errors import Watch
from reflex_ipc.plan import PARENT_NONE, Step
from reflex_ipc.reference.memory import SCORES

if TYPE_CHECKING:
    from reflex_ipc.reference.ops import Run

Array = npt.NDArray[np.float32]

_ROWS = 512
_PRODUCTS = 1 << 30
"""Multiplications of a matrix product at once: some 50 ms of one processor."""
_PRODUCT_ROWS = 1024
_NUMBERS = 1 << 22
"""Numbers of a value at once where rows know nothing of each other."""


class Block(NamedTuple):
    """Tokens `start` to `stop` of a step and what they see.

    `columns`: rows of the cache, with the step's own behind those of the state, that some of the tokens see: all of the
    state, then `hidden.shape[1]` tokens of the step. `hidden` (stop - start, tokens of the step) is True where that
    token is not seen by this one. `strangers`: rows that do not see the state.
    """

    start: int
    stop: int
    columns: slice | npt.NDArray[np.intp]
    hidden: npt.NDArray[np.bool_]
    strangers: npt.NDArray[np.intp]

    def hide(self, scores: Array) -> None:
        """Minus infinity where a token does not see a column; `scores` is (tokens, ..., columns)."""
        n_past = scores.shape[-1] - self.hidden.shape[1]
        hidden = self.hidden.reshape(len(scores), *[1] * (scores.ndim - 2), -1)
        np.copyto(scores[..., n_past:], np.float32(-np.inf), where=hidden)
        if len(self.strangers):
            scores[self.strangers, ..., :n_past] = -np.inf


def blocks(step: Step, n_past: int, n_head: int) -> list[Block]:
    """All tokens of a step, in blocks of at most SCORES scores of `n_head` heads, but of one token at least."""
    parents = step.parents
    n = len(parents)
    is_text = all(parent == i - 1 for i, parent in enumerate(parents))
    sees_state = np.ones(n, np.bool_)
    if not is_text:
        for i, parent in enumerate(parents):
            sees_state[i] = sees_state[parent] if parent >= 0 else parent != PARENT_NONE
    found = []
    start = 0
    while start < n:
        # In a tree laid out depth first, what lies before a block and is seen from it is above its neighbour.
        n_above = start if is_text else len(_line(parents, start - 1))
        wide = n_past + n_above
        fitting = (math.isqrt(wide * wide + 4 * SCORES // n_head) - wide) // 2
        stop = min(n, start + max(1, min(_ROWS, fitting)))
        if is_text:
            hidden = np.triu(np.ones((stop - start, stop), np.bool_), start + 1)
            found.append(Block(start, stop, slice(0, n_past + stop), hidden, np.empty(0, np.intp)))
        else:
            found.append(_branches(parents, n_past, start, stop, sees_state))
        start = stop
    return found


def _branches(parents: Sequence[int], n_past: int, start: int, stop: int, sees_state: npt.NDArray[np.bool_]) -> Block:
    above: dict[int, list[int]] = {}  # of each token before the block that one of its tokens follows, its line
    for parent in parents[start:stop]:
        if 0 <= parent < start and parent not in above:
            above[parent] = _line(parents, parent)
    tokens = sorted({token for line in above.values() for token in line})
    place = {token: i for i, token in enumerate(tokens)}
    seen = np.zeros((stop - start, len(tokens) + stop - start), np.bool_)
    for row, parent in enumerate(parents[start:stop]):
        if parent >= start:
            seen[row] = seen[parent - start]
        elif parent >= 0:
            seen[row, [place[token] for token in above[parent]]] = True
        seen[row, len(tokens) + row] = True
    columns = np.array([*range(n_past), *(n_past + token for token in [*tokens, *range(start, stop)])], np.intp)
    return Block(start, stop, columns, ~seen, np.flatnonzero(~sees_state[start:stop]))


def _line(parents: Sequence[int], token: int) -> list[int]:
    """A token and those it follows, upwards."""
    line = []
    while token >= 0:
        line.append(token)
        token = parents[token]
    return line


def product(x: Array, weight: Array, watch: Watch) -> Array:
    """x (rows, n_in) times the transpose of weight (n_out, n_in)."""
    rows, (n_out, n_in) = len(x), weight.shape
    if rows * n_out * n_in <= _PRODUCTS:
        whole: Array = x @ weight.T
        return whole
    out = np.empty((rows, n_out), np.float32)
    n_rows = min(rows, _PRODUCT_ROWS)
    n_columns = max(1, _PRODUCTS // (n_rows * n_in))
    for column in range(0, n_out, n_columns):
        part = weight[column : column + n_columns].T
        for row in range(0, rows, n_rows):
            out[row : row + n_rows, column : column + n_columns] = x[row : row + n_rows] @ part
            watch()
    return out


def by_rows(function: "Callable[[Any, Run], Array]") -> "Callable[[Any, Run], Array]":
    """An op whose rows know nothing of each other, some rows at a time if it is large."""

    def run_it(op: Any, run: "Run") -> Array:
        n, width = len(run.step.tokens), op.out.width
        if op.out.selected or n * width <= _NUMBERS:
            return function(op, run)
        out = np.empty((n, width), np.float32)
        n_rows = max(1, _NUMBERS // width)
        for start in range(0, n, n_rows):
            out[start : start + n_rows] = function(op, run.part(start, start + n_rows))
            run.watch()
        return out

    return run_it
