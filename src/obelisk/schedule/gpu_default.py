"""How a decode step is cut for a GPU where nobody searches: the tilings that are taken and tried.

Takes a model, a workload and a machine; gives `default_tiling`, and the other choices of what it
decides, which `synth` times beside it. The constants are measured (docs/megakernel-cuda.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from obelisk.base.errors import Infeasible
from obelisk.machine import Feature, Machine
from obelisk.plan.layout import align
from obelisk.schedule.gpu import (
    DIRECT,
    DRAWN,
    MAX_HEADS,
    MAX_STAGES,
    TILE_ROWS,
    WEIGHT_BYTES,
    GpuTiling,
    cut_between,
    direct_units,
    for_weights,
    held_slabs,
    imbalance,
    input_bytes,
    input_slab,
    k_padded,
    kv_tiles,
    legal_splits,
    most_in_flight,
    piece_width,
    products,
    refuse,
    shared_plan,
    slabs_of,
    tile_count,
    up_tiles,
    weight_bits,
)
from obelisk.tasks.config import ModelConfig
from obelisk.tasks.workload import WeightFormat, Workload

PRIVATE_SLABS = 16  # as HELD_SLABS, where warps copy their own weights and no warp loads; half of
# them where a lane looks for much: else registers are spilled
AHEAD_SLABS = 16  # of a warp, of the output projection and of gate and up: more are spilled
AHEAD_HELD = 18  # as PRIVATE_SLABS, where weights are read ahead and a unit more of them fits
HALVED_GAIN = 2  # stages of a ring that are worth a second meeting of attention's warps
PRIVATE_LOOKS = 12  # of a lane for its inputs where warps copy their own weights
MOST_PARTS = 4  # of a product in front of a norm that is read into registers; more are spilled
DIRECT_BALANCE = 1.2  # as BALANCE: parts cost a reader more where it waits for nothing else
BALANCE = 1.15  # largest over mean work of a block that a default accepts before splitting along K
IN_FLIGHT_BYTES = 48 * 1024  # measured on an H200: deeper queues delay the other traffic
LOADER_WARPS = 4  # where no engine copies: measured 18% faster than one (Llama-3.2-1B)
WAITING = 2  # chunks in flight while a block waits
SLOTS_WAITING = 4  # the same for 2 to ROUNDED slots (timed with 2 and 3; for 4 slots, 2 and 6 were)
O_PARTS = 2  # of a direct output projection at least: a block joins the pieces of half the heads
O_SHARES = 4  # the same where rows are rounded: whoever ends a row adds its parts, others read one
STAGED = 4  # warps whose first positions are copied ahead where a model waits more than it streams:
PIECES = 5  # of the context at least, where a model waits more than it streams
FEW = 2  # rings of weights in a block's share of a layer, up to which it does
ROUNDED = 4  # slots; with more, fp32 parts of the residual stream are too much to read
STREAMED = 4  # rings of weights in a block's share of a layer: from here on no wait stops copies


def _split(
    rows: int, cols: int, blocks: int, work: Workload, room: int, least: int = 1
) -> int:  # fmt: skip
    """The fewest parts along K, `least` if it can be, that balance the blocks and whose inputs fit
    in `room`.
    """
    unit, size = input_slab(work, work.weights)
    legal = legal_splits(cols, unit=unit)
    row = align(cols, unit) // unit * size
    fits = [s for s in legal if s >= least and row // s <= room]
    choices = fits or [legal[-1]]
    tiles = tile_count(rows)
    for s in choices:
        if imbalance(tiles, s, blocks) <= BALANCE:
            return s
    return min(choices, key=lambda s: (imbalance(tiles, s, blocks), s))


def chunk_slabs(work: Workload) -> tuple[int, ...]:
    """Slabs of a chunk of about 8, 4 and 2 KB, powers of two, so that they can be cut: what is
    tried without a search.
    """
    size = slabs_of(work)[1]
    return tuple(1 << max(0, round(math.log2(kb * 1024 / size))) for kb in (8, 4, 2))


def with_staged(
    model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine
) -> GpuTiling | None:
    """A tiling with the cache's positions copied ahead for as many warps as have some at half the
    context (with none, where it has some, or has them in the ring), its ring cut to what is left;
    None where that leaves no ring, or where keys and values have 32 bits.
    """
    tiles = -(-piece_width(max(1, work.context // 2), t.kv_pieces) // TILE_ROWS)
    other = replace(t, staged=min(t.warps, tiles))
    if t.staged or t.kv_ring:
        other = replace(t, staged=0, kv_ring=False, stages=MAX_STAGES)
    t = _shrunk(model, work, other, machine)
    return t if refuse(model, work, t, machine) is None else None


def other_default(
    model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine
) -> tuple[GpuTiling, ...]:
    """The other choice of what the default decides: products through shared memory where its are
    direct, behind other uses of registers and shared memory where warps copy their own weights;
    rows that are read twice where `for_weights` keeps them, else `cut_between`, its ring cut to
    what is left; nothing where that leaves none.
    """
    own: tuple[GpuTiling, ...] = ()
    if t.direct:
        other = _plain_default(model, work, machine, t.blocks)
        if t.private:
            tried = (with_ahead(model, work, t, machine), with_halved(model, work, t, machine))
            own = tuple(choice for choice in tried if choice is not None)
    else:
        other = replace(t, kept=False) if t.kept else cut_between(t)
        other = _shrunk(model, work, other, machine)
    return (*own, other) if refuse(model, work, other, machine) is None else own


def with_ahead(
    model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine
) -> GpuTiling | None:
    """A tiling whose warps read as many units of gate and up before attention's pieces as registers
    hold beside the output projection's (none, where it does); None where that leaves no unit.
    """
    if t.ahead:
        return replace(t, ahead=0)
    cut, units = products(model, work.batch, t), direct_units(model, work.batch, t)
    each = {name: -(-cut[name].slabs // t.warps) for name in ("o", "up")}
    room = AHEAD_SLABS - each["o"] * -(-cut["o"].units // t.blocks)
    other = replace(t, ahead=min(units["up"], max(0, room) // each["up"]))
    return other if other.ahead and refuse(model, work, other, machine) is None else None


def with_halved(
    model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine
) -> GpuTiling | None:
    """A tiling of warps that copy their own weights with attention's sums halved, or not where they
    are, its ring what is left then; None where the ring is the same.
    """
    other = _own_ring(model, work, replace(t, halved=not t.halved), machine)
    same = other.stages == t.stages or refuse(model, work, other, machine) is not None
    return None if same else other


def layer_bytes(model: ModelConfig, work: Workload, t: GpuTiling) -> int:
    """A block's share of the bytes of a layer's weights."""
    h, q, f = model.hidden, model.q_width, model.ffn
    all_weights = h * (q + 2 * model.kv_width) + q * h + 3 * h * f
    return int(work.weight_bytes * all_weights) // t.blocks


def _direct_parts(
    model: ModelConfig, t: GpuTiling, most: int, fits: Callable[[int], bool]
) -> list[int] | None:
    """Parts along K of the two direct products that may be split: the fewest, from `O_PARTS` for
    the output projection and up to `most`, whose columns fit and that balance the blocks, or
    balance best.
    """
    tiles, parts = tile_count(model.hidden), []
    for cols, least in ((model.q_width, O_PARTS), (model.ffn, 1)):
        legal = [s for s in t.splits(cols) if s <= most and fits(t.padded(cols) // s)]
        if not legal:
            return None
        even = [s for s in legal if s >= least and imbalance(tiles, s, t.blocks) <= DIRECT_BALANCE]
        parts.append(even[0] if even else min(legal, key=lambda s: imbalance(tiles, s, t.blocks)))
    return parts


def with_private(
    model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine
) -> GpuTiling | None:
    """A tiling of direct products whose warps copy their own weights, for a machine without a copy
    engine: the two that may be split along K in parts whose inputs a lane can look for together.
    None where something stands against it.
    """
    if t.bulk or work.batch > 1 or work.weights is not WeightFormat.BF16:
        return None
    most = min(MOST_PARTS, PRIVATE_LOOKS // looks(t, model.hidden))
    parts = _direct_parts(model, t, most, lambda cols: looks(t, cols) <= PRIVATE_LOOKS)
    if parts is None:
        return None
    wide = max(looks(t, model.ffn // parts[1]), looks(t, model.hidden) * max(parts))
    own = replace(
        t, direct=True, private=True, o_split=parts[0], down_split=parts[1], loader_warps=0,
        chunk_cols=t.warps * t.slab_cols,
        hold=PRIVATE_SLABS if wide <= PRIVATE_LOOKS - 4 else PRIVATE_SLABS // 2,
    )  # fmt: skip
    own = _own_ring(model, work, own, machine)
    halved = with_halved(model, work, own, machine)
    if halved is not None and halved.stages >= own.stages + HALVED_GAIN:
        own = halved
    own = _held_ahead(model, work, own, machine)
    return own if refuse(model, work, own, machine) is None else None


def _held_ahead(model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine) -> GpuTiling:
    """A tiling of warps that copy their own weights with some of gate and up read ahead, where that
    goes, and a unit more in registers, where that is one.
    """
    t = with_ahead(model, work, t, machine) or t
    more = replace(t, hold=max(t.hold, AHEAD_HELD))
    units = [direct_units(model, work.batch, x)["up"] for x in (t, more)]
    fits = t.ahead and units[1] > units[0] and refuse(model, work, more, machine) is None
    return more if fits else t


def _own_ring(model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine) -> GpuTiling:
    """A tiling of warps that copy their own weights with as many stages as fit, all in flight."""
    t = replace(t, stages=MAX_STAGES)
    while t.stages > DRAWN and shared_plan(model, work, t).total > machine.shared_bytes:
        t = replace(t, stages=t.stages - 1)
    return replace(t, in_flight=t.stages, in_flight_waiting=t.stages)


def looks(t: GpuTiling, cols: int) -> int:
    """Looks of a lane for its inputs of a direct product over so many columns."""
    slabs = -(-t.padded(cols) // t.slab_cols // t.warps)  # of a warp
    return -(-slabs // 4)


def with_direct(
    model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine
) -> GpuTiling | None:
    """A tiling with direct products: the two that may be split along K in parts that leave a warp
    no more of a unit than it can hold, up to `MOST_PARTS`. A model that streams more than it waits
    has all chunks in flight while a block waits; one that does not has no more pieces of the
    context than give every warp a tile, and of 4-bit weights positions copied ahead, too, where
    that goes. None where a product is too wide for that, or something else stands against it.
    """
    if work.batch > 1 or work.weights not in DIRECT:
        return None
    ring = 2 * t.stages // 3 * t.chunk_cols  # the rest is for what comes next
    most = min(held_slabs(t) * t.warps * t.slab_cols, ring)  # columns of a unit
    parts = _direct_parts(model, t, MOST_PARTS, lambda cols: cols <= most)
    if parts is None or t.padded(model.hidden) > most:
        return None
    direct = replace(t, direct=True, o_split=parts[0], down_split=parts[1])
    waits = t.staged > 0
    if weight_bits(t) < 8 and layer_bytes(model, work, t) <= FEW * t.stages * t.chunk_bytes:
        direct, waits = _staged(model, work, direct, machine), True
    if waits:  # more than it streams: a piece is a tile of every warp, and there are few to join
        pieces = max(PIECES, -(-work.context // (t.warps * TILE_ROWS)))
        direct = replace(direct, look_first=False, kv_pieces=min(t.kv_pieces, pieces))
    else:
        direct = replace(direct, in_flight_waiting=t.in_flight)
    direct = _shrunk(model, work, direct, machine)
    return direct if refuse(model, work, direct, machine) is None else None


def _shrunk(model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine) -> GpuTiling:
    """A tiling with as many stages of its ring as fit."""
    while t.stages > t.warps and shared_plan(model, work, t).total > machine.shared_bytes:
        t = replace(t, stages=t.stages - 1)
    flight = max(1, min(t.in_flight, most_in_flight(t)))
    return replace(t, in_flight=flight, in_flight_waiting=min(t.in_flight_waiting, flight))


def _staged(model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine) -> GpuTiling:
    """A tiling of a model that waits more than it streams: with the first positions of a few warps
    copied ahead, where a copy engine and shared memory allow it and most of the ring is left.
    """
    ahead = _shrunk(model, work, replace(t, staged=min(STAGED, t.warps)), machine)
    return ahead if t.bulk and not t.kv_ring and 4 * ahead.stages >= 3 * t.stages else t


def _cached(model: ModelConfig, work: Workload, t: GpuTiling) -> bool:
    """Whether keys and values go through the ring by default: where there is a copy engine, and a
    warp has more than one tile of a piece at half the context. For one tile the ring's room is
    worth more (measured: docs/megakernel-cuda.md).
    """
    wide = piece_width(max(1, work.context // 2), t.kv_pieces)
    fits = model.group <= MAX_HEADS and kv_tiles(model, t) > 0
    fits &= input_bytes(work) == WEIGHT_BYTES
    return t.bulk and fits and wide > TILE_ROWS * t.warps


def _half_turn(blocks: int) -> int:
    """The turn from layer to layer by which a block that has keys and values in one has none in the
    next, and larger shares go round all the same (measured on an H200, position 4096: 0.5%).
    """
    return next((n for n in range(blocks // 2 + 1, blocks) if math.gcd(n, blocks) == 1), 1)


def default_tiling(
    model: ModelConfig, work: Workload, machine: Machine, blocks: int | None = None
) -> GpuTiling:
    """The tiling that is taken without a search.

    One block an SM (fewer where there are fewer tiles of gate and up than SMs); tiles are split
    along K where a block's share would be over 15% above the mean, or where the input rows would
    take over a third of shared memory; the context is cut so that every block has a piece, at most
    8 of them; the ring takes the rest of shared memory, with 48 KB of it in flight, 16 KB while a
    block waits, or all (32 KB with 2 to 4 slots) where a layer's weights are many rings (such a
    model is bound by its stream); where they are few, the first positions of the cache are copied
    ahead (batch 1, 16-bit weights, or products that are direct). Long pieces of the context go
    through the ring, and layers are then turned by half of the blocks. From 5 slots of bf16 on (a
    multiple of four layers) rows of the residual stream are rounded for all, the down projection's
    inputs take no more room than a norm's, and the output projection has four parts at least:
    whoever ends a row adds them. Products are direct (`with_direct`, without a copy engine
    `with_private`) where that goes. `blocks` replaces the machine's SM count.

    Raises `Infeasible` naming the limit where nothing fits.
    """
    t = _plain_default(model, work, machine, blocks)
    direct = with_private(model, work, t, machine) or with_direct(model, work, t, machine)
    return direct or t


def _plain_default(
    model: ModelConfig, work: Workload, machine: Machine, blocks: int | None
) -> GpuTiling:
    """The default without direct products."""
    wanted = machine.cores if blocks is None else blocks
    count = max(1, min(wanted, up_tiles(model)))
    room = machine.shared_bytes // 3
    bulk = machine.has(Feature.BULK_COPY)
    groups = work.batch * model.kv_heads
    cols = slabs_of(work)[0]
    rounded = work.batch > ROUNDED and work.weights is WeightFormat.BF16
    rounded &= tile_count(model.hidden) % 4 == 0 and model.layers % 4 == 0  # else marks move
    narrow = work.batch * WEIGHT_BYTES * k_padded(model.hidden) if rounded else room
    t = GpuTiling(
        blocks=count,
        o_split=_split(model.hidden, model.q_width, count, work, room, O_SHARES if rounded else 1),
        down_split=_split(model.hidden, model.ffn, count, work, min(room, narrow)),
        rounded=rounded,
        kv_pieces=max(1, min(8, count // groups)),
        bulk=bulk,
        loader_warps=1 if bulk else LOADER_WARPS,
    )
    t = for_weights(t, work)
    for slabs in chunk_slabs(work):
        t = replace(t, chunk_cols=slabs * cols, stages=MAX_STAGES)
        while t.stages > t.warps and shared_plan(model, work, t).total > machine.shared_bytes:
            t = replace(t, stages=t.stages - 1)
        if shared_plan(model, work, t).total <= machine.shared_bytes:
            break
    flight = max(1, min(most_in_flight(t), round(IN_FLIGHT_BYTES / t.chunk_bytes)))
    layer = layer_bytes(model, work, t)
    streamed = layer > STREAMED * t.stages * t.chunk_bytes
    waiting = SLOTS_WAITING if 1 < work.batch <= ROUNDED else flight
    if not streamed or rounded:
        waiting = WAITING
    t = replace(t, in_flight=flight, in_flight_waiting=min(waiting, flight))
    t = replace(t, kv_ring=_cached(model, work, t))
    if t.kv_ring and 2 * groups * t.kv_pieces <= count:
        t = replace(t, rotate=_half_turn(count))
    if layer <= FEW * t.stages * t.chunk_bytes and work.batch == 1 and weight_bits(t) == 16:
        t = _staged(model, work, t, machine)
    why = refuse(model, work, t, machine)
    if why is not None:
        raise Infeasible(f"no megakernel for {machine.name}: {why}")
    return t
