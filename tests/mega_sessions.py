"""Plans and sessions of small models without a search, for the megakernel's tests."""

from __future__ import annotations

from typing import Any

from obelisk.app.synth import make_plan
from obelisk.machine import host
from obelisk.plan import Plan
from obelisk.runtime import CpuSession
from obelisk.runtime.packing import pack
from obelisk.schedule import Choice, Sync, place, resources, simulate
from obelisk.tasks import StepShape, Tiling, Workload, parse_config


def plan_of(c: dict[str, Any], work: Workload, sync: Sync = Sync.COUNTER, **tiling: Any) -> Plan:
    """The plan of one schedule, on two cores unless `tiling` says otherwise."""
    shape = StepShape(parse_config(c), work, Tiling(**{"cores": 2, **tiling}), host().lanes)
    schedule, machine = place(shape, sync), host()
    return make_plan(Choice(schedule, simulate(schedule, machine), resources(shape, machine)))


def session_of(
    c: dict[str, Any], tensors: dict[str, Any], work: Workload, sync: Sync = Sync.COUNTER,
    **tiling: Any,
) -> CpuSession:  # fmt: skip
    """A session of that plan with these weights."""
    plan = plan_of(c, work, sync, **tiling)
    return CpuSession(plan, pack(plan.layout, tensors.__getitem__))
