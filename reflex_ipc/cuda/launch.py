"""Kernels: which build of them a device runs, loading one when it is first named, and launches prepared once.

    kernels = Kernels(device)
    scale = kernels.function("smoke_axpy_f32").prepare((1, 1, 1), (256, 1, 1), [n, a, x.address, y.address], stream)
    scale()                   # one call into the driver, a quarter of a microsecond of Python
    scale.set(0, other_n)     # the same launch with another argument

`lib/` holds a directory per architecture with a cubin or PTX for each source file, and `kernels.txt`, the lines of the
manifest that a start needs: `name file type@offset ...`. It is no JSON: json and its imports cost a start 5 ms.
"""

import ctypes
import os
import sys
from functools import partial
from struct import Struct
from struct import error as StructError
from time import monotonic_ns

from reflex_ipc.cuda import LIB
from reflex_ipc.cuda.driver import INVALID_VALUE, LaunchAttribute, LaunchConfig
from reflex_ipc.cuda.memory import Resource
from reflex_ipc.errors import DeviceError
from reflex_ipc.stamps import stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from reflex_ipc.cuda.device import Device, Stream

    Argument = int | float | bytes
    Shape = tuple[int, int, int]

# PTX does not say whether an integer has a sign: a negative one is packed by the second.
_PACKERS = {
    "u8": (Struct("<B"), Struct("<b")),
    "u16": (Struct("<H"), Struct("<h")),
    "u32": (Struct("<I"), Struct("<i")),
    "u64": (Struct("<Q"), Struct("<q")),
    "f32": (Struct("<f"), Struct("<f")),
    "f64": (Struct("<d"), Struct("<d")),
}

_ALWAYS_ALLOWED = 48 << 10  # bytes of dynamic shared memory that need no opt-in

# CUfunction_attribute
_MAX_DYNAMIC_SHARED = 8

# CUlaunchAttributeID
_COOPERATIVE = 2
_CLUSTER = 4
_DEPENDENT = 6


def shipped(lib: str = LIB) -> list[str]:
    """The targets this package has kernels for, "sm_80" or "compute_80" (PTX), sorted; empty without kernels."""
    try:
        names = os.listdir(lib)
    except FileNotFoundError:
        return []
    return sorted(n for n in names if os.path.exists(os.path.join(lib, n, "kernels.txt")))


def choose(capability: tuple[int, int], targets: "Sequence[str]", ptx_only: bool = False) -> str | None:
    """The target a device of this compute capability runs best, or None.

    A cubin runs on its own major version from its minor version up (so 8.6 and 8.9 run sm_80), but one for sm_90a on
    9.0 alone. PTX runs on everything from its version up, after the driver has compiled it.
    """
    cubins, ptx = [], []
    for target in targets:
        kind, _, number = target.partition("_")
        specific = number.endswith("a")
        digits = number.rstrip("a")
        version = int(digits[:-1]), int(digits[-1])
        if kind == "compute":
            if version <= capability:
                ptx.append((version, target))
        elif version[0] == capability[0] and (version == capability if specific else version <= capability):
            cubins.append((version, specific, target))
    if cubins and not ptx_only:
        return max(cubins)[-1]
    return max(ptx)[-1] if ptx else None


class Parameter:
    """One parameter of a kernel: its PTX type ("u64", "u32", "f32", "b8[128]"), offset and size in bytes."""

    __slots__ = ("offset", "size", "type")

    def __init__(self, text: str) -> None:
        self.type, _, offset = text.partition("@")
        self.offset = int(offset)
        if self.type in _PACKERS:
            self.size = _PACKERS[self.type][0].size
        else:  # an array of bytes, as structures and half floats are passed
            self.size = int(self.type[self.type.index("[") + 1 : -1])

    def __str__(self) -> str:
        return f"{self.type}@{self.offset}"


