"""Sampling: against scalar and textbook computations, known answers, distributions, extremes."""

import math
import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reflex_ipc import sampler as module
from reflex_ipc.errors import ReflexError
from reflex_ipc.sampler import ONE, Sampler, Sampling, exp_weights, philox4x32, random_bits, ranked_ids
from tests.sampling_reference import (
    FLOAT32_MAX,
    GOLDEN,
    GOLDEN_WEIGHTS,
    LOG2_E,
    TAYLOR,
    define,
    golden_run,
    naive,
    weight,
)

Logits = npt.NDArray[np.float32]


def row(*values: float) -> Logits:
    return np.array(values, np.float32)


def draw(logits: Logits, *, prompt: tuple[int, ...] = (), **fields: Any) -> int:
    """The first token for these settings."""
    return Sampler(Sampling(**fields), len(logits), prompt).sample(logits).id


def drawn(logits: Logits, n: int = 2000, **fields: Any) -> dict[int, int]:
    """How often each token comes in n steps of one seed."""
    sampler = Sampler(Sampling(**({"temperature": 1.0, "seed": 5} | fields)), len(logits), [])
    counts: dict[int, int] = {}
    for _ in range(n):
        token = sampler.sample(logits).id
        counts[token] = counts.get(token, 0) + 1
    return counts


# Random numbers


