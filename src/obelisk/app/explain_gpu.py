"""What a GPU megakernel would take, what was pruned and by which limit: `synth --explain` for GPUs.

Takes a model's configuration, a workload and a machine; gives an `Explained` and prints it. Needs
neither weights nor a device nor a compiler: `config.json` is enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from obelisk.app.display import rows_table
from obelisk.app.report import show_bytes, show_us
from obelisk.base.errors import UnknownName
from obelisk.base.progress import Progress
from obelisk.machine import Machine
from obelisk.runtime import Span, trace_events
from obelisk.schedule.gpu_resources import (
    ReuseRow,
    StageRow,
    register_shares,
    reuse_rows,
    stage_rows,
)
from obelisk.schedule.gpu_search import GpuAccount, GpuChoice, micro_costs, search_gpu
from obelisk.schedule.gpu_simulate import simulated_spans
from obelisk.schedule.gpu_tasks import GpuStep
from obelisk.tasks import ModelConfig, Workload

SHOWN = 8


@dataclass(frozen=True, slots=True)
class Explained:
    """What `--explain` says of a GPU."""

    model: ModelConfig
    work: Workload
    machine: Machine
    choices: tuple[GpuChoice, ...]
    account: GpuAccount
    stages: tuple[StageRow, ...]
    reused: tuple[ReuseRow, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "machine": self.machine.name,
            "choices": [
                {
                    "tiling": c.tiling.to_json(), "predicted_seconds": c.timeline.seconds,
                    "shared_bytes": c.fit.shared.total, "phases": dict(c.timeline.phases),
                    "registers": [c.fit.consumer_registers, c.fit.loader_registers],
                }
                for c in self.choices
            ],
            "tried": self.account.tried,
            "pruned": dict(self.account.pruned),
            "examples": list(self.account.examples),
            "simulated": self.account.simulated,
            "stages": [
                [r.matrix, r.split, r.stage, r.stages, r.peak, r.fits] for r in self.stages
            ],
            "reused": [[list(r.users), r.size, r.apart] for r in self.reused],
        }  # fmt: skip


def explain_gpu(
    model: ModelConfig,
    work: Workload,
    machine: Machine,
    *,
    blocks: int | None = None,
    seconds: float | None = None,
    checkpoint: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Explained:
    """Search schedules and collect what decided. Raises what `search_gpu` raises."""
    from obelisk.schedule.ir import Setting, schedule_of

    choices, account = search_gpu(
        model, work, machine, blocks=blocks, keep=SHOWN, judged=1, seconds=seconds,
        checkpoint=checkpoint, resume=resume, progress=progress,
    )  # fmt: skip
    two = replace(model, layers=min(2, model.layers))
    pages = schedule_of(Setting(GpuStep(two, work, choices[0].tiling))).pages.shared
    reused = reuse_rows(tuple((n, p.offset, p.size) for n, p in pages))
    return Explained(
        model, work, machine, tuple(choices), account, tuple(stage_rows(model, work, machine)),
        tuple(reused),
    )  # fmt: skip


def predicted_timeline(
    model: ModelConfig, work: Workload, choice: GpuChoice, machine: Machine
) -> dict[str, Any]:
    """The simulated step of a choice in the trace-event format, a track for each block: beside the
    one that `generate --timeline` writes from the kernel's own clocks.
    """
    step = GpuStep(model, work, choice.tiling)
    micro = micro_costs(step, choice.fit.consumer_registers)
    spans = simulated_spans(step, machine, micro=micro)
    return trace_events(Span(s.block, s.kind, s.layer, s.start, s.end) for s in spans)


def require_pass(name: str | None) -> None:
    """Raise `UnknownName` for a pass there is not."""
    from obelisk.schedule.ir import STAGES

    if name is not None and name not in STAGES:
        raise UnknownName(f"no pass {name!r}: known are {', '.join(STAGES)}")


def text_of_pass(
    model: ModelConfig, work: Workload, choice: GpuChoice, machine: Machine, name: str
) -> str:
    """The module of a choice after a pass, as text. Raises `UnknownName` for a pass there is
    not.
    """
    from obelisk.schedule.ir import Setting, text_after

    registers = register_shares(choice.tiling, machine)[0]
    step = GpuStep(model, work, choice.tiling)
    return text_after(Setting(step, choice.fusion, registers), name)


def _stage_table(rows: tuple[StageRow, ...], console: Console) -> None:
    table = [
        (r.matrix, str(r.split), show_bytes(r.stage), str(r.stages), show_bytes(r.peak),
         "fits" if r.fits else "does not fit")
        for r in rows
    ]  # fmt: skip
    head = (
        "a tile's stage",
        "parts of K",
        "bytes",
        "stages that fit",
        "peak (inputs, 2 stages)",
        "",
    )
    console.print(rows_table(head, table, left=1))


def print_explained(e: Explained, console: Console) -> None:
    """What fits, what was pruned and which limit did it."""
    best, machine = e.choices[0], e.machine
    need, plan = best.fit, best.fit.shared
    own = f" (head {e.work.head_form})" if e.work.own_head else ""
    console.print(
        f"weights {show_bytes(need.weight_bytes)}{own}, "
        f"key-value cache {show_bytes(need.cache_bytes)}, "
        f"words between blocks {show_bytes(need.word_bytes)}; a step reads "
        f"{show_bytes(need.step_bytes)} at the full context",
        soft_wrap=True,
    )
    console.print(
        f"a block of {machine.name} ({machine.arch}): {show_bytes(machine.shared_bytes)} of shared "
        f"memory, of which inputs {show_bytes(plan.inputs)}, sums {show_bytes(plan.sums)}, "
        f"residual {show_bytes(plan.residual)}, ring {show_bytes(plan.ring)}, the rest "
        f"{show_bytes(plan.misc)}; registers of a thread: consumers {need.consumer_registers}, "
        f"loader {need.loader_registers}; {need.resident} blocks resident at a time, "
        f"{best.tiling.blocks} in use",
        soft_wrap=True,
    )
    rows = [
        (str(c), show_bytes(c.fit.shared.total), f"{100 * (c.timeline.imbalance - 1):.1f}%",
         show_us(c.timeline.layer * 1e6), show_us(c.timeline.seconds * 1e6))
        for c in e.choices
    ]  # fmt: skip
    console.print(
        rows_table(("schedule", "shared", "uneven", "a layer", "predicted"), rows, left=1)
    )
    spans = ", ".join(f"{n} {show_us(s * 1e6)}" for n, s in best.timeline.phases)
    console.print(f"predicted for the first one's phases: {spans}", soft_wrap=True)
    _stage_table(e.stages, console)
    for row in e.reused:
        console.print(
            f"one page of {show_bytes(row.size)} for {', '.join(row.users)} (apart they would take "
            f"{show_bytes(row.apart)})",
            soft_wrap=True,
        )
    a = e.account
    cut = ", ".join(f"{n} by {limit}" for limit, n in a.pruned) or "none"
    console.print(
        f"{a.tried} cuts: {a.fitting} fit, {a.simulated} simulated"
        + (f" ({a.resumed} of them before)" if a.resumed else "")
        + f", in {a.seconds:.1f} s; pruned: {cut}",
        soft_wrap=True,
    )
    for example in a.examples:
        console.print(Text(f"  {example}"), soft_wrap=True)
    for name, seconds in a.unemitted:
        console.print(f"  {name}, with default sizes: {show_us(seconds * 1e6)} predicted")
    if not a.finished:
        console.print("  out of time: better cuts may be left")
