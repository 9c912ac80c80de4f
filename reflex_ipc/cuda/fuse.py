"""Which ops of a plan run as one: groups of ops, each with what it reads and leaves.

A group is a fused op that carries its parts: the reference runs the parts, the device runs the group, so every fusion
has its oracle, and architectures never mention it. `alone` is the plan as it is, one group an op.
"""

from reflex_ipc.cuda.products import MAX_MATRICES
from reflex_ipc.ops import (
    Add,
    Attention,
    Conv,
    DeltaRule,
    ExpertLinear,
    ExpertSum,
    L2Norm,
    Linear,
    RmsNorm,
    Rotate,
    Slice,
    SwiGlu,
    inputs,
    weights,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from reflex_ipc.ops import Op, Value
    from reflex_ipc.plan import Plan


class Group:
    """Ops that run as one. `kind` says how they hang together:

    op           one op as it is
    linears      up to four products of one x; with an RmsNorm of x in front where parts[0] is one
    swiglu       the same with exactly two products, gate and up, and the SwiGlu of both behind
    linear_add   a product and the Add of something else to it
    attention    QK-norms and rotations of q and k, then Attention
    delta        Conv, the slices of it with the norms of q and k, DeltaRule, the norm of its heads, their gate (SwiGlu)
    experts      ExpertLinear gate and up, or one of both and its two slices, their SwiGlu, down, and the ExpertSum
    """

    __slots__ = ("inputs", "kind", "outputs", "parts", "weights")

    def __init__(self, kind: str, parts: "Sequence[Op]", outputs: "list[Value]") -> None:
        self.kind = kind
        self.parts: tuple[Any, ...] = tuple(parts)
        made = {op.out.name for op in parts}
        self.inputs = list({v.name: v for op in parts for v in inputs(op) if v.name not in made}.values())
        self.outputs = outputs
        self.weights = [name for op in parts for name in weights(op)]

    @property
    def name(self) -> str:
        """The name of the last part: what the group computes."""
        name: str = self.parts[-1].name
        return name

    def __repr__(self) -> str:
        return f"Group({self.kind}: {', '.join(op.name for op in self.parts)})"


def alone(plan: "Plan") -> list[Group]:
    """Every op a group of its own."""
    return [Group("op", [op], [op.out]) for op in plan.ops]


def fused(plan: "Plan") -> list[Group]:
    """The plan with everything fused that can be, in an order that computes everything before it is read."""
    return _Fusion(plan).run()


class _Fusion:
    def __init__(self, plan: "Plan") -> None:
        self.plan = plan
        self.readers: dict[str, list[Op]] = {op.out.name: [] for op in plan.ops}
        self.maker: dict[str, Op] = {op.out.name: op for op in plan.ops}
        self.order = {op.out.name: i for i, op in enumerate(plan.ops)}
        for op in plan.ops:
            for value in inputs(op):
                self.readers[value.name].append(op)
        self.taken: dict[str, int] = {}  # value -> number of the group that makes it
        self.groups: list[tuple[int, str, list[Op]]] = []  # place, kind, parts

    def run(self) -> list[Group]:
        for op in self.plan.ops:
            if isinstance(op, Attention):
                self.attention(op)
            elif isinstance(op, DeltaRule):
                self.delta(op)
            elif isinstance(op, ExpertSum):
                self.experts(op)
        for op in self.plan.ops:
            if isinstance(op, RmsNorm) and op.n_group == 1 and op.out.name not in self.taken:
                self.norm(op)
        for op in self.plan.ops:
            if isinstance(op, Linear) and op.out.name not in self.taken:
                self.linear(op)
        for op in self.plan.ops:
            if op.out.name not in self.taken:
                self.add("op", [op], self.order[op.out.name])
        self.groups.sort(key=lambda group: group[0])
        made_in = {op.out.name: number for number, (_, _, parts) in enumerate(self.groups) for op in parts}
        read_outside = {self.plan.logits.name}
        for number, (_, _, parts) in enumerate(self.groups):
            for op in parts:
                read_outside.update(v.name for v in inputs(op) if made_in[v.name] != number)
        return [
            Group(kind, parts, [op.out for op in parts if op.out.name in read_outside])
            for _, kind, parts in self.groups
        ]

    def add(self, kind: str, parts: "list[Op]", place: int) -> None:
        for op in parts:
            self.taken[op.out.name] = len(self.groups)
        self.groups.append((place, kind, parts))

    def only_reader(self, op: "Op") -> "Op | None":
        readers = self.readers[op.out.name]
        return readers[0] if len(readers) == 1 and op.out != self.plan.logits else None

    def attention(self, op: Attention) -> None:
        """Take in the rotations of q and k, and the norms before them, if both are alike and only read here."""
        rotations = [self.maker[value.name] for value in (op.q, op.k)]
        first, second = rotations
        if not (isinstance(first, Rotate) and isinstance(second, Rotate)):
            return
        if (first.rope, first.offset, first.factors) != (second.rope, second.offset, second.factors):
            return
        if any(self.only_reader(rotation) is not op for rotation in rotations):
            return
        before = [self.maker[rotation.x.name] for rotation in (first, second)]
        norms = [
            norm
            for norm, rotation, heads in zip(before, rotations, (op.n_head, op.n_head_kv), strict=True)
            if isinstance(norm, RmsNorm) and norm.n_group == heads and self.only_reader(norm) is rotation
        ]
        if len({norm.eps for norm in norms}) > 1:
            norms = []
        self.add("attention", [*norms, *rotations, op], self.order[op.out.name])

    def delta(self, op: DeltaRule) -> None:
        """Take in what lies between the products: queries, keys and values side by side in one convolution that only
        this reads, and the norm and gate behind."""
        n_key, n_value = op.q.width, op.v.width
        q, k, v = (self.maker[value.name] for value in (op.q, op.k, op.v))
        if not (isinstance(q, L2Norm) and isinstance(k, L2Norm)):
            return
        if (q.n_group, q.eps) != (op.n_head_k, k.eps) or k.n_group != op.n_head_k:
            return
        slices = [part for part in (self.maker[q.x.name], self.maker[k.x.name], v) if isinstance(part, Slice)]
        if len(slices) < 3:
            return
        x = slices[0].x
        wanted = [(x, 1, 0, n_key), (x, 1, n_key, n_key), (x, 1, 2 * n_key, n_value)]
        if [(part.x, part.n_group, part.start, part.length) for part in slices] != wanted:
            return
        conv, norm = self.maker[x.name], self.only_reader(op)
        if not isinstance(conv, Conv) or x.width != 2 * n_key + n_value or len(self.readers[x.name]) != 3:
            return
        if not isinstance(norm, RmsNorm) or norm.n_group != op.n_head_v:
            return
        gate = self.only_reader(norm)
        if not isinstance(gate, SwiGlu) or gate.up != norm.out:
            return
        inner: list[Op] = [slices[0], slices[1], q, k, slices[2]]
        is_one_width = n_key // op.n_head_k == n_value // op.n_head_v
        if is_one_width and all(self.only_reader(part) for part in inner):
            self.add("delta", [conv, *inner, op, norm, gate], self.order[gate.out.name])

    def experts(self, op: ExpertSum) -> None:
        """Take in the experts themselves: gate and up of the same x, of one type and shape, and down, all of a token's
        same choice and read by nothing else."""
        down = self.maker[op.x.name]
        act = self.maker[down.x.name] if isinstance(down, ExpertLinear) else None
        if not isinstance(down, ExpertLinear) or not isinstance(act, SwiGlu):
            return
        gate, up = self.maker[act.gate.name], self.maker[act.up.name]
        first, second = gate, up
        inner: list[Op] = [gate, up, act, down]
        if any(self.only_reader(part) is not reader for part, reader in zip(inner, (act, act, down, op), strict=True)):
            return
        if isinstance(gate, Slice) and isinstance(up, Slice):  # halves of what one tensor makes
            first = second = self.maker[gate.x.name]
            n_used, n_ff = op.routes.width // 2, self.plan.weights[down.weight].ne[0]
            wanted = [(first.out, n_used, 0, n_ff), (first.out, n_used, n_ff, n_ff)]
            if [(part.x, part.n_group, part.start, part.length) for part in (gate, up)] != wanted:
                return
            if first.out.width != 2 * act.out.width or len(self.readers[first.out.name]) != 2:
                return
            inner.insert(0, first)
        if not isinstance(first, ExpertLinear) or not isinstance(second, ExpertLinear):
            return
        tensors = [self.plan.weights[part.weight] for part in (first, second)]
        is_alike = first.x == second.x and len({(tensor.type, tensor.ne) for tensor in tensors}) == 1
        if is_alike and first.routes == second.routes == down.routes == op.routes:
            self.add("experts", [*inner, op], self.order[op.out.name])

    def norm(self, op: RmsNorm) -> None:
        """A norm whose readers are all products goes into them."""
        readers = self.readers[op.out.name]
        linears = [reader for reader in readers if isinstance(reader, Linear)]
        if not readers or len(linears) != len(readers) or len(linears) > MAX_MATRICES or op.out == self.plan.logits:
            return
        self.products([op], linears)

    def linear(self, op: Linear) -> None:
        """A product whose only reader adds something that is known by then; else all products of the same x."""
        reader = self.only_reader(op)
        if isinstance(reader, Add) and reader.a != reader.b:
            other = reader.b if reader.a == op.out else reader.a
            if self.order[other.name] < self.order[op.out.name]:
                self.add("linear_add", [op, reader], self.order[op.out.name])
                return
        others = [
            r for r in self.readers[op.x.name] if isinstance(r, Linear) and r.out.name not in self.taken and r is not op
        ]
        others = [r for r in others if not isinstance(self.only_reader(r), Add)]
        self.products([], [op, *others][:MAX_MATRICES])

    def products(self, norm: "list[RmsNorm]", linears: "list[Linear]") -> None:
        # A product can move to the front, x being there already; the place is that of the first.
        place = self.order[linears[0].out.name]
        if len(linears) == 2:
            acts = {self.only_reader(linear) for linear in linears}
            (act,) = acts if len(acts) == 1 else (None,)
            types = {self.plan.weights[linear.weight].type.name for linear in linears}
            plain = all(linear.bias is None for linear in linears)
            if isinstance(act, SwiGlu) and len(types) == 1 and plain:
                gate, up = sorted(linears, key=lambda linear: linear.out != act.gate)
                self.add("swiglu", [*norm, gate, up, act], place)
                return
        self.add("linears", [*norm, *linears], place)
