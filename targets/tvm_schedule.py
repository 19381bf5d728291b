"""Schedules for CPUs: how the loops of each kernel are tiled, vectorised and shared among threads.

TVM without schedules emits scalar loops, some 7 times slower than ONNX Runtime. Tuning finds good ones in hours; the
rules here give most of that at once, because tvm_kernels already laid the weights out for them: an inner vector over
output channels, a few rows or pixels whose sums stay in registers, and threads over what is left.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from . import tvm_kernels as kernels

if TYPE_CHECKING:
    from tvm.s_tir import Schedule

REGISTERS = 12  # vectors of 8 floats kept as running sums: AVX2 has 16 registers, and needs some for its operands
ROW_BLOCK = 64  # rows that one thread takes at a time: 64 rows of 1,152 inputs fill 288 kB of second-level cache
PARALLEL_WORK = 1 << 15  # multiply-adds below which waking a thread costs more than it saves
PARALLEL_ELEMENTS = 1 << 14  # the same for elementwise loops
PRODUCT = "matmul"  # the block of relax.matmul
LANES = 16  # floats that an elementwise loop handles at a time


def schedule_all(target: Any) -> Any:
    """A pass that schedules every PrimFunc that has no schedule yet."""
    import tvm
    from tvm import tirx

    @tvm.transform.module_pass(opt_level=0, name="EdgecSchedule")  # type: ignore[untyped-decorator]
    def run(module: Any, _: Any) -> Any:
        scheduled = module.clone()  # passes get their argument itself, not a copy
        for variable, function in module.functions_items():
            if isinstance(function, tirx.PrimFunc) and not function.attrs.get("tirx.is_scheduled", 0):
                scheduled[variable] = schedule(function, target).with_attr("tirx.is_scheduled", True)
        return scheduled

    return run


def schedule(function: Any, target: Any) -> Any:
    """The scheduled form of one function: by its kernel where there is one, else loop by loop."""
    from tvm import s_tir

    sch = s_tir.Schedule(function)
    names = {sch.get(b).name_hint: b for b in sch.get_child_blocks(sch.get_sblock("root"))}
    for name in (kernels.DENSE, kernels.CONV, kernels.DEPTHWISE):
        if name in names:
            return _kernel(sch, names[name], name)
    product = next((b for n, b in names.items() if n == PRODUCT), None)
    if product is not None and all(isinstance(e, int) for e in _extents(sch, product)):
        return _kernel(sch, product, kernels.DENSE)
    rows = _rows(sch, function, target)
    if rows is not None:
        return rows
    inline_all(sch, list(names.values()))
    for block in sch.get_child_blocks(sch.get_sblock("root")):
        _loops(sch, block)
    return sch.mod["main"]


def _rows(sch: Schedule, function: Any, target: Any) -> Any | None:
    """Softmax, norms and their like by TVM's own rule, where they are worth a thread; None for anything else."""
    from tvm.s_tir.dlight.cpu import Reduction

    blocks = sch.get_child_blocks(sch.get_sblock("root"))
    extents = [_extents(sch, b) for b in blocks]
    work = sum(math.prod(e) for e in extents if all(isinstance(d, int) for d in e))
    if len(blocks) < 2 or work < PARALLEL_ELEMENTS or not all(isinstance(d, int) for e in extents for d in e):
        return None
    found = Reduction().apply(function, target, False)
    return None if found is None else found.mod["main"]


def inline_all(sch: Schedule, blocks: list[Any]) -> None:
    """Inline every elementwise block into its readers, or else into its writer, as far as that goes."""
    left = list(blocks)
    progress = True
    while progress:
        progress = False
        for block in list(left):
            if _attempt(lambda b=block: sch.compute_inline(b)) or _attempt(
                lambda b=block: sch.reverse_compute_inline(b)
            ):
                left.remove(block)
                progress = True


