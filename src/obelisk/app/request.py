"""What `optimize` was asked for, checked: the frozen value that the stages of one run share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from obelisk.app.backends import Backend, backend_of
from obelisk.base.errors import UnknownName, UserError
from obelisk.ir import Graph
from obelisk.machine import Machine
from obelisk.search import Space

LEVELS = ("full", "quick")


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


def make_request(
    program: Graph,
    device: str,
    budget: float,
    seed: int,
    cache: bool,
    verify_level: str,
    baselines: tuple[str, ...] | None,
    threads: int,
    space: Space,
    without: tuple[str, ...] = (),
) -> Request:
    """Check every part; raises `UnknownName` or `UserError` naming the part and what is allowed,
    and `MissingDependency` where there is no compiler. Without `baselines`: the back end's own.
    """
    backend = backend_of(device)
    restricted(backend, (), without)
    if not budget > 0:
        raise UserError(f"budget is {budget} s, expected more than 0")
    if verify_level not in LEVELS:
        raise UnknownName(f"verify_level {verify_level!r}: known are {', '.join(LEVELS)}")
    if threads < 1:
        raise UserError(f"threads is {threads}, expected 1 or more")
    return Request(
        program,
        backend.machine(device),
        device,
        budget,
        seed,
        cache,
        verify_level,
        backend.quick if baselines is None else baselines,
        threads,
        space,
        backend,
        backend.toolchain(),
        without,
    )
