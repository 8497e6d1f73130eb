"""The passes from operators to tile tasks: split along K, fuse, tile.

Each takes a module and changes it in place; each leaves a valid module whose text form can be read
(`obelisk synth MODEL --explain --device sm_90 --ir PASS`). Micro-operations and their order are in
`micro.py`, pages and synchronisation in `memory.py`; `pipeline.py` chains them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Block, Operation, Region, SSAValue, Use

from obelisk.base.errors import Infeasible
from obelisk.schedule.gpu import GpuTiling, tile_count
from obelisk.schedule.gpu_choice import Fusion
from obelisk.schedule.ir.dialects import (
    OperatorOp,
    PhaseOp,
    RepeatOp,
    ValueType,
    YieldOp,
    number,
    numbers,
    value_type,
)

ALONE = ("embed", "choose")  # phases that every block runs for itself


def phases(module: ModuleOp) -> Iterator[tuple[PhaseOp, int]]:
    """Every phase in order, with how often it runs (layers; 1 outside them)."""
    for op in module.body.block.ops:
        if isinstance(op, PhaseOp):
            yield op, 1
        elif isinstance(op, RepeatOp):
            for inner in op.body.block.ops:
                if isinstance(inner, PhaseOp):
                    yield inner, op.count.value.data


def repeat_of(module: ModuleOp) -> RepeatOp:
    """The layers of a module."""
    return next(op for op in module.body.block.ops if isinstance(op, RepeatOp))


def extent(op: OperatorOp) -> tuple[int, int]:
    """Rows and columns of the matrix that an operator streams."""
    if op.rows is None or op.cols is None:
        raise Infeasible(f"operator {op.kind.data} streams no matrix")
    return op.rows.value.data, op.cols.value.data


# ---- split along K ----
def _parts(producer: OperatorOp, t: GpuTiling) -> ValueType:
    """The type of a product that is left in parts: part 0 carries the residual."""
    assert producer.matrix is not None
    name = producer.matrix.data
    split = t.o_split if name == "o" else t.down_split
    rows, cols = extent(producer)
    if t.padded(cols) // t.slab_cols % split:
        raise Infeasible(
            f"{name}: {cols} columns cannot be split in {split} equal parts of {t.slab_cols}s"
        )
    return value_type(name, tile_count(rows) * t.rows * split)


def _not_by(operation: Operation, use: Use) -> bool:
    """Whether a use is another operation's."""
    return use.operation is not operation


def _join(x: ValueType, parts: SSAValue) -> OperatorOp:
    return OperatorOp("join", [parts], [x])


def _replace(old: OperatorOp, new: OperatorOp) -> None:
    block = old.parent_block()
    assert block is not None
    block.insert_op_before(new, old)
    for a, b in zip(old.outputs, new.outputs, strict=True):
        a.replace_all_uses_with(b)
    block.detach_op(old)
    old.erase()


def split(module: ModuleOp, t: GpuTiling) -> None:
    """The two products that end in the residual stream leave their parts along K in device memory,
    the first with the residual added; whoever reads them next joins them (`join`), in a fixed
    order.
    """
    repeat = repeat_of(module)
    body = repeat.body.block
    x_type = repeat.outputs[0].type
    assert isinstance(x_type, ValueType)
    adds = [o for o in body.ops if isinstance(o, OperatorOp) and o.kind.data == "add"]
    down_type = None
    for add in adds:
        product = add.inputs[1].owner
        assert isinstance(product, OperatorOp)
        made = OperatorOp("add", list(add.inputs), [_parts(product, t)])
        last = isinstance(add.next_op, YieldOp)
        join = _join(x_type, made.outputs[0])
        _replace(add, made)
        if last:
            down_type = made.outputs[0].type
            join.drop_all_references()
            continue
        body.insert_op_after(join, made)
        whole = join.outputs[0]
        made.outputs[0].replace_uses_with_if(whole, partial(_not_by, join))
    assert isinstance(down_type, ValueType)
    _round(module, repeat, x_type, down_type)


def _round(module: ModuleOp, repeat: RepeatOp, x: ValueType, parts: ValueType) -> None:
    """Between layers go parts, not the stream: joined at the head of the next layer, and behind the
    last one. The embedding counts as part 0 of the layer before the first.
    """
    body = repeat.body.block
    old = body.args[0]
    fresh = body.insert_arg(parts, 0)
    head = _join(x, fresh)
    assert body.first_op is not None
    body.insert_op_before(head, body.first_op)
    old.replace_all_uses_with(head.outputs[0])
    body.erase_arg(old)
    embed = repeat.inputs[0].owner
    assert isinstance(embed, OperatorOp)
    _replace(embed, OperatorOp("embed", list(embed.inputs), [parts]))
    outer = module.body.block
    region = repeat.detach_region(0)
    made = RepeatOp([repeat.inputs[0]], [parts], repeat.count.value.data, region)
    outer.insert_op_before(made, repeat)
    tail = _join(x, made.outputs[0])
    outer.insert_op_after(tail, made)
    repeat.outputs[0].replace_all_uses_with(tail.outputs[0])
    outer.detach_op(repeat)
    repeat.drop_all_references()


