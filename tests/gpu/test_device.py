"""The driver layer on a device: what the fake driver cannot show."""

import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from reflex_ipc.cuda import native
from reflex_ipc.cuda.copiers import MappedCopier
from reflex_ipc.cuda.device import Device
from reflex_ipc.cuda.launch import Kernels
from reflex_ipc.cuda.steps import log_probabilities, score_bytes
from reflex_ipc.cuda.upload import Upload
from reflex_ipc.errors import DeviceError, ModelFileError, OutOfMemoryError

ROOT = Path(__file__).resolve().parents[2]


def test_arguments_of_every_width_arrive(device: Device, kernels: Kernels):
    stream, out = device.stream(), device.allocate(64, "out")
    five = struct.pack("<5i", -7, 1, 2, 3, 1 << 30)
    launch = kernels.function("smoke_arguments").prepare(
        (1, 1, 1), (1, 1, 1), [-3, 65535, -(1 << 31), -(1 << 63), -2.5, 1e300, five, out.address], stream
    )
    launch()
    expected = (-3, 65535, -(1 << 31), -(1 << 63), *struct.unpack("<iq", struct.pack("<fd", -2.5, 1e300)), -7, 1 << 30)
    assert struct.unpack("<8q", stream.read(out.address, 64)) == expected
    out.close()


@pytest.mark.parametrize(("name", "code", "a"), [("smoke_axpy_f32", "f", 0.5), ("smoke_axpy_i32", "i", -3)])
def test_axpy(device: Device, kernels: Kernels, name: str, code: str, a: float):
    n = 100_003
    rng = random.Random(0)
    x, y = ([rng.randrange(-1000, 1000) for _ in range(n)] for _ in range(2))
    stream = device.stream()
    arena = device.arena(1 << 20, "vectors")
    at_x, at_y = arena.take(4 * n, "x"), arena.take(4 * n, "y")
    stream.to_device(at_x, struct.pack(f"<{n}{code}", *x))
    stream.to_device(at_y, struct.pack(f"<{n}{code}", *y))
    kernels.function(name).prepare((64, 1, 1), (256, 1, 1), [n, a, at_x, at_y], stream)()
    assert list(struct.unpack(f"<{n}{code}", stream.read(at_y, 4 * n))) == [
        a * p + q for p, q in zip(x, y, strict=True)
    ]
    arena.close()


def test_every_kernel_loads_and_takes_what_the_manifest_says(kernels: Kernels):
    for name in kernels.names():
        kernels.function(name)


def test_a_graph_replays(device: Device, kernels: Kernels):
    stream, memory = device.stream(), device.allocate(8, "two integers")
    stream.to_device(memory.address, struct.pack("<2i", 1, 0))
    launch = kernels.function("smoke_axpy_i32").prepare(
        (1, 1, 1), (32, 1, 1), [1, 1, memory.address, memory.address + 4], stream
    )
    with stream.capture() as capture:
        launch()
        launch()
    ready = capture.graph.instantiate()
    ready.launch(stream)
    assert struct.unpack("<2i", stream.read(memory.address, 8)) == (1, 2)
    launch.set(1, 10)  # what was recorded stays as it was
    ready.launch(stream)
    assert struct.unpack("<2i", stream.read(memory.address, 8)) == (1, 4)


def test_dependent_and_cluster_launches(device: Device, kernels: Kernels):
    if device.capability < (9, 0):
        pytest.skip("needs compute capability 9.0")
    stream, memory = device.stream(), device.allocate(8, "two integers")
    stream.to_device(memory.address, struct.pack("<2i", 1, 0))
    kernels.function("smoke_axpy_i32").prepare(
        (2, 1, 1), (32, 1, 1), [1, 1, memory.address, memory.address + 4], stream, dependent=True, cluster=(2, 1, 1)
    )()
    assert struct.unpack("<2i", stream.read(memory.address, 8)) == (1, 1)


def test_growing_memory_keeps_its_content(device: Device):
    buffer, stream = device.growing(8 << 30, "a cache"), device.stream()
    assert buffer.on_demand
    before = device.memory()[0]
    buffer.ensure(5 << 20, 6 << 20)
    stream.fill(buffer.address + (5 << 20), 7, 1 << 20)
    buffer.ensure(0, 64 << 20)
    stream.fill(buffer.address, 1, 5 << 20)
    assert set(stream.read(buffer.address + (5 << 20), 1 << 20)) == {7}
    assert before - device.memory()[0] < 128 << 20
    buffer.close()
    assert abs(before - device.memory()[0]) < 16 << 20


def test_pinned_memory_is_written_by_a_kernel(device: Device, kernels: Kernels):
    mailbox, stream = device.pinned(64, "mailbox"), device.stream()
    words = mailbox.view.cast("i")
    words[0] = 21
    kernels.function("smoke_axpy_i32").prepare(
        (1, 1, 1), (1, 1, 1), [1, 2, mailbox.device_address, mailbox.device_address + 4], stream
    )()
    deadline = time.monotonic() + 5
    while words[1] != 42:  # seen without asking the driver
        assert time.monotonic() < deadline
    words.release()
    mailbox.close()


