"""Shapes and arguments of the matrix products, without a device: the kernels exist, scratch holds what is put there."""

import re
from pathlib import Path
from struct import unpack_from

import pytest

from reflex_ipc.cuda import formats, linear
from reflex_ipc.cuda.experts import expert_linear, expert_scratch_bytes
from reflex_ipc.cuda.products import Experts, Input, Limits, Matrix
from reflex_ipc.errors import UnsupportedModelError

KERNELS = Path(__file__).parent.parent / "kernels"
LARGE, SMALL = Limits(132, 227 << 10), Limits(40, 64 << 10)  # compute capability 9.0 and 7.5
TOGETHER = LARGE._replace(cluster=8, together=True)  # with the kernels of sm_90a
SCRATCH = 1 << 40
ROWS = (1, 2, 5, 8, 9, 17, 24, 33, 45, 64, 65, 81, 128, 129, 512, 4096)


def defined():
    """The kernels that the sources define, macros expanded."""
    names = set()
    for path in KERNELS.glob("*.cu"):
        text = path.read_text()
        names.update(re.findall(r'extern "C" __global__ void __launch_bounds__\([^()]*\)\s+(\w+)\(', text))
        names.update(re.findall(r"REFLEX_MATVEC\((\w+),", text))
        for rare, dense, kind in re.findall(r"REFLEX_(RARE_)?(DENSE_)?FORMAT\((\w+),", text):
            names.update([f"matvec_{kind}", f"widen_{kind}", f"mma_{kind}_16"])
            names.update([] if dense else [f"grouped_{kind}"])
            names.update([] if rare else [f"mma_{kind}_8", f"few_{kind}_64"])
        for kind in re.findall(r"REFLEX_FEW_WIDTHS\((\w+),", text):
            names.update([f"few_{kind}_32", f"few_{kind}_40"])
        names.update(re.findall(r"REFLEX_FEW\((few_\w+),", text))
        names.update(f"few_{kind}_16" for kind in re.findall(r"REFLEX_FEW_TOGETHER\((\w+),", text))
    return names


def apart(used, size):
    """Whether these places, (address, bytes), lie in scratch and share nothing but their beginning."""
    for start, length in used:
        assert start >= SCRATCH and start + length <= SCRATCH + size
        assert all(start == s or start + length <= s or s + m <= start for s, m in used)


def matrix(kind, n_out=300, out=1 << 30):
    return Matrix(kind, 1 << 20, n_out, out, n_out)


@pytest.mark.parametrize("limits", [LARGE, TOGETHER, SMALL])
@pytest.mark.parametrize("kind", formats.FORMATS)
def test_kernels_exist(kind, limits):
    known = defined()
    for n in ROWS:
        for swiglu in (False, True):
            x = Input(1 << 10, n, 1024, 1024, 1 << 12, 1e-6)
            for call in linear.linear(limits, x, [matrix(kind)] * (2 if swiglu else 1), SCRATCH, swiglu=swiglu):
                assert call.kernel in known
                assert call.shared <= limits.shared_per_block
                assert all(0 < side < 1 << 16 or i == 0 for i, side in enumerate(call.grid))


@pytest.mark.parametrize("pair", formats.PAIRS)
def test_pairs_share_a_launch(pair):
    x = Input(1 << 10, 1, 1024, 1024)
    for kinds in (pair, pair[::-1], (pair[0], pair[0], pair[1])):
        assert linear.fusible(kinds)
        (call,) = linear.linear(LARGE, x, [matrix(kind) for kind in kinds])
        assert call.kernel in defined()


@pytest.mark.parametrize(
    ("kinds", "n", "n_out", "limits", "kernel"),
    [
        (("Q4_K",), 8, 300, TOGETHER, "mma_q4_k_8"),
        (("Q4_K",), 8, 24576, TOGETHER, "mma_q4_k_8"),
        (("Q4_K",), 9, 300, TOGETHER, "mma_q4_k_16"),
        (("Q4_K",), 9, 4096, TOGETHER, "few_q4_k_16"),
        (("Q4_K", "Q6_K"), 16, 2048, TOGETHER, "few_q4_k_16"),
        (("Q4_K", "Q8_0"), 16, 4096, TOGETHER, "mma_q4_k_16"),
        (("Q6_K",), 3, 151936, TOGETHER, "few_q6_k_16"),
        (("Q6_K",), 3, 151936, LARGE, "mma_q6_k_8"),
        (("Q8_0",), 3, 151936, TOGETHER, "mma_q8_0_8"),
    ],
)
def test_up_to_16_rows(kinds, n, n_out, limits, kernel):
    """Of k-quants four warps multiply them together where weights are many, and of up to 8 where they are very many."""
    calls = linear.linear(limits, Input(1 << 10, n, 4096, 4096), [matrix(k, n_out) for k in kinds], SCRATCH)
    assert calls[1].kernel == kernel


