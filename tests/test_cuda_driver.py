"""The driver layer against a fake driver: results become typed errors, what is taken is given back, launches are packed
as the compiler lays parameters out."""

import ctypes
import os
import re
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fakecuda import Fake, fake, library  # noqa: F401

from reflex_ipc.cuda import driver
from reflex_ipc.cuda.device import Device, capabilities, start_driver
from reflex_ipc.cuda.driver import Driver, NoDeviceError
from reflex_ipc.cuda.launch import Kernels, Parameter, choose, shipped
from reflex_ipc.errors import DeviceError, OutOfMemoryError, ReflexError

KERNELS = """\
13.0.88
scale scale.cubin u32@0 f32@4 u64@8 u64@16
everything scale.cubin u8@0 u16@2 u32@4 u64@8 f32@16 f64@24 b8[20]@32 b8[2]@52 u64@56
nothing empty.cubin
"""


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    """A directory like reflex_ipc/cuda/lib, with images that say no more than what they are."""
    for target in ("sm_80", "sm_90a", "compute_80"):
        directory = tmp_path / "lib" / target
        directory.mkdir(parents=True)
        ptx = target.startswith("compute")
        for name in ("scale", "empty"):
            (directory / f"{name}.{'ptx' if ptx else 'cubin'}").write_bytes(b".version 9.0\n" if ptx else b"\x7fELF....")
        (directory / "kernels.txt").write_text(KERNELS.replace("cubin", "ptx") if ptx else KERNELS)
    return tmp_path / "lib"


@pytest.fixture
def device(fake: Fake, lib: Path):  # noqa: F811
    fake.c.fake_kernels(str(lib / "sm_90a" / "kernels.txt").encode())
    with Device(0, fake.cu) as device:
        yield device


# The table


def header() -> str | None:
    """cuda.h, where the toolkit is installed."""
    import importlib.util

    places = [Path(os.environ["NVCC"]).parent.parent / "include"] if os.environ.get("NVCC") else []
    namespace = importlib.util.find_spec("nvidia")
    places += [Path(p) / "cu13" / "include" for p in (namespace.submodule_search_locations or [])] if namespace else []
    return next(((p / "cuda.h").read_text() for p in places if (p / "cuda.h").exists()), None)


def test_prototypes_are_those_of_the_header():
    text = header()
    if text is None:
        pytest.skip("no CUDA toolkit here: install it or set NVCC")
    kinds = {"CUdeviceptr": "d", "unsigned long long": "d", "cuuint64_t": "d", "CUmemGenericAllocationHandle": "d",
             "size_t": "z", "int": "i", "unsigned int": "u", "CUdevice": "i", "CUresult": "i", "unsigned char": "u"}  # fmt: skip
    handles = "CUcontext CUstream CUevent CUmodule CUfunction CUgraph CUgraphExec CUgraphNode".split()
    enums = "CUdevice_attribute CUfunction_attribute CUstreamCaptureMode CUmemAllocationGranularity_flags".split()
    kinds |= dict.fromkeys(handles, "p") | dict.fromkeys(enums, "i")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for name, ours in driver.PROTOTYPES.items():
        # A versioned symbol is declared by its plain name, which a macro renames.
        renamed = re.search(rf"#define (\w+)\s+(?:__CUDA_API_PT[DS]S?Z?\()?{name}\)?\s", text)
        declared = re.search(rf"CUresult CUDAAPI {renamed[1] if renamed else name}\(([^)]*)\)", text)
        assert declared is not None, name
        theirs = ""
        for argument in filter(None, (a.strip() for a in declared[1].split(","))):
            if argument == "void":
                continue
            base = re.sub(r"\bconst\b|\w+$", "", argument).strip()
            if "*" in argument or "[" in argument:
                theirs += "s" if re.match(r"const char \*\w", argument) else "p"
            else:
                theirs += kinds[base]
        assert ours == theirs, name