@pytest.mark.parametrize("n_rows", [1, 64])
def test_log_probabilities_of_a_large_vocabulary(device: Device, kernels: Kernels, n_rows: int):
    """More parts than a model of the fixtures has, against float64; fetched, and left with the host."""
    n_vocab, random = 151_936, np.random.default_rng(n_rows)
    logits = random.normal(0, 4, (n_rows, n_vocab)).astype(np.float32)
    logits[:, n_vocab // 2 :] += 3
    targets = [random.integers(0, n_vocab, 5).tolist() for _ in range(n_rows)]
    stream, memory = device.stream(), device.allocate(logits.nbytes, "logits")
    room = device.allocate(score_bytes(n_rows, 5 * n_rows, n_vocab), "room")
    answers = device.pinned(4 * 6 * n_rows, "answers")
    stream.to_device(memory.address, logits.tobytes())
    wide = logits.astype(np.float64)
    peak = wide.max(axis=1, keepdims=True)
    log_sums = peak + np.log(np.exp(wide - peak).sum(axis=1, keepdims=True))
    wanted = wide - log_sums
    where = kernels, stream, memory.address, n_vocab, targets, room.address
    found, sums = log_probabilities(*where)
    for row, tokens, values in zip(wanted, targets, found, strict=True):
        assert np.abs(row[tokens] - values).max() <= 1e-5
    assert np.abs(log_sums[:, 0] - sums).max() <= 1e-5
    assert log_probabilities(*where, answers) == (found, sums)
    for each in (answers, room, memory):
        each.close()


def test_memory_that_does_not_exist(device: Device):
    with pytest.raises(OutOfMemoryError, match=r"allocating 1048576.00 GiB for a dream failed.*free of"):
        device.allocate(1 << 50, "a dream")


@pytest.mark.parametrize("cores", [16, 4, 1])
def test_upload(device: Device, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(MappedCopier, "chunk", 16 << 20)
    size = (96 << 20) + 4567
    data = random.Random(cores).randbytes(1 << 20) * 97
    path = tmp_path / "model"
    path.write_bytes(data[:size])
    fd = os.open(path, os.O_RDONLY)
    memory, stream = device.allocate(size, "weights"), device.stream()
    upload = Upload(size, cores=cores)
    step = 3 << 20
    groups = [(i, [(fd, at, min(step, size - at), at)]) for i, at in enumerate(range(0, size, step))]
    upload.order(groups)
    upload.start(device, memory.address)
    for index, [(_, offset, length, place)] in groups:
        upload.wait_group(stream, index)
        assert stream.read(memory.address + place, length) == data[offset : offset + length]
    upload.join()
    way = "mapped" if cores == 1 or native.load() is None else "native"
    assert upload.timings["way"] == way and upload.queued == size
    upload.close()
    os.truncate(path, size // 2)
    upload = Upload(size, cores=cores)
    upload.order(groups)
    upload.start(device, memory.address)
    with pytest.raises(ModelFileError, match="became shorter"):
        upload.join()
    upload.close()
    memory.close()
    os.close(fd)


@pytest.mark.parametrize("cores", [16, 1])
def test_a_file_that_cannot_be_read(device: Device, cores: int, tmp_path: Path):
    """What can be opened and not read: a directory."""
    directory = os.open(tmp_path, os.O_RDONLY)
    memory = device.allocate(1 << 20, "weights")
    upload = Upload(1 << 20, cores=cores)
    upload.order([(0, [(directory, 0, 1 << 20, 0)])])
    upload.start(device, memory.address)
    with pytest.raises(ModelFileError, match=r"reading bytes .* failed: Is a directory"):
        upload.join()
    upload.close()
    memory.close()
    os.close(directory)


PROGRAM = """\
import sys, time
from reflex_ipc.cuda.device import start_driver
from reflex_ipc.cuda.launch import Kernels
with start_driver(0).wait() as device:
    stream, memory = device.stream(), device.allocate(64, "x")
    axpy = Kernels(device).function("smoke_axpy_i32")
    axpy.prepare((1, 1, 1), (1, 1, 1), [1, 1, memory.address, memory.address + 4], stream)()
    stream.synchronize()
    print(open("/proc/self/maps").read())
    {last}
"""


def run(last: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(last=last)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | env,
    )


def test_nothing_of_the_toolkit_is_loaded(kernels: Kernels):
    result = run("pass")
    assert result.returncode == 0, result.stderr
    assert "libcuda.so" in result.stdout
    for library in ("cudart", "nvrtc", "cublas", "nvptxcompiler"):
        assert library not in result.stdout


def test_two_hundred_openings_leave_nothing(device: Device):
    before = device.memory()[0]
    for _ in range(200):
        with Device(0) as other:
            other.arena(16 << 20, "weights")
            other.growing(1 << 30, "cache").ensure(0, 4 << 20)
            other.stream()
            other.event()
    device.make_current()
    assert abs(before - device.memory()[0]) < 16 << 20


def test_a_lost_device_is_said_so_and_ends_in_order(kernels: Kernels):
    """An address that is none loses the context, so in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(last="pass").replace("memory.address + 4", "8")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 1
    assert "DeviceError" in result.stderr and "this process can no longer use the device" in result.stderr


def test_hidden_devices_are_said_so(device: Device):
    result = run("pass", CUDA_VISIBLE_DEVICES="")
    assert "CUDA_VISIBLE_DEVICES is ''" in result.stderr


def test_killed_at_any_moment_leaves_nothing(device: Device, kernels: Kernels):
    before = device.memory()[0]
    for delay in (0.05, 0.1, 0.2, 0.3, 0.5, 0.8):
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(last="time.sleep(60)")], cwd=ROOT, stdout=subprocess.DEVNULL
        )
        time.sleep(delay)
        process.kill()
        process.wait()
    deadline = time.monotonic() + 10
    while abs(before - device.memory()[0]) > 16 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_launch_with_a_wrong_shape_is_refused(device: Device, kernels: Kernels):
    with pytest.raises(DeviceError, match="launching smoke_axpy_i32 failed: CUDA_ERROR_INVALID_VALUE"):
        kernels.function("smoke_axpy_i32").prepare((1, 1, 1), (4096, 1, 1), [0, 0, 0, 0], device.stream())()
