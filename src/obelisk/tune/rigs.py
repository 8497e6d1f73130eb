"""How calls are made and timed on each kind of device: what the tuner asks before it measures.

Gives `Rig`, one for this machine's cores (`CPU`) and one for each CUDA device (`cuda_rig`). A rig
says which worker serves the tuner's commands and through how many copies of the inputs timed calls
rotate; the protocol itself is the same for all (docs/tune.md).
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from obelisk.machine.host import host
from obelisk.tune.race import HOPELESS

_STREAMED_SHARE = 0.25  # of the last-level cache: inputs larger than this come from memory in use
_SPAN = 4  # consecutive calls read inputs of this many last-level caches before any comes again
_ROTATION = (
    400e6  # bytes of inputs that calls on a GPU rotate through: several times its last cache
)
_MOST_COPIES = 64  # of them; smaller inputs are called from cache, as they are in use


@dataclass(frozen=True, slots=True)
class Rig:
    """One kind of device.

    Attributes:
        worker: the module whose `main` serves the commands.
        ordinal: number of the CUDA device; -1 for the cores of this machine.
        settle_library, settle_python: seconds of rest before a turn, after a library's and after a
            baseline's (OpenBLAS threads spin for about 27 ms after work).
        batch: seconds that a sample lasts at least: 10^4 times its clock's step.
        hopeless: candidates that the probe finds so many times slower than the best do not race.
        least_race: seconds that the race gets whatever the checks took: without one there is no
            ratio to report.
    """

    worker: str
    ordinal: int = -1
    settle_library: float = 0.002
    settle_python: float = 0.03
    batch: float = 1e-3
    hopeless: float = HOPELESS
    least_race: float = 0.0

    @property
    def on_device(self) -> bool:
        """Whether calls read device memory, which the worker fills from the tuner's."""
        return self.ordinal >= 0

    def copies(self, size: int) -> tuple[str, int, int]:
        """For inputs of `size` bytes: the state of the caches that is measured ("resident" or
        "streamed"), how many copies calls rotate through, and how many it should be.
        """
        if self.on_device:
            n = max(2, min(_MOST_COPIES, int(_ROTATION / max(size, 1)) + 1))
            return "rotated", n, n
        cache = max((c.size for c in host().caches), default=0)
        if size <= _STREAMED_SHARE * cache:
            return "resident", 1, 1
        room = int(psutil.virtual_memory().available // 4 // size)
        wanted = -(-_SPAN * cache // size)
        return "streamed", max(1, min(wanted, room)), wanted


CPU = Rig("obelisk.tune.worker")


def cuda_rig(ordinal: int = 0) -> Rig:
    """The rig of a CUDA device: events time replays of one graph, so that nothing need settle."""
    return Rig("obelisk.tune.gpu_worker", ordinal, 0.0, 0.0, 2e-4, hopeless=1.5, least_race=1.5)