# ---- fuse ----
def _joins(before: OperatorOp, op: OperatorOp, fusion: Fusion) -> bool:
    """Whether an operator runs in the phase of the one before it."""
    last = before.kind.data
    match op.kind.data:
        case "rotate" | "embed" | "join" | "combine" | "sample":
            return False
        case "norm":
            return last == "join"
        case "append":
            return last == "rotate"
        case "attend":
            return last == "append" and not fusion.rope_apart
        case "product":
            if last == "norm":
                return True
            if last == "combine":
                return not fusion.combine_apart
            return fusion.o_behind_attend if last == "attend" else fusion.down_behind_up
        case _:  # gate, add, best: epilogues of the product before them
            return True


def _groups(ops: Sequence[Operation], fusion: Fusion) -> list[list[OperatorOp]]:
    out: list[list[OperatorOp]] = []
    for op in ops:
        if not isinstance(op, OperatorOp) or op.kind.data == "token":
            continue
        last = out[-1][-1] if out else None
        if last is not None and last.next_op is op and _joins(last, op, fusion):
            out[-1].append(op)
        else:
            out.append([op])
    return out


def _name(group: Sequence[OperatorOp]) -> str:
    streams = [
        "attend" if op.kind.data == "attend" else op.matrix.data
        for op in group if op.matrix is not None
    ]  # fmt: skip
    other = {"append": "rope", "sample": "choose"}
    return "+".join(streams) or other.get(group[-1].kind.data, group[-1].kind.data)


def _wrap(group: Sequence[OperatorOp]) -> None:
    """Put a run of operators into a phase."""
    block = group[0].parent_block()
    assert block is not None
    anchor = group[-1].next_op
    inside: set[Operation] = set(group)
    escaping = [
        v for op in group for v in op.outputs if any(u.operation not in inside for u in v.uses)
    ]
    body = Block()
    for op in group:
        block.detach_op(op)
        body.add_op(op)
    phase = PhaseOp(_name(group), [v.type for v in escaping], Region(body))
    for value, result in zip(escaping, phase.results_, strict=True):
        value.replace_uses_with_if(result, lambda u: u.operation not in inside)
    body.add_op(YieldOp(escaping))
    if anchor is None:
        block.add_op(phase)
    else:
        block.insert_op_before(phase, anchor)


def fuse(module: ModuleOp, fusion: Fusion) -> None:
    """Operators that run as one become a `tile.phase`: the join and norm with the product behind
    them, epilogues (gate, residual, best) with the product before them, and what `fusion` says.
    """
    for block in (repeat_of(module).body.block, module.body.block):
        for group in _groups(list(block.ops), fusion):
            _wrap(group)


# ---- tile ----
def deal(units: int, blocks: int) -> list[int]:
    """Bounds of equal runs: place i has the units bounds[i] to bounds[i + 1]."""
    return [units * i // blocks for i in range(blocks + 1)]


def tile(module: ModuleOp, t: GpuTiling, batch: int) -> None:
    """Every phase that is dealt out gets its pieces and who takes them.

    `unit` is the rows of a piece, `parts` the chunks of one, `chunk` the bytes of a copy; `bounds`
    deals pieces to places; block i takes in layer n the place (i + n * turn) mod blocks, so that
    the larger shares go round (what follows the layers counts as one more). A phase that every
    block runs for itself has none of these.
    """
    if t.blocks < 1:
        raise Infeasible(f"{t.blocks} blocks: a schedule needs at least one")
    for phase, _ in phases(module):
        stream = phase.stream()
        if not stream:
            if phase.phase.data not in ALONE:
                _pieces(phase, t, batch * _cells(module), 0, 0)
            continue
        rows, cols = extent(stream[0])
        name = phase.phase.data
        if name.startswith("attend"):
            pieces = 1 if "+" in name else t.kv_pieces
            _pieces(phase, t, batch * rows * pieces, 1, 0)
        else:
            splits = {"o": t.o_split, "down": t.down_split}.get(name, 1)
            wide = t.padded(cols) // splits
            each = t.head_cols if "head" in name else t.chunk_cols
            _pieces(phase, t, tile_count(rows) * splits, t.rows, -(-wide // each))
        phase.properties["turn"] = number(t.rotate)


def _cells(module: ModuleOp) -> int:
    """Head groups: the rows of the cache."""
    return next(extent(o)[0] for p, _ in phases(module) for o in p.stream()
                if o.kind.data == "attend")  # fmt: skip


def _pieces(phase: PhaseOp, t: GpuTiling, units: int, unit: int, parts: int) -> None:
    phase.properties["unit"] = number(unit)
    phase.properties["bounds"] = numbers(deal(units, t.blocks))
    phase.properties["turn"] = number(0)
    if parts:
        phase.properties["parts"] = number(parts)
        phase.properties["chunk"] = number(t.chunk_bytes)


def shares(phase: PhaseOp) -> list[int]:
    """Pieces of every place."""
    if phase.bounds is None:
        return []
    return [b - a for a, b in pairwise(phase.bounds.get_values())]
