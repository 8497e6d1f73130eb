"""Descriptions: exact limits by exact architecture, names, and a host that needs no timing."""

from __future__ import annotations

from pathlib import Path

import pytest

from obelisk.base.errors import UnknownName, UserError
from obelisk.ir import DType
from obelisk.machine import (
    MACHINES,
    Feature,
    MachineKind,
    calibrate,
    find,
    for_capability,
    host,
    known_names,
    measure,
)
from obelisk.machine.host import (
    DEFAULT_CACHES,
    DEFAULT_CLOCK,
    LEVELS,
    cpu_machine,
    level_of,
    parse_cpuinfo,
    rated_clock,
    read_caches,
)

LIMITS = [  # arch, capability, KiB a block, KiB an SM, threads an SM, blocks an SM
    ("sm_80", (8, 0), 163, 164, 2048, 32),
    ("sm_86", (8, 6), 99, 100, 1536, 16),
    ("sm_89", (8, 9), 99, 100, 1536, 24),
    ("sm_90a", (9, 0), 227, 228, 2048, 32),
    ("sm_100a", (10, 0), 227, 228, 2048, 32),
    ("sm_120", (12, 0), 99, 100, 1536, 24),
]


@pytest.mark.parametrize(("arch", "capability", "block", "sm", "threads", "blocks"), LIMITS)
def test_limits_are_those_of_the_exact_architecture(
    arch: str, capability: tuple[int, int], block: int, sm: int, threads: int, blocks: int
) -> None:
    """Shared memory, threads and blocks of each architecture, by name and by capability."""
    machine = find(arch)
    assert machine.arch == arch
    assert machine.kind is MachineKind.CUDA
    assert machine.shared_bytes == block * 1024
    assert machine.shared_per_core == sm * 1024
    assert machine.threads_per_core == threads
    assert machine.blocks_per_core == blocks
    assert (machine.threads_per_block, machine.registers, machine.registers_per_thread) == (
        1024,
        65536,
        255,
    )
    assert for_capability(*capability).arch == arch


@pytest.mark.parametrize("capability", [(7, 5), (13, 0), (9, 1), (8, 7), (10, 3), (12, 1), (7, 0)])
def test_other_capabilities_are_refused_by_name(capability: tuple[int, int]) -> None:
    """R49: no ">=": below, above and between the known ones the refusal names both sides."""
    major, minor = capability
    with pytest.raises(UnknownName) as error:
        for_capability(major, minor)
    assert f"sm_{major}{minor}" in str(error.value)
    assert "9.0 (sm_90a)" in str(error.value)
    with pytest.raises(UnknownName, match=f"sm_{major}{minor}"):
        find(f"sm_{major}{minor}")


def test_features_follow_the_architecture_exactly() -> None:
    """No copy engine, wgmma or clusters on 80, 86, 89 and 120; wgmma on sm_90a alone."""
    engine = {Feature.BULK_COPY, Feature.WGMMA, Feature.CLUSTERS, Feature.MBARRIER}
    for arch in ("sm_80", "sm_86", "sm_89", "sm_120"):
        assert not engine & find(arch).features
        assert find(arch).has(Feature.CP_ASYNC)
    assert engine <= find("sm_90a").features
    assert not find("sm_100a").has(Feature.WGMMA)
    assert find("sm_100a").has(Feature.TCGEN05)
    assert [a for a, *_ in LIMITS if find(a).has(Feature.WGMMA)] == ["sm_90a"]


def test_measured_figures_of_the_h200() -> None:
    """The H200 carries the measured copy bandwidth and graph-node cost, not the data sheet's."""
    machine = find("H200")
    assert machine.nominal_bandwidth == 4.8e12
    assert machine.bandwidth == 4.2e12
    assert machine.launch_seconds == 2.3e-6
    assert (machine.cores, machine.arch, machine.clock) == (132, "sm_90a", 1.98e9)
    assert machine.caches[0].size == 60 << 20
    assert find("sm_90a") is machine
    assert find("sm_90") is machine
    assert find("h100").nominal_bandwidth == 3.35e12
    assert machine.peak(DType.BF16) == pytest.approx(989e12)
    assert machine.peak(DType.F32) == pytest.approx(66.9e12)
    assert machine.peak(DType.BOOL) == machine.peak(DType.F32)  # not listed: runs as f32


def test_unknown_names_list_the_known() -> None:
    """`find` answers every name that it lists, and lists them when it refuses."""
    with pytest.raises(UnknownName) as error:
        find("h300")
    for name in known_names():
        assert name in str(error.value)
        assert find(name).cores >= 1