@pytest.mark.parametrize(
    ("key", "counter", "words"),
    [  # The known answers that Random123 publishes for philox4x32 with 10 rounds.
        ("00000000 00000000", "00000000 00000000 00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff", "ffffffff ffffffff ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("a4093822 299f31d0", "243f6a88 85a308d3 13198a2e 03707344", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_known_answers(key: str, counter: str, words: str) -> None:
    k0, k1 = (int(word, 16) for word in key.split())
    c0, c1, c2, c3 = (int(word, 16) for word in counter.split())
    assert philox4x32((k0, k1), (c0, c1, c2, c3)) == tuple(int(word, 16) for word in words.split())


def test_random_bits_put_seed_and_step_where_the_docs_say() -> None:
    assert random_bits(0, 0) == 0xE169C58D_6627E8D5
    for seed, step in ((1, 0), (-1, 7), (2**53, 2**32 + 5), (-(2**53), 3)):
        key = (seed % 2**32, (seed >> 32) % 2**32)
        words = philox4x32(key, (step % 2**32, step >> 32, 0, 0))
        assert random_bits(seed, step) == words[1] * 2**32 + words[0]
    many = {random_bits(seed, step) for seed in range(-50, 50) for step in range(100)}
    assert len(many) == 10_000


def test_random_bits_are_uniform_over_seeds_and_over_steps() -> None:
    for values in ([random_bits(seed, 0) for seed in range(16_000)], [random_bits(9, step) for step in range(16_000)]):
        counts = np.bincount([value >> 60 for value in values], minlength=16)
        assert chi_square(counts, [1 / 16] * 16) < 37.7  # 15 degrees of freedom, 0.1%


# Weights


def test_constants_are_the_correctly_rounded_ones() -> None:
    assert list(module._EXP2_TAYLOR) == TAYLOR
    assert module._LOG2_E == LOG2_E
    assert module._FLOAT32_MAX == FLOAT32_MAX == float(np.finfo(np.float32).max)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1e-6, 1e6, 5e-324, 13.0])
def test_weights_equal_the_scalar_definition_bit_for_bit(temperature: float) -> None:
    rng = np.random.default_rng(1)
    span = min(32 * temperature, 1e30)
    logits = (3.25 - rng.random(20_000) * span).astype(np.float32)  # crosses the border of a block
    logits[:4] = 3.25, -np.inf, np.float32(3.25 - 30 * temperature), -3e38
    got = exp_weights(logits, 3.25, temperature)
    assert got.dtype == np.int64
    assert got.tolist() == [weight(float(x) - 3.25, temperature) for x in logits]


def test_weights_are_exp_to_within_their_unit() -> None:
    logits = np.linspace(-31, 0, 5000).astype(np.float32)
    for x, got in zip(logits, exp_weights(logits, 0.0, 1.0), strict=True):
        exact = Decimal(float(x)).exp() * ONE
        assert -Decimal("1.3") < int(got) - exact < Decimal("0.3")
    assert exp_weights(row(0, -28, -30, -np.inf), 0.0, 1.0).tolist() == [ONE, 0, 0, 0]


def test_ranked_ids_sort_by_value_then_id() -> None:
    rng = np.random.default_rng(2)
    for _ in range(300):
        n = int(rng.integers(1, 60))
        logits = rng.integers(-3, 4, n).astype(np.float32) * np.float32(rng.choice([0.5, 1e-40, 1e38]))
        logits[rng.random(n) < 0.1] = -0.0
        logits[rng.random(n) < 0.1] = -np.inf
        count = int(rng.integers(1, n + 2))
        expected = sorted(range(n), key=lambda i: (-logits[i], i))[:count]
        assert ranked_ids(logits, count).tolist() == expected


# Every parameter against the two references

MIXES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 0.6, "top_k": 3, "top_p": 0.95},
    {"temperature": 1.0, "repeat_penalty": 1.4},
    {"temperature": 1.0, "repeat_penalty": 0.6, "repeat_last_n": 3},
    {"temperature": 1.0, "repeat_penalty": 1.4, "repeat_last_n": -1},
    {"temperature": 1.0, "repeat_penalty": 1.4, "repeat_last_n": 0},
    {"temperature": 1.0, "presence_penalty": 1.5},
    {"temperature": 1.0, "presence_penalty": -1.5},
    {"temperature": 1.0, "frequency_penalty": 0.7},
    {"temperature": 1.0, "frequency_penalty": -0.7, "presence_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {3: 4.0, 7: -2.0, 11: 0.0}},
    {"repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "logit_bias": {0: 1.0}},
    {
        "temperature": 0.9,
        "top_k": 25,
        "top_p": 0.9,
        "min_p": 0.02,
        "repeat_penalty": 1.2,
        "repeat_last_n": 8,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "logit_bias": {1: 2.0, 2: -1e9},
    },
]


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(mix))
def test_every_parameter_agrees_with_scalar_and_textbook(mix: dict[str, Any]) -> None:
    rng = np.random.default_rng(3)
    unsure = 0
    for seed in range(25):
        n = 40
        prompt = rng.integers(0, n, 12).tolist()
        sampler = Sampler(Sampling(**mix, seed=seed), n, prompt)
        answer: list[int] = []
        for step in range(12):
            logits = (rng.standard_normal(n) * 2).astype(np.float32)
            got = sampler.sample(logits).id
            bits = random_bits(seed, step)
            assert got == define(logits.tolist(), mix, prompt, answer, bits)
            expected = naive(logits.tolist(), mix, prompt, answer, bits / 2**64)
            unsure += expected is None
            assert expected in (got, None)
            answer.append(got)
    assert unsure <= 1  # of 300


