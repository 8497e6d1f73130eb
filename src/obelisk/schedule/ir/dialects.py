"""Three dialects of the MLIR kind: operators of a step, tile tasks, micro-operations.

Gives xDSL operations and types whose text form reads back (`parse_module`, `print_module`).

- `step`: `operator` (one row of `OPERATORS`), `repeat` (layers that are alike), `yield`. Values
  have the type `!step.value<"x", 2048>`: where they are stored, and how many elements a slot has.
- `tile`: `phase` (operators that run as one, cut into tiles for every core; its second region is
  the task's micro-operations), `page` (where a value or a ring slot lies), `sync` (what keeps two
  phases apart).
- `micro`: `load`, `copy`, `wait`, `fragment`, `multiply`, `reduce`, `special`, `store`, `release`.
  A use of a result is a data edge; operands of the type `!micro.event` are resource edges.

The verifiers of the operations reject what no pass may produce.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

from xdsl.context import Context
from xdsl.dialects.builtin import (
    ArrayAttr,
    Builtin,
    DenseArrayBase,
    IntAttr,
    IntegerAttr,
    ModuleOp,
    StringAttr,
    i64,
)
from xdsl.ir import Attribute, Dialect, ParametrizedAttribute, Region, SSAValue, TypeAttribute
from xdsl.irdl import (
    IRDLOperation,
    irdl_attr_definition,
    irdl_op_definition,
    opt_prop_def,
    prop_def,
    region_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.parser import Parser
from xdsl.traits import IsTerminator, NoTerminator
from xdsl.utils.exceptions import ParseError as XdslParseError
from xdsl.utils.exceptions import VerifyException

from obelisk.base.errors import MalformedGraph, ParseError


@dataclass(frozen=True, slots=True)
class OperatorRow:
    """What an operator takes and gives.

    Attributes:
        inputs, outputs: how many values.
        weights: whether it streams a matrix (or, for attention, the cache).
        says: its meaning in words.
    """

    inputs: int
    outputs: int
    weights: bool
    says: str


OPERATORS: Mapping[str, OperatorRow] = MappingProxyType({
    "token": OperatorRow(0, 1, False, "the token that the step before left"),
    "embed": OperatorRow(1, 1, False, "the token's row of the embedding"),
    "norm": OperatorRow(1, 1, False, "RMS norm with a gain"),
    "product": OperatorRow(1, 1, True, "rows of a matrix times a vector for each slot"),
    "rotate": OperatorRow(1, 3, False, "head norms and rotation: queries, key, value"),
    "append": OperatorRow(2, 1, False, "the key and value of this position into the cache"),
    "attend": OperatorRow(2, 1, True, "online softmax over pieces of the context"),
    "combine": OperatorRow(1, 1, False, "joins the pieces"),
    "join": OperatorRow(1, 1, False, "adds the parts of a product"),
    "gate": OperatorRow(1, 1, False, "silu(gate) * up"),
    "add": OperatorRow(2, 1, False, "onto the residual stream"),
    "best": OperatorRow(1, 2, False, "logits and the largest of a tile"),
    "sample": OperatorRow(2, 1, False, "the next token"),
})  # fmt: skip


def number(value: int) -> IntegerAttr:
    """An i64 attribute."""
    return IntegerAttr(value, i64)


def numbers(values: Sequence[int]) -> DenseArrayBase:
    """An i64 array attribute."""
    return DenseArrayBase.from_list(i64, list(values))


@irdl_attr_definition
class ValueType(ParametrizedAttribute, TypeAttribute):
    """A value of the step: the storage that it lives in, and its elements for each slot."""

    name = "step.value"
    storage: StringAttr
    width: IntAttr


def value_type(storage: str, width: int) -> ValueType:
    """The type of a value."""
    return ValueType(StringAttr(storage), IntAttr(width))


@irdl_attr_definition
class EventType(ParametrizedAttribute, TypeAttribute):
    """That something has happened: a copy has landed, a slot is free."""

    name = "micro.event"


@irdl_attr_definition
class RegisterType(ParametrizedAttribute, TypeAttribute):
    """A result in registers: how many 32-bit registers of a thread it takes."""

    name = "micro.registers"
    count: IntAttr


@irdl_op_definition
class OperatorOp(IRDLOperation):
    """One operator of the step."""

    name = "step.operator"
    inputs = var_operand_def(ValueType)
    outputs = var_result_def(ValueType)
    kind = prop_def(StringAttr)
    matrix = opt_prop_def(StringAttr)
    rows = opt_prop_def(IntegerAttr)
    cols = opt_prop_def(IntegerAttr)

    def __init__(
        self, kind: str, inputs: Sequence[SSAValue], outputs: Sequence[ValueType],
        matrix: str | None = None, rows: int = 0, cols: int = 0,
    ) -> None:  # fmt: skip
        props: dict[str, Attribute] = {"kind": StringAttr(kind)}
        if matrix is not None:
            props |= {"matrix": StringAttr(matrix), "rows": number(rows), "cols": number(cols)}
        super().__init__(operands=[list(inputs)], result_types=[list(outputs)], properties=props)

    def verify_(self) -> None:
        """The row of the table: arity, and a matrix where one is streamed."""
        row = OPERATORS.get(self.kind.data)
        if row is None:
            raise VerifyException(f"no operator {self.kind.data!r}: {', '.join(OPERATORS)}")
        if (len(self.inputs), len(self.outputs)) != (row.inputs, row.outputs):
            raise VerifyException(
                f"{self.kind.data} has {len(self.inputs)} inputs and {len(self.outputs)} outputs, "
                f"expected {row.inputs} and {row.outputs}"
            )
        if row.weights and (self.matrix is None or self.rows is None or self.cols is None):
            raise VerifyException(f"{self.kind.data} streams, but names no matrix, rows and cols")


@irdl_op_definition
class YieldOp(IRDLOperation):
    """What a region gives."""

    name = "step.yield"
    values = var_operand_def(ValueType)
    traits = traits_def(IsTerminator())

    def __init__(self, values: Sequence[SSAValue]) -> None:
        super().__init__(operands=[list(values)])


@irdl_op_definition
class RepeatOp(IRDLOperation):
    """Layers that are alike: the region's values go round `count` times."""

    name = "step.repeat"
    inputs = var_operand_def(ValueType)
    outputs = var_result_def(ValueType)
    count = prop_def(IntegerAttr)
    body = region_def("single_block")

    def __init__(
        self, inputs: Sequence[SSAValue], outputs: Sequence[ValueType], count: int, body: Region
    ) -> None:
        super().__init__(
            operands=[list(inputs)], result_types=[list(outputs)],
            properties={"count": number(count)}, regions=[body],
        )  # fmt: skip

    def verify_(self) -> None:
        """What goes in, round and out has the same types."""
        inner = [a.type for a in self.body.block.args]
        last = self.body.block.last_op
        given = [v.type for v in last.values] if isinstance(last, YieldOp) else None
        outer = [v.type for v in self.inputs]
        if not inner == outer == given == [v.type for v in self.outputs]:
            raise VerifyException("a repeat's values change their types on the way round")
        if self.count.value.data < 1:
            raise VerifyException(f"a repeat runs {self.count.value.data} times")


