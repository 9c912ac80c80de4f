"""The driver layer against a fake driver: how it starts, how results become typed errors, and that whatever fails
leaves nothing behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakecuda import Fake, library

from reflex_ipc.cuda import driver
from reflex_ipc.cuda.device import Device, capabilities, start_driver
from reflex_ipc.cuda.driver import Driver, NoDeviceError
from reflex_ipc.cuda.launch import Kernels
from reflex_ipc.errors import DeviceError, OutOfMemoryError

pytest_plugins = ["fakecuda.fixtures"]


def test_the_fake_has_every_function(fake: Fake):
    assert [name for name in driver.PROTOTYPES if not fake.cu.has(name)] == []


def test_a_function_that_is_not_declared(fake: Fake):
    with pytest.raises(AttributeError, match="cuMagic"):
        fake.cu.cuMagic()


def test_no_driver(tmp_path: Path):
    with pytest.raises(NoDeviceError, match=r"no NVIDIA driver: .*nowhere.so.*--backend cpu"):
        Driver(str(tmp_path / "nowhere.so"))


def test_a_driver_without_a_function_is_too_old():
    with pytest.raises(NoDeviceError, match="too old: it has no cuLaunchKernelEx; install 580"):
        Driver("libc.so.6").cuLaunchKernelEx()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (100, "shows no device"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH .*reboot, or reinstall"),
        (802, "nvidia-fabricmanager"),
        (999, "nvidia-modprobe"),
        (12345, "CUDA error 12345"),
    ],
)
def test_a_driver_that_does_not_start(fake: Fake, code: int, words: str):
    fake.fail("cuInit", code=code)
    with pytest.raises(NoDeviceError, match=words):
        Device(0, fake.cu)


def test_hidden_devices(fake: Fake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NoDeviceError, match="CUDA_VISIBLE_DEVICES is ''; unset it"):
        Device(0, fake.cu)


def test_no_such_device(fake: Fake):
    fake.set(devices=2)
    with pytest.raises(DeviceError, match="no device 2: --device takes one of 0: Fake 0, 1: Fake 1") as caught:
        Device(2, fake.cu)
    assert not isinstance(caught.value, NoDeviceError)
    with pytest.raises(DeviceError, match="no device -1"):
        Device(-1, fake.cu)


def test_a_device_that_is_too_old(fake: Fake):
    fake.set(major=7, minor=0)
    with pytest.raises(NoDeviceError, match=r"Fake 0, has compute capability 7.0; the kernels need 7.5"):
        Device(0, fake.cu)


@pytest.mark.parametrize(("mode", "words"), [(3, "exclusive process"), (2, "prohibited"), (0, "default")])
def test_a_device_that_is_taken(fake: Fake, mode: int, words: str):
    fake.set(compute_mode=mode)
    fake.fail("cuDevicePrimaryCtxRetain", code=46)
    with pytest.raises(
        DeviceError, match=f"compute mode is {words}, failed: CUDA_ERROR_DEVICE_UNAVAILABLE.*nvidia-smi -c"
    ):
        Device(0, fake.cu)


@pytest.mark.parametrize(("given", "expected"), [(None, "1"), ("4", "4")])
def test_one_connection_unless_the_user_says_otherwise(given: str | None, expected: str, tmp_path: Path):
    # The C library's environment is what counts, and only a fresh process starts without the variable.
    program = f"from reflex_ipc.cuda.driver import Driver; Driver({str(library())!r}).start()"
    env = {"PATH": os.environ["PATH"], "FAKECUDA_REPORT": str(tmp_path / "report")}
    if given:
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = given
    subprocess.run([sys.executable, "-c", program], env=env, check=True, cwd=Path(__file__).parent.parent)
    assert f"cuInit 0 connections {expected}\n" in (tmp_path / "report").read_text()


def test_starting_returns_at_once_and_waits_later(fake: Fake):
    fake.set(init_ms=100, context_ms=50)
    began = time.monotonic()
    opening = start_driver(0, fake.path)
    assert time.monotonic() - began < 0.05
    with opening.wait() as device:
        assert time.monotonic() - began >= 0.15
        assert device.capability == (9, 0)
        assert device.times["begin"] + 0.1 <= device.times["driver"] <= device.times["context"] - 0.05
        device.memory()  # fails unless the context is current in this thread too
        assert opening.wait() is device


def test_what_went_wrong_in_the_thread_is_raised_by_wait(fake: Fake):
    fake.set(devices=0)
    opening = start_driver(0, fake.path)
    for _ in range(2):
        with pytest.raises(NoDeviceError, match="shows no device"):
            opening.wait()
    opening.close()


def test_an_opening_nobody_waited_for_closes(fake: Fake):
    start_driver(0, fake.path).close()
    assert fake.log[-1].startswith("cuDevicePrimaryCtxRelease")


def test_the_start_imports_little():
    root = str(Path(__file__).parent.parent)
    program = (
        f"import sys; sys.path.append({root!r}); before = set(sys.modules)\n"
        "import reflex_ipc.cuda.device\n"
        "print(*sorted(name for name in set(sys.modules) - before if not name.startswith('reflex_ipc')))"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) <= {
        "atexit",
        "ctypes",
        "_ctypes",
        "ctypes._endian",
        "struct",
        "_struct",
        "os",
        "posixpath",
        "genericpath",
        "stat",
        "_stat",
        "_collections_abc",
        "abc",
        "_abc",
        "os.path",
        "types",
    }


def everything(fake: Fake, lib: Path) -> None:
    """Every function of the driver layer once."""
    with start_driver(0, fake.path).wait() as device:
        _ = device.name, device.bus_id(), device.memory(), device.cu.version(), capabilities(device.cu)
        stream, event, timed_event = device.stream(), device.event(), device.event(timing=True)
        arena, cache, mailbox = (
            device.arena(4096, "scratch"),
            device.growing(8 << 20, "cache"),
            device.pinned(64, "mail"),
        )
        cache.ensure(0, 1)
        cache.ensure(0, 4 << 20)
        stream.to_device(arena.address, b"1234")
        stream.fill(arena.address, 0, 4)
        stream.within(arena.address + 4, arena.address, 4)
        stream.to_host(mailbox.address, arena.address, 4)
        event.record(stream)
        stream.wait(event)
        timed_event.record(stream)
        event.done()
        event.synchronize()
        timed_event.synchronize()
        timed_event.milliseconds_since(timed_event)
        kernels = Kernels(device, str(lib))
        scale = kernels.function("scale").prepare(
            (1, 1, 1), (1, 1, 1), [1, 1, arena.address, arena.address], stream, shared=60000
        )
        scale.function.attribute(0)
        scale()
        with stream.capture() as capture:
            scale()
        ready = capture.graph.instantiate()
        ready.launch(stream)
        stream.synchronize()
        device.synchronize()


UPLOAD_ONLY = {"cuMemHostRegister_v2", "cuMemHostUnregister", "cuDeviceTotalMem_v2"}


def test_every_call_failing_in_turn(fake: Fake, lib: Path):
    fake.c.fake_kernels(str(lib / "sm_90a" / "kernels.txt").encode())
    everything(fake, lib)
    total = fake.calls
    named = {line.split()[0] for line in fake.log}
    assert fake.violations == fake.leaks == []
    missing = set(driver.PROTOTYPES) - named - UPLOAD_ONLY - {"cuGetErrorName", "cuGetErrorString"}
    assert missing == set()
    for code in (999, 2, 700):
        for n in range(1, total + 1):
            fake.reset()
            fake.fail(n=n, code=code, lost=code == 700)
            try:
                everything(fake, lib)
            except DeviceError as error:
                assert code != 2 and "CUDA_ERROR" in str(error), error
            except OutOfMemoryError as error:
                assert code == 2 and "CUDA_ERROR_OUT_OF_MEMORY" in str(error)
            else:
                pytest.fail(f"{fake.log[n - 1]} failed and nobody said so")
            assert fake.leaks == [], (n, code, fake.log[n - 1])
            assert fake.violations == [], (n, code)


def test_an_error_of_closing_does_not_hide_the_one_before(fake: Fake):
    with pytest.raises(ZeroDivisionError), Device(0, fake.cu) as device:
        device.allocate(10, "x")
        fake.fail("cuMemFree_v2")
        raise ZeroDivisionError
    with pytest.raises(DeviceError, match="freeing x failed"), Device(0, fake.cu) as device:
        device.allocate(10, "x")
        fake.fail("cuMemFree_v2")
    device.close()


def test_two_hundred_openings_leave_nothing(fake: Fake):
    for _ in range(200):
        with Device(0, fake.cu) as device:
            device.arena(1 << 20, "weights")
            device.growing(1 << 30, "cache").ensure(0, 4 << 20)
            device.stream()
        assert fake.leaks == []
