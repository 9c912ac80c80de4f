"""The command as a person runs it: real processes, real pipes, exit codes and what lands on which stream."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.wire import ROOT, on_a_terminal

COMMAND = [sys.executable, "-m", "reflex_ipc"]


def reflex(*arguments: object, stdin: bytes | None = None, **options: object) -> subprocess.CompletedProcess[bytes]:
    where = {"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, timeout=60, cwd=ROOT, check=False, **where, **options
    )


def failed(result: subprocess.CompletedProcess[bytes], code: int, *words: str) -> None:
    """A clear error: the code, nothing on stdout, a message that names what matters, no traceback."""
    message = result.stderr.decode()
    assert (result.returncode, result.stdout) == (code, b""), message
    assert "Traceback" not in message
    assert message.startswith("reflex: ")
    for word in words:
        assert word in message


# --- the main job


@pytest.mark.model
def test_demo_model_knows_the_capital(smollm2: Path) -> None:
    result = reflex("run", "smollm2", "The capital of France is", "-n", "24", "--backend", "cpu")
    assert result.returncode == 0, result.stderr
    assert b"Paris" in result.stdout
    assert result.stderr == b""


def test_a_run_on_the_cpu_says_why_when_nobody_asked_for_it(tiny: Path) -> None:
    if any(os.path.exists(node) for node in ("/dev/nvidiactl", "/dev/dxg")):
        pytest.skip("there is an NVIDIA device here")
    assert reflex("run", tiny, "Hello", "-n", "1").stderr == b"reflex: running on the CPU: no NVIDIA device\n"
    assert reflex("run", tiny, "Hello", "-n", "1", "--backend", "cpu").stderr == b""
    failed(reflex("run", tiny, "Hello", "--backend", "cuda"), 5, "libcuda")


# --- where the prompt comes from


def test_prompt_sources_agree(tiny: Path, tmp_path: Path) -> None:
    prompt = "Hello there"
    file = tmp_path / "prompt.txt"
    file.write_text(prompt + "\n")
    expected = reflex("run", tiny, prompt, "-n", "5")
    assert expected.returncode == 0, expected.stderr
    assert expected.stdout
    for other in (
        reflex("run", tiny, "-p", prompt, "-n", "5"),
        reflex("run", tiny, "-f", file, "-n", "5"),
        reflex("run", tiny, "-", "-n", "5", stdin=prompt.encode()),
        reflex("run", tiny, "-n", "5", stdin=prompt.encode() + b"\n"),
    ):
        assert other.stdout == expected.stdout, other.stderr


def test_stdin_is_not_read_when_a_prompt_is_given(tiny: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"untouched")
    result = subprocess.run(
        [*COMMAND, "run", str(tiny), "Hello", "-n", "2"],
        stdin=read,
        capture_output=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    os.close(write)
    assert result.returncode == 0, result.stderr
    assert os.read(read, 100) == b"untouched"
    os.close(read)


def test_only_one_newline_is_dropped(tiny: Path) -> None:
    one = reflex("tokenize", tiny, stdin=b"Hello\n")
    two = reflex("tokenize", tiny, stdin=b"Hello\n\n")
    assert one.stdout == reflex("tokenize", tiny, "Hello").stdout
    assert two.stdout == reflex("tokenize", tiny, "Hello\n").stdout != one.stdout


def test_newline_at_the_end_only_on_a_terminal(tiny: Path) -> None:
    piped = reflex("run", tiny, "Hello", "-n", "3")
    shown = on_a_terminal([*COMMAND, "run", str(tiny), "Hello", "-n", "3"])
    assert not piped.stdout.endswith(b"\n")
    assert shown.replace(b"\r\n", b"\n") == piped.stdout + b"\n"


# --- what goes wrong

BAD_MODELS = {
    "missing": 3,
    "directory": 3,
    "empty": 3,
    "safetensors": 3,
    "text": 3,
    "zero": 3,
}


@pytest.mark.parametrize(("kind", "code"), BAD_MODELS.items())
def test_bad_model(kind: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    if kind == "directory":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind == "safetensors":
        path.write_bytes((2).to_bytes(8, "little") + b"{}")
    elif kind == "text":
        path.write_text("hello, I am no model\n" * 10)
    elif kind == "zero":
        path = Path("/dev/zero")
    failed(reflex("run", path, "Hello"), code, str(path))


def test_cut_model(tiny: Path, tmp_path: Path) -> None:
    """Cut at every 10% as a process; the reader's own tests cut at every byte."""
    whole = tiny.read_bytes()
    path = tmp_path / "cut.gguf"
    for percent in range(0, 100, 10):
        path.write_bytes(whole[: len(whole) * percent // 100])
        failed(reflex("run", path, "Hello"), 3, "cut.gguf")


def test_unsupported_architecture(tmp_path: Path) -> None:
    import gguf

    path = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(path, "gptneox")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    failed(reflex("run", path, "ab"), 4, "general.architecture", "gptneox", "llama")


def test_unknown_name(tiny: Path) -> None:
    failed(reflex("run", "gpt5", "Hello"), 2, "gpt5", "smollm2")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-n", "4", ""], 2, ["empty"]),
        (["word " * 400, "-c", "64"], 7, ["64"]),
        (["Hello", "-c", "0"], 2, ["context"]),
        (["Hello", "-c", "999999999"], 7, ["context"]),
        (["Hello", "-n", "-1"], 2, ["--max-tokens"]),
        (["Hello", "-n", "9" * 5000], 2, ["--max-tokens"]),
        (["Hello", "--deadline", "0"], 2, ["--deadline"]),
        (["Hello", "--logit-bias", "foo"], 2, ["--logit-bias", "ID=X"]),
        (["Hello", "--temp", "nan"], 2, ["temperature"]),
        (["Hello", "--stop", ""], 2, ["stop[0]"]),
        (["Hello", "--no-thinking"], 2, ["--chat"]),
        (["Hello", "-p", "again"], 2, ["more than once"]),
        (["-f", "/nowhere/at/all"], 11, ["/nowhere/at/all"]),
        (["Hello", "--frobnicate"], 2, ["--frobnicate"]),
        (["Hello", "--max-tok", "3"], 2, ["--max-tok"]),
        (["Hello", "--threads", "0"], 2, ["threads"]),
    ],
)
def test_bad_arguments(tiny: Path, arguments: list[str], code: int, words: list[str]) -> None:
    failed(reflex("run", tiny, *arguments), code, *words)