@irdl_op_definition
class PhaseOp(IRDLOperation):
    """Operators that run as one, and how they are cut.

    Properties: `phase` its name; after tiling `unit` (rows of the smallest piece dealt out),
    `bounds` (place i has the pieces bounds[i] to bounds[i+1]), `turn` (places that a block moves on
    with each layer), `chunk` (bytes of one copy) and `parts` (chunks that a piece is cut into along
    K); after ordering `order` (cycles of one chunk, live registers, fragments read ahead).
    """

    name = "tile.phase"
    results_ = var_result_def(ValueType)
    phase = prop_def(StringAttr)
    unit = opt_prop_def(IntegerAttr)
    bounds = opt_prop_def(DenseArrayBase)
    turn = opt_prop_def(IntegerAttr)
    chunk = opt_prop_def(IntegerAttr)
    parts = opt_prop_def(IntegerAttr)
    order = opt_prop_def(DenseArrayBase)
    body = region_def("single_block")
    micro = region_def()
    traits = traits_def(NoTerminator())

    def __init__(self, phase: str, results: Sequence[Attribute], body: Region) -> None:
        super().__init__(
            result_types=[list(results)], properties={"phase": StringAttr(phase)},
            regions=[body, Region()],
        )  # fmt: skip

    def operators(self) -> list[OperatorOp]:
        """The operators inside, in order."""
        return [op for op in self.body.block.ops if isinstance(op, OperatorOp)]

    def stream(self) -> list[OperatorOp]:
        """The operators that stream from memory."""
        return [op for op in self.operators() if OPERATORS[op.kind.data].weights]

    def verify_(self) -> None:
        """Yields its results; bounds never fall; chunks divide into 16-byte pieces."""
        last = self.body.block.last_op
        if not isinstance(last, YieldOp):
            raise VerifyException(f"phase {self.phase.data} yields nothing")
        if [v.type for v in last.values] != [v.type for v in self.results_]:
            raise VerifyException(f"phase {self.phase.data} yields what are not its results")
        if self.bounds is not None:
            cut = self.bounds.get_values()
            if any(b < a for a, b in pairwise(cut)) or cut[:1] != (0,):
                raise VerifyException(f"the bounds of phase {self.phase.data} are no cut: {cut}")
        if self.chunk is not None and self.chunk.value.data % 16:
            raise VerifyException(
                f"chunks of phase {self.phase.data} are {self.chunk.value.data} bytes: copies take "
                "16 at a time"
            )


