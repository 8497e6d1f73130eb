"""The fine-grained DAG of a GPU schedule in an IR of the MLIR kind (xDSL), and its passes.

operators -> split -> fuse -> tile -> micro -> order -> pages -> sync -> `GpuSchedule`. Importing
this package imports xDSL, so `obelisk.schedule` leaves it to those who schedule for GPUs.
"""

from obelisk.schedule.ir.dialects import parse_module, print_module, verify_module
from obelisk.schedule.ir.pipeline import STAGES, Setting, run, schedule_of, text_after

__all__ = [
    "STAGES", "Setting", "parse_module", "print_module", "run", "schedule_of", "text_after",
    "verify_module",
]  # fmt: skip
