"""The pipeline of passes, each of which can be looked at by itself.

Takes a model, a workload, a `GpuTiling` and a `Fusion`; gives modules (`run`, `stages`) and the
`GpuSchedule` that the last one stands for (`schedule_of`). Equal arguments give equal text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from xdsl.dialects.builtin import ModuleOp

from obelisk.base.errors import UnknownName
from obelisk.schedule.gpu import GpuTiling, shared_plan
from obelisk.schedule.gpu_choice import EMITTED, Fusion
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.schedule.gpu_types import GpuSchedule
from obelisk.schedule.ir import memory, micro, passes
from obelisk.schedule.ir.build import operators_module
from obelisk.schedule.ir.dialects import print_module, verify_module
from obelisk.schedule.ir.lower import lower

REGISTERS = 168  # of a consumer thread, where nobody says otherwise


@dataclass(frozen=True, slots=True)
class Setting:
    """What the passes work from."""

    step: GpuStep
    fusion: Fusion = EMITTED
    registers: int = REGISTERS

    @property
    def tiling(self) -> GpuTiling:
        """The cut."""
        return self.step.tiling


def _pages(module: ModuleOp, s: Setting) -> None:
    step = s.step
    plan = shared_plan(step.model, step.work, step.tiling)
    memory.assign_pages(module, step, plan)


Pass = Callable[[ModuleOp, Setting], None]
PASSES: Mapping[str, Pass] = MappingProxyType({
    "split": lambda m, s: passes.split(m, s.tiling),
    "fuse": lambda m, s: passes.fuse(m, s.fusion),
    "tile": lambda m, s: passes.tile(m, s.tiling, s.step.batch),
    "micro": lambda m, s: micro.expand(m, s.step),
    "order": lambda m, s: micro.order(m, s.registers),
    "pages": _pages,
    "sync": lambda m, s: memory.insert_sync(m, s.tiling),
})  # fmt: skip
STAGES = ("operators", *PASSES)


def run(setting: Setting, until: str = STAGES[-1], skip: tuple[str, ...] = ()) -> ModuleOp:
    """The module after the pass `until` ("operators": before the first). Verified after each pass.

    Raises `UnknownName` for a pass that there is not.
    """
    if until not in STAGES:
        raise UnknownName(f"no pass {until!r}: known are {', '.join(STAGES)}")
    module = operators_module(setting.step.model, setting.tiling.kv_pieces)
    verify_module(module)
    for name in STAGES[1 : STAGES.index(until) + 1]:
        if name not in skip:
            PASSES[name](module, setting)
    verify_module(module)
    return module


def text_after(setting: Setting, until: str) -> str:
    """The text form of the module after a pass."""
    return print_module(run(setting, until))


def schedule_of(setting: Setting) -> GpuSchedule:
    """The schedule that the pipeline ends with (micro-operations change nothing in it)."""
    return lower(run(setting, skip=("micro", "order")), setting.step)
