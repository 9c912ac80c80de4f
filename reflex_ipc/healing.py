"""Token healing: a candidate is tokenised together with the prompt, whose last tokens it may merge with.

`of_text` and `of_parts` make ids of the texts, the prompt's once up to a place that no rule looks across; `split` says
from where on all candidates are scored. docs/scoring.md defines it.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, NamedTuple

from reflex_ipc.errors import ContextOverflowError, InvalidRequestError, Watch
from reflex_ipc.tree import common_prefix

if TYPE_CHECKING:
    from reflex_ipc.errors import Poll
    from reflex_ipc.tokenizer import Tokenizer

MAX_SCORED = 1 << 20
"""Tokens of all candidates, each counted with what it shares: so many log-probabilities are the answer."""
_TOGETHER = 4096
"""Characters that are looked up at once, before anything is said of single candidates."""
NO_NEUTRAL = "the file names no token that begins or ends a text, so nothing can come before"

Part = tuple[str, bool]
"""Text, and whether control tokens in it are recognised."""


class Texts(NamedTuple):
    """Prompt and candidates as ids: `before` is what all of them begin with, `prompt` the rest of the prompt's,
    `wholes` that of each prompt and candidate together."""

    candidates: Sequence[str]
    before: list[int]
    prompt: list[int]
    wholes: list[list[int]]


class Tail(NamedTuple):
    """A candidate behind the border: its text, the tokens to score, and the bytes they spell."""

    text: str
    tokens: tuple[int, ...]
    n_bytes: int


class Split(NamedTuple):
    """Prompt and candidates, cut at the border from where on tokens are scored.

    `context`: the tokens before it. `tails`: each candidate's behind it. `healed`: how many of the prompt's own tokens
    lie behind it, since a candidate merges with them. `neutral`: the tokens of the context that pmi compares with; none
    where the file has no token for no context at all, and no other was given.
    """

    context: list[int]
    tails: list[Tail]
    healed: int
    neutral: Sequence[int]


def of_text(
    tokenizer: "Tokenizer", prompt: str, candidates: Sequence[str], join: str, n_ctx: int, poll: "Poll | None"
) -> Texts:
    """Raises ContextOverflowError at the first text that `n_ctx` tokens of context cannot hold."""
    tokenizer.check_length(prompt, n_ctx)
    at = tokenizer.border(prompt)
    begin = [tokenizer.bos] if tokenizer.add_bos and tokenizer.bos is not None else []
    before, rest = [(prompt[:at], True)], prompt[at:]
    return _texts(tokenizer, begin, before, lambda tail: [(rest + tail, True)], candidates, join, n_ctx, poll)


def of_parts(
    tokenizer: "Tokenizer", parts: Sequence[Part], candidates: Sequence[str], join: str, n_ctx: int, poll: "Poll | None"
) -> Texts:
    """The same after a rendered chat, in which control tokens are recognised where a part says so."""
    tokenizer.check_length("".join(text for text, _ in parts), n_ctx)
    before, rest = _cut(tokenizer, parts)
    return _texts(tokenizer, [], before, lambda tail: [*rest, (tail, False)], candidates, join, n_ctx, poll)


def _cut(tokenizer: "Tokenizer", parts: Sequence[Part]) -> tuple[list[Part], list[Part]]:
    """The parts before the last border, and those behind."""
    for i in reversed(range(len(parts))):
        text, special = parts[i]
        if at := tokenizer.border(text):
            return [*parts[:i], (text[:at], special)], [(text[at:], special), *parts[i + 1 :]]
    return [], list(parts)


def _texts(
    tokenizer: "Tokenizer",
    begin: list[int],
    before: list[Part],
    behind: Callable[[str], list[Part]],
    candidates: Sequence[str],
    join: str,
    n_ctx: int,
    poll: "Poll | None",
) -> Texts:
    """`begin`: ids in front of all. `before`: what all texts begin with; `behind(tail)`: the rest of one."""
    n_before, n_rest = (sum(len(text) for text, _ in parts) for parts in (before, behind(join)))
    # The rest stands behind the border by itself, and in front of every candidate.
    n_characters = accumulate((n_rest + len(text) for text in candidates), initial=n_before + n_rest)
    n_together = sum(1 for n in takewhile(lambda n: n <= _TOGETHER, n_characters)) - 1
    if n_together > 0:
        tokenizer.look_up([before, behind(""), *(behind(join + text) for text in candidates[:n_together])], poll)
    watch = Watch(poll)
    shared = begin + tokenizer.encode_parts(before, poll)
    prompt, wholes, n_scored = tokenizer.encode_parts(behind(""), poll), [], 0
    for i, text in enumerate(candidates):
        watch()
        tokenizer.check_length(text, n_ctx, f"candidate {i}", f"candidates[{i}]")
        wholes.append(tokenizer.encode_parts(behind(join + text), poll))
        n_scored += max(0, len(wholes[-1]) - len(prompt))  # at least
        check_scored(n_scored)
        n = len(shared) + len(wholes[-1])
        if n == 0:
            raise InvalidRequestError(f"candidate {i} has no token in this vocabulary", f"candidates[{i}]")
        if n - 1 > n_ctx:  # the last token is scored, not computed
            fits = len(shared) + len(prompt) <= n_ctx  # by itself
            raise ContextOverflowError(
                f"prompt and candidate {i} have {n - 1} tokens, the context holds {n_ctx}",
                f"candidates[{i}]" if fits else "prompt",
            )
    return Texts(candidates, shared, prompt, wholes)


def split(
    tokenizer: "Tokenizer", texts: Texts, *, end: bool, neutral: str | None = None, poll: "Poll | None" = None
) -> Split:
    """Raises InvalidRequestError where a token is needed that the file does not name."""
    candidates, before, prompt, wholes = texts
    if end:
        ending = tokenizer.eot if tokenizer.eot is not None else tokenizer.eos
        if ending is None:
            raise InvalidRequestError("the file names no token that ends a turn", "end")
        wholes = [[*whole, ending] for whole in wholes]
    nothing = [token for token in (tokenizer.bos, tokenizer.eos, tokenizer.eot) if token is not None][:1]
    compared = nothing if neutral is None else tokenizer.encode(neutral, bos=tokenizer.add_bos, poll=poll)
    if neutral is not None and not compared:
        raise InvalidRequestError("the neutral context has no token in this vocabulary", "neutral")
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
    context = [*before, *prompt[:n]] or nothing
    if not context:
        raise InvalidRequestError(NO_NEUTRAL)
    return Split(context, tails, len(prompt) - n, compared)


def border(prompt: Sequence[int], texts: Sequence[list[int]]) -> int:
    """How many tokens the prompt and every prompt + candidate begin with alike, leaving each candidate at least one."""
    # What the first and the last in order share with the prompt, all between them do, and lists are compared in C.
    first, last = min(texts), max(texts)
    return min(common_prefix(prompt, first), common_prefix(prompt, last), min(map(len, texts)) - 1)


def check_scored(n: int) -> None:
    if n > MAX_SCORED:
        raise InvalidRequestError(
            f"the candidates have more than {MAX_SCORED} tokens, each counted with what it shares with others",
            "candidates",
        )
