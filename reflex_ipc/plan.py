"""What a model computes, as a list of ops (`ops.py`) over named values, and the builder that writes the list.

An architecture (`archs/`) is a function over a `Builder`. It says which GGUF tensors are combined how; it knows neither
NumPy nor CUDA. The result is a `Plan`: frozen ops in execution order, the state the model keeps, the weights it reads.
The reference executor maps every op to a NumPy function, the CUDA executor lowers the same list to launches. A plan is
built once a model, for steps of any number of tokens.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from reflex_ipc.errors import ModelFileError, UnsupportedModelError
from reflex_ipc.gguf import GGUF, Tensor
from reflex_ipc.ops import (
    Add,
    Attention,
    Concat,
    Conv,
    DeltaRule,
    Embed,
    ExpertLinear,
    ExpertSum,
    Gate,
    L2Norm,
    LatentAttention,
    Linear,
    Op,
    RmsNorm,
    Rope,
    Rotate,
    Route,
    SelectRows,
    Slice,
    State,
    SwiGlu,
    Value,
    last_uses,
    weights,
)

PARENT_STATE = -1
"""Parent of a token that continues the sequence kept in the state."""
PARENT_NONE = -2
"""Parent of a token that begins a sequence of its own and sees nothing before it."""
PREFILL_CHUNK = 512
"""Tokens of a prompt that go through the model in one piece; between two pieces the request may be taken back."""


class Step(NamedTuple):
    """One forward pass over T tokens.

    `parents[i]` is the index within the step of the token before token i: `i - 1` for plain text, an earlier branch
    point in a tree (which is laid out depth first), or one of the two constants above at a root. Token i sees its
    ancestors and, unless its root is `PARENT_NONE`, the whole state. `positions[i]` counts from 0. `rows` are the
    tokens whose logits are wanted, ascending. The first `n_keep` tokens, a plain chain, advance the state; what the
    others compute is forgotten with the step.
    """

    tokens: Sequence[int]
    positions: Sequence[int]
    parents: Sequence[int]
    rows: Sequence[int]
    n_keep: int

    @classmethod
    def text(cls, tokens: Sequence[int], n_past: int, rows: Sequence[int]) -> "Step":
        """Plain text that continues a state of `n_past` tokens."""
        n = len(tokens)
        return cls(tokens, range(n_past, n_past + n), range(-1, n - 1), rows, n)


class Plan(NamedTuple):
    """All of one model. `weights` is in the order of first use, which is the order of upload."""

    arch: str
    ops: tuple[Op, ...]
    states: tuple[State, ...]
    weights: dict[str, Tensor]
    logits: Value
    n_vocab: int
    n_embd: int
    n_layer: int
    n_ctx_train: int
    ignored: tuple[str, ...]
    """Tensors of the file that no op reads."""

    @property
    def n_elements(self) -> int:
        """Elements of all weights."""
        return sum(t.n_elements for t in self.weights.values())

    def resident(self) -> list[Tensor]:
        """The weights that whole ops read: all but an embedding of which only single rows are ever looked up."""
        read_whole: set[str] = set()
        for op in self.ops:
            if not isinstance(op, Embed):
                read_whole.update(weights(op))
        return [tensor for name, tensor in self.weights.items() if name in read_whole]

    def state_elements(self) -> tuple[int, int]:
        """(elements a token, fixed elements) of the state."""
        per_token = fixed = 0
        for state in self.states:
            n = 1
            for d in state.shape:
                n *= d
            if state.per_token:
                per_token += n
            else:
                fixed += n
        return per_token, fixed

    def peak_width(self) -> int:
        """Largest sum of widths of values alive at once: the scratch a token needs, in elements."""
        alive: dict[str, int] = {}
        peak = 0
        for op, dead in zip(self.ops, last_uses(self.ops), strict=True):
            alive[op.out.name] = op.out.width
            peak = max(peak, sum(alive.values()))
            for name in dead:
                del alive[name]
        return peak


class Builder:
    """Writes a plan, checking every tensor's shape against the file as it goes.

    Names inside a layer are relative: within `for i in b.layers(n)`, `"attn_q"` means `blk.i.attn_q`. Every op gets
    the name of what it computes, `blk.i.` included, so that dumps and errors can be compared across executors.
    """

    def __init__(self, gguf: GGUF, arch: str) -> None:
        self.gguf = gguf
        self.arch = arch
        self.ops: list[Op] = []
        self.states: list[State] = []
        self.weights: dict[str, Tensor] = {}
        self._scope = ""
        self._names: set[str] = set()

    def layers(self, n: int) -> Iterator[int]:
        for i in range(n):
            self._scope = f"blk.{i}."
            yield i
        self._scope = ""

    def has(self, name: str) -> bool:
        """Does the file have the tensor `name` (with its suffix) in this scope?"""
        return self._scope + name in self.gguf.tensors

    def weight(self, name: str, *ne: int) -> str:
        """The full name of a tensor (suffix included) that must exist and have the dimensions `ne`."""
        full = self._scope + name
        tensor = self.gguf.tensors.get(full)
        if tensor is None:
            raise ModelFileError(f"{self.gguf.path}: tensor {full} is missing; architecture {self.arch} needs it")
        if _trim(tensor.ne) != _trim(ne):
            raise ModelFileError(
                f"{self.gguf.path}: tensor {full} has dimensions {_dims(tensor.ne)}, its metadata ask for {_dims(ne)}"
            )
        # With exactly these dimensions: files may write or leave out ones at either end.
        self.weights.setdefault(full, tensor._replace(ne=ne))
        return full

    def _value(self, name: str, width: int, selected: bool = False) -> Value:
        return Value(self._scope + name, width, selected)

    def _emit(self, op: Op) -> Value:
        # Executors keep values by name: two of one name would silently be one.
        assert op.out.name not in self._names, f"two values are called {op.out.name}"
        self._names.add(op.out.name)
        self.ops.append(op)
        return op.out

    def embed(self, n_embd: int, n_vocab: int) -> Value:
        out = self._value("embd", n_embd)
        return self._emit(Embed(out.name, out, self.weight("token_embd.weight", n_embd, n_vocab)))

    def rms_norm(self, x: Value, name: str, eps: float, n_group: int = 1) -> Value:
        out = self._value(name, x.width, x.selected)
        weight = self.weight(f"{name}.weight", x.width // n_group)
        return self._emit(RmsNorm(out.name, out, x, weight, n_group, eps))

    def linear(self, x: Value, name: str, n_out: int, *, weight: str | None = None) -> Value:
        """`name` names the tensor and the value; `weight` is another tensor's name where the two differ (tied)."""
        out = self._value(name, n_out, x.selected)
        w = self.weight(weight or f"{name}.weight", x.width, n_out)
        bias = self.weight(f"{name}.bias", n_out) if self.has(f"{name}.bias") else None
        return self._emit(Linear(out.name, out, x, w, bias))

    def rotate(
        self, x: Value, name: str, n_head: int, rope: Rope, *, offset: int = 0, factors: str | None = None
    ) -> Value:
        """`factors` is the full name of a weight, as `weight` returns it."""
        out = self._value(f"{name}_rope", x.width)
        return self._emit(Rotate(out.name, out, x, n_head, offset, rope, factors))

    def attention(self, q: Value, k: Value, v: Value, n_head: int, n_head_kv: int, scale: float) -> Value:
        out = self._value("attn", n_head * (v.width // n_head_kv))
        k_state = State(self._scope + "k", (k.width,), per_token=True)
        v_state = State(self._scope + "v", (v.width,), per_token=True)
        self.states += [k_state, v_state]
        return self._emit(Attention(out.name, out, q, k, v, k_state.name, v_state.name, n_head, n_head_kv, scale))

    def swiglu(self, gate: Value, up: Value, name: str = "ffn_act") -> Value:
        out = self._value(name, up.width)
        return self._emit(SwiGlu(out.name, out, gate, up))

    def add(self, a: Value, b: Value, name: str) -> Value:
        out = self._value(name, a.width)
        return self._emit(Add(out.name, out, a, b))

    def slice(self, x: Value, name: str, start: int, length: int, n_group: int = 1) -> Value:
        out = self._value(name, n_group * length)
        return self._emit(Slice(out.name, out, x, n_group, start, length))

    def concat(self, a: Value, b: Value, name: str) -> Value:
        out = self._value(name, a.width + b.width)
        return self._emit(Concat(out.name, out, a, b))

    def gate(self, x: Value, gate: Value, name: str) -> Value:
        out = self._value(name, x.width)
        return self._emit(Gate(out.name, out, x, gate))

    def latent_attention(
        self, q: Value, latent: Value, weights: tuple[str, ...], n_head: int, rank: int, d_v: int, scale: float
    ) -> Value:
        out = self._value("attn", n_head * d_v)
        state = State(self._scope + "latent", (latent.width,), per_token=True)
        self.states.append(state)
        return self._emit(LatentAttention(out.name, out, q, latent, state.name, weights, n_head, rank, scale))

    def route(
        self,
        logits: Value,
        n_used: int,
        *,
        gating: str = "softmax",
        bias: str | None = None,
        groups: tuple[int, int] = (1, 1),
        top2: bool = False,
        normalise: bool = True,
        scale: float = 1.0,
    ) -> Value:
        """`groups` is (how many there are, how many of them are used)."""
        out = self._value("ffn_routes", 2 * n_used)
        return self._emit(Route(out.name, out, logits, bias, n_used, gating, *groups, top2, normalise, scale))

    def expert_linear(self, x: Value, routes: Value, name: str, n_in: int, n_out: int, n_expert: int) -> Value:
        out = self._value(name, routes.width // 2 * n_out)
        weight = self.weight(f"{name}.weight", n_in, n_out, n_expert)
        return self._emit(ExpertLinear(out.name, out, x, routes, weight))

    def expert_sum(self, x: Value, routes: Value) -> Value:
        out = self._value("ffn_experts", x.width // (routes.width // 2))
        return self._emit(ExpertSum(out.name, out, x, routes))

    def conv(self, x: Value, name: str, kernel: int) -> Value:
        out = self._value(name, x.width)
        state = State(self._scope + "conv", (kernel - 1, x.width), per_token=False)
        self.states.append(state)
        return self._emit(Conv(out.name, out, x, self.weight(f"{name}.weight", kernel, x.width), state.name))

    def l2_norm(self, x: Value, name: str, eps: float, n_group: int) -> Value:
        out = self._value(name, x.width)
        return self._emit(L2Norm(out.name, out, x, n_group, eps))

    def delta_rule(
        self, q: Value, k: Value, v: Value, alpha: Value, beta: Value, n_head_k: int, n_head_v: int, *, tiled: bool
    ) -> Value:
        out = self._value("delta", v.width)
        state = State(self._scope + "delta", (n_head_v, q.width // n_head_k, v.width // n_head_v), per_token=False)
        self.states.append(state)
        # A bias in all but its name, which some writers leave without the suffix.
        dt = self.weight("ssm_dt" if self.has("ssm_dt") else "ssm_dt.bias", n_head_v)
        a = self.weight("ssm_a", n_head_v)
        return self._emit(DeltaRule(out.name, out, q, k, v, alpha, beta, dt, a, state.name, n_head_k, n_head_v, tiled))

    def head(self, x: Value, n_vocab: int, eps: float) -> Value:
        """Select rows, final norm, output matrix; a file without one shares `token_embd` (tied)."""
        out = self._value("rows", x.width, selected=True)
        x = self.rms_norm(self._emit(SelectRows(out.name, out, x)), "output_norm", eps)
        return self.linear(x, "output", n_vocab, weight=None if self.has("output.weight") else "token_embd.weight")

    def plan(self, logits: Value, *, n_layer: int, n_ctx_train: int, ignore: Sequence[str] = ()) -> Plan:
        """Close the list. Tensors that nothing reads and that do not begin with one of `ignore` are an error: a model
        that asks for more than we compute must not answer wrongly."""
        unused = tuple(name for name in self.gguf.tensors if name not in self.weights)
        expected = tuple(ignore)
        for name in unused:
            if not name.startswith(expected):
                raise UnsupportedModelError(
                    f"{self.gguf.path}: tensor {name} has no place in architecture {self.arch} as it is known here"
                )
        return Plan(
            self.arch,
            tuple(self.ops),
            tuple(self.states),
            self.weights,
            logits,
            logits.width,
            self.ops[0].out.width,
            n_layer,
            n_ctx_train,
            unused,
        )


def _trim(ne: Sequence[int]) -> tuple[int, ...]:
    """Dimensions without trailing ones."""
    n = len(ne)
    while n > 1 and ne[n - 1] == 1:
        n -= 1
    return tuple(ne[:n])


def _dims(ne: Sequence[int]) -> str:
    return "{" + ",".join(map(str, ne)) + "}"
