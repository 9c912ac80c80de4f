"""Truncation and temperature against llama.cpp's own sampler chain, on a real model's logits.

llama.cpp reports the log-probabilities of the whole vocabulary (they serve as logits: a shift of all of them changes
neither probabilities nor cuts) and, asked again, the probabilities that its chain leaves after sampling.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reflex_ipc.sampler import Sampler, Sampling, candidates, exp_weights

pytestmark = pytest.mark.model

N_VOCAB = 49152
PROMPTS = {"city": "The capital of France is Paris. The capital of Italy is", "story": "Once upon a time, there was a"}
MIXES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 3.0, "top_p": 0.5},
    {"temperature": 0.5, "top_k": 7},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 30, "logit_bias": {7268: -1.5, 260: 3.0}},
]


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Any:
    llama = pytest.importorskip("xllamacpp")
    params = llama.CommonParams()
    params.model.path = str(smollm2)
    params.n_ctx = 256
    params.warmup = False
    params.cpuparams.n_threads = 1  # its threads spin: on a busy machine two are slower than one
    params.cpuparams_batch.n_threads = 1
    return llama.Server(params)


def complete(server: Any, prompt: str, **fields: Any) -> dict[int, dict[str, Any]]:
    answer = server.handle_completions({"prompt": prompt, "max_tokens": 1, "cache_prompt": False, "seed": 1} | fields)
    (token,) = answer["choices"][0]["logprobs"]["content"]
    return {entry["id"]: entry for entry in token.get("top_probs") or token["top_logprobs"]}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_candidates_and_probabilities_are_those_of_llama_cpp(server: Any, prompt: str) -> None:
    raw = complete(server, PROMPTS[prompt], logprobs=N_VOCAB, samplers=["temperature"], temperature=1.0)
    assert len(raw) == N_VOCAB
    logits = np.array([raw[token]["logprob"] for token in range(N_VOCAB)], np.float32)
    for mix in MIXES:
        sent = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0} | mix
        sent["logit_bias"] = [[token, bias] for token, bias in mix.get("logit_bias", {}).items()]
        entries = complete(server, PROMPTS[prompt], logprobs=2000, post_sampling_probs=True, **sent)
        theirs = {token: entry["prob"] for token, entry in entries.items() if entry["prob"] > 0}

        sampler = Sampler(Sampling(**mix), N_VOCAB, [])
        adjusted = sampler.adjusted(logits)
        peak = float(adjusted.max())
        kept = candidates(adjusted, peak, sampler.sampling)
        ids = np.arange(N_VOCAB) if kept is None else kept
        weights = exp_weights(adjusted[ids], peak, sampler.sampling.temperature)
        ours = dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))
        assert set(ours) == set(theirs) or (kept is None and len(theirs) == 2000), mix
        for token, probability in theirs.items():
            assert ours[token] == pytest.approx(probability, abs=1e-6), mix
