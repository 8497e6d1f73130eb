"""The child process that runs candidates and baselines on a CUDA device. It judges nothing.

Takes the same commands as `worker`; candidates are bundles of cubins (`build.device`), baselines
are torch calls. Checked calls read device memory that is filled from the tuner's shared regions,
canaries included, and goes back there; timed calls are replays of one CUDA graph that holds a call
on each copy of the inputs. An error that costs the context ends the process, with the driver's
name of it as its last words.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from obelisk.base.errors import ObeliskError
from obelisk.build.device import CudaError, CudaLibrary, check, driver, ensure_context, load_bundle
from obelisk.tune.inputs import TensorSpec
from obelisk.tune.regions import PAGE, RegionSpec, attach, attach_guarded
from obelisk.tune.types import Setup
from obelisk.tune.worker import Refused, put_results, serve, specs_of

CONTEXT_LOST = 71  # exit code; the tuner reads the reason from what was printed
_WINDOW = 1 << 20  # bytes at either end of an input that are looked at after a call
_GARBAGE = 0xFF
_READ_ONLY = 0x08  # CU_MEMHOSTREGISTER_READ_ONLY: pages that this process cannot write
_STEADY, _STEADY_BYTES = 32, 1 << 28  # calls in a row that are compared, and bytes for them
_COPY, _COPIES = 1 << 30, 9  # bytes of a copy that measures bandwidth, and how many of them


class DeviceArray:
    """A tensor in device memory, as baselines get it: its bytes, and what they mean.

    torch reads it without a copy (`torch.as_tensor(array, device="cuda")` gives the bytes).
    """

    def __init__(self, address: int, spec: TensorSpec) -> None:
        self.address, self.spec = address, spec

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.spec.nbytes,), "typestr": "|u1", "data": (self.address, False),
            "version": 3,
        }  # fmt: skip


class GpuWorker:
    """State of the child: device memory, loaded kernels, recorded graphs."""

    def __init__(self, hello: dict[str, Any]) -> None:
        self.inputs, self.outputs = specs_of(hello["inputs"]), specs_of(hello["outputs"])
        self.threads, self.ordinal = int(hello["threads"]), int(hello["ordinal"])
        self.cu = driver()
        ensure_context(self.ordinal)
        flag = int(self.cu.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self.stream = int(check(self.cu.cuStreamCreate(flag), "making a stream"))
        self.events = [int(check(self.cu.cuEventCreate(0), "making an event")) for _ in range(2)]
        self.shared_in = [attach(RegionSpec(*r), False) for r in hello["input_regions"]]
        self.around_out = [attach_guarded(RegionSpec(*r)) for r in hello["output_regions"]]
        self.around_scratch = attach_guarded(RegionSpec(*hello["scratch_region"]))
        self.window = np.empty(_WINDOW, np.uint8)  # what inputs hold after a call
        for array in (*self.shared_in, *self.around_out, self.around_scratch, self.window):
            self.pin(array)
        self.fixed = [self.memory(s.nbytes) for s in self.inputs]  # what checked calls read
        self.guarded = [self.memory(a.size) for a in self.around_out]  # what they write
        self.private = [self.memory(s.nbytes) for s in self.outputs]  # what timed calls write
        self.sets: dict[int, list[int]] = {}
        self.copies: list[list[int]] = []
        self.libraries: dict[int, CudaLibrary] = {}
        self.scratch: dict[int, int] = {}
        self.baselines: dict[int, list[Callable[[], Any]]] = {}
        self.replays: dict[int, Callable[[], Any]] = {}
        names = [str(n) for n in hello.get("imports", ())]
        self.ahead = threading.Thread(target=import_ahead, args=(names,), daemon=True)
        self.ahead.start()

    # --- memory ---

    def memory(self, size: int) -> int:
        """Device memory of at least a byte, aligned to 256."""
        return int(check(self.cu.cuMemAlloc(max(size, 1)), f"taking {size} bytes of memory"))

    def pin(self, array: np.ndarray) -> None:
        """Let the device copy from and to host memory directly, where the system allows it."""
        if array.size:
            kind = 0 if array.flags.writeable else _READ_ONLY
            self.cu.cuMemHostRegister(array.ctypes.data, array.nbytes, kind)  # refused: no matter

    def up(self, address: int, array: np.ndarray) -> None:
        """Host to device, in the order of the stream: the default one would not wait for it."""
        if array.size:
            data, size = array.ctypes.data, array.nbytes
            check(self.cu.cuMemcpyHtoDAsync(address, data, size, self.stream), "copying in")

    def down(self, array: np.ndarray, address: int) -> None:
        """Device to host; there when this returns."""
        if array.size:
            data, size = array.ctypes.data, array.nbytes
            check(self.cu.cuMemcpyDtoHAsync(data, address, size, self.stream), "copying out")
            self.sync("copying out")

    def sync(self, what: str) -> None:
        """Wait for the stream; what a kernel did wrong shows here."""
        check(self.cu.cuStreamSynchronize(self.stream), what)

    # --- commands ---

    def do_load(self, key: int, path: str) -> dict[str, Any]:
        """Load a bundle and give it scratch memory between pages that hold canaries. Once: its
        counters are then as its calls leave them.
        """
        if key in self.libraries:
            return {}
        library = load_bundle(path)
        self.scratch[key] = self.memory(library.scratch_bytes + 3 * PAGE) + PAGE
        library.prepare(self.scratch[key], self.stream)
        self.sync("preparing scratch memory")
        self.libraries[key] = library
        return {}

    def do_run(self, key: int, which: int, first: bool) -> dict[str, Any]:
        """One checked call on input set `which`, which the shared regions hold now. After the first
        one of a candidate its inputs are looked at, too.
        """
        library, scratch = self.libraries[key], self.scratch[key]
        if which not in self.sets:
            self.sets[which] = self._uploaded()
        for address, source, spec in zip(self.fixed, self.sets[which], self.inputs, strict=True):
            if spec.nbytes:
                size, stream = spec.nbytes, self.stream
                check(self.cu.cuMemcpyDtoDAsync(address, source, size, stream), "choosing inputs")
        for address, around in zip(self.guarded, self.around_out, strict=True):
            self.up(address, around)
        if library.module.scratch_bytes:  # the counters behind it stay as the last call left them
            size = library.module.scratch_bytes
            check(self.cu.cuMemsetD8Async(scratch, _GARBAGE, size, self.stream), "filling")
        front, rear = self.around_scratch[:PAGE], self._rear(library.scratch_bytes)
        self.up(scratch - PAGE, front)
        self.up(scratch + library.scratch_bytes, rear)
        outs = [address + PAGE for address in self.guarded]
        bound = library.bind(self.fixed, outs, scratch)
        self.cu.cuEventRecord(self.events[0], self.stream)
        library.issue(bound, self.stream)
        self.cu.cuEventRecord(self.events[1], self.stream)
        self.sync("running the kernels")
        seconds = self._elapsed()
        for address, around in zip(self.guarded, self.around_out, strict=True):
            self.down(around, address)
        self.down(front, scratch - PAGE)
        self.down(rear, scratch + library.scratch_bytes)
        return {"code": 0, "seconds": seconds, "changed": self._changed() if first else ""}

    def _uploaded(self) -> list[int]:
        """A new copy of what the shared inputs hold, in device memory."""
        made = [self.memory(s.nbytes) for s in self.inputs]
        for address, shared in zip(made, self.shared_in, strict=True):
            self.up(address, shared)
        self.sync("copying in")
        return made

    def _rear(self, used: int) -> np.ndarray:
        return self.around_scratch[PAGE + used : PAGE + used + 2 * PAGE]

    def _elapsed(self) -> float:
        check(self.cu.cuEventSynchronize(self.events[1]), "waiting for an event")
        ms = check(self.cu.cuEventElapsedTime(*self.events), "reading a time")
        return float(ms) * 1e-3

    def _changed(self) -> str:
        """Which input the call changed, looking at both of its ends; empty for none."""
        for i, (address, shared) in enumerate(zip(self.fixed, self.shared_in, strict=True)):
            for start in {0, max(0, shared.size - _WINDOW)}:
                part = shared[start : start + _WINDOW]
                now = self.window[: part.size]
                self.down(now, address + start)
                if not np.array_equal(now, part):
                    at = start + int(np.flatnonzero(now != part)[0])
                    return f"input {i}: it was changed, first at byte {at}"
        return ""

    def do_snapshot(self) -> dict[str, Any]:
        """Add a copy of what the shared inputs hold now, for timed calls."""
        self.copies.append(self._uploaded())
        return {}

    def do_prepare(self, key: int, target: str, payload: Any) -> dict[str, Any]:
        """Import a baseline's factory, let it prepare one callable per copy, and record them.

        Not while modules are imported ahead: of a module that another thread is in the middle of
        importing, torch's circular imports see a half.
        """
        self.ahead.join()
        module, _, name = target.partition(":")
        factory = getattr(importlib.import_module(module), name)
        arrays = [
            [DeviceArray(p, s) for p, s in zip(copy, self.inputs, strict=True)]
            for copy in self.copies
        ]
        calls = list(factory(Setup(arrays, self.threads, payload)))
        if len(calls) != len(self.copies):
            raise Refused(f"the factory gave {len(calls)} callables for {len(self.copies)} copies")
        self.baselines[key] = calls
        self.replays[key] = self._recorded(calls)
        return {}

    def _recorded(self, calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
        """torch calls as one CUDA graph, after warming up; replays go to the worker's stream."""
        import torch

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for call in (*calls[:2], *calls[:2]):
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        torch.cuda.synchronize()
        own = torch.cuda.ExternalStream(self.stream)

        def replay() -> None:
            with torch.cuda.stream(own):
                graph.replay()

        return replay

    def replay_of(self, key: int) -> Callable[[], Any]:
        """What replays one call on each copy."""
        if key not in self.replays:
            library = self.libraries[key]
            scratch = self.scratch[key]
            calls = [library.bind(copy, self.private, scratch) for copy in self.copies]
            graph = library.record(calls, self.stream)
            self.replays[key] = lambda: graph.replay(self.stream)
        return self.replays[key]

    def do_turn(self, key: int, samples: int, repeats: int, settle: float) -> dict[str, Any]:
        """Time `samples` batches of about `repeats` calls after one untimed replay; seconds per
        call of each batch.
        """
        replay, n = self.replay_of(key), len(self.copies)
        times = max(1, round(repeats / n))
        replay()
        self.sync("warming up")
        out: list[float] = []
        for _ in range(samples):
            self.cu.cuEventRecord(self.events[0], self.stream)
            for _ in range(times):
                replay()
            self.cu.cuEventRecord(self.events[1], self.stream)
            self.sync("running the kernels")
            out.append(self._elapsed() / (n * times))
        return {"seconds": out, "code": 0, "calls": samples * n * times}

    def do_show(self, key: int, copy: int) -> dict[str, Any]:
        """One call on a given copy, its outputs put into the shared regions for the tuner."""
        shared = [
            a[PAGE : PAGE + s.nbytes] for a, s in zip(self.around_out, self.outputs, strict=True)
        ]
        if key in self.baselines:
            import torch

            result = self.baselines[key][copy]()
            torch.cuda.synchronize()
            put_results(result, self.outputs, shared)
            return {"code": 0}
        library = self.libraries[key]
        for address, fill in zip(self.private, shared, strict=True):
            self.up(address, fill)
        bound = library.bind(self.copies[copy], self.private, self.scratch[key])
        library.issue(bound, self.stream)
        self.sync("running the kernels")
        for address, got in zip(self.private, shared, strict=True):
            self.down(got, address)
        return {"code": 0}

    def do_steady(self, key: int, times: int) -> dict[str, Any]:
        """Calls one after the other on one copy, each with outputs of its own: how many gave other
        bits than the first.
        """
        library, scratch, copy = self.libraries[key], self.scratch[key], self.copies[0]
        size = sum(s.nbytes for s in self.outputs)
        at_once = max(2, min(_STEADY, _STEADY_BYTES // max(1, size)))
        kept = [[self.memory(s.nbytes) for s in self.outputs] for _ in range(at_once)]
        bound = [library.bind(copy, outs, scratch) for outs in kept]
        first: list[np.ndarray] = []
        moved = done = 0
        while done < times:
            for outs in kept:
                for address, spec in zip(outs, self.outputs, strict=True):
                    if spec.nbytes:
                        size, stream = spec.nbytes, self.stream
                        check(self.cu.cuMemsetD8Async(address, _GARBAGE, size, stream), "filling")
            for call in bound:
                library.issue(call, self.stream)
            self.sync("running the kernels")
            for outs in kept:
                got = [np.empty(s.nbytes, np.uint8) for s in self.outputs]
                for array, address in zip(got, outs, strict=True):
                    self.down(array, address)
                first = first or got
                moved += any(not np.array_equal(a, b) for a, b in zip(first, got, strict=True))
            done += at_once
        for address in (a for outs in kept for a in outs):
            check(self.cu.cuMemFree(address), "giving memory back")
        return {"moved": moved, "calls": done}

    def do_ceiling(self) -> dict[str, Any]:
        """Bytes per second that a copy in device memory moves, read and written: a median."""
        source, target = self.memory(_COPY), self.memory(_COPY)
        rates: list[float] = []
        check(self.cu.cuMemsetD8Async(source, 1, _COPY, self.stream), "filling")
        for _ in range(_COPIES):
            self.cu.cuEventRecord(self.events[0], self.stream)
            check(self.cu.cuMemcpyDtoDAsync(target, source, _COPY, self.stream), "copying")
            self.cu.cuEventRecord(self.events[1], self.stream)
            self.sync("copying")
            rates.append(2 * _COPY / self._elapsed())
        for address in (source, target):
            check(self.cu.cuMemFree(address), "giving memory back")
        return {"bandwidth": sorted(rates)[_COPIES // 2]}

    def do_profile(self, key: int, rounds: int) -> dict[str, Any]:
        """Each launch alone, recorded once for every copy of the inputs: seconds of each, and what
        the device says of its kernel. A launch reads what the whole call left in scratch memory.
        """
        library, scratch = self.libraries[key], self.scratch[key]
        whole = [library.bind(copy, self.private, scratch) for copy in self.copies]
        library.issue(whole[0], self.stream)
        self.sync("running the kernels")
        rows: list[dict[str, Any]] = []
        for number, launch in enumerate(library.module.launches):
            calls = [library.bind(copy, self.private, scratch, only=number) for copy in self.copies]
            graph = library.record(calls, self.stream)
            samples = self._replayed(graph.replay, rounds)
            graph.close()
            kernel = library.module.kernels[launch.kernel]
            rows.append(
                {
                    "launch": number, "kernel": launch.kernel, "seconds": samples,
                    "resident": library.resident_blocks(launch.kernel),
                    "registers": library.registers(launch.kernel), "blocks": kernel.blocks,
                    "threads": kernel.threads, "shared": kernel.shared, "origin": launch.origin,
                }
            )  # fmt: skip
        graph = library.record(whole, self.stream)
        samples = self._replayed(graph.replay, rounds)
        graph.close()
        return {"launches": rows, "seconds": samples}

    def _replayed(self, replay: Callable[[int], Any], rounds: int) -> list[float]:
        """Seconds of one call, of each of some replays after two that warm up."""
        out: list[float] = []
        for turn in range(rounds + 2):
            self.cu.cuEventRecord(self.events[0], self.stream)
            replay(self.stream)
            self.cu.cuEventRecord(self.events[1], self.stream)
            self.sync("running the kernels")
            if turn >= 2:
                out.append(self._elapsed() / len(self.copies))
        return out

    def answer(self, do: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """One command. What fails is refused; what cost the context ends the process."""
        try:
            found: dict[str, Any] = getattr(self, "do_" + do)(**arguments)
            return found
        except Refused:
            raise
        except CudaError as error:
            if error.sticky:
                leave(str(error))
            raise Refused(str(error)) from error
        except ObeliskError as error:
            raise Refused(str(error)) from error
        except Exception as error:  # foreign code: its refusal is an answer, if the context lives
            state = self.cu.cuCtxSynchronize()[0]
            if int(state) != 0 and CudaError("", state).sticky:
                leave(f"{type(error).__name__}: {error}")
            raise Refused(
                f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            ) from error


def import_ahead(names: Sequence[str]) -> None:
    """Import modules that baselines will need; whoever needs one that fails meets the error."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def leave(words: str) -> NoReturn:
    """End this process at once: nothing on the device answers any more."""
    print(words, file=sys.stderr, flush=True)
    os._exit(CONTEXT_LOST)


def main(channel: int, lifeline: int, paths: Sequence[str]) -> None:
    """Serve commands until the pipe closes."""
    serve(GpuWorker, channel, lifeline, paths)