@pytest.mark.parametrize("mix", [MIXES[0], MIXES[3], MIXES[4], MIXES[6], MIXES[7]], ids=lambda mix: "-".join(mix))
def test_a_vocabulary_of_several_blocks_agrees_with_the_scalar_definition(mix: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    for scale in (0.05, 3.0):  # top_p keeps most of the vocabulary with the first, a few hundred with the second
        logits = (rng.standard_normal(40_000) * scale).astype(np.float32)
        for seed in range(2):
            expected = define(logits.tolist(), mix, [], [], random_bits(seed, 0))
            assert draw(logits, seed=seed, **mix) == expected


@st.composite
def cases(draw_: st.DrawFn) -> tuple[list[float], dict[str, Any], list[int]]:
    values = st.one_of(
        st.floats(-40, 40, width=32),
        st.sampled_from([0.0, -0.0, 1.0, -math.inf, 3e38, -3e38, 1e-45]),
        st.floats(allow_nan=False, width=32, max_value=FLOAT32_MAX),
    )
    logits = draw_(st.lists(values, min_size=1, max_size=30).filter(lambda xs: max(xs) > -math.inf))
    tokens = st.integers(0, len(logits) - 1)
    unit = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0, 1e-300]))
    fields = draw_(
        st.fixed_dictionaries(
            {},
            optional={
                "temperature": st.one_of(st.floats(0, 3), st.sampled_from([1e-6, 1e6, 5e-324, 1.0])),
                "top_k": st.integers(0, 40),
                "top_p": unit,
                "min_p": unit,
                "repeat_penalty": st.floats(0.01, 100),
                "repeat_last_n": st.integers(-1, 10),
                "presence_penalty": st.floats(-100, 100),
                "frequency_penalty": st.floats(-100, 100),
                "logit_bias": st.dictionaries(tokens, st.floats(-1e9, 1e9), max_size=5),
                "seed": st.integers(-(2**53), 2**53),
            },
        )
    )
    fields.setdefault("seed", 0)
    return logits, fields, draw_(st.lists(tokens, max_size=8))


@settings(max_examples=1500, deadline=None)
@given(cases())
def test_any_settings_on_any_logits_equal_the_scalar_definition(
    case: tuple[list[float], dict[str, Any], list[int]],
) -> None:
    values, fields, prompt = case
    logits = row(*values)
    values = logits.tolist()  # rounded to float32
    before = logits.tobytes()
    sampler = Sampler(Sampling(**fields), len(logits), prompt)
    answer: list[int] = []
    for step in range(4):
        got = sampler.sample(logits)
        assert got.id == define(values, fields, prompt, answer, random_bits(fields["seed"], step))
        assert values[got.id] > -math.inf
        assert -math.inf < got.logprob <= 0
        answer.append(got.id)
    assert logits.tobytes() == before


# Distributions: n draws against the probabilities, chi-square at the 0.1% point. Seeds are fixed.


