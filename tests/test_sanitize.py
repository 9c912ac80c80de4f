"""tools/sanitize.py without a sanitizer: what it selects launches every kernel, processes share it, and what it says is
what came of it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from fakecuda import ROOT, Fake

from reflex_ipc import smoke
from reflex_ipc.cuda.launch import LIB
from reflex_ipc.cuda.sampling import Sampling
from reflex_ipc.sampler import Sampled
from reflex_ipc.smoke import experts, matrices

sys.path.append(str(ROOT / "tools"))

import sanitize

pytest_plugins = ["fakecuda.fixtures"]
KERNELS = Path(LIB) / "sm_90a" / "kernels.txt"


@pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")
def test_every_kernel_is_launched(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    """By smoke's part of it, on a driver that computes nothing, so that nothing is compared."""
    fake.c.fake_kernels(str(KERNELS).encode())
    for module in (experts, matrices):
        monkeypatch.setattr(module, "KINDS", module.KINDS)
    monkeypatch.setattr(smoke, "check", lambda bench, name, family: list(family(bench)))
    monkeypatch.setattr(Sampling, "receive", lambda *_: Sampled(0, 0.0, ()))
    looked_up: set[str] = set()
    for number, item in enumerate(sanitize.selection()):
        if item.startswith("smoke: "):
            looked_up.update(sanitize.run_smoke(item, number % 2 == 0, fake.path))
    launched = {line.split()[1] for line in fake.log if line.startswith("cuLaunchKernelEx")}
    assert looked_up == launched
    assert {line.partition(" ")[0] for line in KERNELS.read_text().splitlines()[1:]} - launched == set()
    assert fake.leaks == fake.violations == []


def test_models_are_there(fixtures: Path) -> None:
    for name in sanitize.MODELS:
        assert (fixtures / f"{name}.gguf").exists()


def test_processes_share_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    done = []
    monkeypatch.setattr(sanitize, "selection", lambda: ["smoke: a: 1", "m", "n"])
    monkeypatch.setattr(sanitize, "run_smoke", lambda item, poison: done.append((item, poison)) or ["k"])
    monkeypatch.setattr(sanitize, "run_model", lambda item: done.append(item) or ["l", "k"])
    (tmp_path / "1").touch()  # another process has it
    later = time.monotonic() + 60
    assert sanitize.run("initcheck", tmp_path, later) == sanitize.run("initcheck", tmp_path, later) == 0
    assert done == [("smoke: a: 1", False), "n"]
    assert capsys.readouterr().out == "launched: k\ndone: smoke: a: 1, 0 s\nlaunched: l k\ndone: n, 0 s\n"
    (tmp_path / "2").unlink()
    sanitize.run("initcheck", tmp_path, later - 120)
    assert capsys.readouterr().out == "not run: n\n" and len(done) == 2


@pytest.mark.parametrize(
    ("script", "verdict"),
    [
        ("", "racecheck: clean; 2 done, nothing left out; every kernel was launched"),
        ("exit 9", "racecheck: FOUND SOMETHING; 2 done"),
        ("exit 1", "racecheck: failed, exit code 1; 2 done"),
        ("exec sleep 30", "racecheck: out of time; 2 done"),
        ("mkdir $0.first || exit 1; exec sleep 30", "racecheck: failed, exit code 1; 2 done"),
        ("mkdir $0.first || exit 9; exec sleep 30", "racecheck: FOUND SOMETHING; 2 done"),
        ("echo two", "left out: smoke: b"),
        ("echo kernel", "racecheck: never launched: l"),
    ],
)
def test_what_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, verdict: str) -> None:
    """A sanitizer that says what we would, and ends as it likes."""
    second = "" if "two" in script else "echo 'done: smoke: b, 3 s'"
    program = tmp_path / "sanitizer"
    program.write_text(
        f"#!/bin/sh\necho 'launched: k{'' if 'kernel' in script else ' l'}'\necho 'done: a, 2 s'\n{second}\n{script}\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sanitize, "selection", lambda: ["a", "smoke: b"])
    monkeypatch.setattr(sanitize, "every_kernel", lambda: {"k", "l"})
    said = sanitize.sanitize(sanitize.Processes(), str(program), "racecheck", tmp_path, 1)
    assert verdict in said
    assert (said.startswith("racecheck: clean; ") and "nothing left out; every kernel" in said) == (script == "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_ended_by_a_signal(tmp_path: Path, number: int) -> None:
    """Nothing is left running, what its processes run neither, and it ends then and not at its limit."""
    program, started = tmp_path / "compute-sanitizer", tmp_path / "started"
    program.write_text(f"#!/bin/sh\nsleep 60 &\necho $$ $! >> {started}\nwait\n")
    program.chmod(0o755)
    started.touch()
    command = [sys.executable, ROOT / "tools" / "sanitize.py", tmp_path / "out", "--tool", "memcheck"]
    path = f"{tmp_path}:{os.environ['PATH']}"
    with subprocess.Popen(command, env={**os.environ, "PATH": path}, stderr=subprocess.PIPE) as process:
        until = time.monotonic() + 30
        while len(started.read_text().split()) < 2 * sanitize.PROCESSES:
            assert time.monotonic() < until
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(30) == 128 + number and process.stderr.read() == b""
    for pid in started.read_text().split():
        await_gone(int(pid))


def await_gone(pid: int, seconds: float = 10) -> None:
    """A grandchild is reaped by whoever inherits it."""
    until = time.monotonic() + seconds
    with suppress(FileNotFoundError, ProcessLookupError):
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < until
            time.sleep(0.01)


def test_nothing_starts_once_they_are_ended(tmp_path: Path) -> None:
    """As by a signal that comes while they are being started."""
    processes = sanitize.Processes()
    processes.end()
    assert processes.run(["touch", tmp_path / "ran"], tmp_path / "log", 10) is None
    assert not (tmp_path / "ran").exists()
