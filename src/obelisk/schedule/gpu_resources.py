"""The resource model of a GPU megakernel in three dimensions: machine, model, workload.

Takes a `GpuStep`, a machine and a `Fusion`; gives a `Fit`: bytes of shared memory by use, registers
by role, blocks that are resident at a time, device memory, and the limit that is exceeded, by name
and in words. `stage_rows` and `reuse_rows` are the tables behind it: what splitting a weight tile
along K does to a stage, and which pages of a block serve several operators.
"""

from __future__ import annotations

from dataclasses import dataclass

from obelisk.machine import Feature, Machine, MachineKind
from obelisk.plan.layout import align
from obelisk.schedule.gpu import (
    TILE_ROWS,
    GpuTiling,
    SharedPlan,
    input_bytes,
    input_slab,
    k_padded,
    most_in_flight,
    refuse,
    shared_plan,
    slab_of,
    slabs_of,
    tile_count,
    up_tiles,
)
from obelisk.schedule.gpu_choice import EMITTED, Fusion
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.tasks.config import ModelConfig
from obelisk.tasks.workload import Workload

LOADER_REGISTERS = 40  # of a thread that only issues copies
CONSUMER_LEAST = 80  # below this, attention spills
REGISTER_STEP = 8  # registers are given out in eights
BLOCK_OVERHEAD = 1024  # bytes of shared memory that the system keeps of every block
LIMITS = (
    "target", "blocks", "parallelism", "shared memory", "threads", "registers", "ring", "in flight",
    "chunk", "split", "copy engine", "batch", "head", "memory", "emitter",
)  # fmt: skip
DEVICE_BYTES = {
    "a100": 80e9, "rtx3090": 24e9, "rtx4090": 24e9, "h100": 80e9, "h200": 141e9, "b200": 180e9,
    "rtx5090": 32e9,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fit:
    """What a step takes of a machine.

    Attributes:
        shared: bytes of a block's shared memory, by use.
        consumer_registers, loader_registers: 32-bit registers of a thread, by role.
        resident: blocks that are resident at a time on the whole machine.
        weight_bytes, cache_bytes, word_bytes: device memory.
        step_bytes: what one step reads at the full context.
        limit: the name of the limit that is exceeded ("" when none is), one of `LIMITS`.
        refusal: the limit in words, or None.
    """

    shared: SharedPlan
    consumer_registers: int
    loader_registers: int
    resident: int
    weight_bytes: int
    cache_bytes: int
    word_bytes: int
    step_bytes: int
    limit: str = ""
    refusal: str | None = None


def register_shares(t: GpuTiling, machine: Machine) -> tuple[int, int]:
    """Registers of a consumer thread and of a loader thread.

    Where warps can trade registers (a copy engine machine, `setmaxnreg`) the loader keeps
    `LOADER_REGISTERS` and consumers share the rest; elsewhere every thread of a block has as many.
    """
    limit = machine.registers_per_thread // REGISTER_STEP * REGISTER_STEP
    loaders = t.threads - 32 * t.warps
    if machine.has(Feature.MBARRIER) and t.warps % 4 == 0:
        rest = machine.registers - LOADER_REGISTERS * loaders
        each = rest // (32 * t.warps) // REGISTER_STEP * REGISTER_STEP
        return min(limit, each), LOADER_REGISTERS
    each = min(limit, machine.registers // t.threads // REGISTER_STEP * REGISTER_STEP)
    return each, each


def weight_bytes(model: ModelConfig, work: Workload) -> tuple[int, int]:
    """Bytes of all matrices as the kernel stores them, and of those that a step reads."""
    inner, size, outer, slab = slabs_of(work)

    def tiles(count: int, cols: int) -> int:
        return count * -(-cols // inner) * size

    layer = (
        tiles(tile_count(model.q_width + 2 * model.kv_width), model.hidden)
        + tiles(tile_count(model.hidden), model.q_width)
        + tiles(up_tiles(model), model.hidden)
        + tiles(tile_count(model.hidden), model.ffn)
    )  # fmt: skip
    columns = tile_count(model.vocab) * align(model.hidden, inner)
    step = layer * model.layers + columns // outer * slab
    if model.tied and not work.own_head:
        return step, step
    cols, each = slab_of(work.weights.outer)  # of the embedding
    return step + columns // cols * each, step


def _limit(step: GpuStep, machine: Machine) -> str:
    """The name of the limit that `gpu.refuse` found: the same conditions, in its order."""
    m, t = step.model, step.tiling
    if t.chunk_cols < 1 or t.chunk_cols % t.slab_cols or t.head_cols < 1:
        return "chunk"
    if t.o_split not in t.splits(m.q_width) or t.down_split not in t.splits(m.ffn):
        return "split"
    if shared_plan(m, step.work, t).total > machine.shared_bytes:
        return "shared memory"
    if t.blocks > machine.cores:
        return "blocks"
    if t.blocks > up_tiles(m):
        return "parallelism"
    if t.stages < t.warps and not t.private:
        return "ring"
    if t.in_flight > t.stages:
        return "in flight"
    if t.bulk and not machine.has(Feature.BULK_COPY):
        return "copy engine"
    return "in flight" if t.in_flight > most_in_flight(t) else "chunk"


def _own_limits(
    step: GpuStep, machine: Machine, fusion: Fusion, registers: int, resident: int
) -> tuple[str, str] | None:
    """The limits that are not `gpu.refuse`'s: name and words."""
    m, t = step.model, step.tiling
    if t.threads > machine.threads_per_block:
        return "threads", f"{t.threads} threads, a block has {machine.threads_per_block}"
    if registers < CONSUMER_LEAST:
        return "registers", (
            f"{registers} registers for each of {t.threads} threads, attention needs "
            f"{CONSUMER_LEAST}: use fewer warps"
        )
    if t.blocks > resident:
        return "blocks", f"{t.blocks} blocks, {resident} are resident at a time"
    if t.warps < step.batch:
        return "batch", f"{t.warps} warps for {step.batch} slots: each slot needs a warp"
    if m.head_dim % 8 or m.head_dim > 256:
        return "head", f"head_dim {m.head_dim}: it needs a multiple of 8, at most 256"
    if fusion != EMITTED:
        return "emitter", f"no emitter for {fusion}: it is ranked alone"
    return None


def fit(step: GpuStep, machine: Machine, fusion: Fusion = EMITTED) -> Fit:
    """What a step takes of a machine, and the first limit that it exceeds."""
    m, t = step.model, step.tiling
    plan = shared_plan(m, step.work, t)
    consumer, loader = register_shares(t, machine)
    each = min(
        machine.shared_per_core // (plan.total + BLOCK_OVERHEAD),
        machine.threads_per_core // t.threads, machine.blocks_per_core,
    )  # fmt: skip
    resident = machine.cores * each
    total, read = weight_bytes(m, step.work)
    cache = 2 * input_bytes(step.work) * m.layers * step.batch * m.kv_heads
    cache *= step.work.context * m.head_dim
    words = 8 * sum(align(w, 16) for w in step.widths.values())
    limit, refusal = "", None
    if machine.kind is not MachineKind.CUDA:
        limit, refusal = "target", f"{machine.name} is no CUDA device"
    else:
        why = refuse(m, step.work, t, machine)
        if why is not None:
            limit, refusal = _limit(step, machine), why
        else:
            own = _own_limits(step, machine, fusion, consumer, resident)
            if own is not None:
                limit, refusal = own
        room = DEVICE_BYTES.get(machine.name)
        if refusal is None and room is not None and total + cache + words > room:
            limit = "memory"
            refusal = (
                f"weights take {total} bytes and the cache {cache}, {machine.name} has {room:.0f}: "
                "use a smaller batch or a shorter context"
            )
    return Fit(plan, consumer, loader, resident, total, cache, words, read + cache, limit, refusal)


# ---- tables ----
@dataclass(frozen=True, slots=True)
class StageRow:
    """A weight tile as stages of a ring.

    Attributes:
        matrix: which product.
        split: parts along K that a tile is loaded in.
        stage: bytes of one part.
        stages: parts that fit beside the inputs (0: not even one).
        peak: bytes of inputs and two parts, the least that copies while it computes.
        fits: whether that is within the machine's limit.
    """

    matrix: str
    split: int
    stage: int
    stages: int
    peak: int
    fits: bool


def stage_rows(
    model: ModelConfig, work: Workload, machine: Machine, rows: int = TILE_ROWS
) -> list[StageRow]:
    """Tiles of `rows` rows over all of K, whole and split along K in 2 and 4, on a machine.

    Halving the part halves what a stage takes and doubles how many fit: with 99 KB that is the
    difference between a pipeline and none (Ada-MK, arXiv 2605.11581, section 4.1).
    """
    out = []
    slab, size = slab_of(work.weights, work.group, work.zeros)
    wide_slab, each = input_slab(work, work.weights)
    matrices = (("qkv", model.hidden), ("o", model.q_width), ("up", model.hidden),
                ("down", model.ffn))  # fmt: skip
    for name, cols in matrices:
        wide = k_padded(cols)
        for split in (1, 2, 4):
            part = k_padded(-(-wide // split))
            inputs = -(-part // wide_slab) * each  # the part's own columns of the input rows
            stage = rows * part * size // (TILE_ROWS * slab)
            room = machine.shared_bytes - inputs
            peak = inputs + 2 * stage
            out.append(StageRow(name, split, stage, max(0, room // stage), peak,
                                peak <= machine.shared_bytes))  # fmt: skip
    return out


@dataclass(frozen=True, slots=True)
class ReuseRow:
    """Buffers of a block that lie on the same bytes: which, bytes of the page, bytes without."""

    users: tuple[str, ...]
    size: int
    apart: int


def reuse_rows(pages: tuple[tuple[str, int, int], ...]) -> list[ReuseRow]:
    """Shared pages (name, offset, size) grouped by where they lie; pages of one user are left
    out.
    """
    by_place: dict[int, list[tuple[str, int]]] = {}
    for name, offset, size in pages:
        if size:
            by_place.setdefault(offset, []).append((name, size))
    return [
        ReuseRow(tuple(n for n, _ in users), max(s for _, s in users), sum(s for _, s in users))
        for _, users in sorted(by_place.items()) if len(users) > 1
    ]  # fmt: skip
