"""The superoptimizer's search over kernel and block graphs.

Takes a kernel graph, a machine, a declared space and a budget; gives candidates ranked by the cost
model. It never times a candidate and never judges one: that is for `tune` and `verify`.
"""

from obelisk.search.driver import search
from obelisk.search.plan import Plan, plan_plain, read_plan, replan, replan_one
from obelisk.search.results import (
    CandidateFile,
    StoredCandidate,
    read_candidates,
    write_candidates,
)
from obelisk.search.space import Budget, Candidate, SearchResult, SearchStats, Space

__all__ = [
    "Budget",
    "Candidate",
    "CandidateFile",
    "Plan",
    "SearchResult",
    "SearchStats",
    "Space",
    "StoredCandidate",
    "plan_plain",
    "read_candidates",
    "read_plan",
    "replan",
    "replan_one",
    "search",
    "write_candidates",
]
