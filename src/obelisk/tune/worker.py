"""The child process that runs candidates and baselines. It measures and obeys; it judges nothing.

Takes JSON commands over a pipe and answers each with one JSON object; whatever happens to it
(signal, exit, endless loop, overwritten memory) happens to it alone. It ends when its parent does.
Outputs go into shared regions, which the parent fills before and judges after every checked call;
timed calls use ordinary memory, as a user's arrays do.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from json import dumps, loads
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from obelisk.build.library import ENTRY, aligned_bytes
from obelisk.ir.dtype import parse_dtype
from obelisk.tune.inputs import TensorSpec
from obelisk.tune.regions import RegionSpec, attach
from obelisk.tune.taken import count
from obelisk.tune.types import Setup

_PDEATHSIG = 1  # linux/prctl.h
Call = Callable[[], Any]


class Refused(Exception):
    """A call that answered with an error of its own: text for the report."""


def pointers(arrays: Sequence[np.ndarray]) -> Any:
    """A C array of the addresses of arrays."""
    return (ctypes.c_void_p * max(len(arrays), 1))(*(a.ctypes.data for a in arrays))


def specs_of(plain: Sequence[dict[str, Any]]) -> list[TensorSpec]:
    """Specs from their JSON form."""
    return [
        TensorSpec(tuple(s["shape"]), parse_dtype(s["dtype"]), s["strides"] and tuple(s["strides"]))
        for s in plain
    ]


class Worker:
    """State of the child.

    Mapped regions, loaded libraries, prepared baselines, private copies for timing.
    """

    def __init__(self, hello: dict[str, Any]) -> None:
        self.inputs, self.outputs = specs_of(hello["inputs"]), specs_of(hello["outputs"])
        self.threads = int(hello["threads"])
        self.shared_in = [attach(RegionSpec(*r), False) for r in hello["input_regions"]]
        self.shared_out = [attach(RegionSpec(*r), True) for r in hello["output_regions"]]
        self.shared_scratch = attach(RegionSpec(*hello["scratch_region"]), True)
        self.libraries: dict[int, Any] = {}
        self.baselines: dict[int, list[Call]] = {}
        self.copies: list[list[np.ndarray]] = []
        self.private_out = [aligned_bytes(s.nbytes) for s in self.outputs]
        self.private_scratch = aligned_bytes(hello["scratch_region"][1])
        self.turnstile = 0  # the copy the next timed call reads, whoever makes it
        self.keep: list[Any] = []

    def answer(self, do: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command; raises `Refused` for what a candidate or baseline says."""
        found: dict[str, Any] = getattr(self, "do_" + do)(**arguments)
        return found

    def do_load(self, key: int, path: str) -> dict[str, Any]:
        """Load a library."""
        try:
            run = getattr(ctypes.CDLL(path), ENTRY)
        except (OSError, AttributeError) as e:
            raise Refused(str(e)) from e
        run.restype = ctypes.c_int
        run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        self.libraries[key] = run
        return {}

    def do_run(self, key: int, which: int, first: bool) -> dict[str, Any]:
        """One checked call of a library on the shared regions, which hold input set `which`."""
        ins, outs = pointers(self.shared_in), pointers(self.shared_out)
        start = time.perf_counter_ns()
        code = self.libraries[key](ins, outs, self.shared_scratch.ctypes.data, self.threads)
        return {"code": code, "seconds": (time.perf_counter_ns() - start) * 1e-9}

    def do_snapshot(self) -> dict[str, Any]:
        """Add a private copy of what the shared inputs hold now."""
        self.copies.append([])
        for shared in self.shared_in:
            own = aligned_bytes(shared.size)
            own[:] = shared
            self.copies[-1].append(own)
        return {}

    def do_prepare(self, key: int, target: str, payload: Any) -> dict[str, Any]:
        """Import a baseline's factory and let it prepare one callable per copy."""
        module, _, name = target.partition(":")
        try:
            factory = getattr(importlib.import_module(module), name)
            arrays = [
                [spec.view(raw) for spec, raw in zip(self.inputs, copy, strict=True)]
                for copy in self.copies
            ]
            calls = list(factory(Setup(arrays, self.threads, payload)))
        except Exception as e:  # whatever foreign code raises is an answer, not our fault
            raise Refused(f"{type(e).__name__}: {e}") from e
        if len(calls) != len(self.copies):
            raise Refused(f"the factory gave {len(calls)} callables for {len(self.copies)} copies")
        self.baselines[key] = calls
        return {}

    def calls(self, key: int) -> list[Call]:
        """One timed call per copy of the inputs."""
        if key not in self.baselines:
            run, outs = self.libraries[key], pointers(self.private_out)
            self.keep.append(outs)
            made: list[Call] = []
            for copy in self.copies:
                ins = pointers(copy)
                made.append(partial(run, ins, outs, self.private_scratch.ctypes.data, self.threads))
            self.baselines[key] = made
        return self.baselines[key]

    def do_turn(self, key: int, samples: int, repeats: int, settle: float) -> dict[str, Any]:
        """Time `samples` batches of `repeats` calls after one untimed call; seconds per call of
        each batch, and which share of the time was taken from this process.
        """
        calls, n = self.calls(key), len(self.copies)
        if settle:
            time.sleep(settle)  # let the previous contender's idle threads stop spinning
        gc.disable()  # a collection inside a timed batch would be measured
        try:
            calls[self.turnstile % n]()
            before, begin = count(), time.perf_counter()
            out: list[float] = []
            result: Any = None
            for _ in range(samples):
                batch = [calls[(self.turnstile + i) % n] for i in range(repeats)]
                self.turnstile = (self.turnstile + repeats) % n
                start = time.perf_counter_ns()
                for call in batch:
                    result = call()
                out.append((time.perf_counter_ns() - start) * 1e-9 / repeats)
            share = count().since(before) / (time.perf_counter() - begin)
        except Exception as e:  # foreign code again
            raise Refused(f"{type(e).__name__}: {e}") from e
        finally:
            gc.enable()
        code = result if key in self.libraries else 0
        return {"seconds": out, "code": code, "calls": samples * repeats, "taken": share}

    def do_show(self, key: int, copy: int) -> dict[str, Any]:
        """One call on a given copy, its outputs put into the shared regions for the parent to
        judge.

        A library writes straight into private memory that holds the parent's fill, so unwritten
        elements show.
        """
        if key in self.libraries:
            for own, shared in zip(self.private_out, self.shared_out, strict=True):
                own[:] = shared
            code = self.calls(key)[copy]()
            for own, shared in zip(self.private_out, self.shared_out, strict=True):
                shared[:] = own
            return {"code": code}
        try:
            put_results(self.baselines[key][copy](), self.outputs, self.shared_out)
        except Refused:
            raise
        except Exception as e:  # foreign code again
            raise Refused(f"{type(e).__name__}: {e}") from e
        return {"code": 0}


