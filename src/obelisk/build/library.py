"""Loading a built kernel and calling it on arrays.

`Library` wraps one shared library with the entry `int obelisk_run(void *const *inputs, void *const
*outputs, void *scratch, int threads)`. It passes addresses only: shapes, dtypes and strides are the
caller's contract.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from obelisk.base.errors import BuildFailed

ENTRY = "obelisk_run"
ALIGNMENT = 64


def aligned_bytes(size: int) -> Any:
    """A numpy array of `size` bytes whose address is a multiple of `ALIGNMENT`."""
    raw = np.empty(size + ALIGNMENT, dtype=np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + size]


class Library:
    """A loaded kernel. Calls release the interpreter's lock; one object must not be called from two
    threads at once, because its scratch memory is shared between its calls (load the path twice
    instead).
    """

    def __init__(self, path: str | Path, scratch_bytes: int = 0) -> None:
        """Load `path`; raises `BuildFailed` when it is no such library."""
        self.path = Path(path)
        try:
            self._handle = ctypes.CDLL(str(self.path))
            self._entry = getattr(self._handle, ENTRY)
        except (OSError, AttributeError) as error:
            raise BuildFailed(f"{self.path} is not a kernel library: {error}") from error
        self._entry.restype = ctypes.c_int
        self._entry.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_void_p,
            ctypes.c_int,
        ]
        self.scratch_bytes = scratch_bytes
        self._scratch = aligned_bytes(scratch_bytes)

    def call(self, inputs: Sequence[int], outputs: Sequence[int], threads: int) -> int:
        """Run on addresses; returns the entry's result (0: done)."""
        ins = (ctypes.c_void_p * max(1, len(inputs)))(*inputs)
        outs = (ctypes.c_void_p * max(1, len(outputs)))(*outputs)
        return int(self._entry(ins, outs, self._scratch.ctypes.data, threads))

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any], threads: int) -> None:
        """Run on numpy arrays: `inputs` lie as the graph declares, `outputs` are dense and are
        written.
        """
        code = self.call([a.ctypes.data for a in inputs], [a.ctypes.data for a in outputs], threads)
        if code != 0:
            raise RuntimeError(f"{self.path} returned {code}")