def _attempt(step: Any) -> bool:
    """Apply a schedule step that may not be legal here."""
    from tvm.s_tir.schedule import ScheduleError

    try:
        step()
    except ScheduleError:
        return False
    return True


def _extents(sch: Schedule, block: Any) -> list[Any]:
    extents = [sch.get(loop).extent for loop in sch.get_loops(block)]
    return [int(e) if hasattr(e, "value") else e for e in extents]


def _reduction(sch: Schedule, block: Any) -> list[bool]:
    """For each iterator of a block, whether it is summed over."""
    return [int(i.iter_type) == 2 for i in sch.get(block).iter_vars]


def _kernel(sch: Schedule, block: Any, name: str) -> Any:
    """Tile a product or a convolution, with the elementwise operations around it."""
    others = [
        b
        for b in sch.get_child_blocks(sch.get_sblock("root"))
        if sch.get(b).name_hint not in (name, sch.get(block).name_hint)
    ]
    pads = [b for b in others if sch.get(b).name_hint == kernels.PAD]
    left = [b for b in others if sch.get(b).name_hint != kernels.PAD]
    for b in left:
        _attempt(lambda b=b: sch.compute_inline(b))
    for padding in pads:
        _loops(sch, padding)
    consumers = sch.get_consumers(block)
    if len(consumers) == 1:
        out = consumers[0]
        sch.set_scope(block, 0, "local")
    else:
        out = sch.cache_write(block, 0, "local")
    if name == kernels.DEPTHWISE:
        _tile_depthwise(sch, block, out)
    else:
        _tile_product(sch, block, out)
    return sch.mod["main"]


