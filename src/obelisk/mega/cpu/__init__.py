"""The CPU target: C, one straight program for each pinned thread.

`emit.emit_cpu` is the way in; `runtime/*.h` has the bodies of the tasks.
"""
