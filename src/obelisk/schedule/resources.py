"""The resource model in three dimensions: machine, model, workload.

Takes a `StepShape` and a `Machine`; gives `Resources`: what a stage of weights takes, how many
stages fit, what must be resident, and the limit that is exceeded, if one is. A CPU keeps the input
rows and panels of a product in the core's second cache; on a GPU (`gpu_stages`) they share the
memory of a block, where splitting a tile along K halves a stage and doubles how many fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from obelisk.machine import Machine, MachineKind
from obelisk.tasks.dag import layer_operators
from obelisk.tasks.kinds import TABLE, TaskKind
from obelisk.tasks.shape import StepShape
from obelisk.tasks.weights import head_block, weight_layout

KIB = 1024


@dataclass(frozen=True, slots=True)
class Resources:
    """What a tiling needs.

    Attributes:
        weight_bytes, cache_bytes: resident in memory.
        step_bytes: what one step reads at the full context.
        footprint: bytes of the hungriest task, and which kind that is.
        limit: the name of the limit that is exceeded ("" when none is).
        refusal: the limit in words, or None.
    """

    weight_bytes: int
    cache_bytes: int
    step_bytes: int
    footprint: int
    hungriest: TaskKind
    limit: str = ""
    refusal: str | None = None


def resources(s: StepShape, machine: Machine, memory: int | None = None) -> Resources:
    """The needs of a step; `memory` is the machine's free memory in bytes (default: asked)."""
    layout = weight_layout(s)
    m = s.model
    cache = 8 * m.layers * s.batch * m.kv_heads * s.work.context * m.head_dim
    tasks = [op.tasks[0] for op in layer_operators(s, 0)]
    sizes = [(TABLE[t.kind].footprint(s, t), t.kind) for t in tasks]
    largest, kind = max(sizes, key=lambda x: x[0])
    embed = next(x for x in layout.matrices if x.name == "embed")
    unread = 0 if head_block(m, s.work) is None else embed.nbytes
    step = layout.total_bytes - unread + cache
    limit, refusal = "", None
    near = machine.cache(2) or machine.caches[-1]
    room = machine.last_cache // max(1, machine.cores)
    allowed = max(near.size, room)
    free = psutil.virtual_memory().available if memory is None else memory
    if machine.kind is not MachineKind.CPU:
        limit, refusal = "target", f"{machine.name} is no CPU: this resource table is for CPUs"
    elif largest > allowed:
        limit = "cache"
        refusal = (
            f"a task of {kind} keeps {largest} bytes close, a core of {machine.name} has {allowed}"
        )
    elif layout.total_bytes + cache > free:
        limit = "memory"
        refusal = (
            f"weights take {layout.total_bytes} bytes and the cache {cache}, {free} are free: use "
            "a narrower weight format, a smaller batch or a shorter context"
        )
    elif s.tiling.fuse_rope and m.kv_heads < s.tiling.cores and m.kv_heads * s.batch == 1:
        limit, refusal = "parallelism", "one head group cannot feed more than one core"
    return Resources(layout.total_bytes, cache, step, largest, kind, limit, refusal)


@dataclass(frozen=True, slots=True)
class Stages:
    """A ring of weight stages in a block's shared memory.

    Attributes:
        split: how many parts of K a tile is loaded in.
        stage_bytes: one stage.
        count: stages that fit beside the activations.
        peak_bytes: activations and two stages: the least that keeps copying while computing.
    """

    split: int
    stage_bytes: int
    count: int
    peak_bytes: int


def gpu_stages(s: StepShape, machine: Machine, rows: int, split: int) -> Stages:
    """Stages of a (rows x hidden) tile cut into `split` parts along K, on a CUDA machine.

    The input rows stay in shared memory as fp32 while their product runs.
    """
    cols = -(-s.model.hidden // split)
    stage = int(rows * cols * s.work.weight_bytes)
    held = 4 * s.batch * s.hidden_padded
    room = machine.shared_bytes - held
    return Stages(split, stage, max(0, room // stage), held + 2 * stage)
