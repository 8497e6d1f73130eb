"""A CUDA driver on host memory, so that the device worker and what calls it run without a GPU.

`install` puts a module in the place of `cuda.bindings.driver`: memory is the process's own, streams
run at once, graphs remember launches, and a "cubin" is JSON that names what its kernel does
(`ACTS`). A kernel that faults leaves a context in which every later call fails, as on a device.
`main` serves the tuner like `obelisk.tune.gpu_worker`, on this driver.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

ROWS, COLUMNS = 64, 96
COUNT = ROWS * COLUMNS
ILLEGAL = 700


class Code(int):
    """A driver's answer: a number with a name."""

    @property
    def name(self) -> str:
        known = {ILLEGAL: "CUDA_ERROR_ILLEGAL_ADDRESS", 201: "CUDA_ERROR_INVALID_CONTEXT"}
        return known.get(int(self), f"CUDA_ERROR_{int(self)}")


def floats(address: int, count: int = COUNT) -> np.ndarray:
    """Memory as f32."""
    return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (count,))


def right(x: int, y: int, scratch: int, counter: int) -> None:
    """y = 2 x + 1."""
    floats(y)[:] = 2 * floats(x) + 1


def squares(x: int, y: int, scratch: int, counter: int) -> None:
    """y = x^2."""
    floats(y)[:] = floats(x) ** 2


def slow(x: int, y: int, scratch: int, counter: int) -> None:
    """The same, a hundred times."""
    for _ in range(100):
        right(x, y, scratch, counter)


