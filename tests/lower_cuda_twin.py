"""A kernel of `lower.cuda` executed on a CPU: for tests where there is no GPU.

Takes a module and arrays; gives its outputs. The text is that which a GPU's
compiler gets: asm statements become calls of the functions in cuda_on_cpu, shared memory lies in
one array, every thread is a fiber (`mega_cuda_twin` does the same for the megakernel). `lazy` does
copies and products of four warps as late as the text allows, `order` 1 runs threads from the last.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np

from obelisk.ir import Graph
from obelisk.lower.cuda import CudaKernel, CudaModule, Place
from tests.cuda_text import HERE, asm_called, library, preprocessed

ARENA = 228 << 10  # bytes of dynamic shared memory of a block; static arrays lie behind it
STATIC = 4 << 10  # bytes kept for each static array
STATICS = 8
_CALLS = (  # what a template holds, which function it is
    ("mbarrier.try_wait", "await"), ("fence.mbarrier_init", "nothing"),
    ("cp.async.bulk.tensor", "box"), ("mbarrier.init", "mbarrier_init"),
    ("expect_tx", "mbarrier_expect"), ("mbarrier.arrive", "mbarrier_arrive"),
    ("cp.async.cg", "cp16"), ("cp.async.commit", "cp_commit"), ("cp.async.wait", "cp_wait"),
    ("stmatrix", "stmatrix"), ("ldmatrix.sync.aligned.m8n8.x4.trans", "ldmatrix_t"),
    ("ldmatrix", "ldmatrix"), ("ld.shared.v4", "lds4"), ("st.shared.u16", "sts16"),
    ("st.shared.u32", "sts"), ("bar.sync", "group_bar"), ("wgmma.commit", "wgmma_commit"),
    ("cvt.rn.f16x2", "pack_f16"), ("cvt.rn.bf16x2", "pack_bf16"), (".reg .f16 l, h", "unpack"),
    ("cvt.f32.f16", "cvt_up"), ("cvt.rn.f16.f32", "cvt_f16"), ("cvt.rn.bf16.f32", "cvt_bf16"),
    ("barrier.cluster.arrive", "cluster_arrive"), ("barrier.cluster.wait", "cluster_wait"),
    ("mapa", "mapa"), ("rsqrt", "rsqrt"), ("sqrt", "sqrt"), ("rcp", "rcp"), ("ex2", "ex2"),
    ("mul.rn.f16x2", "times"),
    ("", "nothing"),
)  # fmt: skip


def _call(template: str, outs: list[str], ins: list[str]) -> str:
    """An asm statement as a call."""
    if "wgmma.mma_async" in template:
        results = ", ".join(f"&({e})" for e in outs)
        left = ", ".join(f"&({e})" for e in ins[:4])
        kind = "true" if "bf16" in template else "false"
        return f"ptx_wgmma({kind}, {{{results}}}, {{{left}}}, {', '.join(ins[4:])})"
    if "wgmma.wait_group" in template:
        return f"ptx_wgmma_wait({ins[0] if ins else 0})"
    if template.startswith("mma.sync"):
        name = "mma_bf16" if "bf16" in template else "mma_f16"
    else:
        name = next(n for holds, n in _CALLS if holds in template)
    return f"ptx_{name}({', '.join([*outs, *ins])})"


def twin_source(kernel: CudaKernel, arch: int) -> str:
    """The C++ of a kernel."""
    text = preprocessed(kernel.source, f"-D__CUDA_ARCH__={arch}")
    text = re.sub(
        r"extern __shared__ __align__\(\d+\) char arena\[\];", "char *arena = om_memory;", text
    )
    count = 0

    def static(m: re.Match[str]) -> str:
        nonlocal count
        count += 1
        at = f"om_memory + {ARENA + STATIC * (count - 1)}"
        kind, name, size = m[1].strip(), m[2], m[3] or ""
        return f"typedef {kind} {name}_t{size}; {name}_t &{name} = *({name}_t *)({at});"

    text = re.sub(r"__shared__ (?:__align__\(\d+\) )?([a-z ]+) (\w+)(\[\d+\])?;", static, text)
    assert count <= STATICS
    text = asm_called(text, _call)
    header = re.search(r"obelisk_kernel\(([^)]*)\)", text)
    assert header is not None
    given = []
    for i, parameter in enumerate(header[1].split(", ")):
        kind = re.sub(r"\w+$", "", parameter.replace("__grid_constant__", "")).strip()
        given.append(f"*({kind.replace('const ob_map', 'ob_map')} *)twin_arguments[{i}]")
    call = f"void twin_body() {{ obelisk_kernel({', '.join(given)}); twin_end(); }}"
    parts = [
        (HERE / "before.h").read_text(), (HERE / "fragments.h").read_text(), text, call,
    ]  # fmt: skip
    return "\n".join(parts)


def build(kernel: CudaKernel, folder: Path, arch: int) -> ctypes.CDLL:
    """A library that runs the kernel."""
    return ctypes.CDLL(
        str(library(twin_source(kernel, arch), folder, "fragments.cpp", ARENA + STATIC * STATICS))
    )


class Stuck(Exception):
    """The threads of a block wait for each other."""


class _Map(ctypes.Structure):
    """What `twin_map` holds, padded to the size of a tensor map."""

    _fields_ = [
        ("start", ctypes.c_void_p), ("columns", ctypes.c_int), ("rows", ctypes.c_int),
        ("stride", ctypes.c_int), ("box_columns", ctypes.c_int), ("box_rows", ctypes.c_int),
        ("rest", ctypes.c_char * 100),
    ]  # fmt: skip


def run_twin(
    module: CudaModule, graph: Graph, arrays: list[Any], folder: Path, *,
    arch: int = 900, order: int = 0, lazy: bool = False,
) -> list[Any]:  # fmt: skip
    """The outputs of a module on dense arrays; `arch` is the architecture that the text is for."""
    assert all(k.shared <= ARENA for k in module.kernels)
    held: list[Any] = []

    def aligned(nbytes: int, fill: int) -> Any:
        raw = np.full(nbytes + 256, fill, np.uint8)
        held.append(raw)
        at = -raw.ctypes.data % 256
        return raw[at : at + nbytes]

    inputs = []
    for a in arrays:
        memory = aligned(a.nbytes, 0)
        memory[:] = np.frombuffer(np.ascontiguousarray(a).tobytes(), np.uint8)
        inputs.append(memory)
    outputs = [aligned(int(n.elements * n.dtype.nbytes), 255) for n in graph.outputs]
    memories = {
        Place.INPUT: inputs, Place.OUTPUT: outputs,
        Place.SCRATCH: [aligned(module.scratch_bytes + 16, 255)],
        Place.COUNTER: [aligned(4 * module.counters + 16, 0)],
    }  # fmt: skip
    libraries = [build(k, folder, arch) for k in module.kernels]
    for launch in module.launches:
        kernel = module.kernels[launch.kernel]
        addresses = [memories[p.place][p.index].ctypes.data + p.offset for p in launch.arguments]
        values: list[Any] = [ctypes.c_void_p(a) for a in addresses]
        for m in kernel.maps:
            values.append(
                _Map(addresses[m.argument], m.columns, m.rows, m.stride, m.box_columns, m.box_rows)
            )
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        rc = libraries[launch.kernel].twin_run(
            pointers, kernel.blocks, kernel.cluster, kernel.threads, order, int(lazy)
        )
        if rc:
            raise Stuck
    return [
        o.view(n.dtype.numpy).reshape(n.shape).copy()
        for o, n in zip(outputs, graph.outputs, strict=True)
    ]