def test_structures_are_laid_out_as_the_header_says():
    text = header()
    if text is None:
        pytest.skip("no CUDA toolkit here: install it or set NVCC")
    include = Path(os.environ["NVCC"]).parent.parent / "include" if os.environ.get("NVCC") else None
    if include is None:
        import nvidia

        include = Path(next(iter(nvidia.__path__))) / "cu13" / "include"
    pairs = {
        "CUlaunchConfig": (driver.LaunchConfig, {"stream": "hStream", "attributes": "attrs", "attribute_count": "numAttrs"}),
        "CUlaunchAttribute": (driver.LaunchAttribute, {"value": "value"}),
        "CUDA_KERNEL_NODE_PARAMS": (driver.KernelNodeParams, {"grid": "gridDimX", "block": "blockDimX", "shared": "sharedMemBytes",
                                    "parameters": "kernelParams", "extra": "extra", "kernel": "kern", "context": "ctx"}),
        "CUmemAllocationProp": (driver.AllocationProperties, {"location_type": "location", "windows": "win32HandleMetaData"}),
        "CUmemAccessDesc": (driver.AccessDescription, {"location_type": "location", "access": "flags"}),
        "CUgraphExecUpdateResultInfo": (driver.GraphUpdateResult, {"node": "errorNode", "from_node": "errorFromNode"}),
    }  # fmt: skip
    lines = ["#include <cuda.h>", "#include <stddef.h>"]
    for name, (ours, fields) in pairs.items():
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(ours)}, "{name}");')
        for field, theirs in fields.items():
            offset = getattr(ours, field).offset
            lines.append(f'_Static_assert(offsetof({name}, {theirs}) == {offset}, "{name}.{theirs}");')
    constants = {"CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": Device.MULTIPROCESSORS, "CU_DEVICE_ATTRIBUTE_COMPUTE_MODE": Device.COMPUTE_MODE,
                 "CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE": Device.L2_BYTES, "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": Device.CAPABILITY_MAJOR,
                 "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": Device.CAPABILITY_MINOR,
                 "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": Device.SHARED_PER_BLOCK,
                 "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": Device.VIRTUAL_MEMORY,
                 "CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED": Device.READ_ONLY_REGISTER,
                 "CUDA_ERROR_OUT_OF_MEMORY": driver.OUT_OF_MEMORY, "CUDA_ERROR_INVALID_VALUE": driver.INVALID_VALUE, "CUDA_ERROR_NO_DEVICE": driver.NO_DEVICE,
                 "CUDA_ERROR_DEVICE_UNAVAILABLE": driver.DEVICE_UNAVAILABLE, "CUDA_ERROR_NOT_READY": driver.NOT_READY,
                 "CUDA_ERROR_NOT_SUPPORTED": driver.NOT_SUPPORTED, "CU_STREAM_NON_BLOCKING": 1, "CU_EVENT_DISABLE_TIMING": 2,
                 "CU_MEMHOSTALLOC_PORTABLE": 1, "CU_MEMHOSTALLOC_DEVICEMAP": 2, "CU_MEMHOSTREGISTER_READ_ONLY": 8,
                 "CU_STREAM_CAPTURE_MODE_THREAD_LOCAL": 1, "CU_JIT_ERROR_LOG_BUFFER": 5, "CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES": 6,
                 "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": 8, "CU_LAUNCH_ATTRIBUTE_COOPERATIVE": 2,
                 "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": 4, "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": 6,
                 "CU_MEM_ALLOCATION_TYPE_PINNED": 1, "CU_MEM_LOCATION_TYPE_DEVICE": 1, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": 3}  # fmt: skip
    lines += [f'_Static_assert({name} == {value}, "{name}");' for name, value in constants.items()]
    for remedy in driver.REMEDIES:
        lines.append(f"enum {{ has_{remedy} = {remedy} }};")
    subprocess.run(["cc", "-fsyntax-only", "-x", "c", f"-I{include}", "-"], input="\n".join(lines), text=True, check=True)


def test_the_fake_has_every_function(fake: Fake):  # noqa: F811
    assert [name for name in driver.PROTOTYPES if not fake.cu.has(name)] == []


def test_a_function_that_is_not_declared(fake: Fake):  # noqa: F811
    with pytest.raises(AttributeError, match="cuMagic"):
        fake.cu.cuMagic()


# Starting


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
def test_a_driver_that_does_not_start(fake: Fake, code: int, words: str):  # noqa: F811
    fake.fail("cuInit", code=code)
    with pytest.raises(NoDeviceError, match=words):
        Device(0, fake.cu)


def test_hidden_devices(fake: Fake, monkeypatch: pytest.MonkeyPatch):  # noqa: F811
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(NoDeviceError, match="CUDA_VISIBLE_DEVICES is ''; unset it"):
        Device(0, fake.cu)


def test_no_such_device(fake: Fake):  # noqa: F811
    fake.set(devices=2)
    with pytest.raises(DeviceError, match="no device 2: --device takes one of 0: Fake 0, 1: Fake 1") as caught:
        Device(2, fake.cu)
    assert not isinstance(caught.value, NoDeviceError)
    with pytest.raises(DeviceError, match="no device -1"):
        Device(-1, fake.cu)


def test_a_device_that_is_too_old(fake: Fake):  # noqa: F811
    fake.set(major=7, minor=0)
    with pytest.raises(NoDeviceError, match=r"Fake 0, has compute capability 7.0; the kernels need 7.5"):
        Device(0, fake.cu)


@pytest.mark.parametrize(("mode", "words"), [(3, "exclusive process"), (2, "prohibited"), (0, "default")])
def test_a_device_that_is_taken(fake: Fake, mode: int, words: str):  # noqa: F811
    fake.set(compute_mode=mode)
    fake.fail("cuDevicePrimaryCtxRetain", code=46)
    with pytest.raises(DeviceError, match=f"compute mode is {words}, failed: CUDA_ERROR_DEVICE_UNAVAILABLE.*nvidia-smi -c"):
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


def test_starting_returns_at_once_and_waits_later(fake: Fake):  # noqa: F811
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


def test_what_went_wrong_in_the_thread_is_raised_by_wait(fake: Fake):  # noqa: F811
    fake.set(devices=0)
    opening = start_driver(0, fake.path)
    for _ in range(2):
        with pytest.raises(NoDeviceError, match="shows no device"):
            opening.wait()
    opening.close()


def test_an_opening_nobody_waited_for_closes(fake: Fake):  # noqa: F811
    start_driver(0, fake.path).close()
    assert fake.log[-1].startswith("cuDevicePrimaryCtxRelease")


def test_the_start_imports_little():
    root = str(Path(__file__).parent.parent)
    program = (
        f"import sys; sys.path.append({root!r}); import reflex_ipc; before = set(sys.modules)\n"
        "import reflex_ipc.cuda.device\n"
        "print(*sorted(name for name in set(sys.modules) - before if not name.startswith('reflex_ipc')))"
    )
    command = [sys.executable, "-I", "-S", "-c", program]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) <= {"ctypes", "_ctypes", "ctypes._endian", "struct", "_struct", "os", "posixpath", "genericpath", "stat", "_stat", "_collections_abc", "abc", "_abc"}  # noqa: E501


