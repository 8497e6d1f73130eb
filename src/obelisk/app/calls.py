"""The border between a user's tensors and a kernel's pointers.

`Signature` takes numpy arrays or torch tensors (for a CUDA device: torch tensors on it) and gives
addresses, without a copy, after it has checked everything a kernel relies on: kind, device, dtype,
shape, strides, alignment, and that no output overlaps an input. It promises that what does not
match raises `CallError` with the input's name and both sides, and that results are of the kind that
was given. A check costs microseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from obelisk.base.errors import CallError
from obelisk.ir import DType, Graph, Node
from obelisk.ir.build import row_major

DEVICE_ALIGN = 16  # bytes: the widest access of a thread on a CUDA device
Tensor = Any  # np.ndarray or torch.Tensor; torch is optional and never imported here

TORCH_NAMES = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.F8E4M3: "float8_e4m3fn",
    DType.I32: "int32",
    DType.I8: "int8",
    DType.BOOL: "bool",
}


@dataclass(frozen=True, slots=True)
class Slot:
    """What one tensor of a signature must be: `strides` are in elements, `steps` and `align` in
    bytes.
    """

    label: str  # for errors: input 'q', output 'y'
    name: str
    shape: tuple[int, ...]
    dtype: DType
    numpy: np.dtype[Any]
    strides: tuple[int, ...]
    steps: tuple[int, ...]
    torch: str
    device: str
    align: int

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last one."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.steps, strict=True))
        return last + self.numpy.itemsize

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Bound:
    """One checked call: addresses to pass, the results to hand back, and the number of the CUDA
    device (-1: this machine's memory).
    """

    inputs: list[int]
    outputs: list[int]
    results: tuple[Tensor, ...]
    device: int = -1


class Signature:
    """The tensors a graph takes and gives, on `device`: "cpu" or "cuda"."""

    def __init__(self, graph: Graph, device: str = "cpu") -> None:
        self.name, self.device = graph.name, device
        self.inputs = tuple(
            _slot("input", n, node, device)
            for n, node in zip(graph.input_names, graph.inputs, strict=True)
        )
        self.outputs = tuple(
            _slot("output", n, node, device)
            for n, node in zip(graph.output_names, graph.outputs, strict=True)
        )

    def __str__(self) -> str:
        takes = ", ".join(f"{s.name}: {s}" for s in self.inputs)
        return f"{self.name}({takes}) -> {', '.join(map(str, self.outputs))}"

    def bind(self, tensors: Sequence[Tensor], out: Tensor | None = None) -> Bound:
        """Check tensors against the signature and give their addresses; raises `CallError`."""
        if len(tensors) != len(self.inputs):
            raise CallError(f"{self} takes {len(self.inputs)} tensors, got {len(tensors)}")
        kinds = {_kind(s.label, t) for s, t in zip(self.inputs, tensors, strict=True)}
        if len(kinds) > 1:
            raise CallError(f"{self.name}: numpy arrays and torch tensors are mixed; pass one kind")
        torch = kinds == {"torch"} or (not kinds and self.device == "cuda")
        if self.device == "cuda" and not torch:
            raise CallError(
                f"{self.name} runs on a CUDA device, got numpy arrays: pass torch tensors that lie "
                "there, for example torch.from_numpy(x).cuda()"
            )
        address = _torch_address if torch else _numpy_address
        ins = [address(s, t) for s, t in zip(self.inputs, tensors, strict=True)]
        device = _one_device(self, tensors) if self.device == "cuda" else -1
        if out is None:
            results = tuple(_empty(s, torch, device) for s in self.outputs)
            outs = [r.data_ptr() if torch else r.ctypes.data for r in results]
            return Bound(ins, outs, results, device)
        return self._into(ins, out, torch, device)

    def _into(self, ins: list[int], out: Tensor, torch: bool, device: int) -> Bound:
        """Outputs that the caller provides: as strict as inputs, writable, and apart from all."""
        results = tuple(out) if isinstance(out, tuple | list) else (out,)
        if len(results) != len(self.outputs):
            raise CallError(f"{self.name} has {len(self.outputs)} results, out has {len(results)}")
        outs: list[int] = []
        taken = [(s.name, p, p + s.span) for s, p in zip(self.inputs, ins, strict=True)]
        for slot, result in zip(self.outputs, results, strict=True):
            if _kind(slot.label, result) != ("torch" if torch else "numpy"):
                raise CallError(f"{slot.label} is not of the kind of the inputs")
            start = (_torch_address if torch else _numpy_address)(slot, result)
            if not torch and not result.flags.writeable:
                raise CallError(f"{slot.label} is read-only")
            end = start + slot.span
            for other, low, high in taken:
                if start < high and low < end:
                    raise CallError(
                        f"{slot.label} shares memory with {other!r}: kernels read their "
                        "inputs while they write; pass a buffer of its own"
                    )
            if torch and device >= 0 and result.device.index != device:
                raise CallError(f"{slot.label} is on {result.device}, the inputs on cuda:{device}")
            taken.append((slot.name, start, end))
            outs.append(start)
        return Bound(ins, outs, results, device)


def _one_device(signature: Signature, tensors: Sequence[Tensor]) -> int:
    """The number of the CUDA device that all inputs lie on; without inputs the current one."""
    found = {int(t.device.index) for t in tensors}
    if len(found) > 1:
        places = ", ".join(
            f"{s.name} on {t.device}" for s, t in zip(signature.inputs, tensors, strict=True)
        )
        raise CallError(f"{signature.name}: the inputs lie on several devices: {places}")
    return found.pop() if found else int(sys.modules["torch"].cuda.current_device())


def _slot(role: str, name: str, node: Node, device: str) -> Slot:
    given = (
        node.attrs.strides if node.attrs is not None and hasattr(node.attrs, "strides") else None
    )
    strides = given or row_major(node.shape)
    size = node.dtype.numpy.itemsize
    return Slot(
        f"{role} {name!r}",
        name,
        node.shape,
        node.dtype,
        node.dtype.numpy,
        strides,
        tuple(s * size for s in strides),
        f"torch.{TORCH_NAMES.get(node.dtype, '?')}",
        device,
        DEVICE_ALIGN if device == "cuda" else size,
    )


def _kind(label: str, tensor: Tensor) -> str:
    if type(tensor) is np.ndarray or isinstance(tensor, np.memmap):
        return "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return "torch"
    kind = type(tensor)
    raise CallError(
        f"{label} is a {kind.__module__}.{kind.__qualname__}, expected a numpy array or a "
        "torch tensor"
    )


def _numpy_address(slot: Slot, x: np.ndarray[Any, Any]) -> int:
    if x.dtype != slot.numpy:
        raise CallError(f"{slot.label} has dtype {x.dtype}, expected {slot.numpy}")
    if x.shape != slot.shape:
        raise CallError(f"{slot.label} has shape {x.shape}, expected {slot.shape}")
    if x.strides != slot.steps:
        _check_strides(slot, tuple(s / slot.numpy.itemsize for s in x.strides), "ascontiguousarray")
    return _aligned(slot, x.ctypes.data)


def _torch_address(slot: Slot, x: Tensor) -> int:
    if x.device.type != slot.device:
        raise CallError(
            f"{slot.label} is on {x.device}, expected {slot.device}: move it with .{slot.device}()"
        )
    if str(x.dtype) != slot.torch:
        raise CallError(f"{slot.label} has dtype {x.dtype}, expected {slot.torch}")
    if tuple(x.shape) != slot.shape:
        raise CallError(f"{slot.label} has shape {tuple(x.shape)}, expected {slot.shape}")
    if str(x.layout) != "torch.strided" or x.is_neg():
        raise CallError(
            f"{slot.label} has layout {x.layout}, expected torch.strided with nothing lazy: "
            "pass .to_dense() or .resolve_neg()"
        )
    if x.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise CallError(
            f"{slot.label} requires grad and compiled programs have none: call under "
            "torch.no_grad() or pass .detach()"
        )
    if x.stride() != slot.strides:
        _check_strides(slot, x.stride(), ".contiguous()")
    return _aligned(slot, int(x.data_ptr()))


def _check_strides(slot: Slot, got: tuple[float, ...], remedy: str) -> None:
    """Strides must agree wherever an axis has more than one element."""
    for n, have, want in zip(slot.shape, got, slot.strides, strict=True):
        if n > 1 and have != want:
            shown = tuple(int(s) if s == int(s) else s for s in got)
            raise CallError(
                f"{slot.label} has strides {shown} (in elements), expected {slot.strides}: "
                f"pass a dense copy ({remedy}), or declare the strides in the program"
            )


def _aligned(slot: Slot, address: int) -> int:
    if address % slot.align:
        wide = slot.align > slot.numpy.itemsize
        what = "16-byte accesses: pass .clone()" if wide else f"its {slot.dtype} elements"
        raise CallError(
            f"{slot.label} starts at an address that is {address % slot.align} bytes past a "
            f"multiple of {slot.align}, expected one aligned to {what}"
        )
    return address


def _empty(slot: Slot, torch: bool, device: int) -> Tensor:
    if not torch:
        return np.empty(slot.shape, slot.numpy)
    lib = sys.modules["torch"]
    kind = getattr(lib, slot.torch.removeprefix("torch."))
    return lib.empty(slot.shape, dtype=kind, device="cpu" if device < 0 else f"cuda:{device}")
