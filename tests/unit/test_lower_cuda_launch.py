"""What the driver refuses is never asked for: launch parameters of every variant, on every machine.

No device is needed: threads, clusters, shared memory and tensor maps are held against the rules.
"""

from __future__ import annotations

import re

import pytest
from tests.cuda_graphs import fused

from obelisk.base.errors import Infeasible
from obelisk.lower.cuda import CudaKernel, CudaOptions, TensorMap, lower_cuda, variants
from obelisk.machine import Machine, find
from obelisk.machine.description import Feature

FUSED = fused()
MACHINES = ("a100", "rtx3090", "rtx4090", "h200")
SWIZZLE, MOST_BOX = 128, 256  # bytes of a swizzled line, rows of a box
SIZES = {"float": 4, "unsigned": 4, "int": 4, "bool": 1, "char": 1, "unsigned long long": 8}
DECLARED = re.compile(r"^\s*__shared__ (?:__align__\(\d+\) )?([a-z ]+?) \w+(?:\[(\d+)\])?;", re.M)


def static_shared(source: str) -> int:
    """Bytes of shared memory that a kernel declares, each array from a line of 16 bytes."""
    return sum(-(-SIZES[t] * int(n or 1) // 16) * 16 for t, n in DECLARED.findall(source))


def broken(kernel: CudaKernel, machine: Machine) -> list[str]:
    """The rules that a launch breaks."""
    most = 8 if Feature.CLUSTERS in machine.features else 1
    shared = kernel.shared + static_shared(kernel.source)
    rules = {
        f"{kernel.threads} threads": kernel.threads % 32 == 0
        and 0 < kernel.threads <= machine.threads_per_block,
        f"{kernel.blocks} blocks": 0 < kernel.blocks < 2**31,
        f"clusters of {kernel.cluster}": 0 < kernel.cluster <= most,
        f"{kernel.blocks} blocks in clusters of {kernel.cluster}": kernel.blocks % kernel.cluster
        == 0,
        f"{shared} bytes of shared memory": shared <= machine.shared_bytes,
        f"bounds of {kernel.threads} threads": f"__launch_bounds__({kernel.threads}"
        in kernel.source,
        **{f"map {m}": mapped(m) for m in kernel.maps},
    }
    return [words for words, holds in rules.items() if not holds]


def mapped(m: TensorMap) -> bool:
    """Whether the copy engine takes a map of a matrix of 2-byte elements."""
    return (
        m.stride % 16 == 0
        and m.columns > 0
        and m.rows > 0
        and 0 < 2 * m.box_columns <= SWIZZLE
        and 0 < m.box_rows <= MOST_BOX
    )


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", FUSED)
def test_every_variant_can_be_launched(name: str, machine: str) -> None:
    target = find(machine)
    lowered = 0
    for options in variants(FUSED[name], target):
        try:
            module = lower_cuda(FUSED[name], target, options)
        except Infeasible:
            continue
        lowered += 1
        for kernel in module.kernels:
            assert not broken(kernel, target), options
    assert lowered


def test_the_copying_warp_fits_into_the_largest_block() -> None:
    """Eight groups of four warps and one more would be 1056 threads."""
    options = CudaOptions(groups=8, column_warps=4, resident=2, column_tile=64)
    (kernel,) = lower_cuda(FUSED["norm matmul split"], find("h200"), options).kernels
    assert kernel.maps
    assert kernel.threads == 7 * 128 + 32


def test_declared_shared_memory_is_counted() -> None:
    text = "  __shared__ bool last;\n  __shared__ __align__(8) unsigned long long ring[6];\n"
    assert static_shared(text + "  extern __shared__ __align__(16) char arena[];\n") == 16 + 48


@pytest.mark.parametrize("name", FUSED)
def test_a_slot_is_given_back_behind_a_fence(name: str) -> None:
    """An arrival does not wait for loads under way: without a fence in front of it the copy engine
    overtook reads of a tile (moe on an H200: 6 of 100 calls wrong in a row of 16 elements).
    """
    for options in variants(FUSED[name], find("h200")):
        try:
            module = lower_cuda(FUSED[name], find("h200"), options)
        except Infeasible:
            continue
        for kernel in module.kernels:
            header, entry, body = kernel.source.partition('extern "C" __global__')
            assert entry
            assert "ob_barrier_arrive(" not in body
            assert ("ob_barrier_leave(empty + at, lane);" in body) == bool(kernel.maps)
            if kernel.maps:
                leave = header[header.index("void ob_barrier_leave") :].partition("}")[0]
                fence, arrive = leave.index("fence.proxy.async"), leave.index("ob_barrier_arrive")
                assert fence < leave.index("__syncwarp") < arrive
