"""The targets that a schedule can be emitted for.

Takes a machine; gives a `Target`. A further target is one package beside `mega.cpu` and `mega.cuda`
and one member here.
"""

from __future__ import annotations

import enum

from obelisk.machine import Machine, MachineKind


class Target(enum.StrEnum):
    """What `mega` emits."""

    CPU = "cpu"  # C: one pinned thread for each core
    CUDA = "cuda"  # CUDA C++: one persistent block for each SM


def target_of(machine: Machine) -> Target:
    """The target that serves a machine."""
    return Target.CPU if machine.kind is MachineKind.CPU else Target.CUDA
