"""The CUDA backend: a plan's weights on their way to a device, its state there, its launches. See `backends.Executor`.

Making one starts the upload and returns; the first step's launches wait for the weights layer by layer. The first token
is out before anything that only later ones need is made.
"""

import time
from struct import Struct

from reflex_ipc.cuda import families
from reflex_ipc.cuda.buffers import Buffers
from reflex_ipc.cuda.device import start_driver
from reflex_ipc.cuda.driver import gib
from reflex_ipc.cuda.fuse import alone, fused
from reflex_ipc.cuda.graph import Kept
from reflex_ipc.cuda.launch import Kernels
from reflex_ipc.cuda.linear import FEW
from reflex_ipc.cuda.lower import Lowering
from reflex_ipc.cuda.places import PAGE, CacheLayout, Columns, Places, Shape
from reflex_ipc.cuda.room import HEAD_ROWS, LEAST_TOKENS, working_space
from reflex_ipc.cuda.routed import RoutedFirst
from reflex_ipc.cuda.sampling import CONTROL, Sampling
from reflex_ipc.cuda.upload import Upload
from reflex_ipc.cuda.weights import Weights
from reflex_ipc.errors import CancelledError, DeadlineError, OutOfMemoryError, ReflexError, UnsupportedModelError, go_on
from reflex_ipc.ops import ExpertLinear, scope
from reflex_ipc.plan import Step
from reflex_ipc.stamps import stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    import numpy as np
    import numpy.typing as npt

    from reflex_ipc.cuda.device import Device, Opening
    from reflex_ipc.cuda.fuse import Group
    from reflex_ipc.cuda.launch import Launch
    from reflex_ipc.cuda.memory import Memory
    from reflex_ipc.cuda.tracing import Tracing
    from reflex_ipc.errors import Poll
    from reflex_ipc.gguf import GGUF
    from reflex_ipc.plan import Plan
    from reflex_ipc.sampler import Sampled, Sampler
    from reflex_ipc.scores import ScoredRows
    from reflex_ipc.trace import Trace

    Progress = Callable[[str, int, int], None]

LONG_STEP = 2048
"""From so many tokens on a step takes a fraction of a second or more, and is queued layer by layer."""
REPORT_EVERY = 0.05  # seconds
_NOTHING = Shape(0, 0)


