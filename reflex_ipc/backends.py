"""What a plan can run on, and which of it a model gets: the one place that knows there are two."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from reflex_ipc.environment import complete_site
from reflex_ipc.errors import InvalidRequestError
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import Plan, Step
from reflex_ipc.sampler import Sampled, Sampler

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from reflex_ipc.cuda.device import Opening
    from reflex_ipc.errors import Poll
    from reflex_ipc.scores import ScoredRows
    from reflex_ipc.trace import Trace

DEVICE_NODES = ("/dev/nvidiactl", "/dev/dxg")
"""Where there is an NVIDIA device, one of these is there, too."""

Progress = Callable[[str, int, int], None]
"""Called while a model opens with a phase, what is done of it, and the total."""


class Executor(Protocol):
    """What a backend does with a plan. It holds one sequence, `n_past` tokens long.

    Whatever takes a `poll` asks it where that costs nothing. Where it says to stop, CancelledError or DeadlineError is
    raised.
    """

    n_ctx: int

    @property
    def n_past(self) -> int: ...

    def reset(self) -> None:
        """Forget the sequence and its logits."""

    def reserve(self, n_tokens: int) -> None:
        """Make room for a sequence of `n_tokens`, at most `n_ctx`. Raises OutOfMemoryError with the sum."""

    def forward(self, step: Step, poll: "Poll | None" = None) -> None:
        """Run a step. The logits of its rows stay with the executor until the next one.

        `poll` is asked before anything is done, and inside a step that takes long; wherever it ends the step, what is
        left behind is what `reset` leaves. After an OutOfMemoryError the sequence is to be reset; a step that fits is
        computed then. `score` likewise.
        """

    def logits(self) -> "npt.NDArray[np.float32]":
        """(rows of the last step, n_vocab), on the host."""

    def score(self, step: Step, targets: Sequence[Sequence[int]], poll: "Poll | None" = None) -> "ScoredRows":
        """Run a step; for each of its rows, the log-probabilities of the row's target tokens, and the logsumexp."""

    def step_limit(self, n_past: int, n_tokens: int) -> int:
        """How many of `n_tokens` one step behind `n_past` others may have, by the memory there is."""

    def decode(self, sampler: Sampler, poll: "Poll | None" = None) -> Iterator[Sampled]:
        """Sample from the last row, yield, ask, feed back, for ever; never more than one token ahead of the caller."""

    def close(self) -> None: ...


def start_driver(backend: str, device: int) -> "Opening | None":
    """The driver's start in a thread, before anything else is done; None where no device can be used."""
    if backend not in ("auto", "cuda", "cpu"):
        raise InvalidRequestError(f"the backend is {backend!r}; known are auto, cuda and cpu", "backend")
    if backend == "cpu" or (backend == "auto" and not any(os.path.exists(node) for node in DEVICE_NODES)):
        return None
    from reflex_ipc.cuda import device as cuda

    return cuda.start_driver(device)


def make_executor(
    gguf: GGUF,
    plan: Plan,
    n_ctx: int,
    opening: "Opening | None",
    backend: str,
    threads: int | None,
    progress: Progress | None,
    trace: "Trace | None",
) -> tuple[Executor, str, str | None]:
    """The executor that `backend` names, the name of what was chosen, and why, where that is not the device.

    "auto" takes the CPU where no device can be used, and only there: with one that can be, a package without kernels
    for it (DeviceError) and a model that the kernels cannot run (UnsupportedModelError) are errors.
    """
    why: str | None = None
    if opening is not None:
        from reflex_ipc.cuda.driver import NoDeviceError
        from reflex_ipc.cuda.executor import CudaExecutor

        try:
            return CudaExecutor(gguf, plan, n_ctx, progress=progress, opening=opening, trace=trace), "cuda", None
        except NoDeviceError as error:
            if backend == "cuda":
                raise
            why = str(error)
    elif backend == "auto":
        why = "no NVIDIA device"
    complete_site()
    from reflex_ipc.reference import memory

    memory.check(gguf.path, memory.first(plan, n_ctx))
    from reflex_ipc.reference.executor import ReferenceExecutor

    def report(done: int, total: int) -> None:
        if progress is not None:
            progress("weights", done, total)

    return ReferenceExecutor(gguf, plan, n_ctx, threads, report, trace), "cpu", why
