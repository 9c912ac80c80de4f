"""`reflex run` as a process, on a driver that is none: how everything that can be wrong with a device reaches a person.

One line on stderr, the exit code of its kind, and nothing left with the driver.
"""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fakecuda import ROOT, library
from gguf_bytes import read_plainly
from legacy_file import IDS, put_together

from reflex_ipc.cuda.launch import LIB

KERNELS = Path(LIB) / "sm_90a" / "kernels.txt"
pytestmark = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")

DEVICE, MODEL_FILE, UNSUPPORTED, MEMORY = 5, 3, 4, 6

# A device node that is there, or the absence of one would be all that "auto" asks about; and the upload's ring,
# whatever the machine.
PROGRAM = """
import sys
from reflex_ipc import backends, cli
from reflex_ipc.cuda import upload
backends.DEVICE_NODES = ("/dev/null",)
upload.usable_cpus = lambda: 4
{before}
sys.exit(cli.main(sys.argv[1:]))
"""
SHRINK = """
from reflex_ipc.cuda.upload import Upload
start = Upload.start
def shrink(self, device, base):
    import os
    os.truncate(sys.argv[2], os.path.getsize(sys.argv[2]) // 2)
    start(self, device, base)
Upload.start = shrink
"""

WITHOUT_KERNELS = """
from reflex_ipc.cuda import launch
launch.shipped = lambda lib: []
"""


class Result:
    """What a run said, and what the driver saw: its calls, what it found wrong, what was not given back."""

    def __init__(self, done: subprocess.CompletedProcess[str], report: str) -> None:
        self.code, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.calls, rest = report.split("[violations]\n")
        self.violations, self.leaks = rest.split("[leaks]\n")


@pytest.fixture
def reflex(tmp_path: Path, fixtures: Path) -> Callable[..., Result]:
    """Run with a driver that behaves as the keywords say."""
    (tmp_path / "libcuda.so.1").symlink_to(library())
    model, report = tmp_path / "m.gguf", tmp_path / "report"
    shutil.copy(fixtures / "exact" / "qwen3-f16.gguf", model)

    def run(*options: str, backend: str = "cuda", before: str = "", visible: str | None = None, **fake: object):
        env = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "REFLEX_"))}
        env |= {"LD_LIBRARY_PATH": str(tmp_path), "FAKECUDA_REPORT": str(report), "FAKECUDA_KERNELS": str(KERNELS)}
        env |= {f"FAKECUDA_{key.upper()}": str(value) for key, value in fake.items()}
        if visible is not None:
            env["CUDA_VISIBLE_DEVICES"] = visible
        command = [sys.executable, "-c", PROGRAM.format(before=before), "run", str(model), "-p", "x", "-n", "1"]
        command += ["--backend", backend, "--threads", "1", *options]
        return Result(
            subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60), report.read_text()
        )

    return run


def is_one_line(result: Result, *words: str) -> None:
    assert result.err.count("\n") == 1 and result.err.startswith("reflex: "), result.err
    for word in words:
        assert word in result.err
    assert (result.out, result.violations, result.leaks) == ("", "", "")


def test_a_device_that_is_not_there(reflex):
    result = reflex("--device", "7", devices=2)
    assert result.code == DEVICE
    is_one_line(result, "there is no device 7: --device takes one of 0: Fake 0, 1: Fake 1")


def test_the_device_asked_for(reflex):
    """The fake's kernels compute nothing, so the run ends at the first token; by then all is on the second device."""
    result = reflex("--device", "1", devices=2)
    assert "cuDevicePrimaryCtxRetain 1\n" in result.calls and "cuDevicePrimaryCtxRetain 0" not in result.calls
    assert "cuMemcpyHtoDAsync_v2" in result.calls


