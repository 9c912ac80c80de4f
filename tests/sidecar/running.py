"""Sidecars and engines as processes, for the tests: started, asked whether they are ready, ended."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
PATIENCE = 30.0  # seconds; far more than anything takes, even on a busy machine


def engine_command(kind: str, model: object, *arguments: object) -> list[str]:
    """`reflex stdio MODEL …` or `reflex uds MODEL SOCKET …`, on one thread of the CPU."""
    options = ["--backend", "cpu", "--threads", "1"]
    return [sys.executable, "-m", "reflex_ipc", kind, str(model), *map(str, arguments), *options]


def environment(**more: str) -> dict[str, str]:
    found = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*([found] if found else []), str(ROOT), str(ROOT / "sidecar")])
    return {**os.environ, "PYTHONPATH": path, **more}


def until(what: Callable[[], Any], patience: float = PATIENCE) -> Any:
    """Wait for `what()` to be true, and return it."""
    end = time.monotonic() + patience
    while True:
        value = what()
        if value:
            return value
        assert time.monotonic() < end, f"not within {patience} seconds"
        time.sleep(0.02)


class Process:
    """A child with its stderr in a file. As a context manager it is killed at the end, if it has not ended by then."""

    def __init__(self, command: list[str], log: Path, **more: str):
        self.log = log
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment(**more),
                cwd=log.parent,  # so that no checkout is imported by accident
            )

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                raise
        self.popen.wait(PATIENCE)

    def text(self) -> str:
        return self.log.read_text()


class UdsEngine(Process):
    def __init__(self, model: object, folder: Path):
        self.path = folder / "engine.sock"
        super().__init__(engine_command("uds", model, self.path), folder / "engine.log")
        until(lambda: self.path.exists() or self.popen.poll() is not None)
        assert self.popen.poll() is None, self.text()


class Sidecar(Process):
    """`Sidecar(folder, "--socket", path)` or `Sidecar(folder, "--", *engine_command(...))`, on a free port."""

    def __init__(self, folder: Path, *arguments: object, ready: bool = True, patience: str = "", **more: str):
        """`patience`: assignments that shorten the sidecar's time-outs, such as "serve.READER_S = 0.5"."""
        log = folder / f"sidecar-{time.monotonic_ns()}.log"
        start = ["-m", "reflex_sidecar"]
        if patience:
            imports = "from reflex_sidecar import guard, links, serve; from reflex_sidecar.__main__ import run"
            start = ["-c", f"{imports}; {patience}; run()"]
        super().__init__([sys.executable, *start, "--port", "0", *map(str, arguments)], log, **more)
        found = until(lambda: re.search(r"listening on (http://\S+)/", self.text()) or self.popen.poll() is not None)
        assert isinstance(found, re.Match), self.text()
        self.url = found[1]
        self.port = int(self.url.rpartition(":")[2])
        if ready:
            self.wait_ready()

    def wait_ready(self) -> None:
        until(lambda: httpx.get(self.url + "/readyz").status_code == 200)

    def engine_pid(self) -> int:
        """The child of the sidecar's that is its engine."""
        path = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children")
        return int(until(lambda: path.read_text().split())[0])

    def metric(self, name: str) -> float:
        """The value of `name`, labels included; 0 if it has not been counted."""
        for line in httpx.get(self.url + "/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=PATIENCE, **more)
