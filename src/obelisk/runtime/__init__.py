"""Loading a plan and its weights, the key-value cache, and launches; contains no compiler.

`load_session` is the way in: the `Session` that serves a plan, a `CpuSession` or a `CudaSession`.
`runtime` sees only `plan` and `base`.
"""

from obelisk.runtime.checkpoint import Checkpoint, file_digests, weight_files
from obelisk.runtime.cpu import CpuSession
from obelisk.runtime.cuda import CudaSession
from obelisk.runtime.loading import load_session
from obelisk.runtime.session import Sampling, Session, SlotRun
from obelisk.runtime.timeline import Span, trace_events

__all__ = [
    "Checkpoint",
    "CpuSession",
    "CudaSession",
    "Sampling",
    "Session",
    "SlotRun",
    "Span",
    "file_digests",
    "load_session",
    "trace_events",
    "weight_files",
]
