"""Three ways to copy chunks of files to the device; upload.py chooses one and says when each method is called."""

import _thread
import ctypes
import mmap
import os
import struct
import time

from reflex_ipc.cuda.driver import gib
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.native import early_times
from reflex_ipc.errors import ModelFileError, OutOfMemoryError, ReflexError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from reflex_ipc.cuda.device import Device, Event, Stream

Chunk = tuple[int, int, int, int, int, int]
"""fd, first and last group it has bytes of, offset in the file, size, place on the device counted from the base."""
Experts = tuple[int, tuple[int, int, int, int], int]
"""A tensor of experts: its group, (fd, offset, size, place), how many experts it has."""

_READ_ERROR, _FILE_ENDED, _DRIVER_ERROR = 1, 2, 3  # enum failure of order.h
_READY, _NOT_YET, _FAILED = 0, 1, 2  # enum answer
_CHUNK = struct.Struct("<iIIIQQQ")  # struct chunk of upload.h


class Copier:
    """What the ways have in common."""

    chunk: int
    """Bytes a chunk has at most."""
    knows_experts = False
    """Whether it takes tensors of experts apart: the methods below are of no use otherwise."""

    def order(
        self, chunks: "Sequence[Chunk]", groups: int, read_ahead: bool, experts: "Sequence[Experts]" = ()
    ) -> None:
        """Take the chunks of so many groups; with `read_ahead`, start to read them into the page cache."""
        raise NotImplementedError

    def hold(self, is_held: bool) -> None:
        """Keep experts back that nobody asks for, or no longer."""
        raise NotImplementedError

    def ask(self, group: int, routes: bytes, rows: int, n_used: int) -> None:
        """Copy what the routes choose of the group's experts before anything else: a group behind the last."""
        raise NotImplementedError

    def start(self, device: "Device", base: int) -> None:
        """Begin to copy to `base`."""
        raise NotImplementedError

    def event(self, group: int, milliseconds: int) -> int | None:
        """The handle of the group's event once it is recorded, None if that takes longer. Raises what went wrong."""
        raise NotImplementedError

    def finished(self, milliseconds: int) -> bool:
        """Whether every byte is on the device. Raises what went wrong."""
        raise NotImplementedError

    @property
    def queued(self) -> int:
        """Bytes read and on their way."""
        raise NotImplementedError

    def description(self) -> dict[str, object]:
        """For the timings."""
        raise NotImplementedError

    def free(self) -> None:
        """Stop and give everything back."""
        raise NotImplementedError


