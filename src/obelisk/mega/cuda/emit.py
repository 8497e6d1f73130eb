"""CUDA C++ for one decode step: sizes, tables, and the fixed runtime text.

Takes a model, a workload, a `GpuTiling` and a machine; gives an `EmittedCuda`: one translation unit
without includes whose only kernel is `obelisk_mega`, and all that a launch must know. Which units
of which product a block computes is a table in the text; `flow.check_flow` judged it before. Equal
arguments give equal text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import Infeasible, InternalError, UserError
from obelisk.machine import Machine
from obelisk.mega.cuda.flow import check_flow
from obelisk.mega.cuda.layout import cuda_layout
from obelisk.plan.layout import BITS, WeightLayout, align
from obelisk.schedule.gpu import (
    DRAWN,
    EDGES,
    TILE_ROWS,
    GpuTiling,
    SharedPlan,
    direct_units,
    head_chunk,
    held_slabs,
    input_bytes,
    kv_tiles,
    narrow_inputs,
    products,
    refuse,
    run_bytes,
    shared_plan,
    tile_count,
    up_tiles,
)
from obelisk.tasks import ModelConfig, WeightFormat, Workload

KINDS = ("qkv", "o", "up", "down", "head")  # rows of the table of shares
SPANS = (
    "norm_in", "qkv", "attend", "combine", "o", "norm_mid", "up", "act", "down", "norm_final",
    "head",
)  # fmt: skip
WAITS = (*EDGES, "token", "step")
TEXTS = (
    "base.cuh", "weights.cuh", "weights32.cuh", "ring.cuh", "private.cuh", "digits.cuh",
    "fill.cuh", "attend32.cuh", "attend.cuh", "sample.cuh", "step.cuh", "part.cuh", "direct.cuh",
)  # fmt: skip
ONCE = ("best", "token", "logits")  # exchanged once a step, behind what every layer exchanges
SLOTS = 8
LOG2E = 1.4426950408889634
MAX_HEAD_DIM = 128


@dataclass(frozen=True, slots=True)
class EmittedCuda:
    """The program.

    Attributes:
        source: CUDA C++.
        layout: where it reads weights.
        tiling, shared: the cut, and the bytes of shared memory it takes.
        exchanged: bytes that blocks exchange values through, zeroed before the first launch.
        tags: numbers that a step uses; the next launch begins behind them.
        places: where each exchanged value begins.
        digest: of the source.
    """

    source: str
    layout: WeightLayout
    tiling: GpuTiling
    shared: SharedPlan
    exchanged: int
    tags: int
    places: Mapping[str, int]
    digest: str

    def launch(self) -> dict[str, Any]:
        """What the runtime needs to launch it, for the plan file."""
        return {
            "entry": "obelisk_mega", "blocks": self.tiling.blocks, "threads": self.tiling.threads,
            "shared": self.shared.dynamic, "exchanged": self.exchanged, "tags": self.tags,
            "places": dict(self.places), "waits": list(WAITS),
        }  # fmt: skip


def cuts(units: int, blocks: int) -> tuple[int, ...]:
    """First unit of each block's share, and the end: contiguous, nearly equal, the larger shares
    spread evenly.
    """
    return tuple(units * b // blocks for b in range(blocks + 1))


def shares(model: ModelConfig, t: GpuTiling) -> dict[str, tuple[int, ...]]:
    """The table of shares: for each product, `cuts` of its units."""
    hidden = tile_count(model.hidden)
    units = {
        "qkv": tile_count((model.heads + 2 * model.kv_heads) * model.head_dim),
        "o": hidden * t.o_split, "up": up_tiles(model),
        "down": hidden * t.down_split, "head": tile_count(model.vocab),
    }  # fmt: skip
    return {k: cuts(units[k], t.blocks) for k in KINDS}


def stream_bytes(batch: int, t: GpuTiling, rows: int, split: int) -> int:
    """Bytes of a residual stream of `rows` rows: `split` fp32 parts of every slot's; where they are
    rounded, part 0 is the sum, and 16-bit rows and the sum of squares of each tile follow.
    """
    rounded = 2 * rows + 4 * (rows // TILE_ROWS) if t.rounded else 0
    return align(batch * (4 * rows * split + rounded), 128)


def _places(model: ModelConfig, work: Workload, t: GpuTiling) -> tuple[dict[str, int], int]:
    """Where each exchanged value begins, in bytes, and how many there are in all."""
    b, rows, each = work.batch, align(model.hidden, TILE_ROWS), input_bytes(work)
    sizes = {
        "qkv": 4 * b * (model.heads + 2 * model.kv_heads) * model.head_dim,
        "part": each * b * model.heads * t.kv_pieces * model.head_dim,
        "mass": 4 * b * model.heads * align(t.kv_pieces, 4),
        "o": stream_bytes(b, t, rows, t.o_split),
        "down": 2 * stream_bytes(b, t, rows, t.down_split),
        "act": each * b * t.padded(model.ffn),
        "best": 16 * b * t.blocks,
        "token": 16 * b,
        "logits": 8 * b * tile_count(model.vocab) * TILE_ROWS,
    }
    out, at = {}, 0
    for name, size in sizes.items():
        out[name] = at
        at += align(size, 128)
    return out, at


def recording(source: str, launch: Mapping[str, Any], layers: int) -> tuple[str, dict[str, Any]]:
    """A kernel's text and `launch` changed so that what its layers exchange stays where it was
    written, each layer's behind the other's; one step a launch. No other word of it changes.

    Raises `UserError` for a text of another version, which does not say where values lie.
    """
    places: dict[str, int] = dict(launch["places"])
    apart = min(places[name] for name in ONCE)
    moved = {name: at + (layers - 1) * apart for name, at in places.items() if name in ONCE}
    changed = {"APART": apart, **{f"PLACE_{n.upper()}": at for n, at in moved.items()}}
    for name, value in changed.items():
        source, found = re.subn(
            rf"^#define OM_{name} \d+$", f"#define OM_{name} {value}", source, flags=re.M
        )  # fmt: skip
        if found != 1:
            raise UserError(
                "the plan's kernel was written by another version of Obelisk: synthesise it again"
            )
    return source, {
        **launch, "places": {**places, **moved}, "apart": apart,
        "exchanged": launch["exchanged"] + (layers - 1) * apart,
    }  # fmt: skip


def _require(model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine) -> None:
    why = refuse(model, work, t, machine)
    if why is None and (model.head_dim % 8 or model.head_dim > MAX_HEAD_DIM):
        why = f"head_dim {model.head_dim}: it needs a multiple of 8, at most {MAX_HEAD_DIM}"
    if why is None and model.hidden % 2:
        why = f"hidden {model.hidden} is odd"
    if why is None and t.warps < work.batch:
        why = f"{t.warps} warps for {work.batch} slots"
    if why is None and (t.warps & (t.warps - 1) or not 1 <= t.kv_pieces <= 16):
        why = f"{t.warps} warps, {t.kv_pieces} pieces: expected a power of two, and 1 to 16"
    if why is None and any(e not in EDGES for e in t.barriers):
        why = f"barriers {', '.join(t.barriers)}: the edges are {', '.join(EDGES)}"
    if why is not None:
        raise Infeasible(f"no megakernel for {machine.name}: {why}")


def _capability(machine: Machine) -> int:
    if machine.capability is None:
        raise Infeasible(f"{machine.name} is no CUDA device")
    return machine.capability[0] * 10 + machine.capability[1]


def _weights(layout: WeightLayout) -> dict[str, int]:
    """Offsets of tensors: of the arena for the global part, of a layer for the others."""
    at = {m.name: m.offset for m in (*layout.matrices, *layout.layer_matrices)}
    at |= {v.name: v.offset for v in (*layout.vectors, *layout.layer_vectors)}
    at.setdefault("head", at["embed"])
    optional = ("qkv_bias", "o_bias", "up_bias", "down_bias", "q_gain", "k_gain")
    out = {f"AT_{n.upper()}": at.get(n, -1) for n in (*at, *optional)}
    scales = {m.name: m.scale_offset for m in (*layout.matrices, *layout.layer_matrices)
              if m.format == "int8"}  # fmt: skip
    if scales:
        scales.setdefault("head", scales.get("embed", -1))
        out |= {f"AT_{n.upper()}_SCALES": at for n, at in scales.items()}
    first = min(scales.get("qkv", layout.layer_bytes), layout.layer_vectors[0].offset)
    return out | {
        "AT_VECTORS": first, "VECTOR_BYTES": layout.layer_bytes - first,
        "LAYER_OFFSET": layout.layer_offset, "LAYER_BYTES": layout.layer_bytes,
    }  # fmt: skip


def _formats(work: Workload) -> dict[str, int]:
    """How the layers' matrices and the outer ones are read: see runtime/weights.cuh. Where the head
    is of another format than the embedding, `OUTER_BITS` are the head's but in `om_embedding`.
    """
    own = {"OWN_HEAD": 1, "EMBED_BITS": BITS[work.weights.outer], "HEAD_BITS": BITS[work.head_form]}
    four, wide = work.weights is WeightFormat.W4A16, work.weights is WeightFormat.FP32
    return {
        "BITS": BITS[work.weights], "OUTER_BITS": BITS[work.head_form],
        **(own if work.own_head else {}),
        "FP32": int(wide), "IN": input_bytes(work), "MARKS": 1 if wide else 7,
        "SCALED": work.group if four else 128, "ZEROS": int(four and work.zeros),
        "NARROW_INPUTS": narrow_inputs(work) if BITS[work.weights] < 16 else 0,
    }  # fmt: skip


def _defines(
    model: ModelConfig, work: Workload, t: GpuTiling, machine: Machine, layout: WeightLayout,
    plan: SharedPlan, places: Mapping[str, int],
) -> list[str]:  # fmt: skip
    cut = products(model, work.batch, t)
    shared_by = [p.cuts for p in cut.values()]  # warps that may share a slot
    if t.kv_ring:
        shared_by.append(kv_tiles(model, t))
    batch2 = 1 << (work.batch - 1).bit_length()
    hidden = tile_count(model.hidden)
    kept = max(b - a for name in ("o", "down") for a, b in pairwise(shares(model, t)[name]))
    kept *= TILE_ROWS
    side = direct_units(model, work.batch, t)
    ring = plan.dynamic - plan.ring
    summed = ring - plan.direct
    if 4 * kept * work.batch > plan.residual:
        raise InternalError("a block keeps more rows of the residual stream than were planned")
    values: dict[str, int | str] = {
        "BF16": int(work.weights is WeightFormat.BF16), "BULK": int(t.bulk),
        "TRY_WAIT": int(_capability(machine) >= 90), "SLOTS": SLOTS,
        "BATCH": work.batch, "BATCH2": batch2, "BLOCKS": t.blocks, "WARPS": t.warps,
        "LOADERS": 1 if t.bulk else t.loader_warps, "STAGES": t.stages, "FLIGHT": t.in_flight,
        **_formats(work), "CHUNK": t.chunk_bytes,
        "ARRIVALS": t.warps if t.direct else max(shared_by),
        "KV_RING": int(t.kv_ring), "KV_TILES": kv_tiles(model, t),
        **{f"{n.upper()}_CHUNK": p.chunk for n, p in cut.items()},
        **{f"{n.upper()}_CUTS": p.cuts for n, p in cut.items()},
        **{f"{n.upper()}_SPREAD": -(-p.units // t.blocks) * p.spread for n, p in cut.items()},
        "FLIGHT_WAITING": min(t.in_flight, t.in_flight_waiting),
        "WINDOW": max(t.stages // p.chunks + 2 for p in cut.values()),
        "ROTATE": t.rotate % t.blocks, "PIECES": t.kv_pieces,
        "O_SPLIT": t.o_split, "DOWN_SPLIT": t.down_split,
        "ROUNDED": int(t.rounded), "PART_BYTES": 4 * work.batch * hidden * TILE_ROWS,
        "STREAM_BYTES": stream_bytes(work.batch, t, hidden * TILE_ROWS, t.down_split),
        "LAYERS": model.layers, "HIDDEN": model.hidden, "HIDDEN_ROWS": hidden * TILE_ROWS,
        "HIDDEN_TILES": hidden, "HIDDEN_K": t.padded(model.hidden) // 32,
        "Q_K": t.padded(model.q_width) // 32, "FFN_K": t.padded(model.ffn) // 32,
        "QKV_ROWS": (model.heads + 2 * model.kv_heads) * model.head_dim,
        "QKV_TILES": tile_count((model.heads + 2 * model.kv_heads) * model.head_dim),
        "UP_TILES": up_tiles(model), "VOCAB": model.vocab,
        "VOCAB_TILES": tile_count(model.vocab), "HEADS": model.heads,
        "KV_HEADS": model.kv_heads, "GROUP": model.group, "HEADS_AT": head_chunk(model, work),
        "HEAD_DIM": model.head_dim, "CONTEXT": work.context, "EPS": f"{model.eps!r}f",
        "SCALE": f"{model.head_dim**-0.5 * LOG2E!r}f", "QK_NORM": int(model.qk_norm),
        "QKV_BIAS": int(model.qkv_bias), "MLP_BIAS": int(model.mlp_bias),
        "AT_SUMS": plan.inputs, "AT_RESIDUAL": plan.inputs + plan.sums,
        "AT_STAGED": plan.inputs + plan.sums + plan.residual, "STAGED": t.staged,
        "DIRECT": int(t.direct), "LOOK_FIRST": int(t.look_first), "HOLD": held_slabs(t),
        "PRIVATE": int(t.private), "DRAW": DRAWN, "AHEAD": t.ahead, "HALVED": int(t.halved),
        "AT_DIRECT": summed, "TOGETHER": max(side.values()),
        "AT_RESIDUAL_DOWN": ring - plan.residual,
        "AT_RUNS": ring - plan.residual - run_bytes(model, t),
        **{f"{n.upper()}_TOGETHER": units for n, units in side.items()},
        **{f"{n.upper()}_MOST": -(-cut[n].units // t.blocks) for n in side},
        "HELD": int(t.held), "MASS_BESIDE": int(t.mass_beside),
        "FENCED": int(t.fenced), "KEPT": int(t.kept),
        "AT_RING": ring, "RESIDUAL_ROWS": kept,
        **_weights(layout),
        **{f"PLACE_{n.upper()}": at for n, at in places.items()}, "APART": 0,
        **{k.upper(): i for i, k in enumerate(KINDS)},
        **{f"SPAN_{n.upper()}": i for i, n in enumerate(SPANS)},
        **{f"EDGE_{n.upper()}": i for i, n in enumerate(WAITS)},
        **{f"BARRIER_{n.upper()}": int(n in t.barriers) for n in EDGES},
    }  # fmt: skip
    return [f"#define OM_{name} {value}" for name, value in values.items()]


def _only(text: str, work: Workload) -> str:
    """A runtime text without what stands between `#if OM_OWN_HEAD` and `#endif`, where the head is
    of the embedding's format: the kernels of such plans are the text that was measured.
    """
    if work.own_head:
        return text
    return re.sub(r"^#if OM_OWN_HEAD\b.*?^#endif\n", "", text, flags=re.M | re.S)


def _table(table: Mapping[str, tuple[int, ...]]) -> list[str]:
    rows = ",\n".join("  {" + ", ".join(map(str, table[k])) + "}" for k in KINDS)
    return [
        "/* The first unit of each block's share of a product; the last entry is the end. */",
        f"__constant__ int OM_CUT[{len(KINDS)}][OM_BLOCKS + 1] = {{\n{rows}\n}};",
    ]


def emit_cuda(
    model: ModelConfig, work: Workload, tiling: GpuTiling, machine: Machine
) -> EmittedCuda:
    """The kernel of a step under a tiling, for a machine's architecture.

    Raises `Infeasible` naming the limit that is exceeded, `InternalError` when the exchange of
    values would not be safe.
    """
    work.check(model)
    _require(model, work, tiling, machine)
    layout = cuda_layout(model, work)
    table = shares(model, tiling)
    faults = check_flow(model, work, tiling, table)
    if faults:
        raise InternalError(f"the exchange of values is unsafe: {faults[0]}")
    plan = shared_plan(model, work, tiling)
    places, exchanged = _places(model, work, tiling)
    title = (
        f"/* Decode steps of {model.family} ({model.layers} layers, hidden {model.hidden}), batch "
        f"{work.batch}, context {work.context}, {work.said}; {tiling.blocks} blocks, "
        f"{machine.arch}. */"
    )
    runtime = files("obelisk.mega.cuda").joinpath("runtime")
    wide = work.weights is WeightFormat.FP32
    texts = [n for n in TEXTS if wide or not n.endswith("32.cuh")]
    parts = [
        title, *_defines(model, work, tiling, machine, layout, plan, places), *_table(table),
        *(_only(runtime.joinpath(n).read_text(encoding="utf-8"), work) for n in texts),
    ]  # fmt: skip
    source = "\n".join(parts) + "\n"
    return EmittedCuda(
        source, layout, tiling, plan, exchanged, model.layers + 1, places, digest("mega", source)
    )
