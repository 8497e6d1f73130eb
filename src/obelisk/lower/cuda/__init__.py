"""The CUDA target: CUDA C++ for one exact architecture, from a small header library of our own.

`lower_cuda` turns any graph into kernels and launches; it only returns text. Kernels whose tiles
fit registers keep them there (`fragment` for products, `dealt` for the rest); all others keep them
in shared memory (`generic`). `variants` lists the lowering choices that are worth racing.
"""

from __future__ import annotations

from obelisk.lower.cuda.describe import describe
from obelisk.lower.cuda.module import lower_cuda, variants
from obelisk.lower.cuda.options import (
    CudaKernel,
    CudaLaunch,
    CudaModule,
    CudaOptions,
    Place,
    Pointer,
    TensorMap,
)

__all__ = [
    "CudaKernel",
    "CudaLaunch",
    "CudaModule",
    "CudaOptions",
    "Place",
    "Pointer",
    "TensorMap",
    "describe",
    "lower_cuda",
    "variants",
]
