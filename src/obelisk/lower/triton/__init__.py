"""The Triton target: readable Triton kernels for any graph, as text.

`lower_triton` turns a graph into kernels and launches; `build.triton` compiles them for an exact
architecture with or without a GPU, and the CUDA target's launcher runs them. `variants` lists the
lowering choices that are worth racing.
"""

from __future__ import annotations

from obelisk.lower.triton.module import lower_triton, variants
from obelisk.lower.triton.options import TritonKernel, TritonModule, TritonOptions

__all__ = ["TritonKernel", "TritonModule", "TritonOptions", "lower_triton", "variants"]
