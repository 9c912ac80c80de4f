"""Memory of the device: one allocation with a bump allocator over it, a range mapped on demand, pinned host memory.

Addresses are plain integers, as kernels take them. Everything here is a `Resource` of a `Device`: it closes with it.
"""

import ctypes

from reflex_ipc.cuda.driver import NOT_SUPPORTED, AccessDescription, AllocationProperties, gib
from reflex_ipc.errors import OutOfMemoryError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reflex_ipc.cuda.device import Device

ALIGNMENT = 256
"""Bytes: what cuMemAlloc itself guarantees, and enough for every vector load, bulk copy and tensor map."""


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """`size` rounded up to a multiple of `alignment`."""
    return -(-size // alignment) * alignment


class Resource:
    """Something the driver gave out and takes back once: by `close()`, or when its device closes."""

    __slots__ = ("device", "is_closed")

    def __init__(self, device: "Device") -> None:
        self.device = device
        self.is_closed = False
        device.resources[id(self)] = self

    def close(self) -> None:
        """Give it back; a second call does nothing. Raises `DeviceError` when the driver refuses."""
        if not self.is_closed:
            self.is_closed = True
            del self.device.resources[id(self)]
            self._release()

    def _release(self) -> None:
        raise NotImplementedError


class Memory(Resource):
    """One allocation of the device. `what` names it in messages; `address` is that of one that was made elsewhere.

    Raises `OutOfMemoryError` with the sum when the device does not hold it.
    """

    __slots__ = ("address", "size", "what")

    def __init__(self, device: "Device", size: int, what: str, address: int = 0) -> None:
        self.size = size
        self.what = what
        if not address:
            made = ctypes.c_uint64()
            cu = device.cu
            cu.check(cu.cuMemAlloc_v2(ctypes.byref(made), max(size, 1)), "allocating %s for %s", gib(size), what)
            address = made.value
        self.address = address
        super().__init__(device)

    def _release(self) -> None:
        cu = self.device.cu
        cu.check(cu.cuMemFree_v2(self.address), "freeing %s", self.what)


class Arena(Memory):
    """One allocation that gives out pieces from its start to its end and takes them back only all at once.

    Raises `OutOfMemoryError` when a piece does not fit: whoever sized the arena forgot that piece.
    """

    __slots__ = ("used",)

    def __init__(self, device: "Device", size: int, what: str) -> None:
        super().__init__(device, size, what)
        self.used = 0

    def take(self, size: int, what: str, alignment: int = ALIGNMENT) -> int:
        """The address of the next `size` bytes."""
        start = aligned(self.used, alignment)
        if start + size > self.size:
            raise OutOfMemoryError(
                f"{what} needs {gib(size)}, but the {gib(self.size)} for {self.what} have {gib(self.size - start)} left"
            )
        self.used = start + size
        return self.address + start

    def reset(self, used: int = 0) -> None:
        """Take back everything given out since `used` had this value."""
        self.used = used


class GrowingBuffer(Resource):
    """A range of device addresses of which only what is asked for is backed by memory.

    `ensure(start, stop)` backs the bytes from `start` to `stop`, counted from `address`, in whole granules (2 MiB on
    today's devices); what is backed keeps its content and stays backed until `close`. Where the device has no virtual
    memory management the whole range is allocated at once and `on_demand` is False.

    Raises `OutOfMemoryError` when the device does not hold what is asked for.
    """

    __slots__ = ("_backed", "_handles", "_memory", "_properties", "address", "granule", "on_demand", "size", "what")

    def __init__(self, device: "Device", size: int, what: str) -> None:
        self.what = what
        self.granule = 0
        self.size = size
        self._memory: Memory | None = None
        self._handles: list[tuple[int, int, int]] = []  # offset, size, handle
        self._properties = AllocationProperties(type=1, location_type=1, location_id=device.index)  # pinned; a device
        self.on_demand = device.attribute(device.VIRTUAL_MEMORY) != 0 and self._reserve(device, size)
        if not self.on_demand:
            self._memory = Memory(device, size, what)
            self.address = self._memory.address
        self._backed = bytearray(self.size // self.granule if self.on_demand else 0)
        super().__init__(device)

    def _reserve(self, device: "Device", size: int) -> bool:
        cu = device.cu
        granule, address = ctypes.c_size_t(), ctypes.c_uint64()
        code = cu.cuMemGetAllocationGranularity(ctypes.byref(granule), ctypes.byref(self._properties), 0)
        if code == NOT_SUPPORTED:
            return False
        cu.check(code, "asking for the granule of %s", self.what)
        whole = aligned(max(size, 1), granule.value)
        cu.check(
            cu.cuMemAddressReserve(ctypes.byref(address), whole, 0, 0, 0),
            "reserving addresses for %s of %s",
            gib(whole),
            self.what,
        )
        self.granule, self.size, self.address = granule.value, whole, address.value
        return True

    def ensure(self, start: int, stop: int) -> None:
        """Back the bytes [start, stop) of the range with memory, where they are not yet."""
        if not 0 <= start <= stop <= self.size:
            raise OutOfMemoryError(f"{self.what}: bytes {start} to {stop} lie outside the {self.size} reserved")
        if not self.on_demand or start == stop:
            return
        granule, last = start // self.granule, -(-stop // self.granule)
        while granule < last:
            if self._backed[granule]:
                granule += 1
                continue
            end = self._backed.find(1, granule, last)
            end = last if end < 0 else end
            self._back(granule * self.granule, (end - granule) * self.granule)
            self._backed[granule:end] = b"\1" * (end - granule)
            granule = end

    @property
    def backed(self) -> int:
        """Bytes that memory stands behind."""
        return sum(size for _, size, _ in self._handles) if self.on_demand else self.size

    def _back(self, offset: int, size: int) -> None:
        cu, at = self.device.cu, self.address + offset
        handle = ctypes.c_uint64()
        cu.check(
            cu.cuMemCreate(ctypes.byref(handle), size, ctypes.byref(self._properties), 0),
            "allocating %s more for %s",
            gib(size),
            self.what,
        )
        code = cu.cuMemMap(at, size, 0, handle.value, 0)
        if code:
            cu.cuMemRelease(handle.value)
            cu.check(code, "mapping %s more for %s", gib(size), self.what)
        access = AccessDescription(location_type=1, location_id=self.device.index, access=3)  # a device; read and write
        code = cu.cuMemSetAccess(at, size, ctypes.byref(access), 1)
        if code:
            cu.cuMemUnmap(at, size)
            cu.cuMemRelease(handle.value)
            cu.check(code, "opening %s more for %s", gib(size), self.what)
        self._handles.append((offset, size, handle.value))

    def _release(self) -> None:
        if self._memory is not None:
            self._memory.close()
            return
        cu = self.device.cu
        codes = []
        for offset, size, handle in reversed(self._handles):
            codes += [cu.cuMemUnmap(self.address + offset, size), cu.cuMemRelease(handle)]
        codes.append(cu.cuMemAddressFree(self.address, self.size))
        for code in codes:
            cu.check(code, "giving back %s", self.what)


class Pinned(Resource):
    """Page-locked host memory that kernels read and write through `device_address`: the mailbox of the decoder.

    `view` is the host's side, a writable memoryview of bytes; cast it to read integers. It is zero at first.
    """

    __slots__ = ("address", "device_address", "size", "view", "what")

    def __init__(self, device: "Device", size: int, what: str) -> None:
        self.size = size
        self.what = what
        cu = device.cu
        address, on_device = ctypes.c_void_p(), ctypes.c_uint64()
        portable, mapped = 1, 2
        cu.check(
            cu.cuMemHostAlloc(ctypes.byref(address), size, portable | mapped),
            "allocating %s of page-locked host memory for %s",
            gib(size),
            what,
        )
        self.address: int = address.value or 0
        code = cu.cuMemHostGetDevicePointer_v2(ctypes.byref(on_device), self.address, 0)
        if code:
            cu.cuMemFreeHost(self.address)
            cu.check(code, "mapping the host memory for %s", what)
        self.device_address: int = on_device.value
        ctypes.memset(self.address, 0, size)
        self.view = memoryview((ctypes.c_ubyte * size).from_address(self.address)).cast("B")
        super().__init__(device)

    def _release(self) -> None:
        self.view.release()
        cu = self.device.cu
        cu.check(cu.cuMemFreeHost(self.address), "freeing the host memory for %s", self.what)