# What the device gives out


def test_properties(device: Device, fake: Fake):  # noqa: F811
    assert device.name == "Fake 0"
    assert device.bus_id() == "0000:00:00.0"
    assert device.attribute(Device.MULTIPROCESSORS) == 132
    assert device.memory() == (1 << 30, 1 << 30)
    assert device.cu.version() == (13, 0)
    fake.set(devices=3)
    assert capabilities(device.cu) == [(9, 0)] * 3


def test_memory_that_does_not_fit_is_refused_with_the_sum(device: Device):
    device.allocate(1 << 20, "a table")
    with pytest.raises(OutOfMemoryError, match=r"allocating 2.00 GiB for the weights failed.*has 1023.0 MiB free of 1.00 GiB"):
        device.allocate(2 << 30, "the weights")


def test_memory_is_freed_once(device: Device, fake: Fake):  # noqa: F811
    memory = device.allocate(100, "a table")
    memory.close()
    memory.close()
    assert fake.log.count("cuMemFree_v2") == 1
    device.allocate(0, "nothing")


def test_arena(device: Device):
    arena = device.arena(1024, "scratch")
    first = arena.take(1, "one")
    assert arena.take(256, "two") == first + 256
    assert arena.take(4, "three", alignment=4) == first + 512
    mark = arena.used
    assert arena.take(508, "four", alignment=4) == first + 516
    with pytest.raises(OutOfMemoryError, match="five needs 1 bytes, but the 1024 bytes for scratch have 0 bytes left"):
        arena.take(1, "five")
    arena.reset(mark)
    assert arena.take(508, "again", alignment=4) == first + 516


