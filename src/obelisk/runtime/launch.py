"""The border to the compiled program: one structure, one entry.

`LaunchStruct` mirrors `om_launch` of the generated C field by field; `ABI` must agree with it.
"""

from __future__ import annotations

import ctypes
import tempfile
from pathlib import Path
from typing import Any

from obelisk.base.errors import BuildFailed

ABI = 3
MAX_STOPS = 8
HANG, NONFINITE, NO_THREADS = 1, 2, 3
END_OF_STEP = -4096
KIND_STEP = 4096  # edge numbers of results that are not finite: kind * KIND_STEP + layer

_POINTERS = (
    "weights", "keys", "values", "scratch", "cosines", "sines", "feed", "feed_length", "want",
    "position", "out", "made", "reason", "temperature", "top_p", "top_k", "seed", "cpus", "trace",
    "traced", "record",
)  # fmt: skip
_INTS = ("feed_stride", "out_stride", "stop_count", "debug", "trace_room")
_FAULT = (
    "fault", "fault_core", "fault_step", "fault_edge", "fault_expected", "fault_seen",
    "fault_slot", "steps_done",
)  # fmt: skip


class LaunchStruct(ctypes.Structure):
    """`om_launch`."""

    _fields_ = [
        *((n, ctypes.c_int32) for n in ("abi", "cores", "batch", "steps")),
        *((n, ctypes.c_void_p) for n in _POINTERS),
        *((n, ctypes.c_int32) for n in _INTS),
        ("stops", ctypes.c_int32 * MAX_STOPS),
        ("spin_seconds", ctypes.c_double),
        *((n, ctypes.c_int32) for n in _FAULT),
    ]


def load_entry(binary: bytes) -> Any:
    """The entry of a shared library that is held as bytes; raises `BuildFailed` if it is none."""
    with tempfile.TemporaryDirectory(prefix="obelisk-plan-") as folder:
        path = Path(folder) / "kernel.so"
        path.write_bytes(binary)
        try:
            entry = ctypes.CDLL(str(path)).obelisk_mega
        except (OSError, AttributeError) as error:
            raise BuildFailed(f"the plan's kernel does not load: {error}") from error
    entry.restype = ctypes.c_int
    entry.argtypes = [ctypes.POINTER(LaunchStruct)]
    return entry
