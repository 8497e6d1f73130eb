"""The operator table is complete: every operator has a row, and every cell of it resolves.

Proves that a stage which dispatches on the table finds what it needs for each operator, that each
row refuses the wrong number of operands and foreign attributes, and that the level rules and the
attribute codec cover all operators.
"""

from __future__ import annotations

import re

import pytest

from obelisk.base.errors import DTypeError, MalformedGraph, ShapeError
from obelisk.ir import TABLE, DType, Kind, Op
from obelisk.ir import build as b
from obelisk.ir.codec import FIELDS
from obelisk.ir.node import make
from obelisk.ir.op import ConstAttrs, SizeScope
from obelisk.ir.spec import LEVELS

ELEMENTWISE = (Kind.UNARY, Kind.BINARY, Kind.TERNARY)
# Evaluated by the interpreter's own walk: leaves, loop state and nested graphs.
WALKED = {op for op, row in TABLE.items() if row.kind in (Kind.LEAF, Kind.LOOP, Kind.GRAPH)}


def test_every_operator_has_a_row() -> None:
    assert set(TABLE) == set(Op)


@pytest.mark.parametrize("op", list(Op), ids=lambda op: op.value)
def test_cells_resolve(op: Op) -> None:
    row = TABLE[op]
    low, high = row.arity
    assert 0 <= low <= high
    assert (high == 0 or op is Op.SIZE) == (row.kind is Kind.LEAF)
    assert {Kind.UNARY: 1, Kind.BINARY: 2, Kind.TERNARY: 3}.get(row.kind, low) == low
    assert callable(row.infer)
    assert (row.numpy is None) == (op in WALKED)
    assert row.field
    assert row.term
    assert row.field.isidentifier()
    assert row.term.isidentifier()
    assert all(a.isidentifier() for a in row.axioms)
    assert row.flops >= 0
    assert bool(row.emit) == (row.kind in ELEMENTWISE)
    if row.emit:
        used = {int(k) for k in re.findall(r"\{(\d)\}", row.emit)}
        assert used == set(range(low)), "the template uses each operand"
    if row.attrs is not None:
        fields = {f.name for f in FIELDS[row.attrs]}
        assert fields == set(row.attrs.__dataclass_fields__), "the text form knows each attribute"


def test_terms_are_distinct() -> None:
    terms = [row.term for row in TABLE.values()]
    assert len(set(terms)) == len(terms)


@pytest.mark.parametrize("op", list(Op), ids=lambda op: op.value)
def test_wrong_operand_count_is_refused(op: Op) -> None:
    x = b.input_node(0, (2, 2))
    too_many = (x,) * (TABLE[op].arity[1] + 1)
    with pytest.raises(MalformedGraph, match=rf"{op.value} takes .* got {len(too_many)}"):
        make(op, too_many, None)


@pytest.mark.parametrize("op", list(Op), ids=lambda op: op.value)
def test_foreign_attributes_are_refused(op: Op) -> None:
    x = b.input_node(0, (2, 2))
    wrong = None if TABLE[op].attrs is not None else ConstAttrs(1.0)
    with pytest.raises(MalformedGraph, match=op.value):
        make(op, (x,) * TABLE[op].arity[0], wrong)


def test_every_operator_stands_on_some_level() -> None:
    assert set().union(*(rules.ops for rules in LEVELS.values())) == set(Op)
    for rules in LEVELS.values():
        others = {r.leaf for r in LEVELS.values()} - {rules.leaf}
        assert not others & rules.ops, "a level reads only through its own leaf"


@pytest.mark.parametrize(
    ("build", "error", "text"),
    [
        (lambda x, i: b.matmul(x, x), ShapeError, "contraction extents 3 and 2"),
        (lambda x, i: b.add(x, b.input_node(1, (2, 4))), ShapeError, r"\(2, 3\).*\(2, 4\)"),
        (lambda x, i: b.exp(i), DTypeError, "exp needs a floating-point operand, got i32"),
        (lambda x, i: b.div(i, i), DTypeError, "div needs floating-point"),
        (lambda x, i: b.add(x, i), DTypeError, "cast one of them"),
        (lambda x, i: b.add(b.less(x, x), b.less(x, x)), DTypeError, "bool"),
        (lambda x, i: b.where(x, x, x), DTypeError, "bool condition, got f32"),
        (lambda x, i: b.sum(x, 2), ShapeError, "axis 2 of a value of rank 2"),
        (lambda x, i: b.sum(x, 1, 2), ShapeError, "must divide"),
        (lambda x, i: b.reshape(x, (4,)), ShapeError, "6 elements"),
        (lambda x, i: b.transpose(x, (0, 0)), ShapeError, "permutation"),
        (lambda x, i: b.slice(x, 1, 2, 5), ShapeError, "slice 2:5"),
        (lambda x, i: b.concat([x, b.input_node(1, (3, 4))], 0), ShapeError, "concat along 0"),
        (lambda x, i: b.broadcast(x, (4, 3)), ShapeError, r"broadcast"),
        (lambda x, i: b.const(float("nan")), MalformedGraph, "finite or -inf"),
        (lambda x, i: b.size(x, 0, SizeScope.FULL), MalformedGraph, "load"),
        (lambda x, i: b.input_node(0, (2, 0)), ShapeError, "at least 1"),
        (lambda x, i: b.input_node(0, (2, 2), DType.F32, (1,)), ShapeError, "one .* per dim"),
        (lambda x, i: b.concat([], 0), ShapeError, "nothing"),
    ],
)  # fmt: skip
def test_errors_name_what_does_not_fit(build, error, text) -> None:
    x, i = b.input_node(0, (2, 3)), b.input_node(1, (2, 3), DType.I32)
    with pytest.raises(error, match=text):
        build(x, i)