def test_growing_buffer_backs_what_is_asked_for_and_keeps_it(device: Device, fake: Fake):  # noqa: F811
    mib = 1 << 20
    buffer = device.growing(100 * mib + 1, "the cache")
    stream = device.stream()
    assert buffer.on_demand and buffer.size == 102 * mib and buffer.backed == 0
    assert device.memory()[0] == 1 << 30
    buffer.ensure(3 * mib, 3 * mib)
    assert buffer.backed == 0
    buffer.ensure(3 * mib, 5 * mib)
    assert buffer.backed == 4 * mib
    stream.to_device(buffer.address + 3 * mib, bytes(range(256)))
    buffer.ensure(0, 7 * mib)  # around what is there
    buffer.ensure(2 * mib, 8 * mib)
    assert buffer.backed == 8 * mib
    assert stream.read(buffer.address + 3 * mib, 256) == bytes(range(256))
    stream.fill(buffer.address, 0, 8 * mib)  # across the mappings
    assert [line for line in fake.log if line.startswith("cuMemCreate")] == [
        f"cuMemCreate {size * mib}" for size in (4, 2, 2)
    ]
    with pytest.raises(OutOfMemoryError, match="lie outside"):
        buffer.ensure(0, buffer.size + 1)
    with pytest.raises(DeviceError, match="filling"):
        stream.fill(buffer.address, 0, 8 * mib + 1)
    assert fake.violations == [f"a fill of {8 * mib + 1} bytes leaves the device's memory"]
    fake.c.fake_violations_forget()
    buffer.close()


def test_growing_buffer_out_of_memory_keeps_what_it_has(device: Device):
    buffer = device.growing(2 << 30, "the cache")
    buffer.ensure(0, 1 << 20)
    with pytest.raises(OutOfMemoryError, match=r"allocating 1.50 GiB more for the cache.*free of"):
        buffer.ensure(0, 3 << 29)
    assert buffer.backed == 2 << 20
    buffer.ensure(0, 100 << 20)
    assert buffer.backed == 100 << 20


def test_growing_buffer_without_virtual_memory_is_allocated_whole(fake: Fake):  # noqa: F811
    fake.set(virtual_memory=0)
    with Device(0, fake.cu) as device:
        buffer = device.growing(10 << 20, "the cache")
        assert not buffer.on_demand and buffer.backed == 10 << 20
        buffer.ensure(0, 10 << 20)
        device.stream().fill(buffer.address, 1, 10 << 20)
        with pytest.raises(OutOfMemoryError):
            buffer.ensure(0, (10 << 20) + 1)
        with pytest.raises(OutOfMemoryError, match="for the cache"):
            device.growing(2 << 30, "the cache")


