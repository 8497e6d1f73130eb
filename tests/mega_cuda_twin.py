"""The CUDA megakernel's own text, executed on a CPU: for tests where there is no GPU.

`twin_source` turns an emitted kernel into C++: the text goes through the preprocessor, every asm
statement becomes a call of a function in cuda_on_cpu/before.h, shared memory a pointer.
`TwinDevice` and `TwinKernel` stand for the driver, so that `CudaSession` itself is executed too.
Blocks and threads take turns in a fixed order (`order` 1: from the last).
"""

from __future__ import annotations

import ctypes
import platform
import re
from pathlib import Path
from typing import Any

import numpy as np

from obelisk.plan import HostIdentity
from tests.cuda_text import HERE, asm_called, library, preprocessed

Array = Any
SHARED_ROOM = 256 << 10  # bytes of dynamic shared memory of a block
BLOCK_ROOM = SHARED_ROOM + (16 << 10)
SUPPORTED = platform.machine() == "x86_64"
_CALLS = (  # how the template begins, which function it is
    ("ld.global.cg.v4.u32", "ld32x4"), ("movmatrix", "movmatrix"), ("mov.u32 %0, %%tid.x", "tid"),
    ("bar.sync", "bar"), ("mov.u64 %0, %%globaltimer", "time"),
    ("cvt.rn.bf16x2", "pack_bf16"), ("cvt.rn.f16x2", "pack_f16"), ("{.reg .b16", "unpack_f16"),
    ("ex2", "ex2"), ("rsqrt", "rsqrt"), ("rcp", "rcp"),
    ("lg2", "lg2"), ("popc", "popc"), ("st.relaxed.gpu.global.b64", "st64"),
    ("st.relaxed.gpu.global.v2.b64", "st64x2"), ("ld.relaxed.gpu.global.b64", "ld64"),
    ("ld.relaxed.gpu.global.v2.b64", "ld64x2"), ("{.reg .b128 q; ld", "ld64x2"),
    ("{.reg .b128 q; mov", "st64x2"), ("st.relaxed.gpu.global.b32", "st32"),
    ("red.release", "red"), ("ld.acquire", "ld_acquire"), ("st.release", "st32"),
    ("st.shared.u32", "sts"),
    ("st.shared.v2", "sts2"), ("{.reg .pred q; mbarrier", "mbarrier_wait"),
    ("mbarrier.arrive.expect_tx", "mbarrier_expect"), ("mbarrier.arrive", "mbarrier_arrive"),
    ("{.reg .b64 t; mbarrier.arrive", "mbarrier_arrive"),
    ("cp.async.bulk.prefetch", "nothing"), ("cp.async.bulk.shared", "bulk"),
    ("cp.async.cg", "copy16"), ("cp.async.wait_all", "copy_wait_all"),
    ("cp.async.commit_group", "copy_commit"), ("cp.async.wait_group", "copy_wait"),
    ("cp.async.mbarrier.arrive", "copy_arrive"),
    ("prefetch", "nothing"), ("createpolicy", "nothing"), ("fence", "nothing"),
    ("atom.acq_rel.cta", "count"), ("redux.sync.max", "redux_max"),
    ("mbarrier.init", "mbarrier_init"), ("", "nothing"),
)  # fmt: skip


def _call(template: str, outs: list[str], ins: list[str]) -> str:
    """An asm statement as a call."""
    if template.startswith("mma.sync"):
        kinds = ("bf16", "s8", "f16")
        name = f"mma_{next(k for k in kinds if k in template)}"
    else:
        name = next(n for begins, n in _CALLS if template.startswith(begins))
    return f"ptx_{name}({', '.join([*outs, *ins])})"


def twin_source(source: str) -> str:
    """The C++ of an emitted kernel."""
    text = preprocessed(source)
    text = re.sub(r"extern __shared__ __align__\(\d+\) char om_memory\[\];", "", text)
    text = re.sub(
        r"__shared__ (?:__align__\(\d+\) )?(\w+) (\w+);",
        r"static \1 *\2_p;\n#define \2 (*\2_p)", text,
    )  # fmt: skip
    body = asm_called(text, _call)
    parts = [
        (HERE / "before.h").read_text(), f"#define TWIN_SHARED {SHARED_ROOM}",
        body, (HERE / "after.h").read_text(),
    ]  # fmt: skip
    return "\n".join(parts)


def build_twin(source: str, folder: Path) -> bytes:
    """The path of a library, as bytes: a plan's binary for `TwinKernel`."""
    return str(library(twin_source(source), folder, "mega.cpp", BLOCK_ROOM)).encode()


class TwinDevice:
    """Host memory behind the interface of `Device`."""

    capability = (9, 0)

    def __init__(self) -> None:
        self.held: dict[int, Array] = {}

    def identity(self, arch: str) -> HostIdentity:
        """A device that has enough SMs for any plan."""
        return HostIdentity("CUDA", arch, "twin", (), 1 << 16)

    def attribute(self, name: str) -> int:
        """No limit."""
        return 1 << 30

    def allocate(self, nbytes: int) -> int:
        """Zeroed memory at a multiple of 256."""
        raw = np.zeros(max(16, nbytes) + 256, np.uint8)
        address = int(-(-raw.ctypes.data // 256) * 256)
        self.held[address] = raw
        return address

    def free(self, address: int) -> None:
        """Give memory back."""
        del self.held[address]

    def zero(self, address: int, nbytes: int) -> None:
        """Fill with zeros."""
        ctypes.memset(address, 0, nbytes)

    def upload(self, address: int, data: Array) -> None:
        """Copy in."""
        flat = np.ascontiguousarray(data)
        ctypes.memmove(address, flat.ctypes.data, flat.nbytes)

    def download(self, address: int, shape: tuple[int, ...], kind: Any) -> Array:
        """Copy out."""
        out = np.empty(shape, kind)
        ctypes.memmove(out.ctypes.data, address, out.nbytes)
        return out

    def tensors(self, parts: Any) -> list[Any]:
        """Host memory as torch's tensors."""
        import torch

        return [
            torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * n).from_address(at)))
            for at, n in parts
        ]


class TwinKernel:
    """The library behind the interface of `Kernel`. `rounds`: turns of each thread that a run may
    take (0: any number); `late`: how often a copy's barrier is waited at before one in eight comes.
    """

    order = rounds = late = 0

    def __init__(
        self, device: TwinDevice, binary: bytes, entry: str, blocks: int, threads: int, shared: int
    ) -> None:  # fmt: skip
        assert shared <= SHARED_ROOM
        self.blocks, self.threads = blocks, threads
        self.library = ctypes.CDLL(binary.decode())

    def run(self, argument: ctypes.Structure) -> float:
        """Run all fibers."""
        how = (self.blocks, self.threads, self.order, self.rounds, self.late)
        stuck = self.library.twin_run(ctypes.byref(argument), *how)
        assert not stuck, "the threads of a kernel wait for each other"
        return 1e-3

    def close(self) -> None:
        """Nothing is held."""
