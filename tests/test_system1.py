"""`reflex system1` as a process: what it prints, and the exit code a script branches on."""

import json
import math
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFReader

from tests.wire import ROOT, Stdio, on_a_terminal

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


def test_lines_have_every_number(smollm2: Path) -> None:
    """By the columns of docs/scoring.md, likeliest first; `index` says which they were."""
    arguments = (smollm2, "The capital of France is", "-a", " Berlin\t", "-a", " Paris", "--neutral", "It is")
    wanted = json.loads(system1(*arguments, "--json").stdout)["candidates"]
    rows = [line.split("\t") for line in system1(*arguments).stdout.decode().splitlines()]
    page = (ROOT / "docs" / "scoring.md").read_text()
    columns = re.findall(r"`(\w+)`", page[page.index("are lines of eight columns") :])[:8]
    numbers = {name for name, value in wanted[0].items() if isinstance(value, int | float)}
    assert set(columns) == numbers | {"text", "index"}
    assert [row[columns.index("index")] for row in rows] == ["1", "0"]
    assert [row[columns.index("text")] for row in rows] == [" Paris", r" Berlin\t"]
    for row, candidate in zip(rows, reversed(wanted), strict=True):
        for name in numbers:
            assert float(row[columns.index(name)]) == pytest.approx(candidate[name], abs=1e-6)
    without = system1(smollm2, *CAPITALS).stdout.decode().splitlines()
    assert all(line.split("\t")[columns.index("neutral_logprob")] == "" for line in without)


def test_what_was_made_into_other_tokens_is_said(smollm2: Path) -> None:
    plain = system1(smollm2, "The capital of France is ", "-a", "Paris", "-a", "London")
    said = b"reflex: the prompt's last token merges with a candidate, and each is scored with that (healed)\n"
    assert plain.stderr == said
    best = system1(smollm2, "The capital of France is ", "-a", "Paris", "-a", "London", "--best")
    assert (best.stdout, best.stderr) == (b"Paris", said)


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


def test_the_answer_is_out_before_the_model_is_let_go(tiny: Path) -> None:
    """Whoever reads a pipe does not wait for memory to be freed."""
    script = (
        "import os, sys\n"
        "from reflex_ipc import cli\n"
        "from reflex_ipc.engine import Engine\n"
        "close = Engine.close\n"
        "Engine.close = lambda engine: (os.write(1, b', closing'), close(engine))[1]\n"
        "sys.exit(cli.main(sys.argv[1:]))"
    )
    arguments = ["system1", tiny, "once", "-a", " more", "--best", "--backend", "cpu"]
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, b" more, closing")


