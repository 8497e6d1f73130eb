"""Which CPU this is, as far as a compiled program depends on it.

Gives a `HostIdentity`; a plan holds the one that it was made on, and `refusal` names the difference
to another. Reads /proc/cpuinfo where there is one.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from obelisk.base.settings import usable_cores

# Instruction sets that compiled code may use; other flags of a processor do not matter here.
_USED = (
    "sse", "ssse", "avx", "fma", "f16c", "bmi", "abm", "popcnt", "movbe", "aes", "vaes", "sha",
    "gfni", "amx", "adx", "vpclmul", "pclmul", "clwb", "clzero", "clflushopt", "rdpid", "xsave",
    "asimd", "sve", "fphp", "bf16", "i8mm", "dotprod",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostIdentity:
    """System and processor.

    Attributes:
        system: "Linux", ...
        machine: "x86_64", "aarch64", ...
        title: the processor's name.
        flags: instruction sets it has, of those that compiled code may use.
        cores: usable cores.
    """

    system: str
    machine: str
    title: str
    flags: tuple[str, ...]
    cores: int

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {
            "system": self.system, "machine": self.machine, "title": self.title,
            "flags": list(self.flags), "cores": self.cores,
        }  # fmt: skip

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> HostIdentity:
        """The inverse of `to_json`."""
        return HostIdentity(
            data["system"], data["machine"], data["title"], tuple(data["flags"]), data["cores"]
        )


def host_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> HostIdentity:
    """The CPU at hand."""
    fields: dict[str, str] = {}
    try:
        text = cpuinfo.read_text()
    except OSError:
        text = ""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    used = tuple(sorted(f for f in flags if f.startswith(_USED)))
    title = fields.get("model name") or platform.processor() or platform.machine()
    return HostIdentity(platform.system(), platform.machine(), title, used, usable_cores())


def refusal(made_on: HostIdentity, here: HostIdentity, cores: int) -> str | None:
    """Why a plan for `cores` cores of `made_on` cannot run `here`; None when it can."""
    for name in ("system", "machine", "title"):
        then, now = getattr(made_on, name), getattr(here, name)
        if then != now:
            return f"it was made for {made_on.title} ({then}), this is {here.title} ({now})"
    missing = sorted(set(made_on.flags) - set(here.flags))
    if missing:
        return f"it uses instructions that this processor lacks: {', '.join(missing)}"
    if cores > here.cores:
        return f"it needs {cores} cores, this process may use {here.cores}"
    return None
