"""What `optimize` was asked for: as given (`Wanted`), and checked (`Request`, one for a run)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from obelisk.app.backends import Backend, backend_of
from obelisk.base.errors import UnknownName, UserError
from obelisk.base.settings import settings
from obelisk.ir import Graph
from obelisk.machine import Machine
from obelisk.search import Space

LEVELS = ("full", "quick")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The arguments of `optimize` but for the program, as the user gave them; None: the default of
    the back end or of the settings.
    """

    device: str = "cpu"
    budget: float = 60.0
    seed: int = 0
    cache: bool = True
    verify_level: str = "full"
    baselines: Sequence[str] | None = None
    threads: int | None = None
    without: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A checked request.

    Attributes:
        program: what to make fast.
        machine, device: where it will run, and what the user called it.
        budget: wall seconds for everything.
        seed: of the search and the tuner.
        cache: whether the store is asked and told.
        verify_level: "full" or "quick".
        baselines: names of what to measure beside it.
        threads: threads of generated code.
        space: what is searched.
        backend: what lowers, builds, measures and calls for the device.
        toolchain: what builds the kernels, in words.
        without: decisions of the lowering that are left out.
    """

    program: Graph
    machine: Machine
    device: str
    budget: float
    seed: int
    cache: bool
    verify_level: str
    baselines: tuple[str, ...]
    threads: int
    space: Space
    backend: Backend
    toolchain: str
    without: tuple[str, ...] = ()

    def options(self, graph: Graph) -> list[Any]:
        """The lowering choices for a graph, the default first, without what is to be left out."""
        return restricted(self.backend, self.backend.options(graph, self.machine), self.without)


def restricted(backend: Backend, options: Sequence[Any], without: Sequence[str]) -> list[Any]:
    """Lowering choices with some decisions forced off; equal ones are one.

    Raises `UserError` for a decision that the back end does not take.
    """
    changes: dict[str, Any] = {}
    for name in without:
        if name not in backend.ablations:
            raise UserError(
                f"the lowering for {backend.name} has no decision {name!r} to leave out: it has "
                f"{', '.join(backend.ablations)}"
            )
        changes |= backend.ablations[name]
    # Options of a target that does not take such a decision would hide what it brings.
    known = [o for o in options if all(hasattr(o, field) for field in changes)]
    return list(dict.fromkeys(replace(o, **changes) if changes else o for o in known))


def make_request(program: Graph, wanted: Wanted, space: Space) -> Request:
    """Check every part; raises `UnknownName` or `UserError` naming the part and what is allowed,
    and `MissingDependency` where there is no compiler.
    """
    backend = backend_of(wanted.device)
    restricted(backend, (), wanted.without)
    threads = settings().threads if wanted.threads is None else wanted.threads
    if not wanted.budget > 0:
        raise UserError(f"budget is {wanted.budget} s, expected more than 0")
    if wanted.verify_level not in LEVELS:
        raise UnknownName(f"verify_level {wanted.verify_level!r}: known are {', '.join(LEVELS)}")
    if threads < 1:
        raise UserError(f"threads is {threads}, expected 1 or more")
    return Request(
        program=program,
        machine=backend.machine(wanted.device),
        device=wanted.device,
        budget=wanted.budget,
        seed=wanted.seed,
        cache=wanted.cache,
        verify_level=wanted.verify_level,
        baselines=backend.quick if wanted.baselines is None else tuple(wanted.baselines),
        threads=threads,
        space=space,
        backend=backend,
        toolchain=backend.toolchain(),
        without=tuple(wanted.without),
    )