def chi_square(counts: npt.ArrayLike, probabilities: npt.ArrayLike) -> float:
    observed = np.asarray(counts, np.float64)
    expected = np.asarray(probabilities, np.float64) * observed.sum()
    return float(((observed - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("fields", "probabilities", "limit"),
    [
        ({"temperature": 1.0}, [0.4, 0.3, 0.15, 0.1, 0.05], 18.47),
        ({"temperature": 0.5}, [0.16 / 0.285, 0.09 / 0.285, 0.0225 / 0.285, 0.01 / 0.285, 0.0025 / 0.285], 18.47),
        ({"temperature": 1.0, "top_k": 3}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85], 13.82),
        ({"temperature": 1.0, "top_p": 0.8}, [0.4 / 0.85, 0.3 / 0.85, 0.15 / 0.85], 13.82),
        ({"temperature": 1.0, "min_p": 0.2}, [0.4 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.1 / 0.95], 16.27),
        ({"temperature": 1e6}, [0.2] * 5, 18.47),
    ],
    ids=str,
)
@pytest.mark.parametrize("over", ["seeds", "steps"])
def test_draws_follow_the_probabilities(
    fields: dict[str, Any], probabilities: list[float], limit: float, over: str
) -> None:
    logits = np.log([0.4, 0.3, 0.15, 0.1, 0.05]).astype(np.float32)
    if over == "steps":
        sampler = Sampler(Sampling(**fields, seed=11), 5, [])
        tokens = [sampler.sample(logits).id for _ in range(12_000)]
    else:
        tokens = [draw(logits, **fields, seed=seed) for seed in range(12_000)]
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert len(counts) == len(probabilities)
    assert chi_square(counts, probabilities) < limit


# Borders that no random draw finds


@pytest.mark.parametrize(
    ("bits", "token"), [(0, 1), (2**63 - 1, 1), (2**63, 3), (2**64 - 1, 3)], ids=["first", "below", "on", "last"]
)
def test_the_draw_takes_the_first_token_whose_cumulative_weight_exceeds_the_target(
    bits: int, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "random_bits", lambda seed, step: bits)
    logits = row(-50, 2, -np.inf, 2, -50)
    assert draw(logits, temperature=1.0, seed=0) == token
    assert define(logits.tolist(), {"temperature": 1.0}, [], [], bits) == token


def test_top_p_is_reached_by_the_floor_of_its_share() -> None:
    logits = row(0, -0.125)
    total = ONE + weight(-0.125, 1.0)
    for extra, tokens in ((-0.4, {0}), (0.0, {0}), (0.6, {0}), (1.1, {0, 1})):
        assert set(drawn(logits, 200, top_p=(ONE + extra) / total)) == tokens


# The same everywhere


@pytest.mark.parametrize(("fields", "tokens"), GOLDEN, ids=["-".join(fields) for fields, _ in GOLDEN])
def test_golden_tokens(fields: dict[str, Any], tokens: list[int]) -> None:
    assert golden_run(fields) == tokens


def test_every_simd_build_of_numpy_gives_the_same_bits() -> None:
    umath = np.core if np.__version__ < "2" else np._core  # type: ignore[attr-defined]
    features = umath._multiarray_umath.__cpu_features__
    used = [name for name in umath._multiarray_umath.__cpu_dispatch__ if features[name]]
    code = "import tests.sampling_reference as r; print(r.golden_weights(), [r.golden_run(f) for f, _ in r.GOLDEN])"
    expected = f"{GOLDEN_WEIGHTS} {[tokens for _, tokens in GOLDEN]}"
    root = str(Path(__file__).parents[1])
    for disabled in ([], used[-1:], used):
        environment = os.environ | {"NPY_DISABLE_CPU_FEATURES": " ".join(disabled), "PYTHONPATH": root}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == expected


# Extremes


def test_greedy_takes_the_highest_logit_and_the_lowest_id_of_equals() -> None:
    assert draw(row(1, 3, 3, 2)) == 1
    assert draw(row(-0.0, 0.0)) == 0
    assert draw(row(0.0, -0.0)) == 0
    assert draw(row(-5)) == 0
    assert draw(row(-np.inf, -3e38)) == 1


def test_top_k_one_and_tiny_top_p_and_full_min_p_are_greedy() -> None:
    logits = row(1, 3, 2.9, 2)
    for fields in ({"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-300}, {"top_p": 0.1}, {"min_p": 1.0}):
        assert drawn(logits, 200, **fields) == {1: 200}
    assert set(drawn(row(3, 3, 1, 3), 200, min_p=1.0)) == {0, 1, 3}
    assert drawn(row(1, 3, 3), 200, top_k=1) == {1: 200}
    assert drawn(row(1, 3, 3), 200, top_p=0.0) == {1: 200}


def test_equal_logits_are_cut_by_lowest_id() -> None:
    logits = np.full(100, -7.5, np.float32)
    assert set(drawn(logits, top_k=10)) == set(range(10))
    assert set(drawn(logits, top_p=0.25)) == set(range(25))
    assert set(drawn(logits, min_p=0.999)) == set(range(100))


def test_extreme_temperatures() -> None:
    logits = row(1, 1.001, 1.0005, -40)
    assert drawn(logits, 300, temperature=1e-6) == {1: 300}
    assert drawn(logits, 300, temperature=5e-324) == {1: 300}
    assert set(drawn(logits, 300, temperature=1e6)) == {0, 1, 2, 3}
    assert set(drawn(row(5, 5, 4), 300, temperature=1e-6)) == {0, 1}


def test_the_temperature_comes_last_and_admits_no_token() -> None:
    # At temperature 1 the first two weigh 0.9; at temperature 1e6 all would be equal, and top_p would keep nine.
    logits = np.log([0.5, 0.4] + [0.0125] * 8).astype(np.float32)
    assert set(drawn(logits, temperature=1e6, top_p=0.89)) == {0, 1}
    assert set(drawn(logits, temperature=1e6, min_p=0.1)) == {0, 1}


def test_minus_infinity_is_never_chosen() -> None:
    logits = row(-np.inf, 0, -np.inf, 0)
    for fields in ({}, {"top_k": 3}, {"top_p": 0.999}, {"temperature": 1e6}, {"logit_bias": {0: 1e9}}):
        assert set(drawn(logits, 300, **fields)) == {1, 3}
    assert draw(row(-np.inf, -1e30), logit_bias={1: -1e9, 0: 1e9}) == 1


def test_a_bias_of_a_thousand_million_forces_or_bans() -> None:
    logits = row(10, 0, -10, 5)
    assert drawn(logits, 200, logit_bias={2: 1e9}) == {2: 200}
    assert set(drawn(logits, 400, temperature=1e6, logit_bias={0: -1e9, 3: -1e9})) == {1, 2}
    banned = dict.fromkeys(range(4), -1e9)  # all alike: float32 leaves no difference at this size
    assert set(drawn(logits, 400, logit_bias=banned)) == {0, 1, 2, 3}
    assert draw(logits, logit_bias=banned) == 0


def test_adjusted_logits_saturate_and_never_become_infinite() -> None:
    sampler = Sampler(Sampling(temperature=1, seed=1, repeat_penalty=100), 3, [0, 1, 2])
    assert sampler.adjusted(row(-3e38, -np.inf, 3e38)).tolist() == [-FLOAT32_MAX, -math.inf, float(np.float32(3e36))]
    assert sampler.sample(row(-3e38, -np.inf, -3.1e38)).id in (0, 2)
    sampler = Sampler(Sampling(temperature=1, seed=1, repeat_penalty=0.01), 2, [0, 1])
    assert sampler.adjusted(row(3e38, -3e38)).tolist() == [FLOAT32_MAX, float(np.float32(-3e36))]


def test_a_vocabulary_of_one_token() -> None:
    sampled = Sampler(Sampling(temperature=1, top_k=3, top_p=0.5, min_p=0.5, top_logprobs=20), 1, []).sample(row(-9))
    assert sampled == (0, 0.0, ((0, 0.0),))


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"repeat_penalty": 1.2}], ids=str)
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (row(1, np.nan, 2), "the model produced nan as the logit of token 1 at step 1"),
        (row(np.inf, 0, 2), "the model produced inf as the logit of token 0 at step 1"),
        (row(-np.inf, -np.inf, -np.inf), "the model produced only minus infinity at step 1"),
        (np.zeros(3), r"expected float32 logits of shape \(3,\), got float64 \(3,\)"),
        (np.zeros((1, 3), np.float32), r"expected float32 logits of shape \(3,\), got float32 \(1, 3\)"),
    ],
)
def test_broken_logits_are_an_internal_error_and_change_nothing(
    fields: dict[str, Any], bad: Logits, message: str
) -> None:
    sampler = Sampler(Sampling(**fields, seed=1), 3, [])
    fresh = Sampler(Sampling(**fields, seed=1), 3, [])
    assert sampler.sample(row(1, 2, 3)) == fresh.sample(row(1, 2, 3))
    with pytest.raises(ReflexError, match=message) as caught:
        sampler.sample(bad)
    assert caught.value.code == "internal"
    assert [sampler.sample(row(1, 2, 3)) for _ in range(4)] == [fresh.sample(row(1, 2, 3)) for _ in range(4)]