def test_json_is_the_protocols_result(smollm2: Path) -> None:
    printed = json.loads(system1(smollm2, *CAPITALS, "--neutral", "It is", "--json").stdout)
    with Stdio(smollm2) as engine:
        engine.ready()
        candidates = [" Paris", " London", " Berlin"]
        request = {"id": 1, "op": "score", "prompt": CAPITALS[0], "candidates": candidates, "neutral": "It is"}
        result = engine.answer(request)[-1]
    assert result.keys() - printed.keys() == {"id", "event", "timings"}
    for mine, other in zip(printed.pop("candidates"), result["candidates"], strict=True):
        assert mine.keys() == other.keys()
        assert mine["tokens"] == other["tokens"] and mine["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
    assert printed.pop("usage") == result["usage"]
    assert printed == pytest.approx({name: result[name] for name in printed}, abs=1e-4)


def test_a_neutral_context(smollm2: Path) -> None:
    """After a whole other prompt, a candidate's logprob is what that prompt's own call says."""
    candidates = ("-a", " Paris", "-a", " London")
    pmi = json.loads(
        system1(
            smollm2, "The capital of France is", *candidates, "--json", "--normalize", "pmi", "--neutral", "It is"
        ).stdout
    )
    other = json.loads(system1(smollm2, "It is", *candidates, "--json").stdout)
    for mine, its in zip(pmi["candidates"], other["candidates"], strict=True):
        assert mine["neutral_logprob"] == pytest.approx(its["logprob"], abs=1e-4)
        assert mine["score"] == pytest.approx(mine["logprob"] - its["logprob"], abs=1e-4)


def test_chat_is_scored_behind_the_header(smollm2: Path, tmp_path: Path) -> None:
    """Sums of llama.cpp's tokens and float64 arithmetic (fixtures/make_wrong_answers.py), and nothing to warn of."""
    items = json.loads((ROOT / "tests" / "fixtures" / "smollm2_wrong_answers.json").read_text())
    for item in [item for item in items if item["mistake"] == "none"]:
        (file := tmp_path / "messages.json").write_text(json.dumps(item["prompt"]))
        (texts := tmp_path / "candidates.json").write_text(json.dumps([choice["text"] for choice in item["choices"]]))
        given = ["--messages", file] if len(item["prompt"]) > 1 else ["--chat", item["prompt"][0]["content"]]
        result = system1(smollm2, *given, "--candidates-file", texts, "--json")
        assert result.stderr == b""
        got = json.loads(result.stdout)
        assert got["usage"]["prompt_tokens"] == item["n_context"]
        sums = [sum(choice["logprobs"]) for choice in item["choices"]]
        assert [candidate["logprob"] for candidate in got["candidates"]] == pytest.approx(sums, abs=2e-4)


@pytest.mark.parametrize("content", [b" Paris\n London\n", b" Paris\r\n London\r\n", b'[" Paris", " London"]'])
def test_candidates_from_a_file_or_stdin(smollm2: Path, tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "candidates"
    file.write_bytes(content)
    expected = system1(smollm2, "The capital of France is", "-a", " Paris", "-a", " London").stdout
    assert expected
    assert system1(smollm2, "The capital of France is", "--candidates-file", file).stdout == expected
    assert system1(smollm2, "The capital of France is", "--candidates-file", "-", stdin=content).stdout == expected


@pytest.mark.parametrize(
    ("content", "kind", "expected"),
    [
        ("[INST] a\n[b]", "lines", ["[INST] a", "[b]"]),
        ('["a"]\n["b"]', "lines", ['["a"]', '["b"]']),
        ("{\n}", "lines", ["{", "}"]),
        ("\ufeff a\n\n\nb [x]\n", None, [" a", "b [x]"]),
        ('"a"', None, ['"a"']),
        ('\ufeff\n [" a",\n"b"] ', None, [" a", "b"]),
        ('["a\\nb"]', "json", ["a\nb"]),
        (json.dumps(['"' * 60] * 200), None, ['"' * 60] * 200),
        (json.dumps(["\\"] * 4096), None, ["\\"] * 4096),
        (json.dumps([" a"] * 4096), None, [" a"] * 4096),
    ],
)
def test_a_file_is_read_as_it_is_meant(tiny: Path, content: str, kind: str | None, expected: list[str]) -> None:
    said = ["--candidates-format", kind] if kind else []
    result = system1(tiny, "x ", "--candidates-file", "-", *said, "--json", stdin=content.encode())
    assert [candidate["text"] for candidate in json.loads(result.stdout)["candidates"]] == expected


@pytest.mark.parametrize(
    ("content", "kind", "words"),
    [
        ("[INST] a\n[b]", None, ["begins like JSON and is not", "--candidates-format lines"]),
        ('["a", "b"', None, ["begins like JSON and is not", "--candidates-format lines"]),
        ('{"a": 1}', None, ["an object, not a JSON array", "--candidates-format lines"]),
        ('["a", 1]', None, ["element 1 is a number", "--candidates-format lines"]),
        ('[["a"]]', None, ["element 0 is an array"]),
        ('"a"', "json", ["a string, not a JSON array"]),
        ("a", "json", ["is not JSON"]),
        ("[" * 100_000, None, ["begins like JSON"]),
        ('["\\ud800"]', None, ["element 0", "surrogate"]),
        ('["a", ""]', None, ["candidate 1 is empty"]),
        ("[]", None, ["no candidates"]),
        ("\n\n", None, ["no candidates"]),
        ("a\n" * 4097, None, ["4096 are scored at most"]),
        (json.dumps(["a"] * 4097), None, ["4096 are scored at most"]),
        ("a\nb\udcff", None, ["not UTF-8: byte 3"]),
    ],
)
def test_a_file_that_could_be_misread_is_refused(tiny: Path, content: str, kind: str | None, words: list[str]) -> None:
    said = ["--candidates-format", kind] if kind else []
    data = content.encode(errors="surrogateescape")
    result = system1(tiny, "x", "--candidates-file", "-", *said, stdin=data)
    assert (result.returncode, result.stdout) == (2, b"")
    for word in words:
        assert word in result.stderr.decode()


def test_join_and_warning(smollm2: Path) -> None:
    glued = system1(smollm2, "The capital of France is", "-a", "Paris", "-a", "London")
    joined = system1(smollm2, "The capital of France is", "-a", "Paris", "-a", "London", "--join", " ")
    assert b"no space" in glued.stderr
    second = system1(smollm2, "The capital of France is:", "-a", " London", "-a", "Paris")
    assert b"no space between the prompt and 'Paris'" in second.stderr
    assert joined.stderr == b""
    assert joined.stdout.startswith(b"0.98")


def test_an_empty_prompt_is_said(smollm2: Path) -> None:
    """It is what a script gets that forgot its prompt and has no terminal: the candidates by themselves."""
    explicit = system1(smollm2, "", "-a", "Paris", "-a", "London")
    forgotten = system1(smollm2, "-a", "Paris", "-a", "London")
    assert explicit.returncode == 0 and explicit.stdout == forgotten.stdout != b""
    assert explicit.stderr == forgotten.stderr
    assert explicit.stderr.decode().splitlines() == [
        "reflex: the prompt is empty: the candidates are scored after the token that begins or ends a text"
    ]


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
        (["-p", "-", "--candidates-file", "-"], ["standard input"]),
        (["-f", "-", "--candidates-file", "-"], ["standard input"]),
        (["--candidates-file", "-"], ["standard input"]),
        (["The sky is", "-a", " blue", "--neutral", ""], ["neutral context is empty"]),
        (["The sky is", "-a", " blue", "--candidates-format", "lines"], ["--candidates-file"]),
        (["The sky is", "-a", "blue", "--system", "\udcff"], ["the system message is not UTF-8: byte 0 is 0xff"]),
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
