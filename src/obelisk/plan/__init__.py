"""The megakernel's file format: a versioned, digested archive that is readable without a compiler.

`read_plan` and `write_plan` move a `Plan`; `layout` says how weights and the cache lie in memory,
`host` which processor a plan is for. `plan` sees only `base`.
"""

from obelisk.plan.file import VERSION, EdgeName, Plan, read_plan, write_plan
from obelisk.plan.host import HostIdentity, host_identity, refusal
from obelisk.plan.layout import (
    CacheLayout,
    MatrixLayout,
    RowBlock,
    VectorLayout,
    WeightLayout,
)

__all__ = [
    "VERSION", "CacheLayout", "EdgeName", "HostIdentity", "MatrixLayout", "Plan", "RowBlock",
    "VectorLayout", "WeightLayout", "host_identity", "read_plan", "refusal", "write_plan",
]  # fmt: skip
