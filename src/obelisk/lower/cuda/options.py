"""What can be chosen when lowering for CUDA, and what a lowered module is.

Frozen records only. `CudaOptions` is part of a kernel's identity: the same graph, machine and
options give the same text, byte for byte.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CudaOptions:
    """Lowering choices.

    Attributes:
        fragments: keep tiles in registers as matrix fragments where a kernel allows it (False:
            every kernel keeps its tiles in shared memory).
        groups: groups of warps that share the iterations of a block's loop (0: chosen).
        row_warps: warps of a group, which share the rows of its tiles (0: chosen).
        column_warps: warps of a group that share the columns of its results (0: chosen).
        stages: tiles in flight ahead of the arithmetic (0: as many as fit, at most 4).
        row_tile: rows that a block's products have at least, if the graph's blocks have fewer and
            its rows divide (0: as the graph has it).
        column_tile: the same for columns of products that are columns of results.
        splits: parts into which a split fold is cut at most (0: as the graph has it).
        loop_tile: elements along the loop that one stage of the pipeline holds (0: 64).
        loop_scale: iterations are cut into this many shorter ones before lowering (0: chosen).
        fuse_combine: the last block to finish combines the parts of a split fold, in the same
            kernel.
        clusters: the blocks of a split fold are a cluster where the device has them and holds all
            of them at once; they send each other their shares and combine them there.
        wgmma: four warps make a product together where the device can and tiles allow it.
        share_scales: the scale of a row of a right operand is computed once by the threads of a
            group, not by each of its warps.
        remake: a right operand that is computed from a tile in shared memory is written there by
            the group's warps.
        bulk: a warp of its own fills the pipeline with bulk copies where the device has them.
        ahead: an iteration's first product is begun in front of the last one's final product where
            a loop has such a chain, so that exponentials run beside products.
        resident: blocks that one SM shall hold at a time (0: as many as the grid has for it, and
            two where weights are streamed, so that the next launch's blocks find room to start
            early; at most 4, if their pipelines stay deep enough).
        threads: threads of a block whose tiles are in shared memory.
    """

    fragments: bool = True
    groups: int = 0
    row_warps: int = 0
    column_warps: int = 0
    stages: int = 0
    loop_scale: int = 0
    loop_tile: int = 0
    row_tile: int = 0
    column_tile: int = 0
    splits: int = 0
    fuse_combine: bool = True
    resident: int = 0
    clusters: bool = True
    wgmma: bool = True
    bulk: bool = True
    share_scales: bool = True
    remake: bool = True
    ahead: bool = False
    threads: int = 256


class Place(enum.Enum):
    """Which memory an argument points into."""

    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"
    COUNTER = "counter"  # zeros before the first call; every kernel leaves zeros behind


@dataclass(frozen=True, slots=True)
class Pointer:
    """A kernel argument: a device address, `offset` bytes into input or output number `index`, the
    scratch memory or the counters.
    """

    place: Place
    index: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorMap:
    """A matrix in device memory as the copy engine sees it: an argument that follows the pointers.

    Attributes:
        argument: which pointer argument the matrix starts at.
        dtype: `f16` or `bf16`.
        columns, rows: extents; `stride`: bytes between rows.
        box_columns, box_rows: what one copy moves, into rows of 128 bytes with swizzled chunks.
    """

    argument: int
    dtype: str
    columns: int
    rows: int
    stride: int
    box_columns: int
    box_rows: int


@dataclass(frozen=True, slots=True)
class CudaKernel:
    """One kernel.

    Attributes:
        entry: name of the `extern "C"` function.
        source: a whole translation unit.
        blocks, threads: of a launch (one-dimensional).
        shared: bytes of dynamic shared memory.
        cluster: blocks of a cluster (1: none).
        maps: tensor maps, in the order of the arguments that follow the pointers.
        notes: what was decided, for people, in short; `plan`: in full (`describe` prints it).
    """

    entry: str
    source: str
    blocks: int
    threads: int
    shared: int
    cluster: int = 1
    notes: tuple[str, ...] = ()
    plan: tuple[str, ...] = ()
    maps: tuple[TensorMap, ...] = ()


@dataclass(frozen=True, slots=True)
class CudaLaunch:
    """A launch of kernel number `kernel` with these arguments. `origin` names the graph's node."""

    kernel: int
    arguments: tuple[Pointer, ...]
    origin: str = ""


@dataclass(frozen=True, slots=True)
class CudaModule:
    """A lowered graph.

    Attributes:
        kernels: distinct kernels.
        launches: in order; each may depend on all before it.
        scratch_bytes: device memory between kernels, 256-byte aligned; calls that overlap need
            their own.
        counters: number of 32-bit counters, zeroed once.
        digest: of everything above.
        notes: for people.
    """

    kernels: tuple[CudaKernel, ...]
    launches: tuple[CudaLaunch, ...]
    scratch_bytes: int
    counters: int
    digest: str
    notes: tuple[str, ...]