def test_pinned_memory_is_seen_from_both_sides(device: Device):
    mailbox = device.pinned(4096, "the mailbox")
    assert bytes(mailbox.view) == bytes(4096)
    stream = device.stream()
    table = device.allocate(8, "a table")
    stream.to_device(table.address, struct.pack("<2i", 7, -9))
    stream.to_host(mailbox.address + 8, table.address, 8)
    stream.synchronize()
    assert mailbox.view.cast("i")[2:4].tolist() == [7, -9]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: memoryview(bytearray(data)).cast("i")])
def test_copies_take_any_bytes(device: Device, kind):
    data = bytes(range(64))
    stream, table = device.stream(), device.allocate(128, "a table")
    stream.to_device(table.address, kind(data))
    stream.within(table.address + 64, table.address, 64)
    assert stream.read(table.address, 128) == data * 2


def test_copies_outside_are_refused(device: Device, fake: Fake):  # noqa: F811
    stream, table = device.stream(), device.allocate(16, "a table")
    with pytest.raises(DeviceError, match="copying 17 bytes to the device failed: CUDA_ERROR_INVALID_VALUE"):
        stream.to_device(table.address, bytes(17))
    with pytest.raises(DeviceError, match="copying 16 bytes from the device"):
        stream.read(table.address + 1, 16)
    assert len(fake.violations) == 2
    fake.c.fake_violations_forget()


def test_a_stream_waits_for_an_event_of_another(device: Device, fake: Fake):  # noqa: F811
    fake.set(deferred=1)
    table, one, two, event = device.allocate(4, "a table"), device.stream(), device.stream(), device.event()
    mailbox = device.pinned(4, "mail")
    assert event.done()
    mailbox.view[:] = b"good"
    device.cu.check(device.cu.cuMemcpyHtoDAsync_v2(table.address, mailbox.address, 4, one.handle), "copying")
    event.record(one)
    assert not event.done()
    two.wait(event)
    assert two.read(table.address, 4) == b"good"  # had it not waited: four bytes nobody wrote
    assert event.done()
    event.synchronize()
    late = device.event(timing=True)
    late.record(two)
    late.synchronize()
    assert late.milliseconds_since(event) == 1.5


# Kernels


def test_which_build_a_device_runs():
    targets = ["compute_80", "sm_100", "sm_120", "sm_75", "sm_80", "sm_90a"]
    assert [choose(c, targets) for c in ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))] == [
        "sm_75", "sm_80", "sm_80", "sm_80", "sm_90a", "sm_100", "sm_100", "sm_120", "sm_120",
    ]  # fmt: skip
    assert choose((11, 0), targets) == choose((13, 0), targets) == choose((9, 1), targets) == "compute_80"
    assert choose((7, 0), targets) is choose((8, 6), ["sm_90a", "sm_89"]) is choose((9, 0), ["sm_100"]) is None
    assert choose((9, 0), targets, ptx_only=True) == "compute_80"
    assert choose((7, 5), targets, ptx_only=True) is None
    assert choose((9, 0), ["sm_90", "sm_90a"]) == "sm_90a"
    assert choose((8, 9), ["sm_80", "sm_89", "sm_86"]) == "sm_89"


def test_modules_are_loaded_when_first_named(device: Device, fake: Fake, lib: Path):  # noqa: F811
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
    assert scale.blocks_per_multiprocessor(256) == 8


def test_ptx_is_said_aloud(fake: Fake, lib: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):  # noqa: F811
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


def test_a_package_without_kernels(device: Device, fake: Fake, lib: Path, tmp_path: Path):  # noqa: F811
    with pytest.raises(NoDeviceError, match="installed without kernels; install it with REFLEX_CUDA=native"):
        Kernels(device, str(tmp_path / "missing"))
    for target in ("sm_90a", "compute_80"):
        (lib / target / "kernels.txt").unlink()
    with pytest.raises(NoDeviceError, match=r"compute capability 9.0, and this package has kernels for sm_80 only"):
        Kernels(device, str(lib))