def test_digests_tell_machines_apart() -> None:
    """Digests are stable for equal descriptions and differ between any two machines."""
    digests = [m.digest for m in MACHINES.values()]
    assert len(set(digests)) == len(digests)
    assert find("h200").digest == MACHINES["h200"].digest
    assert host().digest == host().digest


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _fake_cpu(root: Path) -> tuple[Path, Path]:
    """Eight hardware threads that share an L3; the current clock is far from the rated one."""
    proc, sysfs = root / "proc", root / "sys"
    _write(
        proc / "cpuinfo",
        "processor\t: 0\nmodel name\t: Test CPU @ 2.60GHz\ncpu MHz\t\t: 1200.0\n"
        "bogomips\t: 5200.00\nflags\t\t: fpu avx avx2 fma f16c bmi1 bmi2 movbe sse4_1 sse4_2 "
        "ssse3 popcnt cx16\n\nprocessor\t: 1\nmodel name\t: other\n",
    )
    cache = sysfs / "devices/system/cpu/cpu0/cache"
    for at, (level, kind, size, shared) in enumerate(
        [(1, "Data", "48K", "0,4"), (1, "Instruction", "32K", "0,4"), (2, "Unified", "2M", "0,4"),
         (3, "Unified", "24M", "0-7")]
    ):  # fmt: skip
        _write(cache / f"index{at}" / "level", f"{level}\n")
        _write(cache / f"index{at}" / "type", f"{kind}\n")
        _write(cache / f"index{at}" / "size", f"{size}\n")
        _write(cache / f"index{at}" / "shared_cpu_list", f"{shared}\n")
    return proc, sysfs


def test_host_reads_the_system_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock, level and caches come from the files; the clock is the rated one, not the current."""
    proc, sysfs = _fake_cpu(tmp_path)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    machine = host(8, proc=proc, sysfs=sysfs)
    assert (machine.title, machine.arch) == ("Test CPU @ 2.60GHz", "x86-64-v3")
    assert (machine.vector_bytes, machine.cores, machine.clock) == (32, 8, 2.6e9)
    assert [(c.level, c.size, c.cores) for c in machine.caches] == [
        (1, 48 << 10, 1),
        (2, 2 << 20, 1),
        (3, 24 << 20, 8),
    ]
    assert machine.peak(DType.F32) == 8 * 2.6e9 * 8 * 2 * 2  # lanes, multiply and add, two pipes
    assert machine.shared_bytes == 3 << 20  # a core's share of the last cache
    assert machine.last_cache == 24 << 20


def test_host_without_system_files(tmp_path: Path) -> None:
    """Where nothing can be read the tables stand in."""
    machine = host(4, proc=tmp_path, sysfs=tmp_path)
    assert machine.clock == DEFAULT_CLOCK
    assert [(c.level, c.size) for c in machine.caches] == [(a, b) for a, b, _ in DEFAULT_CACHES]
    assert read_caches(tmp_path) == ()


@pytest.mark.parametrize(
    ("fields", "khz", "hertz"),
    [
        ({"model name": "X @ 3.10GHz", "bogomips": "4000.0"}, "4200000\n", 4.2e9),
        ({"model name": "X @ 3.10GHz", "bogomips": "4000.0"}, "", 3.1e9),
        ({"bogomips": "4890.80"}, "", 2.4454e9),
        ({"bogomips": "48.00"}, "", DEFAULT_CLOCK),  # Arm: a timer, not the core
        ({"bogomips": "?"}, "", DEFAULT_CLOCK),
        ({}, "garbage", DEFAULT_CLOCK),
    ],
)
def test_rated_clock(fields: dict[str, str], khz: str, hertz: float) -> None:
    """cpufreq's maximum, else the name, else BogoMIPS, else the default."""
    assert rated_clock(fields, khz) == pytest.approx(hertz)


@pytest.mark.parametrize(
    ("machine", "flags", "arch", "vector"),
    [
        ("x86_64", LEVELS[0].flags, "x86-64-v4", 64),
        ("x86_64", LEVELS[1].flags, "x86-64-v3", 32),
        ("AMD64", LEVELS[2].flags, "x86-64-v2", 16),
        ("x86_64", LEVELS[0].flags - {"fma"}, "x86-64-v2", 16),
        ("x86_64", frozenset[str](), "x86-64", 16),
        ("aarch64", frozenset({"asimd"}), "aarch64", 16),
        ("riscv64", frozenset[str](), "generic", 16),
    ],
)
def test_levels(machine: str, flags: frozenset[str], arch: str, vector: int) -> None:
    """A level needs all its flags: AVX-512 without FMA is no x86-64-v3."""
    level = level_of(machine, flags)
    assert (level.arch, level.vector_bytes) == (arch, vector)
    assert cpu_machine(level, 2).vector_bytes == vector


def test_first_processor_wins() -> None:
    """Fields of later processors do not overwrite those of the first."""
    assert parse_cpuinfo("a : 1\nb: x: y\n\na : 2\n") == {"a": "1", "b": "x: y"}


def test_calibration_is_explicit_and_quick() -> None:
    """Figures are positive, a core is no faster than all, and a GPU is refused."""
    found = measure(host())
    assert 1e8 < found.core_read < 1e12
    assert 1e8 < found.copy < 1e12
    assert 1e8 < found.flops < 1e14
    fast = calibrate(host())
    assert 0 < fast.core_bandwidth <= fast.bandwidth
    assert fast.caches == host().caches
    assert fast.peak(DType.F64) * 2 == pytest.approx(fast.peak(DType.F32))
    assert host().bandwidth == host().bandwidth != 0
    with pytest.raises(UserError, match="h200"):
        calibrate(find("h200"))
