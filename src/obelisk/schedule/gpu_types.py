"""A GPU schedule: for every block its items, its ring of weights, and where values lie.

Gives frozen records. A block has two kinds of roles. The *consumers* run the items in order: `Poll`
stops until words carry the tag of this step, `Meet` until every block is there, `Task` computes.
The *loader* is one stream of copies that knows nothing of items: it stops only for a free slot and
for the bound on what is in flight. A chunk is multiplied by one consumer warp; warps meet at the
end of each task. (With `GpuTiling.cuts` several warps share a chunk, and its slot goes back when
all of them have released it: for a schedule's rules they are one.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from obelisk.schedule.gpu_tasks import GpuStep, GpuTask
from obelisk.tasks.kinds import Region

LOADER, CONSUMER = "loader", "consumer"


@dataclass(frozen=True, slots=True)
class Poll:
    """Read words until all of them carry this step's tag."""

    region: Region


@dataclass(frozen=True, slots=True)
class Meet:
    """A grid barrier: wait until the role `role` of every block has arrived."""

    name: str
    role: str = CONSUMER


@dataclass(frozen=True, slots=True)
class Compute:
    """Execute a task."""

    task: GpuTask


GpuItem = Poll | Meet | Compute
GpuProgram = tuple[GpuItem, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Columns of a unit: which streaming task of the block (by number), which of its units, which
    of the unit's chunks.
    """

    task: int
    unit: int
    part: int


@dataclass(frozen=True, slots=True)
class Copy:
    """The loader copies a chunk into a slot.

    Attributes:
        slot: ring slot.
        chunk: what is copied.
        freed: how many times the slot must have been released before.
        landed: how many copies (of the block, in order) must have landed before.
    """

    slot: int
    chunk: Chunk
    freed: int
    landed: int


@dataclass(frozen=True, slots=True)
class Take:
    """A consumer warp waits for a slot's copy, multiplies it, and releases the slot.

    Attributes:
        slot: ring slot.
        chunk: what it expects there.
        filled: how many copies into the slot must have landed.
        releases: whether the slot goes back to the loader afterwards.
    """

    slot: int
    chunk: Chunk
    filled: int
    releases: bool = True


@dataclass(frozen=True, slots=True)
class Join:
    """All consumer warps meet: the sums of streaming task `task` are complete."""

    task: int


@dataclass(frozen=True, slots=True)
class Ring:
    """The stream of weights of a block: the loader's copies and, for each warp, what it takes.

    Attributes:
        loader: copies in order; a `Meet` here would stop the stream.
        warps: `Take` and `Join` in order, for each consumer warp.
        tasks: units and chunks a unit of every streaming task, in order.
    """

    loader: tuple[Copy | Meet, ...]
    warps: tuple[tuple[Take | Join, ...], ...]
    tasks: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class DevicePage:
    """Where a tagged value lies in device memory.

    Attributes:
        offset: first word (8 bytes: an element and its tag) of the first copy.
        width: words of a copy.
        copies: copies that the layers use in turn.
    """

    offset: int
    width: int
    copies: int

    def at(self, layer: int) -> int:
        """First word of a layer's copy."""
        return self.offset + (max(layer, 0) % self.copies) * self.width


@dataclass(frozen=True, slots=True)
class SharedPage:
    """Bytes of a block's shared memory, and the phases (of a layer) between which they are held."""

    offset: int
    size: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class GpuPages:
    """All pages: tagged values in device memory, buffers in shared memory."""

    device: tuple[tuple[str, DevicePage], ...]
    shared: tuple[tuple[str, SharedPage], ...]
    words: int
    shared_bytes: int

    def device_page(self, value: str) -> DevicePage | None:
        """The page of a value, if it has one."""
        return next((p for n, p in self.device if n == value), None)


@dataclass(frozen=True, slots=True)
class GpuSchedule:
    """A whole step, decided: items and rings for each block, and pages.

    `prompt` are the items of a step in which no slot chooses a token: without the head, and with a
    grid barrier at its end (empty: there are no such steps). Its rings are those of `rings` up to
    the head's chunks, which come last; whatever holds for a ring holds for its beginning.
    """

    step: GpuStep
    programs: tuple[GpuProgram, ...]
    rings: tuple[Ring, ...]
    pages: GpuPages
    prompt: tuple[GpuProgram, ...] = ()

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return len(self.programs)

    def to_json(self) -> Mapping[str, Any]:
        """What a reader of the plan wants to see."""
        first = self.programs[0] if self.programs else ()
        return {
            "sync": "barrier" if any(isinstance(i, Meet) for i in first) else "tagged",
            "tiling": self.step.tiling.to_json(),
            "tasks_per_core": [sum(isinstance(i, Compute) for i in p) for p in self.programs],
            "waits_per_core": [sum(isinstance(i, Poll | Meet) for i in p) for p in self.programs],
            "copies_per_core": [len(r.loader) for r in self.rings],
            "pages": {n: [p.offset, p.width, p.copies] for n, p in self.pages.device},
            "shared": {n: [p.offset, p.size] for n, p in self.pages.shared},
            "scratch_bytes": 8 * self.pages.words,
        }
