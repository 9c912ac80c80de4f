"""The kernels of log-probabilities on the emulated device against a log-softmax in float64."""

from pathlib import Path

import emulator
import numpy as np
import pytest
from emulator.build import library

from reflex_ipc.cuda import launch
from reflex_ipc.cuda.device import start_driver
from reflex_ipc.cuda.launch import Kernels
from reflex_ipc.cuda.steps import log_probabilities, score_bytes
from reflex_ipc.scores import ScoredRows

KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"
pytestmark = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """scored(logits, targets, n_answers): log-probabilities and rows' sums, by the kernels in no more room than they
    say; with page-locked memory for so many answers, if any."""
    opening = start_driver(0, str(library(KERNELS)))
    device = opening.wait()
    kernels = Kernels(device, str(emulator.kernels(KERNELS, tmp_path_factory.mktemp("emulated"))))
    stream = device.stream()

    def run(logits: np.ndarray, targets: list[list[int]], n_answers: int = 0) -> ScoredRows:
        n_rows, n_vocab = logits.shape
        logits = np.append(logits, np.float32(1e9))  # what lies behind them is nobody's
        size = score_bytes(n_rows, sum(map(len, targets)), n_vocab)
        room = np.full(size // 4 + 16, np.nan, np.float32)
        answers = device.pinned(4 * n_answers, "answers") if n_answers else None
        found = log_probabilities(kernels, stream, logits.ctypes.data, n_vocab, targets, room.ctypes.data, answers)
        assert np.isnan(room[size // 4 :]).all()
        if answers is not None:
            assert any(answers.view) == (sum(map(len, targets)) + n_rows <= n_answers)
            answers.close()
        return found

    yield run
    opening.close()


@pytest.mark.parametrize("n_vocab", [1, 300, 8191, 8192, 8193, 40000])
def test_log_probabilities(scored, n_vocab: int) -> None:
    """Of rows unlike each other: of ordinary size, of one large number, far from zero, with whole parts of -inf."""
    random = np.random.default_rng(n_vocab)
    logits = random.normal(0, 4, (5, n_vocab)).astype(np.float32)
    logits[1, n_vocab // 2] = 80
    logits[2] += 3000
    logits[3, : max(0, n_vocab - 5)] = -np.inf
    logits[4, min(5, n_vocab) :] = -np.inf
    targets = [[int(t) for t in random.integers(0, n_vocab, n)] for n in (700, 1, 0, 3, 2)]
    targets[3] += [0, n_vocab - 1]
    wide = logits.astype(np.float64)
    peak = wide.max(axis=1, keepdims=True)
    log_sums = peak + np.log(np.exp(wide - peak).sum(axis=1, keepdims=True))
    logprobs, sums = scored(logits, targets)
    for row, tokens, found in zip(wide - log_sums, targets, logprobs, strict=True):
        np.testing.assert_allclose(found, row[tokens], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(sums, log_sums[:, 0], rtol=2e-6, atol=2e-6)


def test_rows_do_not_change_one_another(scored) -> None:
    logits = np.random.default_rng(1).normal(0, 3, (9, 20000)).astype(np.float32)
    targets = [[i, 19999 - i] for i in range(9)]
    alone = [scored(logits[i : i + 1], targets[i : i + 1]) for i in range(9)]
    assert scored(logits, targets) == ([row for (row,), _ in alone], [log_sum for _, (log_sum,) in alone])


def test_answers_are_left_with_the_host_where_it_has_room(scored) -> None:
    logits = np.random.default_rng(2).normal(0, 3, (2, 10000)).astype(np.float32)
    targets = [[1, 2, 9999], [5]]
    assert scored(logits, targets, 5) == scored(logits, targets, 6) == scored(logits, targets)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_what_is_no_number_shows(scored, wrong: float) -> None:
    """In its own row only; and a row of nothing but -inf says so as well."""
    logits = np.zeros((3, 9000), np.float32)
    logits[0, 8999] = wrong
    logits[2] = -np.inf
    (first, second, third), sums = scored(logits, [[0], [0], [0]])
    assert np.isnan(first[0]) and np.isnan(sums[0])
    assert [-second[0], sums[1]] == [pytest.approx(np.log(9000), rel=1e-6)] * 2
    assert np.isnan(third[0])
