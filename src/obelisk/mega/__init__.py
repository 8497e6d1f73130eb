"""Checked schedules as programs: one text that runs whole decode steps.

`emit_cpu` gives C with one pinned thread for each core; `target_of` says which target serves a
machine. Emitters only return text.
"""

from obelisk.mega.cpu.emit import Edge, Emitted, emit_cpu
from obelisk.mega.targets import Target, target_of

__all__ = ["Edge", "Emitted", "Target", "emit_cpu", "target_of"]
