"""A quick measurement of the CPU at hand, made only when it is asked for.

Takes a CPU `Machine`; gives a copy whose bandwidth, core bandwidth and flops were measured with
numpy in under a second. A search ranks with the description it is given, so results are the same
in every run unless the caller passes a calibrated one on purpose.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from obelisk.base.errors import UserError
from obelisk.ir.dtype import DType
from obelisk.machine.description import Machine, MachineKind

BUDGET = 0.12  # seconds for each of the four figures
PRODUCT = 384  # rows, columns and depth of the product that flops are measured with


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    Attributes:
        core_read: bytes per second that one core reads from memory.
        read: the same for all cores at once.
        copy: bytes read plus written per second by a copy on all cores.
        flops: f32 operations per second of numpy's matrix product (its own threads).
    """

    core_read: float
    read: float
    copy: float
    flops: float


def best_rate(amount: float, run: Callable[[], object], budget: float) -> float:
    """`amount` per second of the fastest of the runs that fit `budget` seconds (two at least)."""
    run()
    end = time.perf_counter() + budget
    best = float("inf")
    while True:
        start = time.perf_counter()
        run()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return amount / best


def measure(machine: Machine) -> Calibration:
    """Measure this process's CPU; arrays are twice the last cache, 32 to 128 MB together."""
    elements = min(max(2 * machine.last_cache, 32 << 20), 128 << 20) // 4
    parts = np.array_split(np.ones(elements, np.float32), machine.cores)
    other = [np.empty_like(p) for p in parts]
    size = float(sum(p.nbytes for p in parts))
    square = np.ones((PRODUCT, PRODUCT), np.float32)
    with ThreadPoolExecutor(machine.cores) as pool:
        read = best_rate(size, lambda: list(pool.map(np.max, parts)), BUDGET)
        copy = best_rate(2 * size, lambda: list(pool.map(np.copyto, other, parts)), BUDGET)
    core_read = best_rate(float(parts[0].nbytes), lambda: np.max(parts[0]), BUDGET)
    flops = best_rate(2.0 * PRODUCT**3, lambda: square @ square, BUDGET)
    return Calibration(core_read=core_read, read=read, copy=copy, flops=flops)


def calibrate(machine: Machine) -> Machine:
    """`machine` with measured bandwidths and flops, all dtypes scaled alike; under a second.

    The description must be of the CPU that this process runs on: a CUDA machine is refused.
    """
    if machine.kind is not MachineKind.CPU:
        raise UserError(f"calibrate measures the CPU at hand, got {machine.name}: pass host()")
    found = measure(machine)
    bandwidth = max(found.read, found.copy)
    core = min(found.core_read, bandwidth)
    scale = found.flops / machine.peak(DType.F32)
    return replace(
        machine,
        bandwidth=bandwidth,
        nominal_bandwidth=max(machine.nominal_bandwidth, bandwidth),
        core_bandwidth=core,
        clock=machine.clock * scale,
        flops=tuple((d, rate * scale) for d, rate in machine.flops),
        vector_flops=machine.vector_flops * scale,
    )
