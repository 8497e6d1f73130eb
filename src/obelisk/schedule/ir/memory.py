"""Pages and synchronisation: where values lie, how many copies they need, what keeps phases apart.

`assign_pages` writes a `tile.page` for every tagged value and every buffer of a block's shared
memory; `insert_sync` writes a `tile.sync` for every data edge between phases. Both read the phases'
SSA values alone, so an edge that a rewrite adds is synchronised without being named.

How many copies a value needs follows from who knows what. A block that reads all words of a value
knows that whoever wrote any of them has done all it did before; if every block wrote some, every
block has. Words may be written again once every reader is known to be past them in this way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import BlockArgument, Operation, OpResult, SSAValue

from obelisk.plan.layout import align
from obelisk.schedule.gpu import EdgeSync, GpuTiling, SharedPlan
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.schedule.ir.dialects import PageOp, PhaseOp, RepeatOp, SyncOp, ValueType, YieldOp
from obelisk.schedule.ir.passes import ALONE, phases, repeat_of, shares

PRIVATE = ("x", "h", "token")  # storage of a block alone
_LINE = 16  # words that a page's length is rounded up to


@dataclass(slots=True)
class Edge:
    """A value that goes from one phase to another: in the same layer, or to the next one."""

    before: str
    after: str
    storage: list[str] = field(default_factory=list)
    next_layer: bool = False


def producer(value: SSAValue) -> tuple[PhaseOp | None, bool]:
    """The phase that makes a value (None: what the step begins with), and whether it belongs to the
    layer before: a repeat's argument comes round from its yield.
    """
    owner = value.owner
    assert isinstance(value, OpResult | BlockArgument)
    if isinstance(owner, PhaseOp):
        return owner, False
    if isinstance(owner, RepeatOp):
        last = owner.body.block.last_op
        assert isinstance(last, YieldOp)
        return producer(last.values[value.index])[0], False
    if isinstance(owner, Operation):
        return None, False
    repeat = owner.parent_op()  # a block argument
    assert isinstance(repeat, RepeatOp)
    last = repeat.body.block.last_op
    assert isinstance(last, YieldOp)
    return producer(last.values[value.index])[0], True


def edges(module: ModuleOp) -> list[Edge]:
    """Every data edge between phases, in the order of the reading phases."""
    out: dict[tuple[str, str, bool], Edge] = {}
    for phase, _ in phases(module):
        for op in phase.operators():
            for value in op.inputs:
                if isinstance(value.owner, Operation) and value.owner.parent_op() is phase:
                    continue
                made, wraps = producer(value)
                if made is None:
                    continue
                assert isinstance(value.type, ValueType)
                key = (made.phase.data, phase.phase.data, wraps)
                edge = out.setdefault(key, Edge(*key[:2], next_layer=wraps))
                if value.type.storage.data not in edge.storage:
                    edge.storage.append(value.type.storage.data)
    return list(out.values())


# ---- synchronisation ----
def insert_sync(module: ModuleOp, t: GpuTiling) -> None:
    """A `tile.sync` in front of each phase for every phase whose values it reads: `program` where
    the value is the block's own, `barrier` where the tiling says so, else `tagged`.
    """
    by_name = {p.phase.data: p for p, _ in phases(module)}
    for edge in edges(module):
        phase = by_name[edge.after]
        for storage in edge.storage:
            if storage in PRIVATE or edge.before in ALONE:
                form = "program"
            else:
                name = edge.before.split("+")[-1]
                form = EdgeSync.TAGGED.value
                if t.sync(name) is EdgeSync.BARRIER:
                    form = EdgeSync.BARRIER.value
            block = phase.parent_block()
            assert block is not None
            made = SyncOp(form, edge.before, edge.after, [storage], int(edge.next_layer))
            block.insert_op_before(made, phase)


def syncs(module: ModuleOp) -> list[SyncOp]:
    """All `tile.sync` operations, in order."""
    outer = list(module.body.block.ops)
    inner = list(repeat_of(module).body.block.ops)
    return [op for op in (*inner, *outer) if isinstance(op, SyncOp)]


# ---- copies ----
class _Knowledge:
    """Which phases a block knows to be finished by all blocks when it has read a whole value."""

    def __init__(self, module: ModuleOp, blocks: int) -> None:
        self.order = [p.phase.data for p, n in phases(module) if p.parent_op() is not module]
        self.full = {
            p.phase.data for p, _ in phases(module) if min(shares(p), default=0) > 0
        }  # every block has a piece
        self.reads: dict[str, list[Edge]] = {}
        for edge in edges(module):
            if any(s not in PRIVATE for s in edge.storage):
                self.reads.setdefault(edge.after, []).append(edge)

    def chain(self, phase: str, layer: int, depth: int = 12) -> set[tuple[str, int]]:
        """Phases (with their layer) whose writers have all passed them once all words of `phase`
        are there: its own, and what these had read among them.
        """
        out = {(phase, layer)}
        if depth:
            for edge in self.reads.get(phase, []):
                out |= self.chain(edge.before, layer - edge.next_layer, depth - 1)
        return out

    def copies(self, phase: str, most: int) -> int:
        """How many copies of a phase's words are enough: a writer, `copies` layers later, must know
        that every block has passed a phase at or behind the words' last reader.
        """
        at = {name: i for i, name in enumerate(self.order)}
        last = divmod(self.last_reader(phase), len(self.order))
        before = [n for n in self.order[: at[phase] + 1] if n in JOINS]
        for n in range(1, most):
            known: set[tuple[str, int]] = set()
            for name in before:
                for edge in self.reads.get(name, []):
                    known |= self.chain(edge.before, n - edge.next_layer)
            if any(self._past(p, (layer, at[p]), last) for p, layer in known if p in at):
                return n
        return most

    def _past(self, phase: str, where: tuple[int, int], last: tuple[int, int]) -> bool:
        """Whether the writers of a phase being past it means that the readers at `last` are: every
        block writes in it, or they are its writers themselves.
        """
        own = phase not in JOINS and where == last
        return own or (where >= last and phase in self.full)

    def last_reader(self, phase: str) -> int:
        """The last phase that reads a phase's words, counted on over layers."""
        at = {name: i for i, name in enumerate(self.order)}
        readers = [
            len(self.order) * e.next_layer + at[e.after]
            for listed in self.reads.values() for e in listed
            if e.before == phase and e.after in at
        ]  # fmt: skip
        return max(readers, default=at[phase])


