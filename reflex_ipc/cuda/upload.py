"""A file's tensors to the device, in execution order, so that the first layers work while the last ones still arrive.

    upload = Upload(size)                 # at once: what there is decides how; the ring's pages are touched meanwhile
    upload.order(groups)                  # as soon as the order is known: chunks are cut, a cold file is read ahead
    upload.start(device, base)            # the context is up, the weights have an address
    for i in range(layers):
        upload.wait_group(stream, i)      # what `stream` queues from here on finds group i on the device
    upload.join()                         # every byte is there; raises what went wrong

`groups` lists (index, pieces) with index 0, 1, 2 …; a piece is (fd, offset in the file, size, place), the place counted
from `base` on the device. Pieces that follow each other in the file and on the device alike are copied as one span, the
padding between them included, so chunks cross the borders of tensors and layers.

Tensors of experts may be given apart, for groups that list none. They come last; reader threads let some of them be
asked for first: hold(), ask() for what a layer's router chose, wait_group() for `asked`, and release().

Three ways, and `timings` says which was taken: "early", reader threads in C through a ring of page-locked buffers that
were started before the interpreter was; "native", the same threads started here; and "mapped", for one or two cores or
without the native part, the mapped file page-locked and fetched without the CPU.
"""

import os
import time
from errno import EAGAIN

from reflex_ipc.cuda import LIB, native
from reflex_ipc.cuda.copiers import Chunk, Copier, EarlyCopier, Experts, MappedCopier, NativeCopier
from reflex_ipc.cuda.memory import Memory, Resource
from reflex_ipc.environment import usable_cpus
from reflex_ipc.stamps import stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterable, Sequence

    from reflex_ipc.cuda.device import Device, Stream

    Piece = tuple[int, int, int, int]
    Group = tuple[int, Sequence[Piece]]

THREADS, BUFFERS, CHUNK = 12, 2, 4 << 20
"""The ring measured best on 16 cores and a 55 GB/s link. Smaller and larger chunks are both slower."""

FEW_CORES = 2
"""With so few, page-locking the mapped file is as fast as a ring, and the cores stay free."""

DISK_THREADS = 4  # enough reads under way to keep a disk busy, however few the cores
PADDING = 1 << 16  # bytes between two pieces that are copied along rather than cut at
SAMPLES = 32  # pages asked for to see whether the page cache has the file
PATIENCE = 100  # milliseconds of waiting in C before Python looks for a signal


