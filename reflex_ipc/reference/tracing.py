"""How long each op and each layer takes on the CPU, for a trace."""

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from reflex_ipc.ops import scope
from reflex_ipc.trace import Trace

Functions = dict[type, Callable[[Any, Any], Any]]


def timed(functions: Functions, trace: Trace) -> Functions:
    """The same functions; each leaves a span, and so does each layer when the next begins."""
    clock = _Clock(trace)
    return {kind: clock.around(function) for kind, function in functions.items()}


class _Clock:
    """Ops follow each other on one thread: a layer is what follows each other and has one scope."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._layer: tuple[str, int, int] | None = None  # name, start, end so far
        trace.on_collect(self._end_layer)

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(op: Any, values: Any) -> Any:
            start = monotonic_ns()
            out = function(op, values)
            end = monotonic_ns()
            self._trace.add("ops", op.name, start, end, op=type(op).__name__, shape=list(out.shape))
            layer = scope(op.name)
            if self._layer is not None and self._layer[0] == layer:
                start = self._layer[1]
            else:
                self._end_layer()
            self._layer = layer, start, end
            return out

        return run

    def _end_layer(self) -> None:
        if self._layer is not None:
            self._trace.add("compute", *self._layer)
            self._layer = None
