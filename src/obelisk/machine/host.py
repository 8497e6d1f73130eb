"""The description of the CPU that this process runs on, from tables and estimates, never from a
timing.

Takes /proc/cpuinfo and sysfs (or `platform` where they are absent); gives a `Machine`. The same
processor gives the same description in every run: the clock is the rated one (cpufreq's maximum,
else the model name, else BogoMIPS), and bandwidths are documented estimates. `calibrate` measures
instead, on request.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from obelisk.base.settings import usable_cores
from obelisk.ir.dtype import DType
from obelisk.machine.description import Cache, Feature, Machine, MachineKind

KIB = 1024
DEFAULT_CLOCK = 2.5e9  # hertz, where the system names none
CORE_BANDWIDTH = 12e9  # one core's outstanding misses (10-16 lines of 64 bytes over 80 ns)
SOCKET_BANDWIDTH = 40e9  # two channels of DDR4-3200 as a stream reaches them
CORE_CEILING, SOCKET_CEILING = 25e9, 51.2e9  # more than a core draws; what the two channels carry
LATENCY = 90e-9
POOL_LAUNCH = 3e-6  # waking a pool of threads and waiting for the last one
FMA_PIPES = 2  # fused multiply-adds that a core starts in a clock


@dataclass(frozen=True, slots=True)
class CpuLevel:
    """An instruction-set level: vector width in bytes, vector registers, and what it brings."""

    arch: str
    vector_bytes: int
    vector_registers: int
    flags: frozenset[str]
    features: frozenset[Feature]


_V2 = frozenset({"sse4_1", "sse4_2", "ssse3", "popcnt", "cx16"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_FMA = frozenset({Feature.FMA})
LEVELS: tuple[CpuLevel, ...] = (  # best first
    CpuLevel("x86-64-v4", 64, 32, _V4, _FMA | {Feature.F16C}),
    CpuLevel("x86-64-v3", 32, 16, _V3, _FMA | {Feature.F16C}),
    CpuLevel("x86-64-v2", 16, 16, _V2, frozenset()),
    CpuLevel("x86-64", 16, 16, frozenset(), frozenset()),
)
_ARM = CpuLevel("aarch64", 16, 32, frozenset(), _FMA | {Feature.F16C})
_OTHER = CpuLevel("generic", 16, 16, frozenset(), frozenset())
# Sizes assumed where sysfs has none: (level, bytes, cores that share an instance).
DEFAULT_CACHES = ((1, 32 * KIB, 1), (2, 512 * KIB, 1), (3, 16 * KIB * KIB, 8))
# Bytes that one core reads from a level per clock.
_CACHE_BYTES_PER_CLOCK = {2: 32.0, 3: 20.0}


def level_of(machine: str, flags: frozenset[str]) -> CpuLevel:
    """The highest level whose flags are all present, for a `platform.machine()`."""
    if machine in ("x86_64", "AMD64", "amd64"):
        return next(level for level in LEVELS if level.flags <= flags)
    return _ARM if machine in ("aarch64", "arm64") else _OTHER


def cpu_machine(
    level: CpuLevel,
    cores: int,
    clock: float = DEFAULT_CLOCK,
    caches: tuple[tuple[int, int, int], ...] = DEFAULT_CACHES,
    *,
    name: str = "cpu",
    title: str = "",
    flags: frozenset[str] = frozenset(),
) -> Machine:
    """A description from a level, cores, clock (Hz) and caches (level, bytes, cores sharing)."""
    lanes = level.vector_bytes // 4
    per_pipe = 2 if Feature.FMA in level.features else 1
    f32 = cores * clock * lanes * per_pipe * FMA_PIPES
    # Narrow floats are widened in registers: f16 costs a conversion where the core has one, much
    # more where not.
    f16 = f32 * (0.8 if Feature.F16C in level.features else 0.1)
    levels = tuple(
        Cache(
            n,
            size,
            min(shared, cores),
            clock * _CACHE_BYTES_PER_CLOCK.get(n, 2.0 * level.vector_bytes),
        )
        for n, size, shared in sorted(caches)
    )
    outer = levels[-1] if levels else Cache(2, 512 * KIB, 1, clock * 32)
    bandwidth = min(cores * CORE_BANDWIDTH, SOCKET_BANDWIDTH)
    extra = {Feature.AVX512_BF16} if "avx512_bf16" in flags else set()
    return Machine(
        name=name,
        title=title or f"{level.arch}, {cores} cores",
        kind=MachineKind.CPU,
        arch=level.arch,
        cores=cores,
        clock=clock,
        vector_bytes=level.vector_bytes,
        vector_registers=level.vector_registers,
        bandwidth=bandwidth,
        nominal_bandwidth=min(cores * CORE_CEILING, SOCKET_CEILING),
        core_bandwidth=CORE_BANDWIDTH,
        latency=LATENCY,
        caches=levels,
        flops=(
            (DType.F64, f32 / 2), (DType.F32, f32), (DType.F16, f16), (DType.BF16, f32 * 0.8),
            (DType.F8E4M3, f32 * 0.1), (DType.I32, f32 / 2), (DType.I8, f32 / 2),
            (DType.I4, f32 / 4),
        ),
        vector_flops=cores * clock * lanes * FMA_PIPES,
        shared_bytes=max(outer.size // outer.cores, 512 * KIB),
        launch_seconds=POOL_LAUNCH if cores > 1 else POOL_LAUNCH / 10,
        features=level.features | extra,
    )  # fmt: skip


def parse_cpuinfo(text: str) -> dict[str, str]:
    """The first processor's fields of /proc/cpuinfo, keys as the kernel spells them."""
    out: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            out.setdefault(key.strip(), value.strip())
    return out