def put_results(result: Any, specs: Sequence[TensorSpec], regions: Sequence[np.ndarray]) -> None:
    """What a baseline returned, into the regions of the outputs; raises `Refused` for another
    number of them, or another shape.
    """
    arrays = list(result) if isinstance(result, list | tuple) else [result]
    if len(arrays) != len(specs):
        raise Refused(f"gave {len(arrays)} outputs, expected {len(specs)}")
    for i, (spec, array) in enumerate(zip(specs, arrays, strict=True)):
        value = _as_numpy(array, spec)
        if value.shape != spec.shape:
            raise Refused(f"output {i} has shape {value.shape}, expected {spec.shape}")
        spec.view(regions[i])[...] = value.astype(spec.dtype.numpy)


def _as_numpy(array: Any, spec: TensorSpec) -> np.ndarray:
    """A numpy array from an array or a torch tensor (numpy cannot view torch's bfloat16.

    By way of float32).
    """
    if hasattr(array, "detach"):
        array = array.detach()
        array = array.float() if spec.dtype.is_float and spec.dtype.bits < 32 else array
        array = array.cpu().numpy()
    return np.asarray(array)


def _follow_parent(lifeline: int) -> None:
    """End this process when the parent is gone.

    At once by the kernel on Linux, and by the closed pipe anywhere.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def serve(
    make: Callable[[dict[str, Any]], Any], channel: int, lifeline: int, paths: Sequence[str]
) -> None:
    """Serve commands until the pipe closes. `make` gets what the tuner says first.

    `paths` are added to the import path, for the baselines' modules.
    """
    _follow_parent(lifeline)
    sys.path.extend(p for p in paths if p not in sys.path)
    pipe: Connection[bytes, bytes] = Connection(channel)
    worker = make(loads(pipe.recv_bytes()))
    pipe.send_bytes(b"{}")
    while True:
        try:
            command = loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            answer = worker.answer(command.pop("do"), command)
        except Refused as e:
            answer = {"refused": str(e)}
        pipe.send_bytes(dumps(answer).encode())


def main(channel: int, lifeline: int, paths: Sequence[str]) -> None:
    """Serve a worker for this machine's cores."""
    serve(Worker, channel, lifeline, paths)
