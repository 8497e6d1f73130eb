"""The simulator of GPU schedules: what a step costs on a machine, chunk by chunk, without running.

Takes phases (copies of each block, waits, what consumers do first) and `GpuCosts`; gives seconds.
A block's loader issues a copy when its slot is free and enough earlier ones have landed; copies
land in order at the block's share of the stream; consumers multiply what has landed; a phase begins
when its inputs are there. A barrier costs its latency under traffic, and it costs the stream: its
own words and the polling of all blocks delay the reads behind them, the more the longer the queue.

Calibrated on an H200: barriers and the stream with loops of phases over real models' weights, the
hand-over, attention and reads of a waiting block with the kernel itself (`docs/megakernel.md` has
the table of measured and predicted figures, the tests hold it to 10%).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from obelisk.machine import Machine
from obelisk.schedule.gpu import head_chunk, input_bytes
from obelisk.schedule.gpu_choice import EMITTED, Fusion
from obelisk.schedule.gpu_tasks import GpuKind, GpuStep

Array = Any
H200_STREAM = 4.56e12  # bytes a second that bulk copies of all blocks reach, measured
H200_COPY = 4.2e12  # `Machine.bandwidth` of the same device: the ratio is used for the others
CHUNK = 90e-9  # seconds that the calibration loop's consumers take for 8 KB
FILL_LATENCY = 0.4e-6  # first words, reductions and block barriers of a norm


@dataclass(frozen=True, slots=True)
class GpuCosts:
    """What things cost on a machine, in seconds and bytes a second.

    Attributes:
        stream: bytes a second that all blocks read from device memory.
        latency: a read while the stream runs.
        latency_idle: a read while few others are under way.
        issue: a loader's own time for one copy.
        byte: consumer seconds for each byte of a chunk.
        barrier, barrier_idle: a grid barrier while the loaders stream, and while nothing does.
        stall: what a barrier takes from the stream.
        queue_stall: share of the queue's delay that a barrier also takes from it, up to
        `queue_most`. handover: from a word's store to a polling reader that has it.
        exchange: bytes a second of words between blocks, through L2, of one block.
    """

    stream: float
    latency: float = 0.95e-6
    latency_idle: float = 0.67e-6
    issue: float = 0.15e-6
    byte: float = CHUNK / 8192
    barrier: float = 2.4e-6
    barrier_idle: float = 0.97e-6
    stall: float = 0.6e-6
    queue_stall: float = 0.3
    queue_most: float = 2e-6
    handover: float = 1.5e-6
    exchange: float = 40e9


@dataclass(frozen=True, slots=True)
class MicroCosts:
    """What the order of micro-operations says of a task's insides, in cycles of an SM.

    Attributes:
        chunk: consumers, all warps at work, for one chunk.
        attend: a warp, for the positions of the context that it takes at a time.
        positions: how many these are.
    """

    chunk: float
    attend: float
    positions: int


def costs_of(machine: Machine, micro: MicroCosts | None = None, chunk: int = 8192) -> GpuCosts:
    """The costs of a machine; `micro.chunk` is what its consumers take for `chunk` bytes, else they
    take what the calibration loop's do.
    """
    out = GpuCosts(machine.bandwidth * H200_STREAM / H200_COPY)
    if micro is not None:
        out = replace(out, byte=micro.chunk / machine.clock / chunk)
    l2 = machine.cache(2)
    if l2 is not None:
        out = replace(out, exchange=l2.bandwidth)
    return out


@dataclass(frozen=True, slots=True)
class SimPhase:
    """A phase as the simulator sees it.

    Attributes:
        name: for the account.
        copies: of each block.
        wait: "barrier", "tagged", or "" (no other block is waited for).
        before: consumer seconds between the wait and the first chunk, for each block (or for all).
        stops: the loader waits, too (for comparison alone: no schedule does this).
    """

    name: str
    copies: Array
    wait: str = ""
    before: Array = 0.0
    stops: bool = False


class _Blocks:
    """All blocks of a grid in simulated time."""

    def __init__(
        self, blocks: int, chunk: int, stages: int, flight: int, waiting: int, costs: GpuCosts
    ) -> None:
        self.costs, self.blocks, self.stages = costs, blocks, stages
        self.flight = min(flight, stages)
        self.each = max(chunk * blocks / costs.stream, costs.issue)
        self.consume = costs.byte * chunk
        self.all = np.arange(blocks)
        self.issued = np.zeros(blocks)
        self.landed = np.zeros((stages, blocks))  # of the last copies, by slot
        self.freed = np.zeros((stages, blocks))
        self.done = np.zeros(blocks)  # consumers
        self.count = np.zeros(blocks, np.int64)
        self.behind = 0.0  # what barriers took from the stream since the last copy
        # What words between blocks queue behind: the copies that a waiting block lets go.
        few = min(self.flight, waiting)
        self.queue = max(0.0, few * self.each - costs.latency)
        slow = max(self.each, costs.latency_idle / few)
        self.each_waiting = slow if few < self.flight else self.each
        self.idle = np.zeros((2, blocks))  # from when to when consumers waited for others

    def wait(self, phase: SimPhase) -> None:
        """All consumers wait for what the others made."""
        c = self.costs
        last = float(self.done.max())
        if phase.wait == "barrier":
            took = c.barrier_idle if phase.stops else c.barrier
            self.done[:] = last + took
            if not phase.stops:
                self.behind += c.stall + c.queue_stall * min(c.queue_most, self.queue)
        elif phase.wait == "tagged":
            # Words queue behind reads like a barrier's own traffic.
            self.done[:] = last + c.handover + c.queue_stall * min(c.queue_most, self.queue)
        if phase.stops:
            self.issued = np.maximum(self.issued, self.done)

    def run(self, phase: SimPhase) -> None:
        """One phase of all blocks."""
        self.idle[0] = self.done
        if phase.wait:
            self.wait(phase)
        self.idle[1] = self.done
        self.done = self.done + phase.before
        copies = np.asarray(phase.copies)
        j, least, most = 0, int(copies.min(initial=0)), int(copies.max(initial=0))
        skipped = 0
        while j < most:
            on = self.all[copies > j]
            k = self.count[on]
            slot = k % self.stages
            start = np.maximum(self.issued[on], self.freed[slot, on])
            if self.flight < self.stages:
                start = np.maximum(start, self.landed[(k - self.flight) % self.stages, on])
            self.issued[on] = start
            previous = self.landed[(k - 1) % self.stages, on] + (self.behind if j == 0 else 0.0)
            slow = (start >= self.idle[0, on]) & (start < self.idle[1, on])
            gap = np.where(slow, self.each_waiting, self.each)
            land = np.maximum(start + self.costs.latency, previous + gap)
            self.landed[slot, on] = land
            done = np.maximum(land, self.done[on]) + self.consume
            self.done[on] = done
            self.freed[slot, on] = done
            self.count[on] += 1
            j += 1
            if not skipped and least - j > self.stages and self._caught_up(land):
                skipped = (least - j - 1) // self.stages * self.stages
                self._advance(skipped)
                j += skipped
        if most:
            self.behind = 0.0

    def _caught_up(self, land: Array) -> bool:
        """Whether consumers wait for the stream, everywhere: then nothing changes any more, and
        whole rounds of a long phase need no look.
        """
        return bool(np.all(self.done - land <= self.consume * (1 + 1e-9)))

    def _advance(self, copies: int) -> None:
        """Time passes in which every block gets through so many copies."""
        took = copies * max(self.each, self.consume)
        for times in (self.issued, self.landed, self.freed, self.done):
            times += took
        self.count += copies

    @property
    def now(self) -> float:
        """When the last consumer is done."""
        return float(self.done.max())


def simulate_phases(
    phases: Sequence[SimPhase], ring: tuple[int, int, int, int], costs: GpuCosts
) -> list[float]:
    """The moment at which each phase ends, in seconds. `ring` is bytes of a chunk, stages, chunks
    in flight, and chunks in flight while the block waits for others.
    """
    blocks = _Blocks(len(np.asarray(phases[0].copies)), *ring, costs)
    out = []
    for phase in phases:
        blocks.run(phase)
        out.append(blocks.now)
    return out


# ---- schedules ----
@dataclass(frozen=True, slots=True)
class GpuTimeline:
    """A simulated step: seconds in all, of one layer, of the head; bytes of weights of the busiest
    block over the mean; and seconds of each phase of the layer that was taken as the typical one.
    """

    seconds: float
    layer: float
    head: float
    imbalance: float
    phases: tuple[tuple[str, float], ...]


def shares(step: GpuStep, kind: GpuKind, layer: int) -> Array:
    """Units of every block, as `GpuTiling.rotate` turns them."""
    t = step.tiling
    n = step.model.layers if layer < 0 else layer
    if kind is GpuKind.ATTEND:
        each = np.array([len(range(i, step.units[kind], t.blocks)) for i in range(t.blocks)])
    else:
        bounds = np.arange(t.blocks + 1) * step.units[kind] // t.blocks
        each = np.diff(bounds)
    return np.roll(each, -(n * t.rotate) % t.blocks)


def places(step: GpuStep) -> tuple[Array, Array]:
    """Bytes of weights of every place: in one layer, and in the head."""
    edges = np.arange(step.tiling.blocks + 1)

    def dealt(kind: GpuKind) -> Array:
        return np.diff(edges * step.units[kind] // step.tiling.blocks) * step.unit_bytes(kind)

    inner = [dealt(k) for k in step.units if step.columns(k) and k is not GpuKind.HEAD]
    return np.sum(inner, axis=0), dealt(GpuKind.HEAD)


def uneven(step: GpuStep, turns: Sequence[int]) -> list[float]:
    """Bytes of weights of the busiest block over the mean in a whole step, for each `rotate`."""
    layer, head = places(step)
    blocks, layers = step.tiling.blocks, step.model.layers
    every = np.arange(blocks)[None, :]
    out = []
    for turn in turns:
        at = (every + turn * np.arange(layers)[:, None]) % blocks
        total = layer[at].sum(0) + head[(every[0] + turn * layers) % blocks]
        out.append(float(total.max() / total.mean()))
    return out


def busiest(step: GpuStep) -> float:
    """Bytes of weights of the busiest block over the mean, in a whole step."""
    return uneven(step, [step.tiling.rotate])[0]


@dataclass(frozen=True, slots=True)
class _At:
    """What a step is simulated under."""

    position: int
    costs: GpuCosts
    attend_seconds: float = 0.0  # of a warp for `positions` of the context
    positions: int = 1


def _attend_seconds(step: GpuStep, at: _At) -> float:
    """One cell of attention on one block: its rows, then the longer of stream and arithmetic."""
    m, t, costs = step.model, step.tiling, at.costs
    piece = -(-at.position // t.kv_pieces)
    rows = 8.0 * step.batch * (m.group + 2) * m.head_dim / costs.exchange
    cache = 2.0 * input_bytes(step.work) * piece * m.head_dim * t.blocks / costs.stream
    turns = -(-piece // (t.warps * at.positions)) * -(-m.group // head_chunk(m, step.work))
    work = turns * at.attend_seconds
    if t.kv_ring:  # the cache comes with the weights: only queries are looked at
        return FILL_LATENCY + rows + costs.latency + work
    # Queries are looked at when the cache has arrived, and multiplied then: nothing overlaps.
    return FILL_LATENCY + rows + 2 * costs.latency + cache + work


def _before(step: GpuStep, kind: GpuKind, at: _At) -> float:
    """Consumer seconds between the wait and the first chunk: reading words, norms, attention."""
    s, w = step, step.widths
    words = {
        GpuKind.QKV: w["down"], GpuKind.UP: w["o"], GpuKind.HEAD: w["down"],
        GpuKind.O: w["attend"] // s.tiling.o_split, GpuKind.DOWN: w["up"] // s.tiling.down_split,
    }.get(kind, 0)  # fmt: skip
    if kind is GpuKind.ATTEND:
        return _attend_seconds(step, at)
    return FILL_LATENCY + 8.0 * words / at.costs.exchange


def _apart(costs: GpuCosts, name: str, blocks: int) -> SimPhase:
    """A phase that streams no weights."""
    return SimPhase(name, np.zeros(blocks, np.int64), "tagged", FILL_LATENCY)


def _refused(
    step: GpuStep, fusion: Fusion, phases: list[SimPhase], costs: GpuCosts
) -> list[SimPhase]:
    """The phases of one layer under a fusion that is not the emitted one."""
    blocks, out = step.tiling.blocks, []
    added = 16.0 * step.batch * step.model.hidden / costs.exchange  # sums added in device memory
    for phase in phases:
        kind, _, layer = phase.name.partition("@")
        if kind == "attend" and fusion.rope_apart:
            out.append(_apart(costs, f"rope@{layer}", blocks))
        if kind == "o" and fusion.combine_apart:
            out.append(_apart(costs, f"combine@{layer}", blocks))
        if kind == "o" and fusion.o_behind_attend:
            # By head group: the blocks that have a group stream its columns, the others nothing.
            cells = step.batch * step.model.kv_heads
            copies = np.zeros(blocks, np.int64)
            copies[: min(cells, blocks)] = -(-int(np.sum(phase.copies)) // min(cells, blocks))
            phase = replace(phase, copies=copies, wait="", before=added)
        if kind == "down" and fusion.down_behind_up:
            phase = replace(phase, wait="", before=added)
        out.append(phase)
    return out


def step_phases(
    step: GpuStep, layers: Sequence[int], at: _At, fusion: Fusion = EMITTED
) -> list[SimPhase]:
    """The phases of some layers, and of the head."""
    t = step.tiling
    before: dict[GpuKind, str] = {
        GpuKind.QKV: "down", GpuKind.ATTEND: "qkv", GpuKind.O: "attend", GpuKind.UP: "o",
        GpuKind.DOWN: "up", GpuKind.HEAD: "down",
    }  # fmt: skip
    out: list[SimPhase] = []
    for layer in (*layers, -1):
        made = []
        kinds = [GpuKind.HEAD] if layer < 0 else [k for k in before if k is not GpuKind.HEAD]
        for kind in kinds:
            units = shares(step, kind, layer)
            copies = units * step.chunks(kind, at.position)
            work = _before(step, kind, at)
            alone = work * units if kind is GpuKind.ATTEND else work
            wait = "" if layer == 0 and kind is GpuKind.QKV else t.sync(before[kind]).value
            made.append(SimPhase(f"{kind}@{layer}", copies, wait, alone))
        out += made if fusion == EMITTED else _refused(step, fusion, made, at.costs)
    return out


def _at(
    step: GpuStep,
    machine: Machine,
    position: int | None,
    micro: MicroCosts | None,
    handover: float | None = None,
) -> _At:
    costs = costs_of(machine, micro, step.tiling.chunk_bytes)
    if handover is not None:
        costs = replace(costs, handover=handover)
    here = max(1, step.work.context // 2) if position is None else position
    if micro is None:
        return _At(here, costs)
    return _At(here, costs, micro.attend / machine.clock, micro.positions)


def simulate_gpu(
    step: GpuStep, machine: Machine, position: int | None = None, micro: MicroCosts | None = None,
    fusion: Fusion = EMITTED, handover: float | None = None,
) -> GpuTimeline:  # fmt: skip
    """One step at a context of `position` (default: half of the plan's).

    Layers are alike: two are simulated until the ring has settled, the third is the typical one.
    `micro` says what tasks cost inside; without it, consumers take what the calibration loop's do.
    `handover` replaces the one of `GpuCosts`.
    """
    t = step.tiling
    at = _at(step, machine, position, micro, handover)
    costs = at.costs
    few = range(min(3, step.model.layers))
    phases = step_phases(step, few, at, fusion)
    ring = (t.chunk_bytes, t.stages, t.in_flight, min(t.in_flight, t.in_flight_waiting))
    ends = simulate_phases(phases, ring, costs)
    each = (len(phases) - 1) // len(few)
    first = ends[each * (len(few) - 1) - 1] if len(few) > 1 else 0.0
    layer = ends[-2] - first
    head = ends[-1] - ends[-2]
    over = busiest(step)
    names = [p.name.partition("@")[0] for p in phases[-1 - each : -1]]
    starts = [first, *ends[-1 - each : -2]]
    spans = [(n, e - b) for n, b, e in zip(names, starts, ends[-1 - each : -1], strict=True)]
    choose = costs.handover + FILL_LATENCY
    seconds = ends[-2] + layer * (step.model.layers - len(few)) + head + choose
    return GpuTimeline(seconds, layer, head, over, (*spans, ("head", head)))


@dataclass(frozen=True, slots=True)
class SimSpan:
    """What a block does for a while: `wait`, or a kind of task; seconds since the step began."""

    block: int
    kind: str
    layer: int
    start: float
    end: float


def simulated_spans(
    step: GpuStep, machine: Machine, position: int | None = None, micro: MicroCosts | None = None
) -> list[SimSpan]:
    """Every phase of every layer on every block, as the simulator sees them, by start."""
    t = step.tiling
    at = _at(step, machine, position, micro)
    ring = (t.chunk_bytes, t.stages, t.in_flight, min(t.in_flight, t.in_flight_waiting))
    blocks = _Blocks(t.blocks, *ring, at.costs)
    out = []
    for phase in step_phases(step, range(step.model.layers), at):
        blocks.run(phase)
        kind, _, layer = phase.name.partition("@")
        for block in range(t.blocks):
            left, began = (float(x) for x in blocks.idle[:, block])
            if began > left:
                out.append(SimSpan(block, "wait", int(layer), left, began))
            out.append(SimSpan(block, kind, int(layer), began, float(blocks.done[block])))
    return sorted(out, key=lambda x: (x.start, x.block, x.end))


def calibration_loop(
    sizes: Sequence[int],
    blocks: int,
    ring: tuple[int, int, int],
    costs: GpuCosts,
    wait: str = "",
    stops: bool = False,
) -> float:
    """Seconds of the loop that calibrates: phases of `sizes` bytes dealt as equal as can be, each
    behind a wait. `ring` is bytes of a chunk, stages, and chunks in flight; with `stops` the loader
    waits, too.
    """
    chunk, stages, flight = ring
    edges = np.arange(blocks + 1)
    phases = [
        SimPhase("loop", np.diff(edges * (size // chunk) // blocks), wait, 0.0, stops)
        for size in sizes
    ]
    first = replace(phases[0], wait="", stops=False)
    ends = simulate_phases([first, *phases[1:]], (chunk, stages, flight, flight), costs)
    return ends[-1] + (costs.barrier_idle if wait == "barrier" else 0.0)
