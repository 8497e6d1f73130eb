"""Loading a plan and its weights, the key-value cache, and launches; contains no compiler.

`Session` is the way in. `runtime` sees only `plan` and `base`.
"""

from obelisk.runtime.checkpoint import Checkpoint, file_digests, weight_files
from obelisk.runtime.session import Sampling, Session, SlotRun
from obelisk.runtime.timeline import Span, trace_events

__all__ = [
    "Checkpoint",
    "Sampling",
    "Session",
    "SlotRun",
    "Span",
    "file_digests",
    "trace_events",
    "weight_files",
]