def half(x: int, y: int, scratch: int, counter: int) -> None:
    floats(y)[: COUNT // 2] = 2 * floats(x)[: COUNT // 2] + 1


def off(x: int, y: int, scratch: int, counter: int) -> None:
    floats(y)[:] = 2 * floats(x) + 1.01


def beyond(x: int, y: int, scratch: int, counter: int) -> None:
    right(x, y, scratch, counter)
    floats(y, COUNT + 1)[COUNT] = 1.0


def spoils(x: int, y: int, scratch: int, counter: int) -> None:
    right(x, y, scratch, counter)
    floats(x)[3] = 0.0


def trusting(x: int, y: int, scratch: int, counter: int) -> None:
    floats(y)[:] = 2 * floats(x) + 1 + floats(scratch, 1)[0]


def counting(x: int, y: int, scratch: int, counter: int) -> None:
    """Right on its first call only: it leaves its counter as no other call may find it."""
    seen = ctypes.c_uint32.from_address(counter)
    if seen.value == 0:
        right(x, y, scratch, counter)
    seen.value += 1


def behind(x: int, y: int, scratch: int, counter: int) -> None:
    right(x, y, scratch, counter)
    ctypes.c_uint32.from_address(counter + 4).value = 7


def wavering(x: int, y: int, scratch: int, counter: int) -> None:
    """Right within the tolerance, but now and then by other bits."""
    right(x, y, scratch, counter)
    ROUNDS[0] += 1
    if ROUNDS[0] % 50 == 0:
        floats(y)[5] *= 1 + 1e-6


ROUNDS = [0]


def hang(x: int, y: int, scratch: int, counter: int) -> None:
    time.sleep(1000)


ACTS: dict[str, Callable[[int, int, int, int], None]] = {
    f.__name__: f
    for f in (
        right,
        squares,
        slow,
        half,
        off,
        beyond,
        spoils,
        trusting,
        counting,
        behind,
        wavering,
        hang,
    )
}


class Driver(types.ModuleType):
    """The functions of the driver that Obelisk uses."""

    def __init__(self) -> None:
        super().__init__("cuda.bindings.driver")
        self.held: dict[int, Any] = {}
        self.events: dict[int, float] = {}
        self.recording: list[Any] | None = None
        self.lost = 0
        self.next = 1
        word = lambda **names: types.SimpleNamespace(**names)  # noqa: E731
        self.CUstream_flags = word(CU_STREAM_NON_BLOCKING=1)
        self.CUstreamCaptureMode = word(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)
        self.CUfunction_attribute = word(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=1, CU_FUNC_ATTRIBUTE_NUM_REGS=2
        )
        self.CUlaunchAttributeID = word(
            CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION=1,
            CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION=2,
        )
        self.CUlaunchConfig = self.CUlaunchAttribute = lambda: word(
            value=word(clusterDim=word(x=1))
        )
        self.CUstream = int
        self.facts = {
            "COMPUTE_CAPABILITY_MAJOR": 9, "COMPUTE_CAPABILITY_MINOR": 0,
            "MULTIPROCESSOR_COUNT": 132, "CLOCK_RATE": 1980000,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 * 1024,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 228 * 1024,
            "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536, "MAX_THREADS_PER_BLOCK": 1024,
            "MAX_THREADS_PER_MULTIPROCESSOR": 2048, "MAX_BLOCKS_PER_MULTIPROCESSOR": 32,
            "L2_CACHE_SIZE": 60 << 20, "GLOBAL_MEMORY_BUS_WIDTH": 6144,
            "MEMORY_CLOCK_RATE": 3201000,
        }  # fmt: skip
        self.CUdevice_attribute = word(**{f"CU_DEVICE_ATTRIBUTE_{k}": k for k in self.facts})

    def _new(self, value: Any) -> int:
        self.next += 1
        self.held[self.next] = value
        return self.next

    def _answer(self, *values: Any) -> tuple[Any, ...]:
        return (Code(self.lost), *values)

    def __getattr__(self, name: str) -> Any:
        """What only has to succeed: contexts, devices, streams."""
        if name.startswith("cu"):
            return lambda *_: self._answer(1)
        raise AttributeError(name)

    def cuDeviceGetName(self, size: int, device: int) -> tuple[Any, ...]:
        return self._answer(b"NVIDIA H200".ljust(size, b"\0"))

    def cuDriverGetVersion(self) -> tuple[Any, ...]:
        return self._answer(13000)

    def cuDeviceGetAttribute(self, name: str, device: int) -> tuple[Any, ...]:
        return self._answer(self.facts[name])

    def cuMemAlloc(self, size: int) -> tuple[Any, ...]:
        raw = ctypes.create_string_buffer(size + 256)
        address = ctypes.addressof(raw)
        start = address + -address % 256
        self.held[start] = raw
        return self._answer(start)

    def cuMemHostRegister(self, address: int, size: int, flags: int) -> tuple[Any, ...]:
        return self._answer()

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        del self.held[address]
        return self._answer()

    def cuMemcpyHtoDAsync(self, to: int, source: int, size: int, stream: int) -> tuple[Any, ...]:
        ctypes.memmove(to, source, size)
        return self._answer()

    cuMemcpyDtoHAsync = cuMemcpyDtoDAsync = cuMemcpyHtoDAsync

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> tuple[Any, ...]:
        ctypes.memset(address, value, size)
        return self._answer()

    def cuMemsetD32Async(self, at: int, value: int, count: int, stream: int) -> tuple[Any, ...]:
        ctypes.memset(at, value, 4 * count)
        return self._answer()

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        return self._answer(self._new("event"))

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        self.events[event] = time.perf_counter()
        return self._answer()

    def cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        return self._answer()

    cuStreamSynchronize = cuEventSynchronize

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        return self._answer()

    def cuEventElapsedTime(self, first: int, second: int) -> tuple[Any, ...]:
        return self._answer(1e3 * (self.events[second] - self.events[first]))

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        try:
            told = json.loads(image)
            return self._answer(self._new((told["act"], told.get("arguments", 4))))
        except ValueError:
            return Code(200), 0

    def cuModuleGetFunction(self, module: int, name: bytes) -> tuple[Any, ...]:
        return self._answer(self._new(self.held[module]))

    def cuModuleUnload(self, module: int) -> tuple[Any, ...]:
        return self._answer()

    def cuLaunchKernelEx(
        self, config: Any, function: int, arguments: int, extra: int
    ) -> tuple[Any, ...]:
        act, count = self.held[function]
        places = (ctypes.c_void_p * count).from_address(arguments)
        values = [ctypes.c_void_p.from_address(p or 0).value or 0 for p in places]
        values += [0] * (4 - count)
        if self.recording is not None:
            self.recording.append((act, values))
        else:
            self._run(act, values)
        return self._answer()

    def _run(self, act: str, values: Sequence[int]) -> None:
        if act == "fault":
            self.lost = ILLEGAL
        elif not self.lost:
            ACTS[act](*values)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Any, ...]:
        self.recording = []
        return self._answer()

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, ...]:
        found, self.recording = self.recording, None
        return self._answer(self._new(found))

    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[Any, ...]:
        return self._answer(graph)

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[Any, ...]:
        for act, values in self.held[graph]:
            self._run(act, values)
        return self._answer()

    def cuGraphExecDestroy(self, graph: int) -> tuple[Any, ...]:
        return self._answer()

    cuGraphDestroy = cuGraphExecDestroy

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, *_: int) -> tuple[Any, ...]:
        return self._answer(2)

    def cuFuncGetAttribute(self, *_: int) -> tuple[Any, ...]:
        return self._answer(64)


def install(put: Callable[[str, Any], Any] = sys.modules.__setitem__) -> Driver:
    """Make the driver importable in this process."""
    made = Driver()
    package, bindings = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
    package.bindings = bindings  # type: ignore[attr-defined]
    bindings.driver = made  # type: ignore[attr-defined]
    for name, module in {
        "cuda": package, "cuda.bindings": bindings, "cuda.bindings.driver": made,
    }.items():  # fmt: skip
        put(name, module)
    return made


def main(channel: int, lifeline: int, paths: Sequence[str]) -> None:
    """Serve the tuner on this driver."""
    install()
    from obelisk.tune import gpu_worker

    gpu_worker.main(channel, lifeline, paths)
