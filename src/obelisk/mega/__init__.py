"""Checked schedules as programs: one text that runs whole decode steps.

`emit_cpu` gives C with one pinned thread for each core, `emit_cuda` CUDA C++ with one block for
each SM; `target_of` says which target serves a machine. Emitters only return text.
"""

from obelisk.mega.cpu.emit import Edge, Emitted, emit_cpu
from obelisk.mega.cuda import EmittedCuda, emit_cuda
from obelisk.mega.targets import Target, target_of

__all__ = [
    "Edge", "Emitted", "EmittedCuda", "Target", "emit_cpu", "emit_cuda", "target_of",
]  # fmt: skip
