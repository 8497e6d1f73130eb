"""Running a lowered graph on a CUDA device: its kernels loaded, its launches issued on a stream.

Takes a `CudaModule` and the cubins of its kernels, or a bundle that names both; launches on device
addresses, with no copy and no synchronisation, so that a caller's stream capture records it too.
Uses the current CUDA context, or a device's primary one where there is none; every driver call is
checked.
"""

from __future__ import annotations

import ctypes
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from obelisk.base.digest import digest
from obelisk.base.errors import CallError, InternalError, MissingDependency, ParseError
from obelisk.lower.cuda.options import CudaKernel, CudaLaunch, CudaModule, Place, Pointer, TensorMap

COUNTER_BYTES = 4
EARLY_LAUNCH = 9  # compute capability from which a launch may begin before the last has ended
_TEXT = ("source", "plan")  # of a kernel: for people, and long
BUNDLE = 1  # version of the form that `write_bundle` writes
# Codes after which the context answers nothing but errors: illegal address, timeout, assert,
# hardware stack, illegal instruction, misaligned address, address space, program counter, failure.
STICKY = frozenset({700, 702, 710, 714, 715, 716, 717, 718, 719, 720})


class CudaError(InternalError):
    """A driver call that failed: `code` is the driver's number, `sticky` whether the context is
    lost.
    """

    def __init__(self, what: str, answer: Any) -> None:
        super().__init__(f"CUDA: {what} failed with {getattr(answer, 'name', answer)}")
        self.code = int(answer)

    @property
    def sticky(self) -> bool:
        """Whether every later call in this context fails too."""
        return self.code in STICKY


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
    """The value of a driver call; raises `CudaError` with its code where it failed."""
    if int(answer[0]) != 0:
        raise CudaError(what, answer[0])
    if len(answer) == 1:
        return None
    return answer[1] if len(answer) == 2 else answer[1:]


def ensure_context(ordinal: int = 0) -> None:
    """Make a device's primary context current where the thread has none; frameworks share it."""
    cu = driver()
    check(cu.cuInit(0), "starting")
    if int(check(cu.cuCtxGetCurrent(), "asking for the context")):
        return
    device = check(cu.cuDeviceGet(ordinal), "finding a device")
    check(
        cu.cuCtxSetCurrent(check(cu.cuDevicePrimaryCtxRetain(device), "retaining a context")),
        "making a context current",
    )


def module_json(module: CudaModule) -> dict[str, Any]:
    """A module's launches and kernels without their sources."""
    return {
        "bundle": BUNDLE,
        "kernels": [{k: v for k, v in asdict(x).items() if k not in _TEXT} for x in module.kernels],
        "launches": [
            {
                "kernel": x.kernel,
                "origin": x.origin,
                "arguments": [(p.place.value, p.index, p.offset) for p in x.arguments],
            }
            for x in module.launches
        ],
        "scratch_bytes": module.scratch_bytes,
        "counters": module.counters,
        "digest": module.digest,
        "notes": list(module.notes),
    }


