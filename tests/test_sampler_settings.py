"""Sampling's fields: ranges, messages, the table in the docs, seeds."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from reflex_ipc.errors import InvalidRequestError, UnsupportedModelError
from reflex_ipc.sampler import Sampler, Sampling


def row(*values: float) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("field", "bad", "message"),
    [
        ("temperature", -0.1, "temperature must be a number from 0 to 1e+06, not -0.1"),
        ("temperature", 1.1e6, "temperature must be a number from 0 to 1e+06, not 1100000.0"),
        ("temperature", math.nan, "temperature must be a number from 0 to 1e+06, not nan"),
        ("temperature", math.inf, "temperature must be a number from 0 to 1e+06, not inf"),
        ("temperature", True, "temperature must be a number from 0 to 1e+06, not True"),
        ("temperature", "hot", "temperature must be a number from 0 to 1e+06, not 'hot'"),
        ("temperature", None, "temperature must be a number from 0 to 1e+06, not None"),
        ("temperature", "x" * 1000, "temperature must be a number from 0 to 1e+06, not '" + "x" * 59 + "..."),
        ("top_k", -1, "top_k must be an integer from 0 to 2147483647, not -1"),
        ("top_k", 1.0, "top_k must be an integer from 0 to 2147483647, not 1.0"),
        ("top_k", False, "top_k must be an integer from 0 to 2147483647, not False"),
        ("top_k", 2**31, "top_k must be an integer from 0 to 2147483647, not 2147483648"),
        ("top_p", 1.0001, "top_p must be a number from 0 to 1, not 1.0001"),
        ("top_p", -1e-9, "top_p must be a number from 0 to 1, not -1e-09"),
        ("min_p", 1.5, "min_p must be a number from 0 to 1, not 1.5"),
        ("min_p", math.nan, "min_p must be a number from 0 to 1, not nan"),
        ("repeat_penalty", 0, "repeat_penalty must be a number from 0.01 to 100, not 0"),
        ("repeat_penalty", 101, "repeat_penalty must be a number from 0.01 to 100, not 101"),
        ("repeat_last_n", -2, "repeat_last_n must be an integer from -1 to 2147483647, not -2"),
        ("presence_penalty", 101.0, "presence_penalty must be a number from -100 to 100, not 101.0"),
        ("frequency_penalty", -101, "frequency_penalty must be a number from -100 to 100, not -101"),
        ("logit_bias", [(1, 2.0)], "logit_bias must map token ids to numbers, not [(1, 2.0)]"),
        ("logit_bias", {"1": 2.0}, "a token id in logit_bias must be an integer from 0 to 4194303, not '1'"),
        ("logit_bias", {-1: 2.0}, "a token id in logit_bias must be an integer from 0 to 4194303, not -1"),
        ("logit_bias", {1: math.inf}, "logit_bias[1] must be a number from -1e+09 to 1e+09, not inf"),
        ("logit_bias", {1: math.nan}, "logit_bias[1] must be a number from -1e+09 to 1e+09, not nan"),
        ("seed", 2**53 + 1, "seed must be an integer from -9007199254740992 to 9007199254740992, not 9007199254740993"),
        ("seed", 1.0, "seed must be an integer from -9007199254740992 to 9007199254740992, not 1.0"),
        ("seed", "1", "seed must be an integer from -9007199254740992 to 9007199254740992, not '1'"),
        ("top_logprobs", 21, "top_logprobs must be an integer from 0 to 20, not 21"),
        ("top_logprobs", -1, "top_logprobs must be an integer from 0 to 20, not -1"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name_and_range(field: str, bad: object, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Sampling(**{field: bad})  # type: ignore[arg-type]
    assert str(caught.value) == message


@pytest.mark.parametrize("make", [lambda: 10**5000, lambda: [10**5000]], ids=["int", "list"])
def test_an_integer_too_long_to_print_is_refused_too(make: Callable[[], object]) -> None:
    for field in ("temperature", "top_k", "logit_bias", "seed"):
        with pytest.raises(InvalidRequestError, match=rf"{field} must .*, not (int|list) of enormous size"):
            Sampling(**{field: make()})  # type: ignore[arg-type]


def test_the_ends_of_every_range_are_allowed() -> None:
    low = Sampling(
        temperature=0,
        top_k=0,
        top_p=0,
        min_p=0,
        repeat_penalty=0.01,
        repeat_last_n=-1,
        presence_penalty=-100,
        frequency_penalty=-100,
        logit_bias={0: -1e9},
        seed=-(2**53),
        top_logprobs=0,
    )
    high = Sampling(
        temperature=1e6,
        top_k=2**31 - 1,
        top_p=1,
        min_p=1,
        repeat_penalty=100,
        repeat_last_n=2**31 - 1,
        presence_penalty=100,
        frequency_penalty=100,
        logit_bias={3: 1e9},
        seed=2**53,
        top_logprobs=20,
    )
    for sampling in (low, high):
        sampler = Sampler(sampling, 4, [0, 1])
        for _ in range(3):
            assert 0 <= sampler.sample(row(1, 2, -np.inf, 0)).id < 4


def test_the_docs_list_every_parameter_with_its_default_and_range() -> None:
    page = (Path(__file__).parents[1] / "docs" / "sampling.md").read_text()
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `")
    ]
    assert {name for name, *_ in rows} == set(Sampling.__slots__)
    words: dict[str, Any] = {"none": {}, "random": None, "": None}
    for name, default, off, limits, _ in rows:
        assert getattr(Sampling(), name) == (words[default] if default in words else float(default))
        fields: dict[str, Any] = {name: words[off] if off in words else int(off)}
        Sampling(**fields)
        low, high = ("-2^53", "2^53") if limits == "±2^53" else limits.split(" to ")
        whole = name in ("top_k", "repeat_last_n", "seed", "top_logprobs")
        ends = [limit.replace("2^31 - 1", str(2**31 - 1)).replace("2^53", str(2**53)) for limit in (low, high)]
        span = " to ".join(ends if whole else [f"{float(end):g}" for end in ends])
        fields = {name: {0: 1e10} if name == "logit_bias" else 2**60}
        with pytest.raises(InvalidRequestError, match=re.escape(f"from {span}, not")):
            Sampling(**fields)


def test_settings_are_immutable_and_compare_by_value() -> None:
    bias = {1: 2.0}
    sampling = Sampling(temperature=1, logit_bias=bias)
    bias[1] = 9.0
    assert sampling.logit_bias == {1: 2.0}
    with pytest.raises(AttributeError):
        sampling.temperature = 2.0
    with pytest.raises(TypeError):
        sampling.logit_bias[1] = 3.0  # type: ignore[index]
    assert sampling == Sampling(temperature=1.0, logit_bias={1: 2.0})
    assert sampling != Sampling(temperature=1.0)
    assert sampling != 1


def test_is_greedy_means_argmax_of_the_raw_logits() -> None:
    assert Sampling().is_greedy
    assert Sampling(top_p=0.1, top_k=5, min_p=0.3, seed=1).is_greedy
    assert Sampling(temperature=1, top_k=1).is_greedy
    assert Sampling(repeat_penalty=1.5, repeat_last_n=0).is_greedy
    assert Sampling(logit_bias={1: 0.0}).is_greedy
    assert not Sampling(temperature=1).is_greedy
    assert not Sampling(repeat_penalty=1.1).is_greedy
    assert not Sampling(presence_penalty=0.1).is_greedy
    assert not Sampling(frequency_penalty=0.1).is_greedy
    assert not Sampling(logit_bias={1: 0.1}).is_greedy


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias names token 4, but the model's ids end at 3"):
        Sampler(Sampling(logit_bias={4: 1.0}), 4, [])
    with pytest.raises(InvalidRequestError, match="the prompt holds token 4, but the model's ids end at 3"):
        Sampler(Sampling(repeat_penalty=1.1), 4, [1, 4])
    with pytest.raises(UnsupportedModelError, match="4194305"):
        Sampler(Sampling(), 2**22 + 1, [])
    with pytest.raises(UnsupportedModelError):
        Sampler(Sampling(), 0, [])


def test_a_draw_without_a_seed_takes_one_and_says_which() -> None:
    asked = Sampling(temperature=1, top_k=500, logit_bias={3: 1.0})
    samplers = [Sampler(asked, 1000, []) for _ in range(20)]
    assert len({sampler.sampling.seed for sampler in samplers}) == 20
    logits = np.zeros(1000, np.float32)
    for sampler in samplers:
        seed = sampler.sampling.seed
        assert seed is not None and 0 <= seed < 2**53
        assert sampler.sampling == asked.with_seed(seed)
        again = Sampler(sampler.sampling, 1000, [])
        assert [sampler.sample(logits) for _ in range(3)] == [again.sample(logits) for _ in range(3)]
    assert asked.seed is None
    assert Sampler(Sampling(), 10, []).sampling.seed is None
    assert Sampler(Sampling(seed=3), 10, []).sampling.seed == 3