JOINS = ("qkv", "up", "head")  # phases in which every block reads all of its input


# ---- pages ----
def _words(storage: str, width: int, step: GpuStep) -> int:
    """Words of a value: the MLP carries `GpuStep.packed` elements in one."""
    match storage:
        case "best":
            return 2 * step.batch * step.tiling.blocks
        case "act":
            return step.batch * -(-width // step.packed)
        case "part" | "attn":
            return step.widths["attend"]
        case _:
            return step.batch * width


def assign_pages(module: ModuleOp, step: GpuStep, plan: SharedPlan) -> None:
    """Device pages of tagged values (words), then the block's shared pages (bytes), each held from
    its first to its last phase of a layer.

    Inputs of all products share one page, for a block has one at a time; the residual rows that the
    output projection adds to are read when the layer begins, those of the down projection when the
    MLP does, so they share one, too.
    """
    know = _Knowledge(module, step.tiling.blocks)
    order = know.order
    at, made, seen = 0, [], set()
    for phase, count in phases(module):
        name = phase.phase.data
        for result in phase.results_:
            assert isinstance(result.type, ValueType)
            storage = result.type.storage.data
            if storage in PRIVATE or storage in seen or name in ALONE or storage == "logits":
                continue
            seen.add(storage)
            words = _words(storage, result.type.width.data, step)
            copies = know.copies(name, count) if count > 1 and name in order else 1
            size = align(words, _LINE)
            life = (order.index(name), know.last_reader(name)) if name in order else (0, 0)
            made.append(PageOp(name, "device", at, size, *life, copies))
            at += size * copies
    index = {name: i for i, name in enumerate(order)}
    made += _shared(plan, index)
    first = module.body.block.first_op
    for page in made:
        assert first is not None
        module.body.block.insert_op_before(page, first)


def _shared(plan: SharedPlan, index: dict[str, int]) -> list[PageOp]:
    end = len(index) - 1
    sums = plan.inputs
    residual = sums + plan.sums
    staged = residual + plan.residual
    spans = [
        (f"inputs.{name}", 0, plan.inputs, i, i) for name, i in index.items()
    ] + [
        (f"sums.{name}", sums, plan.sums, i, i) for name, i in index.items() if name != "attend"
    ]  # fmt: skip
    if plan.residual:
        spans.append(("residual.o", residual, plan.residual, index["qkv"], index["o"]))
        spans.append(("residual.down", residual, plan.residual, index["up"], index["down"]))
    for name, at, size in (
        ("staged", staged, plan.staged), ("direct", staged + plan.staged, plan.direct),
        ("ring", plan.dynamic - plan.ring, plan.ring),
    ):  # fmt: skip
        if size:
            spans.append((name, at, size, 0, end))
    spans.append(("misc", plan.dynamic, plan.misc, 0, end))
    return [PageOp(n, "shared", o, s, a, b) for n, o, s, a, b in spans]
