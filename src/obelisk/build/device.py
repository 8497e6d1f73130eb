"""Running a lowered graph on a CUDA device: its kernels loaded, its launches issued on a stream.

Takes a `CudaModule` and the cubins of its kernels; launches on device addresses, with no copy and
no synchronisation, so that a caller's stream capture records it too. Uses the current CUDA context,
or the primary one where there is none; every driver call is checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from obelisk.base.errors import CallError, InternalError, MissingDependency
from obelisk.lower.cuda import CudaModule, Place

STATIC_SHARED = 48 * 1024  # bytes of dynamic shared memory that need no permission
COUNTER_BYTES = 4
EARLY_LAUNCH = 9  # compute capability from which a launch may begin before the last has ended


def driver() -> Any:
    """The driver's bindings; raises `MissingDependency` where they are not installed."""
    try:
        from cuda.bindings import driver as bindings
    except ImportError as error:
        raise MissingDependency(
            f"CUDA's Python bindings are missing ({error}): install obelisk[cuda]"
        ) from error
    return bindings


def check(answer: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call; raises `InternalError` with its code where it failed."""
    if int(answer[0]) != 0:
        raise InternalError(f"CUDA: {what} failed with {answer[0]}")
    if len(answer) == 1:
        return None
    return answer[1] if len(answer) == 2 else answer[1:]


def ensure_context() -> None:
    """Make the first device's primary context current where the thread has none; frameworks share
    that one.
    """
    cu = driver()
    check(cu.cuInit(0), "starting")
    if int(check(cu.cuCtxGetCurrent(), "asking for the context")):
        return
    device = check(cu.cuDeviceGet(0), "finding a device")
    check(
        cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(device), "retaining a context")),
        "making a context current",
    )


class CudaLibrary:
    """The kernels of one module on the current context.

    Attributes:
        module: what was lowered.
        scratch_bytes: device memory that `launch` needs besides inputs and outputs; the counters
            lie at its end and must be zero before the first call.
    """

    def __init__(self, module: CudaModule, cubins: Sequence[Path]) -> None:
        if len(cubins) != len(module.kernels):
            raise InternalError(f"{len(cubins)} cubins for {len(module.kernels)} kernels")
        ensure_context()
        self.module = module
        self._cu = driver()
        self._modules: list[Any] = []
        self._functions: list[Any] = []
        cu = self._cu
        for kernel, path in zip(module.kernels, cubins, strict=True):
            loaded = check(cu.cuModuleLoadData(Path(path).read_bytes()), "loading a cubin")
            self._modules.append(loaded)
            function = check(
                cu.cuModuleGetFunction(loaded, kernel.entry.encode()), "finding a kernel"
            )
            if kernel.shared > STATIC_SHARED:
                check(
                    cu.cuFuncSetAttribute(
                        function,
                        cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                        kernel.shared,
                    ),
                    f"asking for {kernel.shared} bytes of shared memory",
                )
            self._functions.append(function)
        device = check(cu.cuCtxGetDevice(), "finding the device")
        major = check(
            cu.cuDeviceGetAttribute(
                cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device
            ),
            "asking for the compute capability",
        )
        self._early = major >= EARLY_LAUNCH
        self._counters = module.scratch_bytes
        self.scratch_bytes = module.scratch_bytes + COUNTER_BYTES * max(1, module.counters)

    def prepare(self, scratch: int, stream: int = 0) -> None:
        """Zero the counters in a scratch memory that is used for the first time."""
        check(
            self._cu.cuMemsetD32Async(
                scratch + self._counters, 0, max(1, self.module.counters), stream
            ),
            "zeroing counters",
        )

    def bind(
        self, inputs: Sequence[int], outputs: Sequence[int], scratch: int
    ) -> list[tuple[Any, Any]]:
        """Launches with their arguments in place, for `issue`; addresses are device pointers."""
        bound = []
        for launch in self.module.launches:
            addresses = []
            for p in launch.arguments:
                match p.place:
                    case Place.INPUT:
                        base = inputs[p.index]
                    case Place.OUTPUT:
                        base = outputs[p.index]
                    case Place.SCRATCH:
                        base = scratch
                    case Place.COUNTER:
                        base = scratch + self._counters
                addresses.append(base + p.offset)
            bound.append(self._packed(launch.kernel, addresses))
        return bound

    def _packed(self, number: int, addresses: list[int]) -> tuple[Any, Any]:
        """A launch configuration and an argument array that keeps what it points at alive."""
        cu, kernel = self._cu, self.module.kernels[number]
        values = (ctypes.c_void_p * len(addresses))(*addresses)
        size = ctypes.sizeof(ctypes.c_void_p)
        pointers = (ctypes.c_void_p * len(addresses))(
            *(ctypes.addressof(values) + i * size for i in range(len(addresses)))
        )
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = kernel.blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes = kernel.shared
        attributes = []
        if self._early:
            # Every kernel waits in its first statement for the one ahead of it.
            attribute = cu.CUlaunchAttribute()
            attribute.id = (
                cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        if kernel.cluster > 1:
            attribute = cu.CUlaunchAttribute()
            attribute.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            attribute.value.clusterDim.x = kernel.cluster
            attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
            attributes.append(attribute)
        config.attrs, config.numAttrs = attributes, len(attributes)
        return (config, self._functions[number]), (pointers, values)

    def issue(self, bound: Sequence[tuple[Any, Any]], stream: int) -> None:
        """Launch everything on `stream` (a handle); returns at once."""
        for (config, function), (pointers, _) in bound:
            config.hStream = self._cu.CUstream(stream)
            check(
                self._cu.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0),
                "launching a kernel",
            )

    def launch(
        self, inputs: Sequence[int], outputs: Sequence[int], scratch: int, stream: int
    ) -> None:
        """One call of the graph on device addresses, on `stream`."""
        self.issue(self.bind(inputs, outputs, scratch), stream)

    def capture(
        self, inputs: Sequence[int], outputs: Sequence[int], scratch: int, stream: int
    ) -> CudaGraph:
        """The launches as one CUDA graph. `stream` (not the default one) records it."""
        if stream == 0:
            raise CallError("a graph is recorded on a stream of its own, not on the default one")
        cu = self._cu
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        handle = cu.CUstream(stream)
        check(cu.cuStreamBeginCapture(handle, mode), "starting a capture")
        try:
            self.launch(inputs, outputs, scratch, stream)
        finally:
            graph = check(cu.cuStreamEndCapture(handle), "ending a capture")
        return CudaGraph(cu, graph)

    def close(self) -> None:
        """Unload the kernels. Nothing may run them any more."""
        for loaded in self._modules:
            check(self._cu.cuModuleUnload(loaded), "unloading a cubin")
        self._modules, self._functions = [], []


class CudaGraph:
    """A recorded call that replays as one launch."""

    def __init__(self, cu: Any, graph: Any) -> None:
        self._cu, self._graph = cu, graph
        self._ready = check(cu.cuGraphInstantiate(graph, 0), "instantiating a graph")

    def replay(self, stream: int) -> None:
        """Launch the recorded kernels on `stream`; returns at once."""
        check(self._cu.cuGraphLaunch(self._ready, self._cu.CUstream(stream)), "replaying a graph")

    def close(self) -> None:
        """Free the graph."""
        check(self._cu.cuGraphExecDestroy(self._ready), "freeing a graph")
        check(self._cu.cuGraphDestroy(self._graph), "freeing a graph")