def test_an_incomplete_package(device: Device, lib: Path):
    kernels = Kernels(device, str(lib))
    with pytest.raises(DeviceError, match="kernels for sm_90a have no 'magic'"):
        kernels.function("magic")
    (lib / "sm_90a" / "scale.cubin").unlink()
    with pytest.raises(DeviceError, match=r"scale.cubin: No such file or directory: the package is incomplete"):
        kernels.function("scale")


def test_a_module_the_driver_refuses(device: Device, fake: Fake, lib: Path):  # noqa: F811
    fake.fail("cuModuleLoadDataEx", code=222)
    with pytest.raises(DeviceError, match=r"scale.cubin, built with CUDA 13.0.88, into a driver that supports CUDA 13.0 failed: "
                       r"CUDA_ERROR_UNSUPPORTED_PTX_VERSION.*REFLEX_CUDA=native"):  # fmt: skip
        Kernels(device, str(lib)).function("scale")


@pytest.mark.parametrize("line", ["u32@0 f32@4 u64@8", "u32@0 f32@4 u64@8 u64@16 u32@24", "u32@0 f64@8 u64@16 u64@24"])
def test_a_manifest_that_disagrees_with_the_module(device: Device, lib: Path, line: str):
    (lib / "sm_90a" / "kernels.txt").write_text(f"13.0.88\nscale scale.cubin {line}\n")
    with pytest.raises(DeviceError, match=r"scale in .*scale.cubin takes parameters of \[4, 4, 8, 8\] bytes.*build the kernels again"):
        Kernels(device, str(lib)).function("scale")


def arguments(launch) -> list[bytes]:
    """The bytes the driver reads through the pointers of a launch."""
    pointers = (ctypes.c_void_p * len(launch.function.parameters)).from_address(launch.pointers)
    return [ctypes.string_at(p, q.size) for p, q in zip(pointers, launch.function.parameters, strict=True)]


def test_arguments_are_packed_by_type(device: Device, lib: Path):
    stream = device.stream()
    function = Kernels(device, str(lib)).function("everything")
    memory = device.allocate(8, "out")
    launch = function.prepare((1, 1, 1), (1, 1, 1), [-1, 65535, -2, 1 << 39, 1, 0.1, bytes(range(20)), b"\0<", memory.address], stream)
    assert arguments(launch) == [
        b"\xff", b"\xff\xff", struct.pack("<i", -2), struct.pack("<q", 1 << 39), struct.pack("<f", 1.0), struct.pack("<d", 0.1),
        bytes(range(20)), b"\0<", struct.pack("<Q", memory.address),
    ]  # fmt: skip
    launch()
    launch.set(2, 4294967295)
    launch.set(4, -0.5)
    assert arguments(launch)[2] == b"\xff" * 4 and arguments(launch)[4] == struct.pack("<f", -0.5)
    for index, value in ((0, 256), (0, -129), (2, 1.5), (2, 1 << 32), (3, -(1 << 63) - 1), (4, 1e39), (6, bytes(19)), (6, 7), (2, b"1234")):
        with pytest.raises(DeviceError, match=f"everything: parameter {index} .* does not take"):
            launch.set(index, value)
    with pytest.raises(DeviceError, match="everything takes 9 arguments, not 1"):
        function.prepare((1, 1, 1), (1, 1, 1), [1], stream)


def test_a_launch_reaches_the_driver_with_its_shape(device: Device, fake: Fake, lib: Path):  # noqa: F811
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


def test_a_launch_costs_little_python(device: Device, fake: Fake, lib: Path):  # noqa: F811
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


