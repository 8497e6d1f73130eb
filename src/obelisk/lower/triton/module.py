"""Graph -> `TritonModule`: a Triton kernel for every launch of the tile program, and its launches.

Takes a graph, a machine and options; gives text only. Raises `Infeasible` with the limit that is
broken.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from obelisk.base.digest import digest
from obelisk.base.errors import Infeasible
from obelisk.ir.block import BlockGraph
from obelisk.ir.graph import Graph, Launch
from obelisk.ir.node import Node
from obelisk.ir.op import Op
from obelisk.lower.cuda.module import RULES, SCRATCH_LIMIT, Source, product_rows
from obelisk.lower.cuda.names import kind_of
from obelisk.lower.cuda.options import CudaLaunch, CudaOptions, Place, Pointer
from obelisk.lower.cuda.sizes import scaled
from obelisk.lower.program import _Program
from obelisk.lower.schedule import flatten
from obelisk.lower.tile import Binding, Call, Chain, Kernel, TensorKind, View
from obelisk.lower.triton import default
from obelisk.lower.triton.names import KIND_TYPE, indented, literal, stored
from obelisk.lower.triton.options import TritonKernel, TritonModule, TritonOptions
from obelisk.lower.triton.padding import LEAST_PRODUCT
from obelisk.lower.triton.prelude import prelude
from obelisk.lower.triton.products import Products
from obelisk.machine.description import Machine, MachineKind

DEFAULT = TritonOptions()
ENTRY = "obelisk_kernel"
ALIGNED = 16  # bytes; what the compiler may assume of an address
BLOCK_LIMIT = (1 << 31) - 1  # of a one-dimensional grid
FILL = 1024  # elements of a block that writes a constant
WARP_ELEMENTS = 1024  # padded elements of the largest tile that one more warp is worth
MOST_WARPS, MOST_STAGES = 8, 4
SHARED_SHARE = 0.7  # of shared memory, for loads in flight
_PLACES = {
    TensorKind.INPUT: Place.INPUT,
    TensorKind.OUTPUT: Place.OUTPUT,
    TensorKind.SCRATCH: Place.SCRATCH,
}


class _TritonProgram(_Program):
    """The tile program with default block graphs in Triton's sizes."""

    def run_launch(self, launch: Launch) -> None:
        if launch.block is not None:
            super().run_launch(launch)
            return
        made = default.default_block(launch.node, self.cores)
        view = self.views[launch.node] = self.result(launch.node)
        self.launch(made.block, made.inputs, [view], launch.node.op.value)

    def copied(self, node: Node, target: View | None = None) -> View:
        to = target or self.dense(
            self.tensor(TensorKind.SCRATCH, node.dtype, node.elements), node.shape
        )
        made = default.copy(node)
        self.launch(made.block, made.inputs, [to], "copy")
        return to


