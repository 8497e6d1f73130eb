"""Each rule of the prover is an identity: evaluated in floats and in the fields on random operands.

Patterns are evaluated over arrays whose axes are one free index and the digits that the sets A, B
and C stand for, so that the side conditions are met by construction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from obelisk.ir.table import TABLE
from obelisk.verify.fields import ROOT_P, FieldAlgebra, Residues
from obelisk.verify.growth import CONSTANT
from obelisk.verify.modular import P, Q
from obelisk.verify.rules import AXIOMS, RULES, Rule, program_text

FREE, A_AXIS, B_AXIS = 4, 1, 2
EXTENTS = {"A": 3, "B": 5, "C": 15}
AXES = {"A": (-2,), "B": (-1,), "C": (-2, -1)}
SHAPE = (FREE, EXTENTS["A"], EXTENTS["B"])

Expr = Any  # a name, a quoted string, or a list of a head and operands


def parse(text: str) -> Expr:
    """An S-expression as nested lists."""
    tokens = re.findall(r'\(|\)|"[^"]*"|[^\s()]+', text)

    def read(at: int) -> tuple[Expr, int]:
        if tokens[at] != "(":
            return tokens[at], at + 1
        out: list[Expr] = []
        at += 1
        while tokens[at] != ")":
            part, at = read(at)
            out.append(part)
        return out, at + 1

    return read(0)[0]


@dataclass
class Domain:
    """How to make operands and apply constructors in one kind of arithmetic."""

    number: Callable[[float], Any]
    operand: Callable[[tuple[int, ...], bool, bool], Any]
    call: dict[str, Callable[..., Any]]
    fold: Callable[[str, Any, tuple[int, ...]], Any]


def names(expr: Expr) -> set[str]:
    if isinstance(expr, str):
        return {expr} if re.fullmatch(r"[a-z]", expr) else set()
    return set().union(*(names(e) for e in expr[1:]))


def evaluate(expr: Expr, env: dict[str, Any], domain: Domain) -> Any:
    if isinstance(expr, str):
        return env[expr]
    head, *rest = expr
    if head == "Num":
        return env["n"] if rest[0] == "n" else domain.number(float(rest[0]))
    if head in ("Sum", "RMax"):
        return domain.fold(head, evaluate(rest[1], env, domain), AXES[rest[0]])
    if head.startswith("Fn"):
        return domain.call[rest[0].strip('"')](*(evaluate(r, env, domain) for r in rest[1:]))
    return domain.call[head](*(evaluate(r, env, domain) for r in rest))


def operands(rule: Rule, domain: Domain) -> dict[str, Any]:
    """Random operands that meet the rule's conditions."""
    conditions = [parse(w) for w in rule.when]
    still = {c[1]: c[2] for c in conditions if c[0] == "Indep"}
    positive = {c[1] for c in conditions if c[0] == "NonNeg"}
    env: dict[str, Any] = {}
    for name in sorted(names(parse(rule.left)) | names(parse(rule.right))):
        shape = list(SHAPE)
        for axis in AXES[still[name]] if name in still else ():
            shape[axis] = 1
        is_condition = f'"where" {name}' in rule.left
        env[name] = domain.operand(tuple(shape), name in positive, is_condition)
    for c in conditions:
        if c[0] == "Extent":
            env[c[2]] = domain.number(float(EXTENTS[c[1]]))
    return env


def floats(seed: int) -> Domain:
    rng = np.random.default_rng(seed)

    def operand(shape: tuple[int, ...], positive: bool, condition: bool) -> Any:
        if condition:
            return rng.integers(0, 2, shape).astype(bool)
        x = rng.standard_normal(shape)
        return np.abs(x) if positive else x

    def fold(kind: str, x: Any, axes: tuple[int, ...]) -> Any:
        whole = np.broadcast_to(x, np.broadcast_shapes(np.shape(x), SHAPE))
        return (np.sum if kind == "Sum" else np.max)(whole, axis=axes, keepdims=True)

    call = {
        "Add": np.add, "Mul": np.multiply, "Max": np.maximum, "Inv": lambda x: 1 / x, "Exp": np.exp,
        "Sqrt": np.sqrt, "where": np.where,
    }  # fmt: skip
    return Domain(lambda x: x, operand, call, fold)


