"""Schedules of a decode step: search, placement, pages, the judge, the simulator, the virtual
machine.

`search_schedules` gives ranked choices; `check` judges any schedule on its own; `simulate` says
what one costs; `resources` what fits. That is for CPUs; the modules for GPUs are imported by name:
`gpu` (the cut), `gpu_search`, `gpu_check`, `gpu_simulate`, `gpu_resources`, `gpu_vm`, and `ir`, the
passes that make a GPU schedule.
"""

from obelisk.schedule.check import Fault, check
from obelisk.schedule.place import place
from obelisk.schedule.resources import Resources, Stages, gpu_stages, resources
from obelisk.schedule.search import Choice, SearchAccount, search_schedules
from obelisk.schedule.simulate import Timeline, simulate
from obelisk.schedule.types import (
    Await,
    Barrier,
    Item,
    Page,
    PagePlan,
    Run,
    Schedule,
    Signal,
    Sync,
)

__all__ = [
    "Await", "Barrier", "Choice", "Fault", "Item", "Page", "PagePlan", "Resources", "Run",
    "Schedule", "SearchAccount", "Signal", "Stages", "Sync", "Timeline", "check", "gpu_stages",
    "place", "resources", "search_schedules", "simulate",
]  # fmt: skip
