"""A device: its context, what it is, its streams and events, and everything it has given out.

`start_driver(index)` puts the driver's start into a thread, unless it is under way already, and returns at once;
`.wait()` on what it returns gives the `Device`, current in the calling thread. Driver and context take 70 to 250 ms,
during which the caller reads the file.
"""

import _thread
import atexit
import ctypes
import time

from reflex_ipc.cuda import native
from reflex_ipc.cuda.driver import DEVICE_UNAVAILABLE, LIBRARY, NOT_READY, Driver, NoDeviceError, gib
from reflex_ipc.cuda.graph import Capture
from reflex_ipc.cuda.memory import Arena, GrowingBuffer, Memory, Pinned, Resource
from reflex_ipc.errors import DeviceError, ReflexError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

    from reflex_ipc.gguf import GGUF

OLDEST = (7, 5)
"""The oldest compute capability that kernels are compiled for."""


class Stream(Resource):
    """A queue of work on the device; nothing in it waits for the null stream."""

    __slots__ = ("handle",)

    def __init__(self, device: "Device") -> None:
        handle = ctypes.c_void_p()
        non_blocking = 1
        device.cu.check(device.cu.cuStreamCreate(ctypes.byref(handle), non_blocking), "creating a stream")
        self.handle: int = handle.value or 0
        super().__init__(device)

    def synchronize(self) -> None:
        """Wait until everything queued is done. An error of any kernel before surfaces here."""
        cu = self.device.cu
        cu.check(cu.cuStreamSynchronize(self.handle), "waiting for the device")

    def wait(self, event: "Event") -> None:
        """What is queued from here on starts after the event's last record."""
        cu = self.device.cu
        cu.check(cu.cuStreamWaitEvent(self.handle, event.handle, 0), "making a stream wait")

    def to_device(self, address: int, data: "bytes | bytearray | memoryview") -> None:
        """Queue a copy of host bytes. From pageable memory, `data` may be reused when this returns; from pinned
        memory, when the copy is done."""
        source = memoryview(data).cast("B")
        # A read-only buffer has no address that ctypes hands out, but bytes do.
        where = bytes(source) if source.readonly else (ctypes.c_ubyte * len(source)).from_buffer(source)
        cu = self.device.cu
        cu.check(
            cu.cuMemcpyHtoDAsync_v2(address, where, len(source), self.handle),
            "copying %s to the device",
            gib(len(source)),
        )

    def to_host(self, host_address: int, address: int, size: int) -> None:
        """Queue a copy of device bytes to `host_address`, which should be pinned and must stay until it is done."""
        cu = self.device.cu
        cu.check(
            cu.cuMemcpyDtoHAsync_v2(host_address, address, size, self.handle), "copying %s from the device", gib(size)
        )

    def within(self, to: int, source: int, size: int) -> None:
        """Queue a copy from one place of the device to another; they must not overlap."""
        cu = self.device.cu
        cu.check(cu.cuMemcpyDtoDAsync_v2(to, source, size, self.handle), "copying %s on the device", gib(size))

    def fill(self, address: int, byte: int, size: int) -> None:
        """Queue setting `size` bytes to one value."""
        cu = self.device.cu
        cu.check(cu.cuMemsetD8Async(address, byte, size, self.handle), "filling %s on the device", gib(size))

    def read(self, address: int, size: int) -> bytes:
        """Device bytes, after everything queued before: waits."""
        room = ctypes.create_string_buffer(size)
        self.to_host(ctypes.addressof(room), address, size)
        self.synchronize()
        return room.raw

    def capture(self) -> Capture:
        """`with stream.capture() as capture:` records what is queued instead of running it; then `capture.graph`."""
        return Capture(self)

    def _release(self) -> None:
        cu = self.device.cu
        cu.check(cu.cuStreamDestroy_v2(self.handle), "destroying a stream")


class Event(Resource):
    """A mark in a stream that others wait for. `timing=True` costs a little and makes `milliseconds_since` work."""

    __slots__ = ("handle",)

    def __init__(self, device: "Device", timing: bool = False) -> None:
        handle = ctypes.c_void_p()
        device.cu.check(device.cu.cuEventCreate(ctypes.byref(handle), 0 if timing else 2), "creating an event")
        self.handle: int = handle.value or 0
        super().__init__(device)

    def record(self, stream: Stream) -> None:
        """Move the mark to the end of what is queued."""
        cu = self.device.cu
        cu.check(cu.cuEventRecord(self.handle, stream.handle), "recording an event")

    def done(self) -> bool:
        """Whether the device has passed the mark; an event never recorded counts as passed."""
        cu = self.device.cu
        code = cu.cuEventQuery(self.handle)
        if code == NOT_READY:
            return False
        cu.check(code, "asking for an event")
        return True

    def synchronize(self) -> None:
        """Wait until the device has passed the mark."""
        cu = self.device.cu
        cu.check(cu.cuEventSynchronize(self.handle), "waiting for the device")

    def milliseconds_since(self, earlier: "Event") -> float:
        """Time on the device between two passed marks."""
        cu = self.device.cu
        value = ctypes.c_float()
        cu.check(cu.cuEventElapsedTime(ctypes.byref(value), earlier.handle, self.handle), "reading a time")
        return value.value

    def _release(self) -> None:
        cu = self.device.cu
        cu.check(cu.cuEventDestroy_v2(self.handle), "destroying an event")


