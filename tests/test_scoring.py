"""Scoring against the plain way: every candidate alone, a softmax in float64 over the logits of the whole text."""

import json
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from polling import Poll

from reflex_ipc import bpe, healing, pretokenize, scoring
from reflex_ipc.engine import Engine
from reflex_ipc.errors import CancelledError, ContextOverflowError, DeadlineError, InvalidRequestError
from reflex_ipc.plan import PARENT_NONE, Step
from reflex_ipc.reference import memory
from reflex_ipc.scores import NORMALISATIONS, Scored, scores
from reflex_ipc.tokenizer import Tokenizer
from reflex_ipc.tree import passes, tree

FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3-untied",
    "qwen3moe",
    "qwen35",
    "qwen35moe",
    "qwen3next",
    "deepseek2-lite",
    "deepseek3",
]
CANDIDATES = [" a", " ab", " abc", " b", "b c d", " a!", " the end", " a"]


def alone(engine: Engine, context: Sequence[int], tail: Sequence[int]) -> list[float]:
    """The log-probability of each token of `tail` after `context`, from the full logits of the whole text."""
    ids = [*context, *tail]
    logits = engine.logits(ids).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return [float(logprobs[len(context) - 1 + i, token]) for i, token in enumerate(tail)]


def neutral_token(engine: Engine) -> int:
    """What docs/scoring.md has for no context: the first of these that the file names."""
    keys = (f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot"))
    return next(token for key in keys if (token := engine.gguf.int(key, None)) is not None)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("normalize", ["sum", "pmi"])
def test_one_pass_is_each_alone(fixtures: Path, name: str, normalize: str) -> None:
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        steps: list[Step] = []
        run = engine._executor.score
        engine._executor.score = lambda step, *rest: (steps.append(step), run(step, *rest))[1]  # type: ignore[method-assign]
        prompt = "once more"
        result = engine.score(prompt, CANDIDATES, normalize=normalize)
        assert len(steps) == result.passes == 1
        # Common beginnings are computed once, last tokens not at all.
        assert len(steps[0].tokens) < result.prompt_tokens + sum(len(c.tokens) for c in result.candidates)
        ids = engine.tokenizer.encode(prompt, bos=engine.tokenizer.add_bos)
        context = ids[: result.prompt_tokens]
        for candidate in result.candidates:
            expected = alone(engine, context, candidate.tokens)
            assert np.abs(np.subtract(candidate.token_logprobs, expected)).max() <= 1e-4
            assert candidate.logprob == pytest.approx(sum(candidate.token_logprobs))
            if normalize == "pmi":
                neutral = alone(engine, [neutral_token(engine)], candidate.tokens)
                assert candidate.neutral_logprob == pytest.approx(sum(neutral), abs=1e-4)
                assert candidate.score == pytest.approx(candidate.logprob - sum(neutral), abs=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("normalize", ["sum", "pmi"])
def test_a_neutral_context_of_ones_own(fixtures: Path, name: str, normalize: str) -> None:
    """Of several tokens, in the same pass; it is scored whatever is compared, and changes nothing else."""
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        plain = engine.score("once more", CANDIDATES, normalize="sum")
        result = engine.score("once more", CANDIDATES, normalize=normalize, neutral="and again:")
        context = engine.tokenize("and again:")
        assert result.passes == 1 and len(context) > 2
        for candidate, before in zip(result.candidates, plain.candidates, strict=True):
            assert before.neutral_logprob is None
            assert np.abs(np.subtract(candidate.token_logprobs, before.token_logprobs)).max() <= 1e-4
            neutral = sum(alone(engine, context, candidate.tokens))
            assert candidate.neutral_logprob == pytest.approx(neutral, abs=1e-4)
            expected = candidate.logprob - (neutral if normalize == "pmi" else 0.0)
            assert candidate.score == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen35", "deepseek3"])
def test_a_neutral_context_in_several_passes(fixtures: Path, name: str) -> None:
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        options = {"normalize": "pmi", "neutral": "and once more again"}
        one = engine.score("once more and again", CANDIDATES, **options)
        for limit in (12, 4, 1):
            engine._executor.step_limit = lambda n_past, n_tokens, limit=limit: limit  # type: ignore[method-assign]
            many = engine.score("once more and again", CANDIDATES, **options)
            assert many.passes > one.passes == 1
            for a, b in zip(one.candidates, many.candidates, strict=True):
                assert np.abs(np.subtract(a.token_logprobs, b.token_logprobs)).max() <= 1e-4
                assert a.neutral_logprob == pytest.approx(b.neutral_logprob, abs=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_logsumexps_make_logits_of_log_probabilities(fixtures: Path, name: str) -> None:
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        result = engine.score("once more", CANDIDATES, normalize="pmi")
        context = engine.tokenize("once more")[: result.prompt_tokens]
        for candidate in result.candidates:
            logits = engine.logits([*context, *candidate.tokens])[len(context) - 1 : -1]
            wanted = logits[np.arange(candidate.n_tokens), candidate.tokens]
            got = np.add(candidate.token_logprobs, candidate.token_logsumexps)
            assert np.abs(got - wanted).max() <= 1e-4
            assert (candidate.n_tokens, len(candidate.token_logsumexps)) == (len(candidate.tokens),) * 2


def test_no_prompt_is_the_files_own_token_whatever_is_neutral(fixtures: Path) -> None:
    """Else pmi would compare a context with itself."""
    with Engine.open(fixtures / "exact" / "qwen35-f16.gguf", backend="cpu") as engine:
        result = engine.score("", CANDIDATES, normalize="pmi", neutral="once")
        for candidate in result.candidates:
            assert candidate.logprob == pytest.approx(sum(alone(engine, [neutral_token(engine)], candidate.tokens)))
            after = sum(alone(engine, engine.tokenize("once"), candidate.tokens))
            assert candidate.neutral_logprob == pytest.approx(after, abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen35", "deepseek3"])
def test_scoring_leaves_the_prompts_state(fixtures: Path, name: str) -> None:
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        result = engine.score("once more", CANDIDATES)
        context = engine.tokenizer.encode("once more", bos=engine.tokenizer.add_bos)[: result.prompt_tokens]
        assert engine._executor.n_past == len(context)
        engine._executor.forward(Step.text([20], len(context), [0]))
        after = engine._executor.logits()[0]
        expected = engine.logits([*context, 20])[-1]
        assert np.linalg.norm(after - expected) <= 1e-5 * np.linalg.norm(expected)


@pytest.mark.parametrize("name", ["llama", "qwen35", "deepseek3"])
def test_more_passes_say_the_same(fixtures: Path, name: str) -> None:
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        one = engine.score("once more and again", CANDIDATES, normalize="pmi")
        engine._executor.step_limit = lambda n_past, n_tokens: 4  # type: ignore[method-assign]
        many = engine.score("once more and again", CANDIDATES, normalize="pmi")
        assert many.passes > one.passes == 1
        for a, b in zip(one.candidates, many.candidates, strict=True):
            assert np.abs(np.subtract(a.token_logprobs, b.token_logprobs)).max() <= 1e-4
            assert a.score == pytest.approx(b.score, abs=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen35", "deepseek3"])
@pytest.mark.parametrize("n_tree", [4096, 32768])
def test_thousands_of_candidates_are_one_pass(fixtures: Path, name: str, n_tree: int) -> None:
    """4,096 candidates, of two tokens or so, or as many tokens as are allowed; every tenth goes on from another."""
    rng = np.random.default_rng(n_tree)
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        tails = rng.integers(3, engine.tokenizer.n_vocab, (scoring.MAX_CANDIDATES, 14)).tolist()
        for i in range(0, len(tails), 10):
            tails[i][:3] = tails[i - 1][:3]
        lengths = [2] * len(tails)
        while (missing := n_tree - len(tree([t[:n] for t, n in zip(tails, lengths, strict=True)]).tokens)) > 0:
            for i in range(min(missing, len(tails))):
                lengths[i] += lengths[i] < 14
        context = [5, 6, 7, 8, 9]
        texts = [healing.Tail(str(i), tuple(t[:n]), n) for i, (t, n) in enumerate(zip(tails, lengths, strict=True))]
        engine._begin(len(context))
        steps: list[Step] = []
        run = engine._executor.score
        engine._executor.score = lambda step, *rest: (steps.append(step), run(step, *rest))[1]  # type: ignore[method-assign]
        split = healing.Split(context, texts, 0, ())
        result = scoring.Scoring(engine._executor, split, scoring.Options()).run()
        assert result.passes == len(steps) == 1
        assert len(context) + n_tree - 64 <= len(steps[0].tokens) <= len(context) + n_tree
        for i in [0, 1, 9, 10, *rng.integers(0, len(tails), 12)]:
            expected = alone(engine, context, texts[i].tokens)
            assert np.abs(np.subtract(result.candidates[i].token_logprobs, expected)).max() <= 1e-4


@pytest.mark.parametrize("of", ["available", "address_space"])
def test_passes_depend_on_memory_alone(fixtures: Path, monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    """Of the machine, and what `ulimit -v` leaves of it."""
    with Engine.open(fixtures / "exact" / "llama-f16.gguf", backend="cpu") as engine:
        candidates = [f" {a}{b}{c}{b}{a}{c}{b}" for a in "abcdefgh" for b in "ijklmnop" for c in "qrstuvwxyz"]
        one = engine.score("once more", candidates)
        base = memory.estimate(engine.plan, 512, 512).scratch
        monkeypatch.setattr(memory, of, lambda: 2 * base + (1 << 20))
        some = engine.score("once more", candidates)
        assert one.passes == 1 < some.passes < 8
        for a, b in zip(one.candidates, some.candidates, strict=True):
            assert np.abs(np.subtract(a.token_logprobs, b.token_logprobs)).max() <= 1e-4


def test_the_beginning_of_a_long_prompt_is_no_pass(fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.open(fixtures / "exact" / "qwen35-f16.gguf", backend="cpu") as engine:
        prompt = "once more and again " * 20
        one = engine.score(prompt, CANDIDATES)
        monkeypatch.setattr(scoring, "LONGEST_TOGETHER", 30)
        monkeypatch.setattr(scoring, "PREFILL_CHUNK", 7)
        ahead = engine.score(prompt, CANDIDATES)
        assert ahead.passes == one.passes == 1
        for a, b in zip(one.candidates, ahead.candidates, strict=True):
            assert np.abs(np.subtract(a.token_logprobs, b.token_logprobs)).max() <= 1e-4


PROMPTS = [
    "The capital of France is",
    "x",
    "",
    "one two  ",
    "12 34 5",
    "a\u0301 e",
    "\u4f60\u597d\u3002",
    "it' s",
    "no_space",
    " ",
]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen35", "deepseek3"])
def test_tokens_are_those_of_the_whole_text(fixtures: Path, name: str) -> None:
    """Prompts are made into tokens once up to a border; what comes out is what every text as a whole gives."""
    with Engine.open(fixtures / "exact" / f"{name}-f16.gguf", backend="cpu") as engine:
        tokenizer = engine.tokenizer
        for prompt in PROMPTS:
            for tails in (CANDIDATES, ["\u0301", "s", " 6"], ["\n", "\n\n", "  x"]):
                texts = healing.of_text(tokenizer, prompt, tails, "", 999, None)
                wholes = [tokenizer.encode(prompt + tail, bos=tokenizer.add_bos) for tail in tails]
                assert [texts.before + whole for whole in texts.wholes] == wholes
                ids = tokenizer.encode(prompt, bos=tokenizer.add_bos)
                assert texts.before + texts.prompt == ids
                n = healing.border(ids, wholes)
                split = healing.split(tokenizer, texts, end=False)
                assert split.context[: n or None] == (ids[:n] or split.neutral)
                assert [list(tail.tokens) for tail in split.tails] == [whole[n:] for whole in wholes]
                assert split.healed == len(ids) - n
                parts = [(prompt, True), ("<|im_end|>" if "x" in prompt else "", True)]
                chat = healing.of_parts(tokenizer, parts, tails, "", 999, None)
                for tail, whole in zip(tails, chat.wholes, strict=True):
                    assert chat.before + whole == tokenizer.encode_parts([*parts, (tail, False)])


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=12),
    st.integers(1, 30),
    st.sampled_from([(), (5,), (5, 6, 5, 4)]),
)
@settings(max_examples=300, deadline=None)
def test_passes_spell_every_candidate(candidates: list[list[int]], limit: int, neutral: tuple[int, ...]) -> None:
    """Walking a row's parents upwards spells the context and the candidate's tokens before the target."""
    context = [9, 8, 7]
    seen: set[tuple[int, int, bool]] = set()
    state = 1  # tokens of the context that the state already holds
    for step, targets, places in passes(context, candidates, tree(candidates), neutral, state, limit):
        assert list(step.rows) == sorted(set(step.rows)) and step.rows[0] >= 0
        assert len(step.tokens) <= max(limit, len(context) - state + len(neutral) + 2 * 6)
        assert all(parent < i for i, parent in enumerate(step.parents))
        for row, row_targets, row_places in zip(step.rows, targets, places, strict=True):
            for target, wanted in zip(row_targets, row_places, strict=True):
                for i, at, is_neutral in wanted:
                    path, node = [], row
                    while node >= 0:
                        path.append(step.tokens[node])
                        assert step.positions[node] == step.positions[row] - len(path) + 1
                        node = step.parents[node]
                    before = [*candidates[i][:at]]
                    if is_neutral:
                        assert node == PARENT_NONE and path[::-1] == [*neutral, *before]
                    else:
                        assert path[::-1] == [*context[state:], *before]
                    assert target == candidates[i][at]
                    assert (i, at, is_neutral) not in seen
                    seen.add((i, at, is_neutral))
        state = len(context)
    sides = (False, True) if neutral else (False,)
    assert seen == {(i, at, side) for i, c in enumerate(candidates) for at in range(len(c)) for side in sides}


def test_numbers_follow_from_the_sums() -> None:
    found = [
        Scored(healing.Tail("x", (1,), 2), [np.log(0.5)], [3.0], [np.log(0.25)]),
        Scored(healing.Tail("y", (1, 2), 8), [np.log(0.5)] * 2, [3.0, 4.0], [np.log(0.5), np.log(0.125)]),
    ]
    by = {rule: scores(found, rule, 1.0, prompt_tokens=1, healed=0, passes=1) for rule in NORMALISATIONS}
    assert [c.probability for c in by["sum"].candidates] == pytest.approx([2 / 3, 1 / 3])
    assert by["sum"].entropy_bits == pytest.approx(0.9182958340544896)
    assert by["sum"].margin == pytest.approx(1 / 3)
    assert [c.score for c in by["mean"].candidates] == pytest.approx([np.log(0.5)] * 2)
    assert by["mean"].entropy_bits == pytest.approx(1.0)
    assert [c.score for c in by["byte"].candidates] == pytest.approx([np.log(0.5) / 2, np.log(0.25) / 8])
    assert [c.score for c in by["pmi"].candidates] == pytest.approx([np.log(2), np.log(4)])
    assert by["pmi"].best.text == "y"
    half = scores(found, "sum", 0.5, prompt_tokens=1, healed=0, passes=1)
    assert [c.probability for c in half.candidates] == pytest.approx([0.8, 0.2])


def test_bad_requests(fixtures: Path) -> None:
    with Engine.open(fixtures / "exact" / "llama-f16.gguf", backend="cpu", context=64) as engine:
        with pytest.raises(InvalidRequestError, match="candidate 1 is empty"):
            engine.score("x", ["a", ""])
        with pytest.raises(InvalidRequestError, match="no candidates"):
            engine.score("x", [])
        with pytest.raises(InvalidRequestError, match="normalize"):
            engine.score("x", ["a"], normalize="median")
        for temperature in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidRequestError, match="temperature"):
                engine.score("x", ["a"], temperature=temperature)
        with pytest.raises(InvalidRequestError, match="one text"):
            engine.score("x", "yes")
        for wrong in (1, b"a", None):
            with pytest.raises(InvalidRequestError, match=f"candidate 1 is of type {type(wrong).__name__}") as typed:
                engine.score("x", ["a", wrong])  # type: ignore[list-item]
            assert typed.value.field == "candidates[1]"
        with pytest.raises(InvalidRequestError, match="4096 are scored at most"):
            engine.score("x", ["a"] * 4097)
        for prompt, candidates, field in (
            ("x", ["a", "word " * 100], "candidates[1]"),
            ("x", ["a", "word " * 1_000_000], "candidates[1]"),
            ("word " * 100, ["a"], "prompt"),
        ):
            with pytest.raises(ContextOverflowError) as too_long:
                engine.score(prompt, candidates)
            assert too_long.value.field == field
        with pytest.raises(InvalidRequestError, match="neutral context is empty") as raised:
            engine.score("x", ["a"], neutral="")
        assert raised.value.field == "neutral"
        with pytest.raises(ContextOverflowError, match="neutral context and longest") as late:
            engine.score("x", ["a"], neutral="word " * 100)
        assert late.value.field == "neutral"


@pytest.mark.parametrize(("reason", "error"), [("deadline", DeadlineError), ("cancelled", CancelledError)])
def test_poll_ends_it(fixtures: Path, reason: str, error: type[Exception]) -> None:
    with Engine.open(fixtures / "exact" / "llama-f16.gguf", backend="cpu") as engine:
        with pytest.raises(error):
            engine.scoring("x", ["a"], poll=lambda: reason).run()
        assert engine.score("x", ["a"]).best.text == "a"


@pytest.mark.model
@pytest.mark.parametrize("normalize", NORMALISATIONS)
def test_demo_model_knows_the_capital(smollm2: Path, normalize: str) -> None:
    with Engine.open(smollm2, backend="cpu") as engine:
        result = engine.score("The capital of France is", [" London", " Paris", " Berlin"], normalize=normalize)
        assert result.best.text == " Paris"
        assert sum(c.probability for c in result.candidates) == pytest.approx(1.0)


@pytest.mark.model
def test_control_tokens_in_candidates(smollm2: Path) -> None:
    """After a text they are what they spell, whether the candidate or the join spells it; after a chat they are text.
    What they are is read by the `gguf` package."""
    file = GGUFReader(smollm2)
    eos = file.fields["tokenizer.ggml.eos_token_id"].contents()
    spelled = file.fields["tokenizer.ggml.tokens"].contents(eos)
    with Engine.open(smollm2, backend="cpu") as engine:
        (alone,) = engine.score("Hello", [spelled], normalize="byte").candidates
        assert (alone.tokens, alone.n_bytes, alone.score) == ((eos,), 0, alone.logprob)
        (joined,) = engine.score("Hello", ["a"], join=spelled).candidates
        assert (joined.tokens[0], joined.n_tokens, joined.n_bytes) == (eos, 2, 1)
        chat = [{"role": "user", "content": "Hello"}]
        for candidate, join in ((spelled, ""), ("a", spelled)):
            (plain,) = engine.score(chat, [candidate], join=join).candidates
            assert eos not in plain.tokens and plain.n_bytes == len(join + candidate)


@pytest.mark.model
@pytest.mark.parametrize(
    ("prompt", "candidates", "pieces"),
    [
        ("The capital of France is", [" Paris", " London", " Berlin"], {"The", " capital", " Paris", " London"}),
        ("The ans", ["wer", "chor", "Berlin"], {"The", " ans", " answer", " anschor"}),  # " ans" is the prompt's alone
    ],
)
def test_prompt_and_candidates_are_looked_for_at_once(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, prompt: str, candidates: list[str], pieces: set[str]
) -> None:
    """The file's lists are gone through once, as for one text: without dictionaries that is what takes the time."""
    searches: list[list[str]] = []
    search = bpe.BytePairs._search
    monkeypatch.setattr(bpe.BytePairs, "_search", lambda self, new: (searches.append([*new]), search(self, new))[1])
    tokenizer = Tokenizer.from_gguf(smollm2)
    texts = healing.of_text(tokenizer, prompt, candidates, "", 999, None)
    assert len(searches) == 1 and pieces <= {*searches[0]}
    assert [tokenizer.decode(texts.before + whole) for whole in texts.wholes] == [prompt + each for each in candidates]


@pytest.mark.model
def test_border_inside_a_token(smollm2: Path) -> None:
    """The prompt's last space and the candidate's first word are one token: it is scored as the model knows it."""
    with Engine.open(smollm2, backend="cpu") as engine:
        clean = engine.score("The capital of France is", [" Paris", " Berlin"])
        split = engine.score("The capital of France is ", ["Paris", "Berlin"])
        assert (clean.healed, split.healed) == (0, 1)
        for a, b in zip(clean.candidates, split.candidates, strict=True):
            assert a.tokens == b.tokens
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)


@pytest.mark.model
def test_choices_equal_an_independent_computation(smollm2: Path) -> None:
    """Tokens of llama.cpp, log-probabilities of transformers in float64: `fixtures/make_choices.py`."""
    items = json.loads((Path(__file__).parent / "fixtures" / "smollm2_choices.json").read_text())
    assert len(items) >= 30
    with Engine.open(smollm2, backend="cpu") as engine:
        for item in items:
            result = engine.score(item["prompt"], [choice["text"] for choice in item["choices"]])
            for candidate, choice in zip(result.candidates, item["choices"], strict=True):
                assert list(candidate.tokens) == choice["tokens"]
                assert np.abs(np.subtract(candidate.token_logprobs, choice["logprobs"])).max() <= 1e-4
                assert candidate.logprob == pytest.approx(sum(choice["logprobs"]), abs=2e-4)


@pytest.mark.model
def test_with_dictionaries_a_text_is_taken_apart_once(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to search then: what is in front of the border, what is behind, and that with each candidate."""
    tokenizer = Tokenizer.from_gguf(smollm2)
    tokenizer.prepare()
    texts: list[str] = []
    split = pretokenize.Splitter.split
    monkeypatch.setattr(
        pretokenize.Splitter, "split", lambda self, text, watch: (texts.append(text), split(self, text, watch))[1]
    )
    healing.of_text(tokenizer, "The capital of France is", [" Paris", " London"], "", 999, None)
    assert texts == ["The capital of France", " is", " is Paris", " is London"]


def test_what_no_context_can_hold_is_refused_at_once(fixtures: Path) -> None:
    """Not after it has been taken apart once for every candidate."""
    with Engine.open(fixtures / "exact" / "llama-f16.gguf", backend="cpu") as engine:
        began = time.monotonic()
        with pytest.raises(ContextOverflowError, match="more than the"):
            engine.score("no " * 2_000_000, ["x"] * 1000)
        with pytest.raises(ContextOverflowError, match="more than the"):
            engine.score([{"role": "user", "content": "no " * 2_000_000}], ["x"] * 1000)
        with pytest.raises(ContextOverflowError, match="prompt and candidate 0 have"):
            engine.score("no " * (engine.n_ctx + 1), ["x"] * 4000)
        with pytest.raises(ContextOverflowError, match="prompt and candidate 0 have"):
            engine.score("x" * (30 * engine.n_ctx), ["x"] * 4000)  # no border: all of it stands before each candidate
        with pytest.raises(ContextOverflowError, match="candidate 1 has 6,000,000 characters, more than the"):
            engine.score("no", ["x", "no " * 2_000_000])
        assert time.monotonic() - began < 5


def test_a_prompt_without_a_border_is_not_held_once_for_each_candidate(fixtures: Path) -> None:
    """Candidates are looked up together while their texts are short; the rest of such a prompt is in each of them."""
    with Engine.open(fixtures / "exact" / "llama-f16.gguf", backend="cpu") as engine:
        prompt = "\u05e9\u05dc\u05d5\u05dd " * engine.n_ctx
        assert engine.tokenizer.border(prompt) == 0
        tracemalloc.start()
        try:
            with pytest.raises(ContextOverflowError, match="prompt and candidate 0 have"):
                engine.score(prompt, ["x"] * 500)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 4 << 20


def test_tokens_to_score_are_bounded():
    """What candidates share is computed once, but every one of its log-probabilities is an answer of each."""
    tails = [healing.Tail(str(i), (1,) * 256 + (i,), 257) for i in range(scoring.MAX_CANDIDATES)]
    with pytest.raises(InvalidRequestError, match=str(healing.MAX_SCORED)) as raised:
        scoring.Scoring(None, healing.Split([1], tails, 0, ()), scoring.Options())
    assert raised.value.field == "candidates"
    split = healing.Split([1], tails[:1], 0, [1] * (scoring.LONGEST_TOGETHER + 1))
    with pytest.raises(InvalidRequestError, match="neutral context has 4097 tokens"):
        scoring.Scoring(None, split, scoring.Options(neutral="x"))


def test_a_million_tokens_to_score_end_when_they_are_told_to(fixtures: Path) -> None:
    """Few of them are distinct, but each is looked at for each candidate."""
    with Engine.open(fixtures / "exact" / "llama-f16.gguf", backend="cpu") as engine:
        tokenizer = engine.tokenizer
        shared = [5 + i % 40 for i in range(250)]
        wholes = [[*shared, 3 + i // 64, 3 + i % 64] for i in range(scoring.MAX_CANDIDATES)]
        poll = Poll(60)
        texts = healing.Texts([str(i) for i in range(len(wholes))], [3], [], wholes)
        split = healing.split(tokenizer, texts, end=False, poll=poll)
        scoring.Scoring(engine._executor, split, scoring.Options(), poll)
        tails = [tail.tokens for tail in split.tails]
        (step,) = passes(split.context, tails, tree(tails, poll), (), 0, 1 << 20, poll)
        poll()
        assert poll.longest < 0.2
        assert [list(tokens) for tokens in tails] == wholes and sum(map(len, step.targets)) >= len(wholes)
        for tail in split.tails[::500]:
            assert tail.n_bytes == sum(len(tokenizer.token_bytes(token)) for token in tail.tokens)
