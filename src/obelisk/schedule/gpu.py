"""How a decode step is cut for a GPU: the choices that the CUDA megakernel takes as parameters.

Takes a model, a workload and a machine; gives a frozen `GpuTiling` (`gpu_default` chooses one), and
`shared_plan`, the bytes of shared memory that a tiling takes. A search may vary every field; the
emitter (`mega.cuda`) refuses what does not fit and names the limit.

Words: a *tile* is `rows` rows of a weight matrix over all of its columns; a *unit* is a tile's part
along K (the whole tile where the split is 1) and belongs to one block; a *chunk* is `chunk_cols`
columns of a unit, one copy into one slot of the block's ring. A chunk is multiplied by one warp, or
in equal *cuts* by several. A *slab* is the least part of a chunk: 16 rows by so many columns that
they end with a group of 4-bit weights, scales and all (`slab_of`).
"""

from __future__ import annotations

import enum
from dataclasses import asdict, dataclass, replace
from typing import Any

from obelisk.machine import Feature, Machine
from obelisk.plan.layout import align
from obelisk.tasks.config import ModelConfig
from obelisk.tasks.workload import WeightFormat, Workload

K_BLOCK = 32  # columns that a lane's 16-byte load of inputs covers: two steps of m16n8k16
TILE_ROWS = 16  # the m of m16n8k16: weight rows are its rows, slots its columns
WEIGHT_BYTES = 2  # of an input of a product, a key or a value: bf16 or fp16 (`input_bytes`)
NARROW_COLS = 128  # columns of a slab of 4 or 8 bits: a whole number of groups of any size
DIGITS = 3  # bytes of an input of narrow weights: signed digits to base 256
ACROSS = 2  # slots up to which the digits of an input are columns of one product
MAX_HEADS = 8  # query heads that attention takes at a time: the n of m16n8k16
HEAD_REGISTERS = 96  # of a lane, for keys, values and sums of fp32 attention: more are spilled
MAX_STAGES = 64
CUTS = (1, 2, 4, 8)  # parts of a chunk, each for one warp
SLAB_COST, FLUSH_COST = 2.0, 12.0  # of 32 columns, and of handing sums over, in multiplications
NARROW_COST, SPREAD_COST = 1.0, 10.0  # of 32 columns of 4 or 8 bits, and where warps meet once
DRAWN = 4  # slabs that a warp reads at a time where it copies its own weights: the least ring
HELD_SLABS = 12  # of weights that a warp of a direct product holds: 96 registers a lane
HELD_NARROW = 6  # of 4 bits, with scales, zeros and sums of their own: more are spilled
SUMS_ROOM = 24 * 1024  # bytes of sums between warps that cuts may take
MISC_BYTES = 4096  # static shared memory: mbarriers, sums of squares, tokens, bins of a draw
PRIVATE_BYTES = 3072  # the same, without mbarriers and for one slot


class EdgeSync(enum.StrEnum):
    """How a reader knows that what it reads was written."""

    TAGGED = "tagged"  # values carry marks of their step and layer; readers poll the data itself
    BARRIER = "barrier"  # all blocks meet at one counter before the reader starts


EDGES = ("qkv", "attend", "o", "up", "down", "head")  # named by the producer


DIRECT = (WeightFormat.BF16, WeightFormat.W4A16)  # formats whose products can be direct


