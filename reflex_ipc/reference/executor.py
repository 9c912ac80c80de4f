"""The CPU backend: runs a plan with NumPy, one op after the other."""

import os
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from reflex_ipc.errors import InvalidRequestError, OutOfMemoryError
from reflex_ipc.gguf import GGUF
from reflex_ipc.plan import Plan, Step, last_uses
from reflex_ipc.reference import memory
from reflex_ipc.reference.ops import FUNCTIONS, Run, States
from reflex_ipc.reference.weights import Weights
from reflex_ipc.sampler import Sampled, Sampler

Array = npt.NDArray[np.float32]


class ReferenceExecutor:
    """Weights, state and arithmetic of one sequence. See `engine.Executor` for the contract."""

    def __init__(
        self,
        gguf: GGUF,
        plan: Plan,
        n_ctx: int,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Raises OutOfMemoryError, with the sum, before anything is allocated."""
        self.plan = plan
        self.n_ctx = n_ctx
        self._path = gguf.path
        self._check(memory.estimate(plan, min(n_ctx, memory.CONTEXT_STEP)))
        if threads is not None:
            if threads < 1:
                raise InvalidRequestError(f"threads is {threads}; at least 1 is needed")
            from threadpoolctl import threadpool_limits

            threadpool_limits(threads)
        self._dead = last_uses(plan.ops)
        self._weights = Weights(gguf, plan, threads or len(os.sched_getaffinity(0)), progress)
        self._states = States(plan.states)
        self._logits = np.empty((0, plan.n_vocab), np.float32)

    @property
    def n_past(self) -> int:
        return self._states.n_past

    def reset(self) -> None:
        self._states.reset()

    def reserve(self, n_tokens: int) -> None:
        if n_tokens > self._states.n_reserved:
            n_tokens = min(self.n_ctx, -(-n_tokens // memory.CONTEXT_STEP) * memory.CONTEXT_STEP)
            self._check(memory.estimate(self.plan, n_tokens)._replace(weights=0))
            self._states.reserve(n_tokens)

    def _check(self, need: memory.Need) -> None:
        free = memory.available()
        if free is not None and need.total > free:
            raise OutOfMemoryError(f"{self._path} needs {need}; {memory.mib(free)} are free")

    def forward(self, step: Step) -> None:
        run = Run(step, self._weights, self._states)
        for op, dead in zip(self.plan.ops, self._dead, strict=True):
            if op.out.selected and not step.rows:
                break  # nobody wants logits: the state is all this step was for
            run.values[op.out.name] = FUNCTIONS[type(op)](op, run)
            for name in dead:
                del run.values[name]
        self._states.n_past += step.n_keep
        self._logits = run[self.plan.logits] if step.rows else self._logits[:0]

    def logits(self) -> Array:
        return self._logits

    def decode(self, sampler: Sampler) -> Iterator[Sampled]:
        while True:
            sampled = sampler.sample(self._logits[-1])
            # The token is out before its own forward pass begins.
            yield sampled
            self.forward(Step.text([sampled.id], self.n_past, [0]))

    def close(self) -> None:
        self._weights.close()
        self._states = States(())
