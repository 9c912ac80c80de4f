"""A command that cannot do what it was asked ends at once and by its exit code: it waits for no driver that was started
early, and where memory is short it says so."""

import fcntl
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakecuda import ROOT, library, native_part

INIT_MS = 4000
"""What cuInit of the fake driver takes here; what waits for it takes longer than `PROMPT_S`."""
PROMPT_S = 2.0
COMMAND = [sys.executable, "-I", "-S", str(ROOT / "reflex_ipc" / "__main__.py")]


@pytest.fixture
def reflex(tmp_path: Path, fixtures: Path) -> Callable[..., tuple[int, str]]:
    """The command with the driver's early start under way; its exit code and what it says, if it ended in time."""
    (tmp_path / "libcuda.so.1").symlink_to(library())
    model = fixtures / "exact" / "llama-f16.gguf"
    early = native_part()

    def run(*arguments: str) -> tuple[int, str]:
        environment = {
            "REFLEX_EARLY": "0",
            "REFLEX_MODEL": str(model),
            "LD_PRELOAD": str(early),
            "LD_LIBRARY_PATH": str(tmp_path),
            "FAKECUDA_INIT_MS": str(INIT_MS),
        }
        command = [*COMMAND, *(str(model) if word == "MODEL" else word for word in arguments)]
        began = time.monotonic()
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        took = time.monotonic() - began
        assert took < PROMPT_S, f"it took {took:.2f} s"
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr + done.stdout

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run", "--nonsense"], 2, "the following arguments are required: MODEL"),
        (["run", "MODEL", "x", "--nonsense"], 2, "unrecognized arguments: --nonsense"),
        (["run", "MODEL", "x", "-n", "many"], 2, "argument -n/--max-tokens: 'many' is no whole number"),
        (["run", "MODEL", "x", "--top-p", "7"], 2, "top_p must be a number from 0 to 1, not 7.0"),
        (["run", "MODEL", "-f", "/nowhere/prompt"], 11, "/nowhere/prompt: No such file"),
        (["run", "/nowhere/m.gguf", "x", "--backend", "cuda"], 3, "/nowhere/m.gguf: no such file"),
        (["run", "MODEL", "x", "--backend", "cuda", "-c", "999999"], 7, "a context of 999999 was asked for"),
        (["run", "MODEL", "x y" * 9000, "--backend", "cuda"], 7, "the context holds"),
        (["system1", "MODEL", "x", "-a", " y", "--temp", "0", "--backend", "cuda"], 2, "temperature is 0.0"),
        (["system1", "MODEL", "x", "--backend", "cuda"], 2, "there are no candidates"),
        (["stdio", "/nowhere/m.gguf", "--backend", "cuda"], 3, '"code":"model_file"'),
        (["check", "/nowhere/m.gguf"], 3, "/nowhere/m.gguf: no such file"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_an_error_waits_for_no_driver(reflex, arguments: list[str], code: int, words: str):
    ended, said = reflex(*arguments)
    assert ended == code, said
    assert words in said


def test_what_fails_leaves_its_trace_all_the_same(reflex, tmp_path: Path):
    trace = tmp_path / "trace.json"
    assert reflex("run", "/nowhere/m.gguf", "x", "--backend", "cuda", "--trace", str(trace))[0] == 3
    assert '"traceEvents"' in trace.read_text()


@pytest.mark.parametrize("arguments", [["doctor"], ["doctor", "--json"]])
def test_what_was_reported_before_it_failed_is_out(arguments: list[str]):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout.count("\n") > 5


@pytest.mark.parametrize("buffering", [[], ["-u"]])
def test_a_report_that_nobody_can_take_is_a_failed_output(buffering: list[str]):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [COMMAND[0], *buffering, *COMMAND[1:], "doctor"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 11
    assert done.stderr == "reflex: writing to standard output failed: No space left on device\n"


def test_a_report_waits_for_a_full_pipe_that_does_not_block():
    """The pipe's mode is that of whoever made it."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    filled = os.write(writes, bytes(fcntl.fcntl(writes, fcntl.F_GETPIPE_SZ)))
    command = [*COMMAND, "doctor", "--json"]
    with subprocess.Popen(command, env=environment, stdout=writes, stderr=subprocess.PIPE) as process:
        os.close(writes)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(PROMPT_S)
        with open(reads, "rb") as pipe:
            said = pipe.read()[filled:]
        assert process.wait(PROMPT_S) == 1
        assert process.stderr and process.stderr.read() == b""
    assert json.loads(said)["ok"] is False


@pytest.mark.parametrize("number", [4, 5, 6, 7, 8, 16])
@pytest.mark.parametrize("command", ["tokenize", "inspect", "run", "stdio"])
def test_too_few_descriptors_are_said(fixtures: Path, command: str, number: int):
    """Before that the interpreter itself does not start."""
    rest = {"tokenize": ["x"], "run": ["x", "-n", "1", "--backend", "cpu"], "stdio": ["--backend", "cpu"]}
    done = subprocess.run(
        [*COMMAND, command, str(fixtures / "exact" / "llama-f16.gguf"), *rest.get(command, [])],
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (number, number)),
    )
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert done.returncode == 11 and "Too many open files" in done.stderr + done.stdout
    assert number < 16 or done.returncode == 0


def test_no_descriptor_for_the_program_itself():
    main = COMMAND[-1]
    script = (
        "import resource\n"
        f"code = compile(open({main!r}).read(), {main!r}, 'exec')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        f"exec(code, {{'__name__': '__main__', '__file__': {main!r}, '__package__': None}})\n"
    )
    done = subprocess.run([*COMMAND[:-1], "-c", script], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    said = "reflex: no file could be opened any more before the program was loaded: ulimit -n\n"
    assert (done.returncode, done.stderr) == (11, said)


@pytest.mark.parametrize("backend_threads", [1, 2])
@pytest.mark.parametrize("mib", [13, 14, 16, 20, 40, 80, 120, 160, 180, 200])
def test_too_little_address_space_is_said(fixtures: Path, mib: int, backend_threads: int):
    """Never a traceback, an internal error, or the end that a BLAS without room makes by itself."""
    command = [*COMMAND, "run", str(fixtures / "exact" / "llama-f16.gguf"), "x", "-n", "1", "--backend", "cpu"]
    done = subprocess.run(
        command,
        env={**os.environ, "OPENBLAS_NUM_THREADS": str(backend_threads)},
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20)),
    )
    assert done.returncode == 6, done.stderr
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("reflex: memory ran out") or "that `ulimit -v` leaves are free" in done.stderr


def test_enough_address_space_is_enough(fixtures: Path):
    command = [*COMMAND, "run", str(fixtures / "exact" / "llama-f16.gguf"), "x", "-n", "1", "--backend", "cpu"]
    most = 300 << 20
    done = subprocess.run(
        command,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)),
    )
    assert (done.returncode, done.stderr) == (0, b"")