@dataclass(frozen=True, slots=True)
class GpuTiling:
    """The cut of a step.

    Attributes:
        blocks: thread blocks, one an SM; all must be resident at a time.
        chunk_cols: columns of a chunk of a layer's matrix, a multiple of `slab_cols`.
        stages: slots of the ring of chunks.
        in_flight: chunks that may be on their way at a time; the ring holds what has landed.
        warps: consumer warps.
        loader_warps: warps that copy without a copy engine (`bulk` false); else one thread copies.
        o_split, down_split: parts along K of the tiles of the two products that end in the
            residual stream; their sums meet in the next reader, in a fixed order.
        kv_pieces: pieces of the context of one slot and head group.
        rotate: units that the cut of a phase moves on from layer to layer, so that the larger
            shares go round.
        bulk: copies by the copy engine (`cp.async.bulk`); else 16 bytes a lane (`cp.async`).
        barriers: the edges that are kept by a grid barrier as well as by tags.
        in_flight_waiting: chunks that may be on their way while the block waits for others, whose
            values would come later behind more of them.
        staged: warps whose first 16 positions of the block's piece of the context are copied into
            shared memory at the beginning of a layer (16-bit keys and values); 0: read when
            attention begins.
        kv_ring: keys and values of older positions are chunks of the ring, like weights, between
            those of the q, k, v product and the output projection; else warps read the cache.
            16-bit keys and values.
        rounded: the residual stream goes to all blocks as the next product's inputs, 16 bits and
            the gain in them, with sums of squares; the block that has part 0 of a row adds the
            other parts to it. Else all read fp32 parts. bf16 weights. The marks in these rows are
            the same in every step where there are a multiple of four layers.
        held: a warp reads its first weights of a product into registers while the block waits for
            the inputs (16-bit weights, up to two slots). Not measured.
        mass_beside: pieces of attention and their masses are looked at in one loop, not one after
            the other. Not measured.
        cuts: most parts that a chunk is cut in, each for one warp (`products` chooses): of `CUTS`.
        fenced: warps hand a unit's sums over behind a fence; else they meet at an mbarrier.
        kept: fp16 inputs: rows wait in registers for the root of their norm, where these hold them;
            else they are read a second time.
        spread: every warp has the same columns of all of a block's units of narrow weights, where
            that comes out even.
        direct: a layer's products take their inputs from what other blocks wrote into registers, K
            shared out between the warps, with one barrier each (batch 1, bf16 or 4-bit weights):
            no input lies in shared memory.
        look_first: direct products look at other blocks' values before they read their weights.
        hold: slabs of weights that a warp of a direct product reads into registers before its
            inputs; 0: as many as go with the format (`held_slabs`).
        private: every warp copies its own slabs of all products, which are direct, the head's as
            well, into its own part of the ring: no warp loads, nothing waits at a barrier for
            weights. A chunk is a slab of each warp, and the whole ring is in flight.
        ahead: units of gate and up whose weights a warp reads into registers, behind those of all
            of the block's units of the output projection, before the block waits for attention's
            pieces, so that its ring fills again meanwhile (`private`); 0: each product's weights
            before its own inputs.
        halved: half of the warps add the other half's sums of attention to their own before these
            meet in shared memory, which takes half as much of it (16-bit keys and values).
        slab_cols, slab_bytes: a slab of a layer's matrix (`slab_of` the workload's weights).
        head_slab, head_bytes: a slab of the head, which may be of another format.
        rows: rows of a tile; 16 (the tensor cores' m).
    """

    blocks: int
    chunk_cols: int = 256
    stages: int = 24
    in_flight: int = 6
    warps: int = 8
    loader_warps: int = 1
    o_split: int = 1
    down_split: int = 1
    kv_pieces: int = 8
    rotate: int = 37
    bulk: bool = True
    barriers: tuple[str, ...] = ()
    in_flight_waiting: int = 2
    staged: int = 0
    kv_ring: bool = False
    rounded: bool = False
    held: bool = False
    mass_beside: bool = False
    cuts: int = 1
    fenced: bool = True
    kept: bool = False
    spread: bool = False
    direct: bool = False
    look_first: bool = True
    hold: int = 0
    private: bool = False
    ahead: int = 0
    halved: bool = False
    slab_cols: int = K_BLOCK
    slab_bytes: int = TILE_ROWS * K_BLOCK * WEIGHT_BYTES
    head_slab: int = K_BLOCK
    head_bytes: int = TILE_ROWS * K_BLOCK * WEIGHT_BYTES
    rows: int = TILE_ROWS

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a slot of the ring."""
        return align(self.chunk_cols // self.slab_cols * self.slab_bytes, 128)

    @property
    def head_cols(self) -> int:
        """Columns of a chunk of the head: as many as a slot of the ring holds."""
        return self.chunk_bytes // self.head_bytes * self.head_slab

    def padded(self, cols: int) -> int:
        """Columns of a layer's matrix as stored, and of its inputs."""
        return align(cols, self.slab_cols)

    def splits(self, cols: int) -> tuple[int, ...]:
        """Parts that a layer's matrix can be split in along K: see `legal_splits`."""
        return legal_splits(cols, unit=self.slab_cols)

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * (self.warps + (1 if self.bulk else self.loader_warps))

    def sync(self, edge: str) -> EdgeSync:
        """How an edge of `EDGES` is kept."""
        return EdgeSync.BARRIER if edge in self.barriers else EdgeSync.TAGGED

    def to_json(self) -> dict[str, Any]:
        """A JSON object of the fields."""
        return {**asdict(self), "barriers": list(self.barriers)}


