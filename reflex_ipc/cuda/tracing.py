"""When layers arrived on a device and were computed there: timing events in its streams, read when all is done.

A device's clock counts from an event of its own. One is recorded and waited for between two looks at CLOCK_MONOTONIC,
which places all others on that clock, to within half of what lies between the looks.
"""

import _thread
import sys
from time import monotonic_ns

from reflex_ipc.cuda.device import Event, Stream
from reflex_ipc.cuda.memory import Resource
from reflex_ipc.errors import ReflexError
from reflex_ipc.ops import scope

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reflex_ipc.cuda.device import Device
    from reflex_ipc.cuda.upload import Upload
    from reflex_ipc.cuda.weights import Weights
    from reflex_ipc.trace import Trace

ANCHORS = 5  # attempts, of which the one with the closest looks counts
SWITCH = 1e-4
"""Seconds the interpreter lets a thread run: an arrival is marked that much late at most, where it is busy."""
MOST_MARKS = 20_000
"""Events are the driver's memory: what is computed after so many of them has no spans."""


class Tracing(Resource):
    """Marks in the compute stream, and a stream of its own in which each group of weights is waited for.

    stream: where layers are computed. upload: started, with the groups of `weights`.

    The thread that waits for the groups ends before anything it uses is taken away: this closes before the upload.
    """

    def __init__(self, trace: "Trace", device: "Device", stream: Stream, upload: "Upload", weights: "Weights") -> None:
        self._trace = trace
        self._stream = stream
        self._upload = upload
        names: dict[int, str] = {}
        for name, number in weights.group.items():
            names.setdefault(number, scope(name))
        self._groups = [(names[number], size) for number, size in enumerate(weights.sizes)]
        self._copies = Stream(device)
        self._anchor, self._anchor_ns = self._place(device)
        self._marks: list[tuple[str, Event, Event | None]] = []
        self._now: str | None = None
        self._arrivals = [Event(device, timing=True) for _ in self._groups]
        self._arrived = 0
        self._stop = False
        self._done = _thread.allocate_lock()
        self._done.acquire()
        sys.setswitchinterval(SWITCH)
        _thread.start_new_thread(self._follow, (device,))
        super().__init__(device)  # last: what closes waits for the thread

    def _place(self, device: "Device") -> tuple[Event, int]:
        """An event that the device has passed, and when that was."""
        tries = []
        for _ in range(ANCHORS):
            event = Event(device, timing=True)
            before = monotonic_ns()
            event.record(self._copies)
            event.synchronize()
            tries.append((monotonic_ns() - before, before, event))
        apart, before, event = min(tries, key=lambda each: each[0])
        self._trace.about["device_clock_within_ms"] = apart / 2e6
        return event, before + apart // 2

    def _follow(self, device: "Device") -> None:
        try:
            device.make_current()
            cu = device.cu
            for number, arrival in enumerate(self._arrivals):
                while (event := self._upload.event(number)) is None:
                    if self._stop:
                        return
                cu.check(cu.cuStreamWaitEvent(self._copies.handle, event, 0), "making a stream wait for the upload")
                arrival.record(self._copies)
                self._arrived = number + 1
        except ReflexError:
            return  # whoever computes with the weights meets the same, and says so
        finally:
            self._done.release()

    def begin(self, name: str) -> None:
        """What is queued from here on is `name`, if it is not already."""
        if self._now == name:
            return
        self.end()
        if len(self._marks) >= MOST_MARKS:
            self._trace.dropped += 1
            return
        self._marks.append((name, self._mark(), None))
        self._now = name

    def end(self, unless: str | None = None) -> None:
        """What was begun ends here; not where it is `unless`, which goes on."""
        if self._now is None or self._now == unless:
            return
        self._now = None
        name, began, _ = self._marks[-1]
        self._marks[-1] = name, began, self._mark()

    def _mark(self) -> Event:
        event = Event(self.device, timing=True)
        event.record(self._stream)
        return event

    def collect(self) -> None:
        """Wait for what was queued and put it into the trace. A device that fails leaves its words there instead."""
        if self.is_closed:
            return
        self._stop = True
        self._trace.about["upload"] = self._upload.timings
        try:
            with self._done:
                self._stream.synchronize()
                self._copies.synchronize()
                self._read()
        except ReflexError as error:
            self._trace.about["device_error"] = str(error)
        self.close()

    def _read(self) -> None:
        before = round(float(self._upload.timings["started"]) * 1e9)  # type: ignore[arg-type]
        for (name, size), event in zip(self._groups, self._arrivals[: self._arrived], strict=False):
            at = max(before, self._at(event))
            self._trace.add("copy", name, before, at, bytes=size)
            before = at
        for name, began, ended in self._marks:
            if ended is not None:
                self._trace.add("compute", name, self._at(began), self._at(ended))

    def _at(self, event: Event) -> int:
        return self._anchor_ns + round(event.milliseconds_since(self._anchor) * 1e6)

    def _release(self) -> None:
        self._stop = True
        with self._done:
            pass
