"""Kernels, launches and graphs against a fake driver: the build a device runs, and arguments laid out as the compiler
does."""

import ctypes
import struct
import time
from pathlib import Path

import pytest
from fakecuda import Fake

from reflex_ipc.cuda.device import Device
from reflex_ipc.cuda.driver import NoDeviceError
from reflex_ipc.cuda.launch import Kernels, Parameter, choose, shipped
from reflex_ipc.errors import DeviceError

pytest_plugins = ["fakecuda.fixtures"]


def test_which_build_a_device_runs():
    targets = ["compute_80", "sm_100", "sm_120", "sm_75", "sm_80", "sm_90a"]
    for capabilities, target in (
        (((7, 5),), "sm_75"),
        (((8, 0), (8, 6), (8, 9)), "sm_80"),
        (((9, 0),), "sm_90a"),
        (((10, 0), (10, 3)), "sm_100"),
        (((12, 0), (12, 1)), "sm_120"),
    ):
        assert {choose(capability, targets) for capability in capabilities} == {target}
    assert choose((11, 0), targets) == choose((13, 0), targets) == choose((9, 1), targets) == "compute_80"
    assert choose((7, 0), targets) is choose((8, 6), ["sm_90a", "sm_89"]) is choose((9, 0), ["sm_100"]) is None
    assert choose((9, 0), targets, ptx_only=True) == "compute_80"
    assert choose((7, 5), targets, ptx_only=True) is None
    assert choose((9, 0), ["sm_90", "sm_90a"]) == "sm_90a"
    assert choose((8, 9), ["sm_80", "sm_89", "sm_86"]) == "sm_89"


def test_modules_are_loaded_when_first_named(device: Device, fake: Fake, lib: Path):
    kernels = Kernels(device, str(lib))
    assert kernels.target == "sm_90a" and not kernels.is_ptx and kernels.toolkit == "13.0.88"
    assert shipped(str(lib)) == ["compute_80", "sm_80", "sm_90a"]
    assert kernels.names() == ["scale", "everything", "nothing"]
    assert not any(line.startswith("cuModule") for line in fake.log)
    scale = kernels.function("scale")
    assert kernels.function("scale") is scale
    kernels.function("everything")
    kernels.function("nothing")
    assert [line for line in fake.log if line.startswith("cuModuleLoad")] == ["cuModuleLoadDataEx cubin"] * 2
    assert [str(p) for p in scale.parameters] == ["u32@0", "f32@4", "u64@8", "u64@16"]


