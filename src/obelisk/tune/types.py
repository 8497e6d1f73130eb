"""The frozen values at the border of `tune`: what is timed, what came of each, and the report.

Statuses are words that scripts may match on. Times are seconds of one call. An error is REPORTS'
measure: max over elements of |got - reference| / (atol + rtol * |reference|), so 1 is the tolerance
of the dtype.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from obelisk.base.errors import UserError
from obelisk.ir.graph import Graph


class Status(enum.Enum):
    """What came of one contender. Only `OK` may win."""

    OK = "ok"  # right on every check
    WRONG = "wrong"  # complete, but numbers differ from the reference
    INCOMPLETE = "incomplete"  # elements of an output were never written
    OVERRUN = "overrun"  # bytes outside an output or the scratch area were changed
    STALE = "stale"  # right in a fresh process, wrong after other calls: it keeps state
    CRASH = "crash"  # its process ended, by a signal or by exit
    HANG = "hang"  # it did not return within the time limit
    REFUSED = "refused"  # it returned a code other than 0, or raised a Python exception
    UNLOADABLE = "unloadable"  # no such library, symbol, module or interface
    UNTRIED = "untried"  # the time or the user's patience ended first


@dataclass(frozen=True, slots=True)
class TuneItem:
    """A built candidate.

    Attributes:
        name: for people; the report uses it.
        graph: the candidate; its inputs and outputs must have the program's shapes and dtypes.
        library: shared object with `int obelisk_run(void *const *inputs, void *const *outputs, void
            *scratch, int threads)`.
        scratch_bytes: size of the scratch area it needs; the area is 64-byte aligned and holds
            garbage.
    """

    name: str
    graph: Graph
    library: Path
    scratch_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a baseline's factory gets in the worker.

    Attributes:
        copies: the program's inputs, in as many copies as the protocol rotates through: numpy
            arrays, or on a CUDA device `gpu_worker.DeviceArray`s.
        threads: how many threads it may use.
        payload: the contender's own JSON value.
    """

    copies: Sequence[Sequence[Any]]
    threads: int
    payload: Any


Factory = Callable[[Setup], Sequence[Callable[[], Any]]]


@dataclass(frozen=True, slots=True)
class Contender:
    """A Python baseline that is timed in the same process and rounds as the libraries.

    Attributes:
        name: for people; the report uses it.
        factory: `"module:function"`, or a module-level function; called in the worker with a
            `Setup`, gives one callable without arguments per copy of the inputs, each returning the
            outputs (arrays or torch tensors).
        payload: a JSON value for the factory.
        limit_seconds: time limit of preparing it and of its first call (compilers run there).
        imports: modules that take seconds to import. A device's worker imports them beside the
            checks of the candidates, which wait for the device.
    """

    name: str
    factory: str | Factory
    payload: Any = None
    limit_seconds: float = 120.0
    imports: tuple[str, ...] = ()

    @property
    def target(self) -> str:
        """`module:function`; raises `UserError` for a function that another process could not
        import.
        """
        if isinstance(self.factory, str):
            if self.factory.count(":") != 1:
                raise UserError(
                    f"contender {self.name!r}: factory is {self.factory!r}, "
                    "expected 'module:function'"
                )
            return self.factory
        module, name = self.factory.__module__, self.factory.__qualname__
        if module == "__main__" or "<" in name:
            raise UserError(
                f"contender {self.name!r}: {module}.{name} cannot be imported by the worker; "
                "move it to the top level of a module"
            )
        return f"{module}:{name}"


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of one contender.

    Attributes:
        name, status, detail: which, what, and why in words (empty when all is well).
        seconds: median over rounds of one call, or None when it was never timed.
        spread: interquartile range over rounds, seconds.
        low, high: 95% confidence interval of the median (order statistics), seconds.
        rounds, calls: rounds it took part in, and timed calls in them. 0 rounds: `seconds` comes
            from the check.
        error: worst error found, in units of the dtype's tolerance.
        share: worst error as a share of what is allowed at its element; at most 1 is right.
        relative: worst relative error of a whole output: the norm of the difference over the norm
            of the reference.
        repeatable: the same inputs gave the same bits twice.
        ratio, ratio_spread: how many times slower than the winner: the median over rounds of the
            ratio in each round, and its interquartile range; None without common rounds. The race
            was decided by it, so it is the number to quote.
    """

    name: str
    status: Status
    detail: str = ""
    seconds: float | None = None
    spread: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    calls: int = 0
    error: float | None = None
    share: float | None = None
    relative: float | None = None
    repeatable: bool | None = None
    ratio: float | None = None
    ratio_spread: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the attributes as keys and the status as its word."""
        return {**asdict(self), "status": self.status.value}


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The outcome of `tune`.

    Attributes:
        program: the program's name.
        items, contenders: one `Measured` per item and per contender, in the order given.
        winner: index of the chosen item, or None when none was right.
        reason: why it was chosen, in a sentence.
        cache_state: "resident" (inputs stay in cache) or "streamed" (rotated through copies beyond
            it).
        copies: how many copies of the inputs the calls rotate through.
        input_scale: standard deviation of the random inputs (below 1 where the program overflows at
            1).
        threads, seed, seconds: as asked, and wall time of the whole tuning.
        bandwidth: bytes per second that a copy in device memory reached; None on a CPU.
        interrupted: the user stopped it; the result is the best so far.
        notes: anything else the reader of the numbers must know.
    """

    program: str
    items: tuple[Measured, ...]
    contenders: tuple[Measured, ...]
    winner: int | None
    reason: str
    cache_state: str
    copies: int
    input_scale: float
    threads: int
    seed: int
    seconds: float
    interrupted: bool = False
    bandwidth: float | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def counts(self) -> dict[str, int]:
        """How many items ended in each status, by the status' word; only those that occur, in a
        fixed order.
        """
        found = [m.status for m in self.items]
        return {s.value: found.count(s) for s in Status if s in found}

    @property
    def speedups(self) -> dict[str, float]:
        """The winner's speed relative to item 0 (the program's own kernels) and to each contender,
        by its name: paired by round, or of medians where they shared none.
        """
        if self.winner is None or not (best := self.items[self.winner].seconds):
            return {}
        others = [*self.items[:1], *self.contenders]
        return {
            m.name: m.ratio or m.seconds / best
            for m in others
            if m.status is Status.OK and m.seconds is not None
        }

    def to_json(self) -> dict[str, Any]:
        """A JSON object; keys are the attributes, plus `counts` and `speedups`."""
        out = {**asdict(self), "counts": self.counts, "speedups": self.speedups}
        out["items"] = [m.to_json() for m in self.items]
        out["contenders"] = [m.to_json() for m in self.contenders]
        out["notes"] = list(self.notes)
        return out


def count_line(counts: Mapping[str, int]) -> str:
    """`3 ok, 1 crash, 1 hang`: the counts as people read them."""
    return ", ".join(f"{n} {word}" for word, n in counts.items()) or "none"
