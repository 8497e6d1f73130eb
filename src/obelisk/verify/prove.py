"""The proof judge: joins the terms of a program and a candidate in an e-graph.

Takes two graphs; gives `Proof`: joined or not, and why. Names index digits so that equal roles get
equal names on both sides (renaming bound digits is always allowed), states which formula is free of
which digits, and lets egglog saturate under the rules of `rules.py`, asking after each round
whether the two sides are one class. Rounds, size and time are capped: failing to prove means
nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from obelisk.base.errors import MissingDependency
from obelisk.ir.family import Linear
from obelisk.ir.graph import Graph
from obelisk.verify.rules import program_text
from obelisk.verify.terms import Goal, Index, Term, Translator, Unprovable, Var, goals

_ROUNDS = 12
_CALM_ROUNDS = 6  # rounds before the rules that make terms grow join in
_MOST_ROWS = 6_000
_MOST_MATCHES = 9_000  # about a tenth of a second
_MOST_SETS = 24


@dataclass(frozen=True, slots=True)
class Proof:
    """Outcome of the prover.

    Attributes:
        joined: the sides were shown equal.
        detail: rounds and nodes, or what stopped it.
        seconds: time taken.
    """

    joined: bool
    detail: str
    seconds: float


@cache
def _bindings() -> Any:
    """egglog's compiled module alone: importing the whole package takes ten times as long."""
    name = "egglog.bindings"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec("egglog")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(place).glob("bindings*")):
            if file.suffix in importlib.machinery.EXTENSION_SUFFIXES or file.suffix == ".so":
                loader = importlib.machinery.ExtensionFileLoader(name, str(file))
                own = importlib.util.spec_from_file_location(name, file, loader=loader)
                assert own is not None
                module = importlib.util.module_from_spec(own)
                loader.exec_module(module)
                return module
    raise MissingDependency("the prover needs egglog: pip install egglog")


class Prover:
    """Proves pairs of graphs; keeps one e-graph with the rules loaded, as loading takes longer than
    most proofs.
    """

    def __init__(self) -> None:
        self._engines: dict[tuple[bool, bool], _EGraph] = {}

    def prove(self, program: Graph, candidate: Graph) -> Proof:
        """Try to show that the graphs' outputs are equal, for every size at which their cuts align
        as here. The caps are on rounds and rows, not on time, so that the answer is always the
        same.
        """
        return self.settle(lambda: pose(program, candidate))

    def discharge(self, obligation: Obligation) -> Proof:
        """Try to discharge an obligation that was posed."""
        return self.settle(lambda: obligation)

    def settle(self, make: Callable[[], Obligation]) -> Proof:
        """Try to discharge an obligation; `make` may raise what posing one raises."""
        start = time.perf_counter()
        try:
            joined, detail = self._prove(make())
        except (Unprovable, RecursionError, MissingDependency) as e:
            joined, detail = False, str(e) or type(e).__name__
        return Proof(joined, detail, time.perf_counter() - start)

    def _prove(self, obligation: Obligation) -> tuple[bool, str]:
        namer, names = obligation.namer, obligation.names
        if all(a == b for a, b in names):
            return True, "the same formula"
        kind = (not namer.infinite, bool(namer.clipped))
        if kind not in self._engines:
            self._engines[kind] = _EGraph(*kind)
        engine = self._engines[kind]
        try:
            engine.run("(push)")
            return engine.saturate(namer, names)
        except BaseException:
            self._engines.clear()  # whatever state it was left in
            raise
        finally:
            if kind in self._engines:
                engine.run("(pop)")


@dataclass(frozen=True, slots=True)
class Obligation:
    """What has to be joined: the formulas of both sides, by name, and the facts about them.

    Attributes:
        text: all of it as text. Names and facts carry the roles of index digits, not their strides,
            and no extents but those that a proof may use. So equal texts are one problem: a proof
            for one is a proof for every pair of graphs, at whatever sizes, that poses the same.
    """

    text: str
    namer: _Namer
    names: list[tuple[str, str]]

    @property
    def infinite(self) -> bool:
        """Whether -inf occurs in it."""
        return self.namer.infinite


