"""Which CUDA device is here, and what it can hold: the machine that programs are searched for.

Takes the ordinal of a device; gives what the driver says of it (`DeviceFacts`) and the `Machine`
that follows. It promises that every limit is the device's own figure, never a constant of its
family; rates that no driver knows come from the description of the product, scaled to its cores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from obelisk.base.errors import UserError
from obelisk.build.device import CudaError, check, driver
from obelisk.machine import Cache, Machine
from obelisk.machine.cuda import COPY_FRACTION, CUDA_MACHINES
from obelisk.machine.registry import for_capability

KHZ = 1e3
_ELSEWHERE = (
    "use --device cpu; or search here (obelisk search PROGRAM --target sm_90a -o FILE) and tune "
    "where there is one (obelisk tune FILE --device cuda)"
)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What the driver says of one device; bytes, hertz, and counts.

    `memory_rate` is the nominal bandwidth in bytes per second, 0 where the driver does not tell.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    clock: float
    shared_bytes: int
    shared_per_core: int
    registers: int
    threads_per_block: int
    threads_per_core: int
    blocks_per_core: int
    cache: int
    memory_rate: float = 0.0
    driver: str = ""


def device_facts(ordinal: int = 0) -> DeviceFacts:
    """Ask the driver. Raises `MissingDependency` without its bindings and `UserError` where there
    is no such device; the text says what to do instead.
    """
    cu = driver()
    try:
        check(cu.cuInit(0), "starting")
        count = int(check(cu.cuDeviceGetCount(), "counting devices"))
    except (CudaError, RuntimeError, OSError) as error:  # no driver library, or no device
        raise UserError(f"no CUDA device can be used here ({error}): {_ELSEWHERE}") from error
    if ordinal >= count:
        raise UserError(f"cuda:{ordinal}: this machine has {count} CUDA devices, numbered from 0")
    device = check(cu.cuDeviceGet(ordinal), "finding a device")
    kinds = cu.CUdevice_attribute

    def ask(name: str) -> int:
        attribute = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(cu.cuDeviceGetAttribute(attribute, device), f"asking for {name.lower()}"))

    version = int(check(cu.cuDriverGetVersion(), "asking for the version"))
    raw = check(cu.cuDeviceGetName(256, device), "asking for the name")
    width, rate = ask("GLOBAL_MEMORY_BUS_WIDTH") // 8, ask("MEMORY_CLOCK_RATE") * KHZ
    return DeviceFacts(
        name=bytes(raw).split(b"\0")[0].decode(errors="replace"),
        capability=(ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")),
        cores=ask("MULTIPROCESSOR_COUNT"),
        clock=ask("CLOCK_RATE") * KHZ,
        shared_bytes=ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        shared_per_core=ask("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        registers=ask("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        threads_per_block=ask("MAX_THREADS_PER_BLOCK"),
        threads_per_core=ask("MAX_THREADS_PER_MULTIPROCESSOR"),
        blocks_per_core=ask("MAX_BLOCKS_PER_MULTIPROCESSOR"),
        cache=ask("L2_CACHE_SIZE"),
        memory_rate=2.0 * rate * width,  # two transfers a clock
        driver=f"{version // 1000}.{version % 1000 // 10}",
    )


def product_of(facts: DeviceFacts) -> Machine:
    """The description that fits a device best: of its product, else of its exact capability.

    Raises `UnknownName` for a capability that no description has.
    """
    words = facts.name.lower().replace("geforce", "").replace(" ", "").replace("-", "")
    for machine in CUDA_MACHINES:
        if machine.capability == facts.capability and machine.name in words:
            return machine
    return for_capability(*facts.capability)


def machine_of(facts: DeviceFacts) -> Machine:
    """The machine that a device is: limits as it says, rates of its product scaled to its cores.

    A device whose figures are those of a known product gives exactly that product's description.
    """
    base = product_of(facts)
    same_product = base.name in facts.name.lower().replace(" ", "")
    scale = facts.cores * facts.clock / (base.cores * base.clock)
    bandwidth = base.bandwidth
    if not same_product and facts.memory_rate > 0:
        bandwidth = facts.memory_rate * COPY_FRACTION
    cache = base.caches[-1]
    rate = cache.bandwidth * cache.cores * scale
    return replace(
        base,
        cores=facts.cores,
        clock=facts.clock,
        bandwidth=bandwidth,
        nominal_bandwidth=base.nominal_bandwidth if same_product else bandwidth / COPY_FRACTION,
        core_bandwidth=64 * facts.clock,
        caches=(Cache(2, facts.cache, facts.cores, rate / facts.cores),),
        flops=tuple((d, r * scale) for d, r in base.flops),
        vector_flops=base.vector_flops * scale,
        special_flops=16.0 * facts.cores * facts.clock,
        shared_bytes=facts.shared_bytes,
        shared_per_core=facts.shared_per_core,
        registers=facts.registers,
        threads_per_block=facts.threads_per_block,
        threads_per_core=facts.threads_per_core,
        blocks_per_core=facts.blocks_per_core,
    )
