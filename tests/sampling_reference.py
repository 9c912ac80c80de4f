"""Two other ways to sample, for the tests: `define` is docs/sampling.md in scalars, `naive` is the textbook.

`define` follows the definition bit by bit, with Python's numbers, one token at a time: it must agree always.
`naive` uses real probabilities in float64, math.exp and another order of work: it must agree wherever the draw or a
cut is not within 1e-6 of a border, and says None there.
"""

import math
import struct
from bisect import bisect_right
from collections import Counter
from decimal import Decimal, getcontext
from hashlib import sha256
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from reflex_ipc.sampler import Sampler, Sampling, exp_weights

getcontext().prec = 50
LN2 = Decimal(2).ln()
TAYLOR = [float(LN2**k / math.factorial(k)) for k in range(11)]
LOG2_E = float(1 / LN2)
FLOAT32_MAX = 2.0**128 - 2.0**104

NEUTRAL: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "repeat_last_n": 64,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "seed": 0,
}


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def weight(difference: float, temperature: float) -> int:
    if difference < -30.0 * temperature:
        return 0
    x = difference / temperature * LOG2_E
    n = round(x)  # to the nearest, ties to even
    f = x - n
    power = TAYLOR[10]
    for coefficient in TAYLOR[9::-1]:
        power = power * f + coefficient
    return math.floor(math.ldexp(power, 40 + n))


def adjust(logits: list[float], s: dict[str, Any], prompt: list[int], answer: list[int]) -> list[float]:
    text = prompt + answer
    window = text if s["repeat_last_n"] < 0 else text[len(text) - min(len(text), s["repeat_last_n"]) :]
    counts = Counter(answer)
    out = []
    for token, raw in enumerate(logits):
        y = raw
        if token in s["logit_bias"]:
            y = y + s["logit_bias"][token]
        if token in window and s["repeat_penalty"] != 1:
            y = y / s["repeat_penalty"] if y > 0 else y * s["repeat_penalty"]
        if counts[token]:
            y = y - (counts[token] * s["frequency_penalty"] + s["presence_penalty"])
        out.append(y if y == raw or y == -math.inf else float32(max(-FLOAT32_MAX, min(FLOAT32_MAX, y))))
    return out


def define(logits: list[float], settings: dict[str, Any], prompt: list[int], answer: list[int], bits: int) -> int:
    """The token for the 64 random bits, as docs/sampling.md defines it."""
    s = NEUTRAL | settings
    y = adjust(logits, s, prompt, answer)
    order = sorted(range(len(y)), key=lambda i: (-y[i], i))
    if s["temperature"] == 0:
        return order[0]
    peak = y[order[0]]
    kept = order[: s["top_k"] or None]
    plain = [weight(y[i] - peak, 1.0) for i in kept]
    if s["top_p"] < 1:
        needed = sum(plain) * math.floor(Decimal(s["top_p"]) * 2**64) // 2**64
        sums = list(accumulate(plain))
        kept = kept[: next(i for i, total in enumerate(sums) if total >= needed) + 1]
    lowest = math.floor(Decimal(s["min_p"]) * 2**40)
    kept = sorted(i for i, w in zip(kept, plain, strict=False) if w >= lowest)
    sums = list(accumulate(weight(y[i] - peak, s["temperature"]) for i in kept))
    target = bits * sums[-1] // 2**64
    return next(i for i, total in zip(kept, sums, strict=True) if total > target)