def rated_clock(fields: Mapping[str, str], max_khz: str = "") -> float:
    """Rated hertz: cpufreq's maximum in kHz, else "@ 2.60GHz" of the model name, else BogoMIPS / 2
    (x86), else 2.5e9.

    The current frequency is not used: it changes from run to run.
    """
    if max_khz.strip().isdigit():
        return int(max_khz) * 1e3
    named = re.search(r"@\s*([\d.]+)\s*GHz", fields.get("model name", ""))
    if named:
        return float(named.group(1)) * 1e9
    mips = fields.get("bogomips", "")
    if (
        re.fullmatch(r"\d+(\.\d+)?", mips) and float(mips) >= 1000
    ):  # x86: twice the time-stamp clock
        return round(float(mips) / 2, 1) * 1e6
    return DEFAULT_CLOCK


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _size(text: str) -> int:
    """ "512K" as bytes; 0 when it is no size."""
    found = re.fullmatch(r"\s*(\d+)([KMG]?)\s*", text)
    if not found:
        return 0
    return int(found.group(1)) * {"": 1, "K": KIB, "M": KIB**2, "G": KIB**3}[found.group(2)]


def _shares(text: str) -> int:
    """How many processors a list such as "0-3,8" names."""
    count = 0
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low.isdigit():
            count += (int(high) if high.isdigit() else int(low)) - int(low) + 1
    return count


def read_caches(root: Path) -> tuple[tuple[int, int, int], ...]:
    """Data caches under a sysfs `cache` directory as (level, bytes, processors that share it).

    Empty where there are none.
    """
    out = []
    for entry in sorted(root.glob("index*")):
        size, level = _size(_read(entry / "size")), _read(entry / "level").strip()
        if size and level.isdigit() and _read(entry / "type").strip() in ("Data", "Unified"):
            # Hardware threads of one core share its near caches: that is not sharing between cores.
            shares = _shares(_read(entry / "shared_cpu_list")) if int(level) > 2 else 1
            out.append((int(level), size, max(1, shares)))
    return tuple(out)


@lru_cache(maxsize=16)
def _describe(cores: int, proc: Path, sysfs: Path) -> Machine:
    fields = parse_cpuinfo(_read(proc / "cpuinfo"))
    flags = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    level = level_of(platform.machine(), flags)
    title = fields.get("model name") or platform.processor() or platform.machine()
    cpu0 = sysfs / "devices/system/cpu/cpu0"
    clock = rated_clock(fields, _read(cpu0 / "cpufreq/cpuinfo_max_freq"))
    caches = read_caches(cpu0 / "cache") or DEFAULT_CACHES
    return cpu_machine(level, cores, clock, caches, title=title, flags=flags)


def host(
    cores: int | None = None, *, proc: Path = Path("/proc"), sysfs: Path = Path("/sys")
) -> Machine:
    """The CPU at hand. `cores` defaults to those this process may use; no timing is made."""
    return _describe(cores or usable_cores(), proc, sysfs)


GENERIC: tuple[Machine, ...] = tuple(
    replace(
        cpu_machine(level, cores, name=level.arch), title=f"a {level.arch} core, {cores} of them"
    )
    for level, cores in ((LEVELS[1], 2), (LEVELS[0], 2), (_ARM, 2))
)
