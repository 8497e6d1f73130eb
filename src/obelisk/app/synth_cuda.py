"""Synthesis for CUDA: from a model directory to a plan, with or without a GPU at hand.

Chains config, schedule search, emitter, compiler, and where there is a matching device profiler and
judge. A plan that is made without one is the documented default (or the search's best, where that
does not compile); it names the architecture and the SMs that it needs, and that nothing was
measured.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from obelisk.app.plan_judge import judge_plan
from obelisk.base.errors import Infeasible, MissingDependency, UserError
from obelisk.base.progress import Progress, Silent
from obelisk.base.settings import usable_cores
from obelisk.build.cuda import compile_cuda
from obelisk.machine import Machine, find
from obelisk.machine.registry import for_capability
from obelisk.mega.cuda import EmittedCuda, emit_cuda
from obelisk.mega.cuda.emit import SPANS
from obelisk.mega.cuda.layout import cuda_layout
from obelisk.plan import CacheLayout, HostIdentity, Plan
from obelisk.runtime import Checkpoint, file_digests
from obelisk.runtime.cuda import CudaSession, gpu_refusal
from obelisk.runtime.cuda_driver import GPU, Device
from obelisk.runtime.packing import pack, stored
from obelisk.schedule.gpu import GpuTiling
from obelisk.schedule.gpu_default import (
    default_tiling,
    other_default,
    with_staged,
)
from obelisk.schedule.gpu_search import GpuAccount, GpuChoice, search_gpu
from obelisk.tasks import (
    ModelConfig,
    WeightFormat,
    Workload,
    checkpoint_tensors,
    inverse_frequencies,
    read_config,
)

COMPILE_SECONDS = 300.0
SPILLED = 160  # bytes a thread: a few words that a compiler keeps outside the loops
SEARCH_SECONDS = 30.0
PROFILE_STEPS, PROFILE_LAUNCHES = 32, 5
TOLERANCE = 0.1  # of the largest: inputs of products are rounded to 16 bits in every layer
TOLERANCE_FP32 = 1e-4  # where nothing is rounded to fewer than 23 bits
CACHES = {WeightFormat.BF16: "bf16", WeightFormat.FP32: "fp32"}  # keys and values; others: fp16


@dataclass(frozen=True, slots=True)
class ProfiledGpu:
    """One built cut: predicted seconds of a step (None: it was not simulated) and measured ones
    (None: there was no device).
    """

    note: str
    predicted: float | None
    seconds: float | None


@dataclass(frozen=True, slots=True)
class CudaSynthesis:
    """A finished synthesis: the plan, what was built, what was searched, and seconds in all."""

    plan: Plan
    profiled: tuple[ProfiledGpu, ...]
    account: GpuAccount | None
    seconds: float


def device_here() -> Machine:
    """The description of the CUDA device at hand, with its own name and count of SMs.

    Raises `UserError` where there is none, `UnknownName` for an architecture that is not known.
    """
    device = Device()
    found = for_capability(*device.capability)
    here = device.identity(found.arch)
    room = device.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    return replace(
        found, title=here.title, cores=here.cores, shared_bytes=min(found.shared_bytes, room)
    )


def machine_of(name: str) -> Machine:
    """The machine that `--device` names; `cuda` is the device at hand."""
    return device_here() if name.strip().lower() == "cuda" else find(name)


def matching_device(machine: Machine, blocks: int) -> HostIdentity | None:
    """The device at hand if a plan of `blocks` blocks for `machine` runs on it, else None."""
    try:
        device = Device()
    except (MissingDependency, UserError):
        return None
    here = device.identity(machine.arch)
    made_on = HostIdentity(GPU, machine.arch, "", (), blocks)
    return here if gpu_refusal(made_on, here, device.capability) is None else None


def build(emitted: EmittedCuda, machine: Machine) -> bytes:
    """The cubin of a kernel; raises `Infeasible` where the compiler spilled more than a few words
    or took more shared memory than was planned.
    """
    built = compile_cuda(emitted.source, machine.arch, timeout=COMPILE_SECONDS)
    used = built.resources
    if used.spill_stores > SPILLED:
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
        workload=work.to_json(),
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
            CACHES.get(work.weights, "fp16"),
        ),
        scratch_bytes=emitted.exchanged,
        frequencies=tuple(float(f) for f in inverse_frequencies(model.rope, model.head_dim)),
        eos=model.eos,
        tolerance=None,
        measured={},
        source=emitted.source,
        binary=build(emitted, machine) if binary is None else binary,
    )  # fmt: skip


def describe_gpu(t: GpuTiling) -> str:
    """A tiling in a few words."""
    waits = f", barriers after {' and '.join(t.barriers)}" if t.barriers else ""
    return (
        f"ring {t.stages} x {t.chunk_bytes // 1024} KB, {t.in_flight} in flight "
        f"({t.in_flight_waiting} waiting), o/{t.o_split}, down/{t.down_split}, kv/{t.kv_pieces}"
        f"{f', {t.staged} staged' if t.staged else ''}{', cache in the ring' if t.kv_ring else ''}"
        f"{', rows rounded' if t.rounded else ''}"
        f"{f', chunks in up to {t.cuts}' if t.cuts > 1 else ''}{'' if t.fenced else ', no fence'}"
        f"{', rows kept' if t.kept else ''}"
        f"{f', {t.ahead} units ahead' if t.ahead else ''}{', sums halved' if t.halved else ''}"
        f"{waits}"
    )


def candidates(
    model: ModelConfig, work: Workload, machine: Machine, blocks: int | None, keep: int,
    listener: Progress, checkpoint: Path | None, resume: bool,
) -> tuple[list[tuple[GpuTiling, float | None]], GpuAccount | None]:  # fmt: skip
    """The documented default, the same with the other choices for its weights, the same with the
    cache copied ahead, then the search's best others, with their predicted seconds; without the
    last where xDSL is not installed.
    """
    first = default_tiling(model, work, machine, blocks)
    ahead = with_staged(model, work, first, machine)
    staged = [] if ahead is None else [ahead]
    own = [first, *other_default(model, work, first, machine), *staged]
    found: list[GpuChoice] = []
    account = None
    with contextlib.suppress(MissingDependency):  # nothing else is known then
        found, account = search_gpu(
            model, work, machine, blocks=blocks, keep=keep, judged=keep, seconds=SEARCH_SECONDS,
            checkpoint=checkpoint, resume=resume, progress=listener,
        )  # fmt: skip
    predicted = {c.tiling: c.timeline.seconds for c in found}
    tilings = [*own, *(c.tiling for c in found if c.tiling not in own)]
    return [(t, predicted.get(t)) for t in tilings[: max(1, keep)]], account


def time_gpu(session: CudaSession) -> float:
    """Seconds of one step on the device, all slots in use at the middle of the context: the median
    of short launches after one that warms up.
    """
    plan = session.plan
    steps = max(1, min(PROFILE_STEPS, plan.context // 2))
    at = plan.context // 2 - steps if plan.context // 2 > steps else 0
    runs = []
    for _ in range(PROFILE_LAUNCHES + 1):
        session.position[:] = at
        session.launch([[1 % plan.vocab]] * plan.batch, [steps] * plan.batch)
        runs.append(session.kernel_seconds / session.steps_done)
    session.reset()
    return float(np.median(runs[1:]))


def synthesise_cuda(
    folder: str | Path,
    work: Workload,
    machine: Machine,
    *,
    blocks: int | None = None,
    profile: int = 3,
    checkpoint: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> CudaSynthesis:
    """A plan for the model in `folder` on a CUDA machine.

    Where a matching device is at hand, the best `profile` cuts are built and timed on it and the
    fastest is judged and kept; else the first that compiles is kept. Raises `Infeasible` naming the
    limit that is exceeded, `UserError` for a directory that does not hold the model's weights.
    """
    listener, start = progress or Silent(), time.perf_counter()
    model = read_config(folder)
    weights = Checkpoint(folder)
    weights.check([(t.name, t.shape) for t in checkpoint_tensors(model)], model.layers)
    tilings, account = candidates(
        model, work, machine, blocks, profile, listener, checkpoint, resume
    )
    device = matching_device(machine, tilings[0][0].blocks)
    make = partial(
        make_cuda_plan, model, work, machine=machine, folder=folder,
        digests=file_digests(folder), device=device,
    )  # fmt: skip
    try:
        if device is not None:
            plan, rows = _on_device(make, weights, model, work, tilings, listener)
        else:
            plan, rows = _first_built(make, tilings, listener)
    except Infeasible as why:
        raise Infeasible(f"no megakernel for {machine.name}: {why}") from None
    return CudaSynthesis(plan, tuple(rows), account, time.perf_counter() - start)


def _first_built(
    make: Callable[[GpuTiling], Plan], tilings: Sequence[tuple[GpuTiling, float | None]],
    listener: Progress,
) -> tuple[Plan, list[ProfiledGpu]]:  # fmt: skip
    """Without a device: the first cut that compiles."""
    refused = []
    for i, (tiling, predicted) in enumerate(tilings):
        listener.update("build", {"built": i, "of": len(tilings)})
        try:
            return make(tiling), [ProfiledGpu(describe_gpu(tiling), predicted, None)]
        except Infeasible as why:
            refused.append(str(why))
    raise Infeasible("; ".join(dict.fromkeys(refused)))


def _on_device(
    make: Callable[[GpuTiling], Plan], weights: Checkpoint, model: ModelConfig, work: Workload,
    tilings: Sequence[tuple[GpuTiling, float | None]], listener: Progress,
) -> tuple[Plan, list[ProfiledGpu]]:  # fmt: skip
    """Build all cuts at the same time, while the weights are packed; time each, and judge the
    fastest.
    """
    layout = cuda_layout(model, work)
    rows: list[ProfiledGpu] = []
    plans: list[Plan] = []
    refused: list[str] = []
    listener.update("build", {"built": 0, "of": len(tilings)})
    with ThreadPoolExecutor(usable_cores(), "obelisk-build") as pool:
        built = [pool.submit(make, tiling) for tiling, _ in tilings]
        try:
            arena = pack(layout, weights.tensor, weights.grouped, weights.raw)
            for i, ((tiling, predicted), future) in enumerate(zip(tilings, built, strict=True), 1):
                try:
                    plan = future.result()
                except Infeasible as why:
                    refused.append(str(why))
                    continue
                session = CudaSession(plan, arena)
                rows.append(ProfiledGpu(describe_gpu(tiling), predicted, time_gpu(session)))
                plans.append(plan)
                session.close()
                listener.update("build", {"built": i, "of": len(tilings)})
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if not plans:
        raise Infeasible("; ".join(dict.fromkeys(refused)))
    seconds, best = min((r.seconds, i) for i, r in enumerate(rows) if r.seconds is not None)
    plan = plans[best]
    listener.update("judge", {"schedule": plan.schedule["tiling"]})
    session = CudaSession(plan, arena)
    means = stored(layout, weights.tensor, weights.grouped, weights.rows)
    most = TOLERANCE_FP32 if work.weights is WeightFormat.FP32 else TOLERANCE
    judged = judge_plan(session, means, most)
    session.close()
    measured = {
        "step_seconds": seconds, "position": work.context // 2, "batch": work.batch,
        "step_bytes": step_bytes(plan, work.context // 2), "schedule": rows[best].note,
    }  # fmt: skip
    return (
        replace(plan, measured=measured, tolerance=judged.logits, judged=judged.to_json()), rows
    )  # fmt: skip


def tiling_of(plan: Plan) -> GpuTiling:
    """The tiling that a CUDA plan was emitted with."""
    fields = dict(plan.schedule["tiling"])
    return GpuTiling(**{**fields, "barriers": tuple(fields["barriers"])})


def step_bytes(plan: Plan, position: int) -> int:
    """Bytes that a step at `position` must read: weights (but an embedding that is no head), keys
    and values.
    """
    m, layout = plan.model, plan.layout
    apart = any(x.name == "head" for x in layout.matrices)
    weights = layout.total_bytes - (layout.matrices[0].nbytes if apart else 0)
    return int(weights + 4 * plan.batch * m["layers"] * m["kv_heads"] * m["head_dim"] * position)