def module_from_json(data: Mapping[str, Any]) -> CudaModule:
    """Read `module_json` back, with empty sources; raises `ParseError` for another form."""
    try:
        if data["bundle"] != BUNDLE:
            raise ParseError(f"bundle version {data['bundle']}, this version reads {BUNDLE}")
        kernels = tuple(_kernel_from_json(k) for k in data["kernels"])
        launches = tuple(
            CudaLaunch(
                int(x["kernel"]),
                tuple(Pointer(Place(a), int(i), int(o)) for a, i, o in x["arguments"]),
                str(x["origin"]),
            )
            for x in data["launches"]
        )
        return CudaModule(
            kernels,
            launches,
            int(data["scratch_bytes"]),
            int(data["counters"]),
            str(data["digest"]),
            tuple(data["notes"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ParseError):
            raise
        raise ParseError(f"not a bundle of kernels: {error!r}") from error


def _kernel_from_json(data: Mapping[str, Any]) -> CudaKernel:
    fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in data.items()}
    fields["maps"] = tuple(TensorMap(**m) for m in data.get("maps", ()))
    return CudaKernel(source="", **fields)


def write_bundle(module: CudaModule, cubins: Sequence[Path], directory: Path) -> Path:
    """One JSON file that names a module's launches and its cubins, under its content's digest."""
    text = json.dumps({**module_json(module), "cubins": [str(c) for c in cubins]}, sort_keys=True)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{digest('bundle', text)}.json"
    if not path.is_file():
        with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as part:
            part.write(text)
        os.replace(part.name, path)
    return path


def load_bundle(path: str | Path) -> CudaLibrary:
    """Load what `write_bundle` wrote into the current context. Raises `ParseError` for damage."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        cubins = [Path(c).read_bytes() for c in data["cubins"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ParseError(f"{path} does not read as a bundle of kernels: {error}") from error
    return CudaLibrary(module_from_json(data), cubins)


class CudaLibrary:
    """The kernels of one module on the current context.

    Attributes:
        module: what was lowered.
        scratch_bytes: device memory that `launch` needs besides inputs and outputs; the counters
            lie at its end unless they are given apart, and must be zero before the first call.
        counter_bytes: size of the counters.
    """

    def __init__(self, module: CudaModule, cubins: Sequence[Path | bytes]) -> None:
        if len(cubins) != len(module.kernels):
            raise InternalError(f"{len(cubins)} cubins for {len(module.kernels)} kernels")
        ensure_context()
        self.module = module
        self._cu = driver()
        self._modules: list[Any] = []
        self._functions: list[Any] = []
        for kernel, cubin in zip(module.kernels, cubins, strict=True):
            image = cubin if isinstance(cubin, bytes) else Path(cubin).read_bytes()
            self._add(kernel, image)
        device = check(self._cu.cuCtxGetDevice(), "finding the device")
        major = check(
            self._cu.cuDeviceGetAttribute(
                self._cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device
            ),
            "asking for the compute capability",
        )
        self._early = major >= EARLY_LAUNCH
        self._counters = module.scratch_bytes
        self.counter_bytes = COUNTER_BYTES * max(1, module.counters)
        self.scratch_bytes = module.scratch_bytes + self.counter_bytes

    def _add(self, kernel: CudaKernel, image: bytes) -> None:
        cu = self._cu
        loaded = check(cu.cuModuleLoadData(image), "loading a cubin")
        self._modules.append(loaded)
        function = check(cu.cuModuleGetFunction(loaded, kernel.entry.encode()), "finding a kernel")
        if kernel.shared:  # with what a kernel declares it may pass the usual limit, too
            check(
                cu.cuFuncSetAttribute(
                    function,
                    cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    kernel.shared,
                ),
                f"asking for {kernel.shared} bytes of shared memory",
            )
        self._functions.append(function)

    def resident_blocks(self, number: int) -> int:
        """Blocks of kernel `number` that one SM holds at a time, by the driver's calculator."""
        kernel = self.module.kernels[number]
        found = check(
            self._cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._functions[number], kernel.threads, kernel.shared
            ),
            "asking for the occupancy",
        )
        return int(found)

    def registers(self, number: int) -> int:
        """Registers of a thread of kernel `number`."""
        kind = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        found = self._cu.cuFuncGetAttribute(kind, self._functions[number])
        return int(check(found, "asking for the registers"))

    def prepare(self, scratch: int, stream: int = 0) -> None:
        """Zero the counters in a scratch memory that is used for the first time."""
        self.zero(scratch + self._counters, stream)

    def zero(self, counters: int, stream: int = 0) -> None:
        """Zero counters that lie apart from the scratch memory."""
        words = self.counter_bytes // COUNTER_BYTES
        check(self._cu.cuMemsetD32Async(counters, 0, words, stream), "zeroing counters")

    def bind(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        scratch: int,
        counters: int | None = None,
        only: int | None = None,
    ) -> list[tuple[Any, Any]]:
        """Launches with their arguments in place, for `issue`; addresses are device pointers.

        `counters` is their address, by default the end of `scratch`; `only` binds one launch.
        """
        bound = []
        tail = scratch + self._counters if counters is None else counters
        launches = self.module.launches
        for launch in launches if only is None else launches[only : only + 1]:
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
                        base = tail
                addresses.append(base + p.offset)
            bound.append(self._packed(launch.kernel, addresses))
        return bound

    def _packed(self, number: int, addresses: list[int]) -> tuple[Any, Any]:
        """A launch configuration and an argument array that keeps what it points at alive."""
        cu, kernel = self._cu, self.module.kernels[number]
        values = (ctypes.c_void_p * len(addresses))(*addresses)
        size = ctypes.sizeof(ctypes.c_void_p)
        maps = [self._tensor_map(m, addresses[m.argument]) for m in kernel.maps]
        pointers = (ctypes.c_void_p * (len(addresses) + len(maps)))(
            *(ctypes.addressof(values) + i * size for i in range(len(addresses))),
            *(m.getPtr() for m in maps),
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
        return (config, self._functions[number]), (pointers, (values, maps))

    def _tensor_map(self, m: TensorMap, address: int) -> Any:
        """A matrix in device memory as the copy engine takes it."""
        cu = self._cu
        kinds = {
            "f16": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            "bf16": cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        }
        answer = cu.cuTensorMapEncodeTiled(
            kinds[m.dtype],
            2,
            address,
            [cu.cuuint64_t(m.columns), cu.cuuint64_t(m.rows)],
            [cu.cuuint64_t(m.stride)],
            [cu.cuuint32_t(m.box_columns), cu.cuuint32_t(m.box_rows)],
            [cu.cuuint32_t(1), cu.cuuint32_t(1)],
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cu.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cu.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        return check(answer, f"describing a matrix of {m.rows} by {m.columns} to the copy engine")

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
        return self.record([self.bind(inputs, outputs, scratch)], stream)

    def record(self, calls: Sequence[Sequence[tuple[Any, Any]]], stream: int) -> CudaGraph:
        """Several bound calls, one after the other, as one CUDA graph."""
        if stream == 0:
            raise CallError("a graph is recorded on a stream of its own, not on the default one")
        cu = self._cu
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        handle = cu.CUstream(stream)
        check(cu.cuStreamBeginCapture(handle, mode), "starting a capture")
        try:
            for bound in calls:
                self.issue(bound, stream)
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
