"""Families: one search and one verdict for every size of a symbolic dim, and a kernel for each.

Takes a family graph (`ir.family`); gives a `CompiledFamily`, a callable of tensors. The structure
is searched once, at one size, and judged once, for all (`verify.family`). A new size then only
chooses sizes of tiles again (`search.replan`), which takes milliseconds, and is compiled on first
use. It promises that nothing runs at a size that the verdict does not reach: there the pair is
judged first, and where that fails the program's own operators run; and that a kernel's first
results are compared with float64 (but for very large programs) before anybody sees any.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from obelisk.app.calls import Signature, Tensor
from obelisk.base.errors import BuildFailed, Infeasible, InternalError, ParseError, UserError
from obelisk.base.log import logger
from obelisk.base.progress import Progress, Silent
from obelisk.base.settings import settings
from obelisk.build import Library, compile_c, compiler_identity
from obelisk.build.library import aligned_bytes
from obelisk.cache import CacheKey, Store, cache_key
from obelisk.ir import Graph
from obelisk.ir.family import FamilyGraph, Linear, family_text, parse_family, probes
from obelisk.ir.text import to_text
from obelisk.lower.cpu import lower_cpu, variants
from obelisk.machine import Machine, estimate, find
from obelisk.search import (
    Budget,
    Plan,
    Space,
    plan_plain,
    read_plan,
    replan,
    replan_one,
    search,
)
from obelisk.search.units import VERSION
from obelisk.tune import Status
from obelisk.tune.inputs import Inputs, input_specs, output_specs
from obelisk.tune.judge import fill, judge, reference
from obelisk.verify import Case, Cut, FamilyVerdict, Verdict, VerdictKind, Verifier, verify_family

SCHEMA = 1
EVERY_SIZE = 512  # ranges up to this are looked at size by size
PLANS = 3  # structures kept: which is best may change along the range
JUDGED = 6  # structures that are judged in full
CHECKED_FLOPS = 4e9  # programs up to this are run once and compared before their first call
SEARCH_SHARE = 0.5  # of the time limit
ITSELF = Verdict(VerdictKind.PROVED, "it is the program itself", 0.0, None)


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure that was accepted for the family: its plan, how the search found it, and the
    verdict for all sizes.
    """

    plan: Plan
    note: str
    verdict: FamilyVerdict


@dataclass(frozen=True, slots=True)
class Sized:
    """The family at one size.

    Attributes:
        size, program, graph: the size, the program there, and what runs for it.
        structure: number of its structure; None where the program's own operators run.
        predicted: seconds by the cost model.
        seconds: what choosing it took: tiles, coverage and all.
    """

    size: int
    program: Graph
    graph: Graph
    structure: int | None
    predicted: float
    seconds: float


@dataclass
class Counts:
    """What was done in this process: searches, verdicts over the family, sizes chosen, kernels
    built, and sizes that had to be judged by themselves because no proved form reached them.
    """

    searches: int = 0
    verifications: int = 0
    sizes: int = 0
    built: int = 0
    judged_alone: int = 0


