"""`reflex check`: does this device compute what the reference computes, for this model?

Without `--diff` the logits of a prompt, whole and token by token, against the reference's. With it every op by itself
on the reference's own inputs, each against the bound of its kind, fused and one by one; the first that differs is the
last that is looked at.
"""

from argparse import Namespace

from reflex_ipc import ops
from reflex_ipc.environment import model_path
from reflex_ipc.errors import CheckFailedError
from reflex_ipc.plan import Step
from reflex_ipc.terminal import write

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    import numpy.typing as npt

    from reflex_ipc.cuda.executor import CudaExecutor
    from reflex_ipc.cuda.fuse import Group
    from reflex_ipc.gguf import GGUF
    from reflex_ipc.plan import Plan
    from reflex_ipc.reference.weights import Weights

    Array = npt.NDArray[np.float32]

BOUNDS: "dict[type, float]" = {
    ops.Embed: 0.0,
    ops.Slice: 0.0,
    ops.Concat: 0.0,
    ops.SelectRows: 0.0,
    ops.Add: 0.0,
    ops.SwiGlu: 1e-6,
    ops.Gate: 1e-6,
    ops.RmsNorm: 1e-6,
    ops.L2Norm: 1e-6,
    ops.Rotate: 1e-6,
    ops.Linear: 1e-3,
    ops.ExpertLinear: 1e-3,
    ops.Attention: 2e-3,
    ops.LatentAttention: 2e-3,
    ops.Route: 1e-5,
    ops.ExpertSum: 1e-6,
    ops.Conv: 1e-6,
    ops.DeltaRule: 1e-5,
}
"""Relative error (norm of the difference over the norm of the reference) that an op may have: none where nothing is
rounded or everything is rounded alike, a few roundings of float32 elsewhere; half-precision inputs of tensor cores, and
the half-precision cache."""
MODEL_BOUND = 1e-2
LENGTH = 37
"""Tokens of the prompt: no multiple of any tile."""


def check(arguments: Namespace) -> int:
    """Returns the exit code; raises CheckFailedError, naming the op, at the first difference."""
    from reflex_ipc import archs
    from reflex_ipc.gguf import GGUF

    with GGUF.open(model_path(arguments.model)) as gguf:
        plan = archs.build(gguf)
        tokens = [(7 + 31 * i) % plan.n_vocab for i in range(min(LENGTH, plan.n_ctx_train - 1))]
        if arguments.diff:
            for fuse in (False, True):
                check_ops(gguf, plan, tokens, arguments.device, fuse=fuse)
        else:
            check_model(gguf, plan, tokens, arguments.device)
    return 0


def check_model(gguf: "GGUF", plan: "Plan", tokens: list[int], index: int) -> None:
    """Compare logits at all positions, the prompt in one piece and token by token."""
    import numpy as np

    from reflex_ipc.cuda.executor import CudaExecutor
    from reflex_ipc.reference.executor import ReferenceExecutor

    reference = ReferenceExecutor(gguf, plan, len(tokens))
    reference.reserve(len(tokens))
    reference.forward(Step.text(tokens, 0, range(len(tokens))))
    expected = reference.logits()
    reference.close()
    executor = CudaExecutor(gguf, plan, len(tokens), index)
    try:
        executor.reserve(len(tokens))
        executor.forward(Step.text(tokens, 0, range(len(tokens))))
        _judge("logits of a prompt", executor.logits(), expected, MODEL_BOUND)
        executor.reset()
        rows = []
        for position, token in enumerate(tokens):
            executor.forward(Step.text([token], position, [0]))
            rows.append(executor.logits())
        _judge("logits token by token", np.concatenate(rows), expected, MODEL_BOUND)
    finally:
        executor.close()


def check_ops(gguf: "GGUF", plan: "Plan", tokens: list[int], index: int, *, fuse: bool) -> None:
    """Compare every op: a prompt, then a single token behind it, then a tree."""
    from reflex_ipc.cuda.executor import CudaExecutor
    from reflex_ipc.reference.ops import States
    from reflex_ipc.reference.weights import Weights

    weights = Weights(gguf, plan, 2)
    states = States(plan.states)
    n = len(tokens)
    states.reserve(n + 8)
    executor = CudaExecutor(gguf, plan, n + 8, index, fuse=fuse)
    tree = Step(tokens[:4], [n + 1, n + 2, n + 2, n + 3], [-1, 0, 0, 2], [1, 3], 1)
    steps = {
        "prompt": Step.text(tokens, 0, [0, n - 1]),
        "token": Step.text(tokens[:1], n, [0]),
        "tree": tree,
    }
    try:
        for what, step in steps.items():
            for name, kind, error, bound in compare(executor, step, weights, states):
                _report(f"{what:<7}{'fused ' if fuse else ''}{name:<40}{kind:<12}", error, bound)
    finally:
        executor.close()
        weights.close()


def compare(
    executor: "CudaExecutor", step: Step, weights: "Weights", states: "object"
) -> "Iterator[tuple[str, str, float, float]]":
    """Name, kind, relative error and bound of every value the device leaves in a step."""
    import numpy as np

    from reflex_ipc.reference.ops import FUNCTIONS, Run

    run: Run = Run(step, weights, states)  # type: ignore[arg-type]

    def feed(group: "Group") -> "Mapping[str, bytes]":
        inputs = {value.name: run[value].astype(np.float32).tobytes() for value in group.inputs}
        for op in group.parts:
            run.values[op.out.name] = FUNCTIONS[type(op)](op, run)
        return inputs

    for group, left in executor.trace(step, feed):
        bound = sum(BOUNDS[type(op)] for op in group.parts)
        for name, raw in left.items():
            expected = run.values[name]
            actual = np.frombuffer(raw, np.float32).reshape(expected.shape)
            yield name, group.kind, relative_error(actual, expected), bound
    run.states.n_past += step.n_keep


def relative_error(actual: "Array", expected: "Array") -> float:
    """The norm of the difference over the norm of what is expected."""
    import numpy as np

    if not expected.size:
        return 0.0
    wanted = expected.astype(np.float64)
    error = float(np.linalg.norm(actual - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))
    return error if error == error else float("inf")


def _judge(what: str, actual: "Array", expected: "Array", bound: float) -> None:
    _report(f"{what:<40}", relative_error(actual, expected), bound)


def _report(what: str, error: float, bound: float) -> None:
    write(f"{what} {error:9.2e}  {'ok' if error <= bound else f'above {bound:.0e}'}\n")
    if error > bound:
        raise CheckFailedError(
            f"{' '.join(what.split())} differs from the reference by {error:.2e}, more than {bound:.0e}"
        )
