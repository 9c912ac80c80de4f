"""Steps of scoring: short ones in few shapes, trees with what each token sees; and the launches of kernels/score.cu,
which make log-probabilities of logits."""

from itertools import pairwise
from struct import Struct

from reflex_ipc.cuda.linear import FEW
from reflex_ipc.plan import PARENT_NONE, Step
from reflex_ipc.scores import ScoredRows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from reflex_ipc.cuda.device import Stream
    from reflex_ipc.cuda.launch import Kernels
    from reflex_ipc.cuda.memory import Pinned

ROUNDED = 8
"""Tokens of a short step that is scored, and rows of it, come in multiples of this."""
KERNELS = PARTS, ROWS = "score_parts", "score_rows"  # of kernels/score.cu
_THREADS, _PART = 512, 8192


def rounded(step: Step) -> Step:
    """A short step with tokens that nothing sees, and its last row again, up to multiples of ROUNDED: the same launches
    then serve it whatever its length. Making them takes milliseconds, the tokens next to nothing: a block multiplies as
    many rows as the next of `formats.WIDTHS` anyway. They are routed like others, though."""
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


def score_bytes(n_rows: int, n_targets: int, n_vocab: int) -> int:
    """The room that `log_probabilities` takes: sums of parts of rows, where rows' targets begin, targets, answers."""
    return 8 * n_rows * -(-n_vocab // _PART) + 4 * (2 * n_rows + 1 + 2 * n_targets)


def log_probabilities(
    kernels: "Kernels",
    stream: "Stream",
    logits: int,
    n_vocab: int,
    targets: "Sequence[Sequence[int]]",
    at: int,
    answers: "Pinned | None" = None,
) -> ScoredRows:
    """Of each row's target tokens, and each row's logsumexp, by the (rows, n_vocab) float32 logits at an address; `at`
    is room for it. Waits.

    `answers`: page-locked memory. Where it holds all that is found, the kernel writes there, and there is no copy to
    wait for.
    """
    n_rows, n_targets, n_parts = len(targets), sum(map(len, targets)), -(-n_vocab // _PART)
    starts = [0]
    for row in targets:
        starts.append(starts[-1] + len(row))
    words = Struct(f"<{len(starts)}i{n_targets}i").pack(*starts, *(token for row in targets for token in row))
    n_answers = n_targets + n_rows
    first = at + 8 * n_rows * n_parts
    mail = answers if answers is not None and 4 * n_answers <= answers.size else None
    out = first + len(words) if mail is None else mail.device_address
    stream.to_device(first, words)
    for name, grid, arguments in (
        (PARTS, (n_parts, n_rows, 1), [at, logits, n_vocab]),
        (
            ROWS,
            (n_rows, 1, 1),
            [out, out + 4 * n_targets, at, n_parts, logits, first, first + 4 * len(starts), n_vocab],
        ),
    ):
        kernels.function(name).prepare(grid, (_THREADS, 1, 1), arguments, stream)()
    numbers = Struct(f"<{n_answers}f")
    if mail is None:
        values = numbers.unpack(stream.read(out, 4 * n_answers))
    else:
        stream.synchronize()
        values = numbers.unpack_from(mail.view)
    return ScoredRows([list(values[start:stop]) for start, stop in pairwise(starts)], list(values[n_targets:]))
