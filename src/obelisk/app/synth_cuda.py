"""Synthesis for CUDA: the plan of one tiling, with or without a GPU at hand.

Chains tiling, emitter and compiler. A plan that is made without a device names the architecture and
the SMs that it needs; one that was measured names the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from obelisk.base.errors import Infeasible
from obelisk.build.cuda import compile_cuda
from obelisk.machine import Machine
from obelisk.mega.cuda import EmittedCuda, emit_cuda
from obelisk.mega.cuda.emit import SPANS
from obelisk.plan import CacheLayout, HostIdentity, Plan
from obelisk.runtime.cuda_driver import GPU
from obelisk.schedule.gpu import GpuTiling
from obelisk.tasks import ModelConfig, Workload, checkpoint_tensors, inverse_frequencies

COMPILE_SECONDS = 300.0


def build(emitted: EmittedCuda, machine: Machine) -> bytes:
    """The cubin of a kernel; raises `Infeasible` where the compiler had to spill registers or took
    more shared memory than was planned.
    """
    built = compile_cuda(emitted.source, machine.arch, timeout=COMPILE_SECONDS)
    used = built.resources
    if used.spill_stores or used.spill_loads:
        raise Infeasible(f"the kernel spills {used.spill_stores} bytes of registers")
    if used.shared > emitted.shared.misc:
        raise Infeasible(
            f"the kernel takes {used.shared} bytes of static shared memory, not the "
            f"{emitted.shared.misc} that were planned"
        )
    return built.path.read_bytes()


def make_cuda_plan(
    model: ModelConfig,
    work: Workload,
    tiling: GpuTiling,
    machine: Machine,
    *,
    folder: str | Path = "",
    digests: Mapping[str, str] | None = None,
    binary: bytes | None = None,
    device: HostIdentity | None = None,
) -> Plan:
    """The plan of one tiling; compiles it unless `binary` is given.

    `device` is the GPU that it was measured on, if any. Raises `Infeasible` naming the limit that
    is exceeded.
    """
    emitted = emit_cuda(model, work, tiling, machine)
    return Plan(
        target="cuda",
        host=device or HostIdentity(GPU, machine.arch, "", (), tiling.blocks),
        cores=tiling.blocks,
        model=model.to_json(),
        model_digest=model.digest,
        weights_path=str(Path(folder).resolve()) if folder else "",
        weights_digests=digests or {},
        tensors=tuple((t.name, t.shape) for t in checkpoint_tensors(model)),
        workload={"batch": work.batch, "context": work.context, "weights": work.weights.value},
        schedule={
            "tiling": tiling.to_json(), "shared": asdict(emitted.shared),
            "launch": emitted.launch(),
        },
        edges=(),
        barriers=(),
        kinds=SPANS,
        layout=emitted.layout,
        cache=CacheLayout(
            model.layers, work.batch, model.kv_heads, work.context, model.head_dim,
            work.weights.value,
        ),
        scratch_bytes=emitted.exchanged,
        frequencies=tuple(float(f) for f in inverse_frequencies(model.rope, model.head_dim)),
        eos=model.eos,
        tolerance=None,
        measured={},
        source=emitted.source,
        binary=build(emitted, machine) if binary is None else binary,
    )  # fmt: skip