def pose(
    program: Graph,
    candidate: Graph,
    varying: Mapping[tuple[int, int], Linear] | None = None,
    infinite: bool = False,
) -> Obligation:
    """The obligation that program and candidate are equal. The extents of the input dims `varying`
    (input, dim) are kept out of it: of their digits only that they are filled is said, and sizes of
    such dims are symbols, positive numbers of which nothing else is known. With `infinite` inputs
    may be infinite, so that rules for finite operands stay away.

    Raises `Unprovable` where the graphs have no form for the prover.
    """
    translator = Translator(varying)
    wanted = goals(program, candidate, translator)
    namer = _Namer(translator, wanted, infinite)
    names = [(namer.goal(g.at, g.program), namer.goal(g.at, g.candidate)) for g in wanted]
    said = [f"(Goal {k} {a} {b})" for k, (a, b) in enumerate(names)]
    flags = f"; infinite {namer.infinite}, clipped {bool(namer.clipped)}"
    return Obligation("\n".join([flags, *namer.lines, *said, *namer.facts()]), namer, names)


def prove(program: Graph, candidate: Graph) -> Proof:
    """One proof attempt; see `Prover`."""
    return Prover().prove(program, candidate)


class _EGraph:
    """An egglog session with the rules loaded."""

    def __init__(self, finite: bool, clipped: bool) -> None:
        self.graph = _bindings().EGraph()
        self.run(program_text(finite, clipped))

    def run(self, text: str) -> list[Any]:
        """Run a program; raises `Unprovable` when the engine fails. Its panics are no ordinary
        exceptions.
        """
        try:
            out: list[Any] = self.graph.run_program(*self.graph.parse_program(text))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as e:
            raise Unprovable(f"e-graph: {e}") from None
        return out

    def equal(self, count: int) -> bool:
        """Whether the two sides of each goal are one class by now."""
        try:
            self.run("\n".join(f"(check (Goal {k} t t))" for k in range(count)))
        except Unprovable as e:
            if "Check failed" in str(e):
                return False
            raise
        return True

    def rows(self) -> int:
        """Rows of all tables."""
        (sizes,) = self.run("(print-size)")
        return sum(n for _, n in sizes.sizes)

    def saturate(self, namer: _Namer, names: list[tuple[str, str]]) -> tuple[bool, str]:
        """Insert the terms, then run rounds until the goals hold or a cap is met."""
        wanted = [f"(Goal {k} {a} {b})" for k, (a, b) in enumerate(names)]
        # One rule without conditions inserts everything: commands cost a millisecond each.
        actions = " ".join([*namer.lines, *wanted, *namer.facts()])
        self.run(f"(ruleset start)\n(rule () ({actions}) :ruleset start)\n(run start 1)")
        self.run("(run-schedule (saturate facts))")
        growing, rows = False, 0
        for rounds in range(_ROUNDS):
            if self.equal(len(names)):
                return True, f"joined after {rounds} rounds, {self.rows()} rows"
            matches = self.round(growing)
            rows = self.rows()
            if matches == 0 and growing:
                return False, f"not joined: saturated after {rounds + 1} rounds, {rows} rows"
            growing = growing or matches == 0 or rounds + 1 >= _CALM_ROUNDS
            # The next round may cost ten times as much as this one: look before it.
            if (matches > _MOST_MATCHES or rows > _MOST_ROWS) and not self.equal(len(names)):
                return False, f"not joined: too large after {rounds + 1} rounds, {rows} rows"
        joined = self.equal(len(names))
        return joined, f"{'joined' if joined else 'not joined'} after {_ROUNDS} rounds, {rows} rows"

    def round(self, growing: bool) -> int:
        """One round of rules, then of facts; how many matches it applied."""
        grow = "(run grow 1)\n" if growing else ""
        out = self.run(f"{grow}(run base 1)\n(run facts 2)")
        return sum(sum(part.report.num_matches_per_rule.values()) for part in out[:-1])


Key = tuple[int, int, int, int]  # input, dim, stride, extent


