"""`obelisk build`: source, binaries and what they use of the machine, with or without the device.

Takes graphs and a target; writes a folder per lowering and gives a `BuildRow` per kernel. It
promises that what cannot be made is a row that names the limit, that equal texts are compiled once,
and that what the compiler reports is compared with what was planned.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from obelisk.app.backends import Lowering, backend_of
from obelisk.app.request import restricted
from obelisk.base.errors import BuildFailed, Infeasible, UserError
from obelisk.base.progress import Progress, Silent
from obelisk.base.settings import settings
from obelisk.build.cuda import Cubin
from obelisk.build.device import module_json
from obelisk.ir import Graph
from obelisk.ir.text import to_text
from obelisk.lower.cuda import CudaKernel, CudaModule
from obelisk.machine import Machine, MachineKind, find

SCHEMA = 1
TABLE = "resources.json"


@dataclass(frozen=True, slots=True)
class BuildRow:
    """One kernel of one lowering, or why there is none.

    Attributes:
        graph, choice: which graph of the input, and which lowering of it, in words.
        folder: where it lies, below the output folder.
        kernel, launches: its number in the lowering, and how often a call launches it.
        blocks, threads, cluster: of a launch.
        registers, stack, spills: registers of a thread, bytes of its stack, and bytes that it
            spills (stores and loads).
        static_shared, shared: bytes of shared memory: what the compiler placed, what was planned.
        status: ok, over the limit, infeasible or failed; `reason` says what.
    """

    graph: int
    choice: str
    folder: str
    status: str
    reason: str = ""
    kernel: int = 0
    launches: int = 0
    blocks: int = 0
    threads: int = 0
    cluster: int = 1
    registers: int = 0
    stack: int = 0
    spills: int = 0
    static_shared: int = 0
    shared: int = 0


def cuda_target(name: str) -> Machine:
    """The machine called `name`; raises `UserError` where it is none that cubins are built for."""
    machine = find(name)
    if machine.kind is not MachineKind.CUDA:
        raise UserError(
            f"--target {name}: cubins are built for CUDA devices (sm_80, sm_86, sm_89, sm_90a, "
            "sm_100a, sm_120); for this machine's cores use `obelisk optimize --save`"
        )
    return machine


def build_graphs(
    graphs: Sequence[Graph],
    machine: Machine,
    folder: Path,
    *,
    every: bool = False,
    without: Sequence[str] = (),
    progress: Progress | None = None,
) -> list[BuildRow]:
    """Lower and compile graphs for a CUDA machine, and write everything under `folder`.

    `every` makes all lowering choices, else only the default one of each graph; `without` leaves
    decisions out. Raises `UserError` where the folder cannot be written, `MissingDependency`
    without a compiler.
    """
    backend = backend_of("cuda-c")
    compiler = backend.toolchain()
    restricted(backend, (), without)
    progress = progress or Silent()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror}") from error
    rows: list[BuildRow] = []
    made: list[tuple[int, str, Lowering, Any]] = []
    with ThreadPoolExecutor(settings().threads, "obelisk-build") as pool:
        build = backend.builder(machine, pool)
        known: set[str] = set()
        for number, graph in enumerate(graphs):
            try:
                options = restricted(backend, backend.options(graph, machine), without)
                for choice in options if every else options[:1]:
                    lowering = backend.lower(graph, machine, choice)
                    if lowering.digest not in known:
                        known.add(lowering.digest)
                        made.append((number, lowering.label, lowering, build(lowering)))
            except Infeasible as error:
                rows.append(BuildRow(number, "", "", "infeasible", str(error)))
        counts: dict[int, int] = {}
        for done, (number, label, lowering, future) in enumerate(made):
            progress.update("build", {"done": done, "of": len(made)})
            name = f"{number:02d}-{counts.setdefault(number, 0):02d}"
            counts[number] += 1
            try:
                cubins = future.result().cubins
            except BuildFailed as error:
                rows.append(BuildRow(number, label, name, "failed", f"{error} ({error.log})"))
                continue
            _write(folder / name, lowering, cubins)
            rows += _rows(number, label, name, lowering.module, cubins, machine)
    rows.sort(key=lambda r: (r.graph, r.folder, r.kernel))
    data = {
        "schema": SCHEMA,
        "machine": machine.name,
        "arch": machine.arch,
        "compiler": compiler,
        "kernels": [asdict(r) for r in rows],
    }
    (folder / TABLE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return rows


def _write(folder: Path, lowering: Lowering, cubins: Sequence[Cubin]) -> None:
    """The graph, the launches, and each kernel's text and cubin."""
    module: CudaModule = lowering.module
    folder.mkdir(exist_ok=True)
    (folder / "graph.txt").write_text(to_text(lowering.graph), encoding="utf-8")
    text = json.dumps(module_json(module), indent=1, sort_keys=True) + "\n"
    (folder / "module.json").write_text(text, encoding="utf-8")
    for i, (kernel, cubin) in enumerate(zip(module.kernels, cubins, strict=True)):
        (folder / f"kernel{i}.cu").write_text(kernel.source, encoding="utf-8")
        (folder / f"kernel{i}.cubin").write_bytes(cubin.path.read_bytes())


def _rows(
    number: int,
    label: str,
    name: str,
    module: CudaModule,
    cubins: Sequence[Cubin],
    machine: Machine,
) -> Iterator[BuildRow]:
    for i, (kernel, cubin) in enumerate(zip(module.kernels, cubins, strict=True)):
        used = cubin.resources
        over = exceeded(kernel, cubin, machine)
        yield BuildRow(
            number, label, name, "over the limit" if over else "ok", over,
            kernel=i,
            launches=sum(x.kernel == i for x in module.launches),
            blocks=kernel.blocks,
            threads=kernel.threads,
            cluster=kernel.cluster,
            registers=used.registers,
            stack=used.stack,
            spills=used.spill_stores + used.spill_loads,
            static_shared=used.shared,
            shared=kernel.shared,
        )  # fmt: skip


def exceeded(kernel: CudaKernel, cubin: Cubin, machine: Machine) -> str:
    """Which limit of the machine a kernel breaks by the compiler's own figures; empty for none."""
    used = cubin.resources
    if used.shared + kernel.shared > machine.shared_bytes:
        return f"{used.shared + kernel.shared} bytes of shared memory, {machine.shared_bytes} fit"
    if used.registers * kernel.threads > machine.registers:
        return f"{used.registers * kernel.threads} registers, an SM has {machine.registers}"
    if kernel.threads > machine.threads_per_block:
        return f"{kernel.threads} threads, a block has at most {machine.threads_per_block}"
    return ""
