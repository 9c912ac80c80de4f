"""A device that is a program: the kernels' own sources compiled for the host, run by a driver of ours, thread by turn.

What the compiler for devices does with them remains for a device to show, as does everything asynchronous; that the
arithmetic, the indices and the order of launches are right shows here.
"""

from pathlib import Path
from struct import Struct

import pytest

from reflex_ipc.cuda import launch, linear
from reflex_ipc.cuda.experts import expert_linear
from reflex_ipc.cuda.products import Call, Experts, Input, Limits, Matrix

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
TYPES += ["IQ4_NL", "IQ4_XS", "MXFP4", "IQ3_S", "IQ2_S", "IQ3_XXS", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"]
"""As naive.cpp numbers them."""

KERNELS = Path(launch.LIB) / "sm_90a" / "kernels.txt"
needs_kernels = pytest.mark.skipif(not KERNELS.exists(), reason="the kernels are not built: kernels/build.py all")

_MATRIX = Struct("<5Q4i")
_NAIVE = Struct("<3Q8ifi")
NAIVE_LINE = f"naive_linear naive.cubin b8[{_NAIVE.size + 4 * _MATRIX.size}]@0\n"


def naive_linear(
    limits: Limits,
    x: Input,
    matrices: list[Matrix],
    scratch: int = 0,
    *,
    swiglu: bool = False,
    exact: bool = False,
    experts: Experts | None = None,
    per_expert: bool = False,
) -> list[Call]:
    """In place of `linear.linear`: one launch of one thread."""
    ids, stride, n_used, size, _ = experts or (0, 0, 1, 0, 1)
    data = _NAIVE.pack(
        x.address, x.norm, ids, x.n, x.width, x.stride, len(matrices), swiglu, n_used, stride, per_expert, x.eps, 0
    )
    for m in matrices:
        data += _MATRIX.pack(m.weight, m.out, m.bias, m.residual, size, TYPES.index(m.type), m.n_out, m.out_stride, 0)
    data += bytes(_MATRIX.size * (4 - len(matrices)))
    return [Call("naive_linear", (1, 1, 1), (1, 1, 1), 0, (data,))]


def naive_experts(
    limits: Limits,
    x: Input,
    matrices: list[Matrix],
    experts: Experts,
    scratch: int = 0,
    *,
    per_expert: bool,
    is_grouped: bool = False,
) -> list[Call]:
    """In place of `experts.expert_linear`."""
    return naive_linear(limits, x, matrices, swiglu=len(matrices) > 1, experts=experts, per_expert=per_expert)


def half_linear(limits: Limits, x: Input, matrices: list[Matrix], scratch: int = 0, **options):
    """`linear.linear` itself where it needs tensor cores, which are emulated; else in its place."""
    calls = REAL_LINEAR(limits, x, matrices, scratch, **options)
    if all(call.kernel.startswith(EMULATED) for call in calls):
        return calls
    return naive_linear(limits, x, matrices, scratch, **options)


def half_experts(limits, x, matrices, experts, scratch=0, **options):
    """The same for `experts.expert_linear`."""
    calls = REAL_EXPERTS(limits, x, matrices, experts, scratch, **options)
    if all(call.kernel.startswith(EMULATED) for call in calls):
        return calls
    return naive_experts(limits, x, matrices, experts, scratch, **options)


REAL_LINEAR, REAL_EXPERTS = linear.linear, expert_linear
EMULATED = ("prepare_rows", "prepare_pages", "widen_", "gemm_half", "mma_", "few_", "group_experts", "grouped_")


def kernels(kernels_txt: Path, where: Path) -> Path:
    """A directory like reflex_ipc/cuda/lib for the emulated device."""
    text = kernels_txt.read_text()
    target = where / "lib" / "sm_90a"
    target.mkdir(parents=True)
    (target / "kernels.txt").write_text(text + NAIVE_LINE)
    for line in (text + NAIVE_LINE).splitlines()[1:]:
        (target / line.split()[1]).write_bytes(b"\x7fELF")
    return where / "lib"
