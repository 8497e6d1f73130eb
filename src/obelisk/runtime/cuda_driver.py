"""The CUDA driver, as far as a plan needs it: memory, one cooperative launch, events.

Takes nothing; gives thin functions over `cuda.bindings.driver`, imported when first used. Every
call is checked. It contains no compiler: a plan's kernel is loaded as it was built.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from obelisk.base.errors import InternalError, MissingDependency, UserError
from obelisk.plan import HostIdentity

Array = Any
GPU = "CUDA"  # `system` of a device's identity


def driver() -> Any:
    """The bindings; raises `MissingDependency` where they are not installed."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise MissingDependency(
            f"a CUDA plan needs CUDA's Python bindings ({error}): pip install 'obelisk[cuda]'"
        ) from error
    return bindings


def check(answer: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call; raises `InternalError` with its code where it failed."""
    if int(answer[0]) != 0:
        raise InternalError(f"CUDA: {what} failed with {answer[0]}")
    if len(answer) == 1:
        return None
    return answer[1] if len(answer) == 2 else answer[1:]


class Device:
    """The first CUDA device and its primary context, which frameworks share."""

    def __init__(self) -> None:
        """Raises `UserError` where there is no device, `MissingDependency` without bindings."""
        cu = self.cu = driver()
        try:
            started = int(cu.cuInit(0)[0]) == 0
        except RuntimeError:  # bindings without a driver: its library is loaded by the first call
            started = False
        if not started or int(check(cu.cuDeviceGetCount(), "counting devices")) == 0:
            raise UserError(
                "no CUDA device here: this plan needs one (synthesise with --device cpu)"
            )
        self.number = check(cu.cuDeviceGet(0), "finding a device")
        if not int(check(cu.cuCtxGetCurrent(), "asking for the context")):
            context = check(cu.cuDevicePrimaryCtxRetain(self.number), "retaining a context")
            check(cu.cuCtxSetCurrent(context), "making a context current")

    def attribute(self, name: str) -> int:
        """A device attribute by the end of its name, e.g. `MULTIPROCESSOR_COUNT`."""
        which = getattr(self.cu.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(self.cu.cuDeviceGetAttribute(which, self.number), f"asking for {name}"))

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability."""
        return (
            self.attribute("COMPUTE_CAPABILITY_MAJOR"), self.attribute("COMPUTE_CAPABILITY_MINOR")
        )  # fmt: skip

    def identity(self, arch: str) -> HostIdentity:
        """This device, running code that was built for `arch`."""
        name = check(self.cu.cuDeviceGetName(128, self.number), "asking for the name")
        title = name.decode(errors="replace").strip("\0 ")
        return HostIdentity(GPU, arch, title, (), self.attribute("MULTIPROCESSOR_COUNT"))

    def allocate(self, nbytes: int) -> int:
        """Device memory, zeroed; raises `UserError` where there is not enough."""
        size = max(16, nbytes)
        answer = self.cu.cuMemAlloc(size)
        if int(answer[0]) != 0:
            free, total = check(self.cu.cuMemGetInfo(), "asking for free memory")
            raise UserError(
                f"the plan needs {size} bytes more, the device has {free} of {total} free"
            )
        address = int(answer[1])
        self.zero(address, size)
        return address

    def free(self, address: int) -> None:
        """Give memory back."""
        check(self.cu.cuMemFree(address), "freeing memory")

    def zero(self, address: int, nbytes: int) -> None:
        """Fill with zeros."""
        check(self.cu.cuMemsetD8(address, 0, nbytes), "zeroing memory")

    def upload(self, address: int, data: Array) -> None:
        """Copy an array to device memory."""
        flat = np.ascontiguousarray(data)
        if flat.nbytes:
            check(self.cu.cuMemcpyHtoD(address, flat.ctypes.data, flat.nbytes), "copying to device")

    def download(self, address: int, shape: tuple[int, ...], kind: Any) -> Array:
        """Copy device memory to a new array."""
        out = np.empty(shape, kind)
        if out.nbytes:
            check(self.cu.cuMemcpyDtoH(out.ctypes.data, address, out.nbytes), "copying from device")
        return out

    def tensors(self, parts: Sequence[tuple[int, int]]) -> list[Any] | None:
        """Device memory, as addresses and bytes, as uint8 tensors of torch that share it; None
        where torch does not see this device.
        """
        import torch

        if not torch.cuda.is_available():
            return None
        return [
            torch.as_tensor(_Memory(*part), device=f"cuda:{int(self.number)}") for part in parts
        ]


class _Memory:
    """Memory in the form in which frameworks take each other's."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


class Kernel:
    """A loaded kernel that is launched cooperatively: all of its blocks run at a time, or none."""

    def __init__(
        self, device: Device, binary: bytes, entry: str, blocks: int, threads: int, shared: int
    ) -> None:
        """Load and check the resources; raises `UserError` naming the limit that is exceeded."""
        cu = device.cu
        self.device, self.blocks, self.threads, self.shared = device, blocks, threads, shared
        room = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        if shared > room:
            raise UserError(f"the plan's kernel takes {shared} bytes of shared memory, not {room}")
        self.module = check(cu.cuModuleLoadData(binary), "loading the plan's kernel")
        self.function = check(cu.cuModuleGetFunction(self.module, entry.encode()), "finding it")
        what = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuFuncSetAttribute(self.function, what, shared), "asking for shared memory")
        each = check(
            cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(self.function, threads, shared),
            "asking for the occupancy",
        )
        most = int(each) * device.attribute("MULTIPROCESSOR_COUNT")
        if blocks > most:
            raise UserError(f"the plan's kernel needs {blocks} blocks at a time, {most} fit here")
        self.events = [check(cu.cuEventCreate(0), "making an event") for _ in range(2)]

    def run(self, argument: ctypes.Structure) -> float:
        """Launch with one structure by value and wait; gives seconds on the device."""
        cu = self.device.cu
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        start, end = self.events
        check(cu.cuEventRecord(start, 0), "recording an event")
        check(
            cu.cuLaunchCooperativeKernel(
                self.function, self.blocks, 1, 1, self.threads, 1, 1, self.shared, 0,
                ctypes.addressof(pointers),
            ),
            "launching the plan's kernel",
        )  # fmt: skip
        check(cu.cuEventRecord(end, 0), "recording an event")
        check(cu.cuEventSynchronize(end), "running the plan's kernel")
        return float(check(cu.cuEventElapsedTime(start, end), "reading the time")) / 1e3

    def close(self) -> None:
        """Unload."""
        check(self.device.cu.cuModuleUnload(self.module), "unloading the plan's kernel")
