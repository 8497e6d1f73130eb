"""Machines as frozen descriptions, what fits them, and what a program costs on them.

`find` and `host` give a `Machine`; `footprint` and `capacity` say what a block needs and whether it
fits; `estimate` ranks programs without running them; `roofline` is the floor; `calibrate` measures,
only when asked.
"""

from obelisk.machine.calibrate import Calibration, calibrate, measure
from obelisk.machine.cost import Cost, LaunchCost, estimate
from obelisk.machine.description import Cache, Feature, Machine, MachineKind
from obelisk.machine.footprint import capacity, footprint
from obelisk.machine.host import host
from obelisk.machine.registry import MACHINES, find, for_capability, known_names
from obelisk.machine.roofline import roofline

__all__ = [
    "MACHINES", "Cache", "Calibration", "Cost", "Feature", "LaunchCost", "Machine", "MachineKind",
    "calibrate", "capacity", "estimate", "find", "footprint", "for_capability", "host",
    "known_names", "measure", "roofline",
]  # fmt: skip