class _Namer:
    """Gives terms names in the e-graph, shared where formulas are the same."""

    def __init__(
        self,
        translator: Translator,
        wanted: list[Goal],
        infinite: bool,
    ) -> None:
        self.translator = translator
        self.parent: dict[Key, Key] = {}
        self.role: dict[Var, Key] = {}
        self.lines: list[str] = []
        self.known: dict[str, str] = {}  # S-expression -> name
        self.free: dict[str, frozenset[str]] = {}  # name -> digits that occur free
        self.sets: dict[str, frozenset[str]] = {}  # spelling -> digits
        self.extents: dict[str, int] = {}
        self.clipped: set[str] = set()
        self.role_of: dict[str, Key] = {}
        self.atoms: list[str] = []
        self.sizes: list[str] = []  # symbols of extents
        self.nested: set[tuple[str, str]] = (
            set()
        )  # a sum over the first set holds one over the second
        self.within: dict[
            str, frozenset[str]
        ] = {}  # name -> sets of the sums that are linear in it
        self.infinite = infinite
        self.memo: dict[object, str] = {}
        self.digits: dict[Term, frozenset[Var]] = {}
        leaves = _inputs([t for g in wanted for t in (g.program, g.candidate)])
        self._refine(leaves)
        self._roles(leaves)
        self.rank = self._ranks()
        self.loose = {self._find(k) for k in self.parent if k[:2] in translator.varying}

    # digits

    def _ranks(self) -> dict[Key, int]:
        """The place of every digit among those of its input dim, the widest stride first: names
        made of it are the same at every size that is cut alike.
        """
        places: dict[tuple[int, int], list[Key]] = {}
        for key in self.parent:
            places.setdefault(key[:2], []).append(key)
        return {
            key: k
            for keys in places.values()
            for k, key in enumerate(sorted(keys, key=lambda key: (-key[2], -key[3])))
        }

    def _refine(self, leaves: list[tuple[int, tuple[Index, ...]]]) -> None:
        """Cut every digit where any reading of the same input dim is cut."""
        changed = True
        while changed:
            changed = False
            bounds: dict[tuple[int, int], set[int]] = {}
            clipped: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for source, at in leaves:
                for d, index in enumerate(at):
                    digits = index.resolved().digits
                    if any(v.clipped for _, v in digits):
                        clipped[(source, d)] = [(s, v.extent) for s, v in digits]
                    for stride, var in digits:
                        bounds.setdefault((source, d), set()).update((stride, stride * var.extent))
            for source, at in leaves:
                for d, index in enumerate(at):
                    if (source, d) in clipped:
                        full = self.translator.extents[(source, d)]
                        changed |= self._cut_alike(index, clipped[(source, d)], full)
                    else:
                        changed |= self._cut_at(index, sorted(bounds.get((source, d), ())))

    def _cut_at(self, index: Index, bounds: list[int]) -> bool:
        """Split digits that run over one of the bounds."""
        changed = False
        for stride, var in index.resolved().digits:
            for bound in bounds:
                inner = bound // stride
                if bound % stride == 0 and 1 < inner < var.extent and var.extent % inner == 0:
                    self.translator.halve(var, inner)
                    changed = True
                    break
        return changed

    def _cut_alike(self, index: Index, strides: list[tuple[int, int]], full: int) -> bool:
        """Split the digit of a whole dim of extent `full` as short tiles split it elsewhere."""
        digits = index.resolved().digits
        if index.offset or len(digits) != 1 or digits[0][0] != 1 or digits[0][1].clipped:
            return False
        var = digits[0][1]
        if var.extent != full:  # a part of the dim, which the short tiles' digits do not fit
            return False
        self.translator.cut(var, strides)
        return True

    def _find(self, key: Key) -> Key:
        while self.parent.setdefault(key, key) != key:
            key = self.parent[key]
        return key

    def _roles(self, leaves: list[tuple[int, tuple[Index, ...]]]) -> None:
        """Digits that read the same place of the same input dim have one role."""
        for source, at in leaves:
            for d, index in enumerate(at):
                for stride, var in index.resolved().digits:
                    key = self._find((source, d, stride, var.extent))
                    other = self._find(self.role.setdefault(var, key))
                    low, high = sorted((key, other))
                    self.parent[high] = low

    def _digit_name(self, var: Var, taken: set[str]) -> str:
        if var in self.role:
            key = self._find(self.role[var])
            base = f"d{key[0]}_{key[1]}_{self.rank[key]}"
        else:
            base = f"n{var.extent}"
        k = 0
        while f"{base}#{k}" in taken:
            k += 1
        name = f"{base}#{k}"
        taken.add(name)
        self._describe(name, var)
        return name

    def _describe(self, name: str, var: Var) -> None:
        self.extents[name] = var.extent
        if var.clipped and var not in self.role:
            raise Unprovable("a short tile is counted without being read")
        if var in self.role:
            self.role_of[name] = self._find(self.role[var])
        if var.clipped:
            self.clipped.add(name)

    # terms

    def goal(self, at: tuple[Index, ...], term: Term) -> str:
        """The name of an output's element; its digits are called alike for both graphs."""
        env: dict[Var, str] = {}
        for index in at:
            for _, var in index.resolved().digits:
                env[var] = f"o{var.number}"
                self._describe(env[var], var)
        return self.name(term, env)

    def name(self, term: Term, env: dict[Var, str]) -> str:
        """The e-graph name of a term whose free digits have the names of `env`."""
        free = sorted(self._free(term), key=lambda v: v.number)
        key = (term, tuple((v, env[v]) for v in free))
        if key not in self.memo:
            self.memo[key] = self._name(term, env)
        return self.memo[key]

    def _name(self, term: Term, env: dict[Var, str]) -> str:
        match term.op:
            case "num":
                return self._put(_number(term.number), frozenset())
            case "size":
                self.sizes.append(self._put(f'(Leaf "size {term.name}")', frozenset()))
                return self.sizes[-1]
            case "neg_inf":
                self.infinite = True
                return self._put('(Leaf "-inf")', frozenset())
            case "in":
                text, digits = self._at(term.at, env, term.source)
                return self._put(f'(Leaf "x{term.source}[{text}]")', digits)
            case "pos":
                text, digits = self._at(term.at, env)
                return self._put(f'(Leaf "pos[{text}]")', digits)
            case "prefix_max":
                text, digits = self._at(term.at, env)
                inner = self.name(term.args[0], env)
                return self._put(f'(Prefix "{text}" {inner})', self.free[inner] | digits, inner)
            case "sum" | "rmax":
                return self._fold(term, env)
            case "add" | "mul" | "max":
                return self._flat(term, env)
            case "fn":
                args = [self.name(a, env) for a in term.args]
                return self._call(f'Fn{len(args)} "{term.name}"', args)
        head = {"inv": "Inv", "exp": "Exp", "sqrt": "Sqrt"}[term.op]
        return self._call(head, [self.name(term.args[0], env)])

    def _put(self, text: str, digits: frozenset[str], *parts: str) -> str:
        if text not in self.known:
            name = f"t{len(self.known)}"
            self.known[text] = name
            self.free[name] = digits
            linear = text.startswith(("(Add", "(Mul"))
            self.within[name] = frozenset().union(*(self.within[p] for p in parts if linear))
            self.lines.append(f"(let {name} {text})")
            if text.startswith(("(Leaf", "(Fn", "(Prefix")):
                self.atoms.append(name)
        return self.known[text]

    def _call(self, head: str, args: list[str]) -> str:
        digits = frozenset().union(*(self.free[a] for a in args))
        return self._put(f"({head} {' '.join(args)})", digits, *args)

    def _at(
        self, at: tuple[Index, ...], env: dict[Var, str], source: int | None = None
    ) -> tuple[str, frozenset[str]]:
        """Spelling of a reading place (of input `source`, if any), and its digits."""
        dims: list[str] = []
        names: set[str] = set()
        for d, index in enumerate(at):
            parts = [str(index.offset)] if index.offset else []
            for stride, var in index.resolved().digits:
                names.add(env[var])
                parts.append(f"{self._stride(source, d, stride, var)}*{env[var]}")
            dims.append("+".join(parts))
        return ",".join(dims), frozenset(names)

    def _stride(self, source: int | None, d: int, stride: int, var: Var) -> str:
        """A digit's stride, spelled by what it is at every size: the place among the strides of its
        input dim, or that of the digit's own role; else the number.
        """
        if source is not None and (source, d, stride, var.extent) in self.rank:
            return f"r{self.rank[(source, d, stride, var.extent)]}"
        if var in self.role and self._find(self.role[var])[2] == stride:
            return "own"
        return str(stride)

    def _fold(self, term: Term, env: dict[Var, str]) -> str:
        (body,), bound = term.args, term.bound
        while body.op == term.op:  # a sum of a sum is one sum
            bound += body.bound
            (body,) = body.args
        digits = [leaf for v in bound for _, leaf in v.leaves()]
        if not digits:
            return self.name(body, env)
        inner = dict(env)
        taken = {env[v] for v in self._free(body) if v not in digits}

        def order(v: Var) -> tuple[Key, int]:
            return (self._find(self.role[v]) if v in self.role else (0, 0, 0, 0)), v.number

        names = []
        for v in sorted(digits, key=order):
            inner[v] = self._digit_name(v, taken)
            names.append(inner[v])
        child = self.name(body, inner)
        spelling = self._set(frozenset(names))
        head = "Sum" if term.op == "sum" else "RMax"
        for other in self.within[child]:
            if not self.sets[other] & self.sets[spelling]:
                self.nested.add((spelling, other))
        name = self._put(f'({head} "{spelling}" {child})', self.free[child] - frozenset(names))
        self.within[name] = self.within[child] | {spelling}
        return name

    def _free(self, term: Term) -> frozenset[Var]:
        """Digits that occur in a term outside the sums that bind them."""
        if term not in self.digits:
            out: set[Var] = {v for index in term.at for _, v in index.resolved().digits}
            for a in term.args:
                out |= self._free(a)
            self.digits[term] = frozenset(out) - {
                leaf for v in term.bound for _, leaf in v.leaves()
            }
        return self.digits[term]

    def _set(self, digits: frozenset[str]) -> str:
        spelling = " ".join(sorted(digits))
        self.sets[spelling] = digits
        return spelling

    def _flat(self, term: Term, env: dict[Var, str]) -> str:
        """Flatten, fold numbers, sort: associativity and commutativity cost the e-graph most."""
        op = term.op
        parts: list[Term] = []
        stack = list(reversed(term.args))
        while stack:
            t = stack.pop()
            if t.op == op:
                stack.extend(reversed(t.args))
            else:
                parts.append(t)
        number = Fraction(0 if op == "add" else 1)
        unit = number
        names: list[str] = []
        for t in parts:
            if t.op == "num" and op != "max":
                number = number + t.number if op == "add" else number * t.number
            elif op == "mul" and t.op == "inv" and t.args[0].op == "num" and t.args[0].number:
                number /= t.args[0].number
            else:
                names.append(self.name(t, env))
        names.sort(key=lambda n: int(n[1:]))
        if number != unit or not names:
            names.insert(0, self._put(_number(number), frozenset()))
        head = {"add": "Add", "mul": "Mul", "max": "Max"}[op]
        out = names[-1]
        for n in reversed(names[:-1]):
            out = self._call(head, [n, out])
        return out

    # facts

    def facts(self) -> list[str]:
        """Which formulas are free of which sets of digits, and how the sets relate."""
        self._close()
        families = self._families()
        out = [f"(NonZero {name})" for text, name in self.known.items() if '"x' in text[:8]]
        for name in dict.fromkeys(self.sizes):
            out += [f"(NonZero {name})", f"(NonNeg {name})"]
        for spelling, digits in self.sets.items():
            out.append(f'(Digits "{spelling}")')
            if digits & self.clipped:
                pass
            elif any(self.role_of.get(d) in self.loose for d in digits):
                out.append(f'(Filled "{spelling}")')
            else:
                extent = prod(self.extents[d] for d in digits)
                out.append(f'(Extent "{spelling}" (bigrat (bigint {extent}) (bigint 1)))')
            for name in self.atoms:
                if not self.free[name] & digits:
                    out.append(f'(Indep {name} "{spelling}")')
            for other, more in self.sets.items():
                if self.clipped and self._steady(digits, more, families):
                    out.append(f'(Steady "{spelling}" "{other}")')
                joined = " ".join(sorted(digits | more))
                if not digits & more and joined in self.sets:
                    out.append(f'(Union "{spelling}" "{other}" "{joined}")')
                if digits <= more:
                    out.append(f'(Inside "{spelling}" "{other}")')
                rest = " ".join(sorted(digits - more))
                if digits & more and rest in self.sets:
                    out.append(f'(Without "{spelling}" "{other}" "{rest}")')
        return out

    def _families(self) -> list[frozenset[Key]]:
        return [
            frozenset(
                self._find(self.role[leaf])
                for v in family
                for _, leaf in v.leaves()
                if leaf in self.role
            )
            for family in self.translator.families
        ]

    def _steady(
        self, digits: frozenset[str], others: frozenset[str], families: list[frozenset[Key]]
    ) -> bool:
        """Whether the range of `digits` is the same for all values of `others`."""
        mine = {self.role_of[d] for d in digits & self.clipped}
        theirs = {self.role_of[d] for d in (others - digits) & self.clipped}
        return not any(mine & family and theirs & family for family in families)

    def _close(self) -> None:
        """Add unions that rules may need: of sums found inside sums, and parts of known sets."""
        given = list(self.sets.values())
        todo = [self.sets[a] | self.sets[b] for a, b in sorted(self.nested)]
        todo += [a | b for a in given for b in given if any(a | b < c for c in given)]
        for joined in todo:
            if len(self.sets) < _MOST_SETS:
                self._set(joined)


def _number(value: Fraction) -> str:
    def big(n: int) -> str:
        return f"(bigint {n})" if abs(n) < 1 << 62 else f'(from-string "{n}")'

    return f"(Num (bigrat {big(value.numerator)} {big(value.denominator)}))"


def _inputs(terms: list[Term]) -> list[tuple[int, tuple[Index, ...]]]:
    """The input readings that occur in the terms."""
    seen: set[Term] = set()
    out: list[tuple[int, tuple[Index, ...]]] = []
    stack = list(terms)
    while stack:
        t = stack.pop()
        if t in seen:
            continue
        seen.add(t)
        if t.op == "in":
            out.append((t.source, t.at))
        stack.extend(t.args)
    return out