# Penalties: which tokens they see


def test_the_repeat_penalty_sees_the_end_of_the_prompt_and_the_answer() -> None:
    sampler = Sampler(Sampling(repeat_penalty=2.0, repeat_last_n=3), 6, [0, 1, 2])
    logits = row(8, 8, 8, -8, -8, 8)
    assert sampler.adjusted(logits).tolist() == [4, 4, 4, -8, -8, 8]
    sampler.accept(3)
    assert sampler.adjusted(logits).tolist() == [8, 4, 4, -16, -8, 8]
    sampler.accept(3)  # twice in the window counts once
    assert sampler.adjusted(logits).tolist() == [8, 8, 4, -16, -8, 8]
    sampler.accept(5)
    assert sampler.adjusted(logits).tolist() == [8, 8, 8, -16, -8, 4]


def test_presence_and_frequency_count_the_answer_only() -> None:
    sampler = Sampler(Sampling(presence_penalty=0.5, frequency_penalty=0.25, repeat_last_n=1), 4, [0, 0, 1])
    logits = row(1, 1, 1, 1)
    assert sampler.adjusted(logits).tolist() == [1, 1, 1, 1]
    for token in (0, 2, 2, 3):
        sampler.accept(token)
    assert sampler.adjusted(logits).tolist() == [0.25, 1, 0, 0.25]


