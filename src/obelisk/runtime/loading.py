"""The way from a plan to the session that serves its target."""

from __future__ import annotations

from pathlib import Path

from obelisk.base.errors import UserError
from obelisk.plan import Plan, read_plan
from obelisk.runtime.cpu import CpuSession
from obelisk.runtime.cuda import CudaSession
from obelisk.runtime.session import Session


def load_session(plan: str | Path | Plan, weights_dir: str | Path | None = None) -> Session:
    """The session that serves a plan's target; `weights_dir` overrides the directory that the plan
    names. Raises what its `load` raises.
    """
    what = plan if isinstance(plan, Plan) else read_plan(plan)
    if what.target == "cpu":
        return CpuSession.load(what, weights_dir)
    if what.target == "cuda":
        return CudaSession.load(what, weights_dir)
    raise UserError(f"this Obelisk runs plans for cpu and cuda, not for {what.target}")