@dataclass(frozen=True, slots=True)
class Product:
    """How a product's units are cut.

    Attributes:
        units: of all blocks.
        slabs: of a unit.
        chunk: slabs of a chunk.
        cuts: parts of a chunk, each multiplied by one warp.
        spread: every warp has the same parts of all of a block's units, and sums meet once.
    """

    units: int
    slabs: int
    chunk: int
    cuts: int
    spread: bool = False

    @property
    def chunks(self) -> int:
        """Chunks of a unit."""
        return -(-self.slabs // self.chunk)

    @property
    def pieces(self) -> int:
        """What the warps share of a unit."""
        last = self.slabs - (self.chunks - 1) * self.chunk
        return (self.chunks - 1) * self.cuts + -(-last // (self.chunk // self.cuts))

    def sums(self, batch: int, t: GpuTiling) -> int:
        """Bytes of what warps leave for each other."""
        if self.spread:  # of all of a block's units; digits lie apart where slots leave room for it
            kept = -(-self.units // t.blocks) * t.warps * (DIGITS if batch <= ACROSS else 1)
        else:
            kept = min(self.pieces, t.warps) * (t.stages // self.chunks + 2)
        return 4 * TILE_ROWS * batch * kept


@dataclass(frozen=True, slots=True)
class SharedPlan:
    """Bytes of a block's shared memory, in the order in which they lie.

    Attributes:
        inputs: the input rows of a product (16 bits an element, or 32), or what attention merges.
        sums: partial sums of units whose chunks went to several warps.
        residual: the block's own rows of the residual stream, fp32.
        ring: slots of weights.
        misc: barriers and flags (static).
        staged: keys and values that are copied ahead.
        direct: what warps of direct products add up, and a second residual; before the ring.
    """

    inputs: int
    sums: int
    residual: int
    ring: int
    misc: int = MISC_BYTES
    staged: int = 0
    direct: int = 0

    @property
    def dynamic(self) -> int:
        """Bytes that a launch asks for."""
        return self.inputs + self.sums + self.residual + self.staged + self.direct + self.ring

    @property
    def total(self) -> int:
        """All bytes."""
        return self.dynamic + self.misc


def k_padded(cols: int) -> int:
    """Columns as stored."""
    return align(cols, K_BLOCK)


def tile_count(rows: int) -> int:
    """Tiles of a matrix."""
    return -(-rows // TILE_ROWS)


def up_tiles(model: ModelConfig) -> int:
    """Tiles of gate and up: each has half of its rows of either."""
    return -(-model.ffn // (TILE_ROWS // 2))


def slab_of(form: WeightFormat, group: int = 0, zeros: bool = False) -> tuple[int, int]:
    """Columns and bytes of a slab of a format: 16 rows of weights, for 4 bits the groups' scales
    (fp16) and zeros (bytes) behind them.
    """
    if form is WeightFormat.W4A16:
        numbers = TILE_ROWS * (NARROW_COLS // group)
        return NARROW_COLS, TILE_ROWS * NARROW_COLS // 2 + numbers * (3 if zeros else 2)
    if form is WeightFormat.INT8:
        return NARROW_COLS, TILE_ROWS * NARROW_COLS
    return K_BLOCK, TILE_ROWS * K_BLOCK * (4 if form is WeightFormat.FP32 else WEIGHT_BYTES)


def narrow_inputs(work: Workload) -> int:
    """Bytes of the inputs of a slab of 4-bit or 8-bit weights: every slot's digits, a factor a
    slot, and, where groups have zeros, a sum for each of them.
    """
    slots = ACROSS if work.batch <= ACROSS else 8  # as many as lie beside each other
    sums = NARROW_COLS // work.group if work.zeros else 0
    return NARROW_COLS * DIGITS * work.batch + align(4 * slots * (1 + sums), 16)


def input_slab(work: Workload, form: WeightFormat) -> tuple[int, int]:
    """Columns and bytes of all slots' inputs of a slab of a format."""
    cols = slab_of(form, work.group, work.zeros)[0]
    narrow = form in (WeightFormat.W4A16, WeightFormat.INT8)
    return cols, narrow_inputs(work) if narrow else work.batch * input_bytes(work) * cols


def input_bytes(work: Workload) -> int:
    """Bytes of an input of a product, of a key and of a value."""
    return 4 if work.weights is WeightFormat.FP32 else WEIGHT_BYTES


def weight_bits(t: GpuTiling) -> int:
    """Bits of a weight of a layer's matrix, without its share of scales and zeros."""
    return 8 * t.slab_bytes // (TILE_ROWS * t.slab_cols)


def slabs_of(work: Workload) -> tuple[int, int, int, int]:
    """A tiling's `slab_cols`, `slab_bytes`, `head_slab` and `head_bytes` for a workload."""
    return *slab_of(work.weights, work.group, work.zeros), *slab_of(work.head_form)


def for_weights(t: GpuTiling, work: Workload) -> GpuTiling:
    """A tiling for a workload's weights, one slab to a chunk, and what suits them by default: whole
    chunks for 16 bits, as measured, and 32; `cut_between` for narrower ones: more columns to a
    chunk; products of 4 bits are spread (measured: 2%; of 8 bits not).
    """
    cols, size, outer, head = slabs_of(work)
    t = replace(
        t, chunk_cols=cols, slab_cols=cols, slab_bytes=size, head_slab=outer, head_bytes=head
    )
    if weight_bits(t) >= 8 * WEIGHT_BYTES:
        return t
    return replace(cut_between(t), spread=work.weights is WeightFormat.W4A16)


def cut_between(t: GpuTiling) -> GpuTiling:
    """A tiling with chunks cut between warps, which meet without a fence, and rows kept."""
    return replace(t, cuts=max(CUTS), fenced=False, kept=True)


def legal_splits(cols: int, limit: int = 16, unit: int = K_BLOCK) -> tuple[int, ...]:
    """Parts that a matrix of `cols` columns can be split in along K: equal, of whole units (32
    columns, or those of a slab).
    """
    blocks = align(cols, unit) // unit
    return tuple(s for s in range(1, limit + 1) if blocks % s == 0)


def imbalance(tiles: int, split: int, blocks: int) -> float:
    """Largest over mean units of a block."""
    units = tiles * split
    return -(-units // blocks) * blocks / units


def query_stride(head_dim: int, size: int = WEIGHT_BYTES) -> int:
    """Bytes of a row of queries, or of staged keys: rows that are read together share no banks (of
    4 bytes an element: lanes read one row at a time).
    """
    if size == 4:
        return 64 * sixteens(head_dim)
    blocks = -(-head_dim // K_BLOCK)
    return 64 * (blocks if blocks % 2 else blocks + 1)


def sixteens(head_dim: int) -> int:
    """Parts of 16 dimensions, of which a lane has four each in fp32."""
    return -(-head_dim // 16)


def head_chunk(model: ModelConfig, work: Workload) -> int:
    """Query heads that attention takes at a time; in fp32 as many as leave registers for sums."""
    most = MAX_HEADS
    if input_bytes(work) == 4:
        each = 4 * sixteens(model.head_dim)  # a key, a value, the sums of a head
        most = max(1, min(most, HEAD_REGISTERS // each - 2))
    return min(model.group, most)


def attention_bytes(model: ModelConfig, work: Workload, warps: int) -> int:
    """Shared memory of one item of attention: queries (16 bits: in two parts), the new key and
    value, and the sums of so many warps.
    """
    size, heads = input_bytes(work), head_chunk(model, work)
    sums = 4 * warps * heads * (align(model.head_dim, K_BLOCK) + 4)
    stride = query_stride(model.head_dim, size)
    if size == 4:
        return (align(model.group, heads) + 2) * stride + sums
    blocks = -(-model.head_dim // K_BLOCK)
    return 2 * align(model.group, MAX_HEADS) * stride + 128 * blocks + sums


def merging(t: GpuTiling) -> int:
    """Warps whose sums of attention meet in shared memory."""
    return t.warps // 2 if t.halved else t.warps


def kv_tiles(model: ModelConfig, t: GpuTiling) -> int:
    """Tiles of 16 positions, keys and values, that a slot of the ring holds: a power of two up to
    the largest of `CUTS`, 0 where none fits.
    """
    fit = t.chunk_bytes // (2 * TILE_ROWS * WEIGHT_BYTES * model.head_dim)
    return max((c for c in CUTS if c <= fit), default=0)


def products(model: ModelConfig, batch: int, t: GpuTiling) -> dict[str, Product]:
    """Every product's cut, by name.

    A block that has fewer chunks than warps, or a number that does not come out even, has each cut
    in up to `cuts` parts for as many warps, unless the sums that they leave take too much room. A
    layer's narrow weights are spread over the warps where that comes out even.
    """
    hidden = tile_count(model.hidden)
    sizes = {  # units, columns of one
        "qkv": (tile_count(model.q_width + 2 * model.kv_width), t.padded(model.hidden)),
        "o": (hidden * t.o_split, t.padded(model.q_width) // t.o_split),
        "up": (up_tiles(model), t.padded(model.hidden)),
        "down": (hidden * t.down_split, t.padded(model.ffn) // t.down_split),
        "head": (tile_count(model.vocab), t.padded(model.hidden)),
    }  # fmt: skip
    out = {}
    for name, (units, cols) in sizes.items():
        slab = t.head_slab if name == "head" else t.slab_cols
        price = SLAB_COST if slab == K_BLOCK else NARROW_COST
        slabs = max(1, (t.head_cols if name == "head" else t.chunk_cols) // slab)
        most = -(-units // t.blocks)
        best: tuple[float, Product] | None = None
        for cut in CUTS:
            if cut > t.cuts or slabs % cut:
                continue
            p = Product(units, cols // slab, slabs, cut)
            whole = p.slabs % (slabs // cut * t.warps) == 0
            if t.spread and whole and name != "head" and weight_bits(t) < 8 * WEIGHT_BYTES:
                spread = replace(p, spread=True)
                p = spread if spread.sums(batch, t) <= SUMS_ROOM else p
            rounds = -(-most * p.pieces // t.warps)
            flushes = FLUSH_COST * (most if p.pieces >= t.warps else rounds)
            if p.spread:
                flushes = SPREAD_COST * -(-most // t.warps)
            cost = rounds * (slabs // cut) * slab / K_BLOCK * price + flushes
            if cut == 1 or (p.sums(batch, t) <= SUMS_ROOM and (best is None or cost < best[0])):
                best = (cost, p)
        assert best is not None
        out[name] = best[1]
    return out


def held_slabs(t: GpuTiling) -> int:
    """Slabs of a layer's weights that a warp of a direct product has in registers."""
    if t.hold:
        return t.hold
    return HELD_SLABS if weight_bits(t) >= 8 * WEIGHT_BYTES else HELD_NARROW


def direct_units(model: ModelConfig, batch: int, t: GpuTiling) -> dict[str, int]:
    """Units of each product of a layer that a block's warps hold in registers at a time: as many as
    `held_slabs` a warp and the ring allow, in nearly equal turns; 0: a unit is more than
    the ring.
    """
    out = {}
    for name, p in products(model, batch, t).items():
        if name == "head" and not t.private:
            continue
        if p.chunks > t.stages and not t.private:
            return dict.fromkeys(("qkv", "o", "up", "down"), 0)
        most, slabs = -(-p.units // t.blocks), held_slabs(t) // -(-p.slabs // t.warps)
        ring = most if t.private else t.stages // p.chunks
        together = max(1, min(most, slabs, ring))
        out[name] = -(-most // -(-most // together))
    return out


def most_in_flight(t: GpuTiling) -> int:
    """Chunks that may be on their way at a time, at most. A warp tells a slot's copies apart by
    parity alone, and goes on by up to `warps` chunks at a time. Since the copy engine may bring
    later chunks before earlier ones, the slot that it comes to must not still be waiting for the
    copy before: it would take that one for its own.
    """
    return t.stages - t.warps if t.bulk else t.stages


def run_bytes(model: ModelConfig, t: GpuTiling) -> int:
    """Bytes of the table of a block's runs of units, where warps copy their own weights."""
    runs = model.layers * (2 + t.o_split + t.down_split) + 1
    return align(8 * runs, 128) if t.private else 0


def shared_plan(model: ModelConfig, work: Workload, t: GpuTiling) -> SharedPlan:
    """What a tiling takes of a block's shared memory."""
    parts = [t.padded(model.hidden), t.padded(model.q_width) // t.o_split,
             t.padded(model.ffn) // t.down_split]  # fmt: skip
    slab, size = input_slab(work, work.weights)
    outer, head = input_slab(work, work.head_form)
    rows = 0 if t.private else max(max(parts) // slab * size, parts[0] // outer * head)
    inputs = align(max(rows, attention_bytes(model, work, merging(t))), 128)
    found = products(model, work.batch, t).values()
    sums = 0 if t.private else align(max(p.sums(work.batch, t) for p in found), 128)
    tiles = -(-tile_count(model.hidden) * max(t.o_split, t.down_split) // t.blocks) + 1
    residual = align(4 * TILE_ROWS * work.batch * tiles, 128)
    staged = t.staged * 32 * query_stride(model.head_dim)
    direct = 0
    if t.direct:  # two places in turn: sums of units, and of squares
        units = max(direct_units(model, work.batch, t).values())
        direct = align(2 * 4 * t.warps * (TILE_ROWS * units + 1), 128) + residual
        direct += run_bytes(model, t)
    ring = t.stages * t.chunk_bytes
    misc = PRIVATE_BYTES if t.private else MISC_BYTES
    return SharedPlan(inputs, sums, residual, ring, misc, staged, direct)


def refuse_private(model: ModelConfig, t: GpuTiling) -> str | None:
    """Why warps cannot copy their own weights; None when they can."""
    if t.bulk or t.loader_warps or not t.direct or t.staged or t.kv_ring:
        return (
            "warps copy their own weights where no copy engine and no loading warp does, in direct "
            "products, with no keys and values copied ahead"
        )
    if t.chunk_cols != t.warps * t.slab_cols:
        return (
            f"a chunk of {t.chunk_cols} columns: where {t.warps} warps copy their own weights it "
            f"is a slab of each, {t.warps * t.slab_cols}"
        )
    held, slabs = held_slabs(t), [-(-p.slabs // t.warps) for p in products(model, 1, t).values()]
    if held % 4 and max(slabs) > held:  # a group of inputs is four slabs
        return f"{max(slabs)} slabs of a unit, of which a warp holds {held}: no multiple of 4"
    if t.stages < DRAWN:
        return f"{t.stages} stages: a warp reads {DRAWN} of its slabs at a time"
    return None


def refuse_ahead(model: ModelConfig, t: GpuTiling) -> str | None:
    """Why gate and up cannot be read ahead of the output projection; None when they can."""
    if not t.private:
        return "weights of gate and up are read ahead where warps copy their own weights"
    output = products(model, 1, t)["o"]
    slabs, most = -(-output.slabs // t.warps), -(-output.units // t.blocks)
    if slabs * most > held_slabs(t):
        return f"{most} units of the output projection of {slabs} slabs a warp: more than it holds"
    up = direct_units(model, 1, t)["up"]
    if not 0 <= t.ahead <= up:
        return f"{t.ahead} units of gate and up ahead: a warp holds {up}"
    return None


def refuse(model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine) -> str | None:
    """The limit that a tiling exceeds on a machine, in words; None when it fits."""
    if (t.slab_cols, t.slab_bytes, t.head_slab, t.head_bytes) != slabs_of(work):
        return f"slabs of {t.slab_bytes} bytes are not those of {work.weights}"
    if t.chunk_cols < 1 or t.chunk_cols % t.slab_cols or t.rows != TILE_ROWS:
        return (
            f"a chunk of {t.rows} x {t.chunk_cols}: expected 16 rows and a multiple of "
            f"{t.slab_cols}"
        )
    if t.head_cols < 1:
        return (
            f"a chunk of {t.chunk_bytes} bytes holds no columns of the head, of which "
            f"{t.head_slab} take {t.head_bytes} bytes: use wider chunks, or a head of 16 bits"
        )
    for name, cols, split in (("o", model.q_width, t.o_split), ("down", model.ffn, t.down_split)):
        if split not in t.splits(cols):
            return (
                f"{name}: {cols} columns cannot be split in {split} equal parts of whole "
                f"{t.slab_cols}s"
            )
    plan = shared_plan(model, work, t)
    if plan.total > machine.shared_bytes:
        return (
            f"{plan.total} bytes of shared memory ({t.stages} stages of {t.chunk_bytes}, inputs "
            f"{plan.inputs}), a block of {machine.name} has {machine.shared_bytes}"
        )
    if t.blocks > machine.cores:
        return f"{t.blocks} blocks, {machine.name} has {machine.cores} SMs"
    if t.blocks > up_tiles(model):
        return f"{t.blocks} blocks, but only {up_tiles(model)} tiles of gate and up"
    if t.stages < t.warps and not t.private:
        return f"{t.stages} stages for {t.warps} warps: each warp needs a slot of its own"
    if not 1 <= min(t.in_flight, t.in_flight_waiting) <= max(t.in_flight, 1) <= t.stages:
        return f"{t.in_flight} chunks in flight, the ring has {t.stages}"
    if t.direct and (work.batch > 1 or work.weights not in DIRECT):
        return "direct products are for batch 1 and bf16 or 4-bit weights"
    if t.direct and t.chunk_bytes * t.slab_cols != t.chunk_cols * t.slab_bytes:
        return f"direct products: a slot of {t.chunk_bytes} bytes has room behind its slabs"
    if t.private and work.weights is not WeightFormat.BF16:
        return f"warps copy their own weights where these are bf16, not {work.weights}"
    if t.private and (why := refuse_private(model, t)):
        return why
    if t.ahead and (why := refuse_ahead(model, t)):
        return why
    if t.halved and (t.warps < 2 or input_bytes(work) != WEIGHT_BYTES):
        return "sums of attention are halved between two warps at least, of 16-bit keys and values"
    if not (t.bulk or t.private or t.loader_warps):
        return "no copy engine, and no warp that copies"
    if t.direct and t.rounded:
        return "direct products take rows of the residual stream as they are, not rounded"
    if t.direct and (t.warps < 2 or not all(direct_units(model, work.batch, t).values())):
        return f"direct products: {t.warps} warps, or a unit has more than {t.stages} chunks"
    if t.cuts not in CUTS:
        return f"chunks cut in {t.cuts}: expected one of {', '.join(map(str, CUTS))}"
    if not 0 <= t.staged <= t.warps:
        return f"{t.staged} warps with staged positions, there are {t.warps}"
    if t.staged and input_bytes(work) != WEIGHT_BYTES:
        return f"{t.staged} warps with staged positions: only 16-bit keys and values are staged"
    if t.rounded and work.weights is not WeightFormat.BF16:
        return (
            f"rows rounded before the root of their norm: {work.weights} could overflow, not bf16"
        )
    if t.rounded and tile_count(model.hidden) % 4:
        return f"rounded rows of hidden {model.hidden}: it needs a multiple of 64"
    if t.kv_ring and t.staged:
        return "positions are copied ahead either into the ring or into a place of their own"
    if t.kv_ring and input_bytes(work) != WEIGHT_BYTES:
        return "only 16-bit keys and values go through the ring"
    if t.kv_ring and model.group > MAX_HEADS:
        return f"{model.group} query heads a group: the ring's positions serve up to {MAX_HEADS}"
    if t.kv_ring and not kv_tiles(model, t):
        return f"a chunk of {t.chunk_bytes} bytes holds no {TILE_ROWS} positions of the cache"
    if t.bulk and not machine.has(Feature.BULK_COPY):
        return f"{machine.name} has no copy engine"
    if t.in_flight > most_in_flight(t):
        return (
            f"{t.in_flight} chunks in flight in a ring of {t.stages}: {t.warps} warps could take "
            f"what has not come for what has, with more than {most_in_flight(t)}"
        )
    return None


def piece_width(length: int, pieces: int) -> int:
    """Positions of a piece of a context of `length`, as the kernel cuts it: at most a sixteenth, or
    seven positions, more than an equal share, so that it seldom changes.
    """
    share = -(-length // pieces)
    step = max(8, (1 << (share.bit_length() - 1)) // 16)
    return -(-share // step) * step