class Kernels:
    """The kernels of one device. `target` is the build it runs.

    `REFLEX_FORCE_PTX=1` takes the PTX where a cubin would do: what the tests do to trust the fallback.
    Raises `DeviceError` when the package has no kernels, or none for this device.
    """

    def __init__(self, device: "Device", lib: str = LIB) -> None:
        targets = shipped(lib)
        if not targets:
            raise DeviceError(
                "this package was installed without kernels; install it with REFLEX_CUDA=native, or use --backend cpu"
            )
        capability = ".".join(map(str, device.capability))
        is_forced = os.environ.get("REFLEX_FORCE_PTX") == "1"
        target = choose(device.capability, targets, is_forced)
        if target is None:
            raise DeviceError(
                f"device {device.index} has compute capability {capability}, and this package has kernels for "
                f"{', '.join(targets)} only; install it with REFLEX_CUDA=native, or use --backend cpu"
            )
        self.device = device
        self.target = target
        self.is_ptx = target.startswith("compute_")
        self._root = os.path.join(lib, target)
        with open(os.path.join(self._root, "kernels.txt"), encoding="ascii") as file:
            self.toolkit, *lines = file.read().splitlines()  # "13.0.88", then a line a kernel
        self._lines = {line.partition(" ")[0]: line for line in lines}
        self._modules: dict[str, Module] = {}
        self._functions: dict[str, Function] = {}
        if is_forced and self.is_ptx:
            sys.stderr.write(f"reflex: REFLEX_FORCE_PTX is set: the driver compiles PTX ({target})\n")
        elif self.is_ptx:
            sys.stderr.write(
                f"reflex: no kernels built for compute capability {capability}: the driver compiles PTX ({target}), "
                "which takes long the first time; REFLEX_CUDA=native pip install builds them for this device\n"
            )

    def names(self) -> list[str]:
        """Every kernel this build has."""
        return list(self._lines)

    def function(self, name: str) -> "Function":
        """A kernel by name; its module is loaded if it is the first of its file.

        Raises `DeviceError` when there is none, or the module and the manifest disagree.
        """
        function = self._functions.get(name)
        if function is None:
            line = self._lines.get(name)
            if line is None:
                raise DeviceError(f"the kernels for {self.target} have no {name!r}: the package is incomplete")
            _, file, *parameters = line.split(" ")
            module = self._modules.get(file)
            if module is None:
                began = monotonic_ns()
                module = self._modules[file] = Module(self, os.path.join(self._root, file))
                stamp(f"module {file.partition('.')[0]}", began)
            function = Function(module, name, tuple(map(Parameter, parameters)))
            self._functions[name] = function
        return function