@pytest.mark.parametrize("habit", ["-m", "-ngl"])
def test_habits_get_a_hint(habit: str) -> None:
    failed(reflex("run", habit, "model.gguf", "-p", "Hello"), 2, habit)


def test_invalid_utf8(tiny: Path) -> None:
    failed(reflex("run", tiny, stdin=b"caf\xe9 au lait"), 2, "UTF-8", "standard input")
    failed(reflex("run", tiny, b"caf\xe9".decode("utf-8", "surrogateescape")), 2, "UTF-8")


def test_texts_that_begin_with_a_dash(tiny: Path) -> None:
    plain = reflex("run", tiny, "--prompt=-dash", "-n", "3")
    assert plain.returncode == 0, plain.stderr
    assert reflex("run", tiny, "-p", "-dash", "-n", "3").stdout == plain.stdout
    assert reflex("run", tiny, "-n", "3", "--", "-dash").stdout == plain.stdout
    assert reflex("run", tiny, "Hello", "-n", "3", "--stop", "---").returncode == 0


def test_prompt_without_an_end(tiny: Path) -> None:
    failed(reflex("run", tiny, "-f", "/dev/zero"), 2, "/dev/zero", "256 MiB")


def test_prompt_that_no_context_holds(tiny: Path) -> None:
    failed(reflex("run", tiny, stdin=b"a" * 20_000_000), 7, "context")


def test_a_prompt_that_fills_the_context_leaves_no_room(tiny: Path) -> None:
    ids = reflex("tokenize", tiny, "Hello").stdout.split()
    result = reflex("run", tiny, "Hello", "-c", len(ids))
    assert (result.returncode, result.stdout) == (0, b"")
    assert b"is full" in result.stderr


@pytest.mark.parametrize("command", ["--version", "--help", "tokenize", "inspect"])
def test_every_command_notices_a_full_disk(tiny: Path, command: str) -> None:
    arguments = [command] if command.startswith("-") else [command, str(tiny)]
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [*COMMAND, *arguments],
            input=b"Hello",
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            cwd=ROOT,
            check=False,
        )
    assert (result.returncode, result.stderr[:8]) == (11, b"reflex: ")


def test_stdin_closed_or_not_ready(tiny: Path) -> None:
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, "run", str(tiny), "-n", "2"],
        capture_output=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    failed(closed, 2, "empty")
    read, write = os.pipe()
    os.set_blocking(read, False)
    process = subprocess.Popen(
        [*COMMAND, "run", str(tiny), "-n", "2", "--backend", "cpu"],
        stdin=read,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    os.close(read)
    time.sleep(0.5)
    os.write(write, b"Hello")
    os.close(write)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"")
    assert out == reflex("run", tiny, "Hello", "-n", "2").stdout


