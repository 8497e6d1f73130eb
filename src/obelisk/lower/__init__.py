"""From graphs to text: layout, schedule and memory plan in one tile program, then an emitter per
target.

`tile` is the program that all targets share, `schedule` and `program` make it, `describe` prints
it, and `cpu` emits C. Nothing here runs a compiler or a kernel.
"""

from obelisk.lower.describe import describe

__all__ = ["describe"]
