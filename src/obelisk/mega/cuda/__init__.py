"""The CUDA target: one persistent kernel that runs whole decode steps.

`emit_cuda` gives the text; `cuda_layout` says how weights lie; `check_flow` judges how blocks hand
values to each other; `runtime/*.cuh` has the fixed text.
"""

from obelisk.mega.cuda.emit import EmittedCuda, emit_cuda
from obelisk.mega.cuda.layout import cuda_layout

__all__ = ["EmittedCuda", "cuda_layout", "emit_cuda"]
