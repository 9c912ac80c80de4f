"""Sampling: logits (n_vocab,) -> one token id, the same on every machine for the same logits, settings and seed.

docs/sampling.md defines each parameter and each step. What decides a token is made of IEEE-754 additions,
multiplications and divisions rounded one by one, and of integers: no libm, no sum whose order could matter.
The module imports nothing heavy; NumPy is imported by what runs on the CPU backend.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from reflex_ipc.errors import InvalidRequestError, ReflexError, UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    Logits = npt.NDArray[np.float32]
    Ids = npt.NDArray[np.int64]
    Weights = npt.NDArray[np.int64]

MAX_VOCAB: Final = 1 << 22
"""Largest vocabulary: the sum of that many weights stays below 2^62."""
MAX_SEED: Final = 1 << 53
"""Seeds are integers within +-2^53, which JSON carries exactly."""
MAX_TOP_LOGPROBS: Final = 20
ONE: Final = 1 << 40
"""The weight of the likeliest token, in units of a weight."""

_FLOAT32_MAX: Final = 3.4028234663852886e38
_LOG2_E: Final = 1.4426950408889634
_EXP2_TAYLOR: Final = (  # (ln 2)^k / k!: on [-1/2, 1/2] the error is below 2.2e-13, a quarter of a weight's unit
    1.0,
    0.6931471805599453,
    0.24022650695910072,
    0.05550410866482158,
    0.009618129107628477,
    0.0013333558146428443,
    0.0001540353039338161,
    1.5252733804059841e-05,
    1.321548679014431e-06,
    1.01780860092397e-07,
    7.054911620801123e-09,
)


def _shown(value: object) -> str:
    """The value as an error message shows it, never longer than a line."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python converts
        return f"{type(value).__name__} of enormous size"
    return text if len(text) <= 60 else text[:60] + "..."


def _number(name: str, value: object, low: float, high: float) -> float:
    # A comparison with NaN is false, and Python compares any int with a float exactly: this refuses what it must.
    if isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high:
        return float(value)
    raise InvalidRequestError(f"{name} must be a number from {low:g} to {high:g}, not {_shown(value)}", name)


def _integer(name: str, value: object, low: int, high: int) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
        return value
    raise InvalidRequestError(f"{name} must be an integer from {low} to {high}, not {_shown(value)}", name)


def _bias(value: object) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"logit_bias must map token ids to numbers, not {_shown(value)}", "logit_bias")
    return MappingProxyType(
        {
            _integer("a token id in logit_bias", token, 0, MAX_VOCAB - 1): _number(
                f"logit_bias[{_shown(token)}]", bias, -1e9, 1e9
            )
            for token, bias in value.items()
        }
    )


