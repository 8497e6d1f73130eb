"""One kernel that keeps its tiles in registers, with the launch behind it where it can do that too.

Takes a flattened block graph, how its tensors lie, and maybe the block graph that combines what its
blocks store; gives the text of a translation unit. The last block of a split to arrive does the
combining, or the blocks of a split are a cluster, keep their parts in shared memory and share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from obelisk.base.errors import Infeasible
from obelisk.ir.block import BlockGraph
from obelisk.ir.op import Op
from obelisk.lower.cuda.ahead import Ahead
from obelisk.lower.cuda.combine import Gathering, combining, gathering, split_axis
from obelisk.lower.cuda.dealt import Dealt, Gathered
from obelisk.lower.cuda.describe import plan_lines
from obelisk.lower.cuda.fragment import Fragments
from obelisk.lower.cuda.generic import runtime
from obelisk.lower.cuda.names import CTYPE, grid_lines
from obelisk.lower.cuda.options import CudaKernel, CudaOptions
from obelisk.lower.schedule import Operand
from obelisk.machine.description import Feature, Machine

MOST_CLUSTER = 8  # blocks of a cluster on every device that has clusters
CLUSTER_SHARE = (10, 11)  # of the SMs can hold blocks of clusters of 4 or 8 (measured: 120 of 132)
HEADERS = ("scalar.cuh", "copy.cuh", "mma.cuh", "fold.cuh", "barrier.cuh")


@dataclass(frozen=True, slots=True)
class Last:
    """A launch that reads what another stored: its block graph, how its tensors lie, and which of
    the other's results each of its params is (None: another tensor).
    """

    block: BlockGraph
    params: tuple[Operand, ...]
    results: tuple[Operand, ...]
    places: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """A kernel, the counters it needs, and whether the first launch's results stay inside it."""

    kernel: CudaKernel
    counters: int
    local: bool


def cluster_ending(
    block: BlockGraph, last: Last, machine: Machine, options: CudaOptions
) -> Gathering | None:
    """How the blocks of a split, as one cluster, share the combining; None where they cannot."""
    split = split_axis(block)
    if split is None or not options.clusters or Feature.CLUSTERS not in machine.features:
        return None
    if block.grid[split] > MOST_CLUSTER or any(s.fmap is not None for s in block.stores):
        return None
    return gathering(block, last.block, last.places)


def gathered(work: Fragments, last: Last, ending: Gathering, outputs: list[str]) -> list[str]:
    """Lines by which the blocks of a cluster combine their parts, each a share of the result."""
    kept = [j for j in last.places if j is not None]
    params = [work.results[j] for j in kept]
    names = ([f"part{j}" for j in kept], outputs)
    combine = Gathered(ending, params, last.results, names, work.threads)
    return [
        "ob_cluster_arrive();",
        "ob_cluster_wait();  // all parts are here",
        "{",
        *("  " + x for x in combine.body()),
        "}",
    ]


def planned(
    block: BlockGraph,
    params: Sequence[Operand],
    results: Sequence[Operand],
    last: Last | None,
    target: tuple[Machine, CudaOptions],
) -> tuple[Fragments | Dealt, Gathering | None]:
    """The emitter of a block graph, and how the blocks of a cluster combine its results."""
    machine, options = target
    if not any(n.op is Op.MATMUL for n in block.body):
        names = ([f"in{i}" for i in range(len(params))], [f"out{j}" for j in range(len(results))])
        return Dealt(block, params, results, "", names), None
    make = Ahead if options.ahead else Fragments
    ending = cluster_ending(block, last, machine, options) if last is not None else None
    if ending is not None and last is not None:
        places = [j for j in last.places if j is not None]
        waves = cluster_waves(block.blocks, block.grid[ending.split], machine)
        closer = replace(
            options, resident=max(options.resident, waves) if waves > 1 else options.resident
        )
        try:
            work = make(block, params, results, machine, closer, (ending, places))
        except Infeasible:  # no room for the parts
            return make(block, params, results, machine, options), None
        if work.looped and work.resident >= waves:
            return work, ending
    return make(block, params, results, machine, options), None


