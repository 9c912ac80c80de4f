"""What a process leaves on the device, and what it loses of its own memory: nothing, however it ends.

Everything happens in other processes, watched from this one: while a process has the device open elsewhere in itself,
opening and closing it does not tear the context down.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
from fakecuda import ROOT

sys.path.append(str(ROOT / "bench"))  # behind tests/, which has a wire.py of its own

import models

from reflex_ipc.cuda.device import Device
from reflex_ipc.cuda.launch import Kernels

pytestmark = pytest.mark.gpu

NOISE = 16 << 20  # bytes by which free memory moves without anybody's doing
OPENINGS = 200 if os.environ.get("REFLEX_FORCE_PTX") != "1" else 20  # there each compiles its kernels
APART = OPENINGS // 10  # openings between two looks at the process

OPEN_AND_CLOSE = """
import ctypes, json, os, sys
from reflex_ipc.engine import Engine

def now():
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return {"fds": len(os.listdir("/proc/self/fd")), "threads": int(status["Threads"]),
            "rss": 1024 * int(status["VmRSS"].split()[0])}

openings, apart = int(sys.argv[2]), int(sys.argv[3])
used, bare, answers, images = [], [], set(), []
for number in range(1, openings + 1):
    with Engine.open(sys.argv[1], backend="cuda") as engine:
        answers.add(tuple(t.id for t in engine.generate([5, 6, 7], max_tokens=4, ignore_eos=True)))
        engine.score("once", [" a", " the end"])
        if number == 1 and not engine._executor._kernels.is_ptx:
            images = [open(module.path, "rb").read() for module in engine._executor._kernels._modules.values()]
    if number % apart == 0:
        used.append(now())
assert len(answers) == 1, answers
cu, context, module = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
for number in range(1, openings + 1):
    assert cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == cu.cuCtxSetCurrent(context) == 0
    for image in images:
        assert cu.cuModuleLoadDataEx(ctypes.byref(module), image, 0, None, None) == 0
    assert cu.cuDevicePrimaryCtxRelease_v2(0) == 0
    if number % apart == 0:
        bare.append(now())
print(json.dumps([used, bare]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """200 MB of weights: enough to be seen on the device."""
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    models.make(path, "qwen3-0.6b", layers=8)
    assert path.stat().st_size > 10 * NOISE
    yield path
    path.unlink()


def free(device: Device) -> int:
    device.make_current()
    return device.memory()[0]


def await_free(device: Device, before: int, seconds: float = 10) -> None:
    """Free memory comes back to what it was."""
    until = time.monotonic() + seconds
    while before - free(device) > NOISE:
        assert time.monotonic() < until, f"{(before - free(device)) >> 20} MiB are still taken"
        time.sleep(0.05)


def test_two_hundred_models_opened_and_closed(device: Device, kernels: Kernels, fixtures: Path) -> None:
    before = free(device)
    model = fixtures / "exact" / "qwen3-f16.gguf"
    command = [sys.executable, "-c", OPEN_AND_CLOSE, str(model), str(OPENINGS), str(APART)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    used, bare = json.loads(result.stdout)
    assert {(look["fds"], look["threads"]) for look in used} == {(used[0]["fds"], used[0]["threads"])}
    # The smallest thing that could be lost each time, a stack of a thread or a buffer of the ring, is megabytes. What
    # the driver keeps of a context with the same kernels and nothing else is its own, and comes unevenly.
    # Where each opening compiles its kernels, the driver's compiler keeps 600 kB of it.
    if not kernels.is_ptx:
        ours, drivers = (median(b["rss"] - a["rss"] for a, b in pairwise(looks)) for looks in (used, bare))
        assert ours - drivers < APART * (64 << 10), (used, bare)
    await_free(device, before)


def test_two_hundred_openings_of_one_process_take_no_device_memory(device: Device, fixtures: Path) -> None:
    """The same with a context that stays: what an engine allocates is all given back, seen from within."""
    from reflex_ipc.engine import Engine

    before = free(device)
    for _ in range(OPENINGS):
        with Engine.open(fixtures / "exact" / "qwen3-f16.gguf", backend="cuda", context=64) as engine:
            next(engine.generate([5, 6, 7], max_tokens=1))
    assert before - free(device) < NOISE


def test_a_long_context_costs_nothing_until_it_is_used(device: Device, kernels: Kernels, model: Path) -> None:
    """40960 tokens of this shape's keys and values would be 1.3 GB."""
    from reflex_ipc.engine import Engine

    before = free(device)
    with Engine.open(model, backend="cuda") as engine:
        assert engine.n_ctx == 40960
        next(engine.generate([5, 6, 7], max_tokens=1))
        assert before - free(device) < model.stat().st_size + (256 << 20)
    assert before - free(device) < NOISE


# Where the process stops and waits to be killed: after a call of the function returned, the n-th.
PHASES = {
    "driver started": ("reflex_ipc.cuda.driver", "Driver.start", 1, False),
    "context there": ("reflex_ipc.cuda.device", "Device.__init__", 1, False),
    "upload begun": ("reflex_ipc.cuda.upload", "Upload.start", 1, True),
    "prompt queued": ("reflex_ipc.cuda.executor", "CudaExecutor.forward", 1, True),
    "first token out": ("reflex_ipc.stops", "StopStrings.push", 1, True),
    "decoding ahead": ("reflex_ipc.stops", "StopStrings.push", 12, True),
    "closed": ("reflex_ipc.engine", "Engine.close", 1, False),
}

STOP_AT = """
import functools, importlib, sys, time
from reflex_ipc.engine import Engine

path, module, name, number = sys.argv[1], *sys.argv[2:4], int(sys.argv[4])
owner = importlib.import_module(module)
*outer, name = name.split(".")
for each in outer:
    owner = getattr(owner, each)
inner, calls = getattr(owner, name), 0

@functools.wraps(inner)
def stop(*arguments, **named):
    global calls
    result = inner(*arguments, **named)
    calls += 1
    if calls == number:
        print("there", flush=True)
        time.sleep(60)
    return result

setattr(owner, name, stop)
with Engine.open(path, backend="cuda") as engine:
    for _ in engine.generate(list(range(20, 120)), max_tokens=64, ignore_eos=True):
        pass
print("never stopped", flush=True)
"""


@pytest.mark.parametrize("phase", PHASES)
def test_killed_at_each_phase(device: Device, kernels: Kernels, model: Path, phase: str) -> None:
    module, name, number, is_loaded = PHASES[phase]
    before = free(device)
    command = [sys.executable, "-c", STOP_AT, str(model), module, name, str(number)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        if is_loaded:  # or this test could not fail
            assert before - free(device) > model.stat().st_size - NOISE
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    await_free(device, before)


def test_killed_in_the_middle_of_the_upload(device: Device, kernels: Kernels, model: Path) -> None:
    """At moments spread over a whole start, threads of the upload at work."""
    before = free(device)
    command = [sys.executable, "-m", "reflex_ipc", "run", str(model), "-p", "x", "-n", "200", "--ignore-eos"]
    command += ["--backend", "cuda"]
    began = time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    whole = time.monotonic() - began
    for i in range(12):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(whole * (i + 0.5) / 12)
        process.kill()
        process.wait()
    await_free(device, before)
