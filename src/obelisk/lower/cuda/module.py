"""Graph -> `CudaModule`: the tile program's kernels printed, its calls as launches on addresses.

Takes a graph, a machine and options; gives kernels in text and launches in order. A pair of
launches that stores partial results and combines them becomes one kernel where the fragment emitter
takes both. Raises `Infeasible` with the limit that is broken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from obelisk.base.digest import digest
from obelisk.base.errors import Infeasible
from obelisk.ir.block import BlockGraph
from obelisk.ir.graph import Graph
from obelisk.ir.op import Op
from obelisk.ir.resize import blocks_of
from obelisk.lower.cuda.generic import Style, emit_generic, spill_stride
from obelisk.lower.cuda.kernel import Last, register_kernel
from obelisk.lower.cuda.options import (
    CudaKernel,
    CudaLaunch,
    CudaModule,
    CudaOptions,
    Place,
    Pointer,
)
from obelisk.lower.cuda.sizes import fitting_splits, has_chain, has_products, row_axis, scaled
from obelisk.lower.describe import kernel_lines
from obelisk.lower.program import _Program
from obelisk.lower.schedule import Operand, Rules, flatten
from obelisk.lower.tile import Binding, Call, Kernel, Tensor, TensorKind, TileProgram, private
from obelisk.machine.description import Feature, Machine, MachineKind

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
ALIGNMENT = 16  # bytes, of every tensor's start
ARENA_LIMIT = 1 << 30  # bytes of tiles of a block; beyond shared memory they lie in device memory
SCRATCH_LIMIT = 1 << 36
LINE = 64  # columns of a whole line of a swizzled tile
WIDE = 64  # rows from which products can be made by four warps
BLOCK_LIMIT = (1 << 31) - 1  # of a one-dimensional grid
LEAST_AHEAD = 3  # iterations of a loop that may gain from an overlap
AHEAD_TALL = ((3, 64, True), (2, 64, True), (4, 64, False))  # groups, loop tile, bulk copies
DEFAULT = CudaOptions()
RULES = Rules(
    lanes=4, alias=True, work=lambda _: 0, arena_limit=ARENA_LIMIT, mixed=True, pairs=True
)
_PLACES = {
    TensorKind.INPUT: Place.INPUT,
    TensorKind.OUTPUT: Place.OUTPUT,
    TensorKind.SCRATCH: Place.SCRATCH,
}


@dataclass(frozen=True, slots=True)
class Source:
    """Where a kernel of the tile program comes from: its block graph and how its tensors lie."""

    block: BlockGraph
    params: tuple[Operand, ...]
    results: tuple[Operand, ...]


def scheduled(graph: Graph, machine: Machine) -> tuple[TileProgram, dict[int, Source]]:
    """The tile program, and the block graph behind each of its kernels."""
    if machine.kind is not MachineKind.CUDA:
        raise Infeasible(
            f"{machine.name} is a {machine.kind} machine; the CUDA target cannot serve it"
        )
    if machine.arch not in ARCHITECTURES:
        raise Infeasible(
            f"{machine.name} is {machine.arch}; the CUDA target serves {', '.join(ARCHITECTURES)}"
        )
    work = _Program(graph, RULES, machine.cores)
    program = work.run()
    if program.scratch > SCRATCH_LIMIT:
        raise Infeasible(
            f"tensors between kernels take {program.scratch} bytes, the limit is {SCRATCH_LIMIT}"
        )
    sources: dict[int, Source] = {}
    for key, number in work.numbers.items():
        if isinstance(key, tuple):
            block, params, results = key
            sources.setdefault(number, Source(block, params, results))
    return program, sources


class _Lowering:
    """Builds the module of one program."""

    def __init__(self, program: TileProgram, machine: Machine, options: CudaOptions) -> None:
        self.program, self.machine, self.options = program, machine, options
        self.kernels: list[CudaKernel] = []
        self.launches: list[CudaLaunch] = []
        self.numbers: dict[CudaKernel, int] = {}
        self.scratch = -(-program.scratch // 256) * 256
        self.spill = 0  # bytes behind the program's own scratch
        self.counters = 0
        self.refusals: list[str] = []

    def pointer(self, binding: Binding) -> Pointer:
        tensor: Tensor = self.program.tensors[binding.tensor]
        step = int(binding.offset * tensor.dtype.nbytes)
        return Pointer(_PLACES[tensor.kind], tensor.index, tensor.offset + step)

    def add(self, kernel: CudaKernel, arguments: tuple[Pointer, ...], origin: str) -> None:
        if kernel.blocks > BLOCK_LIMIT:
            raise Infeasible(f"a grid of {kernel.blocks} blocks; the limit is {BLOCK_LIMIT}")
        if kernel.blocks == 0:
            return
        if kernel not in self.numbers:
            self.numbers[kernel] = len(self.kernels)
            self.kernels.append(kernel)
        self.launches.append(CudaLaunch(self.numbers[kernel], arguments, origin))

    def generic(self, kernel: Kernel, call: Call) -> None:
        """A launch of a kernel with its tiles in shared memory, or in device memory."""
        spilled = kernel.arena > self.machine.shared_bytes
        style = Style(self.options.threads, spilled)
        source = emit_generic(kernel, style, "obelisk_kernel")
        shared = 0 if spilled else kernel.arena
        note = f"{kernel.arena} bytes of tiles in {'device' if spilled else 'shared'} memory"
        text = CudaKernel(
            "obelisk_kernel", source, kernel.blocks, style.threads, shared, 1, (note,),
            tuple(kernel_lines(kernel)),
        )  # fmt: skip
        arguments = tuple(self.pointer(b) for b in (*call.params, *call.results))
        if spilled:
            self.spill = max(self.spill, spill_stride(kernel) * kernel.blocks)
            if self.spill > SCRATCH_LIMIT:
                raise Infeasible(f"tiles take {self.spill} bytes, the limit is {SCRATCH_LIMIT}")
            arguments += (Pointer(Place.SCRATCH, 0, self.scratch),)
        self.add(text, arguments, call.origin)

    def registers(self, call: Call, source: Source, after: tuple[Call, Source] | None) -> bool:
        """Launches of a kernel that keeps its tiles in registers; with `after`, one that also does
        the launch behind it. False where it has not that form.
        """
        block = flatten(source.block)
        last: Last | None = None
        if after is not None:
            where = {b: j for j, b in enumerate(call.results)}
            places = tuple(where.get(b) for b in after[0].params)
            then = after[1]
            last = Last(flatten(then.block), then.params, then.results, places)
        params = tuple(
            replace(p, start=self.pointer(b).offset % ALIGNMENT // int(p.dtype.nbytes))
            for p, b in zip(source.params, call.params, strict=True)
        )
        try:
            made = register_kernel(block, params, source.results, last, self.machine, self.options)
        except Infeasible as reason:
            self.refusals.append(str(reason))
            return False
        if made is None:
            return False
        arguments = [self.pointer(b) for b in call.params]
        if not made.local:
            arguments += [self.pointer(b) for b in call.results]
        if after is not None:
            arguments += [self.pointer(b) for b in after[0].results]
            if made.counters:
                arguments.append(Pointer(Place.COUNTER, 0, 4 * self.counters))
            self.counters += made.counters
        self.add(made.kernel, tuple(arguments), call.origin)
        return True

    def finish(self, notes: tuple[str, ...]) -> CudaModule:
        module = CudaModule(
            tuple(self.kernels),
            tuple(self.launches),
            self.scratch + self.spill,
            self.counters,
            "",
            notes,
        )
        return replace(module, digest=digest("cuda", repr(module)))


def lower_cuda(graph: Graph, machine: Machine, options: CudaOptions = DEFAULT) -> CudaModule:
    """Kernels and launches for a graph on an exact architecture.

    Deterministic: equal arguments give equal text. Raises `Infeasible` naming the limit.
    """
    program, sources = scheduled(scaled(graph, options), machine)
    work = _Lowering(program, machine, options)
    calls = program.calls
    i = 0
    while i < len(calls):
        source = sources.get(calls[i].kernel) if options.fragments else None
        if source is not None and options.fuse_combine and i + 1 < len(calls):
            then = sources.get(calls[i + 1].kernel)
            if (
                then is not None
                and private(program, i)
                and work.registers(calls[i], source, (calls[i + 1], then))
            ):
                i += 2
                continue
        if source is None or not work.registers(calls[i], source, None):
            work.generic(program.kernels[calls[i].kernel], calls[i])
        i += 1
    notes = (
        f"{len(work.launches)} launches of {len(work.kernels)} kernels",
        f"{program.scratch} bytes between kernels (bound {program.scratch_bound})",
        *(f"in shared memory: {r}" for r in dict.fromkeys(work.refusals)),
    )
    return work.finish(notes)


def product_rows(graph: Graph) -> int:
    """Rows of the tallest product tile among the graph's block graphs; 0 where there is none."""
    return max(
        (
            n.shape[-2]
            for block in blocks_of(graph)
            for n in flatten(block).body
            if n.op is Op.MATMUL
        ),
        default=0,
    )


