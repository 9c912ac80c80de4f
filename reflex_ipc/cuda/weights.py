"""Where a model's tensors lie on the device, and in which groups they come."""

from reflex_ipc.cuda.memory import ALIGNMENT, aligned
from reflex_ipc.ops import ExpertLinear, scope

TYPE_CHECKING = False
if TYPE_CHECKING:
    from reflex_ipc.cuda.copiers import Experts
    from reflex_ipc.gguf import GGUF
    from reflex_ipc.plan import Plan


class Weights:
    """Where each tensor lies: in a copy of the file from its first byte on, or of each shard behind the other. What no
    tensor of the plan needs at the beginning and the end is left out: bytes `start` to `stop` are what there is.

    A group is a layer; with `apart`, first all layers without their experts, then the experts of each."""

    def __init__(self, gguf: "GGUF", plan: "Plan", apart: bool = False) -> None:
        self.experts: list[Experts] = []
        self.sizes: list[int] = []  # bytes of each group
        self.place: dict[str, int] = {}
        self.group: dict[str, int] = {}
        self.groups: list[tuple[int, list[tuple[int, int, int, int]]]] = []
        shard_at = [0]
        for shard in gguf.shards:
            shard_at.append(aligned(shard_at[-1] + shard.size))
        experts = {op.weight for op in plan.ops if isinstance(op, ExpertLinear)} if apart else set()
        last = None
        for name in sorted(plan.weights, key=experts.__contains__) if experts else plan.weights:
            tensor, layer = plan.weights[name], (name in experts, scope(name))
            if layer != last:
                self.groups.append((len(self.groups), []))
                self.sizes.append(0)
            last = layer
            self.group[name] = group = len(self.groups) - 1
            self.place[name] = place = shard_at[tensor.shard] + tensor.offset
            self.sizes[group] += tensor.nbytes
            piece = gguf.shards[tensor.shard].fd, tensor.offset, tensor.nbytes, place
            if name in experts:
                self.experts.append((group, piece, tensor.ne[2]))
            else:
                self.groups[group][1].append(piece)
        ends = [(self.place[name], self.place[name] + tensor.nbytes) for name, tensor in plan.weights.items()]
        self.start = min(start for start, _ in ends) // ALIGNMENT * ALIGNMENT
        self.stop = max(stop for _, stop in ends)

    @property
    def size(self) -> int:
        """Bytes on the device."""
        return self.stop - self.start