def cluster_waves(blocks: int, size: int, machine: Machine) -> int:
    """Blocks that an SM must hold at a time so that all clusters run at once. Clusters larger than
    two leave SMs of some processor groups free; those that start late cost a whole pass (LOG.md).
    """
    usable = machine.cores if size <= 2 else machine.cores * CLUSTER_SHARE[0] // CLUSTER_SHARE[1]
    return -(-(blocks // size) // max(1, usable // size))


def counted(
    block: BlockGraph, last: Last, outputs: list[str], threads: int
) -> tuple[list[str], int] | None:
    """Lines by which the last block of a split to arrive combines the parts, and the counters they
    need; None where the launches do not fit together.
    """
    found = combining(block, last.block, last.places)
    if found is None:
        return None
    names = ([f"out{j}" for j in last.places], outputs)
    work = Dealt(found.block, last.params, last.results, "z", names, threads)
    lines = work.body()
    number, step, grid = [], 1, block.grid
    for a in reversed([a for a in range(len(grid)) if a != found.split]):
        if grid[a] > 1:
            number.append(f"g{a} * {step}" if step > 1 else f"g{a}")
        step *= grid[a]
    counter = f"counters + ({' + '.join(number) or '0'})"
    opening = f"if (ob_last_block({counter}, {grid[found.split]})) {{"
    coordinates = [
        f"  const int zg{p} = {'0' if a < 0 else f'g{a}'};" for p, a in enumerate(found.coordinates)
    ]
    return [opening, *coordinates, *("  " + x for x in lines), "}"], step


def _begin(work: Fragments | Dealt, block: BlockGraph, fastest: int | None) -> list[str]:
    """The first lines of a kernel: who this thread is, then the wait for the launch ahead."""
    out = ["const int thread = threadIdx.x, lane = thread & 31;"]
    if isinstance(work, Fragments):
        if work.shared_bytes():
            out.append("extern __shared__ __align__(16) char arena[];")
            out.append(f"char *const base = {'ob_line(arena)' if work.aligned else 'arena'};")
        gt = work.group_threads
        out.append(f"const int group = thread / {gt}, member = thread % {gt};")
        out.append(f"const int warp_row = member / 32 % {work.row_warps};")
        out.append(f"const int warp_column = member / {32 * work.row_warps};")
    out += grid_lines(block.grid, "(int)blockIdx.x", fastest=fastest)
    if isinstance(work, Fragments):
        out += work.ring()
    out.append("ob_begin();")
    if isinstance(work, Fragments) and work.local:
        out.append("ob_cluster_arrive();")
    return out


def register_kernel(
    block: BlockGraph,
    params: Sequence[Operand],
    results: Sequence[Operand],
    last: Last | None,
    machine: Machine,
    options: CudaOptions,
) -> Made | None:
    """The kernel of a flattened block graph; with `last`, of that one too, or None where the two do
    not fit together. Raises `Infeasible` where a graph does not have this form.
    """
    work, ending = planned(block, params, results, last, (machine, options))
    lines = work.body()
    ends = last.results if last else ()
    outputs = [f"out{len(results) + j}" for j in range(len(ends))]
    extra: list[str] = []
    counters, cluster = 0, 1
    if ending is not None and last is not None and isinstance(work, Fragments):
        extra, cluster = gathered(work, last, ending, outputs), block.grid[ending.split]
    elif last is not None:
        found = counted(block, last, outputs, work.threads)
        if found is None:
            return None
        extra, counters = found
    kept = enumerate(results) if cluster == 1 else ()
    maps = work.maps() if isinstance(work, Fragments) else ()
    arguments = [
        *(f"const {CTYPE[o.dtype]} *in{i}" for i, o in enumerate(params)),
        *(f"{CTYPE[o.dtype]} *out{j}" for j, o in kept),
        *(f"{CTYPE[o.dtype]} *{n}" for n, o in zip(outputs, ends, strict=True)),
        *(["unsigned *counters"] if counters else []),
        *(f"const __grid_constant__ ob_map map{i}" for i in range(len(maps))),
    ]
    headers, threads, shared, resident = list(HEADERS), work.threads, 0, 1
    if isinstance(work, Fragments):
        headers += [
            *(["bulk.cuh"] if work.bulk else []),
            *(["wgmma.cuh"] if work.wide else []),
            *(["ahead.cuh"] if work.wide and work.late else []),
        ]
        threads, shared, resident = work.launch_threads(), work.shared_bytes(), work.resident
    begin = _begin(work, block, ending.split if ending else None)
    text = [
        f"// Obelisk: grid {block.grid}, loop {block.loop}.",
        runtime(*headers),
        f'extern "C" __global__ void __launch_bounds__({threads}, {resident})',
        f"obelisk_kernel({', '.join(arguments)}) {{",
        *("  " + x for x in (*begin, *lines, *extra)),
        "}",
        "",
    ]
    note = f"tiles in registers, {work.threads} threads"
    kernel = CudaKernel(
        "obelisk_kernel", "\n".join(text), block.blocks, threads, shared, cluster, (note,),
        plan_lines(work), maps,
    )  # fmt: skip
    return Made(kernel, counters, cluster > 1)
