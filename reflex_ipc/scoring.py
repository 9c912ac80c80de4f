"""Scoring: how likely a model holds each of some continuations. docs/scoring.md defines every number.

The candidates' tokens form a tree below the prompt that shares common beginnings; it goes through the model together
with the prompt, every token seeing its ancestors only (`plan.Step`). A candidate's last token need not be computed:
what its predecessor thinks of it is the answer.

In order: `of_text` and `of_parts` make ids of the texts, `split` says from where tokens are scored, `passes` what to
run, `Scoring` runs it, `scores` makes the numbers.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from reflex_ipc.errors import ContextOverflowError, InvalidRequestError, Watch
from reflex_ipc.plan import PARENT_NONE, PARENT_STATE, PREFILL_CHUNK, Step

if TYPE_CHECKING:
    from reflex_ipc.errors import Poll
    from reflex_ipc.tokenizer import Tokenizer


MAX_CANDIDATES = 4096
MAX_TREE = 32768
"""Tokens of all candidates together, what they share counted once."""
MAX_SCORED = 1 << 20
"""Tokens of all candidates, each counted with what it shares: so many log-probabilities are the answer."""
LONGEST_TOGETHER = 4096
"""Tokens of a context that go through the model together with the tree; of a longer one, the beginning goes ahead."""
NORMALISATIONS = ("sum", "mean", "byte", "pmi")


class Options(NamedTuple):
    """How candidates are scored."""

    normalize: str = "sum"  # what is compared: one of NORMALISATIONS
    temperature: float = 1.0  # of the softmax over the candidates
    join: str = ""  # stands between prompt and candidate
    end: bool = False  # the token that ends a turn is scored behind every candidate, too
    arguments: dict[str, Any] | None = None  # for the chat template


class Candidate(NamedTuple):
    """One continuation and what the model thinks of it. Log-probabilities are natural logarithms."""

    text: str
    tokens: tuple[int, ...]
    token_logprobs: tuple[float, ...]
    n_bytes: int
    logprob: float
    neutral_logprob: float | None
    score: float
    probability: float


class Scores(NamedTuple):
    """All candidates, in the order they were given."""

    candidates: tuple[Candidate, ...]
    normalize: str
    temperature: float
    entropy_bits: float
    margin: float
    prompt_tokens: int
    healed: int
    passes: int

    @property
    def best(self) -> Candidate:
        return max(self.candidates, key=lambda candidate: candidate.score)


class Tail(NamedTuple):
    """A candidate behind the border: its text, the tokens to score, and the bytes they spell."""

    text: str
    tokens: tuple[int, ...]
    n_bytes: int


class Split(NamedTuple):
    """Prompt and candidates, cut at the border from where on tokens are scored.

    `context`: the tokens before it. `tails`: each candidate's behind it. `healed`: how many of the prompt's own tokens
    lie behind it, since a candidate merges with them. `neutral`: the token that stands for no context at all.
    """

    context: list[int]
    tails: list[Tail]
    healed: int
    neutral: int | None


class Texts(NamedTuple):
    """Prompt and candidates as ids: `before` is what all of them begin with, `prompt` the rest of the prompt's,
    `wholes` that of each prompt and candidate together."""

    candidates: Sequence[str]
    before: list[int]
    prompt: list[int]
    wholes: list[list[int]]


def of_text(
    tokenizer: "Tokenizer", prompt: str, candidates: Sequence[str], join: str, n_ctx: int, poll: "Poll | None"
) -> Texts:
    """Raises ContextOverflowError at the first text that `n_ctx` tokens of context cannot hold."""
    tokenizer.check_length(prompt, n_ctx)
    at = tokenizer.border(prompt)
    before = tokenizer.encode(prompt[:at], bos=tokenizer.add_bos, poll=poll)
    rest = prompt[at:]
    return _texts(
        before, lambda tail: tokenizer.encode(rest + tail, bos=False, poll=poll), candidates, join, n_ctx, poll
    )


def of_parts(
    tokenizer: "Tokenizer",
    parts: Sequence[tuple[str, bool]],
    candidates: Sequence[str],
    join: str,
    n_ctx: int,
    poll: "Poll | None",
) -> Texts:
    """The same after a rendered chat, in which control tokens are recognised where a part says so."""
    tokenizer.check_length("".join(text for text, _ in parts), n_ctx)
    before, rest = _cut(tokenizer, parts)
    return _texts(
        tokenizer.encode_parts(before, poll),
        lambda tail: tokenizer.encode_parts([*rest, (tail, False)], poll),
        candidates,
        join,
        n_ctx,
        poll,
    )


def _cut(tokenizer: "Tokenizer", parts: Sequence[tuple[str, bool]]) -> tuple[list[tuple[str, bool]], ...]:
    """The parts before the last border, and those behind."""
    for i in reversed(range(len(parts))):
        text, special = parts[i]
        if at := tokenizer.border(text):
            return [*parts[:i], (text[:at], special)], [(text[at:], special), *parts[i + 1 :]]
    return [], list(parts)


def _texts(
    before: list[int],
    encode: Callable[[str], list[int]],
    candidates: Sequence[str],
    join: str,
    n_ctx: int,
    poll: "Poll | None",
) -> Texts:
    watch = Watch(poll)
    prompt, wholes, n_scored = encode(""), [], 0
    for i, text in enumerate(candidates):
        watch()
        wholes.append(encode(join + text))
        n_scored += max(0, len(wholes[-1]) - len(prompt))  # at least
        _check_scored(n_scored)
        n = len(before) + len(wholes[-1])
        if n == 0:
            raise InvalidRequestError(f"candidate {i} has no token in this vocabulary", f"candidates[{i}]")
        if n - 1 > n_ctx:  # the last token is scored, not computed
            raise ContextOverflowError(f"prompt and candidate {i} have {n - 1} tokens, the context holds {n_ctx}")
    return Texts(candidates, before, prompt, wholes)


def split(tokenizer: "Tokenizer", texts: Texts, *, end: bool, poll: "Poll | None" = None) -> Split:
    """Raises InvalidRequestError where a token is needed that the file does not name."""
    candidates, before, prompt, wholes = texts
    if end:
        ending = tokenizer.eot if tokenizer.eot is not None else tokenizer.eos
        if ending is None:
            raise InvalidRequestError("the file names no token that ends a turn", "end")
        wholes = [[*whole, ending] for whole in wholes]
    neutral = next((token for token in (tokenizer.bos, tokenizer.eos, tokenizer.eot) if token is not None), None)
    n = border(prompt, wholes)
    if n < 0:  # a candidate of no tokens of its own, whose bytes the vocabulary lacks
        before, prompt, wholes = before[:-1], [before[-1], *prompt], [[before[-1], *whole] for whole in wholes]
        n = border(prompt, wholes)
    watch = Watch(poll)
    n_bytes: dict[int, int] = {}  # of the tokens so far
    tails = []
    for text, whole in zip(candidates, wholes, strict=True):
        watch()
        tokens = tuple(whole[n:])
        for token in set(tokens).difference(n_bytes):
            n_bytes[token] = len(tokenizer.token_bytes(token))
        tails.append(Tail(text, tokens, sum(map(n_bytes.__getitem__, tokens))))
    context = [*before, *prompt[:n]]
    if not context and neutral is None:
        raise InvalidRequestError(_NO_NEUTRAL)
    return Split(
        context if context or neutral is None else [neutral],
        tails,
        len(prompt) - n,
        neutral,
    )


_NO_NEUTRAL = "the file names no token that begins or ends a text, so nothing can come before"


def border(prompt: Sequence[int], texts: Sequence[list[int]]) -> int:
    """How many tokens the prompt and every prompt + candidate begin with alike, leaving each candidate at least one."""
    # What the first and the last in order share with the prompt, all between them do, and lists are compared in C.
    first, last = min(texts), max(texts)
    return min(_shared(prompt, first), _shared(prompt, last), min(map(len, texts)) - 1)


def _check_scored(n: int) -> None:
    if n > MAX_SCORED:
        raise InvalidRequestError(
            f"the candidates have more than {MAX_SCORED} tokens, each counted with what it shares with others",
            "candidates",
        )


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
        shared = _shared([tokens[node] for node in line], body)
        del line[shared:]
        for token in body[shared:]:
            parents.append(line[-1] if line else -1)
            depths.append(len(line))
            line.append(len(tokens))
            tokens.append(token)
        paths[i] = [-1, *line]
    return Tree(tokens, parents, depths, paths)


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
    neutral: int | None,
    n_past: int,
    limit: int,
    poll: "Poll | None" = None,
) -> Iterator[Pass]:
    """The steps that score `candidates`, whose tree is `whole`, after `context`.

    None has more than `limit` tokens where that is possible.

    The state holds the context's first `n_past` tokens, not all, and all of them after the first step, which answers
    for every candidate's first token. `neutral`, if given, is a token that begins a second root, below which the same
    candidates are scored again.
    """
    rest = list(context[n_past:])
    firsts = [(i, ids[0]) for i, ids in enumerate(candidates)]
    if len(rest) + tree_tokens(whole, neutral) <= limit:
        yield _pass(rest, firsts, len(context), list(enumerate(candidates)), whole, neutral, poll)
        return
    for group in _groups(candidates, len(rest), neutral is not None, limit):
        some = [(i, candidates[i]) for i in group]
        yield _pass(rest, firsts, len(context), some, tree([ids for _, ids in some], poll), neutral, poll)
        rest, firsts = [], []


def tree_tokens(nodes: Tree, neutral: int | None) -> int:
    """Tokens of a step behind the context: the tree, or with a neutral token that and the tree twice."""
    return len(nodes.tokens) if neutral is None else 1 + 2 * len(nodes.tokens)


def _groups(candidates: Sequence[Sequence[int]], first: int, twice: bool, limit: int) -> Iterator[list[int]]:
    """Candidates that go together: neighbours in sorted order, as many as a step holds."""
    roots, times = (1, 2) if twice else (0, 1)
    group: list[int] = []
    n_tokens = first + roots
    before: Sequence[int] = ()
    for i in sorted(range(len(candidates)), key=lambda i: tuple(candidates[i])):
        body = candidates[i][:-1]
        added = (len(body) - _shared(before, body)) * times
        if group and n_tokens + added > limit:
            yield group
            group, n_tokens, added = [], roots, len(body) * times
        group.append(i)
        n_tokens += added
        before = body
    yield group


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    n = 0
    for mine, other in zip(a, b, strict=False):
        if mine != other:
            break
        n += 1
    return n


def _pass(
    rest: Sequence[int],
    firsts: Sequence[tuple[int, int]],
    n_context: int,
    candidates: Sequence[tuple[int, Sequence[int]]],
    nodes: Tree,
    neutral: int | None,
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
    if neutral is not None:
        root = len(tokens)
        tokens.append(neutral)
        positions.append(0)
        parents.append(PARENT_NONE)
        for i, ids in candidates:
            want(root, ids[0], (i, 0, True))
        grow(root, 1, True)
    rows = sorted(wanted)
    return Pass(
        Step(tokens, positions, parents, rows, len(rest)),
        [list(wanted[row]) for row in rows],
        [list(wanted[row].values()) for row in rows],
    )


class Scored(NamedTuple):
    """What the passes found of one candidate."""

    tail: Tail
    logprobs: list[float]
    neutral: list[float] | None


class Executor(Protocol):
    """What of `backends.Executor` scoring needs."""

    @property
    def n_past(self) -> int: ...
    def forward(self, step: Step, poll: "Poll | None" = None) -> None: ...
    def score(self, step: Step, targets: Sequence[Sequence[int]], poll: "Poll | None" = None) -> list[list[float]]: ...
    def step_limit(self, n_past: int, n_tokens: int) -> int: ...


class Scoring:
    """Candidates about to be scored after a context of `prompt_tokens`."""

    def __init__(self, executor: Executor, split: Split, options: Options, poll: "Poll | None" = None) -> None:
        tokens = [tail.tokens for tail in split.tails]
        _check_scored(sum(map(len, tokens)))
        nodes = tree(tokens, poll)
        if len(nodes.tokens) > MAX_TREE:
            raise InvalidRequestError(
                f"the candidates have {len(nodes.tokens)} tokens together; at most {MAX_TREE} are scored", "candidates"
            )
        if options.normalize == "pmi" and split.neutral is None:
            raise InvalidRequestError(_NO_NEUTRAL, "normalize")
        self.prompt_tokens = len(split.context)
        self.total_ms = 0.0
        self._executor = executor
        self._split = split
        self._tree = nodes
        self._options = options
        self._neutral = split.neutral if options.normalize == "pmi" else None
        self._poll = poll

    def run(self) -> Scores:
        """Raises CancelledError or DeadlineError where `poll` says so."""
        began = time.perf_counter()
        executor, context, tails = self._executor, self._split.context, self._split.tails
        n_step = min(len(context), LONGEST_TOGETHER) + tree_tokens(self._tree, self._neutral)
        limit = executor.step_limit(len(context), n_step)
        # The end of the context and the candidates are one step. What goes ahead is no pass of its own: none of its
        # tokens is computed twice.
        while len(context) - executor.n_past > min(limit, LONGEST_TOGETHER):
            n = min(PREFILL_CHUNK, len(context) - executor.n_past - 1)
            chunk = context[executor.n_past : executor.n_past + n]
            executor.forward(Step.text(chunk, executor.n_past, []), self._poll)
        n_passes = 0
        watch = Watch(self._poll)
        found = [
            Scored(tail, [0.0] * len(tail.tokens), None if self._neutral is None else [0.0] * len(tail.tokens))
            for tail in tails
        ]
        tokens = [tail.tokens for tail in tails]
        steps = passes(context, tokens, self._tree, self._neutral, executor.n_past, limit, self._poll)
        for step, targets, places in steps:
            for row, row_places in zip(executor.score(step, targets, self._poll), places, strict=True):
                watch()
                for value, wanted in zip(row, row_places, strict=True):
                    for candidate, at, is_neutral in wanted:
                        item = found[candidate]
                        (item.neutral if is_neutral and item.neutral is not None else item.logprobs)[at] = value
            n_passes += 1
        self.total_ms = (time.perf_counter() - began) * 1e3
        return scores(
            found,
            self._options.normalize,
            self._options.temperature,
            prompt_tokens=len(context),
            healed=self._split.healed,
            passes=n_passes,
        )


def scores(
    found: Sequence[Scored], normalize: str, temperature: float, *, prompt_tokens: int, healed: int, passes: int
) -> Scores:
    """The numbers of docs/scoring.md."""
    sums = [math.fsum(item.logprobs) for item in found]
    neutral = [None if item.neutral is None else math.fsum(item.neutral) for item in found]
    values = [
        _normalised(normalize, total, item, before) for total, item, before in zip(sums, found, neutral, strict=True)
    ]
    peak = max(values)
    weights = [math.exp((value - peak) / temperature) for value in values]
    total = math.fsum(weights)
    probabilities = [weight / total for weight in weights]
    ranked = sorted(probabilities, reverse=True)
    return Scores(
        candidates=tuple(
            Candidate(*item.tail[:2], tuple(item.logprobs), item.tail.n_bytes, sum_, before, value, probability)
            for item, sum_, before, value, probability in zip(found, sums, neutral, values, probabilities, strict=True)
        ),
        normalize=normalize,
        temperature=temperature,
        entropy_bits=-math.fsum(p * math.log2(p) for p in probabilities if p > 0.0) + 0.0,
        margin=ranked[0] - (ranked[1] if len(ranked) > 1 else 0.0),
        prompt_tokens=prompt_tokens,
        healed=healed,
        passes=passes,
    )


def _normalised(normalize: str, total: float, item: Scored, neutral: float | None) -> float:
    if normalize == "mean":
        return total / len(item.tail.tokens)
    if normalize == "byte":
        return total / max(1, item.tail.n_bytes)
    if normalize == "pmi" and neutral is not None:
        return total - neutral
    return total


def check(candidates: Sequence[str], options: Options) -> None:
    """Raises InvalidRequestError naming what is wrong with a request."""
    normalize, temperature = options.normalize, options.temperature
    if normalize not in NORMALISATIONS:
        raise InvalidRequestError(f"normalize is {normalize!r}; known are {', '.join(NORMALISATIONS)}", "normalize")
    if not 0.0 < temperature < math.inf:
        raise InvalidRequestError(
            f"temperature is {temperature}; scores are divided by it, so it must be above 0", "temperature"
        )
    if not candidates:
        raise InvalidRequestError("there are no candidates to score", "candidates")
    if len(candidates) > MAX_CANDIDATES:
        raise InvalidRequestError(
            f"there are {len(candidates)} candidates; at most {MAX_CANDIDATES} are scored", "candidates"
        )
    for i, text in enumerate(candidates):
        if not text:
            raise InvalidRequestError(f"candidate {i} is empty: it has nothing to score", f"candidates[{i}]")