class Upload(Resource):
    """One file, or several, on their way to the device. See the module's description for the order of calls.

    size: bytes to come, which bounds the ring. cores: processors to use (default: what the process may use). early: the
    handle of an upload of the same file that was started before the interpreter, if there is one. library: the native
    part, where it has been loaded already; else it is looked for in the folder `lib`.

    Every method after `start` raises `ModelFileError` when the file cannot be read or ended early, and `DeviceError`
    when the driver refused a call; what was allocated on the device stays with whoever allocated it.
    """

    def __init__(
        self,
        size: int,
        *,
        early: int | None = None,
        cores: int | None = None,
        library: "ctypes.CDLL | None" = None,
        lib: str = LIB,
    ) -> None:
        self.is_closed = False
        self.timings: dict[str, object] = {}
        """How it was done: way, threads, buffers, chunk, cores, cache ("warm", "cold", "unknown"), bytes; early_bytes,
        copied before the order was known; first_bytes, copied when a first step had what it is routed to; and the
        CLOCK_MONOTONIC seconds "started" and "done"."""
        self.is_attached = False
        self._size = size
        self._cores = cores or usable_cpus()
        self._native = library or native.load(lib)
        self._copier: Copier | None = None
        if early is not None and self._native is not None:
            self._copier = EarlyCopier(self._native, early, CHUNK)
        elif self._cores > FEW_CORES:
            # With fewer, the way depends on the page cache, which is asked for when the order is known.
            self._copier = self._ring(self._cores)

    def _ring(self, threads: int) -> Copier | None:
        if self._native is None:
            return None
        # A ring larger than the file would only cost time to page-lock.
        threads = max(1, min(THREADS, threads, -(-self._size // (CHUNK * BUFFERS))))
        return NativeCopier(self._native, threads, BUFFERS, CHUNK)

    def order(self, groups: "Iterable[Group]", experts: "Sequence[Experts]" = ()) -> None:
        """Say what is to be copied, in execution order. What is not in the page cache is read ahead from here on."""
        groups = list(groups)
        self.asked = len(groups)
        """The group of what was asked for."""
        whole = groups + [(group, [piece]) for group, piece, _ in experts]
        cache = page_cache(whole)
        if self._copier is None and cache == "cold":
            self._copier = self._ring(DISK_THREADS)
        if self._copier is None:
            self._copier = MappedCopier()
        self.knows_experts = self._copier.knows_experts
        padding = 0 if experts else PADDING  # between others there may lie experts, which come by themselves
        if not self.knows_experts:
            groups = [(i, [*pieces, *(p for group, p, _ in experts if group == i)]) for i, pieces in groups]
            experts = ()
        chunks = cut(groups, self._copier.chunk, padding)
        if isinstance(self._copier, EarlyCopier):
            self.timings["early_bytes"] = self._copier.queued  # in the file's own order
        self._copier.order(chunks, len(groups), cache == "cold", experts)
        size = sum(chunk[4] for chunk in chunks) + sum(piece[2] for _, piece, _ in experts)
        self.timings.update(cache=cache, cores=self._cores, bytes=size)

    def early_copy(self, device: "Device", size: int) -> Memory | None:
        """The memory that an early start has already begun to fill with the file of `size` bytes, from its first byte
        on; None where it is to be allocated. Comes before `start`, whose base is then its address."""
        address = self._copier.base() if isinstance(self._copier, EarlyCopier) else 0
        return Memory(device, size, "weights", address) if address else None

    def start(self, device: "Device", base: int) -> None:
        """Begin to copy to `base`. Returns at once."""
        assert self._copier is not None, "order() comes before start()"
        self.timings.update(self._copier.description(), started=time.monotonic())
        self._copier.start(device, base)
        super().__init__(device)  # last, so that a closing device stops the copying before it takes anything away
        self.is_attached = True

    def wait_group(self, stream: "Stream", index: int) -> None:
        """Make `stream` wait for the group. Blocks only until the group's last copy is queued."""
        cu = self.device.cu
        while (event := self.event(index)) is None:
            pass
        cu.check(cu.cuStreamWaitEvent(stream.handle, event, 0), "making a stream wait for the upload")

    def event(self, index: int) -> int | None:
        """The handle of the event that stands for the group's arrival; None where it is not even queued for a while."""
        return self._started().event(index, PATIENCE)

    def is_done(self) -> bool:
        """Whether every byte is on the device already."""
        return self._started().finished(0)

    def hold(self) -> None:
        """Keep back the experts that nobody asks for."""
        self._started().hold(True)

    def release(self) -> None:
        """Let them come."""
        self._started().hold(False)

    def ask(self, group: int, routes: bytes, rows: int, n_used: int) -> None:
        """Copy experts of the group before all else: `routes` has a row of float32 a token that begins with `n_used`
        numbers of experts. What was asked for before is under way."""
        self._started().ask(group, routes, rows, n_used)

    def stamp(self) -> None:
        """Stamp when the ring of page-locked buffers was ready, where there is one."""
        if isinstance(self._copier, NativeCopier):
            began = self._copier.began
            for name, at in zip(("ring touched", "ring locked"), self._copier.ring(), strict=True):
                if at:
                    stamp(name, began, at=at, track="upload")

    def join(self) -> None:
        """Wait until every byte is on the device."""
        copier = self._started()
        while not copier.finished(PATIENCE):
            pass
        self.timings.setdefault("done", time.monotonic())

    @property
    def queued(self) -> int:
        """Bytes read and on their way so far, of `timings["bytes"]`."""
        return self._started().queued

    def _started(self) -> Copier:
        assert self._copier is not None and self.is_attached, "start() comes first"
        return self._copier

    def close(self) -> None:
        """Stop, and give back the ring, the streams and the events. A second call does nothing."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.is_attached:
            del self.device.resources[id(self)]
        if self._copier is not None:
            self._copier.free()


def cut(groups: "Iterable[Group]", size: int, padding: int = PADDING) -> list[Chunk]:
    """Chunks of at most `size` bytes that cover every piece in order, and no more than `padding` bytes between two.

    Chunks end at multiples of `size` in the file, so that reads cover whole pages; a chunk knows the first and the last
    group it has bytes of.
    """
    spans: list[tuple[int, int, list[int], list[tuple[int, int]]]] = []  # fd, shift, [start, end], [(start, group)]
    for count, (index, pieces) in enumerate(groups):
        assert index == count, f"group {index} where {count} was expected"
        for fd, offset, length, place in pieces:
            if not length:
                continue
            if spans:
                span_fd, shift, bounds, starts = spans[-1]
                if span_fd == fd and shift == place - offset and 0 <= offset - bounds[1] <= padding:
                    bounds[1] = offset + length
                    starts.append((offset, index))
                    continue
            spans.append((fd, place - offset, [offset, offset + length], [(offset, index)]))
    chunks: list[Chunk] = []
    for fd, shift, (start, end), starts in spans:
        first = 0  # the piece that `start` lies in
        while start < end:
            stop = min(start - start % size + size, end)
            last = first
            while last + 1 < len(starts) and starts[last + 1][0] < stop:
                last += 1
            chunks.append((fd, starts[first][1], starts[last][1], start, stop - start, start + shift))
            first = last + 1 if last + 1 < len(starts) and starts[last + 1][0] == stop else last
            start = stop
    return chunks


def page_cache(groups: "Sequence[Group]") -> str:
    """Whether the files are in memory: "warm", "cold" if any of a sample of pages is not, or "unknown" where the file
    system does not say."""
    pieces = [piece for _, pieces in groups for piece in pieces if piece[2]]
    page = bytearray(1)
    for fd, offset, _, _ in pieces[:: max(1, len(pieces) // SAMPLES)]:
        try:
            os.preadv(fd, [page], offset, os.RWF_NOWAIT)
        except OSError as error:
            return "cold" if error.errno == EAGAIN else "unknown"
    return "warm"