class Module(Resource):
    """One loaded cubin or PTX file."""

    __slots__ = ("handle", "path")

    def __init__(self, kernels: Kernels, path: str) -> None:
        self.path = path
        device, cu = kernels.device, kernels.device.cu
        try:
            with open(path, "rb") as file:
                image = file.read()
        except OSError as error:
            raise DeviceError(f"{path}: {error.strerror}: the package is incomplete, install it again") from None
        if kernels.is_ptx:
            import zlib

            try:
                image = zlib.decompress(image) + b"\0"  # text that ends in a zero byte; a cubin knows its own length
            except zlib.error as error:
                raise DeviceError(f"{path}: {error}: the package is damaged, install it again") from None
        handle = ctypes.c_void_p()
        log = ctypes.create_string_buffer(4096)
        options = (ctypes.c_int * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        code = cu.cuModuleLoadDataEx(ctypes.byref(handle), image, 2 if kernels.is_ptx else 0, options, values)
        if code:
            have = ".".join(map(str, cu.version()))
            words = log.value.decode("utf-8", "replace").strip()
            cu.fail(
                code,
                f"loading {path}, built with CUDA {kernels.toolkit}, into a driver that supports CUDA {have}"
                + (f" ({words})" if words else ""),
            )
        self.handle: int = handle.value or 0
        super().__init__(device)

    def _release(self) -> None:
        cu = self.device.cu
        cu.check(cu.cuModuleUnload(self.handle), "unloading %s", self.path)


class Function:
    """A kernel that can be launched. Lives as long as its device."""

    __slots__ = ("_shared_allowed", "device", "handle", "name", "parameters")

    def __init__(self, module: Module, name: str, parameters: tuple[Parameter, ...]) -> None:
        self.device = module.device
        self.name = name
        self.parameters = parameters
        self._shared_allowed = _ALWAYS_ALLOWED
        handle = ctypes.c_void_p()
        cu = self.device.cu
        cu.check(cu.cuModuleGetFunction(ctypes.byref(handle), module.handle, name.encode()), "looking up %s", name)
        self.handle: int = handle.value or 0
        if cu.has("cuFuncGetParamInfo"):
            self._compare(module.path)

    def _compare(self, path: str) -> None:
        cu, found = self.device.cu, []
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        # One index more than the manifest has must be refused, so that a parameter too many is seen as well. Offsets
        # are the driver's business: it moves what wants 128 bytes of alignment, and takes a pointer to each argument.
        for index in range(len(self.parameters) + 1):
            code = cu.cuFuncGetParamInfo(self.handle, index, ctypes.byref(offset), ctypes.byref(size))
            if code == INVALID_VALUE:
                break
            cu.check(code, "asking for the parameters of %s", self.name)
            found.append(size.value)
        if found != [p.size for p in self.parameters]:
            raise DeviceError(
                f"{self.name} in {path} takes parameters of {found} bytes, the manifest says "
                f"{' '.join(map(str, self.parameters))}: build the kernels again"
            )

    def attribute(self, number: int) -> int:
        """One CUfunction_attribute: 0 threads a block at most, 1 static shared bytes, 3 local bytes, 4 registers."""
        value, cu = ctypes.c_int(), self.device.cu
        cu.check(cu.cuFuncGetAttribute(ctypes.byref(value), number, self.handle), "asking about %s", self.name)
        return value.value

    def set_attribute(self, number: int, value: int) -> None:
        """Set one CUfunction_attribute."""
        cu = self.device.cu
        cu.check(
            cu.cuFuncSetAttribute(self.handle, number, value),
            "setting attribute %d of %s to %d",
            number,
            self.name,
            value,
        )

    def allow_shared(self, size: int) -> None:
        """Opt in to `size` bytes of dynamic shared memory, if that is more than needs no opt-in."""
        if size > self._shared_allowed:
            self.set_attribute(_MAX_DYNAMIC_SHARED, size)
            self._shared_allowed = size

    def prepare(
        self,
        grid: "Shape",
        block: "Shape",
        arguments: "Sequence[Argument]",
        stream: "Stream",
        *,
        shared: int = 0,
        dependent: bool = False,
        cluster: "Shape | None" = None,
        cooperative: bool = False,
    ) -> "Launch":
        """A launch with everything packed; see `Launch`."""
        return Launch(self, grid, block, arguments, stream, shared, dependent, cluster, cooperative)


class Launch:
    """A launch prepared once: calling it queues the kernel, with one call into the driver and nothing allocated.

    grid, block: blocks and threads in x, y, z. shared: bytes of dynamic shared memory (opted in to here). dependent:
    programmatic dependent launch, the kernel may start before its predecessor ends and waits itself. cluster: blocks of
    a thread-block cluster. cooperative: all blocks run at once, so that they can wait for each other.

    Arguments are checked against the manifest: an integer for a float parameter is converted, a float for an integer
    one or a value out of range raises `DeviceError`. Structures and half floats are bytes of the parameter's size.
    """

    __slots__ = ("_attributes", "_buffer", "_cluster", "_config", "_fire", "_pointers", "function")

    def __init__(
        self,
        function: Function,
        grid: "Shape",
        block: "Shape",
        arguments: "Sequence[Argument]",
        stream: "Stream",
        shared: int = 0,
        dependent: bool = False,
        cluster: "Shape | None" = None,
        cooperative: bool = False,
    ) -> None:
        self.function = function
        parameters = function.parameters
        if len(arguments) != len(parameters):
            raise DeviceError(f"{function.name} takes {len(parameters)} arguments, not {len(arguments)}")
        size = parameters[-1].offset + parameters[-1].size if parameters else 0
        self._buffer = ctypes.create_string_buffer(max(size, 1))
        base = ctypes.addressof(self._buffer)
        self._pointers = (ctypes.c_void_p * max(len(parameters), 1))(*(base + p.offset for p in parameters))
        for index, value in enumerate(arguments):
            self.set(index, value)
        attributes: list[tuple[int, tuple[int, ...]]] = []
        if dependent:
            attributes.append((_DEPENDENT, (1,)))
        if cluster is not None:
            attributes.append((_CLUSTER, cluster))
        if cooperative:
            attributes.append((_COOPERATIVE, (1,)))
        self._attributes = (LaunchAttribute * max(len(attributes), 1))()
        self._cluster: LaunchAttribute | None = None
        for room, (number, words) in zip(self._attributes, attributes, strict=False):
            room.id = number
            room.value[: len(words)] = words
            if number == _CLUSTER:
                self._cluster = room
        self._config = LaunchConfig(
            stream=stream.handle, attributes=ctypes.addressof(self._attributes), attribute_count=len(attributes)
        )
        self.block = block
        self.grid = grid
        self.shared = shared
        self._fire = partial(
            function.device.cu.untyped("cuLaunchKernelEx"),
            ctypes.c_void_p(ctypes.addressof(self._config)),
            ctypes.c_void_p(function.handle),
            ctypes.c_void_p(ctypes.addressof(self._pointers)),
            None,
        )

    def __call__(self) -> None:
        """Queue the kernel. An error may also be one of an earlier kernel."""
        if code := self._fire():
            self.function.device.cu.fail(code, f"launching {self.function.name}")

    def set(self, index: int, value: "Argument") -> None:
        """Change one argument of the launches to come."""
        parameter = self.function.parameters[index]
        packers = _PACKERS.get(parameter.type)
        try:
            if isinstance(value, bytes):
                if packers is not None or len(value) != parameter.size:
                    raise StructError(f"{len(value)} bytes")
                ctypes.memmove(ctypes.addressof(self._buffer) + parameter.offset, value, len(value))
            elif packers is None:
                raise StructError(f"needs {parameter.size} bytes")
            else:
                packers[value < 0].pack_into(self._buffer, parameter.offset, value)
        except (StructError, OverflowError) as error:
            raise DeviceError(
                f"{self.function.name}: parameter {index} ({parameter.type}) does not take {value!r}: {error}"
            ) from None

    @property
    def grid(self) -> "Shape":
        """Blocks in x, y, z."""
        return self._config.grid_x, self._config.grid_y, self._config.grid_z

    @grid.setter
    def grid(self, grid: "Shape") -> None:
        self._config.grid_x, self._config.grid_y, self._config.grid_z = grid

    @property
    def block(self) -> "Shape":
        """Threads in x, y, z."""
        return self._config.block_x, self._config.block_y, self._config.block_z

    @block.setter
    def block(self, block: "Shape") -> None:
        self._config.block_x, self._config.block_y, self._config.block_z = block

    @property
    def cluster(self) -> "Shape | None":
        """Blocks of a cluster in x, y, z; only of a launch that was prepared with one."""
        return None if self._cluster is None else (*self._cluster.value[:3],)

    @cluster.setter
    def cluster(self, cluster: "Shape | None") -> None:
        if (cluster is None) != (self._cluster is None):
            raise DeviceError(f"{self.function.name} is launched with a cluster always or never")
        if cluster is not None and self._cluster is not None:
            self._cluster.value[:3] = cluster

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory."""
        return int(self._config.shared)

    @shared.setter
    def shared(self, size: int) -> None:
        self.function.allow_shared(size)
        self._config.shared = size