class Sampling:
    """How tokens are chosen: validated when made, immutable. The defaults are greedy decoding.

    Raises InvalidRequestError, naming the field and its range. Formulas: docs/sampling.md.
    """

    __slots__ = (
        "frequency_penalty",
        "logit_bias",
        "min_p",
        "presence_penalty",
        "repeat_last_n",
        "repeat_penalty",
        "seed",
        "temperature",
        "top_k",
        "top_logprobs",
        "top_p",
    )
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int | None
    top_logprobs: int

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        repeat_last_n: int = 64,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] = MappingProxyType({}),
        seed: int | None = None,
        top_logprobs: int = 0,
    ) -> None:
        values: dict[str, Any] = {
            "temperature": _number("temperature", temperature, 0.0, 1e6),
            "top_k": _integer("top_k", top_k, 0, 2**31 - 1),
            "top_p": _number("top_p", top_p, 0.0, 1.0),
            "min_p": _number("min_p", min_p, 0.0, 1.0),
            "repeat_penalty": _number("repeat_penalty", repeat_penalty, 0.01, 100.0),
            "repeat_last_n": _integer("repeat_last_n", repeat_last_n, -1, 2**31 - 1),
            "presence_penalty": _number("presence_penalty", presence_penalty, -100.0, 100.0),
            "frequency_penalty": _number("frequency_penalty", frequency_penalty, -100.0, 100.0),
            "logit_bias": _bias(logit_bias),
            "seed": None if seed is None else _integer("seed", seed, -MAX_SEED, MAX_SEED),
            "top_logprobs": _integer("top_logprobs", top_logprobs, 0, MAX_TOP_LOGPROBS),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Sampling is immutable: {name} can't be set")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sampling):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def with_seed(self, seed: int) -> "Sampling":
        """The same settings with this seed."""
        return Sampling(**{name: getattr(self, name) for name in self.__slots__} | {"seed": seed})

    @property
    def repeats_count(self) -> bool:
        """Whether the repeat penalty changes anything."""
        return self.repeat_penalty != 1.0 and self.repeat_last_n != 0

    @property
    def adjusts(self) -> bool:
        """Whether a bias or a penalty can change a logit."""
        return (
            self.repeats_count
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or any(self.logit_bias.values())
        )

    @property
    def is_greedy(self) -> bool:
        """Whether the answer is always the argmax of the raw logits: no bias, no penalty, no draw."""
        return (self.temperature == 0 or self.top_k == 1) and not self.adjusts


class Sampled(NamedTuple):
    """One sampled token.

    `logprob` is the model's own: ln softmax(raw logits), before bias, penalties, truncation and temperature.
    `top` holds the (id, logprob) of the likeliest tokens, likeliest first, ties by lowest id; a token whose
    logit is minus infinity is never in it.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def philox4x32(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: four uniform uint32 words from a key and a counter, all words uint32.

    Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(10):
        p0 = 0xD2511F53 * c0
        p1 = 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0 = (k0 + 0x9E3779B9) & 0xFFFFFFFF
        k1 = (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def random_bits(seed: int, step: int) -> int:
    """The uniform uint64 that draws token number `step` (from 0) of an answer.

    The key is the seed as 64 bits in two's complement, low word first; the counter is (step, step >> 32, 0, 0).
    """
    low, high, _, _ = philox4x32(
        (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF), (step & 0xFFFFFFFF, step >> 32 & 0xFFFFFFFF, 0, 0)
    )
    return high << 32 | low


class Sampler:
    """Chooses the tokens of one answer: keeps the history for the penalties and counts the steps.

    `sampling` are the settings in use: the request's, with a seed from the system's entropy where it draws and
    names none. `step` is the number of tokens sampled so far.
    """

    def __init__(self, sampling: Sampling, n_vocab: int, prompt_ids: "Sequence[int]") -> None:
        if not 0 < n_vocab <= MAX_VOCAB:
            raise UnsupportedModelError(f"a vocabulary of {n_vocab} tokens can't be sampled: 1 to {MAX_VOCAB} can")
        for token in sampling.logit_bias:
            if token >= n_vocab:
                raise InvalidRequestError(
                    f"logit_bias names token {token}, but the model's ids end at {n_vocab - 1}", f"logit_bias.{token}"
                )
        if sampling.seed is None and sampling.temperature > 0:
            from os import urandom

            sampling = sampling.with_seed(int.from_bytes(urandom(8), "little") % MAX_SEED)
        self.sampling = sampling
        self.n_vocab = n_vocab
        self.step = 0
        self._tokens: list[int] = []  # the part of the prompt that penalties can reach, then the answer
        if sampling.repeats_count:
            reach = len(prompt_ids) if sampling.repeat_last_n < 0 else sampling.repeat_last_n
            self._tokens = [int(token) for token in prompt_ids[max(0, len(prompt_ids) - reach) :]]
        for token in self._tokens:
            if not 0 <= token < n_vocab:
                raise InvalidRequestError(f"the prompt holds token {token}, but the model's ids end at {n_vocab - 1}")
        self._counts: dict[int, int] = {}  # how often the answer holds each token

    def sample(self, logits: "Logits") -> Sampled:
        """Choose the next token from float32 logits of shape (n_vocab,), which are left as they are.

        Raises ReflexError (internal) when the logits have the wrong shape or type, hold NaN or plus infinity,
        or are all minus infinity; the sampler's state is then unchanged.
        """
        best, peak = self._best(logits)
        chosen = best if self.sampling.is_greedy else self._choose(logits)
        sampled = self._rated(logits, peak, chosen)
        self.accept(chosen)
        return sampled

    def rate(self, logits: "Logits", token: int) -> Sampled:
        """What `sample` says of the token it chooses, of one that is there already: the prompt's. Nothing is recorded.

        Raises what `sample` raises.
        """
        _, peak = self._best(logits)
        return self._rated(logits, peak, token)

    def _best(self, logits: "Logits") -> tuple[int, float]:
        """The likeliest token and its logit."""
        if logits.shape != (self.n_vocab,) or logits.dtype != "float32":
            raise ReflexError(f"expected float32 logits of shape ({self.n_vocab},), got {logits.dtype} {logits.shape}")
        best = int(logits.argmax())  # the first NaN, if there is one
        peak = float(logits[best])
        if not -_FLOAT32_MAX <= peak <= _FLOAT32_MAX:
            what = "only minus infinity" if peak < 0 else f"{peak} as the logit of token {best}"
            raise ReflexError(f"the model produced {what} at step {self.step}: broken weights or an overflow")
        return best, peak

    def _rated(self, logits: "Logits", peak: float, token: int) -> Sampled:
        log_sum = _log_sum_exp(logits, peak)
        top: tuple[tuple[int, float], ...] = ()
        if self.sampling.top_logprobs:
            ranked = [(int(each), float(logits[each])) for each in ranked_ids(logits, self.sampling.top_logprobs)]
            top = tuple((each, logit - peak - log_sum) for each, logit in ranked if logit >= -_FLOAT32_MAX)
        return Sampled(token, float(logits[token]) - peak - log_sum, top)

    def accept(self, token: int) -> None:
        """Record the answer's next token: `sample` does, and so must who samples elsewhere, on the device."""
        self._tokens.append(token)
        self._counts[token] = self._counts.get(token, 0) + 1
        self.step += 1

    def _choose(self, logits: "Logits") -> int:
        sampling = self.sampling
        if sampling.adjusts:
            logits = self.adjusted(logits)
        best = int(logits.argmax())
        if sampling.temperature == 0 or sampling.top_k == 1:
            return best
        peak = float(logits[best])
        ids = candidates(logits, peak, sampling)
        cumulative = exp_weights(logits if ids is None else logits[ids], peak, sampling.temperature)
        cumulative.cumsum(out=cumulative)
        assert sampling.seed is not None  # drawn above temperature 0 only, where __init__ gave it one
        target = random_bits(sampling.seed, self.step) * int(cumulative[-1]) >> 64
        drawn = int(cumulative.searchsorted(target, side="right"))
        return drawn if ids is None else int(ids[drawn])

    def adjusted(self, logits: "Logits") -> "Logits":
        """The logits after bias and penalties: in float64, each operation rounded, the result rounded to float32."""
        sampling = self.sampling
        changed: dict[int, float] = {}
        for token, bias in sampling.logit_bias.items():
            changed[token] = float(logits[token]) + bias
        if sampling.repeats_count:
            last_n = sampling.repeat_last_n
            for token in set(self._tokens if last_n < 0 else self._tokens[-last_n:]):
                value = changed[token] if token in changed else float(logits[token])
                penalty = sampling.repeat_penalty
                changed[token] = value / penalty if value > 0 else value * penalty
        if sampling.presence_penalty or sampling.frequency_penalty:
            for token, count in self._counts.items():
                value = changed[token] if token in changed else float(logits[token])
                changed[token] = value - (count * sampling.frequency_penalty + sampling.presence_penalty)
        adjusted = logits.copy()
        for token, value in changed.items():
            if logits[token] >= -_FLOAT32_MAX:  # minus infinity stays what it is
                adjusted[token] = min(max(value, -_FLOAT32_MAX), _FLOAT32_MAX)
        return adjusted


def candidates(logits: "Logits", peak: float, sampling: Sampling) -> "Ids | None":
    """Ids of the tokens that top_k, top_p and min_p leave, ascending; None when they leave all."""
    import numpy as np

    ids = ranked_ids(logits, sampling.top_k) if 0 < sampling.top_k < len(logits) else None
    if sampling.top_p < 1 or sampling.min_p > 0:
        weights = exp_weights(logits if ids is None else logits[ids], peak, 1.0)
        if sampling.top_p < 1:
            needed = int(weights.sum()) * int(sampling.top_p * 2.0**64) >> 64
            if ids is None:
                ids, weights = _heaviest(logits, weights, needed)
            count = int(weights.cumsum().searchsorted(needed)) + 1
            ids, weights = ids[:count], weights[:count]
        kept = np.flatnonzero(weights >= int(sampling.min_p * ONE))
        ids = kept if ids is None else ids[kept]
    return None if ids is None else np.sort(ids)


def _heaviest(logits: "Logits", weights: "Weights", needed: int) -> "tuple[Ids, Weights]":
    """The highest ranked tokens, enough of them to weigh `needed` together; few of a large vocabulary, mostly."""
    count = 512
    while True:
        ids = ranked_ids(logits, count)
        ranked_weights = weights[ids]
        if count >= len(logits) or int(ranked_weights.sum()) >= needed:
            return ids, ranked_weights
        count *= 64


def ranked_ids(logits: "Logits", count: int) -> "Ids":
    """Ids of the `count` highest logits, highest first, ties by lowest id.

    Sorts uint64 keys: the float's bits, mapped so that a higher value is a smaller integer, above the id.
    """
    import numpy as np

    ids: Ids = np.arange(len(logits))
    if count < len(logits):
        lowest = np.partition(logits, -count)[-count]
        ids = np.flatnonzero(logits >= lowest)  # more than `count` when there are ties for the last place
        logits = logits[ids]
    bits = (logits + np.float32(0)).view(np.int32)  # adding zero makes -0.0 equal to 0.0
    bits ^= ~(bits >> 31) & 0x7FFFFFFF
    keys = bits.view(np.uint32).astype(np.uint64)
    keys <<= np.uint64(32)
    keys |= ids.view(np.uint64)
    keys.sort()
    keys &= np.uint64(0xFFFFFFFF)
    return keys[:count].view(np.int64)


def exp_weights(logits: "Logits", peak: float, temperature: float) -> "Weights":
    """floor(2^40 exp((logit - peak) / temperature)) as int64, by arithmetic that gives the same bits everywhere.

    exp(z) = 2^n 2^f with n = round(z log2 e) and |f| <= 1/2; 2^f by its Taylor polynomial in Horner's form.
    """
    import numpy as np

    weights = np.empty(len(logits), np.int64)
    round_to_int = 1.5 * 2.0**52  # adding it leaves a float64's integer part in its low bits
    coefficients = [c * ONE for c in _EXP2_TAYLOR]
    for start in range(0, len(logits), 16384):  # blocks that stay in the cache: 4 times faster than whole passes
        x = logits[start : start + 16384].astype(np.float64)
        x -= peak
        np.maximum(x, -30.0 * temperature, out=x)  # 2^40 exp(-30) < 1: a weight of zero, and no overflow below
        x /= temperature
        x *= _LOG2_E
        n = x + round_to_int
        x -= n - round_to_int
        power = x * coefficients[-1]
        for c in coefficients[-2:0:-1]:
            power += c
            power *= x
        power += coefficients[0]
        exponent = n.view(np.int64)
        exponent <<= 52
        scaled = power.view(np.int64)
        scaled += exponent  # multiplies by 2^n
        weights[start : start + 16384] = power
    return weights


def _log_sum_exp(logits: "Logits", peak: float) -> float:
    """ln of the sum of exp(logit - peak), good to 1e-6: it is reported, and decides nothing."""
    from math import log

    import numpy as np

    with np.errstate(over="ignore"):
        shifted = logits - np.float32(peak)
    np.exp(shifted, out=shifted)
    return log(float(shifted.sum(dtype=np.float64)))
