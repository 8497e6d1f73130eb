"""The cache key: everything that changes the answer, and nothing else.

Takes the request's ingredients as values or words; gives a frozen `CacheKey` whose digest is the
same in every process. Two requests with one key may be answered by one result; docs/cache.md says
why each field is there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import CacheCorrupt, UserError
from obelisk.ir.graph import Graph
from obelisk.machine.description import Machine

# Upper ends in seconds. A request is never answered by a result of a smaller class.
BUDGET_CLASSES = (1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600, 4 * 3600, 24 * 3600)


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What a result answers. Every field is a non-empty word or digest; all are part of `digest`.

    Attributes:
        program: `Graph.digest` of the program: structure, operator attributes (axis, eps,
            constants), shapes, dtypes and
            strides of the inputs, which values are outputs and in what order. Names are not in it.
        space: the declared search space and every other setting of search and tuning that changes
            the result (seed,
            threads), as a stable text or digest.
        budget: class of the time budget (`budget_class`): a longer search may find more.
        machine: digest of the machine's description: architecture, cores, caches, limits.
        compiler: identity and version of the compiler that built the kernels, with its flags.
        obelisk: version of Obelisk: generated code and rules change with it.
        verification: level of verification that the result passed; an unchecked result never serves
            a checked request.
        device: the device asked for ("cpu", "cuda:0", ...).
    """

    program: str
    space: str
    budget: str
    machine: str
    compiler: str
    obelisk: str
    verification: str
    device: str

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, str) or not value:
                raise UserError(f"cache key: {f.name} is {value!r}, expected a non-empty text")

    @property
    def digest(self) -> str:
        """Content digest over all fields by name."""
        return digest(
            "cache-key", *(part for f in fields(self) for part in (f.name, getattr(self, f.name)))
        )

    def to_json(self) -> dict[str, str]:
        """The fields by name."""
        return asdict(self)

    @staticmethod
    def from_json(data: Any) -> CacheKey:
        """Read `to_json` back; raises `CacheCorrupt` for missing, foreign or non-text fields."""
        try:
            return CacheKey(**data)
        except (TypeError, UserError) as e:
            raise CacheCorrupt(f"not a cache key: {e}") from e


def cache_key(
    program: Graph,
    *,
    space: str,
    budget_seconds: float,
    machine: Machine,
    compiler: str,
    verification: str,
    device: str,
) -> CacheKey:
    """The key of one request; the version of Obelisk is filled in. Raises `UserError` for an empty
    ingredient.
    """
    return CacheKey(
        program=program.digest,
        space=space,
        budget=budget_class(budget_seconds),
        machine=machine.digest,
        compiler=compiler,
        obelisk=obelisk_version(),
        verification=verification,
        device=device,
    )


def budget_class(seconds: float) -> str:
    """The class of a time budget, as a word: `"60s"` for anything above 30 and up to 60 seconds."""
    if not seconds > 0:
        raise UserError(f"budget is {seconds} seconds, expected a positive number")
    for top in BUDGET_CLASSES:
        if seconds <= top:
            return f"{top}s"
    return "unbounded"


def obelisk_version() -> str:
    """The installed version, or "uninstalled" when the package runs from a bare source tree."""
    try:
        return version("obelisk")
    except PackageNotFoundError:
        return "uninstalled"