@pytest.mark.parametrize(
    ("mode", "words"), [(3, "compute mode is exclusive process"), (2, "compute mode is prohibited")]
)
@pytest.mark.parametrize("backend", ["cuda", "auto"])
def test_a_device_that_another_process_has(reflex, mode: int, words: str, backend: str):
    """Also "auto" says so: there is a device, and the CPU was not asked for."""
    result = reflex(backend=backend, compute_mode=mode, fail="cuDevicePrimaryCtxRetain:1:46")
    assert result.code == DEVICE
    is_one_line(result, words, "nvidia-smi -c DEFAULT")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"visible": ""}, "CUDA_VISIBLE_DEVICES is ''"),
        ({"devices": 0}, "shows no device"),
        ({"major": 7, "minor": 0}, "has compute capability 7.0; the kernels need 7.5"),
    ],
    ids=str,
)
def test_no_usable_device(reflex, how: dict[str, object], words: str):
    refused = reflex(**how)
    assert refused.code == DEVICE
    is_one_line(refused, words)
    instead = reflex(backend="auto", **how)
    assert instead.code == 0 and instead.out
    assert instead.err.count("\n") == 1 and instead.err.startswith("reflex: running on the CPU: ")
    assert words in instead.err


NO_DEVICE = {"visible": ""}


@pytest.mark.parametrize("backend", ["cuda", "auto"])
def test_a_package_without_kernels(reflex, backend: str):
    """A device that could be used is not passed over in silence; without one, kernels are nobody's business."""
    result = reflex(backend=backend, before=WITHOUT_KERNELS)
    assert result.code == DEVICE
    is_one_line(result, "installed without kernels", "REFLEX_CUDA=native", "--backend cpu")
    instead = reflex(backend="auto", before=WITHOUT_KERNELS, **NO_DEVICE)
    assert instead.code == 0 and instead.out
    assert "CUDA_VISIBLE_DEVICES is ''" in instead.err and "running on the CPU" in instead.err


def test_a_model_that_the_kernels_cannot_run(reflex, tmp_path: Path):
    """A norm's weight as F16: an error where there is a device, whose remedy works; none where there is none."""
    model = tmp_path / "m.gguf"
    raw = model.read_bytes()
    metadata, tensors = read_plainly(raw)
    made = {
        n: (t, ne, raw[at : at + math.prod(ne) * (4 if t == IDS["F32"] else 2)]) for n, (t, ne, at) in tensors.items()
    }
    number, ne, content = made["blk.0.attn_norm.weight"]
    assert number == IDS["F32"]
    halves = np.frombuffer(content, np.float32).astype(np.float16).tobytes()
    put_together(metadata, {**made, "blk.0.attn_norm.weight": (IDS["F16"], ne, halves)}, model)
    for backend in ("cuda", "auto"):
        result = reflex(backend=backend)
        assert result.code == UNSUPPORTED
        is_one_line(result, "blk.0.attn_norm.weight is F16", "--backend cpu")
    on_cpu, instead = reflex(backend="cpu"), reflex(backend="auto", **NO_DEVICE)
    assert on_cpu.code == instead.code == 0 and on_cpu.out == instead.out != ""
    assert on_cpu.err == "" and "running on the CPU" in instead.err


def test_a_model_that_does_not_fit(reflex):
    result = reflex(memory=1 << 20)
    assert result.code == MEMORY
    is_one_line(result, "of device memory (", " weights, ", " cache ", "are free")
    assert "cuMemcpyHtoD" not in result.calls


def test_a_file_that_shrinks_under_the_upload(reflex):
    result = reflex(before=SHRINK)
    assert result.code == MODEL_FILE
    is_one_line(result, "became shorter")


@pytest.mark.parametrize("call", ["cuMemAlloc_v2", "cuModuleLoadDataEx", "cuLaunchKernelEx", "cuStreamSynchronize"])
def test_a_device_that_is_lost(reflex, call: str):
    result = reflex(fail=f"{call}:1:700:1")
    assert result.code == DEVICE
    assert result.err.count("\n") == 1 and "this process can no longer use the device" in result.err, result.err
    assert result.violations == ""
