"""The CPU backend: runs a plan with NumPy, one op after the other."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from reflex_ipc.environment import usable_cpus
from reflex_ipc.errors import CancelledError, DeadlineError, InvalidRequestError, Watch, go_on
from reflex_ipc.gguf import GGUF
from reflex_ipc.ops import last_uses
from reflex_ipc.plan import PREFILL_CHUNK, Plan, Step
from reflex_ipc.reference import memory
from reflex_ipc.reference.ops import FUNCTIONS, Run, States
from reflex_ipc.reference.weights import Weights
from reflex_ipc.sampler import Sampled, Sampler
from reflex_ipc.stamps import stamp

if TYPE_CHECKING:
    from reflex_ipc.errors import Poll
    from reflex_ipc.scores import ScoredRows
    from reflex_ipc.trace import Trace

Array = npt.NDArray[np.float32]

_MOST_THREADS = 1024
_HEAD_ROWS = 32
"""Rows whose logits are held at once when scoring."""


class ReferenceExecutor:
    """Weights, state and arithmetic of one sequence. See `backends.Executor` for the contract."""

    def __init__(
        self,
        gguf: GGUF,
        plan: Plan,
        n_ctx: int,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        trace: "Trace | None" = None,
    ) -> None:
        """Raises OutOfMemoryError, with the sum, before anything is allocated."""
        stamp("numpy")
        self.plan = plan
        self.n_ctx = n_ctx
        self._path = gguf.path
        memory.check(gguf.path, memory.first(plan, n_ctx))
        if threads is not None and not 1 <= threads <= _MOST_THREADS:
            raise InvalidRequestError(f"threads is {threads}; it must be between 1 and {_MOST_THREADS}", "threads")
        n_threads = threads or usable_cpus()
        if threads is not None or n_threads < len(os.sched_getaffinity(0)):
            from threadpoolctl import threadpool_limits

            threadpool_limits(n_threads)
        n_body = next(i for i, op in enumerate(plan.ops) if op.out.selected)
        self._body, self._tail = plan.ops[:n_body], plan.ops[n_body:]
        self._dead = last_uses(plan.ops)[:n_body]
        self._weights = Weights(gguf, plan, n_threads, progress)
        stamp("weights")
        self._states = States(plan.states)
        self._logits = np.empty((0, plan.n_vocab), np.float32)
        self._functions = FUNCTIONS
        if trace is not None:
            from reflex_ipc.reference.tracing import timed

            self._functions = timed(FUNCTIONS, trace)

    @property
    def n_past(self) -> int:
        return self._states.n_past

    def reset(self) -> None:
        self._states.reset()
        self._logits = self._logits[:0]

    def reserve(self, n_tokens: int) -> None:
        if n_tokens > self._states.n_reserved:
            n_tokens = min(self.n_ctx, -(-n_tokens // memory.CONTEXT_STEP) * memory.CONTEXT_STEP)
            memory.check(self._path, memory.estimate(self.plan, n_tokens)._replace(weights=0))
            self._states.reserve(n_tokens)

    def forward(self, step: Step, poll: "Poll | None" = None) -> None:
        with self._whole_or_nothing():
            go_on(poll)
            run = self._run(step, Watch(poll))
        self._logits = self._head(run, step.rows) if step.rows else self._logits[:0]

    def score(self, step: Step, targets: Sequence[Sequence[int]], poll: "Poll | None" = None) -> "ScoredRows":
        from reflex_ipc.scores import ScoredRows

        watch = Watch(poll)
        found = ScoredRows([], [])
        with self._whole_or_nothing():
            go_on(poll)
            run = self._run(step, watch)
            # The logits of all rows of a large tree would not fit: a piece of them at a time.
            for start in range(0, len(step.rows), _HEAD_ROWS):
                watch()
                logits = self._head(run, step.rows[start : start + _HEAD_ROWS]).astype(np.float64)
                peaks = logits.max(axis=1, keepdims=True)
                logits -= peaks
                log_sums = np.log(np.exp(logits).sum(axis=1))
                found.logsumexps.extend((peaks[:, 0] + log_sums).tolist())
                for row, log_sum, wanted in zip(logits, log_sums, targets[start : start + _HEAD_ROWS], strict=True):
                    found.logprobs.append((row[list(wanted)] - log_sum).tolist())
        return found

    @contextlib.contextmanager
    def _whole_or_nothing(self) -> Iterator[None]:
        """A step that is ended has moved some layers' recurrent states on, and others' not: the sequence goes."""
        try:
            yield
        except (CancelledError, DeadlineError):
            self.reset()
            raise

    def step_limit(self, n_past: int, n_tokens: int) -> int:
        if n_tokens <= PREFILL_CHUNK:  # most decisions: nothing is looked up for them
            return n_tokens
        limits = (memory.available(), memory.address_space())
        free = min((limit for limit in limits if limit is not None), default=None)
        while n_tokens > PREFILL_CHUNK and free is not None:
            if memory.estimate(self.plan, n_past + n_tokens, n_tokens).scratch <= free // 2:
                break
            n_tokens = max(PREFILL_CHUNK, n_tokens // 2)
        return n_tokens

    def _run(self, step: Step, watch: Watch) -> Run:
        """Everything up to the selection of rows; the state moves on."""
        # Broken weights give infinities and NaN, which the sampler refuses by name; NumPy's warnings help nobody.
        np.seterr(all="ignore")
        run = Run(step, self._weights, self._states, watch)
        for op, dead in zip(self._body, self._dead, strict=True):
            run.values[op.out.name] = self._functions[type(op)](op, run)
            for name in dead:
                del run.values[name]
            watch()
        self._states.n_past += step.n_keep
        return run

    def _head(self, run: Run, rows: Sequence[int]) -> Array:
        """(len(rows), n_vocab): the ops behind the selection, for these rows."""
        run.step = run.step._replace(rows=rows)
        for op in self._tail:
            run.values[op.out.name] = self._functions[type(op)](op, run)
        return run.values.pop(self.plan.logits.name)

    def logits(self) -> Array:
        return self._logits

    def decode(self, sampler: Sampler, poll: "Poll | None" = None) -> Iterator[Sampled]:
        while True:
            sampled = sampler.sample(self._logits[-1])
            # The token is out before its own forward pass begins.
            yield sampled
            self.forward(Step.text([sampled.id], self.n_past, [0]), poll)

    def close(self) -> None:
        self._weights.close()
        self._states = States(())
