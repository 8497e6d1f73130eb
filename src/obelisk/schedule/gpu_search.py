"""The search over GPU schedules: chunks, ring, queue, warps, splits, context pieces, fusion, waits.

Takes a model, a workload and a machine; gives ranked `GpuChoice`s and an account of what each limit
cut. Three stages: what does not fit is cut by `gpu_resources`; the rest gets a bound that the
simulator cannot beat (bytes of the busiest block; the chain of waits); then a walk from the default
and from the best bound changes one field at a time, ranked by the simulator, and leaves out what
cannot be among the best, until no neighbour of a kept choice is better or the budget is spent.

Anytime: the default tiling is simulated first, so there is always an answer. With a checkpoint file
what was simulated is kept, and a search that is resumed ends with what an uninterrupted one finds.
Equal arguments give equal results, unless seconds run out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import Infeasible, InternalError, MissingDependency, UserError
from obelisk.base.progress import Progress, Silent
from obelisk.machine import Feature, Machine
from obelisk.schedule.gpu import (
    EDGES,
    MAX_STAGES,
    GpuTiling,
    for_weights,
    imbalance,
    legal_splits,
    most_in_flight,
    shared_plan,
    slabs_of,
    tile_count,
    up_tiles,
)
from obelisk.schedule.gpu_choice import EMITTED, Fusion
from obelisk.schedule.gpu_default import default_tiling
from obelisk.schedule.gpu_resources import Fit, fit
from obelisk.schedule.gpu_simulate import (
    FILL_LATENCY,
    GpuTimeline,
    MicroCosts,
    busiest,
    costs_of,
    simulate_gpu,
    uneven,
)
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.tasks.config import ModelConfig
from obelisk.tasks.workload import WeightFormat, Workload

CHUNK_KB = (2, 4, 8, 16)
LEAST_KB = 1  # tried only where nothing else may fit
FLIGHTS = (32, 40, 48, 64, 96)  # KB
WARPS = (4, 8, 16)
WAITING = (1, 2, 4)  # chunks in flight while a block waits
PIECES = (1, 2, 4, 8, 16)
BARRIERS: tuple[tuple[str, ...], ...] = ((), EDGES, ("o", "down"))
FUSIONS = (
    EMITTED, Fusion(rope_apart=True), Fusion(combine_apart=True), Fusion(o_behind_attend=True),
    Fusion(down_behind_up=True),
)  # fmt: skip
SIMULATED = 160  # at most, without a budget of seconds
SAVE_EVERY = 16
TIE = 3e-3  # a difference that the simulator cannot tell
VERSION = 1


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """A cut, what runs as one phase, what it costs by the simulator, and what it takes."""

    tiling: GpuTiling
    fusion: Fusion
    timeline: GpuTimeline
    fit: Fit

    def __str__(self) -> str:
        t = self.tiling
        waits = "tags" if not t.barriers else "barriers" if t.barriers == EDGES else (
            "tags, barriers after " + " and ".join(t.barriers))  # fmt: skip
        return (
            f"ring {t.stages} x {t.chunk_bytes / 1024:g} KB, {t.in_flight} in flight, "
            f"{t.warps} warps, o/{t.o_split}, down/{t.down_split}, kv/{t.kv_pieces}, "
            f"turn {t.rotate}, {t.in_flight_waiting} while waiting, {waits}"
            + ("" if self.fusion == EMITTED else f", {self.fusion}")
        )


@dataclass(frozen=True, slots=True)
class GpuAccount:
    """What the search did.

    Attributes:
        tried: cuts looked at.
        pruned: how many each limit cut.
        examples: one refusal in words for each limit.
        fitting: cuts that fit.
        bounded: neighbours of good cuts that were left out, their bound being above what is kept.
        simulated: cuts that were simulated.
        resumed: of these, how many came from the checkpoint.
        unemitted: the best of the fusions that no emitter takes: name and seconds.
        seconds: of this run.
        finished: whether nothing was left out for want of time.
    """

    tried: int
    pruned: tuple[tuple[str, int], ...]
    examples: tuple[str, ...]
    fitting: int
    bounded: int
    simulated: int
    resumed: int
    unemitted: tuple[tuple[str, float], ...]
    seconds: float
    finished: bool


# ---- the space ----
def best_turn(step: GpuStep) -> int:
    """The `rotate` with which the busiest block streams least; of equals, the smallest."""
    turns = range(step.tiling.blocks)
    return min((round(over, 9), r) for r, over in zip(turns, uneven(step, turns), strict=True))[1]


def _splits(rows: int, cols: int, blocks: int, unit: int) -> tuple[int, ...]:
    """Parts along K worth trying: none, and those that balance best and next best."""
    tiles = tile_count(rows)
    ranked = sorted(
        legal_splits(cols, unit=unit), key=lambda s: (round(imbalance(tiles, s, blocks), 3), s)
    )
    return tuple(sorted({1, *ranked[:2]}))


def _ring(step: GpuStep, machine: Machine) -> GpuTiling:
    """The tiling with as many stages as shared memory holds."""
    t = replace(step.tiling, stages=MAX_STAGES)
    over = shared_plan(step.model, step.work, t).total - machine.shared_bytes
    while over > 0 and t.stages > t.warps:
        t = replace(t, stages=max(t.warps, t.stages - max(1, over // t.chunk_bytes)))
        over = shared_plan(step.model, step.work, t).total - machine.shared_bytes
    return t


def _default(
    model: ModelConfig, work: Workload, machine: Machine, blocks: int
) -> tuple[GpuTiling, ...]:
    """The tiling that is taken without a search, if it fits."""
    try:
        return (default_tiling(model, work, machine, blocks),)
    except Infeasible:
        return ()


def space(
    model: ModelConfig, work: Workload, machine: Machine, blocks: int
) -> Iterator[tuple[GpuTiling, Fusion]]:
    """Every cut that is looked at, in a fixed order. `in_flight` may be all that the ring allows.

    Cuts differ in fusion only in their default sizes: what a fusion costs hardly depends on them.
    """
    bulk = machine.has(Feature.BULK_COPY)
    groups = work.batch * model.kv_heads
    slab, size, *_ = slabs_of(work)
    o_splits = _splits(model.hidden, model.q_width, blocks, slab)
    down_splits = _splits(model.hidden, model.ffn, blocks, slab)
    pieces = [p for p in PIECES if p == 1 or p * groups <= 4 * blocks]
    turns: dict[tuple[int, int], int] = {}
    default = _default(model, work, machine, blocks)
    # Chunks so small that they cost are tried only where nothing else may fit.
    sizes = CHUNK_KB if default else (LEAST_KB, *CHUNK_KB)
    widths = sorted({max(1, kb * 1024 // size) * slab for kb in sizes})
    for cols, warps, o, down in product(widths, WARPS, o_splits, down_splits):
        t = GpuTiling(
            blocks, chunk_cols=cols, stages=warps, warps=warps, in_flight=2, o_split=o,
            down_split=down, kv_pieces=1, rotate=0, bulk=bulk,
        )  # fmt: skip
        t = replace(for_weights(t, work), chunk_cols=cols)
        step = GpuStep(model, work, t)
        if (o, down) not in turns:
            turns[(o, down)] = best_turn(step)
        t = replace(_ring(step, machine), rotate=turns[(o, down)])
        most = max(1, most_in_flight(t))
        flights = {min(most, max(2, kb * 1024 // t.chunk_bytes)) for kb in FLIGHTS}
        for flight, kv, waits in product(sorted({*flights, most}), pieces, BARRIERS):
            full = replace(t, in_flight=flight, kv_pieces=kv, barriers=waits)
            yield replace(full, in_flight_waiting=default_waiting(full)), EMITTED
    yield from product(default, FUSIONS[1:])


# ---- bounds and costs ----
@lru_cache(maxsize=256)
def _micro(
    chunk_cols: int, slab: tuple[int, int], warps: int, registers: int, small: ModelConfig,
    work: Workload,
) -> MicroCosts:  # fmt: skip
    from obelisk.schedule.ir.micro import chunk_cycles, positions, span_of
    from obelisk.schedule.ir.passes import phases
    from obelisk.schedule.ir.pipeline import Setting, run

    tiling = GpuTiling(
        1, chunk_cols=chunk_cols, warps=warps, kv_pieces=1, slab_cols=slab[0], slab_bytes=slab[1]
    )
    step = GpuStep(small, work, tiling)
    setting = Setting(step, registers=registers)
    found = {p.phase.data: p for p, _ in phases(run(setting, until="order"))}
    chunk = max(chunk_cycles(found[name], warps) for name in ("qkv", "up"))
    return MicroCosts(chunk, span_of(found["attend"]), positions(step))


def micro_costs(step: GpuStep, registers: int) -> MicroCosts:
    """What a step's tasks cost inside, from the order that list scheduling gives their
    micro-operations within `registers` of a thread.

    Raises `MissingDependency` without xDSL, and `Infeasible` when the registers do not hold them.
    """
    group = step.model.group
    small = replace(step.model, layers=1, hidden=64, ffn=64, vocab=64, kv_heads=1, heads=group)
    slots = step.batch if step.work.weights is WeightFormat.FP32 else 1  # tensor cores take eight
    work = Workload(slots, 1, step.work.weights)
    try:
        t = step.tiling
        return _micro(t.chunk_cols, (t.slab_cols, t.slab_bytes), t.warps, registers, small, work)
    except ImportError as error:
        raise MissingDependency(f"GPU schedules need xdsl: pip install xdsl ({error})") from None


def bound(step: GpuStep, machine: Machine, over: float) -> float:
    """Seconds that the simulator cannot go below: the stream of the busiest block (`over` its share
    above the mean), and the chain of waits with what consumers do behind each.
    """
    costs = costs_of(machine)
    t, layers = step.tiling, step.model.layers
    total = sum(
        n * step.unit_bytes(k) * (1 if k.value == "head" else layers)
        for k, n in step.units.items()
    )  # fmt: skip
    stream = total * over / costs.stream
    wait = {e: costs.barrier if e in t.barriers else costs.handover for e in EDGES}
    chain = layers * (sum(wait.values()) - wait["head"] + 5 * FILL_LATENCY)
    return max(stream, chain)


# ---- checkpoint ----
class Checkpoint:
    """What was simulated so far, in a JSON file that is replaced as a whole."""

    def __init__(self, path: Path | None, key: str, resume: bool) -> None:
        self.path, self.key = path, key
        self.known: dict[str, GpuTimeline] = {}
        if path is None or not resume:
            return
        if not path.exists():
            raise UserError(f"no checkpoint {path} to resume from: leave --resume out")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            version, stored = data["version"], data["key"]
            known = {k: _timeline(v) for k, v in data["simulated"].items()}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"checkpoint {path} is damaged ({error}): delete it") from None
        if version != VERSION or stored != key:
            raise UserError(
                f"checkpoint {path} is of another search (model, workload, machine or version): "
                "use another file, or leave --resume out"
            )
        self.known = known

    def save(self) -> None:
        """Replace the file."""
        if self.path is None:
            return
        data = {
            "version": VERSION, "key": self.key,
            "simulated": {k: _plain(v) for k, v in sorted(self.known.items())},
        }  # fmt: skip
        spare = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        spare.write_text(json.dumps(data) + "\n", encoding="utf-8")
        spare.replace(self.path)


def _plain(t: GpuTimeline) -> list[Any]:
    return [t.seconds, t.layer, t.head, t.imbalance, [list(p) for p in t.phases]]


def _timeline(data: list[Any]) -> GpuTimeline:
    seconds, layer, head, over, phases = data
    spans = tuple((str(n), float(s)) for n, s in phases)
    return GpuTimeline(float(seconds), float(layer), float(head), float(over), spans)


def _name(t: GpuTiling, fusion: Fusion) -> str:
    return json.dumps([t.to_json(), fusion.to_json()], sort_keys=True)


# ---- the search ----
class _Search:
    """One search under way."""

    def __init__(
        self, model: ModelConfig, work: Workload, machine: Machine, blocks: int,
        checkpoint: Checkpoint, listener: Progress,
    ) -> None:  # fmt: skip
        self.model, self.work, self.machine, self.blocks = model, work, machine, blocks
        self.checkpoint, self.listener = checkpoint, listener
        self.tried, self.resumed, self.simulated = 0, 0, 0
        self.pruned: dict[str, int] = {}
        self.examples: list[str] = []
        self.fitting: dict[GpuTiling, tuple[float, Fit]] = {}
        self.order: dict[GpuTiling, int] = {}
        self.beside: dict[tuple[object, ...], list[GpuTiling]] = {}
        self.looked: set[GpuTiling] = set()
        self.bounded = self.fits = 0
        self.apart: list[tuple[str, float]] = []
        self.found: list[tuple[float, int, GpuChoice]] = []

    def step(self, t: GpuTiling) -> GpuStep:
        """The step under a tiling."""
        return GpuStep(self.model, self.work, t)

    def prune(self) -> None:
        """Look at every cut: drop what does not fit, bound the rest."""
        bounds: dict[tuple[object, ...], float] = {}
        needs: dict[tuple[GpuTiling, Fusion], Fit] = {}
        for t, fusion in self._candidates():
            self.tried += 1
            # What is in flight and who waits how takes nothing of the machine.
            key = (replace(t, in_flight=1, in_flight_waiting=1, barriers=()), fusion)
            if key not in needs:
                needs[key] = fit(self.step(t), self.machine, fusion)
            need = needs[key]
            if need.refusal is not None:
                self._drop(t, fusion, need)
                continue
            decides = (t.o_split, t.down_split, t.rotate, t.barriers)
            if decides not in bounds:
                step = self.step(t)
                bounds[decides] = bound(step, self.machine, busiest(step))
            self.order[t] = len(self.order)
            self.fitting[t] = (bounds[decides], need)
            for place in _places(t):
                self.beside.setdefault(place, []).append(t)
            if self.tried % 64 == 0:
                self.listener.update("schedule", {"tried": self.tried, "fit": len(self.fitting)})
        self.fits = len(self.fitting)

    def _drop(self, t: GpuTiling, fusion: Fusion, need: Fit) -> None:
        if need.limit not in self.pruned:
            self.examples.append(str(need.refusal))
        self.pruned[need.limit] = self.pruned.get(need.limit, 0) + 1
        if need.limit == "emitter":
            self.apart.append((str(fusion), self._simulate(t, need, fusion).seconds))

    def _candidates(self) -> Iterator[tuple[GpuTiling, Fusion]]:
        seen: set[tuple[GpuTiling, Fusion]] = set()
        cuts = space(self.model, self.work, self.machine, self.blocks)
        for pair in chain(((t, EMITTED) for t in self.default()), cuts):
            if pair not in seen:
                seen.add(pair)
                yield pair

    def default(self) -> tuple[GpuTiling, ...]:
        """The tiling that is taken without a search, if it fits."""
        return _default(self.model, self.work, self.machine, self.blocks)

    def _simulate(self, t: GpuTiling, need: Fit, fusion: Fusion) -> GpuTimeline:
        name = _name(t, fusion)
        known = self.checkpoint.known.get(name)
        if known is not None:
            self.resumed += 1
            return known
        step = self.step(t)
        micro = micro_costs(step, need.consumer_registers)
        made = simulate_gpu(step, self.machine, micro=micro, fusion=fusion)
        self.checkpoint.known[name] = made
        if len(self.checkpoint.known) % SAVE_EVERY == 0:
            self.checkpoint.save()
        return made

    def _try(self, t: GpuTiling, keep: int) -> None:
        """Simulate a cut, unless it was, or its bound is above what is kept."""
        if t not in self.fitting or t in self.looked:
            return
        self.looked.add(t)
        least, need = self.fitting[t]
        if len(self.found) >= keep and least > self.found[keep - 1][0]:
            self.bounded += 1
            return
        try:
            line = self._simulate(t, need, EMITTED)
        except Infeasible as why:  # its registers do not hold the micro-operations
            del self.fitting[t]
            self._drop(t, EMITTED, replace(need, limit="registers", refusal=str(why)))
            return
        self.simulated += 1
        self.found.append((line.seconds, self.order[t], GpuChoice(t, EMITTED, line, need)))
        self.found.sort(key=lambda x: x[:2])
        self.listener.update("simulate", {
            "simulated": self.simulated, "of": len(self.fitting),
            "best_us": round(self.found[0][0] * 1e6, 1),
        })  # fmt: skip

    def kept(self, keep: int) -> list[GpuChoice]:
        """The best choices; of those that the simulator cannot tell apart and that differ in what
        is in flight alone, one.
        """
        out: list[GpuChoice] = []
        for _, _, choice in self.found:
            same = replace(choice.tiling, in_flight=1, in_flight_waiting=1)
            if not any(
                replace(c.tiling, in_flight=1, in_flight_waiting=1) == same
                and abs(c.timeline.seconds / choice.timeline.seconds - 1) < TIE
                for c in out
            ):
                out.append(choice)
            if len(out) == keep:
                break
        return out

    def _neighbours(self, t: GpuTiling) -> list[GpuTiling]:
        """Cuts that fit and differ from `t` in one field (fields that follow from others apart)."""
        base = replace(t, in_flight_waiting=default_waiting(t))
        out = [other for place in _places(base) for other in self.beside[place] if other != t]
        for waiting in WAITING:
            other = replace(t, in_flight_waiting=waiting)
            if waiting <= t.in_flight and other not in self.fitting:
                self.fitting[other] = self.fitting[t]
                self.order[other] = len(self.order)
                out.append(other)
        return out

    def rank(self, keep: int, limit: int, end: float | None) -> bool:
        """Walk downhill from the default and from the best bound, one field at a time, until no
        neighbour of a kept cut is better; whether nothing was left out for want of time.
        """
        best = min(self.fitting, key=lambda t: (self.fitting[t][0], self.order[t]))
        for t in (*self.default(), best):
            if end is not None and time.monotonic() > end and self.found:
                return False
            self._try(t, keep)
        walked: set[GpuTiling] = set()
        while self.simulated < limit:
            at = next((c.tiling for _, _, c in self.found[:keep] if c.tiling not in walked), None)
            if at is None:
                return True
            walked.add(at)
            for other in self._neighbours(at):
                if end is not None and time.monotonic() > end:
                    return False
                if self.simulated < limit:
                    self._try(other, keep)
        return True


def default_waiting(t: GpuTiling) -> int:
    """What the space has for chunks in flight while a block waits; others are tried on the walk."""
    return min(2, t.in_flight)


def _places(t: GpuTiling) -> list[tuple[object, ...]]:
    """What a cut shares with those that differ from it in one field: for each field, the others.
    Bytes in flight count rather than chunks, stages and turns follow from the rest.
    """
    flight = (
        "all" if t.in_flight == most_in_flight(t) else round(t.in_flight * t.chunk_bytes / 8192)
    )
    fields = (t.chunk_cols, t.warps, t.o_split, t.down_split, flight, t.kv_pieces, t.barriers)
    return [(i, *fields[:i], *fields[i + 1 :]) for i in range(len(fields))]


def judge_choice(model: ModelConfig, work: Workload, choice: GpuChoice, machine: Machine) -> None:
    """Raise `InternalError` when the judge finds a fault in the schedule of a choice."""
    from obelisk.schedule.gpu_check import check_gpu, shallow
    from obelisk.schedule.ir.pipeline import Setting, schedule_of

    step = shallow(GpuStep(model, work, choice.tiling))
    faults = check_gpu(schedule_of(Setting(step, choice.fusion)), machine)
    if faults:
        raise InternalError(f"the passes made an unsafe schedule: {faults[0]}")


def search_gpu(
    model: ModelConfig,
    work: Workload,
    machine: Machine,
    *,
    blocks: int | None = None,
    keep: int = 4,
    judged: int | None = None,
    limit: int = SIMULATED,
    seconds: float | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> tuple[list[GpuChoice], GpuAccount]:
    """The best `keep` cuts, fastest first by the simulator, and the account.

    `judged` of them (default: all) are also built by the passes and judged by `check_gpu`. `limit`
    bounds how many are simulated, `seconds` for how long (the default tiling always is).
    `checkpoint` is a file that keeps what was simulated; with `resume` it is read first.

    Raises `Infeasible` naming the limits when nothing fits, `UserError` for a workload or
    checkpoint that is not possible, `MissingDependency` without xDSL.
    """
    work.check(model)
    listener = progress or Silent()
    start = time.monotonic()
    grid = min(machine.cores if blocks is None else blocks, up_tiles(model))
    if grid < 1:
        raise Infeasible(f"{grid} blocks: a schedule needs at least one")
    parts = (model.digest, repr(work), machine.digest, str(grid), repr(costs_of(machine)))
    key = digest("gpu-search", *parts)
    run = _Search(model, work, machine, grid, Checkpoint(checkpoint, key, resume), listener)
    run.prune()
    if not run.fitting:
        raise Infeasible(
            f"no megakernel for {machine.name}: {'; '.join(run.examples)} (of {run.tried} cuts "
            "none fits: use a smaller batch or a device with more shared memory)"
        )
    finished = run.rank(keep, limit, None if seconds is None else start + seconds)
    run.checkpoint.save()
    best = run.kept(keep)
    for i, choice in enumerate(best[: keep if judged is None else judged]):
        listener.update("judge", {"judged": i, "of": len(best)})
        judge_choice(model, work, choice, machine)
    account = GpuAccount(
        run.tried, tuple(sorted(run.pruned.items())), tuple(run.examples), run.fits,
        run.bounded, run.simulated, run.resumed, tuple(run.apart),
        time.monotonic() - start, finished,
    )  # fmt: skip
    return best, account


__all__ = [
    "GpuAccount", "GpuChoice", "best_turn", "bound",  "judge_choice", "micro_costs",
    "search_gpu", "space",
]  # fmt: skip