def test_graphs(device: Device, fake: Fake, lib: Path):  # noqa: F811
    kernels, stream, memory = Kernels(device, str(lib)), device.stream(), device.allocate(1024, "x")
    scale = kernels.function("scale").prepare((1, 1, 1), (32, 1, 1), [1, 2.0, memory.address, memory.address], stream)
    nothing = kernels.function("nothing").prepare((1, 1, 1), (1, 1, 1), [], stream)
    with stream.capture() as capture:
        scale()
        node = capture.node()
        nothing()
    with pytest.raises(DeviceError, match="starting to record"), fake_failure(fake, "cuStreamBeginCapture_v2"):
        stream.capture().__enter__()
    ready = capture.graph.instantiate()
    ready.launch(stream)
    scale.grid = (5, 1, 1)
    ready.set_launch(node, scale)
    assert fake.log[-1] == "cuGraphExecKernelNodeSetParams_v2 grid 5 1 1"
    with stream.capture() as again:
        scale()
        nothing()
    ready.update(again.graph)
    with stream.capture() as other:
        nothing()
    with pytest.raises(DeviceError, match=r"updating a graph \(reason 2"):
        ready.update(other.graph)
    # An error while recording ends the recording and leaves nothing behind.
    with pytest.raises(ZeroDivisionError), stream.capture() as broken:
        raise ZeroDivisionError
    with pytest.raises(DeviceError, match="before its recording ended"):
        _ = broken.graph
    stream.synchronize()


class fake_failure:  # noqa: N801
    def __init__(self, fake: Fake, name: str) -> None:  # noqa: F811
        fake.fail(name)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


# Faults


def everything(fake: Fake, lib: Path) -> None:  # noqa: F811
    """Every function of the driver layer once."""
    with start_driver(0, fake.path).wait() as device:
        _ = device.name, device.bus_id(), device.memory(), device.cu.version(), capabilities(device.cu)
        stream, event, timed_event = device.stream(), device.event(), device.event(timing=True)
        arena, cache, mailbox = device.arena(4096, "scratch"), device.growing(8 << 20, "cache"), device.pinned(64, "mail")
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
        timed_event.milliseconds_since(event)
        kernels = Kernels(device, str(lib))
        scale = kernels.function("scale").prepare((1, 1, 1), (1, 1, 1), [1, 1, arena.address, arena.address], stream, shared=60000)
        scale.function.attribute(0)
        scale.function.blocks_per_multiprocessor(128)
        scale()
        with stream.capture() as capture:
            scale()
            node = capture.node()
        ready = capture.graph.instantiate()
        ready.launch(stream)
        ready.set_launch(node, scale)
        ready.update(capture.graph)
        stream.synchronize()
        device.synchronize()


UPLOAD_ONLY = {"cuMemHostRegister_v2", "cuMemHostUnregister", "cuDeviceTotalMem_v2"}


def test_every_call_failing_in_turn(fake: Fake, lib: Path):  # noqa: F811
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


def test_an_error_of_closing_does_not_hide_the_one_before(fake: Fake):  # noqa: F811
    with pytest.raises(ZeroDivisionError), Device(0, fake.cu) as device:
        device.allocate(10, "x")
        fake.fail("cuMemFree_v2")
        raise ZeroDivisionError
    with pytest.raises(DeviceError, match="freeing x failed"), Device(0, fake.cu) as device:
        device.allocate(10, "x")
        fake.fail("cuMemFree_v2")
    device.close()


def test_two_hundred_openings_leave_nothing(fake: Fake):  # noqa: F811
    for _ in range(200):
        with Device(0, fake.cu) as device:
            device.arena(1 << 20, "weights")
            device.growing(1 << 30, "cache").ensure(0, 4 << 20)
            device.stream()
        assert fake.leaks == []


def test_parameters_are_read_back_from_their_text():
    parameter = Parameter("b8[128]@64")
    assert (parameter.type, parameter.offset, parameter.size) == ("b8[128]", 64, 128)
    assert issubclass(NoDeviceError, DeviceError) and issubclass(DeviceError, ReflexError)