def variants(graph: Graph, machine: Machine) -> list[CudaOptions]:
    """The lowering choices worth racing for a graph on this machine, the default first.

    Tall products have warps to spread over rows; flat ones are bound by the memory they read, and
    differ in how many tiles are in flight and how warps share them. What a device does not have is
    not listed: such options lower to the same text as those without.
    """
    rows = product_rows(graph)
    if rows == 0:
        return [DEFAULT]
    has = machine.features
    tall = _tall(graph, machine) if Feature.WGMMA in has else []
    tall += _ahead(graph, [o for o in tall if (o.groups, o.loop_tile, o.bulk) in AHEAD_TALL])
    if rows >= WIDE and tall:
        return [DEFAULT, *tall, CudaOptions(groups=2, wgmma=False)]
    parts = fitting_splits(graph, machine) if Feature.CLUSTERS in has else 0
    made = [*tall]
    if parts:
        made += [CudaOptions(groups=g, splits=parts) for g in (4, 5, 8)]
        made += [CudaOptions(groups=4, clusters=False)]
    if rows > 16:
        made += [CudaOptions(row_warps=8), CudaOptions(stages=2)]
        made += _ahead(graph, [DEFAULT, CudaOptions(row_warps=8, groups=2)])
        return [DEFAULT, *made, *(CudaOptions(row_warps=8, groups=n) for n in (8, 4, 3, 2))]
    return [DEFAULT, *made, *_flat(has), *_ahead(graph, [DEFAULT, CudaOptions(groups=4)])]


