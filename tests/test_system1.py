"""`reflex system1` as a process: what it prints, and the exit code a script branches on."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader

from tests.wire import ROOT, on_a_terminal

COMMAND = [sys.executable, "-m", "reflex_ipc", "system1"]
CAPITALS = ["The capital of France is", "-a", " Paris", "-a", " London", "-a", " Berlin"]

pytestmark = pytest.mark.model


def system1(*arguments: object, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    where = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(
        [*COMMAND, *map(str, arguments), "--backend", "cpu"],
        capture_output=True,
        timeout=60,
        cwd=ROOT,
        check=False,
        **where,
    )


def test_lines_for_a_pipe(smollm2: Path) -> None:
    result = system1(smollm2, *CAPITALS)
    assert (result.returncode, result.stderr) == (0, b"")
    rows = [line.split("\t") for line in result.stdout.decode().splitlines()]
    assert [row[4] for row in rows] == [" Paris", " London", " Berlin"]
    assert sum(float(row[0]) for row in rows) == pytest.approx(1.0, abs=1e-5)


def test_broken_weights_are_an_error(smollm2: Path, tmp_path: Path) -> None:
    model = GGUFReader(smollm2)
    (norm,) = (tensor for tensor in model.tensors if tensor.name == "output_norm.weight")
    content = bytearray(smollm2.read_bytes())
    content[norm.data_offset : norm.data_offset + 4] = struct.pack("<f", math.nan)
    (broken := tmp_path / "broken.gguf").write_bytes(content)
    result = system1(broken, *CAPITALS)
    assert (result.returncode, result.stdout) == (1, b"")
    assert b"the model produced a log-probability of nan" in result.stderr


def test_json_has_the_raw_numbers(smollm2: Path) -> None:
    result = json.loads(system1(smollm2, *CAPITALS, "--normalize", "pmi", "--json").stdout)
    best = result["candidates"][result["best"]]
    assert best["text"] == " Paris"
    assert best["logprob"] == pytest.approx(sum(best["token_logprobs"]))
    assert best["score"] == pytest.approx(best["logprob"] - best["neutral_logprob"])


def test_best_and_confidence(smollm2: Path) -> None:
    sure = system1(smollm2, *CAPITALS, "--best", "--min-confidence", "0.9")
    unsure = system1(smollm2, *CAPITALS, "--best", "--min-confidence", "0.999")
    assert (sure.returncode, sure.stdout) == (0, b" Paris")
    assert (unsure.returncode, unsure.stdout) == (10, b" Paris")


@pytest.mark.parametrize("content", [b" Paris\n London\n", b" Paris\r\n London\r\n", b'[" Paris", " London"]'])
def test_candidates_from_a_file_or_stdin(smollm2: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "candidates"
    file.write_bytes(content)
    expected = system1(smollm2, "The capital of France is", "-a", " Paris", "-a", " London").stdout
    assert expected
    assert system1(smollm2, "The capital of France is", "--candidates-file", file).stdout == expected
    assert system1(smollm2, "The capital of France is", "--candidates-file", "-", stdin=content).stdout == expected


def test_join_and_warning(smollm2: Path) -> None:
    glued = system1(smollm2, "The capital of France is", "-a", "Paris", "-a", "London")
    joined = system1(smollm2, "The capital of France is", "-a", "Paris", "-a", "London", "--join", " ")
    assert b"no space" in glued.stderr
    second = system1(smollm2, "The capital of France is:", "-a", " London", "-a", "Paris")
    assert b"no space between the prompt and 'Paris'" in second.stderr
    assert joined.stderr == b""
    assert joined.stdout.startswith(b"0.98")


def test_end_of_turn_separates_prefixes(smollm2: Path) -> None:
    """ " five" begins " five hundred"; with the end of the turn behind each, the shorter one can win or lose fairly."""
    arguments = (smollm2, "Two plus two equals", "-a", " five", "-a", " five hundred", "--json")
    open_ended = json.loads(system1(*arguments).stdout)["candidates"]
    ended = json.loads(system1(*arguments, "--end").stdout)["candidates"]
    assert open_ended[0]["logprob"] > open_ended[1]["logprob"]
    assert all(len(b["tokens"]) == len(a["tokens"]) + 1 for a, b in zip(open_ended, ended, strict=True))
    assert len({c["tokens"][-1] for c in ended}) == 1


def test_table_on_a_terminal(smollm2: Path) -> None:
    shown = on_a_terminal([*COMMAND, str(smollm2), *CAPITALS], NO_COLOR="1")
    text = shown.decode()
    assert "█" in text and "entropy" in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["The sky is"], ["no candidates"]),
        (["The sky is", "-a", ""], ["candidate 0 is empty"]),
        (["The sky is", "-a", " blue", "--temp", "0"], ["temperature"]),
        (["The sky is", "-a", " blue", "--min-confidence", "7"], ["--min-confidence"]),
        (["-", "--candidates-file", "-"], ["standard input"]),
    ],
)
def test_bad_arguments(smollm2: Path, arguments: list[str], words: list[str]) -> None:
    result = system1(smollm2, *arguments)
    assert (result.returncode, result.stdout) == (2, b"")
    for word in words:
        assert word in result.stderr.decode()


def test_a_text_no_context_can_hold_is_refused_at_once(fixtures: Path, tmp_path: Path) -> None:
    """Also where the prompt is tokenised while the device starts."""
    (tmp_path / "long.txt").write_text("a" * 20_000_000)
    command = [sys.executable, "-m", "reflex_ipc", "system1", str(fixtures / "exact" / "llama-f16.gguf")]
    command += ["-f", str(tmp_path / "long.txt"), "-a", "x", "-a", "y", "--backend", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=15, cwd=Path(__file__).parent.parent)
    assert done.returncode == 7 and "more than the" in done.stderr