class NativeCopier(Copier):
    """Reader threads in C: see kernels/native/upload.c and order.c."""

    knows_experts = True

    def __init__(self, library: ctypes.CDLL, threads: int, buffers: int, chunk: int) -> None:
        self._c = library
        self.chunk = chunk
        self._shape = {"way": "native", "threads": threads, "buffers": buffers, "chunk": chunk}
        self._handle = library.reflex_upload_new(threads, buffers, chunk)
        if not self._handle:
            raise OutOfMemoryError(f"no memory or threads for {threads} x {buffers} buffers of {chunk} bytes")
        self._device: Device | None = None
        self.began = time.monotonic_ns()
        """When the threads were started."""

    def order(
        self, chunks: "Sequence[Chunk]", groups: int, read_ahead: bool, experts: "Sequence[Experts]" = ()
    ) -> None:
        pack = _CHUNK.pack
        packed = [pack(fd, first, last, 0, *where) for fd, first, last, *where in chunks]
        packed += [pack(fd, group, group, n, *where) for group, (fd, *where), n in experts]
        self._c.reflex_upload_order(self._handle, b"".join(packed), len(packed), groups, read_ahead)

    def hold(self, is_held: bool) -> None:
        self._c.reflex_upload_hold(self._handle, is_held)

    def ask(self, group: int, routes: bytes, rows: int, n_used: int) -> None:
        self._c.reflex_upload_ask(self._handle, group, routes, rows, n_used, len(routes) // 4 // rows)

    def start(self, device: "Device", base: int) -> None:
        self._device = device
        self._c.reflex_upload_start(self._handle, device.cu.path.encode(), device.context, base)
        self._c.reflex_upload_events(self._handle)

    def event(self, group: int, milliseconds: int) -> int | None:
        answer = self._c.reflex_upload_wait(self._handle, group, milliseconds)
        if answer == _FAILED:
            self._fail()
        return self._c.reflex_upload_event(self._handle, group) if answer == _READY else None

    def finished(self, milliseconds: int) -> bool:
        answer = self._c.reflex_upload_join(self._handle, milliseconds)
        if answer == _FAILED:
            self._fail()
        return bool(answer == _READY)

    def _fail(self) -> None:
        code, attempt, chunk = ctypes.c_int(), ctypes.c_char_p(), ctypes.create_string_buffer(_CHUNK.size)
        failure = self._c.reflex_upload_failure(self._handle, ctypes.byref(code), chunk, ctypes.byref(attempt))
        if failure == _DRIVER_ERROR:
            assert self._device is not None
            self._device.cu.fail(code.value, (attempt.value or b"").decode())
        fd, first, last, _, *where = _CHUNK.unpack(chunk.raw)
        raise read_failure((fd, first, last, *where), code.value if failure == _READ_ERROR else 0)

    @property
    def queued(self) -> int:
        return int(self._c.reflex_upload_queued(self._handle))

    def description(self) -> dict[str, object]:
        return self._shape

    def ring(self) -> tuple[int, int]:
        """CLOCK_MONOTONIC nanoseconds at which the ring was in memory, and page-locked; 0 for what is still to come."""
        times = (ctypes.c_int64 * 2)()
        self._c.reflex_upload_ring(self._handle, times)
        return times[0], times[1]

    def free(self) -> None:
        self._c.reflex_upload_free(self._handle)
        self._handle = None


class EarlyCopier(NativeCopier):
    """The reader threads that were started before the interpreter (kernels/native/early.c), already copying the file.

    What they have copied by the time they are given an order is not copied again.
    """

    def __init__(self, library: ctypes.CDLL, handle: int, chunk: int) -> None:
        self._c = library
        self.chunk = chunk
        self._shape = {"way": "early", "chunk": chunk}
        self._handle = handle
        self._device = None
        self._is_taken = False
        self._base = 0
        self.began = round(early_times(library)["begun"] * 1e9)

    def base(self) -> int:
        """Take over the threads, and the memory of the device at this address: the file's copy from its first byte on.
        0 where they were not started, because there was no room; waits until that is known."""
        self._is_taken = True
        self._base = int(self._c.reflex_early_base())
        return self._base

    def start(self, device: "Device", base: int) -> None:
        if self._base:
            self._device = device
            self._c.reflex_upload_events(self._handle)
        else:
            super().start(device, base)

    def free(self) -> None:
        if self._is_taken:
            super().free()
        else:
            self._c.reflex_early_drop(True)


class MappedCopier(Copier):
    """One thread that page-locks the mapped file piece by piece and lets the device fetch it: no CPU copies a byte.

    A piece that cannot be page-locked, because the device or the file system does not allow it, is read and copied
    from pageable memory. The mapping itself is never touched, so a file that shrinks raises no signal.
    """

    chunk = 64 << 20

    def __init__(self) -> None:
        from threading import Condition

        self._chunks: Sequence[Chunk] = ()
        self._groups = 0
        self._device: Device
        self._base = 0
        self._stop = False
        self._running = False
        self._finished = False
        self._queued = 0
        self._recorded = 0  # groups whose event is recorded
        self._registered: list[int] = []
        self._mappings: dict[int, tuple[int, int]] = {}  # fd: address, size
        self._error: ReflexError | None = None
        self._events: list[Event] = []
        self._stream: Stream
        self._changed = Condition()

    def order(
        self, chunks: "Sequence[Chunk]", groups: int, read_ahead: bool, experts: "Sequence[Experts]" = ()
    ) -> None:
        assert not experts
        self._chunks, self._groups = chunks, groups
        if read_ahead:
            _thread.start_new_thread(self._read_ahead, ())

    def _read_ahead(self) -> None:
        room = bytearray(1 << 20)
        for fd, _, _, offset, size, _ in self._chunks:
            for at in range(offset, offset + size, len(room)):
                if self._stop or self._finished:
                    return
                try:
                    os.preadv(fd, [room], at)
                except OSError:  # the copy will say so
                    return

    def start(self, device: "Device", base: int) -> None:
        self._device, self._base = device, base
        self._stream = device.stream()
        self._events = [device.event() for _ in range(self._groups)]
        self._running = True
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        try:
            self._device.make_current()
            self._copy_all()
            self._stream.synchronize()
            self._check_sizes()
        except ReflexError as error:
            self._error = error
        except MemoryError:
            self._error = OutOfMemoryError("no host memory for the upload's buffers")
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def _copy_all(self) -> None:
        can_register = self._device.attribute(self._device.READ_ONLY_REGISTER) != 0
        for chunk in self._chunks:
            if self._stop:
                return
            self._record_groups(chunk[1])
            fd, _, _, offset, size, place = chunk
            # Page-locking takes whole pages, and no page twice: what is ragged at the ends is read.
            start, stop = aligned(offset, mmap.PAGESIZE), (offset + size) // mmap.PAGESIZE * mmap.PAGESIZE
            if can_register and start < stop and (address := self._lock_pages(fd, start, stop)):
                self._read(chunk, offset, start)
                cu = self._device.cu
                code = cu.cuMemcpyHtoDAsync_v2(
                    self._base + place + start - offset, address, stop - start, self._stream.handle
                )
                cu.check(code, "copying %s to the device", gib(stop - start))
                self._read(chunk, stop, offset + size)
            else:
                self._read(chunk, offset, offset + size)
            self._queued += size
        self._record_groups(len(self._events))

    def _record_groups(self, end: int) -> None:
        if self._recorded < end:
            for event in self._events[self._recorded : end]:
                event.record(self._stream)
            with self._changed:
                self._recorded = end
                self._changed.notify_all()

    def _lock_pages(self, fd: int, start: int, stop: int) -> int:
        """The address of the page-locked bytes [start, stop) of the file, or 0 where that is not possible."""
        if fd not in self._mappings:
            size = os.fstat(fd).st_size
            address = _libc().mmap(None, max(size, 1), mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
            self._mappings[fd] = (0 if address == _MAP_FAILED else address, size)
        address, size = self._mappings[fd]
        read_only = 8
        if not address or stop > size or self._device.cu.cuMemHostRegister_v2(address + start, stop - start, read_only):
            return 0
        self._registered.append(address + start)
        return int(address + start)

    def _read(self, chunk: Chunk, start: int, stop: int) -> None:
        fd, _, _, offset, _, place = chunk
        while start < stop and not self._stop:
            try:
                data = os.pread(fd, min(stop - start, 4 << 20), start)
            except OSError as error:
                raise read_failure(chunk, error.errno or 0) from None
            if not data:
                raise read_failure(chunk, 0)
            self._stream.to_device(self._base + place + start - offset, data)
            start += len(data)

    def _check_sizes(self) -> None:
        # What was cut off a page-locked file may have come as zeros.
        for chunk in self._chunks:
            if os.fstat(chunk[0]).st_size < chunk[3] + chunk[4]:
                raise read_failure(chunk, 0)

    def event(self, group: int, milliseconds: int) -> int | None:
        with self._changed:
            self._changed.wait_for(lambda: self._finished or self._recorded > group, milliseconds / 1e3)
            if self._error:
                raise self._error
            return self._events[group].handle if self._recorded > group else None

    def finished(self, milliseconds: int) -> bool:
        with self._changed:
            done = self._changed.wait_for(lambda: self._finished, milliseconds / 1e3)
            if done and self._error:
                raise self._error
            return done

    @property
    def queued(self) -> int:
        return self._queued

    def description(self) -> dict[str, object]:
        return {"way": "mapped", "threads": 1, "chunk": self.chunk}

    def free(self) -> None:
        self._stop = True
        if not self._running:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._finished)
        cu = self._device.cu
        for address in self._registered:
            cu.cuMemHostUnregister(address)
        for address, size in self._mappings.values():
            if address:
                _libc().munmap(address, size)
        for resource in (*self._events, self._stream):
            resource.close()


_MAP_FAILED = ctypes.c_void_p(-1).value


def _libc() -> ctypes.CDLL:
    # The mmap module does not hand out the address of a read-only mapping.
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


def read_failure(chunk: Chunk, number: int) -> ModelFileError:
    """The error of a chunk that could not be read: `number` is errno, or 0 where the file ended."""
    fd, _, _, offset, size, _ = chunk
    try:
        name, has = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd).st_size
    except OSError:
        name, has = f"file descriptor {fd}", 0
    if number:
        return ModelFileError(f"{name}: reading bytes {offset} to {offset + size} failed: {os.strerror(number)}")
    return ModelFileError(
        f"{name}: the file became shorter while it was read: it has {has} bytes, "
        f"and tensors lie at {offset} to {offset + size}"
    )