class Device:
    """One device with its primary context, current in the thread that made it.

    Raises `NoDeviceError` when no usable device exists, `DeviceError` when there is no device `index` or it is taken.
    """

    # Numbers of CUdevice_attribute.
    MULTIPROCESSORS = 16
    COMPUTE_MODE = 20
    CAPABILITY_MAJOR = 75
    CAPABILITY_MINOR = 76
    SHARED_PER_BLOCK = 97  # with the opt-in
    VIRTUAL_MEMORY = 102
    READ_ONLY_REGISTER = 113

    def __init__(self, index: int = 0, cu: Driver | None = None) -> None:
        self.times = {"begin": time.monotonic()}
        """CLOCK_MONOTONIC seconds at which the start began, cuInit was done and the context was current."""
        self.index = index
        self.resources: dict[int, Resource] = {}
        self.is_closed = False
        self.cu = cu = cu or Driver()
        count = cu.start()
        self.times["driver"] = time.monotonic()
        handle = ctypes.c_int()
        if not 0 <= index < count:
            names = ", ".join(f"{i}: {_name(cu, i)}" for i in range(count))
            raise DeviceError(f"there is no device {index}: --device takes one of {names}")
        cu.check(cu.cuDeviceGet(ctypes.byref(handle), index), "opening device %d", index)
        self.handle: int = handle.value
        self.capability = self.attribute(self.CAPABILITY_MAJOR), self.attribute(self.CAPABILITY_MINOR)
        if self.capability < OLDEST:
            has, needs = (".".join(map(str, version)) for version in (self.capability, OLDEST))
            raise NoDeviceError(
                f"device {index}, {_name(cu, index)}, has compute capability {has}; the kernels need {needs} or newer; "
                "use --backend cpu"
            )
        context = ctypes.c_void_p()
        code = cu.cuDevicePrimaryCtxRetain(ctypes.byref(context), self.handle)
        if code == DEVICE_UNAVAILABLE:
            cu.fail(code, f"taking device {index}, whose compute mode is {self.compute_mode()},")
        cu.check(code, "making a context on device %d", index)
        self.context: int = context.value or 0
        try:
            self.make_current()
        except ReflexError:
            cu.cuDevicePrimaryCtxRelease_v2(self.handle)
            raise
        self.times["context"] = time.monotonic()

    def make_current(self) -> None:
        """Make the context current in the calling thread: each thread that uses the device needs it once."""
        self.cu.check(self.cu.cuCtxSetCurrent(self.context), "making device %d current", self.index)

    def attribute(self, number: int) -> int:
        """One CUdevice_attribute."""
        value = ctypes.c_int()
        self.cu.check(
            self.cu.cuDeviceGetAttribute(ctypes.byref(value), number, self.handle), "asking for attribute %d", number
        )
        return value.value

    def compute_mode(self) -> str:
        """What the machine's owner allows: default, prohibited or exclusive process."""
        mode = self.attribute(self.COMPUTE_MODE)
        return {0: "default", 2: "prohibited", 3: "exclusive process"}.get(mode, str(mode))

    @property
    def name(self) -> str:
        """The device's name, "NVIDIA H200"."""
        return _name(self.cu, self.index)

    def bus_id(self) -> str:
        """Where the device sits, "00000000:4B:00.0": what NVML knows it by."""
        text = ctypes.create_string_buffer(32)
        self.cu.check(self.cu.cuDeviceGetPCIBusId(text, len(text), self.handle), "asking for the bus address")
        return text.value.decode("ascii", "replace")

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of the device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cu.check(self.cu.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "asking for free memory")
        return free.value, total.value

    def allocate(self, size: int, what: str) -> Memory:
        """One allocation; `what` names it in messages."""
        return Memory(self, size, what)

    def arena(self, size: int, what: str) -> Arena:
        """One allocation to be given out in pieces."""
        return Arena(self, size, what)

    def growing(self, size: int, what: str) -> GrowingBuffer:
        """A range of `size` bytes that is backed on demand."""
        return GrowingBuffer(self, size, what)

    def pinned(self, size: int, what: str) -> Pinned:
        """Page-locked host memory that kernels see, zeroed."""
        return Pinned(self, size, what)

    def stream(self) -> Stream:
        """A new stream."""
        return Stream(self)

    def event(self, timing: bool = False) -> Event:
        """A new event."""
        return Event(self, timing)

    def synchronize(self) -> None:
        """Wait until the device has nothing to do."""
        self.cu.check(self.cu.cuCtxSynchronize(), "waiting for the device")

    def close(self) -> None:
        """Give everything back, the newest first, then the context. A second call does nothing.

        Raises the first error after everything was tried.
        """
        if self.is_closed:
            return
        self.is_closed = True
        errors = []
        # Whoever stops half-way leaves work queued; memory must outlive it.
        for step in (self.make_current, self.synchronize):
            try:
                step()
            except ReflexError as error:
                errors.append(error)
        while self.resources:
            resource = next(reversed(self.resources.values()))
            try:
                resource.close()
            except ReflexError as error:
                errors.append(error)
        code = self.cu.cuDevicePrimaryCtxRelease_v2(self.handle)
        if errors:
            raise errors[0]
        self.cu.check(code, "releasing device %d", self.index)

    def __enter__(self) -> "Device":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: "TracebackType | None"
    ) -> None:
        try:
            self.close()
        except ReflexError:
            if error is None:  # else the error that brought us here says more
                raise


