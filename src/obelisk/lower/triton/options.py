"""What can be chosen when lowering to Triton, and what a lowered module is.

Frozen records only. The same graph, machine and options give the same text, byte for byte. Launches
and their arguments are the CUDA target's records, since both run on the same device.
"""

from __future__ import annotations

from dataclasses import dataclass

from obelisk.ir.dtype import DType
from obelisk.lower.cuda.options import CudaLaunch


@dataclass(frozen=True, slots=True)
class TritonOptions:
    """Lowering choices.

    Attributes:
        warps: of a block; 1, 2, 4, 8 or 16 (0: chosen by the largest tile).
        stages: iterations whose loads are in flight, in kernels whose loops feed products (0: as
            many as fit in shared memory, at most 4).
        loop_tile: elements along the loop that an iteration has, where it has products (0: 64).
        row_tile, column_tile: least rows and columns of a tile of a product (0: as in the graph).
    """

    warps: int = 0
    stages: int = 0
    loop_tile: int = 0
    row_tile: int = 0
    column_tile: int = 0


@dataclass(frozen=True, slots=True)
class TritonKernel:
    """One kernel.

    Attributes:
        entry: name of the decorated function.
        source: a whole Python module.
        blocks: of a launch (one-dimensional).
        pointers: element type of each argument, inputs first.
        aligned: per argument, whether its address is a multiple of 16 bytes in every launch.
        warps, stages: for the compiler.
        notes: what was decided, for people.
    """

    entry: str
    source: str
    blocks: int
    pointers: tuple[DType, ...]
    aligned: tuple[bool, ...]
    warps: int
    stages: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TritonModule:
    """A lowered graph.

    Attributes:
        kernels: distinct kernels.
        launches: in order; each may depend on all before it.
        scratch_bytes: device memory between kernels, 256-byte aligned; calls that overlap need
            their own.
        digest: of everything above.
        notes: for people.
    """

    kernels: tuple[TritonKernel, ...]
    launches: tuple[CudaLaunch, ...]
    scratch_bytes: int
    digest: str
    notes: tuple[str, ...]
