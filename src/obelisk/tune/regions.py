"""Memory shared by the tuner and its worker, with canary bytes and guard pages around the data.

A region is an unlinked file: guard page, canary page, data, canary to the page's end and one page
more, guard page. The tuner fills and judges it; the worker only lends it to candidates, so a
candidate that overwrites the worker's memory cannot talk itself right. Nothing stays behind when
either process dies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PAGE = mmap.PAGESIZE
_LEAD = 2 * PAGE  # guard page and canary page
_SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class RegionSpec:
    """What the worker needs to map a region.

    The inherited descriptor and the data's size in bytes.
    """

    fd: int
    nbytes: int

    @property
    def total(self) -> int:
        """Size of the whole file."""
        return _LEAD + -(-self.nbytes // PAGE) * PAGE + 2 * PAGE


class Region:
    """The tuner's side of a region: fills data, sets canaries, looks at them again."""

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        want = RegionSpec(-1, nbytes).total
        self._file = tempfile.TemporaryFile(dir=_roomy(want))  # noqa: SIM115 (closed by close())
        self._file.truncate(want)
        self.spec = RegionSpec(self._file.fileno(), nbytes)
        mapped = mmap.mmap(self._file.fileno(), want)
        self._bytes = np.frombuffer(mapped, dtype=np.uint8)
        self.data = self._bytes[_LEAD : _LEAD + nbytes]
        self._before = self._bytes[PAGE:_LEAD]
        tail = np.random.default_rng(seed).integers(0, 256, PAGE * 2, dtype=np.uint8)
        self._pattern = tail

    def arm(self, used: int | None = None) -> None:
        """Write the canaries; `used` < data size moves the rear canary to right behind the used
        bytes.
        """
        self._before[:] = self._pattern[:PAGE]
        rear = self._rear(used)
        rear[:] = self._pattern[: rear.size]

    def broken(self, used: int | None = None) -> str:
        """Where bytes outside the data were changed, in words; empty when none were."""
        rear = self._rear(used)
        front_bad = np.flatnonzero(self._before != self._pattern[:PAGE])
        rear_bad = np.flatnonzero(rear != self._pattern[: rear.size])
        if front_bad.size:
            nearest = PAGE - int(front_bad[-1])
            return f"{front_bad.size} bytes changed, the nearest {nearest} before its start"
        if rear_bad.size:
            return (
                f"{rear_bad.size} bytes changed, the nearest {int(rear_bad[0]) + 1} after its end"
            )
        return ""

    def _rear(self, used: int | None) -> np.ndarray:
        start = _LEAD + (self.spec.nbytes if used is None else used)
        return self._bytes[start : min(start + 2 * PAGE, self.spec.total - PAGE)]

    def close(self) -> None:
        """Close the file. The memory goes when the last view of it does."""
        self._file.close()


def attach(spec: RegionSpec, writable: bool) -> np.ndarray:
    """Map a region in the worker and give its data bytes; the pages around it cannot be touched.

    A candidate that writes to a read-only region, or far outside any region, dies by a signal,
    which the tuner sees.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    mapped = mmap.mmap(spec.fd, spec.total, flags=mmap.MAP_SHARED, prot=protection)
    whole = np.frombuffer(mapped, dtype=np.uint8)
    base = whole.ctypes.data
    if sys.platform != "win32":
        libc = ctypes.CDLL(None)
        libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for at in (base, base + spec.total - PAGE):
            libc.mprotect(at, PAGE, 0)
    return whole[_LEAD : _LEAD + spec.nbytes]


def attach_guarded(spec: RegionSpec) -> np.ndarray:
    """Map a region in the worker with both canaries: `PAGE` bytes, the data, and what is behind it.

    For a worker that calls candidates on other memory (a device's), fills that from here and puts
    back what it holds afterwards.
    """
    mapped = mmap.mmap(spec.fd, spec.total, flags=mmap.MAP_SHARED)
    return np.frombuffer(mapped, dtype=np.uint8)[PAGE : spec.total - PAGE]


def _roomy(nbytes: int) -> str | None:
    """Memory-backed file system if there is one with room to spare; None leaves the choice to
    `tempfile`.
    """
    if not _SHM.is_dir() or not os.access(_SHM, os.W_OK):
        return None
    stat = os.statvfs(_SHM)
    return str(_SHM) if stat.f_bavail * stat.f_frsize > 4 * nbytes else None
