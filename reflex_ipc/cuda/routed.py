"""A first step whose weights are still coming, of a model with experts: what its tokens are routed to comes first.

Everything but experts is on its way first in any case. Then, layer by layer, the device says which experts it chose,
and these are uploaded before the products that need them: a round trip a layer, for a share of the bytes. All other
experts follow when the last layer is queued; the second step waits for all of them.
"""

from time import monotonic_ns

from reflex_ipc.ops import ExpertLinear
from reflex_ipc.stamps import stamp

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from reflex_ipc.cuda.device import Stream
    from reflex_ipc.cuda.upload import Upload
    from reflex_ipc.ops import Value
    from reflex_ipc.plan import Plan

MOST = 0.6
"""Share of the experts that a step may be expected to choose: chosen slabs come at about half the rate of everything in
its order, as readers wait for each other after every layer, and nearly all chosen would be slower than all."""


class RoutedFirst:
    """plan: with experts, which `upload` was given apart. stream: where the step computes. at: addresses of values."""

    def __init__(self, plan: "Plan", upload: "Upload", stream: "Stream", at: "Callable[[Value], int]") -> None:
        ops = [op for op in plan.ops if isinstance(op, ExpertLinear)]
        self._share = max(op.routes.width // 2 / plan.weights[op.weight].ne[2] for op in ops)
        self._upload = upload
        self._stream = stream
        self._at = at
        self._last = ""
        self._began = 0

    def begin(self, n_tokens: int) -> bool:
        """Whether a step of so many tokens is better off this way; other experts are then held back until `end`."""
        if 1 - (1 - self._share) ** n_tokens > MOST or self._upload.is_done():
            return False
        self._began = monotonic_ns()
        self._upload.hold()
        return True

    def bring(self, op: ExpertLinear, group: int, n_tokens: int) -> None:
        """What is queued from here on finds the experts of the weights' group that the step's tokens go to."""
        if op.routes.name == self._last:  # another product of the same layer
            return
        self._last = op.routes.name
        routes = self._stream.read(self._at(op.routes), 4 * op.routes.width * n_tokens)
        self._upload.ask(group, routes, n_tokens, op.routes.width // 2)
        self._upload.wait_group(self._stream, self._upload.asked)

    def end(self) -> None:
        """All other experts may come."""
        self._upload.timings["first_bytes"] = self._upload.queued
        self._upload.release()
        stamp("experts first", self._began, track="upload")