class CompiledFamily:
    """A program for every size of one dim. Make one with `optimize_family`.

    >>> rows = ob.optimize_family(family)     # doctest: +SKIP
    >>> y = rows(x, w)                        # doctest: +SKIP
    """

    def __init__(
        self,
        family: FamilyGraph,
        structures: Sequence[Structure],
        machine: Machine,
        threads: int,
        account: dict[str, Any],
        cached: bool = False,
    ) -> None:
        self.family, self.structures = family, tuple(structures)
        self.machine, self.threads = machine, threads
        self.account, self.cached = account, cached
        self.counts = Counts()
        self._sized: dict[int, Sized] = {}
        self._kernels: dict[int, Kernel] = {}
        self._alone: dict[tuple[int, int], bool] = {}  # (structure, size): accepted by itself

    def __repr__(self) -> str:
        return f"<CompiledFamily {self.family.name} {self.family.dim}: {self.verdict}>"

    @property
    def verdict(self) -> Verdict:
        """The weakest verdict of its structures; of the program itself where there is none."""
        found = [s.verdict.verdict for s in self.structures]
        return next((v for v in found if v.kind is not VerdictKind.PROVED), (*found, ITSELF)[0])

    def __call__(self, *tensors: Tensor, out: Tensor | None = None) -> Any:
        """Run on one tensor per input, at the size that their shapes have.

        Raises `ShapeError` naming dim, size and range outside the family, and `CallError` for what
        does not match; nothing has run then.
        """
        shapes = [tuple(getattr(t, "shape", ())) for t in tensors]
        size = self.family.size_of(shapes, self.family.name)
        return self.kernel(size)(*tensors, out=out)

    def kernel(self, size: int) -> Kernel:
        """The compiled program of one size; built on first use."""
        if size not in self._kernels:
            self._kernels[size] = self._build(self.at(size))
        return self._kernels[size]

    def at(self, size: int) -> Sized:
        """What runs at one size; chosen on first use, without a search and without a compiler.

        Raises `ShapeError` naming dim, size and range outside the family.
        """
        self.family.dim.check(size, self.family.name)
        if size not in self._sized:
            self._sized[size] = self._choose(size)
        return self._sized[size]

    def forget(self) -> None:
        """Choose and build every size anew; what was judged stays."""
        self._sized.clear()
        self._kernels.clear()

    def source(self, size: int) -> str:
        """The generated C text of one size."""
        return self._lowered(self.at(size))[0]

    # -- choosing --------------------------------------------------------------------------------
    def _choose(self, size: int) -> Sized:
        """The structure that the cost model prefers here, of those that the verdict reaches."""
        began = time.perf_counter()
        self.counts.sizes += 1
        program = self.family.at(size)
        own = estimate(program, self.machine).seconds
        options: list[tuple[float, int, Graph]] = []
        for k, structure in enumerate(self.structures):
            try:
                graph = instantiate(structure.plan, self.family, size, self.machine)
            except Infeasible as error:
                logger("app").info("structure %d at %d: %s", k, size, error)
                continue
            options.append((estimate(graph, self.machine).seconds, k, graph))
        for predicted, k, graph in sorted(options, key=lambda o: o[:2]):
            if predicted < own and self._reached(k, program, graph, size):
                spent = time.perf_counter() - began
                return Sized(size, program, graph, k, predicted, spent)
        return Sized(size, program, program, None, own, time.perf_counter() - began)

    def _reached(self, k: int, program: Graph, graph: Graph, size: int) -> bool:
        """Whether the verdict covers this size; else whether the judges accept it alone."""
        varying = self.family.extents
        if self.structures[k].verdict.covers(program, graph, varying):
            return True
        if (k, size) not in self._alone:
            self.counts.judged_alone += 1
            self._alone[(k, size)] = Verifier(program).verify(graph).accepted
        return self._alone[(k, size)]

    # -- building --------------------------------------------------------------------------------
    def _lowered(self, sized: Sized) -> tuple[str, int]:
        """C text and scratch bytes."""
        module = lower_cpu(sized.graph, self.machine, variants(sized.graph, self.machine)[0])
        return module.source, module.scratch_bytes

    def _build(self, sized: Sized) -> Kernel:
        try:
            source, scratch = self._lowered(sized)
            kernel = Kernel(sized, compile_c(source).path, scratch, self.threads)
            if estimate(sized.program, self.machine).flops <= CHECKED_FLOPS:
                kernel.check()
        except (Infeasible, BuildFailed) as error:
            if sized.structure is None:
                raise
            logger("app").warning(
                "%s at %s %d: %s; the program's own operators run there",
                self.family.name, self.family.dim.name, sized.size, error,
            )  # fmt: skip
            own = estimate(sized.program, self.machine).seconds
            plain = replace(sized, graph=sized.program, structure=None, predicted=own)
            self._sized[sized.size] = plain
            return self._build(plain)
        self.counts.built += 1
        return kernel

    # -- forms -----------------------------------------------------------------------------------
    def report(self, sizes: Iterable[int] = ()) -> dict[str, Any]:
        """The documented JSON form (docs/cli.md), with a row for each of `sizes`."""
        dim = self.family.dim
        rows = []
        for n in sizes:
            s = self.at(n)
            rows.append(
                {
                    "size": n,
                    "structure": s.structure,
                    "kernels": len(s.graph.launches()),
                    "predicted_us": s.predicted * 1e6,
                    "chosen_ms": s.seconds * 1e3,
                }
            )
        return {
            "schema": SCHEMA,
            "program": self.family.name,
            "digest": self.family.digest,
            "dim": {"name": dim.name, "low": dim.low, "high": dim.high},
            "verdict": self.verdict.kind.value,
            "bound": self.verdict.bound,
            "structures": [
                {
                    "note": s.note,
                    "verdict": s.verdict.verdict.kind.value,
                    "bound": s.verdict.verdict.bound,
                    "forms": len(s.verdict.forms),
                    "seconds": s.verdict.verdict.seconds,
                }
                for s in self.structures
            ],
            "sizes": rows,
            "cached": self.cached,
            **self.account,
        }


