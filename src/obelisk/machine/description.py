"""What a machine is to the rest of Obelisk: a frozen record of limits and rates.

Takes nothing; gives `Machine`, `Cache`, `Feature` and `MachineKind`. A description is data: it is
compared, hashed and stored, it never asks the device anything, and two searches with equal
descriptions give equal results. Bytes are bytes, rates are per second, times are seconds.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from obelisk.base.digest import digest
from obelisk.ir.dtype import DType


class MachineKind(enum.StrEnum):
    """The two sorts of machine that Obelisk emits code for."""

    CPU = "cpu"
    CUDA = "cuda"


class Feature(enum.StrEnum):
    """An ability that generated code may use only where the description lists it."""

    FMA = "fma"  # fused multiply-add on vectors
    F16C = "f16c"  # conversion between f16 and f32 vectors
    AVX512_BF16 = "avx512_bf16"  # dot products of bf16 pairs
    CP_ASYNC = "cp.async"  # asynchronous copies of up to 16 bytes a thread to shared memory
    LDMATRIX = "ldmatrix"  # fragments of a matrix from shared memory
    MMA = "mma.sync"  # tensor cores driven by a warp
    MBARRIER = "mbarrier"  # barriers in shared memory that count bytes and arrivals
    BULK_COPY = "cp.async.bulk"  # bulk and tensor copies by the copy engine (TMA)
    WGMMA = "wgmma"  # tensor cores driven by four warps (sm_90a alone)
    TCGEN05 = "tcgen05"  # tensor cores with their own memory (sm_100a alone)
    CLUSTERS = "clusters"  # thread-block clusters with distributed shared memory
    FP8 = "fp8"  # e4m3 and e5m2 products


@dataclass(frozen=True, slots=True)
class Cache:
    """One level of cache.

    Attributes:
        level: 1, 2 or 3.
        size: bytes of one instance.
        cores: how many cores share an instance.
        bandwidth: bytes per second that one core reads from it.
    """

    level: int
    size: int
    cores: int
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Machine:
    """A frozen description of one device. Fields that a CPU does not have are 0.

    Attributes:
        name: what `find` knows it by.
        title: the product, for people.
        kind: CPU or CUDA.
        arch: exact instruction-set level: "x86-64-v3", "aarch64", "sm_90a", ...
        cores: usable cores, or streaming multiprocessors (SMs).
        clock: hertz.
        vector_bytes: width of a vector register (CPU), of the widest access of one thread (CUDA:
            16).
        vector_registers: vector registers of a core (CPU).
        bandwidth: bytes per second between device memory and all cores, as a copy or a stream
            reaches it.
        nominal_bandwidth: the same by the data sheet.
        core_bandwidth: bytes per second that one core draws from device memory on its own.
        latency: seconds of one unloaded access to device memory.
        caches: levels from the core outwards; CUDA: L2 alone.
        flops: operations per second of matrix products on all cores, by operand dtype (a fused
            multiply-add counts 2).
        vector_flops: f32 operations per second of elementwise code on all cores.
        special_flops: transcendental functions per second on all cores (CUDA special function
            units); CPU: 0, they are polynomials.
        shared_bytes: bytes that the tiles of one block may take: shared memory per block (opt-in),
            or on a CPU a core's share of the last cache.
        shared_per_core: shared memory of one SM.
        registers: 32-bit registers of one SM.
        registers_per_thread: limit per thread.
        threads_per_block, threads_per_core, blocks_per_core, warp: limits and warp size.
        launch_seconds: cost of one launch: a kernel node of a CUDA graph, or waking a pool of
            pinned threads.
        capability: CUDA compute capability.
        features: abilities, exactly.
    """

    name: str
    title: str
    kind: MachineKind
    arch: str
    cores: int
    clock: float
    vector_bytes: int
    bandwidth: float
    nominal_bandwidth: float
    core_bandwidth: float
    latency: float
    caches: tuple[Cache, ...]
    flops: tuple[tuple[DType, float], ...]
    vector_flops: float
    shared_bytes: int
    launch_seconds: float
    features: frozenset[Feature]
    vector_registers: int = 0
    special_flops: float = 0.0
    shared_per_core: int = 0
    registers: int = 0
    registers_per_thread: int = 0
    threads_per_block: int = 1
    threads_per_core: int = 1
    blocks_per_core: int = 1
    warp: int = 1
    capability: tuple[int, int] | None = None

    def __hash__(self) -> int:
        # Enough to tell machines apart; a search hashes a machine with every cached estimate.
        return hash((self.name, self.arch, self.cores, self.clock))

    def peak(self, dtype: DType) -> float:
        """Operations per second of a matrix product of `dtype` operands; a dtype that is not listed
        runs as f32.
        """
        rate = 0.0
        for known, value in self.flops:
            if known is dtype:
                return value
            if known is DType.F32:
                rate = value
        return rate

    def cache(self, level: int) -> Cache | None:
        """The cache of a level, if there is one."""
        return next((c for c in self.caches if c.level == level), None)

    @property
    def last_cache(self) -> int:
        """Bytes of the outermost cache, all instances that the cores reach; 0 without caches."""
        if not self.caches:
            return 0
        outer = self.caches[-1]
        return outer.size * max(1, self.cores // max(1, outer.cores))

    @property
    def lanes(self) -> int:
        """f32 elements of a vector register."""
        return self.vector_bytes // 4

    def has(self, feature: Feature) -> bool:
        """Whether generated code may use `feature`."""
        return feature in self.features

    @property
    def digest(self) -> str:
        """A stable digest of every field that changes an answer (not the title)."""
        fields = [
            f"{f}={getattr(self, f)!r}"
            for f in self.__dataclass_fields__
            if f not in ("title", "features")
        ]
        return digest("machine", *fields, *sorted(self.features))