def test_bias_comes_before_the_penalties() -> None:
    sampler = Sampler(Sampling(repeat_penalty=2.0, logit_bias={0: 6.0}, presence_penalty=1.0), 2, [])
    sampler.accept(0)
    assert sampler.adjusted(row(-2, 0)).tolist() == [(-2 + 6) / 2 - 1, 0]


# Log-probabilities


def test_logprobs_are_those_of_the_raw_logits_whatever_the_settings() -> None:
    rng = np.random.default_rng(5)
    for n, scale in ((3, 1.0), (500, 8.0), (60_000, 2.0)):
        logits = (rng.standard_normal(n) * scale).astype(np.float32)
        exact = logits.astype(np.longdouble)
        logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
        ranks = sorted(range(n), key=lambda i: (-logits[i], i))[:20]
        for fields in ({}, {"temperature": 1.5, "top_k": 9}, {"logit_bias": {0: 50.0}, "repeat_penalty": 1.5}):
            sampled = Sampler(Sampling(**fields, seed=2, top_logprobs=20), n, [0, 1]).sample(logits)
            assert abs(sampled.logprob - logprobs[sampled.id]) < 1e-6
            assert [token for token, _ in sampled.top] == ranks
            assert all(abs(logprob - logprobs[token]) < 1e-6 for token, logprob in sampled.top)


def test_top_logprobs_break_ties_by_lowest_id_and_leave_out_the_impossible() -> None:
    sampled = Sampler(Sampling(top_logprobs=3), 5, []).sample(row(1, 2, 1, 1, 2))
    assert [token for token, _ in sampled.top] == [1, 4, 0]
    sampled = Sampler(Sampling(top_logprobs=20), 4, []).sample(row(-np.inf, 0, -np.inf, 0))
    assert sampled.top == ((1, -math.log(2)), (3, -math.log(2)))
    assert sampled.logprob == -math.log(2)
    assert Sampler(Sampling(), 2, []).sample(row(0, 0)).top == ()


def test_logprobs_of_huge_logits_stay_finite() -> None:
    sampled = Sampler(Sampling(top_logprobs=2), 2, []).sample(row(FLOAT32_MAX, -FLOAT32_MAX))
    assert sampled.logprob == 0
    assert sampled.top == ((0, 0.0), (1, -2 * FLOAT32_MAX))


# Start-up


def test_importing_the_module_brings_in_nothing_heavy() -> None:
    code = (
        "import sys; before = set(sys.modules); import reflex_ipc.sampler, reflex_ipc.stops;"
        "print(*({'numpy', 'dataclasses', 'inspect', 'json', 'argparse', 'random'} & (set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