def test_exit_code_without_a_stderr() -> None:
    result = subprocess.run(
        ["sh", "-c", 'exec "$@" 2>&-', "sh", *COMMAND, "run", "/nowhere.gguf", "Hello"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert (result.returncode, result.stdout) == (3, b"")


def test_no_escape_reaches_the_terminal(tiny: Path) -> None:
    result = reflex("run", "a\x1b[31m\nb", "Hello")
    failed(result, 2, "\\x1b[31m\\n")
    assert b"\x1b" not in result.stderr and result.stderr.count(b"\n") == 1


@pytest.mark.model
def test_deadline_holds_while_the_model_loads(smollm2: Path) -> None:
    began = time.monotonic()
    failed(reflex("run", smollm2, "Hello", "--deadline", "1"), 124, "deadline")
    assert time.monotonic() - began < 30


@pytest.mark.model
def test_bytes_that_no_token_has_are_reported(smollm2: Path) -> None:
    """SmolLM2's vocabulary lacks the byte 0x04."""
    result = reflex("tokenize", "smollm2", "a\x04b")
    assert result.returncode == 0
    assert result.stderr.endswith(b"they are lost: 04\n")


def test_the_launcher_runs_a_model_by_path(tiny: Path) -> None:
    """`bin/reflex` of this tree: isolated, without `site` until something needs an installed package."""
    launcher = ROOT / "bin" / "reflex"
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    result = subprocess.run(
        [launcher, "run", str(tiny), "Hello", "-n", "5"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == reflex("run", tiny, "Hello", "-n", "5").stdout


def test_exit_codes_are_those_of_the_readme() -> None:
    import re

    from reflex_ipc import errors

    text = (ROOT / "README.md").read_text()
    section = text[text.index("## Exit codes") : text.index("## Platforms")]
    documented = {
        int(code) for cell in re.findall(r"\| ([\d, ]+) \|", section) for code in cell.split(", ") if code.strip()
    }
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ReflexError)]
    assert {kind.exit_code for kind in kinds} | {0, errors.EXIT_BELOW_CONFIDENCE, 130, 141, 143} == documented


def test_empty_stdin(tiny: Path) -> None:
    failed(reflex("run", tiny, stdin=b""), 2, "empty")


def test_closed_pipe_ends_quietly(tiny: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", str(tiny), "Hello", "-n", "200", "--backend", "cpu"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(60) == -signal.SIGPIPE
    assert process.stderr.read() == b""


def test_closed_stdout(tiny: Path) -> None:
    script = 'exec "$@" >&-'
    result = subprocess.run(
        ["sh", "-c", script, "sh", *COMMAND, "run", str(tiny), "Hello"],
        capture_output=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    failed(result, 11, "standard output")


def test_full_disk(tiny: Path) -> None:
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [*COMMAND, "run", str(tiny), "Hello", "-n", "3"],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=60,
            cwd=ROOT,
            check=False,
        )
    assert result.returncode == 11
    assert result.stderr.decode().startswith("reflex: ")
    assert "No space left" in result.stderr.decode()


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_keep_what_was_printed(smollm2: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(
        [*COMMAND, "run", str(smollm2), "Once upon a time", "-n", "4000", "--backend", "cpu"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None and process.stderr is not None
    first = os.read(process.stdout.fileno(), 4096)
    process.send_signal(number)
    rest = process.stdout.read()
    assert process.wait(30) == -number
    assert process.stderr.read() == b""
    assert (first + rest).decode()


# --- the other commands


def test_tokenize(tiny: Path) -> None:
    import json

    text = "Hello <|im_end|> wörld"
    plain = reflex("tokenize", tiny, text)
    ids = [int(word) for word in plain.stdout.split()]
    pieces = json.loads(reflex("tokenize", tiny, text, "--json").stdout)
    assert [piece["id"] for piece in pieces] == ids
    assert reflex("tokenize", tiny, text, "--no-special").returncode == 0


def test_version_and_help() -> None:
    from reflex_ipc import __version__

    assert reflex("--version").stdout.decode() == f"reflex {__version__}\n"
    for command in ("run", "tokenize", "inspect"):
        help_text = reflex(command, "--help")
        assert help_text.returncode == 0
        assert b"MODEL" in help_text.stdout


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    """What `reflex --version` loads is what every start pays for."""
    script = (
        "import sys; sys.argv = ['reflex', '--version']\n"
        "from reflex_ipc.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: pass\n"
        "print(*[m for m in ('numpy', 'json', 'jinja2', 'orjson', 'dataclasses', 'gguf') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=60, cwd=ROOT, check=True)
    assert result.stdout.decode().splitlines()[-1] == ""
