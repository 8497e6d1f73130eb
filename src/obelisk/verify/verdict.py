"""Verdicts: what the judges found, as frozen values that can be stored and printed.

A `Verdict` says one of four things and why; `judges` keeps what each judge did, for reports.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class VerdictKind(enum.Enum):
    """What is known about a candidate."""

    PROVED = "proved"  # passed every test, and the prover joined it with the program
    TESTED = "tested"  # passed every test
    REFUTED = "refuted"  # some input shows a difference, or the candidate is malformed
    UNKNOWN = "unknown"  # a judge could not decide


@dataclass(frozen=True, slots=True)
class JudgeResult:
    """What one judge did.

    Attributes:
        judge: "interface", "fields", "floats" or "proof".
        passed: True, False, or None where it could not decide.
        detail: in words.
        seconds: time taken.
    """

    judge: str
    passed: bool | None
    detail: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on one candidate.

    Attributes:
        kind: proved, tested, refuted or unknown.
        bound: how far the verdict reaches, in words; never claims more than was done.
        seconds: time taken in all.
        witness: for a refutation, where the graphs differ and how to see it again; else None.
        judges: each judge's part.
    """

    kind: VerdictKind
    bound: str
    seconds: float
    witness: str | None
    judges: tuple[JudgeResult, ...] = ()

    @property
    def accepted(self) -> bool:
        """True for proved and tested."""
        return self.kind in (VerdictKind.PROVED, VerdictKind.TESTED)

    def __str__(self) -> str:
        text = f"{self.kind.value} ({self.bound}; {self.seconds:.3f} s)"
        return text if self.witness is None else f"{text}\n  {self.witness}"


def refuted_malformed(error: Exception, seconds: float = 0.0) -> Verdict:
    """The verdict on a candidate that could not even be read or built: refuted, saying why."""
    why = f"malformed: {error}"
    return Verdict(
        VerdictKind.REFUTED,
        "not a well-formed graph",
        seconds,
        why,
        (JudgeResult("interface", False, why, seconds),),
    )
