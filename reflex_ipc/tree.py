"""The candidates' tokens as a tree below the prompt that shares common beginnings, and the steps that score it.

The tree goes through the model together with the prompt, every token seeing its ancestors only (`plan.Step`). A
candidate's last token need not be computed: what its predecessor thinks of it is the answer.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from reflex_ipc.errors import Watch
from reflex_ipc.plan import PARENT_NONE, PARENT_STATE, Step

if TYPE_CHECKING:
    from reflex_ipc.errors import Poll


class Tree(NamedTuple):
    """Candidates below one context, depth first.

    `tokens`, `parents` (-1: the context's end) and `depths` (from 0) of the nodes; `paths[i]` has, for each token of
    candidate i, the node it follows (-1: the context's end).
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    paths: list[list[int]]


def tree(candidates: Sequence[Sequence[int]], poll: "Poll | None" = None) -> Tree:
    """Sorted, candidates that begin alike lie together, and each adds what it does not share with the one before."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    paths: list[list[int]] = [[] for _ in candidates]
    line: list[int] = []  # nodes of the current candidate, from the context down
    watch = Watch(poll)
    for i in sorted(range(len(candidates)), key=lambda i: tuple(candidates[i])):
        watch()
        body = candidates[i][:-1]
        shared = common_prefix([tokens[node] for node in line], body)
        del line[shared:]
        for token in body[shared:]:
            parents.append(line[-1] if line else -1)
            depths.append(len(line))
            line.append(len(tokens))
            tokens.append(token)
        paths[i] = [-1, *line]
    return Tree(tokens, parents, depths, paths)


def tree_tokens(nodes: Tree, neutral: Sequence[int]) -> int:
    """Tokens of a step behind the context: the tree, or with a neutral context that and the tree twice."""
    return len(nodes.tokens) * (2 if neutral else 1) + len(neutral)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    n = 0
    for mine, other in zip(a, b, strict=False):
        if mine != other:
            break
        n += 1
    return n


class Pass(NamedTuple):
    """A step, the tokens whose log-probability is wanted at each of its rows, and where to put the answers: for each
    answer, row by row, the (candidate, token index) pairs it belongs to, and whether it is the neutral one."""

    step: Step
    targets: list[list[int]]
    places: list[list[list[tuple[int, int, bool]]]]


def passes(
    context: Sequence[int],
    candidates: Sequence[Sequence[int]],
    whole: Tree,
    neutral: Sequence[int],
    n_past: int,
    limit: int,
    poll: "Poll | None" = None,
) -> Iterator[Pass]:
    """The steps that score `candidates`, whose tree is `whole`, after `context`.

    None has more than `limit` tokens where that is possible.

    The state holds the context's first `n_past` tokens, not all, and all of them after the first step, which answers
    for every candidate's first token. `neutral`, unless empty, is a context of its own, a second root, below which the
    same candidates are scored again.
    """
    rest = list(context[n_past:])
    firsts = [(i, ids[0]) for i, ids in enumerate(candidates)]
    if len(rest) + tree_tokens(whole, neutral) <= limit:
        yield _pass(rest, firsts, len(context), list(enumerate(candidates)), whole, neutral, poll)
        return
    for group in _groups(candidates, len(rest), len(neutral), limit):
        some = [(i, candidates[i]) for i in group]
        yield _pass(rest, firsts, len(context), some, tree([ids for _, ids in some], poll), neutral, poll)
        rest, firsts = [], []


def _groups(candidates: Sequence[Sequence[int]], first: int, n_neutral: int, limit: int) -> Iterator[list[int]]:
    """Candidates that go together: neighbours in sorted order, as many as a step holds."""
    times = 2 if n_neutral else 1
    group: list[int] = []
    n_tokens = first + n_neutral
    before: Sequence[int] = ()
    for i in sorted(range(len(candidates)), key=lambda i: tuple(candidates[i])):
        body = candidates[i][:-1]
        added = (len(body) - common_prefix(before, body)) * times
        if group and added and n_tokens + added > limit:
            yield group
            group, n_tokens, added = [], n_neutral, len(body) * times
        group.append(i)
        n_tokens += added
        before = body
    yield group


def _pass(
    rest: Sequence[int],
    firsts: Sequence[tuple[int, int]],
    n_context: int,
    candidates: Sequence[tuple[int, Sequence[int]]],
    nodes: Tree,
    neutral: Sequence[int],
    poll: "Poll | None",
) -> Pass:
    """`rest` of the context, whose last token answers for `firsts`, (candidate, first token); then the tree `nodes` of
    the candidates, once or twice."""
    watch = Watch(poll)
    tokens = list(rest)
    positions = list(range(n_context - len(rest), n_context))
    parents = list(range(PARENT_STATE, len(rest) - 1))
    wanted: dict[int, dict[int, list[tuple[int, int, bool]]]] = {}

    def want(row: int, token: int, place: tuple[int, int, bool]) -> None:
        wanted.setdefault(row, {}).setdefault(token, []).append(place)

    def grow(root: int, depth: int, is_neutral: bool) -> None:
        start = len(tokens)
        for token, parent, below in zip(nodes.tokens, nodes.parents, nodes.depths, strict=True):
            tokens.append(token)
            positions.append(depth + below)
            parents.append(root if parent < 0 else start + parent)
        for (i, ids), path in zip(candidates, nodes.paths, strict=True):
            watch()
            for at in range(1, len(ids)):
                want(start + path[at], ids[at], (i, at, is_neutral))

    for i, token in firsts:
        want(len(rest) - 1, token, (i, 0, False))
    grow(len(rest) - 1 if rest else PARENT_STATE, n_context, False)
    if neutral:
        start = len(tokens)
        tokens += neutral
        positions += range(len(neutral))
        parents += [PARENT_NONE, *range(start, len(tokens) - 1)]
        for i, ids in candidates:
            want(len(tokens) - 1, ids[0], (i, 0, True))
        grow(len(tokens) - 1, len(neutral), True)
    rows = sorted(wanted)
    return Pass(
        Step(tokens, positions, parents, rows, len(rest)),
        [list(wanted[row]) for row in rows],
        [list(wanted[row].values()) for row in rows],
    )
