"""Products by `kernels/few.cuh`, of 17 to 128 rows and, where `linear` says so, of fewer: in which shape, with which
arguments."""

from collections.abc import Sequence
from functools import cache
from struct import Struct
from typing import NamedTuple

from reflex_ipc.cuda.formats import FORMATS, MATMUL_WIDTH, WHOLE, WIDTHS, widths
from reflex_ipc.cuda.memory import aligned
from reflex_ipc.cuda.products import PARTS, TILES, Call, Input, Limits, Matrix, Pages, pack_matrices, sums_bytes

_FEW = Struct("<4Q6i")
_PAGES = Struct("<5Q6ifi")
_PAGES_THREADS = 512
_WARPS = 12  # of a multiprocessor: registers suffice for so many
_BARRIERS = 64  # bytes of shared memory beside the stages
_CLUSTERS = {1: 1.0, 2: 1.0, 4: 0.94, 8: 0.73}
"""Parts that a cluster adds up -> the share of the multiprocessors that clusters of so many blocks can fill, where each
block fills one: those of a cluster lie side by side."""

# Cycles of an H200, fitted to what bench/few_rows.py measured there at 32, 40 and 64 rows; 16 rows go by them too.
_STAGE = 30.5  # of a warp for 64 columns,
_ROW = 0.26  # and for each row of x with them;
_Q6_K = 1.65  # times as much where rows begin anywhere
_LEAST = 7.6  # warps: fewer take as long
_FETCH = 4.6  # of a block for 64 columns of each row of x
_BEGIN = 6390  # of a multiprocessor with blocks that begin together,
_BLOCK = 1010  # of each of them,
_WARP = 178  # and of a warp of one
_MEET = 500  # of a cluster that adds parts up,
_MET = 45  # for each part
_PART = 600  # of the last block of a tile, where that adds them up, for each part,
_SUM = 0.0008  # and for each byte of sums


class FewShape(NamedTuple):
    """How `few.cuh` is launched."""

    warps: int
    parts: int
    """Of the columns."""
    part_stages: int
    """Of each of them but the last."""
    stages: int
    """In shared memory."""
    shared: int