def _ahead(graph: Graph, chosen: list[CudaOptions]) -> list[CudaOptions]:
    """Those of some choices whose iterations can overlap, with that."""
    return [replace(o, ahead=True) for o in chosen if has_chain(scaled(graph, o), LEAST_AHEAD)]


def _tall(graph: Graph, machine: Machine) -> list[CudaOptions]:
    """Choices with row tiles of 64 for products by four warps; none where rows are fewer."""
    rows = [r for b in blocks_of(graph) if has_products(b) and (r := row_axis(b)) is not None]
    if product_rows(graph) < WIDE and not any(full % WIDE == 0 for _, full in rows):
        return []
    parts = fitting_splits(graph, machine, WIDE)
    out = [
        CudaOptions(row_tile=WIDE, splits=parts, groups=g, loop_tile=t, bulk=b)
        for g, t, b in (
            (2, 128, True), (3, 64, True), (2, 64, False), (1, 128, True), (4, 64, False),
            (2, 128, False), (2, 64, True),
        )
    ]  # fmt: skip
    return [*out, *(CudaOptions(row_tile=WIDE, groups=g, clusters=False) for g in (4, 2))]


def _flat(has: frozenset[Feature]) -> list[CudaOptions]:
    """Choices for up to 16 rows: whole lines of columns in bulk, smaller copies by all threads."""
    made: list[CudaOptions] = []
    if Feature.BULK_COPY in has:
        shares = ((2, 4, 2), (4, 2, 2), (1, 4, 2), (2, 4, 3), (1, 4, 4), (1, 8, 2), (2, 2, 3))
        made += [
            CudaOptions(groups=g, column_warps=c, resident=r, column_tile=LINE)
            for g, c, r in shares
        ]
    made += [CudaOptions(column_warps=4, column_tile=t) for t in (LINE, 2 * LINE)]
    made += [CudaOptions(column_warps=n) for n in (2, 4)]
    small = ((4, 2, 2), (2, 4, 2), (4, 2, 1), (1, 8, 1), (4, 1, 1), (8, 1, 2))
    made += [CudaOptions(groups=g, column_warps=c, resident=r, bulk=False) for g, c, r in small]
    return [*made, CudaOptions(column_warps=4, stages=3, bulk=False), CudaOptions(stages=2)]
