"""The targets that a schedule can be emitted for.

Takes a device's name; gives a `Target`, or a refusal that names what is missing. A further target
is one package beside `mega.cpu` and one member here.
"""

from __future__ import annotations

import enum

from obelisk.base.errors import Infeasible
from obelisk.machine import Machine, MachineKind


class Target(enum.StrEnum):
    """What `mega` emits."""

    CPU = "cpu"  # C: one pinned thread for each core


def target_of(machine: Machine) -> Target:
    """The target that serves a machine; raises `Infeasible` for a GPU, saying what is missing."""
    if machine.kind is MachineKind.CPU:
        return Target.CPU
    raise Infeasible(
        f"no megakernel for {machine.name} ({machine.arch}): CUDA is not a target yet, it lacks an "
        "emitter for its task bodies, loader roles and copies; use --device cpu"
    )