def _tile_product(sch: Schedule, block: Any, out: Any) -> None:
    """out (…, row, column): columns in vectors, a few rows at a time, the sums of a tile in registers.

    The row is the last dimension before the column that isn't 1, so that a tile never crosses a dimension.
    """
    loops, extents = sch.get_loops(out), _extents(sch, out)
    depth = math.prod(_extents(sch, block)[len(extents) :])
    row = next((i for i in range(len(loops) - 2, -1, -1) if extents[i] > 1), len(loops) - 2)
    vector = kernels.pack_width(extents[-1])
    rows = row_tile(extents[row], vector)
    panels = column_tile(extents[-1] // vector, vector, rows)
    row_outer, row_inner = sch.split(loops[row], [None, rows])
    column_outer, column_panel, column_inner = sch.split(loops[-1], [None, panels, vector])
    lead = [loop for i, loop in enumerate(loops[:-1]) if i != row]
    around = math.prod(e for i, e in enumerate(extents[:-1]) if i != row)
    near = _divisor(around, max(1, ROW_BLOCK // extents[row]))
    sch.reorder(*lead, row_outer, column_outer, row_inner, column_panel, column_inner)
    if lead:
        fused = sch.fuse(*lead) if len(lead) > 1 else lead[0]
        far, mid = sch.split(fused, [None, near])
        sch.reorder(far, column_outer, mid, row_outer)
        shared = sch.fuse(far, column_outer)
    else:
        sch.reorder(column_outer, row_outer)
        shared = column_outer
    if math.prod(extents) * depth >= PARALLEL_WORK:
        sch.parallel(shared)
    sch.compute_at(block, row_outer, preserve_unit_loops=True)
    own = sch.get_loops(block)[-len(extents) - _count_reductions(sch, block) :]
    spatial, reductions = own[: len(extents)], own[len(extents) :]
    panel, lanes = sch.split(spatial[-1], [panels, vector])
    sch.reorder(*reductions, *spatial[:-1], panel, lanes)
    for loop in (*spatial[:-1], panel, row_inner, column_panel):
        sch.unroll(loop)
    sch.vectorize(lanes)
    sch.vectorize(column_inner)
    start = sch.decompose_reduction(block, reductions[0])
    for loop in sch.get_loops(start)[-len(extents) - 1 : -1]:
        sch.unroll(loop)
    sch.vectorize(sch.get_loops(start)[-1])


def _tile_depthwise(sch: Schedule, block: Any, out: Any) -> None:
    """out (N, H, W, C): channels in vectors, a few pixels of a row at a time, all taps of the kernel unrolled."""
    loops, extents = sch.get_loops(out), _extents(sch, out)
    vector = kernels.pack_width(extents[-1])
    pixels = _divisor(extents[2], max(1, REGISTERS // max(1, vector // 8) // 2))
    width_outer, width_inner = sch.split(loops[2], [None, pixels])
    channel_outer, channel_inner = sch.split(loops[3], [None, vector])
    sch.reorder(loops[0], loops[1], width_outer, channel_outer, width_inner, channel_inner)
    shared = sch.fuse(loops[0], loops[1])
    if math.prod(extents) * math.prod(_extents(sch, block)[4:]) >= PARALLEL_WORK:
        sch.parallel(shared)
    sch.compute_at(block, channel_outer, preserve_unit_loops=True)
    spatial, taps = sch.get_loops(block)[-6:-2], sch.get_loops(block)[-2:]
    sch.reorder(*taps, *spatial)
    for loop in (*taps, *spatial[:-1], width_inner):
        sch.unroll(loop)
    sch.vectorize(spatial[-1])
    sch.vectorize(channel_inner)
    start = sch.decompose_reduction(block, taps[0])
    for loop in sch.get_loops(start)[-4:-1]:
        sch.unroll(loop)
    sch.vectorize(sch.get_loops(start)[-1])


def _count_reductions(sch: Schedule, block: Any) -> int:
    return sum(int(i.iter_type) == 2 for i in sch.get(block).iter_vars)


def _loops(sch: Schedule, block: Any) -> None:
    """Anything else: the innermost dimension in vectors when it isn't summed over, the outer ones among threads."""
    loops, extents = sch.get_loops(block), _extents(sch, block)
    reduced = [int(i.iter_type) != 0 for i in sch.get(block).iter_vars]
    if len(reduced) != len(loops):
        return
    spatial = [loop for loop, r in zip(loops, reduced, strict=True) if not r]
    work = math.prod(e for e in extents if isinstance(e, int))
    if not spatial or not loops:
        return
    if any(reduced):
        if work >= PARALLEL_ELEMENTS and reduced[: len(spatial)] == [False] * len(spatial):
            sch.parallel(sch.fuse(*spatial) if len(spatial) > 1 else spatial[0])
        return
    last = extents[-1]
    if isinstance(last, int) and last % 4 == 0 and len(loops) > 1:
        width = kernels.pack_width(last)
        outer, inner = sch.split(loops[-1], [None, width])
        sch.vectorize(inner)
        shared = sch.fuse(*loops[:-1], outer)
    else:
        shared = sch.fuse(*loops) if len(loops) > 1 else loops[0]
        if isinstance(work, int) and len(loops) == 1 and work % LANES == 0:
            shared, inner = sch.split(shared, [None, LANES])
            sch.vectorize(inner)
    if work >= PARALLEL_ELEMENTS:
        sch.parallel(shared)


def row_tile(rows: int, vector: int) -> int:
    """How many rows share one load of the weights: a divisor of `rows`, as many as the registers allow."""
    most = max(1, REGISTERS // max(1, vector // 8))
    tile = _divisor(rows, most)
    return tile if tile > 2 or rows <= 2 else _divisor(rows, most + 2)


def column_tile(blocks: int, vector: int, rows: int) -> int:
    """How many packs of output channels go together, to fill the registers when rows are few."""
    return _divisor(blocks, max(1, REGISTERS // max(1, vector // 8) // rows))


def _divisor(number: int, most: int) -> int:
    """The greatest divisor of `number` that is at most `most`."""
    return next(d for d in range(min(most, number), 0, -1) if number % d == 0)
