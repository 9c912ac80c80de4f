"""Fixtures of tests on the emulated device: `pytest_plugins = ["emulator.fixtures"]` brings them in."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

import emulator
from emulator import KERNELS
from emulator.build import library
from reflex_ipc import archs
from reflex_ipc.cuda import executor as cuda
from reflex_ipc.cuda import experts, launch, linear
from reflex_ipc.cuda.device import start_driver
from reflex_ipc.gguf import GGUF


@pytest.fixture(scope="module")
def emulated(tmp_path_factory) -> tuple[str, str]:
    """The emulated driver, and its kernels."""
    return str(library(KERNELS)), str(emulator.kernels(KERNELS, tmp_path_factory.mktemp("emulated")))


@pytest.fixture
def opened(emulated, monkeypatch, fixtures: Path):
    """Opens a model of the fixtures, or a file of its kind, there: its executor, the file, the fixture's reference."""
    path, lib = emulated
    monkeypatch.setattr(linear, "linear", emulator.naive_linear)
    monkeypatch.setattr(experts, "expert_linear", emulator.naive_experts)
    monkeypatch.setattr(cuda, "Kernels", partial(launch.Kernels, lib=lib))
    executors = []

    def open_model(name: str, *, fuse: bool = True, file: Path | None = None):
        stem = fixtures / (name if "/" in name else f"exact/{name}-f16")
        gguf = GGUF.open(file or f"{stem}.gguf")
        plan = archs.build(gguf)
        executor = cuda.CudaExecutor(gguf, plan, plan.n_ctx_train, opening=start_driver(0, path), fuse=fuse)
        executors.append((executor, gguf))
        return executor, gguf, np.load(f"{stem}.npz")

    yield open_model
    for executor, gguf in executors:
        executor.close()
        gguf.close()