def few(
    limits: Limits,
    x: Input,
    matrices: Sequence[Matrix],
    scratch: int,
    swiglu: bool,
    width: int,
    shape: FewShape | None = None,
) -> list[Call]:
    """The launches of `few.cuh` for `width` rows of x a block, in the best shape or a given one."""
    n_rows = aligned(x.n, width)
    room = Pages(scratch, n_rows, x.width)
    calls: list[Call] = []
    for is_whole in (True, False):
        kinds = [k for k in dict.fromkeys(m.type for m in matrices) if (k in WHOLE) == is_whole]
        products, most = [], 0
        for kind in kinds:
            of_kind = [m for m in matrices if m.type == kind]
            rows = tuple(m.n_out for m in (of_kind[:1] if swiglu else of_kind))
            best = shape or few_shape(limits, kind, width, x.n, x.width, rows, swiglu)
            arguments = _FEW.pack(
                *(room.pages, room.scale, room.sums, room.arrived),
                *(x.n, x.width, len(of_kind), swiglu, best.part_stages, best.stages),
            )
            arguments += pack_matrices(of_kind)
            grid = (_tiles(rows, best.warps, swiglu), n_rows // width, best.parts)
            cluster = (1, 1, best.parts) if limits.cluster > 1 else None  # of one, too: launches are used again
            products.append(
                Call(f"few_{kind.lower()}_{width}", grid, (32 * best.warps, 1, 1), best.shared, (arguments,), cluster)
            )
            if best.parts > 1 and not cluster:
                most = max(most, grid[0] * grid[1])
        if products:
            arguments = _PAGES.pack(
                *(x.address, x.norm, room.pages, room.scale, room.arrived),
                *(x.n, x.width, x.stride, room.n_pages, width, most, x.eps, is_whole),
            )
            calls += [Call("prepare_pages", (n_rows, 1, 1), (_PAGES_THREADS, 1, 1), 0, (arguments,)), *products]
    return calls


def _tiles(rows: Sequence[int], warps: int, swiglu: bool) -> int:
    return sum(-(-n // ((8 if swiglu else 16) * warps)) for n in rows)


@cache
def few_shapes(limits: Limits, kind: str, width: int) -> list[tuple[int, int, int, int]]:
    """(warps of a block, blocks of a multiprocessor at a time, stages, bytes of shared memory) that are possible."""
    form = FORMATS[kind]
    found = []
    for warps in (4, 8, 12) if kind in WHOLE else (4, 6, 8, 12):
        stage = (form.few_columns // 8 + form.few_columns // 256 * 2) * 16 * width + warps * 16 * form.few_slot
        room = limits.shared_per_block
        blocks = min(_WARPS // warps, (room + 1024) // (2 * stage + 1024 + _BARRIERS))
        if blocks:
            stages = min(4, ((room + 1024) // blocks - 1024 - _BARRIERS) // stage)
            found.append((warps, blocks, stages, _BARRIERS + max(stages * stage, warps * width * 80 + 16)))
    return found


def few_parts(limits: Limits) -> tuple[int, ...]:
    """Into how many parts columns may be shared out. Clusters come in powers of two."""
    return tuple(n for n in _CLUSTERS if n <= limits.cluster) if limits.cluster > 1 else PARTS


@cache
def few_shape(
    limits: Limits, kind: str, width: int, n: int, n_in: int, rows: tuple[int, ...], swiglu: bool
) -> FewShape:
    """The shape that finishes first, by a model of an H200; `rows` of W of each matrix, with SwiGLU of one.

    A stage takes a warp some cycles for itself and for each row of x, and a block some to fetch these; blocks cost
    something to begin, and so does a cluster with the sums that it adds up, or the last block of a tile.
    """
    form = FORMATS[kind]
    n_stages = -(-n_in // form.few_columns)
    of_warp = form.few_columns / 64 * (_STAGE + _ROW * width) * (_Q6_K if kind == "Q6_K" else 1)
    of_block = form.few_columns / 64 * _FETCH * width
    room = sums_bytes(n, sum(rows) * (2 if swiglu else 1))
    is_clustered = limits.cluster > 1
    best, least = None, 0.0
    for warps, at_a_time, stages, shared in few_shapes(limits, kind, width):
        tiles = _tiles(rows, warps, swiglu) * -(-n // width)
        sums = 4 * tiles * 16 * warps * width
        for wanted in few_parts(limits):
            if wanted > 1 and (wanted > n_stages or (not is_clustered and (sums * wanted > room or tiles > TILES))):
                break
            part_stages = -(-n_stages // wanted)
            parts = -(-n_stages // part_stages)
            if parts != wanted and is_clustered:
                continue
            filled = _CLUSTERS[parts] if is_clustered and at_a_time == 1 else 1
            multiprocessors = max(1, int(limits.multiprocessors * filled))
            full, rest = divmod(tiles * parts, multiprocessors * at_a_time)
            cost = 0.0
            for rounds, blocks in ((full, at_a_time), (1, -(-rest // multiprocessors))):
                if blocks:
                    begin = _BEGIN + _BLOCK * blocks + _WARP * warps
                    cost += rounds * (begin + part_stages * (of_warp * max(blocks * warps, _LEAST) + of_block * blocks))
            if parts > 1:
                cost += _MEET + parts * _MET if is_clustered else parts * (_PART + sums * _SUM)
            if best is None or cost < least:
                best, least = FewShape(warps, parts, part_stages, stages, shared), cost
    assert best is not None
    return best


def few_width(limits: Limits, n: int, kinds: Sequence[str]) -> int:
    """Rows of x a block: the fewest that hold an equal share of all, or as many as shared memory holds stages of."""
    known = [w for w in WIDTHS if all(w in widths(kind) for kind in kinds)]
    known = [w for w in known if w <= MATMUL_WIDTH or all(few_shapes(limits, kind, w) for kind in kinds)]
    share = -(-n // -(-n // known[-1]))
    return next(w for w in known if w >= share)