def test_what_shares_no_launch_is_cut():
    calls = linear.linear(LARGE, Input(1 << 10, 1, 1024, 1024), [matrix(k) for k in ("Q4_K", "F32", "Q4_K", "Q6_K")])
    assert [call.kernel for call in calls] == ["matvec_q4_k", "matvec_f32", "matvec_q4_k_q6_k"]
    assert not linear.fusible(("Q4_K", "F32")) and not linear.fusible(("Q4_K",) * 5)


@pytest.mark.parametrize("limits", [LARGE, TOGETHER, SMALL])
@pytest.mark.parametrize(
    ("kinds", "swiglu"),
    [
        *(((kind,) * n, n > 1) for kind in ("F32", "F16", "BF16", "Q4_K", "Q5_0") for n in (1, 2)),
        (("Q4_K", "Q6_K", "Q8_0"), False),
        (("Q4_K", "Q8_0", "Q4_K"), False),
    ],
)
def test_scratch_holds_everything(kinds, swiglu, limits):
    """Every place in scratch that is written lies inside, and none overlap that are of use at a time."""
    before = 0
    widest = 8192 if limits is SMALL else 12288  # that one row with SwiGLU may have in floats
    for n in ROWS:
        for width, n_out in ((96, 5), (1024, 300), (widest, 9000)):
            matrices = [matrix(kind, n_out) for kind in kinds]
            size = linear.scratch_bytes(limits, n, width, matrices, swiglu)
            used = []
            for call in linear.linear(
                limits, Input(1 << 10, n, width, width, 1 << 12), matrices, SCRATCH, swiglu=swiglu
            ):
                (data,) = call.arguments
                if call.kernel.startswith("prepare_"):  # what was there has been used
                    apart(used, size)
                    used = []
                if call.kernel == "prepare_rows":
                    _, _, out, scale, _, _, _, padded, *_ = unpack_from("<4Q6if4x", data)
                    used += [(out, 2 * padded * call.grid[0]), (scale, 4 * call.grid[0])]
                elif call.kernel == "prepare_float_rows":
                    _, _, out, _, m, columns, *_ = unpack_from("<4Q6if4x", data)
                    used += [(out, 4 * m * columns)]
                elif call.kernel == "prepare_pages":
                    _, _, pages, scale, zeros, m, _, _, n_pages, page_rows, n_zeros = unpack_from("<5Q6i", data)
                    assert m == n and n_pages == -(-width // 256) and call.grid[0] % page_rows == 0
                    used += [(pages, call.grid[0] * n_pages * 34 * 16), (scale, 4 * call.grid[0]), (zeros, 4 * n_zeros)]
                elif call.kernel.startswith("few_"):
                    at, _, sums, arrived, m, _, _, _, part_stages, stages = unpack_from("<4Q6i", data)
                    tiles, parts = call.grid[0] * call.grid[1], call.grid[2]
                    assert (at, arrived, m) == (pages, zeros, n) and 2 <= stages <= 4
                    kind = call.kernel.partition("_")[2].rpartition("_")[0].upper()
                    columns, rows = formats.FORMATS[kind].few_columns, call.block[0] // 32 * 16
                    assert (parts - 1) * part_stages * columns < width <= parts * part_stages * columns
                    is_through_memory = parts > 1 and limits is not TOGETHER
                    assert not is_through_memory or tiles <= n_zeros
                    used += [(sums, 4 * parts * tiles * page_rows * rows)] if is_through_memory else []
                elif call.kernel.startswith("widen"):
                    _, out, scale, rows, _, stride, step, first = unpack_from("<3Q5i4x", data)
                    used += [
                        (out, 2 * stride * (step * (rows - 1) + first + 1)),
                        (scale, 4 * (step * (rows - 1) + first + 1)),
                    ]
            apart(used, size)
            if (width, n_out) == (1024, 300):
                assert size >= before, "more rows need no less"
                before = size


def test_every_row_is_computed_once():
    """Weights that do not fit scratch at once are multiplied in turns that cover all rows of the output."""
    n_out, width = 70000, 4096
    rows = []
    calls = linear.linear(LARGE, Input(1 << 10, 200, width, width), [matrix("Q4_K", n_out)], SCRATCH)
    for call in calls:
        if call.kernel == "gemm_half":
            out, n = unpack_from("<8Q8i", call.arguments[0])[4], unpack_from("<8Q8i", call.arguments[0])[9]
            first = (out - (1 << 30)) // 4
            rows += range(first, first + n)
    assert rows == list(range(n_out)) and len(calls) > 3


def test_experts_get_a_grid_row_each():
    x = Input(1 << 10, 3, 512, 512)
    (call,) = expert_linear(LARGE, x, [matrix("Q4_K")], Experts(1 << 13, 16, 8, 1 << 16, 128), per_expert=False)
    assert call.kernel == "matvec_q4_k" and call.grid[1] == 24


@pytest.mark.parametrize("per_expert", [False, True])
def test_experts_of_many_tokens_share_weights(per_expert):
    """One launch for all experts, whatever the router says; scratch holds it all, fewer tokens too."""
    experts = Experts(1 << 13, 16, 8, 1 << 16, 128)
    size = expert_scratch_bytes(512, 768, "Q4_K", experts, per_expert=per_expert)
    for n in (32, 100, 512):
        x = Input(1 << 10, n, 768, 768 * (8 if per_expert else 1))
        calls = expert_linear(LARGE, x, [matrix("Q4_K")], experts, SCRATCH, per_expert=per_expert)
        assert [call.kernel for call in calls] == ["group_experts", "prepare_rows", "grouped_q4_k"]
        assert all(call.kernel in defined() or call.kernel == "group_experts" for call in calls)
        tiles, slots, _, _, _, n_slots, _, width, n_tiles = unpack_from("<3Q6i", calls[0].arguments[0])
        _, _, halves, scale, rows, _, stride, padded, *_ = unpack_from("<4Q6ifi", calls[1].arguments[0])
        assert (n_slots, width, calls[2].grid[1]) == (8 * n, 64, n_tiles)
        assert (rows, stride) == ((8 * n, 768) if per_expert else (n, 768))
        assert n_tiles >= min(n_slots, 127 + -(-(n_slots - 127) // 64)), "the most uneven choice fits"
        apart([(tiles, 16 * n_tiles), (slots, 4 * n_slots), (halves, 4 * rows * padded), (scale, 4 * rows)], size)
    few = expert_linear(LARGE, x._replace(n=31), [matrix("Q4_K")], experts, SCRATCH, per_expert=per_expert)
    assert [call.kernel for call in few] == ["matvec_q4_k"]


@pytest.mark.parametrize("kind", formats.FORMATS)
def test_every_type_of_experts_has_kernels(kind):
    experts = Experts(1 << 13, 16, 8, 1 << 16, 128)
    x = Input(1 << 10, 100, 768, 768)
    *_, call = expert_linear(LARGE, x, [matrix(kind)], experts, SCRATCH, per_expert=False)
    assert call.kernel in defined()


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_K", "NVFP4"])
def test_exact_rows_have_two_planes(kind):
    """Of x, and of weights that are no halves."""
    for n in (2, 16, 17, 64, 400):
        size = linear.scratch_bytes(LARGE, n, 300, [matrix(kind)], exact=True)
        calls = linear.linear(LARGE, Input(1 << 10, n, 300, 300), [matrix(kind)], SCRATCH, exact=True)
        names = [call.kernel for call in calls]
        if n <= linear.REPEATED:
            assert names == [f"matvec_{kind.lower()}"] and calls[0].grid[1] == n and not size
            continue
        assert names == ["prepare_rows", f"widen_{kind.lower()}", "gemm_half"]
        _, out, scale, rows, _, stride, *_, planes = unpack_from("<3Q6i", calls[1].arguments[0])
        assert planes == (2 if kind == "Q4_K" else 1)
        assert out + 2 * stride * planes * rows <= scale and scale + 4 * rows <= SCRATCH + size
        *_, x_stride, w_stride, _, _, _, products = unpack_from("<8Q9i", calls[2].arguments[0])
        assert (x_stride, w_stride, products) == (2 * stride, planes * stride, 1 + planes)


def test_refusals():
    with pytest.raises(UnsupportedModelError, match="Q8_K"):
        linear.linear(LARGE, Input(1 << 10, 1, 256, 256), [matrix("Q8_K")])
    with pytest.raises(UnsupportedModelError, match="shared memory"):
        linear.linear(SMALL, Input(1 << 10, 1, 1 << 17, 1 << 17), [matrix("Q4_K")] * 2, swiglu=True)
