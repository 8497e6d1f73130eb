"""The CPU target: C with vector types, threads over the grid.

`lower_cpu` turns any graph into one self-contained translation unit; it only returns text.
`variants` lists the lowering choices that are worth racing on a machine.
"""

from __future__ import annotations

from dataclasses import replace

from obelisk.base.digest import digest
from obelisk.base.errors import Infeasible
from obelisk.ir.dtype import DType
from obelisk.ir.graph import Graph
from obelisk.lower.cpu.emit import arena_stride, emit_program, statements, streams
from obelisk.lower.cpu.options import CpuModule, CpuOptions
from obelisk.lower.program import tile_program
from obelisk.lower.schedule import Rules
from obelisk.lower.tile import Product, TileProgram
from obelisk.machine.description import Machine, MachineKind

ARENA_LIMIT = 1 << 28  # bytes of fast memory per thread: beyond this a tile is no tile
SCRATCH_LIMIT = 1 << 36  # bytes between kernels
STREAM_SUMS, STREAM_DEPTH, STREAM_GAP = 16384, 6, 16  # OB_SUMS, OB_SK, OB_GAP of blocking.h
STREAM_DOUBT = 12  # rows from which packing may be as good as streaming
DEFAULT = CpuOptions()

__all__ = ["CpuModule", "CpuOptions", "cpu_program", "lower_cpu", "variants"]


def _rules(machine: Machine, options: CpuOptions) -> Rules:
    lanes = machine.vector_bytes // 4

    def work(product: Product) -> int:
        return work_elements(product, options, lanes)

    return Rules(lanes, options.alias, work, ARENA_LIMIT)


def work_elements(product: Product, options: CpuOptions, lanes: int) -> int:
    """Elements that the product routine needs to pack operands or keep sums in.

    `lanes` counts f32 elements of a vector. Mirrors `ob_packed` and `ob_streamed` of
    runtime/product.h.
    """
    m, n = product.c.sizes[-2:]
    k = product.a.sizes[-1]
    w = lanes // 2 if product.dtype is DType.F64 else lanes
    nr = w * options.vectors
    few, pair = min(m, options.stream_rows), 2 * w
    streamed = min(few * n, STREAM_SUMS) + few * (pair + STREAM_GAP + STREAM_DEPTH) + STREAM_GAP
    way = streams(product, options)
    if way:
        return streamed
    deep = min(k, options.depth)
    wide = -(-min(n, options.block_columns) // nr) * nr + nr
    rows = -(-min(m, options.block_rows) // options.rows) * options.rows
    packed = deep * wide + deep * rows
    return packed if way is False else max(streamed, packed)


def cpu_program(graph: Graph, machine: Machine, options: CpuOptions = DEFAULT) -> TileProgram:
    """The scheduled tile program that `lower_cpu` prints."""
    if machine.kind is not MachineKind.CPU:
        raise Infeasible(
            f"{machine.name} is a {machine.kind} machine; the CPU target cannot serve it"
        )
    options = options.on(machine)
    program = tile_program(graph, _rules(machine, options), machine.cores)
    if program.scratch > SCRATCH_LIMIT:
        raise Infeasible(
            f"tensors between kernels take {program.scratch} bytes, the limit is {SCRATCH_LIMIT}"
        )
    return program


def lower_cpu(graph: Graph, machine: Machine, options: CpuOptions = DEFAULT) -> CpuModule:
    """C for a graph. Deterministic: equal arguments give equal text. Raises `Infeasible` naming the
    limit.
    """
    program = cpu_program(graph, machine, options)
    options = options.on(machine)
    source = emit_program(program, options, machine.vector_bytes // 4)
    scratch = program.scratch + options.max_threads * arena_stride(program)
    notes = (
        f"{len(program.calls)} calls of {len(program.kernels)} kernels",
        f"{program.scratch} bytes between kernels (bound {program.scratch_bound})",
        f"{program.arena} bytes of tiles per thread",
    )
    return CpuModule(source, scratch, digest("c", source), notes)


def variants(graph: Graph, machine: Machine) -> list[CpuOptions]:
    """The lowering choices worth racing for a graph, the default first, at most three.

    Only products have choices that no rule decides well: streaming or packing where rows are few
    but not very few, and a block of fewer rows and more columns in registers.
    """
    products = [
        s
        for kernel in cpu_program(graph, machine).kernels
        for s in statements(kernel)
        if isinstance(s, Product)
    ]
    rows = [p.c.sizes[-2] for p in products]
    out = [DEFAULT]
    if any(STREAM_DOUBT < m <= DEFAULT.stream_rows for m in rows):
        out.append(replace(DEFAULT, stream_rows=STREAM_DOUBT))
    if any(m > DEFAULT.stream_rows for m in rows):
        out.append(replace(DEFAULT, rows=4, vectors=3))
    return out
