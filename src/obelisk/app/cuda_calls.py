"""Calling a compiled program on torch's CUDA tensors: no copies, the caller's stream, capturable.

Takes tensors that were checked against the signature; launches the kernels on the stream that is
current for their device, and returns at once. It promises that calls on different streams do not
share scratch memory, that a call inside `torch.cuda.graph` is recorded like any other operation
(and owns what its replays write), and that several launches of one result replay as one CUDA graph
once the same addresses come again.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any

from obelisk.app.calls import Bound, Signature, Tensor
from obelisk.base.errors import CallError, MissingDependency, UserError
from obelisk.build.device import CudaError, CudaGraph, CudaLibrary, module_from_json

REMEMBERED = 64  # calls on the same addresses whose launches are kept ready
SLOTS = 256  # recorded calls that have counters of their own; later ones zero theirs as they run
ALIGN = 256  # bytes


class CudaRunner:
    """Calls an artifact's kernels; they are loaded on a device when first called there."""

    def __init__(self, artifact: Any, module_file: str, cubin_name: Callable[[int], str]) -> None:
        self.signature = Signature(artifact.program, "cuda")
        self.target: Mapping[str, Any] = artifact.target
        self.module = module_from_json(json.loads(artifact.files[module_file]))
        self.cubins = [artifact.files[cubin_name(i)] for i in range(len(self.module.kernels))]
        self.loaded: dict[int, _Loaded] = {}
        self.lock = Lock()

    @property
    def text(self) -> str:
        """The signature in words."""
        return str(self.signature)

    def call(self, tensors: Sequence[Tensor], out: Tensor | None) -> Any:
        """Run on CUDA tensors of torch; raises `CallError` for what does not match."""
        torch = sys.modules.get("torch")
        if torch is None:
            raise CallError(
                f"{self.signature.name} runs on a CUDA device: pass torch tensors that lie there"
            )
        bound = self.signature.bind(tensors, out)
        if bound.device != torch.cuda.current_device():
            with torch.cuda.device(bound.device):
                self._issue(torch, bound)
        else:
            self._issue(torch, bound)
        return bound.results[0] if len(bound.results) == 1 else bound.results

    def _issue(self, torch: Any, bound: Bound) -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        loaded = self.loaded.get(bound.device)
        if loaded is None:
            if capturing:
                raise CallError(
                    f"{self.signature.name} is recorded before it ever ran on cuda:{bound.device}, "
                    "and loading kernels cannot be recorded: call it once before the capture"
                )
            loaded = self._load(torch, bound.device)
        stream = int(torch.cuda.current_stream().cuda_stream)
        if capturing:
            loaded.record(torch, bound, stream)
        else:
            loaded.run(torch, bound, stream)

    def _load(self, torch: Any, device: int) -> _Loaded:
        with self.lock:
            if device not in self.loaded:
                have = list(torch.cuda.get_device_capability(device))
                if have != self.target["capability"]:
                    raise UserError(
                        f"{self.signature.name} was built for {self.target['arch']}; "
                        f"cuda:{device} has compute capability {have[0]}.{have[1]}: optimize it "
                        "for that device"
                    )
                torch.cuda.synchronize()  # makes the device's context current in this thread
                try:
                    library = CudaLibrary(self.module, self.cubins)
                except CudaError as error:
                    raise UserError(
                        f"{self.signature.name} cannot be loaded on cuda:{device}: {error}"
                    ) from error
                except MissingDependency:
                    raise
                self.loaded[device] = _Loaded(torch, library)
            return self.loaded[device]


class _Call:
    """Launches on fixed addresses and one stream, and their graph once they came twice."""

    def __init__(self, bound: list[tuple[Any, Any]]) -> None:
        self.bound, self.uses = bound, 0
        self.graph: CudaGraph | None = None


class _Loaded:
    """The kernels on one device, with the memory that their calls need."""

    def __init__(self, torch: Any, library: CudaLibrary) -> None:
        self.library, self.lock = library, Lock()
        self.scratch: dict[int, Any] = {}  # stream: tensor
        self.calls: OrderedDict[tuple[int, ...], _Call] = OrderedDict()
        self.side = torch.cuda.Stream()  # records graphs
        step = -(-library.counter_bytes // ALIGN) * ALIGN
        n = SLOTS if library.module.counters else 0
        self.slots = torch.zeros(n * step, dtype=torch.uint8, device="cuda")
        self.free = [self.slots.data_ptr() + i * step for i in reversed(range(n))]
        torch.cuda.synchronize()

    def _memory(self, torch: Any, stream: int) -> int:
        """Scratch memory of a stream, its counters zero."""
        if stream not in self.scratch:
            size = self.library.scratch_bytes
            made = torch.empty(size, dtype=torch.uint8, device="cuda")
            self.library.prepare(made.data_ptr(), stream)
            self.scratch[stream] = made
        return int(self.scratch[stream].data_ptr())

    def run(self, torch: Any, bound: Bound, stream: int) -> None:
        """Launch now."""
        key = (stream, *bound.inputs, *bound.outputs)
        with self.lock:
            call = self.calls.get(key)
            if call is None:
                scratch = self._memory(torch, stream)
                call = _Call(self.library.bind(bound.inputs, bound.outputs, scratch))
                self.calls[key] = call
                if len(self.calls) > REMEMBERED:
                    old = self.calls.popitem(last=False)[1]
                    if old.graph is not None:
                        old.graph.close()
            else:
                self.calls.move_to_end(key)
            call.uses += 1
            if call.graph is None and call.uses == 2 and len(call.bound) > 1:
                call.graph = self.library.record([call.bound], int(self.side.cuda_stream))
            if call.graph is not None:
                call.graph.replay(stream)
            else:
                self.library.issue(call.bound, stream)

    def record(self, torch: Any, bound: Bound, stream: int) -> None:
        """Launch into a capture: scratch memory comes from the graph's own pool, counters from a
        slot that no other call has.
        """
        library = self.library
        scratch = torch.empty(
            library.module.scratch_bytes + library.counter_bytes, dtype=torch.uint8, device="cuda"
        )
        address = int(scratch.data_ptr())
        counters: int | None = None
        with self.lock:
            if self.free:
                counters = self.free.pop()
        if counters is None and library.module.counters:
            library.prepare(address, stream)
        library.issue(library.bind(bound.inputs, bound.outputs, address, counters), stream)
