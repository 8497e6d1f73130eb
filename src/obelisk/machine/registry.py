"""Machines by name, architecture or compute capability: exact matches only.

Takes a name; gives a `Machine` or raises `UnknownName` with the known ones. "cpu" and "host" are
the CPU at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from obelisk.base.errors import UnknownName
from obelisk.machine.cuda import CUDA_MACHINES
from obelisk.machine.description import Machine
from obelisk.machine.host import GENERIC, host

MACHINES: Mapping[str, Machine] = MappingProxyType({m.name: m for m in (*CUDA_MACHINES, *GENERIC)})
# An architecture names the machine that its figures were taken from: measured beats data sheet.
_BY_ARCH: Mapping[str, Machine] = MappingProxyType(
    {m.arch: m for m in CUDA_MACHINES} | {m.arch.rstrip("a"): m for m in CUDA_MACHINES}
)
_CPU = ("cpu", "host")


def known_names() -> tuple[str, ...]:
    """All names that `find` takes, in order."""
    return (*_CPU, *MACHINES, *dict.fromkeys(m.arch for m in CUDA_MACHINES))


def find(name: str) -> Machine:
    """The machine called `name`: "cpu", a product ("h200") or an architecture ("sm_90a"); any case.

    Raises `UnknownName` with the known names. An architecture must match exactly: sm_75 or sm_130
    is refused.
    """
    key = name.strip().lower()
    if key in _CPU:
        return host()
    found = MACHINES.get(key) or _BY_ARCH.get(key)
    if found is None:
        raise UnknownName(f"unknown machine {name!r}: known are {', '.join(known_names())}")
    return found


def for_capability(major: int, minor: int) -> Machine:
    """The description of a CUDA device of exactly this compute capability.

    Raises `UnknownName` naming the capability and the supported ones; there is no "at least". The
    caller replaces `cores` by the device's own count, since products of one architecture differ.
    """
    found = _BY_ARCH.get(f"sm_{major}{minor}")
    if found is None or found.capability != (major, minor):
        known = ", ".join(
            f"{c[0]}.{c[1]} ({a})"
            for c, a in sorted({(m.capability, m.arch) for m in CUDA_MACHINES if m.capability})
        )
        raise UnknownName(
            f"compute capability {major}.{minor} (sm_{major}{minor}) is not supported: "
            f"known are {known}; use --device cpu"
        )
    return found