class Opening:
    """A device that is being opened. `wait()` gives it, or raises what went wrong.

    Where the library was preloaded, the driver's start is under way in a thread of its own (kernels/native/early.c),
    and the device is opened by whoever waits: a second thread of this interpreter would take turns with the first.
    """

    def __init__(self, index: int, library: str) -> None:
        self.native = native.load()
        self.is_early = self.native is not None and self.native.reflex_early_device() == index
        self._index, self._library = index, library
        self._device: Device | None = None
        self._error: BaseException | None = None
        self._done = _thread.allocate_lock()
        if not self.is_early:
            self._done.acquire()
            # The driver's own exit handlers must not run while it is still starting.
            atexit.register(self._settle)
            _thread.start_new_thread(self._open, ())

    def _open(self) -> None:
        if self.native is not None and not self.is_early:
            self.native.reflex_early_drop(False)  # on another device, where the launcher read the arguments differently
        try:
            self._device = Device(self._index, Driver(self._library))
        except BaseException as error:  # also a KeyboardInterrupt belongs to whoever waits
            self._error = error
        finally:
            self._done.release()
            atexit.unregister(self._settle)  # or what it refers to would stay for as long as the process

    def _settle(self) -> None:
        with self._done:
            pass

    def wait(self) -> Device:
        """The device, current in the calling thread. Raises as `Device` does; may be called again."""
        if self.is_early and self._device is None and self._error is None:
            self._done.acquire()
            self._open()
        with self._done:
            if self._error is None and self._device is not None:
                try:
                    self._device.make_current()
                    return self._device
                except ReflexError as error:
                    self._error = error
                    self._close()
            raise self._error or DeviceError("the device was not opened")

    def header_reader(self) -> "native.HeaderReader | None":
        """What the reader of the model's file leaves to the native part."""
        return native.HeaderReader(self.native) if self.native is not None else None

    def early_upload(self, gguf: "GGUF") -> int | None:
        """The handle of an upload of this file that was started before the interpreter. Of another file: it is given
        back."""
        if not self.is_early or self.native is None:
            return None
        reader = native.HeaderReader(self.native)
        if len(gguf.shards) == 1 and reader.beginning(gguf.shards[0].status) is not None:
            handle: int | None = self.native.reflex_early_upload()
            return handle
        self.native.reflex_early_drop(False)
        return None

    def close(self) -> None:
        """Wait for the thread and give back what it opened: for whoever fails before `wait`."""
        with self._done:
            self._close()
        if self.is_early and self.native is not None:
            self.native.reflex_early_drop(False)

    def _close(self) -> None:
        if self._device is not None:
            try:
                self._device.close()
            except ReflexError as error:
                self._error = self._error or error


def start_driver(index: int = 0, library: str = LIBRARY) -> Opening:
    """Start the driver and open device `index`, in a thread or where that was begun. Returns at once, never raises."""
    return Opening(index, library)


def capabilities(cu: Driver) -> list[tuple[int, int]]:
    """The compute capability of every device, without opening any. The driver must have been started."""
    found, value, handle = [], ctypes.c_int(), ctypes.c_int()
    cu.check(cu.cuDeviceGetCount(ctypes.byref(value)), "counting the devices")
    for index in range(value.value):
        cu.check(cu.cuDeviceGet(ctypes.byref(handle), index), "opening device %d", index)
        version = []
        for number in (Device.CAPABILITY_MAJOR, Device.CAPABILITY_MINOR):
            cu.check(cu.cuDeviceGetAttribute(ctypes.byref(value), number, handle), "asking for attribute %d", number)
            version.append(value.value)
        found.append((version[0], version[1]))
    return found


def _name(cu: Driver, index: int) -> str:
    handle, text = ctypes.c_int(), ctypes.create_string_buffer(256)
    cu.check(cu.cuDeviceGet(ctypes.byref(handle), index), "opening device %d", index)
    cu.check(cu.cuDeviceGetName(text, len(text), handle), "asking for the name of device %d", index)
    return text.value.decode("utf-8", "replace")
