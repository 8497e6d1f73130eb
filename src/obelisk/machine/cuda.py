"""Descriptions of CUDA devices, one entry per exact architecture; an architecture is never matched
by
">=".

Limits come from the CUDA programming guide's table of compute capabilities, rates from the vendor's
data sheets (dense products, f32 accumulation), and measured bandwidths from `docs/machine.md`,
which names the source of each figure.
"""

from __future__ import annotations

from obelisk.ir.dtype import DType
from obelisk.machine.description import Cache, Feature, Machine, MachineKind

KIB = 1024
_AMPERE = frozenset({Feature.FMA, Feature.CP_ASYNC, Feature.LDMATRIX, Feature.MMA})
_ADA = _AMPERE | {Feature.FP8}
_HOPPER = _ADA | {Feature.MBARRIER, Feature.BULK_COPY, Feature.WGMMA, Feature.CLUSTERS}
_B200 = (_HOPPER - {Feature.WGMMA}) | {Feature.TCGEN05}
_RTX50 = _ADA
GRAPH_NODE = 2.3e-6  # a kernel node of a CUDA graph, measured on an H200 with its ramp and drain
COPY_FRACTION = (
    0.875  # a copy's share of the nominal bandwidth: 4.2 of 4.8 TB/s measured on an H200
)


def _device(
    name: str,
    title: str,
    arch: str,
    capability: tuple[int, int],
    *,
    sms: int,
    clock: float,
    nominal: float,
    l2: int,
    l2_bandwidth: float,
    shared: tuple[int, int],
    resident: tuple[int, int],
    rates: dict[DType, float],
    features: frozenset[Feature],
    measured: float | None = None,
) -> Machine:
    """An entry. `shared` is KiB per block and per SM, `resident` threads and blocks per SM, `rates`
    in teraflops.
    """
    bandwidth = measured or nominal * COPY_FRACTION
    return Machine(
        name=name,
        title=title,
        kind=MachineKind.CUDA,
        arch=arch,
        capability=capability,
        cores=sms,
        clock=clock,
        vector_bytes=16,
        bandwidth=bandwidth,
        nominal_bandwidth=nominal,
        core_bandwidth=64 * clock,  # the path from an SM to L2 carries 64 bytes a clock
        latency=0.8e-6,
        caches=(Cache(2, l2, sms, l2_bandwidth / sms),),
        flops=tuple((d, r * 1e12) for d, r in rates.items()),
        vector_flops=rates[DType.F32] * 1e12,
        special_flops=16.0 * sms * clock,  # four units of four lanes on an SM
        shared_bytes=shared[0] * KIB,
        shared_per_core=shared[1] * KIB,
        registers=65536,
        registers_per_thread=255,
        threads_per_block=1024,
        threads_per_core=resident[0],
        blocks_per_core=resident[1],
        warp=32,
        launch_seconds=GRAPH_NODE,
        features=features,
    )


def _rates(
    f64: float, f32: float, f16: float, i8: float, f8: float | None = None
) -> dict[DType, float]:
    """Teraflops by operand dtype. f32 products run on the ordinary cores: tf32 would round the
    operands.
    """
    out = {
        DType.F64: f64,
        DType.F32: f32,
        DType.F16: f16,
        DType.BF16: f16,
        DType.I8: i8,
        DType.I4: i8,
    }
    return out | {DType.F8E4M3: f8 if f8 is not None else f16}


CUDA_MACHINES: tuple[Machine, ...] = (
    _device(
        "a100", "NVIDIA A100 SXM 80 GB", "sm_80", (8, 0), sms=108, clock=1.41e9, nominal=2.039e12,
        l2=40 * KIB * KIB, l2_bandwidth=4.0e12, shared=(163, 164), resident=(2048, 32),
        rates=_rates(9.7, 19.5, 312, 624), features=_AMPERE,
    ),
    _device(
        "rtx3090", "NVIDIA GeForce RTX 3090", "sm_86", (8, 6),
        sms=82, clock=1.695e9, nominal=0.936e12,
        l2=6 * KIB * KIB, l2_bandwidth=2.0e12, shared=(99, 100), resident=(1536, 16),
        rates=_rates(0.56, 35.6, 71, 284), features=_AMPERE,
    ),
    _device(
        "rtx4090", "NVIDIA GeForce RTX 4090", "sm_89", (8, 9),
        sms=128, clock=2.52e9, nominal=1.008e12,
        l2=72 * KIB * KIB, l2_bandwidth=4.5e12, shared=(99, 100), resident=(1536, 24),
        rates=_rates(1.29, 82.6, 165.2, 660.6, 330.3), features=_ADA,
    ),
    _device(
        "h100", "NVIDIA H100 SXM 80 GB", "sm_90a", (9, 0), sms=132, clock=1.98e9, nominal=3.35e12,
        l2=50 * KIB * KIB, l2_bandwidth=5.5e12, shared=(227, 228), resident=(2048, 32),
        rates=_rates(33.5, 66.9, 989, 1979, 1979), features=_HOPPER,
    ),
    _device(
        "h200", "NVIDIA H200 SXM 141 GB", "sm_90a", (9, 0), sms=132, clock=1.98e9, nominal=4.8e12,
        l2=60 * KIB * KIB, l2_bandwidth=5.5e12, shared=(227, 228), resident=(2048, 32),
        rates=_rates(33.5, 66.9, 989, 1979, 1979), features=_HOPPER, measured=4.2e12,
    ),
    _device(
        "b200", "NVIDIA B200 SXM 180 GB", "sm_100a", (10, 0), sms=148, clock=1.85e9, nominal=8.0e12,
        l2=126 * KIB * KIB, l2_bandwidth=10.0e12, shared=(227, 228), resident=(2048, 32),
        rates=_rates(37, 75, 2250, 4500, 4500), features=_B200,
    ),
    _device(
        "rtx5090", "NVIDIA GeForce RTX 5090", "sm_120", (12, 0),
        sms=170, clock=2.407e9, nominal=1.792e12,
        l2=96 * KIB * KIB, l2_bandwidth=6.0e12, shared=(99, 100), resident=(1536, 24),
        rates=_rates(1.64, 104.8, 209.5, 838, 419), features=_RTX50,
    ),
)  # fmt: skip