def test_ptx_is_said_aloud(fake: Fake, lib: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    fake.c.fake_kernels(str(lib / "compute_80" / "kernels.txt").encode())
    fake.set(major=13)
    with Device(0, fake.cu) as device:
        kernels = Kernels(device, str(lib))
        assert kernels.is_ptx
        kernels.function("scale")
        assert "cuModuleLoadDataEx ptx" in fake.log
    err = capsys.readouterr().err
    assert "no kernels built for compute capability 13.0: the driver compiles PTX (compute_80)" in err
    fake.set(major=9)
    monkeypatch.setenv("REFLEX_FORCE_PTX", "1")
    with Device(0, fake.cu) as device:
        assert Kernels(device, str(lib)).is_ptx
    assert capsys.readouterr().err == "reflex: REFLEX_FORCE_PTX is set: the driver compiles PTX (compute_80)\n"


def test_a_package_without_kernels(device: Device, fake: Fake, lib: Path, tmp_path: Path):
    """Which is not that there is no device: nothing falls back to the CPU for it."""
    with pytest.raises(DeviceError, match="installed without kernels; install it with REFLEX_CUDA=native") as caught:
        Kernels(device, str(tmp_path / "missing"))
    assert not isinstance(caught.value, NoDeviceError)
    for target in ("sm_90a", "compute_80"):
        (lib / target / "kernels.txt").unlink()
    with pytest.raises(
        DeviceError, match=r"compute capability 9.0, and this package has kernels for sm_80 only"
    ) as caught:
        Kernels(device, str(lib))
    assert not isinstance(caught.value, NoDeviceError)


def test_an_incomplete_package(device: Device, lib: Path):
    kernels = Kernels(device, str(lib))
    with pytest.raises(DeviceError, match="kernels for sm_90a have no 'magic'"):
        kernels.function("magic")
    (lib / "sm_90a" / "scale.cubin").unlink()
    with pytest.raises(DeviceError, match=r"scale.cubin: No such file or directory: the package is incomplete"):
        kernels.function("scale")


def test_a_module_the_driver_refuses(device: Device, fake: Fake, lib: Path):
    fake.fail("cuModuleLoadDataEx", code=222)
    words = "built with CUDA 13.0.88, into a driver that supports CUDA 13.0 failed: CUDA_ERROR_UNSUPPORTED_PTX_VERSION"
    with pytest.raises(DeviceError, match=rf"scale.cubin, {words}.*REFLEX_CUDA=native"):
        Kernels(device, str(lib)).function("scale")


@pytest.mark.parametrize("line", ["u32@0 f32@4 u64@8", "u32@0 f32@4 u64@8 u64@16 u32@24", "u32@0 f64@8 u64@16 u64@24"])
def test_a_manifest_that_disagrees_with_the_module(device: Device, lib: Path, line: str):
    (lib / "sm_90a" / "kernels.txt").write_text(f"13.0.88\nscale scale.cubin {line}\n")
    with pytest.raises(
        DeviceError, match=r"scale in .*scale.cubin takes parameters of \[4, 4, 8, 8\] bytes.*build the kernels again"
    ):
        Kernels(device, str(lib)).function("scale")


def arguments(launch) -> list[bytes]:
    """The bytes the driver reads through the pointers of a launch."""
    return [ctypes.string_at(p, q.size) for p, q in zip(launch._pointers, launch.function.parameters, strict=True)]


def test_arguments_are_packed_by_type(device: Device, lib: Path):
    stream = device.stream()
    function = Kernels(device, str(lib)).function("everything")
    memory = device.allocate(8, "out")
    launch = function.prepare(
        (1, 1, 1), (1, 1, 1), [-1, 65535, -2, 1 << 39, 1, 0.1, bytes(range(20)), b"\0<", memory.address], stream
    )
    assert arguments(launch) == [
        b"\xff", b"\xff\xff", struct.pack("<i", -2), struct.pack("<q", 1 << 39), struct.pack("<f", 1.0),
        struct.pack("<d", 0.1), bytes(range(20)), b"\0<", struct.pack("<Q", memory.address),
    ]  # fmt: skip
    launch()
    launch.set(2, 4294967295)
    launch.set(4, -0.5)
    assert arguments(launch)[2] == b"\xff" * 4 and arguments(launch)[4] == struct.pack("<f", -0.5)
    for index, value in (
        (0, 256),
        (0, -129),
        (2, 1.5),
        (2, 1 << 32),
        (3, -(1 << 63) - 1),
        (4, 1e39),
        (6, bytes(19)),
        (6, 7),
        (2, b"1234"),
    ):
        with pytest.raises(DeviceError, match=f"everything: parameter {index} .* does not take"):
            launch.set(index, value)
    with pytest.raises(DeviceError, match="everything takes 9 arguments, not 1"):
        function.prepare((1, 1, 1), (1, 1, 1), [1], stream)


def test_a_launch_reaches_the_driver_with_its_shape(device: Device, fake: Fake, lib: Path):
    kernels, stream, memory = Kernels(device, str(lib)), device.stream(), device.allocate(1024, "x")
    launch = kernels.function("scale").prepare(
        (3, 2, 1), (64, 2, 1), [1, 2.0, memory.address, memory.address], stream,
        shared=100 << 10, dependent=True, cluster=(3, 1, 1), cooperative=True,
    )  # fmt: skip
    launch()
    assert fake.log[-1] == "cuLaunchKernelEx scale grid 3 2 1 block 64 2 1 shared 102400 attributes 3"
    assert [(a.id, a.value[:3]) for a in launch._attributes] == [(6, [1, 0, 0]), (4, [3, 1, 1]), (2, [1, 0, 0])]
    launch.grid = (7, 1, 1)
    launch.block = (32, 1, 1)
    launch.shared = 0
    launch()
    assert fake.log[-1] == "cuLaunchKernelEx scale grid 7 1 1 block 32 1 1 shared 0 attributes 3"
    kernels.function("nothing").prepare((1, 1, 1), (1, 1, 1), [], stream)()
    assert "cuFuncSetAttribute 8 102400" in fake.log
    with pytest.raises(DeviceError, match="setting attribute 8 of scale to 262144 failed"):
        launch.shared = 256 << 10
    launch.grid = (0, 1, 1)
    with pytest.raises(DeviceError, match="launching scale failed: CUDA_ERROR_INVALID_VALUE"):
        launch()
    launch.grid = (1, 1, 1)
    memory.close()
    with pytest.raises(DeviceError, match=r"launching scale failed: CUDA_ERROR_ILLEGAL_ADDRESS.*run it again"):
        launch()
    assert len(fake.violations) == 3
    fake.c.fake_violations_forget()


def test_a_launch_costs_little_python(device: Device, fake: Fake, lib: Path):
    launch = Kernels(device, str(lib)).function("nothing").prepare((1, 1, 1), (1, 1, 1), [], device.stream())
    # The same call with the driver's part taken out: what is left is ours.
    nothing = ctypes.CDLL(None)["getpid"]
    launch._fire = type(launch._fire)(nothing, *launch._fire.args)
    launch._fire.func.restype = None
    best = min(timed(launch) for _ in range(5))
    assert best < 4e-6, f"{best * 1e6:.2f} us"


def timed(call, n: int = 2000) -> float:
    began = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - began) / n


def test_graphs(device: Device, fake: Fake, lib: Path):
    kernels, stream, memory = Kernels(device, str(lib)), device.stream(), device.allocate(1024, "x")
    scale = kernels.function("scale").prepare((1, 1, 1), (32, 1, 1), [1, 2.0, memory.address, memory.address], stream)
    nothing = kernels.function("nothing").prepare((1, 1, 1), (1, 1, 1), [], stream)
    with stream.capture() as capture:
        scale()
        nothing()
    with pytest.raises(DeviceError, match="starting to record"), fake_failure(fake, "cuStreamBeginCapture_v2"):
        stream.capture().__enter__()
    ready = capture.graph.instantiate()
    ready.launch(stream)
    # An error while recording ends the recording and leaves nothing behind.
    with pytest.raises(ZeroDivisionError), stream.capture() as broken:
        raise ZeroDivisionError
    with pytest.raises(DeviceError, match="before its recording ended"):
        _ = broken.graph
    stream.synchronize()


class fake_failure:
    def __init__(self, fake: Fake, name: str) -> None:
        fake.fail(name)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def test_parameters_are_read_back_from_their_text():
    parameter = Parameter("b8[128]@64")
    assert (parameter.type, parameter.offset, parameter.size) == ("b8[128]", 64, 128)