def fields(seed: int) -> Domain:
    rng = np.random.default_rng(seed)
    f = FieldAlgebra(rng)

    def operand(shape: tuple[int, ...], positive: bool, condition: bool) -> Any:
        if condition:
            return Residues(rng.integers(0, 2, shape), None, None, CONSTANT, plain=True)
        x = Residues(rng.integers(1, P, shape), rng.integers(1, Q, shape), None, CONSTANT)
        return f.square(x) if positive else x

    def fold(kind: str, x: Residues, axes: tuple[int, ...]) -> Residues:
        whole = f.structural(lambda a: np.broadcast_to(a, np.broadcast_shapes(a.shape, SHAPE)), x)
        for axis in axes:
            whole = (f.sum if kind == "Sum" else f.reduce_max)(whole, axis, 1)
        return whole

    one = f.const(1.0)
    call = {
        "Add": f.add, "Mul": f.mul, "Max": f.max, "Inv": lambda x: f.div(one, x), "Exp": f.exp,
        "Sqrt": f.sqrt, "where": f.where,
    }  # fmt: skip
    return Domain(f.const, operand, call, fold)


# A random total order of residues knows nothing of addition or positive factors: floats only.
ORDERED = {"rmax_of_shifted", "rmax_of_scaled", "add_of_max"}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_rule_holds_in_floats(rule: Rule) -> None:
    for seed in range(20):
        domain = floats(seed)
        env = operands(rule, domain)
        with np.errstate(invalid="ignore"):
            left = evaluate(parse(rule.left), env, domain)
            right = evaluate(parse(rule.right), env, domain)
        left, right = np.broadcast_arrays(left, right)
        both = np.isfinite(left) & np.isfinite(right)
        assert both.any()
        np.testing.assert_allclose(left[both], right[both], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rule", [r for r in RULES if r.name not in ORDERED], ids=lambda r: r.name)
def test_rule_holds_in_the_fields(rule: Rule) -> None:
    compared = 0
    for seed in range(6):
        domain = fields(seed)
        env = operands(rule, domain)
        left = evaluate(parse(rule.left), env, domain)
        right = evaluate(parse(rule.right), env, domain)
        clear = ((left.bits | np.zeros_like(right.bits)) | right.bits) & ROOT_P == 0
        p, q = np.broadcast_arrays(left.p, right.p)
        clear = np.broadcast_to(clear, p.shape)
        assert (p == q)[clear].all()
        compared += int(clear.sum())
    assert compared >= 6


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("sum_of_scaled", "(Indep a A)"),
        ("rmax_of_constant", "(Indep a A)"),
        ("sum_of_constant", "(Indep a A)"),
        ("rmax_of_scaled", "(NonNeg a)"),
        ("sqrt_of_product", "(NonNeg a)"),
        ("sqrt_squared", "(NonNeg a)"),
    ],
)
def test_side_conditions_are_needed(name: str, broken: str) -> None:
    """Without the condition the identity fails: the test above is able to fail."""
    rule = next(r for r in RULES if r.name == name)
    free = Rule(rule.name, rule.left, rule.right, tuple(w for w in rule.when if w != broken))
    wrong = False
    for seed in range(10):
        domain = floats(seed)
        env = operands(free, domain)
        with np.errstate(invalid="ignore"):
            left = evaluate(parse(rule.left), env, domain)
            right = evaluate(parse(rule.right), env, domain)
        left, right = np.broadcast_arrays(left, right)
        if broken == "(NonNeg a)" and name.startswith("sqrt"):
            wrong = wrong or bool((np.isnan(left) != np.isnan(right)).any())
        else:
            wrong = wrong or not np.allclose(left, right)
    assert wrong


def test_every_law_of_the_operator_table_is_known_here() -> None:
    known = {r.name for r in RULES} | {"translation"}
    for op, row in TABLE.items():
        for axiom in row.axioms:
            assert axiom in AXIOMS, f"{op.value}: {axiom}"
    for axiom, rules in AXIOMS.items():
        assert rules, axiom
        assert set(rules) <= known, axiom


def test_program_text_holds_each_rule_that_applies() -> None:
    everything, masked = program_text(True, True), program_text(False, True)
    count = sum(1 + r.both for r in RULES)
    assert everything.count("(rewrite") == count + 3
    assert masked.count("(rewrite") == everything.count("(rewrite") - sum(
        1 + r.both for r in RULES if r.finite
    )
    assert "Steady A S" not in program_text(True, False)