SYNC_FORMS = ("barrier", "tagged", "program")


@irdl_op_definition
class SyncOp(IRDLOperation):
    """What keeps a phase behind another: a barrier of all blocks, tags on the
    words themselves, or program order."""

    name = "tile.sync"
    form = prop_def(StringAttr)
    before = prop_def(StringAttr)
    after = prop_def(StringAttr)
    values = prop_def(ArrayAttr[StringAttr])
    count = prop_def(IntegerAttr)

    def __init__(
        self, form: str, before: str, after: str, values: Sequence[str], count: int
    ) -> None:
        super().__init__(properties={
            "form": StringAttr(form), "before": StringAttr(before), "after": StringAttr(after),
            "values": ArrayAttr([StringAttr(v) for v in values]), "count": number(count),
        })  # fmt: skip

    def verify_(self) -> None:
        """A known form."""
        if self.form.data not in SYNC_FORMS:
            raise VerifyException(f"sync by {self.form.data!r}: known are {', '.join(SYNC_FORMS)}")


MEMORIES = ("device", "shared")


@irdl_op_definition
class PageOp(IRDLOperation):
    """Where a value lies: offset and size (device: words of 8 bytes; shared: bytes), copies that
    the layers use in turn, and from which to which phase of a layer it must stay there.
    """

    name = "tile.page"
    value = prop_def(StringAttr)
    memory = prop_def(StringAttr)
    offset = prop_def(IntegerAttr)
    size = prop_def(IntegerAttr)
    first = prop_def(IntegerAttr)
    last = prop_def(IntegerAttr)
    copies = prop_def(IntegerAttr)

    def __init__(
        self, value: str, memory: str, offset: int, size: int, first: int, last: int,
        copies: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(properties={
            "value": StringAttr(value), "memory": StringAttr(memory), "offset": number(offset),
            "size": number(size), "first": number(first), "last": number(last),
            "copies": number(copies),
        })  # fmt: skip

    def verify_(self) -> None:
        """A known memory, whole 16-byte pieces."""
        if self.memory.data not in MEMORIES:
            raise VerifyException(f"no memory {self.memory.data!r}: {', '.join(MEMORIES)}")
        if self.offset.value.data % 16 or self.size.value.data < 0 or self.offset.value.data < 0:
            raise VerifyException(f"the page of {self.value.data} begins within 16 bytes")
        if self.copies.value.data < 1:
            raise VerifyException(f"{self.copies.value.data} copies of {self.value.data}")


class MicroOp(IRDLOperation, ABC):
    """A micro-operation: the role that runs it, the unit that issues it, cycles of issue and of
    latency. Operands are what it uses (registers) and what it waits for (events).
    """

    uses = var_operand_def()
    gives = var_result_def()
    role = prop_def(StringAttr)
    issue = prop_def(IntegerAttr)
    latency = prop_def(IntegerAttr)

    def __init__(
        self, role: str, uses: Sequence[SSAValue], gives: Sequence[Attribute],
        issue: int, latency: int,
    ) -> None:  # fmt: skip
        super().__init__(
            operands=[list(uses)], result_types=[list(gives)],
            properties={
                "role": StringAttr(role), "issue": number(issue), "latency": number(latency)
            },
        )  # fmt: skip

    def verify_(self) -> None:
        """Latency covers issue; results are registers or events."""
        if self.latency.value.data < self.issue.value.data or self.issue.value.data < 1:
            raise VerifyException(f"{self.name}: a latency below the cycles of issue")
        for value in (*self.uses, *self.gives):
            if not isinstance(value.type, RegisterType | EventType):
                raise VerifyException(f"{self.name} handles {value.type}")

    @property
    def registers(self) -> int:
        """Registers of its results."""
        return sum(v.type.count.data for v in self.gives if isinstance(v.type, RegisterType))


@irdl_op_definition
class LoadOp(MicroOp):
    """Activations of a slot into registers."""

    name = "micro.load"


@irdl_op_definition
class CopyOp(MicroOp):
    """A chunk from device memory into a ring slot, by the loader; gives the event of its
    landing.
    """

    name = "micro.copy"


@irdl_op_definition
class WaitOp(MicroOp):
    """Until a copy has landed."""

    name = "micro.wait"


@irdl_op_definition
class FragmentOp(MicroOp):
    """16 bytes a lane from a ring slot into registers."""

    name = "micro.fragment"


@irdl_op_definition
class MultiplyOp(MicroOp):
    """A fragment times the activations, onto the sums."""

    name = "micro.multiply"


@irdl_op_definition
class ReduceOp(MicroOp):
    """Sums joined over the lanes of a warp, or over warps."""

    name = "micro.reduce"


@irdl_op_definition
class SpecialOp(MicroOp):
    """An exponential, a root, or an angle's sine."""

    name = "micro.special"


@irdl_op_definition
class StoreOp(MicroOp):
    """Results to device memory."""

    name = "micro.store"


@irdl_op_definition
class ReleaseOp(MicroOp):
    """A ring slot back to the loader."""

    name = "micro.release"


MICRO: tuple[type[MicroOp], ...] = (
    LoadOp, CopyOp, WaitOp, FragmentOp, MultiplyOp, ReduceOp, SpecialOp, StoreOp, ReleaseOp
)  # fmt: skip
UNITS: Mapping[str, str] = MappingProxyType({
    "micro.load": "shared", "micro.copy": "copy", "micro.wait": "sync", "micro.fragment": "shared",
    "micro.multiply": "math", "micro.reduce": "shuffle", "micro.special": "special",
    "micro.store": "memory", "micro.release": "sync",
})  # fmt: skip
STEP = Dialect("step", [OperatorOp, YieldOp, RepeatOp], [ValueType])
TILE = Dialect("tile", [PhaseOp, SyncOp, PageOp], [])
MICRO_DIALECT = Dialect("micro", list(MICRO), [EventType, RegisterType])


def context() -> Context:
    """A context that knows the dialects."""
    out = Context()
    for dialect in (Builtin, STEP, TILE, MICRO_DIALECT):
        out.load_dialect(dialect)
    return out


def print_module(module: ModuleOp) -> str:
    """The text form."""
    return str(module) + "\n"


def parse_module(text: str, source: str = "<text>") -> ModuleOp:
    """The module of a text form, verified.

    Raises `ParseError` for text that is none, `MalformedGraph` for a module that breaks a rule.
    """
    try:
        module = Parser(context(), text, source).parse_module()
    except (XdslParseError, ValueError) as error:  # a type that ends too soon is the latter
        raise ParseError(f"{source} is no module: {error}") from None
    verify_module(module)
    return module


def verify_module(module: ModuleOp) -> None:
    """Raise `MalformedGraph` when a rule of the dialects is broken."""
    try:
        module.verify()
    except VerifyException as error:
        raise MalformedGraph(f"the module breaks a rule: {error}") from None
