"""The independent judge: `verify(program, candidate)` answers Proved, Tested, Refuted or Unknown.

Three judges: finite fields at small sizes, float64 and the graphs' own dtypes, and a proof by
equality saturation. Nothing here is shared with the search that makes the candidates.
"""

from obelisk.verify.family import Case, FamilyVerdict, form_of, verify_family
from obelisk.verify.judge import Verifier, verify, verify_many
from obelisk.verify.pieces import Cut
from obelisk.verify.verdict import JudgeResult, Verdict, VerdictKind, refuted_malformed

__all__ = [
    "Case",
    "Cut",
    "FamilyVerdict",
    "JudgeResult",
    "Verdict",
    "VerdictKind",
    "Verifier",
    "form_of",
    "refuted_malformed",
    "verify",
    "verify_family",
    "verify_many",
]