def naive(logits: list[float], settings: dict[str, Any], prompt: list[int], answer: list[int], u: float) -> int | None:
    """The token for the uniform number u, or None where rounding could decide."""
    s = NEUTRAL | settings
    y = dict(enumerate(logits))
    for token, bias in s["logit_bias"].items():
        y[token] += bias
    text = prompt + answer
    for token in set(text if s["repeat_last_n"] == -1 else text[::-1][: s["repeat_last_n"]]):
        y[token] *= s["repeat_penalty"] if y[token] < 0 else 1 / s["repeat_penalty"]
    for token in answer:
        y[token] -= s["frequency_penalty"]
    for token in set(answer):
        y[token] -= s["presence_penalty"]
    ranks = sorted(y, key=lambda i: y[i], reverse=True)
    if s["temperature"] == 0:
        return None if len(ranks) > 1 and y[ranks[0]] - y[ranks[1]] < 1e-6 else ranks[0]
    if s["top_k"] and s["top_k"] < len(ranks):
        if y[ranks[s["top_k"] - 1]] - y[ranks[s["top_k"]]] < 1e-6:
            return None
        ranks = ranks[: s["top_k"]]
    p = softmax([y[i] for i in ranks])
    if s["top_p"] < 1:
        count = 0
        while count == 0 or math.fsum(p[:count]) < s["top_p"]:
            count += 1
        if any(abs(math.fsum(p[:n]) - s["top_p"]) < 1e-6 for n in (count - 1, count)):
            return None
        if count < len(ranks) and y[ranks[count - 1]] - y[ranks[count]] < 1e-6:
            return None
        ranks, p = ranks[:count], p[:count]
    if any(abs(q / p[0] - s["min_p"]) < 1e-6 for q in p[1:] if s["min_p"] > 0):
        return None
    allowed = sorted(i for i, q in zip(ranks, p, strict=True) if q >= s["min_p"] * p[0])
    borders = list(accumulate(softmax([y[i] / s["temperature"] for i in allowed])))
    if any(abs(u - border) < 1e-6 for border in borders):
        return None
    return allowed[bisect_right(borders, u)]


def softmax(logits: list[float]) -> list[float]:
    top = max(logits)
    parts = [math.exp(x - top) for x in logits]
    total = math.fsum(parts)
    return [part / total for part in parts]


# Settings and the first six tokens on `golden_logits`: computed by `define`, not by the product.
GOLDEN: list[tuple[dict[str, Any], list[int]]] = [
    ({"temperature": 1.0, "seed": 0}, [44027, 18089, 15943, 20741, 34662, 1395]),
    ({"temperature": 1.0, "seed": -1}, [4155, 14703, 21738, 34078, 39061, 42081]),
    ({"temperature": 0.7, "seed": 2**53}, [47108, 784, 32040, 23531, 45529, 7527]),
    ({"temperature": 1.3, "seed": 42, "top_k": 40}, [20511, 13674, 31395, 31395, 40976, 10976]),
    ({"temperature": 1.0, "seed": 42, "top_p": 0.95}, [23424, 16358, 32928, 33511, 41958, 14640]),
    ({"temperature": 1.0, "seed": 42, "min_p": 0.05}, [23424, 16359, 32928, 33511, 41958, 14640]),
    (
        {"temperature": 0.8, "seed": 42, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        [21860, 15023, 32790, 32790, 40976, 13674],
    ),
    (
        {"temperature": 0.2, "seed": 42, "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1},
        [23393, 16418, 32974, 33511, 42065, 14456],
    ),
    (
        {"repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.1, "logit_bias": {7: 8.25}},
        [7, 2744, 6837, 10930, 15023, 19116],
    ),
]
# SHA-256 of the weights below, computed by `weight`.
GOLDEN_WEIGHTS = "812a815fb4c941d427b1bdb5999dae6f4c946b6c991ab272ed8c6d517fd9b740"


def golden_logits() -> npt.NDArray[np.float32]:
    """50,000 logits with many ties, made of exact operations, so that they are the same on every machine."""
    i = np.arange(50_000, dtype=np.int64)
    return ((i * 7919 % 4093) / 256.0 - 8.0).astype(np.float32)


def golden_run(fields: dict[str, Any]) -> list[int]:
    logits = golden_logits()
    sampler = Sampler(Sampling(**fields), len(logits), [4092, 9, 8185])
    return [sampler.sample(logits).id for _ in range(6)]


def golden_weights() -> str:
    weights = [exp_weights(golden_logits(), 8.0, temperature) for temperature in (1.0, 0.7, 0.1, 1e6)]
    return sha256(np.concatenate(weights).astype("<i8").tobytes()).hexdigest()