class Kernel:
    """A built size: checks tensors and calls. Calls from several threads share no scratch memory:
    each takes a library of its own.
    """

    def __init__(self, sized: Sized, path: Path, scratch: int, threads: int) -> None:
        self.sized, self.threads = sized, threads
        self._path, self._scratch = path, scratch
        self._signature = Signature(sized.program)
        self._idle = [Library(path, scratch)]

    def __call__(self, *tensors: Tensor, out: Tensor | None = None) -> Any:
        """Run on one tensor per input; raises `CallError` for what does not match."""
        bound = self._signature.bind(tensors, out)
        code = self._call(bound.inputs, bound.outputs)
        if code:
            raise InternalError(f"{self._signature}: the kernel returned {code}")
        return bound.results[0] if len(bound.results) == 1 else bound.results

    def _call(self, inputs: list[int], outputs: list[int]) -> int:
        try:
            library = self._idle.pop()  # atomic
        except IndexError:
            library = Library(self._path, self._scratch)
        try:
            return library.call(inputs, outputs, self.threads)
        finally:
            self._idle.append(library)

    def check(self) -> None:
        """Run once on random inputs, into outputs filled with NaN, and compare with float64 by the
        rules of `tune`; raises `BuildFailed` naming the element where they differ.
        """
        program = self.sized.program
        inputs = Inputs(program, 0, [aligned_bytes(s.nbytes) for s in input_specs(program)])
        inputs.sets = 1
        right = reference(program, inputs)
        raw = []
        for spec in output_specs(program):
            raw.append(aligned_bytes(spec.nbytes))
            raw[-1].reshape(-1, spec.dtype.numpy.itemsize)[:] = fill(spec.dtype, 0)
        code = self._call([a.ctypes.data for a in inputs.arrays], [r.ctypes.data for r in raw])
        found = judge(raw, program, right, 0, 0)
        if code or found.status is not Status.OK:
            why = f"it returned {code}" if code else f"{found.status.value}: {found.detail}"
            raise BuildFailed(f"the kernel is not what was judged: {why}")


def instantiate(plan: Plan, family: FamilyGraph, size: int, machine: Machine) -> Graph:
    """A plan's structure at a size of the family; raises `Infeasible` where it has none.

    Where extents become 1 the axes can no longer be told from the graph: there the structure is
    made at another size, one that is no other extent of the program, and its dims go to 1.
    """
    program = family.at(size)
    rules = [r for r in family.extents.values() if r.at(size) == 1]
    if not rules:
        return replan(plan, program, machine)
    if len(set(rules)) > 1:
        raise Infeasible(f"dims of different rules are 1 at {family.dim.name} {size}")
    taken = {n for x in (*family.at(family.dim.high).nodes, *program.nodes) for n in x.shape}
    wide = next(n for n in range(13, 1 << 30, 2) if rules[0].at(n) not in taken)
    return replan_one(plan, family.beyond(wide), rules[0].at(wide), program, machine)


