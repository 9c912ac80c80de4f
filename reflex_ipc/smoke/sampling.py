"""The choice of a token from logits, and log-probabilities of given ones."""

from collections.abc import Iterator

import numpy as np

from reflex_ipc.cuda.places import Places
from reflex_ipc.cuda.sampling import CONTROL, Sampling
from reflex_ipc.cuda.steps import log_probabilities as fetch
from reflex_ipc.cuda.steps import score_bytes
from reflex_ipc.sampler import Sampler
from reflex_ipc.sampler import Sampling as Settings
from reflex_ipc.smoke.bench import Bench, Outcome
from reflex_ipc.smoke.layer import numbers

EXP = 1e-6
"""Relative error of float32's exp and of sums of thousands."""
DRAWS = [
    *(Settings(temperature=0.9, top_k=50, top_p=0.7, seed=seed, top_logprobs=3) for seed in range(6)),
    *(Settings(temperature=0.4, min_p=0.2, seed=-seed) for seed in range(6)),
]


def sampling(bench: Bench) -> Iterator[Outcome]:
    """sample_peak, sample_choose, sample_copy, sample_adjust: the best token; those that the CPU backend draws with
    these seeds, and the ones behind them; with a bias; with each penalty, of the best token, which is in the prompt
    and twice in the answer"""
    n = 5000
    logits = 8 * numbers(n, seed=12) + np.arange(n) / 2**14  # no two alike
    log_sum = np.log(np.exp(logits).sum())
    places = Places()
    places.control = bench.put(CONTROL.pack(3, 1, 0, 0))
    places.tokens, places.positions = bench.integers([-1]), bench.integers([-1])
    choice = Sampling(bench.device, bench.kernels, bench.stream, n, places)
    at = bench.floats(logits.tolist())
    ranked = np.argsort(-logits).tolist()
    best, second, biased = ranked[0], ranked[1], ranked[2000]
    on_cpu = [Sampler(settings, n, []) for settings in DRAWS]
    drawn = [[each.sample(logits.astype(np.float32)).id for _ in range(2)] for each in on_cpu]
    cases = [
        (Settings(), [best, best]),
        *zip(DRAWS, drawn, strict=True),
        (Settings(logit_bias={biased: 40.0}), [biased]),
        (Settings(repeat_penalty=1.5), [second]),
        (Settings(presence_penalty=0.5), [second]),
        (Settings(frequency_penalty=0.5), [second]),
    ]
    for settings, tokens in cases:
        sampler = Sampler(settings, n, [best])
        if settings.adjusts:
            sampler.accept(best)
            sampler.accept(best)
        choice.begin(sampler)
        for token in tokens:
            for launch in choice.launches(choice.kind(sampler), at, dependent=False):
                launch()
            sampled = choice.receive(choice.queued(), sampler)
            yield [sampled.id], [token], 0.0
            yield [sampled.logprob], [logits[token] - log_sum], EXP
            yield [i for i, _ in sampled.top], ranked[: settings.top_logprobs], 0.0


def log_probabilities(bench: Bench) -> Iterator[Outcome]:
    """score_parts, score_rows: of given tokens, and the ln of each row's sum"""
    n, targets = 9000, [[3, 8999, 20], [], [0]]
    logits = 8 * numbers(len(targets), n, seed=13)
    at = bench.room(score_bytes(len(targets), 4, n))
    found, sums = fetch(bench.kernels, bench.stream, bench.floats(logits.reshape(-1).tolist()), n, targets, at)
    for row, chosen, got, got_sum in zip(logits, targets, found, sums, strict=True):
        log_sum = float(np.log(np.exp(row).sum()))
        yield [*got, got_sum], [*(float(row[t]) - log_sum for t in chosen), log_sum], EXP
