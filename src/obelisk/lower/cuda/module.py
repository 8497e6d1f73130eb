"""Graph -> `CudaModule`: the tile program's kernels printed, its calls as launches with addresses.

Takes a graph, a machine and options; gives kernels in text and launches in order. A pair of launches
that stores partial results and combines them becomes one kernel where the fragment emitter takes
both. Raises `Infeasible` with the limit that is broken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from obelisk.base.digest import digest
from obelisk.base.errors import Infeasible
from obelisk.ir.block import BlockGraph
from obelisk.ir.graph import Graph
from obelisk.lower.cuda.generic import Style, emit_generic, spill_stride
from obelisk.lower.cuda.options import (
    CudaKernel,
    CudaLaunch,
    CudaModule,
    CudaOptions,
    Place,
    Pointer,
)
from obelisk.lower.program import _Program
from obelisk.lower.schedule import Operand, Rules
from obelisk.lower.tile import Binding, Call, Kernel, Tensor, TensorKind, TileProgram
from obelisk.machine.description import Machine, MachineKind

ARENA_LIMIT = 1 << 30  # bytes of tiles of a block; beyond shared memory they lie in device memory
SCRATCH_LIMIT = 1 << 36
BLOCK_LIMIT = (1 << 31) - 1  # of a one-dimensional grid
DEFAULT = CudaOptions()
RULES = Rules(lanes=4, alias=True, work=lambda _: 0, arena_limit=ARENA_LIMIT, mixed=True)
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
            "obelisk_kernel", source, kernel.blocks, style.threads, shared, 1, (note,)
        )
        arguments = tuple(self.pointer(b) for b in (*call.params, *call.results))
        if spilled:
            self.spill = max(self.spill, spill_stride(kernel) * kernel.blocks)
            if self.spill > SCRATCH_LIMIT:
                raise Infeasible(f"tiles take {self.spill} bytes, the limit is {SCRATCH_LIMIT}")
            arguments += (Pointer(Place.SCRATCH, 0, self.scratch),)
        self.add(text, arguments, call.origin)

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
    program, sources = scheduled(graph, machine)
    work = _Lowering(program, machine, options)
    for call in program.calls:
        work.generic(program.kernels[call.kernel], call)
    notes = (
        f"{len(work.launches)} launches of {len(work.kernels)} kernels",
        f"{program.scratch} bytes between kernels (bound {program.scratch_bound})",
    )
    return work.finish(notes)


def variants(graph: Graph, machine: Machine) -> list[CudaOptions]:
    """The lowering choices worth racing for a graph, the default first."""
    return [DEFAULT]