class CudaExecutor:
    """One sequence of one model on one device.

    index: the device. opening: a start of the driver that is already under way. fuse: False runs every op by itself.
    experts_first: False uploads whole layers in their order whatever the first step needs of them (routed.py).
    progress: called with ("weights", bytes done, bytes in all) until all weights are there; without it the constructor
    returns while they are still coming. trace: takes when layers arrived and were computed.

    Raises NoDeviceError when there is no usable device; UnsupportedModelError when a kernel is missing, before anything
    is read; OutOfMemoryError, with the sum, before anything is copied.
    """

    def __init__(
        self,
        gguf: "GGUF",
        plan: "Plan",
        n_ctx: int,
        index: int = 0,
        progress: "Progress | None" = None,
        *,
        opening: "Opening | None" = None,
        fuse: bool = True,
        experts_first: bool = True,
        trace: "Trace | None" = None,
    ) -> None:
        self.n_ctx = n_ctx
        self.plan = plan
        self.timings: dict[str, Any] = {}
        self._n_past = 0
        self._parity = 0
        self._shape = _NOTHING
        self._upload: Upload | None = None
        self._device: Device | None = None
        self._trace = trace
        self._tracing: Tracing | None = None
        upload: Upload | None = None
        try:
            opening = opening or start_driver(index)
            try:
                families.check(plan)
            except UnsupportedModelError:
                opening.wait()  # of what is missing, a device is said first
                raise
            weights = Weights(gguf, plan, apart=experts_first and progress is None)
            upload = Upload(weights.size, early=opening.early_upload(gguf), library=opening.native)
            upload.order(weights.groups, weights.experts)
            groups = fused(plan) if fuse else alone(plan)
            columns = Columns(groups, plan.logits.name)
            stamp("layout")
            self._device = device = opening.wait()
            self.timings.update(device.times)
            _stamp_driver(device.times)
            stamp("device wait")
            self._open(device, gguf, weights, upload, groups, columns)
            if progress is not None:
                self._report(progress)
        except BaseException:
            try:
                # First: its threads may be copying to memory that goes with the device. Once it is a resource of the
                # device it goes with it in its turn, behind what waits for it.
                if upload is not None and not upload.is_attached:
                    upload.close()
            finally:
                if opening is not None:
                    opening.close()
            raise

    def _open(
        self, device: "Device", gguf: "GGUF", weights: Weights, upload: Upload, groups: "Any", columns: Columns
    ) -> None:
        plan = self.plan
        self._layout = CacheLayout(plan)
        self._weights = weights
        memory = upload.early_copy(device, gguf.shards[0].size)
        self._check_memory(device, gguf, weights.size, columns, memory)
        if memory is not None:
            base = memory.address
        else:
            base = device.allocate(weights.size, "weights").address - weights.start
        stamp("memory")
        upload.start(device, base)
        self._upload = upload
        stamp("upload")
        self._waited = -1
        self._kernels = Kernels(device)
        self._stream = device.stream()
        if self._trace is not None:
            from reflex_ipc.cuda.tracing import Tracing

            self._tracing = Tracing(self._trace, device, self._stream, upload, weights)
        self._places = places = Places()
        self._kept = Kept(self._stream)
        self._lowering = Lowering(
            device, self._kernels, self._stream, plan, groups, columns, places, lambda name: base + weights.place[name]
        )
        self._routed: RoutedFirst | None = None
        if weights.experts and upload.knows_experts:
            self._routed = RoutedFirst(plan, upload, self._stream, self._lowering.at)
        self._sampling = Sampling(device, self._kernels, self._stream, plan.n_vocab, places)
        self._buffers = Buffers(device, self._stream, plan, self._layout, self._lowering, self.n_ctx, self._forget)
        self.reset()

    def _check_memory(
        self, device: "Device", gguf: "GGUF", size: int, columns: Columns, early: "Memory | None"
    ) -> None:
        free, _ = device.memory()
        if early is not None:
            size, free = early.size, free + early.size
        cache = self._layout.page_bytes
        scratch = working_space(self.plan, columns, LEAST_TOKENS, LEAST_TOKENS)
        if size + cache + scratch > free:
            raise OutOfMemoryError(
                f"{gguf.path} needs {gib(size + cache + scratch)} of device memory ({gib(size)} weights, {gib(cache)} "
                f"cache for {PAGE} tokens, {gib(scratch)} working space); {gib(free)} are free"
            )

    def _forget(self) -> None:
        self._kept.forget()
        self._shape = _NOTHING

    # The sequence

    @property
    def n_past(self) -> int:
        """Tokens of the sequence so far."""
        return self._n_past

    def reset(self) -> None:
        """Forget the sequence: recurrent states begin anew, the cache is written over."""
        self._n_past = 0
        self._shape = _NOTHING
        at, size = self._places.recurrent
        if size:
            self._stream.fill(at + self._parity * size, 0, size)

    def reserve(self, n_tokens: int) -> None:
        """Back the cache's addresses for `n_tokens` with memory. Raises OutOfMemoryError."""
        self._buffers.reserve(n_tokens)

    # Steps

    def forward(self, step: Step, poll: "Poll | None" = None) -> None:
        """Queue a step, and return while it runs unless it is the first or a long one. Its logits stay on the device.

        Raises OutOfMemoryError, and CancelledError or DeadlineError where `poll` says so.
        """
        self._forward(step, poll, comes_again=False)

    def _forward(self, step: Step, poll: "Poll | None", *, comes_again: bool) -> None:
        """`comes_again`: other steps will have the same shape, so that it is worth keeping, and a graph."""
        try:
            shape = self._begin(step)
            is_queued = comes_again and self._tracing is None and self._kept.replay(shape.key)
            # What is queued can't be called back, and queueing takes milliseconds: asking in between costs more than it
            # saves, but for the first step, which waits for the weights. A graph is one call, and runs while this asks.
            go_on(poll)
            if not is_queued:
                for launch in self._launches(shape, self._tracing, poll, comes_again=comes_again):
                    launch()
        except (CancelledError, DeadlineError):
            self.reset()
            raise
        finally:
            if self._tracing is not None:
                self._tracing.end()
        self._advance(step.n_keep)
        self._shape = shape

    def _advance(self, n: int) -> None:
        """n tokens more are in the state; a step that keeps some leaves it in the other of the two."""
        self._n_past += n
        self._parity ^= n > 0

    def _begin(self, step: Step) -> Shape:
        """Make room for a step, send what it consists of; its launches are those of the shape returned."""
        n = len(step.tokens)
        n_expanded = self._lowering.n_expanded(n, self._n_past + n)
        is_tree = step.n_keep != n or any(parent != i - 1 for i, parent in enumerate(step.parents))
        self._buffers.hold(self._n_past, n, max(1, len(step.rows)), n_expanded, is_tree)
        self._shape = _NOTHING
        n_splits = self._lowering.n_splits(self._n_past + 1) if n == 1 and not is_tree else 0
        self._send(step, is_tree)
        return Shape(n, len(step.rows), is_tree, n_splits, n_expanded)

    def trace(
        self, step: Step, feed: "Callable[[Group], Mapping[str, bytes]]"
    ) -> "Iterator[tuple[Group, dict[str, bytes]]]":
        """Run a step group by group on values from elsewhere; what `reflex check --diff` is made of.

        `feed(group)` gives the float32 rows of the group's inputs by name; yielded is the group with what it left, in
        the same form. The cache advances as in `forward`, by the keys and values that were fed.
        """
        shape = self._begin(step)
        for group, launches in self._lowering.launches(shape):
            if group is not None:
                self._wait(max((self._weights.group[name] for name in group.weights), default=-1))
                inputs = feed(group)
                for value in group.inputs:
                    self._stream.to_device(self._lowering.at(value), inputs[value.name])
            for launch in launches:
                launch()
            if group is not None:
                yield (
                    group,
                    {
                        value.name: self._stream.read(
                            self._lowering.at(value), 4 * value.width * self._lowering.rows(value, shape)
                        )
                        for value in group.outputs
                    },
                )
        self._advance(step.n_keep)
        self._shape = shape

    def _send(self, step: Step, is_tree: bool) -> None:
        p = self._places
        n, spare = len(step.tokens), p.token_capacity - len(step.tokens)
        numbers = Struct(f"<{n}i{4 * spare}x{n}i{4 * spare}x{len(step.rows)}i")
        inputs = CONTROL.pack(self._n_past, step.n_keep, self._sampling.serial, self._parity)
        inputs += numbers.pack(*step.tokens, *step.positions, *step.rows)
        if is_tree:
            from reflex_ipc.cuda.steps import mask_of

            parents, mask = Struct(f"<{n}i").pack(*step.parents), mask_of(step)
            if p.parents == p.ancestors:
                inputs = inputs.ljust(p.ancestors - p.control, b"\0") + parents + mask
            else:
                self._stream.to_device(p.parents, parents)
                self._stream.to_device(p.mask, mask)
        self._stream.to_device(p.control, inputs)

    def _launches(
        self,
        shape: Shape,
        tracing: "Tracing | None" = None,
        poll: "Poll | None" = None,
        *,
        comes_again: bool = True,
    ) -> "Iterator[Launch]":
        """A shape's launches, each as soon as it exists and the weights it needs are on their way.

        `poll` is asked wherever there are weights to wait for, and between the layers of a long step, of which one is
        queued when the one before is done; what it raises leaves the shape unknown. `comes_again`: launches are kept
        at once, not only when the shape has come a second time.
        """
        is_long = shape.n_tokens >= LONG_STEP
        known = self._kept.launches(shape.key) if tracing is None and not is_long else None
        if known:
            yield from known
            return
        is_loaded = self._is_loaded
        is_new = known is None and not comes_again
        self._lowering.is_dependent = is_loaded and self._lowering.can_depend
        self._lowering.is_passing = is_new or not is_loaded
        made: list[Launch] = []
        routed, self._routed = self._routed, None  # of use to the first step alone
        if routed is not None and not routed.begin(shape.n_tokens):
            routed = None
        layer = ""
        try:
            for group, launches in self._lowering.launches(shape):
                if group is not None:
                    if is_long and layer != (layer := scope(group.name)):
                        self._stream.synchronize()
                        go_on(poll)
                    if tracing is not None:
                        tracing.end(unless=scope(group.name))
                    needed = max((self._weights.group[name] for name in group.weights), default=-1)
                    if needed > self._waited:
                        go_on(poll)
                        if routed is not None and isinstance(op := group.parts[0], ExpertLinear):
                            routed.bring(op, needed, shape.n_tokens)
                        else:
                            self._wait(needed)
                    if tracing is not None:
                        tracing.begin(scope(group.name))
                for launch in launches:
                    if not is_new:
                        made.append(launch)
                    yield launch
            if not is_loaded and self._upload is not None:
                self._upload.stamp()
        finally:
            self._lowering.is_passing = False
            if routed is not None:
                routed.end()
        if is_loaded and not is_long:
            self._kept.keep(shape.key, made)

    @property
    def _is_loaded(self) -> bool:
        """Whether what is queued from here on finds all weights on the device."""
        return self._waited == len(self._weights.groups) - 1

    def _wait(self, index: int) -> None:
        """What is queued from here on finds the weights' group `index`, and those before it, on the device."""
        while self._waited < index:
            self._waited += 1
            assert self._upload is not None
            self._upload.wait_group(self._stream, self._waited)

    def _report(self, progress: "Progress") -> None:
        assert self._upload is not None
        total = int(self._upload.timings["bytes"])  # type: ignore[call-overload]
        queued = -1
        while queued < (queued := self._upload.queued) < total:
            progress("weights", queued, total)
            time.sleep(REPORT_EVERY)
        self._upload.join()
        self._wait(len(self._weights.groups) - 1)
        self._upload.stamp()
        progress("weights", total, total)

    # Logits

    def logits(self) -> "npt.NDArray[np.float32]":
        """(rows of the last step, n_vocab), fetched."""
        import numpy as np

        n, width = self._shape.n_rows, self.plan.n_vocab
        raw = self._stream.read(self._logits(0), 4 * n * width)
        return np.frombuffer(raw, np.float32).reshape(n, width)

    def _logits(self, row: int) -> int:
        return self._lowering.at(self.plan.logits) + 4 * row * self.plan.n_vocab

    # Scoring

    def score(self, step: Step, targets: "Sequence[Sequence[int]]", poll: "Poll | None" = None) -> "ScoredRows":
        """Run a step; the log-probabilities of each row's targets, and its logsumexp. Logits never leave the device;
        those of HEAD_ROWS rows are held at once."""
        from reflex_ipc.cuda.steps import KERNELS, log_probabilities, rounded, score_bytes
        from reflex_ipc.scores import ScoredRows

        n_vocab = self.plan.n_vocab
        for name in KERNELS:
            self._kernels.function(name)  # loaded here, not behind a first step's wait for weights
        starts = range(0, len(step.rows), HEAD_ROWS)
        n_most = max(sum(map(len, targets[start : start + HEAD_ROWS])) for start in starts)
        at = self._buffers.hold_scores(score_bytes(min(HEAD_ROWS, len(step.rows)), n_most, n_vocab))
        if self._kept.step_graphs:  # decisions come again
            self._buffers.hold_answers()
        found = ScoredRows([], [])
        for start in starts:
            rows = step.rows[start : start + HEAD_ROWS]
            if start == 0:
                first = step._replace(rows=rows)
                if self._is_loaded:  # else no launch is kept, and experts would be fetched for what nothing sees
                    first = rounded(first)
                self._forward(first, poll, comes_again=len(first.tokens) <= FEW)
            else:
                self._head(len(step.tokens), rows, poll)
            self._shape = Shape(len(step.tokens), len(rows))
            some = targets[start : start + HEAD_ROWS]
            logits, answers = self._logits(0), self._buffers.answers
            logprobs, logsumexps = log_probabilities(self._kernels, self._stream, logits, n_vocab, some, at, answers)
            found.logprobs.extend(logprobs)
            found.logsumexps.extend(logsumexps)
        return found

    def _head(self, n_tokens: int, rows: "Sequence[int]", poll: "Poll | None") -> None:
        """The logits of other rows of the step that was just run."""
        try:
            go_on(poll)
        except (CancelledError, DeadlineError):
            self.reset()
            raise
        self._stream.to_device(self._places.rows, Struct(f"<{len(rows)}i").pack(*rows))
        for group, launches in self._lowering.launches(Shape(n_tokens, len(rows))):
            if group is not None and group.outputs[0].selected:
                for launch in launches:
                    launch()

    def step_limit(self, n_past: int, n_tokens: int) -> int:
        """How many of `n_tokens` one step behind `n_past` others may have, by free memory and the grids of kernels."""
        return self._buffers.step_limit(n_past, n_tokens)

    # Decoding

    def decode(self, sampler: "Sampler", poll: "Poll | None" = None) -> "Iterator[Sampled]":
        """Tokens for ever: a graph a token, sampled on the device and queued one ahead of the caller where they can be.

        Raises ReflexError where the last step computed no logits.
        """
        if not self._shape.n_rows:
            raise ReflexError("decode was called after a step that computed no logits")
        sampling = self._sampling
        kind = sampling.kind(sampler)
        sampling.begin(sampler)
        last = self._logits(self._shape.n_rows - 1)
        if self._tracing is not None:
            self._tracing.begin("sample")
        for launch in sampling.launches(kind, last, dependent=False, by_mail=False):
            launch()
        number = sampling.queued()
        if self._tracing is not None:
            self._tracing.end()
        is_first = True
        while True:
            sampled = sampling.fetch(number, sampler) if is_first else sampling.receive(number, sampler)
            # The step behind this token is under way while the caller has it: but for the first one, which nothing may
            # hold up, for penalties, which the host counts, and where the context ends.
            is_ahead = not is_first and kind != "adjust" and self._n_past < self.n_ctx
            if is_ahead:
                number = self._queue_token(kind)
            is_first = False
            yield sampled
            go_on(poll)
            if not is_ahead:
                if kind == "adjust":
                    sampling.begin(sampler)
                number = self._queue_token(kind)
            self._advance(1)

    def _queue_token(self, kind: str) -> int:
        """Queue the step of the token just sampled and the choice of the next; returns the number of its mail."""
        self._buffers.back(self._n_past + 1)
        n_splits = self._lowering.n_splits(self._n_past + 1)
        graph = self._kept.token_graphs.get((n_splits, kind))
        if graph is None:
            self._wait(len(self._weights.groups) - 1)
            launches = [
                *self._launches(Shape(1, 1, False, n_splits)),
                *self._sampling.launches(kind, self._logits(0), dependent=self._lowering.can_depend),
            ]
            graph = self._kept.token_graphs[n_splits, kind] = self._kept.recorded(launches)
        if self._tracing is not None:
            self._tracing.begin("token")
        graph.launch(self._stream)
        if self._tracing is not None:
            self._tracing.end()
        return self._sampling.queued()

    def close(self) -> None:
        """Give back the device and all that is on it."""
        if self._tracing is not None:
            self._tracing.collect()
        if self._device is not None:
            self._device.close()


def _stamp_driver(times: "Mapping[str, float]") -> None:
    """What the thread that opened the device took for driver and context."""
    begin, driver, context = (int(times[name] * 1e9) for name in ("begin", "driver", "context"))
    stamp("driver", begin, at=driver, track="driver")
    stamp("context", driver, at=context, track="driver")