def optimize_family(
    family: FamilyGraph,
    *,
    size: int | None = None,
    budget: float = 60.0,
    seed: int = 0,
    cache: bool = True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> CompiledFamily:
    """Search a family's structure once, judge it once for all sizes, and give what runs it on this
    machine's CPU.

    Args:
        family: from `ob.family` or `obelisk.ir.family`.
        size: where to search; by default the greatest size, at which structure matters most.
        budget: wall seconds for search and verdicts; no compiler runs before a size is called.
        seed: of the search and the judges.
        cache: look the family up first, and store what was found.
        threads: how many the kernels use; by default `OBELISK_THREADS`, else all cores.

    Where no structure is accepted, the program's own operators run at every size. Raises
    `UserError` for a wrong request and `MissingDependency` where there is no compiler.
    """
    at = family.dim.high if size is None else family.dim.check(size, family.name)
    if not budget > 0:
        raise UserError(f"budget is {budget} s, expected more than 0")
    own = settings().threads if threads is None else threads
    if own < 1:
        raise UserError(f"threads is {threads}, expected 1 or more")
    machine = find("cpu")
    key = _key_of(family, machine, at, budget, seed) if cache else None
    if key is not None and (hit := _fetch(key, family, machine, own)) is not None:
        return hit
    made = _search(family, at, machine, own, budget, seed, progress or Silent())
    if key is not None:
        _keep(key, made)
    return made


def _search(
    family: FamilyGraph,
    at: int,
    machine: Machine,
    threads: int,
    budget: float,
    seed: int,
    progress: Progress,
) -> CompiledFamily:
    began = time.monotonic()
    found = search(
        family.at(at),
        machine,
        budget=Budget(seconds=SEARCH_SHARE * budget),
        seed=seed,
        progress=progress,
    )
    sizes = range(family.dim.low, family.dim.high + 1)
    looked = tuple(sizes) if family.dim.span <= EVERY_SIZE else probes(family.dim)
    plans = [(c.plan, c.note) for c in found.candidates[1:] if c.plan is not None]
    structures, fallen, judged = _judged(plans, family, looked, machine, seed, began + budget,
                                         progress)  # fmt: skip
    stats = found.stats
    account = {
        "searched_at": at,
        "search": {"seconds": stats.seconds, "states": stats.states, "stopped": stats.stopped},
        "fallen": [fallen[k] for k in sorted(fallen)],
        "seconds": time.monotonic() - began,
        "seed": seed,
    }
    made = CompiledFamily(family, structures, machine, threads, account)
    made.counts.searches, made.counts.verifications = 1, judged
    return made


def _judged(
    plans: Sequence[tuple[Plan, str]],
    family: FamilyGraph,
    looked: Sequence[int],
    machine: Machine,
    seed: int,
    ends: float,
    progress: Progress,
) -> tuple[list[Structure], dict[int, str], int]:
    """The plans that are accepted at the sizes `looked` at, why others are not, and how many were
    judged.
    """
    structures: list[Structure] = []
    fallen: dict[int, str] = {}
    judged = 0
    order = _useful(plans, family, machine)
    # What is proved first; testing what is not takes long, and is done only where nothing is.
    for proof, most in ((True, PLANS), (False, 1)):
        for k in order:
            late = time.monotonic() > ends and judged > 0
            if len(structures) >= most or judged >= JUDGED or late:
                break
            progress.update("verify", {"judged": judged, "accepted": len(structures)})
            cases = _cases(plans[k][0], family, looked, machine)
            if not cases:
                fallen[k] = f"{plans[k][1]}: has no form at any size of {family.dim}"
                continue
            verdict = verify_family(family.dim, family.extents, cases, seed=seed, proof=proof)
            said = verdict.verdict
            if said.accepted:
                structures.append(Structure(plans[k][0], plans[k][1], verdict))
            else:
                told = f"{said.kind.value} {said.bound}"
                fallen[k] = ": ".join(x for x in (plans[k][1], told, said.witness) if x)
            judged += said.kind is not VerdictKind.UNKNOWN or not proof
    return structures, fallen, judged


def _useful(plans: Sequence[tuple[Plan, str]], family: FamilyGraph, machine: Machine) -> list[int]:
    """Plans in the order in which they are worth a verdict: those that the cost model prefers
    somewhere along the range first, the search's best in front.
    """
    best: dict[int, None] = {0: None} if plans else {}
    few = probes(family.dim)
    for n in (few[0], few[len(few) // 4], few[len(few) // 2], few[3 * len(few) // 4], few[-1]):
        costs: list[tuple[float, int]] = []
        for k, (plan, _) in enumerate(plans):
            try:
                graph = instantiate(plan, family, n, machine)
            except Infeasible:
                continue
            costs.append((estimate(graph, machine).seconds, k))
        if costs:
            best.setdefault(min(costs)[1])
    return [*best, *(k for k in range(len(plans)) if k not in best)]


def _cases(plan: Plan, family: FamilyGraph, sizes: Sequence[int], machine: Machine) -> list[Case]:
    out = []
    for n in sizes:
        try:
            out.append(Case(n, family.at(n), instantiate(plan, family, n, machine)))
        except Infeasible:
            continue
    return out


# -- the cache ------------------------------------------------------------------------------------
def _key_of(family: FamilyGraph, machine: Machine, at: int, budget: float, seed: int) -> CacheKey:
    """Everything that changes the answer."""
    options = {
        "family": str(family.dim), "at": at, "seed": seed, "space": Space().key, "units": VERSION,
    }  # fmt: skip
    compiler = compiler_identity()
    key = cache_key(
        family.at(at),
        space=json.dumps(options, sort_keys=True),
        budget_seconds=budget,
        machine=machine,
        compiler=json.dumps([compiler.version, compiler.digest]),
        verification="family",
        device="cpu",
    )
    return replace(key, program=family.digest)


def _keep(key: CacheKey, made: CompiledFamily) -> None:
    rows = [
        {
            "plan": plan_plain(s.plan),
            "note": s.note,
            "kind": s.verdict.verdict.kind.value,
            "bound": s.verdict.verdict.bound,
            "seconds": s.verdict.verdict.seconds,
            "forms": sorted(s.verdict.forms),
            "tested": list(s.verdict.tested),
            "seen": sorted(s.verdict.seen),
            "cuts": [
                [c.program, c.candidate, [[a, r.factor, r.offset] for a, r in c.rules]]
                for c in s.verdict.cuts
            ],
        }
        for s in made.structures
    ]
    top = made.at(made.family.dim.high)
    payload = {
        "family.txt": family_text(made.family),
        "chosen.txt": to_text(top.graph),
        "structures": rows,
        "account": made.account,
    }
    name = f"{made.family.name} {made.family.dim}"
    Store.open().put(key, payload, name=name)


def _fetch(
    key: CacheKey, family: FamilyGraph, machine: Machine, threads: int
) -> CompiledFamily | None:
    entry = Store.open().get(key)
    if entry is None:
        return None
    try:
        data = entry.payload
        if parse_family(data["family.txt"]).digest != family.digest:
            raise ParseError("it answers another family")
        structures = [_read_structure(row) for row in data["structures"]]
        return CompiledFamily(family, structures, machine, threads, dict(data["account"]), True)
    except (UserError, KeyError, TypeError, ValueError) as error:
        logger("app").warning("cache entry %s is not used: %s", key.digest, error)
        return None


def _read_structure(row: dict[str, Any]) -> Structure:
    verdict = Verdict(VerdictKind(row["kind"]), row["bound"], row["seconds"], None)
    cuts = tuple(
        Cut(p, c, tuple((a, Linear(factor, offset)) for a, factor, offset in rules))
        for p, c, rules in row["cuts"]
    )
    reach = FamilyVerdict(
        verdict, frozenset(row["forms"]), tuple(row["tested"]), frozenset(row["seen"]), cuts
    )
    return Structure(read_plan(row["plan"]), row["note"], reach)
