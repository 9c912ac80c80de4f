"""The CUDA driver through ctypes: one table of prototypes, one way to check a result.

`Driver` resolves a function when it is first used; `driver.cuInit(0)` returns the driver's result code, and
`driver.check(code, "doing %s", what)` turns anything but success into a typed error that names the CUDA error, what was
attempted and what helps. Nothing here knows about devices, memory or kernels: device.py does.
"""

import ctypes
import os

from reflex_ipc.errors import DeviceError, OutOfMemoryError

TYPE_CHECKING = False  # typing costs milliseconds before the driver is even asked to start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

LIBRARY = "libcuda.so.1"


class NoDeviceError(DeviceError):
    """No usable device exists here: no driver, no device, or one that this package has no kernels for.

    It is what `--backend auto` falls back to the CPU on; every other `DeviceError` is a fault of a device that exists.
    """


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig: what cuLaunchKernelEx needs besides the parameters."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an id, and a 64-byte value of which we write at most three words."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_uint),
        ("value", ctypes.c_uint * 16),
    )


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp: physical memory of one device, not shared with other processes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc: who may do what with mapped memory."""

    _fields_ = (
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("access", ctypes.c_int),
    )


_KINDS: "dict[str, type[ctypes._SimpleCData[Any]]]" = {
    "i": ctypes.c_int,
    "u": ctypes.c_uint,
    "z": ctypes.c_size_t,
    "d": ctypes.c_uint64,  # an address on the device, or a 64-bit flag word
    "p": ctypes.c_void_p,  # a handle, or a pointer to host memory
    "s": ctypes.c_char_p,
}

# One letter of _KINDS an argument; the names are the exported symbols. Every function returns a CUresult.
PROTOTYPES = {
    "cuInit": "u",
    "cuDriverGetVersion": "p",
    "cuGetErrorName": "ip",
    "cuGetErrorString": "ip",
    "cuDeviceGetCount": "p",
    "cuDeviceGet": "pi",
    "cuDeviceGetName": "pii",
    "cuDeviceGetAttribute": "pii",
    "cuDeviceGetPCIBusId": "pii",
    "cuDeviceTotalMem_v2": "pi",
    "cuDevicePrimaryCtxRetain": "pi",
    "cuDevicePrimaryCtxRelease_v2": "i",
    "cuCtxSetCurrent": "p",
    "cuCtxSynchronize": "",
    "cuMemGetInfo_v2": "pp",
    "cuMemAlloc_v2": "pz",
    "cuMemFree_v2": "d",
    "cuMemHostAlloc": "pzu",
    "cuMemFreeHost": "p",
    "cuMemHostGetDevicePointer_v2": "ppu",
    "cuMemHostRegister_v2": "pzu",
    "cuMemHostUnregister": "p",
    "cuMemcpyHtoDAsync_v2": "dpzp",
    "cuMemcpyDtoHAsync_v2": "pdzp",
    "cuMemcpyDtoDAsync_v2": "ddzp",
    "cuMemsetD8Async": "duzp",
    "cuMemAddressReserve": "pzzdd",
    "cuMemAddressFree": "dz",
    "cuMemGetAllocationGranularity": "ppi",
    "cuMemCreate": "pzpd",
    "cuMemRelease": "d",
    "cuMemMap": "dzzdd",
    "cuMemUnmap": "dz",
    "cuMemSetAccess": "dzpz",
    "cuStreamCreate": "pu",
    "cuStreamDestroy_v2": "p",
    "cuStreamSynchronize": "p",
    "cuStreamWaitEvent": "ppu",
    "cuStreamBeginCapture_v2": "pi",
    "cuStreamEndCapture": "pp",
    "cuEventCreate": "pu",
    "cuEventDestroy_v2": "p",
    "cuEventRecord": "pp",
    "cuEventQuery": "p",
    "cuEventSynchronize": "p",
    "cuEventElapsedTime": "ppp",
    "cuModuleLoadDataEx": "ppupp",
    "cuModuleUnload": "p",
    "cuModuleGetFunction": "pps",
    "cuFuncGetParamInfo": "pzpp",
    "cuFuncGetAttribute": "pip",
    "cuFuncSetAttribute": "pii",
    "cuLaunchKernelEx": "pppp",
    "cuGraphInstantiateWithFlags": "ppd",
    "cuGraphLaunch": "pp",
    "cuGraphDestroy": "p",
    "cuGraphExecDestroy": "p",
}

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NO_DEVICE = 100
DEVICE_UNAVAILABLE = 46
NOT_READY = 600
NOT_SUPPORTED = 801

_LOST = "this process can no longer use the device: run it again; `dmesg` shows an Xid line if the hardware failed"
_REINSTALL = "the driver's parts do not fit together: reboot, or reinstall the NVIDIA driver"
_REBUILD = "install the package with kernels built for this device (REFLEX_CUDA=native), or update the NVIDIA driver"

# What helps, by the name of the error. An error that is not here is shown with its name and the driver's own words.
REMEDIES = {
    "CUDA_ERROR_STUB_LIBRARY": "libcuda.so.1 is the toolkit's stub: take its directory out of LD_LIBRARY_PATH",
    "CUDA_ERROR_DEVICE_UNAVAILABLE": "another process has the device, or its compute mode forbids a context: "
    "`nvidia-smi -q -d COMPUTE` shows the mode, `nvidia-smi -c DEFAULT` as root lifts it",
    "CUDA_ERROR_DEVICE_NOT_LICENSED": "the virtual GPU has no licence: see `nvidia-smi -q`",
    "CUDA_ERROR_ECC_UNCORRECTABLE": _LOST,
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": _LOST,
    "CUDA_ERROR_CONTAINED": _LOST,
    "CUDA_ERROR_ILLEGAL_ADDRESS": _LOST,
    "CUDA_ERROR_LAUNCH_TIMEOUT": _LOST,
    "CUDA_ERROR_ASSERT": _LOST,
    "CUDA_ERROR_HARDWARE_STACK_ERROR": _LOST,
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": _LOST,
    "CUDA_ERROR_MISALIGNED_ADDRESS": _LOST,
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": _LOST,
    "CUDA_ERROR_INVALID_PC": _LOST,
    "CUDA_ERROR_LAUNCH_FAILED": _LOST,
    "CUDA_ERROR_EXTERNAL_DEVICE": _LOST,
    "CUDA_ERROR_NO_BINARY_FOR_GPU": _REBUILD,
    "CUDA_ERROR_INVALID_IMAGE": _REBUILD,
    "CUDA_ERROR_INVALID_PTX": _REBUILD,
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": _REBUILD,
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND": "libnvidia-ptxjitcompiler is missing: install the whole NVIDIA driver",
    "CUDA_ERROR_JIT_COMPILATION_DISABLED": "unset CUDA_DISABLE_PTX_JIT, or install with REFLEX_CUDA=native",
    "CUDA_ERROR_OPERATING_SYSTEM": "are /dev/nvidia* there, and may you open them?",
    "CUDA_ERROR_NOT_PERMITTED": "the operation is not permitted for this user or in this container",
    "CUDA_ERROR_SYSTEM_NOT_READY": "the driver is not ready: on NVSwitch machines, start nvidia-fabricmanager",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": _REINSTALL,
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "take the CUDA compatibility package out of LD_LIBRARY_PATH",
    "CUDA_ERROR_MPS_CONNECTION_FAILED": "start nvidia-cuda-mps-control, or unset CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_ERROR_MPS_SERVER_NOT_READY": "the MPS server is starting or recovering: try again",
    "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED": "too many processes use MPS: end one",
    "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED": "too many processes use MPS: end one",
    "CUDA_ERROR_MPS_CLIENT_TERMINATED": _LOST,
    "CUDA_ERROR_UNKNOWN": "is the kernel module nvidia-uvm loaded (`nvidia-modprobe -u`)? `dmesg` may say more",
}

OPTIONAL = {"cuFuncGetParamInfo"}
"""Functions that a driver may lack."""


class Driver:
    """libcuda: every function of `PROTOTYPES` as an attribute that returns the driver's result code.

    Raises `NoDeviceError` when the library cannot be loaded, or lacks a function because the driver is too old.
    """

    def __init__(self, library: str = LIBRARY) -> None:
        self.path = library
        try:
            self.library = ctypes.CDLL(library)
        except OSError as error:
            raise NoDeviceError(
                f"no NVIDIA driver: {error}; install one that supports CUDA 13 (580 or newer), or use --backend cpu"
            ) from None

    def __getattr__(self, name: str) -> "Callable[..., int]":
        kinds = PROTOTYPES.get(name)
        if kinds is None:
            raise AttributeError(f"{name} is not in the table of prototypes")
        try:
            function = self.library[name]
        except AttributeError:
            raise NoDeviceError(
                f"the NVIDIA driver is too old: it has no {name}; install 580 or newer, or use --backend cpu"
            ) from None
        function.argtypes = [_KINDS[kind] for kind in kinds]
        function.restype = ctypes.c_int
        setattr(self, name, function)
        return function

    def untyped(self, name: str) -> "Callable[..., int]":
        """The function without argument types: it takes ctypes objects as they are, at half the cost of a call."""
        function: Callable[..., int] = self.library[name]
        return function

    def has(self, name: str) -> bool:
        """Whether this driver exports the function: for what newer drivers add and older ones can do without."""
        return hasattr(self.library, name)

    def check(self, code: int, attempt: str, *values: object) -> None:
        """Raise a typed error unless `code` is success; `attempt % values` says what was being done."""
        if code:
            self.fail(code, attempt % values)

    def fail(self, code: int, attempt: str) -> "NoReturn":
        """Raise `OutOfMemoryError` or `DeviceError` for a result code."""
        name, words = self.describe(code)
        remedy = REMEDIES.get(name)
        message = f"{attempt} failed: {name} ({words})" + (f"; {remedy}" if remedy else "")
        if code == OUT_OF_MEMORY:
            raise OutOfMemoryError(message + self._memory_left())
        raise DeviceError(message)

    def describe(self, code: int) -> tuple[str, str]:
        """The name of a result code and the driver's sentence about it."""
        texts = []
        for function in (self.cuGetErrorName, self.cuGetErrorString):
            text = ctypes.c_char_p()
            function(code, ctypes.byref(text))
            texts.append((text.value or b"").decode("utf-8", "replace"))
        return texts[0] or f"CUDA error {code}", texts[1] or "unknown to this driver"

    def _memory_left(self) -> str:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        if self.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)):
            return ""
        return f"; the device has {gib(free.value)} free of {gib(total.value)}"

    def version(self) -> tuple[int, int]:
        """The CUDA version the driver supports, (13, 0) for a 580 driver."""
        version = ctypes.c_int()
        self.check(self.cuDriverGetVersion(ctypes.byref(version)), "asking for the driver's version")
        return version.value // 1000, version.value % 1000 // 10

    def start(self) -> int:
        """Initialise the driver and return how many devices it shows. 100 ms the first time in a process.

        Raises `NoDeviceError` when there is none, or the driver does not start.
        """
        # A context with one connection costs half of one with the default eight, and nothing here needs more. The
        # driver reads the real environment once, in cuInit; os.environ writes through to it.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        code = self.cuInit(0)
        count = ctypes.c_int()
        if not code:
            self.check(self.cuDeviceGetCount(ctypes.byref(count)), "counting the devices")
        if code == NO_DEVICE or not (code or count.value):
            raise NoDeviceError(f"the NVIDIA driver shows no device: {_why_no_device()}")
        if code == OUT_OF_MEMORY:
            self.fail(code, "starting the NVIDIA driver")
        if code:
            name, words = self.describe(code)
            remedy = REMEDIES.get(name, "`nvidia-smi` may say more, or use --backend cpu")
            raise NoDeviceError(f"starting the NVIDIA driver failed: {name} ({words}); {remedy}")
        return count.value


def _why_no_device() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES is {visible!r}; unset it, or name a device that `nvidia-smi -L` lists"
    return "`nvidia-smi -L` lists what the machine has; in a container, pass the device through; or use --backend cpu"


def gib(size: int) -> str:
    """A size for people: 1.50 GiB, 12.0 MiB, 640 bytes."""
    if size >= 1 << 30:
        return f"{size / (1 << 30):.2f} GiB"
    if size >= 1 << 20:
        return f"{size / (1 << 20):.1f} MiB"
    return f"{size} bytes"