def fill_text(kernel: Kernel) -> tuple[list[str], int]:
    """The statements and the number of blocks of a kernel that writes a constant or counts."""
    (chain,) = kernel.body
    assert isinstance(chain, Chain)
    (code,) = chain.code
    total = prod(d.size for d in chain.dims)
    dtype = kernel.buffers[chain.writes[0].access.buffer].dtype
    lines = [
        f"i = tl.program_id(0).to(tl.int64) * {FILL} + tl.arange(0, {FILL})",
    ]
    if code.op is Op.IOTA:
        step = prod(d.size for d in chain.dims[code.place + 1 :])
        text = "i" if step == 1 else f"i // {step}"
        value = f"({text} % {chain.dims[code.place].size}).to(tl.int32)"
    else:
        kind = kind_of(dtype)
        value = f"tl.full([{FILL}], {literal(code.value, kind)}, {KIND_TYPE[kind]})"
        value = stored(value, dtype)
    lines.append(f"tl.store(y0 + i, {value}, mask=i < {total})")
    return lines, -(-total // FILL)


def module_text(params: list[str], title: str, body: list[str]) -> str:
    """A Python module with one kernel."""
    lines = [
        "@triton.jit",
        f"def {ENTRY}({', '.join(params)}, EARLY: tl.constexpr = False):",
        f'    """{title}"""',
        "    ob_begin(EARLY)",
        *map(indented, body),
    ]
    text = "\n".join(lines) + "\n"
    return f"# Obelisk.\n{prelude(text)}\n\n{text}"


class _Lowering:
    """Builds the module of one program."""

    def __init__(self, program: _TritonProgram, machine: Machine, options: TritonOptions) -> None:
        self.tiles = program.run()
        self.machine, self.options = machine, options
        self.sources: dict[int, Source] = {}
        for key, number in program.numbers.items():
            if isinstance(key, tuple):
                self.sources.setdefault(number, Source(*key))
        if self.tiles.scratch > SCRATCH_LIMIT:
            raise Infeasible(
                f"tensors between kernels take {self.tiles.scratch} bytes, the limit is "
                f"{SCRATCH_LIMIT}"
            )
        self.kernels: list[TritonKernel] = []
        self.launches: list[CudaLaunch] = []
        self.texts: dict[int, TritonKernel] = {}

    def pointer(self, binding: Binding) -> Pointer:
        tensor = self.tiles.tensors[binding.tensor]
        step = int(binding.offset * tensor.dtype.nbytes)
        return Pointer(_PLACES[tensor.kind], tensor.index, tensor.offset + step)

    def kernel(self, number: int) -> TritonKernel:
        """The text of a kernel of the tile program, its arguments' alignment aside."""
        if number not in self.texts:
            source = self.sources.get(number)
            self.texts[number] = self.filling(number) if source is None else self.block(source)
        return self.texts[number]

    def filling(self, number: int) -> TritonKernel:
        kernel = self.tiles.kernels[number]
        lines, blocks = fill_text(kernel)
        text = module_text(["y0"], "Writes what is known beforehand.", lines)
        return TritonKernel(ENTRY, text, blocks, (kernel.buffers[0].dtype,), (), 4, 1)

    def block(self, source: Source) -> TritonKernel:
        block = flatten(source.block)
        work = Products(block, source.params, source.results)
        body = work.body()
        params = [*(f"x{i}" for i in range(len(source.params)))]
        params += [f"y{j}" for j in range(len(source.results))]
        title = f"Grid {block.grid}, loop {block.loop}."
        options = self.options
        warps = options.warps or min(MOST_WARPS, max(4, work.largest // WARP_ELEMENTS))
        stages = self.stages(block, work)
        return TritonKernel(
            ENTRY,
            module_text(params, title, body),
            block.blocks,
            tuple(o.dtype for o in (*source.params, *source.results)),
            (),
            warps,
            stages,
            (f"largest tile {work.largest} elements, {warps} warps, {stages} stages",),
        )

    def stages(self, block: BlockGraph, work: Products) -> int:
        """Iterations in flight: as many as fit."""
        if (block.loop == 1 and not work.inner) or not work.streamed:
            return 1
        if self.options.stages:
            return self.options.stages
        room = int(SHARED_SHARE * self.machine.shared_bytes)
        most = MOST_STAGES if work.inner else min(MOST_STAGES, block.loop)
        return max(1, min(most, room // work.streamed))

    def call(self, call: Call) -> None:
        arguments = tuple(self.pointer(b) for b in (*call.params, *call.results))
        aligned = tuple(p.offset % ALIGNED == 0 for p in arguments)
        kernel = replace(self.kernel(call.kernel), aligned=aligned)
        if kernel.blocks > BLOCK_LIMIT:
            raise Infeasible(f"a grid of {kernel.blocks} blocks; the limit is {BLOCK_LIMIT}")
        if kernel.blocks == 0:
            return
        if kernel not in self.kernels:
            self.kernels.append(kernel)
        self.launches.append(CudaLaunch(self.kernels.index(kernel), arguments, call.origin))

    def run(self) -> TritonModule:
        for call in self.tiles.calls:
            self.call(call)
        notes = (
            f"{len(self.launches)} launches of {len(self.kernels)} kernels",
            f"{self.tiles.scratch} bytes between kernels (bound {self.tiles.scratch_bound})",
        )
        scratch = -(-self.tiles.scratch // 256) * 256
        module = TritonModule(tuple(self.kernels), tuple(self.launches), scratch, "", notes)
        return replace(module, digest=digest("triton", repr(module)))


def lower_triton(graph: Graph, machine: Machine, options: TritonOptions = DEFAULT) -> TritonModule:
    """Triton kernels and launches for a graph.

    Deterministic: equal arguments give equal text. Raises `Infeasible` naming the limit.
    """
    if machine.kind is not MachineKind.CUDA:
        raise Infeasible(
            f"{machine.name} is a {machine.kind} machine; the Triton target cannot serve it"
        )
    return _Lowering(
        _TritonProgram(sized(graph, options), RULES, machine.cores), machine, options
    ).run()


def sized(graph: Graph, options: TritonOptions) -> Graph:
    """The graph at the sizes that the options ask for; the CUDA target has the same choices."""
    wanted = CudaOptions(
        loop_tile=options.loop_tile, row_tile=options.row_tile, column_tile=options.column_tile
    )
    return scaled(graph, wanted)


def variants(graph: Graph, machine: Machine) -> list[TritonOptions]:
    """The lowering choices worth racing for a graph on this machine, the default first.

    Flat products are bound by what they read: deeper pipelines and longer tiles. Tall ones want
    tiles of 64 rows and more, and more warps.
    """
    module = lower_triton(graph, machine)
    chosen = {k.warps for k in module.kernels}
    options = [DEFAULT]
    rows = product_rows(graph)
    if not any(k.stages > 1 for k in module.kernels) or rows == 0:
        return options + [TritonOptions(warps=w) for w in (4, 8) if {w} != chosen]
    options += [TritonOptions(stages=s) for s in (6, 2)]
    if rows <= LEAST_PRODUCT:
        options += [
            TritonOptions(stages=8),
            TritonOptions(stages=6, column_tile=64),
            TritonOptions(stages=4, loop_tile=128),
            TritonOptions(stages=4, loop_tile=128, column_tile=64),
            TritonOptions(warps=8, stages=6),
        ]
        return options
    options += [
        TritonOptions(warps=8, stages=3),
        TritonOptions(row_tile=64, stages=3),
        TritonOptions(row_tile=64, stages=2, loop_tile=128),
        TritonOptions(row_tile=128, warps=8, stages=3),
    ]
    return options
